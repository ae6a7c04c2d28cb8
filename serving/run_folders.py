"""Folders of one run of a process: gone at its end, or, where it was killed, at the start of the next one.

Who holds a folder has a lock on a file in it, which the kernel takes back from a process that dies, however it does. Numbers of
processes would not do: they are given anew, and mean something else in a container that shares the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARK = ".held"
"""The file that is locked. A folder without it is none of ours."""

REMOVAL_SECONDS = 0.2
"""How long a folder is tried for that is locked: who looks whether it was left behind has it for a moment."""

_AGAIN_SECONDS = 0.005


class FolderHeld(RuntimeError):
    """Another process holds the folder."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Hold a folder, which stays afterwards; it is made, for this user alone, where it is not there.

    Raises:
        FolderHeld: If another process holds it.
        OSError: If it cannot be made or written to.
    """
    descriptor = _hold(folder)
    try:
        yield folder
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[Path]:
    """As :func:`held`, but the folder goes with the context, whatever is in it."""
    with held(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def temporary(prefix: str, root: Path) -> Iterator[Path]:
    """Make a folder with a new name that goes with the context; those that killed processes have left of this prefix go first.

    Args:
        prefix: Beginning of its name.
        root: The folder that it is made in.

    Raises:
        OSError: If it cannot be made.
    """
    for left in root.glob(f"{prefix}*"):
        remove_unheld(left)
    with owned(Path(tempfile.mkdtemp(prefix=prefix, dir=root))) as folder:
        yield folder


def make(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone; also while others remove them.

    Raises:
        OSError: If it cannot be made.
    """
    for each in (*reversed(folder.parents), folder):
        try:
            if not each.is_dir():
                each.mkdir(mode=0o700)
        except FileNotFoundError:  # the one above was removed meanwhile
            make(folder)
        except FileExistsError:
            if not each.is_dir():
                with contextlib.suppress(FileNotFoundError):
                    if not stat.S_ISDIR(each.lstat().st_mode):
                        raise
                make(folder)


def remove_unheld(folder: Path) -> bool:
    """Remove a folder that was held by a process of this user and is held by none; whether it was one."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid() or not _lock(descriptor):
            return False
        shutil.rmtree(folder, ignore_errors=True)  # under the lock: who would hold it now, makes it anew
        return True
    finally:
        os.close(descriptor)


def _hold(folder: Path) -> int:
    """Return the descriptor of a folder's mark, locked."""
    end = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            make(folder)
            descriptor = os.open(folder / MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # removed meanwhile
            continue
        if not _lock(descriptor):
            os.close(descriptor)
            if time.monotonic() < end:
                time.sleep(_AGAIN_SECONDS)
                continue
            raise FolderHeld(f"{folder}: another process holds this folder")
        try:
            if os.path.samestat(os.stat(folder / MARK), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
