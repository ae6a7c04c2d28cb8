"""Where `cachepilot serve` leaves what its replicas warned of, for who comes after it has ended: a bounded number of runs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from serving.run_folders import MARK, held, remove_unheld

RUNS = 20
"""Runs whose logs are kept, this one among them."""

MOST_BYTES = 256 << 20
"""Bytes that the logs of earlier runs may have together."""


def logs_root() -> Path:
    """Return the folder of the logs of all runs of this user: below ``$XDG_STATE_HOME``, by default ``~/.local/state``.

    Raises:
        RuntimeError: If this user has no home, and the variable names no folder.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()) / "cachepilot" / "logs"


@contextlib.contextmanager
def kept_logs(namespace: str) -> Iterator[Path | None]:
    """Make the folder of a run's logs, which stays if logs are in it, and remove those of old runs; None where it cannot be made.

    Runs that go on keep theirs, whatever their number.

    Args:
        namespace: Whose run it is.
    """
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        with contextlib.suppress(OSError, RuntimeError):  # a user may have no home, or one that cannot be written to
            root = logs_root()
            name = time.strftime(f"{namespace}-%Y%m%d-%H%M%S-{os.getpid()}")
            folder = stack.enter_context(held(root / name))
            _remove_old(root, but=folder)
        try:
            yield folder
        finally:
            stack.close()
            if folder is not None and not any(folder.glob("*.log")):  # it did not come to replicas
                remove_unheld(folder)


def why_not() -> str:
    """Say why :func:`kept_logs` gave no folder."""
    try:
        return f"{logs_root()} cannot be written to"
    except RuntimeError:
        return "this user has no home, and XDG_STATE_HOME names no folder"


def _remove_old(root: Path, *, but: Path) -> None:
    """Remove all but the latest runs, by number and by bytes."""
    earlier = [(*_measured(mark.parent), mark.parent) for mark in root.glob(f"*/{MARK}") if mark.parent != but]
    total = 0
    for number, (_, size, folder) in enumerate(sorted(earlier, reverse=True), 1):
        total += size
        if number >= RUNS or total > MOST_BYTES:
            remove_unheld(folder)


def _measured(folder: Path) -> tuple[float, int]:
    """Return when a file in the folder was last written to, and the bytes of all."""
    latest, total = 0.0, 0
    with contextlib.suppress(OSError):  # another process removes it
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                found = file.lstat()
                latest, total = max(latest, found.st_mtime), total + found.st_size
    return latest, total
