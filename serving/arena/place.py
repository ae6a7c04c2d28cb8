"""Where the file of an arena is: whose directory, which file system, in pages of which size."""

from __future__ import annotations

import logging
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from serving.arena.layout import ArenaError

_MOUNTS = Path("/proc/self/mountinfo")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that an arena can be in.

    Attributes:
        directory: Its path.
        page: Bytes of which the file's size has to be a multiple.
        huge: Whether it is a hugetlbfs: its pages are set aside by the administrator, and there is no writing but by mapping.
    """

    directory: Path
    page: int
    huge: bool

    @classmethod
    def of(cls, path: str, mounts: Path = _MOUNTS) -> Place:
        """Return the place of the file of that path.

        Args:
            path: Of the file, which need not be there.
            mounts: The kernel's table of mounted file systems; without it every file system counts as one of ordinary pages.

        Raises:
            ArenaError: If the directory is not there, or is another user's, who could put another file in the arena's place.
        """
        directory = Path(path).parent
        try:
            found = directory.stat()
        except OSError as error:
            raise ArenaError(
                f"arena {path}: its directory cannot be looked at ({error.strerror}); make it, or set another path"
            ) from error
        if found.st_uid not in (0, os.geteuid()):
            raise ArenaError(
                f"arena {path}: expected a directory of user {os.geteuid()} or root, found one of user {found.st_uid}, who could "
                "put another file in the arena's place; set a path elsewhere"
            )
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            # Where memory is mounted into containers it is often so. Files of others are not believed in any case.
            _log.warning(
                "arena %s: all users may remove files of its directory (mode %04o); set the sticky bit if there are others than "
                "user %d", path, stat.S_IMODE(found.st_mode), os.geteuid(),
            )  # fmt: skip
        huge = _file_system(found.st_dev, mounts) == "hugetlbfs"
        return cls(directory, os.statvfs(directory).f_bsize if huge else mmap.PAGESIZE, huge)

    def room(self) -> str:
        """Return in words what is free here, and what to do for more."""
        if self.huge:
            pages = Path(f"/sys/kernel/mm/hugepages/hugepages-{self.page // 1024}kB/free_hugepages")
            free = pages.read_text().strip() if pages.is_file() else "an unknown number"
            return f"{free} free huge pages of {self.page} bytes; make it smaller, or set more aside in /proc/sys/vm/nr_hugepages"
        free_here = os.statvfs(self.directory)
        return f"{free_here.f_bavail * free_here.f_frsize} bytes free; make it smaller, or mount a larger file system"


def _file_system(device: int, mounts: Path) -> str:
    """Return the type of the file system with that device number; nothing where the kernel does not tell."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mounted, _, source = line.partition(" - ")
        if mounted.split(" ")[2] == number:
            return source.split(" ")[0]
    return ""
