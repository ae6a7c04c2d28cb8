"""What ``ray job submit --working-dir`` would upload, counted before it does: ``python -m experiments.packaging [DIR]``.

Ray zips a working directory without compression and refuses more than a few hundred megabytes, after having packed it. This walks
the directory with Ray's own rules (``.gitignore``, ``.rayignore`` and its defaults) and names what is too large.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private import ray_constants
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes
from rich.console import Console

from agents.words import size_words

LIMIT = 100_000_000
"""Most bytes that a package may have."""

LARGEST = 10
"""Files that are named when it has more."""


class PackageTooLarge(ValueError):
    """A working directory that must not be uploaded; the text names its largest files."""


@dataclass(frozen=True)
class Package:
    """What would be uploaded.

    Attributes:
        files: Bytes by path, relative to the directory.
    """

    files: dict[Path, int]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(self.files.values())

    def largest(self, count: int) -> list[tuple[Path, int]]:
        """Return the largest files, largest first."""
        return sorted(self.files.items(), key=lambda item: (-item[1], item[0]))[:count]


def measure(directory: Path) -> Package:
    """Count what Ray would upload of a directory.

    Raises:
        ValueError: If it is no directory.
    """
    if not directory.is_dir():
        raise ValueError(f"package {directory}: expected a directory")
    root = directory.absolute()
    files: dict[Path, int] = {}

    def count(path: Path) -> None:
        if path.is_file():
            files[path.relative_to(root)] = path.stat().st_size

    _dir_travel(
        root,
        [_get_excludes(root, ray_constants.get_runtime_env_default_excludes())],
        count,
        include_gitignore=os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1",
        logger=logging.getLogger(__name__),
    )
    return Package(files)


def check(directory: Path, limit: int = LIMIT) -> Package:
    """Count what Ray would upload of a directory, and refuse too much.

    Raises:
        PackageTooLarge: If it has more bytes than the limit.
        ValueError: If it is no directory.
    """
    package = measure(directory)
    if package.size > limit:
        named = ", ".join(f"{path.as_posix()} {size_words(size)}" for path, size in package.largest(LARGEST))
        raise PackageTooLarge(
            f"package {directory}: expected at most {size_words(limit)}, got {size_words(package.size)} in "
            f"{len(package.files):,} files; the largest: {named}. Name what a job does not need in .rayignore."
        )
    return package


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.packaging", description="Check what ray job submit would upload of a directory."
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path())
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"most bytes; default {LIMIT:,}")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        package = check(options.directory, options.limit)
    except PackageTooLarge as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    path, size = package.largest(1)[0] if package.files else (Path(), 0)
    sys.stdout.write(
        f"{size_words(package.size)} in {len(package.files):,} files; the largest: {path.as_posix()} {size_words(size)}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
