"""The file of an arena: made at once or not at all, readable by its owner alone, mapped by every process that uses it."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import mmap
import os
import secrets
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from serving.arena.layout import H_RESERVED, H_SUM, H_TOP, UNIT, VERSION, ArenaError, Geometry, Words
from serving.arena.place import Place

STEP = 1 << 20
"""Bytes for which memory is reserved at a time: a file that has none where it is written to ends the process."""

_ATTEMPTS = 220
"""About ten seconds, far more than making the largest takes."""

_MADE = "being-made"
_USERS = struct.Struct("hhqqi4x")  # struct flock
_POPULATE_READ = 22  # MADV_POPULATE_READ, which the standard library has no name for
_log = logging.getLogger(__name__)


class Mapping:
    """An opened arena.

    Attributes:
        path: Of the file.
        geometry: Where its parts are.
        words: All of it, shape (bytes / 8,).
        descriptor: Of the file; its ``flock`` is the right to write.

    Args:
        path: The file; it is made if it is not there. In ``/dev/shm``, a tmpfs mounted with ``huge=always``, a hugetlbfs, all of
            whose pages are taken at once, or the file system of a DAX device, mounted with ``dax``. Not a device itself.
        size: Bytes of a file that is made. An existing one of another size is replaced, unless others use it.
        entry_bytes: What entries are expected to have on average; sets the number of buckets of a file that is made.

    Raises:
        ArenaError: If it cannot be opened or made, is of another layout, or not this user's alone.
    """

    def __init__(self, path: str | Path, size: int, *, entry_bytes: int = 1024) -> None:
        self.path = str(path)
        self._place = Place.of(self.path)
        planned = Geometry.plan(size, entry_bytes, secrets.randbits(62) | 1, self._place.page)
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(min(0.001 * attempt, 0.05))  # another process is about to replace it
            try:
                opened = self._opened(planned)
            except OSError as error:
                raise ArenaError(
                    f"arena {self.path}: cannot be opened ({error.strerror}); expected a file system with locks and shared "
                    "mappings; set another path"
                ) from error
            if opened is not None:
                self.descriptor, self.geometry, self._map = opened
                self.words: Words = np.frombuffer(self._map, np.int64)
                return
        raise ArenaError(f"arena {self.path}: it was replaced each time it was opened; does another program use the path?")

    def reserve(self) -> bool:
        """Reserve memory for the next part of the file; whether there was some. Under the lease."""
        begin = self._reserved() * UNIT
        count = min(STEP, self.geometry.bytes - begin)
        if count <= 0:
            return False
        try:
            os.posix_fallocate(self.descriptor, begin, count)
        except OSError as error:
            # Whatever the reason: amid a write nothing may be raised, and what has no memory must not be used.
            _log.debug("arena %s: no memory for %d more bytes (%s)", self.path, count, error)
            return False
        self.words[H_RESERVED] = (begin + count) // UNIT
        return True

    def others(self) -> bool:
        """Whether there are other users of the file."""
        found = fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, _USERS.pack(fcntl.F_WRLCK, os.SEEK_SET, VERSION, 1, 0))
        return bool(_USERS.unpack(found)[0] != fcntl.F_UNLCK)

    def bring_in(self) -> None:
        """Map all that has memory at once, which is many times faster than page by page."""
        with suppress(OSError):  # kernels before 5.14 do not have it
            self._map.madvise(_POPULATE_READ, 0, self._reserved() * UNIT // mmap.PAGESIZE * mmap.PAGESIZE)

    def _reserved(self) -> int:
        """Return how many units have memory, as far as what the file says can be."""
        return min(max(int(self.words[H_RESERVED]), self.geometry.values), self.geometry.units)

    def close(self) -> None:
        """Unmap it; the file stays, with all that is in it."""
        self.words = np.zeros(0, np.int64)
        with suppress(BufferError):  # somebody still has the words: unmapped when they are gone
            self._map.close()
        os.close(self.descriptor)

    def _opened(self, planned: Geometry) -> tuple[int, Geometry, mmap.mmap] | None:
        """Open and map the file, made or replaced before where that has to be; None: others do so now."""
        descriptor = self._open()
        if descriptor is None:
            self._make(planned)
            descriptor = self._open()
            if descriptor is None:
                return None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            self._check_owner(found)
            kept = self._geometry(descriptor, found.st_size)
            same = (kept.bytes, kept.buckets) == (planned.bytes, planned.buckets)
            if not same and _lock(descriptor, fcntl.F_WRLCK):
                if self._is(found) and self._place.huge:
                    os.unlink(self.path)  # there may not be pages for both
                elif self._is(found):
                    self._make(planned, over=True)
                return None
            if not _lock(descriptor, fcntl.F_RDLCK) or not self._is(found):
                return None
            if not same:
                _log.warning("arena %s: others use it with %d bytes; so does this one", self.path, kept.bytes)
            mapped = self._mapped(descriptor, kept)
            stack.pop_all()
            return descriptor, kept, mapped

    def _open(self) -> int | None:
        try:
            return os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArenaError(
                f"arena {self.path}: cannot be opened ({error.strerror}); expected a file of this user, or none: remove it, "
                "or set another path"
            ) from error

    def _mapped(self, descriptor: int, kept: Geometry) -> mmap.mmap:
        try:
            return mmap.mmap(descriptor, kept.bytes)
        except OSError as error:
            raise ArenaError(
                f"arena {self.path}: {kept.bytes} bytes cannot be mapped ({error.strerror}): found {self._place.room()}; is this "
                "process's address space limited (ulimit -v)?"
            ) from error

    def _check_owner(self, found: os.stat_result) -> None:
        if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            raise ArenaError(
                f"arena {self.path}: expected a file, found a device, which can neither grow nor be replaced; make a file system "
                "on it (ndctl create-namespace -m fsdax, mkfs, mount -o dax) and set the path of a file there"
            )
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ArenaError(
                f"arena {self.path}: expected a regular file of user {os.geteuid()} with mode 0600, found one of user "
                f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}: others could read or forge answers; remove it, or "
                "set another path"
            )

    def _geometry(self, descriptor: int, size: int) -> Geometry:
        head = os.pread(descriptor, 8 * (H_SUM + 1), 0)
        return Geometry.read(np.frombuffer(head.ljust(8 * (H_SUM + 1), b"\0"), np.int64), self.path, size)

    def _is(self, found: os.stat_result) -> bool:
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino)

    def _make(self, planned: Geometry, *, over: bool = False) -> None:
        """Make the file beside its place and move it there whole."""
        scratch = f"{self.path}.{secrets.token_hex(8)}.{_MADE}"
        self._tidy()
        # Huge pages are there for this alone; what would be found missing later ends the process that needs it.
        reserved = planned.units if self._place.huge else planned.values
        try:
            descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArenaError(
                f"arena {self.path}: cannot be made ({error.strerror}); set a path that can be written to"
            ) from error
        try:
            _lock(descriptor, fcntl.F_WRLCK)
            os.ftruncate(descriptor, planned.bytes)
            os.posix_fallocate(descriptor, 0, reserved * UNIT)
            with mmap.mmap(descriptor, planned.bytes) as whole:
                for word, value in ((H_TOP, planned.values), (H_RESERVED, reserved)):
                    whole[word * 8 : word * 8 + 8] = value.to_bytes(8, "little")
                header = planned.header().tobytes()
                whole[: len(header)] = header
            with suppress(FileExistsError, FileNotFoundError):  # another process was faster, or took it for a leftover
                if over:
                    os.rename(scratch, self.path)
                else:
                    os.link(scratch, self.path)
        except OSError as error:
            raise ArenaError(
                f"arena {self.path}: {planned.bytes} bytes cannot be made ({error.strerror}): expected {reserved * UNIT} bytes "
                f"free to begin with, found {self._place.room()}"
            ) from error
        finally:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(scratch)

    def _tidy(self) -> None:
        """Remove what is left of files whose makers were killed."""
        name = Path(self.path).name
        for left in self._place.directory.glob(f"{glob.escape(name)}.*.{_MADE}"):
            with suppress(OSError):
                descriptor = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _lock(descriptor, fcntl.F_WRLCK):
                        left.unlink()
                finally:
                    os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Lock the file as one of its users, or as the only one; whether that was possible. Independent of its ``flock``."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _USERS.pack(kind, os.SEEK_SET, VERSION, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True
