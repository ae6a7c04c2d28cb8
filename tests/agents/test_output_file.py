"""An output is written as a whole or not at all, a pipe gets it as it is, and a fault names the file and what to do."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from agents.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from agents.output_file import OutputError, unwritable, write_output

ROOM = 1000


@contextmanager
def little_room() -> Iterator[None]:
    """No file grows beyond :data:`ROOM` bytes: a write stops in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_stops_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    with little_room(), pytest.raises(OutputError) as caught:
        write_output(path, b"x" * (2 * ROOM))
    assert str(caught.value) == (
        f"{path}: cannot be written: File too large: raise the limit on the size of files or name another file"
    )
    assert caught.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_output(path, "néw")
    assert path.read_bytes() == "néw".encode()


def test_a_full_device_is_told_with_what_to_do() -> None:
    with pytest.raises(OutputError, match=r"^/dev/full: cannot be written: No space left on device: free room there or name"):
        write_output(Path("/dev/full"), b"x")


def test_what_cannot_be_written_at_all_is_told(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "Is a directory: name"), (tmp_path / "nowhere" / "x", "No such file or directory: make its")):
        with pytest.raises(OutputError, match=words) as caught:
            write_output(path, b"x")
        assert str(caught.value).startswith(f"{path}: ")


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe, heard = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reading = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reading.start()
    write_output(pipe, b"all of it")
    reading.join(30)
    assert heard == [b"all of it"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("to", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("into", ["pipe", "file"])
def test_standard_output_is_written_to_wherever_it_leads(to: str, into: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agents.output_file import write_output\n"
        f"write_output(Path({to!r}), 'page\\n')"
    )
    path = tmp_path / "redirected"
    with path.open("wb") as file:
        inode = os.fstat(file.fileno()).st_ino
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=file if into == "file" else subprocess.PIPE, check=True, timeout=60
        )
    assert (path.read_bytes() if into == "file" else done.stdout) == b"page\n"
    assert path.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_what_it_leads_to_is_replaced_with_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "kept" / "page.html", tmp_path / "page.html"
    target.parent.mkdir()
    link.symlink_to(target)
    write_output(link, b"first")  # the link led nowhere
    target.chmod(0o640)
    write_output(link, b"second")
    assert link.is_symlink()
    assert target.read_bytes() == b"second"
    assert target.stat().st_mode & 0o777 == 0o640


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    for letter in ("x", "ü"):
        path = tmp_path / (letter * (255 // len(letter.encode())))
        write_output(path, b"content")
        assert path.read_bytes() == b"content"


def test_a_file_in_a_folder_where_nothing_can_be_made_is_written_to_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    inode = path.stat().st_ino
    access = os.access
    # The tests may run as root, to whom everything is permitted.
    monkeypatch.setattr(os, "access", lambda where, mode: Path(where) != tmp_path and access(where, mode))
    assert unwritable(path) == ""
    assert unwritable(tmp_path / "other.html") == "writing there is not permitted"
    write_output(path, b"new")
    assert (path.read_text(), path.stat().st_ino) == ("new", inode)


def test_a_file_that_may_not_be_written_to_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    access = os.access
    monkeypatch.setattr(os, "access", lambda where, mode: Path(where) != path and access(where, mode))
    assert unwritable(path) == "writing there is not permitted"
    with pytest.raises(OutputError, match="permit writing there or name another file"):
        write_output(path, b"new")
    assert path.read_text() == "old"


def test_what_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "x")
    assert unwritable(tmp_path) == "it is a directory"
    assert unwritable(tmp_path / "nowhere" / "x") == f"there is no directory {tmp_path / 'nowhere'}"
    assert unwritable(tmp_path / "link") == f"there is no directory {tmp_path / 'nowhere'}"
    assert unwritable(tmp_path / "new") == unwritable(Path("/dev/stdout")) == ""


def test_a_checkpoint_that_cannot_be_written_leaves_those_before_it(tmp_path: Path) -> None:
    tensors = {"weights": np.arange(ROOM, dtype=np.float32)}
    first = save_checkpoint(tmp_path, Checkpoint(1, {}, tensors), {})
    with little_room(), pytest.raises(OutputError, match=r"000002: cannot be written: File too large"):
        save_checkpoint(tmp_path, Checkpoint(2, {}, tensors), {})
    assert list(tmp_path.iterdir()) == [first]
    found = load_checkpoint(tmp_path, {})
    assert found is not None
    assert found.segments == 1
