"""Files that a command writes: the old content or the new one, never a half, and a fault that names the file."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path

_DESCRIPTORS = re.compile(r"/dev/fd|/proc/\d+(/task/\d+)?/fd")
"""Folders whose entries stand for what is open already: a shell's redirection, which nothing can be renamed over."""
_LINKS = 40
"""Links that are followed, as the kernel does."""
_REMEDIES = {
    errno.ENOSPC: "free room there or name another file",
    errno.EDQUOT: "free room there or name another file",
    errno.EFBIG: "raise the limit on the size of files or name another file",
    errno.ENOENT: "make its folder or name another file",
    errno.EACCES: "permit writing there or name another file",
    errno.EPERM: "permit writing there or name another file",
}


class OutputError(OSError):
    """A file that could not be written; says which, why, and what to do."""


def write_output(path: Path, data: bytes | str) -> None:
    """Write a file in one step: whoever reads sees the old one or the new one, after a power cut or on a full disk too.

    It is written beside its place and renamed; a link stays one, and the file that it leads to is replaced. What is no file (a
    pipe, a terminal, ``/dev/stdout``) is written to as it is, and so is a file in a folder that nothing can be made in.

    Args:
        path: Where to; its folder is there.
        data: The whole content; text becomes UTF-8.

    Raises:
        OutputError: If it cannot be written; the text names the file, what was wrong and what to do. A file that was there is
            left as it was, unless it could not be replaced.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        if _in_place(path):
            with path.open("wb") as file:
                file.write(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise failed(path, error) from error


def failed(path: Path, error: OSError) -> OutputError:
    """Return the error that tells which file could not be written, why, and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, "name another file")
    told = OutputError(f"{path}: cannot be written: {error.strerror or error}: {remedy}")
    told.errno = error.errno
    return told


def unwritable(path: Path) -> str:
    """Return in words why a file cannot be written, as far as it can be told without writing; empty if it seems that it can."""
    if path.is_dir():
        return "it is a directory"
    target = Path(os.path.realpath(path)) if not path.exists() else path
    if not target.parent.is_dir():
        return f"there is no directory {target.parent}"
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        return "writing there is not permitted"
    return ""


def _in_place(path: Path) -> bool:
    """Whether a file is to be written to where it is, since it is none that could be replaced."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(kind):
        return True
    return _is_descriptor(path) or not os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)


def _is_descriptor(path: Path) -> bool:
    """Whether a path stands for a file that is open already, as ``/dev/stdout`` does."""
    for _ in range(_LINKS):
        folder = os.path.realpath(path.parent)
        if _DESCRIPTORS.fullmatch(folder):
            return True
        if not path.is_symlink():
            return False
        path = Path(folder) / path.readlink()
    return False


def _replace(path: Path, content: bytes) -> None:
    present = path.exists()
    if present and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file may not be written to")
    # Not the whole name: with what is added it could be longer than a name may be.
    partial = path.with_name(f".{path.name[:40]}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if present:
            shutil.copymode(path, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
