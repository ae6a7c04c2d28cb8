"""Folders of a run go with it, or with the next one; what others use, and what is not ours, stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving import run_folders
from serving.run_folders import MARK, FolderHeld, held, make, owned, remove_unheld, temporary
from tests.requirements import ROOT

HOLDER = """
import sys
from pathlib import Path
from serving.run_folders import temporary
with temporary("run-", Path(sys.argv[1])) as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder that it holds."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_goes_with_its_context_whatever_ends_it(tmp_path: Path) -> None:
    def fail() -> None:
        with temporary("run-", tmp_path) as folder:
            assert folder.parent == tmp_path
            assert folder.stat().st_mode & 0o777 == 0o700
            (folder / "below").mkdir()
            (folder / "below" / "file").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_run_and_what_one_uses_stays(tmp_path: Path) -> None:
    with holder(tmp_path) as (_, used), holder(tmp_path) as (process, left):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert left.exists()
        with temporary("run-", tmp_path):
            assert [left.exists(), used.exists()] == [False, True]
        assert (used / "file").read_text() == "x"
        with pytest.raises(FolderHeld), owned(used):
            pass
        assert (used / "file").exists()


def test_what_has_no_mark_or_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmarked, other, elsewhere = tmp_path / "run-a", tmp_path / "run-b", tmp_path / "elsewhere"
    unmarked.mkdir()
    for folder in (other, elsewhere):
        with held(folder):
            (folder / "file").write_text("x")
    (tmp_path / "run-link").symlink_to(elsewhere)
    assert not remove_unheld(tmp_path / "run-link")
    assert not remove_unheld(tmp_path / "missing")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not remove_unheld(other)
    with temporary("run-", tmp_path):
        pass
    assert all(folder.exists() for folder in (unmarked, other / "file", elsewhere / "file"))


def test_a_folder_that_is_held_by_nobody_is_held_by_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        with held(tmp_path / "a" / "b") as folder:
            assert not remove_unheld(folder)
            with pytest.raises(FolderHeld), held(folder):
                pass
    assert remove_unheld(folder)
    assert not folder.exists()


def test_a_folder_that_is_removed_while_somebody_takes_it_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with held(folder):
        pass
    lock, turns = run_folders._lock, iter([True])

    def slow(descriptor: int) -> bool:
        if next(turns, False):
            monkeypatch.setattr(run_folders, "_lock", lock)
            assert remove_unheld(folder)  # by another process, between our opening the mark and locking it
        return lock(descriptor)

    monkeypatch.setattr(run_folders, "_lock", slow)
    with held(folder):
        assert (folder / MARK).exists()
        assert not remove_unheld(folder)


def test_who_looks_whether_a_new_folder_was_left_behind_does_not_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, turns = run_folders._lock, iter([True, True])
    # Another process has opened the mark between our making and our locking it, and has the lock until it has looked.
    monkeypatch.setattr(run_folders, "_lock", lambda descriptor: not next(turns, False) and lock(descriptor))
    with temporary("run-", tmp_path) as folder:
        assert not remove_unheld(folder)


@pytest.mark.parametrize("meanwhile", ["the one above is removed", "it is made and removed"])
def test_folders_that_others_remove_while_they_are_made_are_made_anew_for_this_user_alone(
    meanwhile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mkdir, turns = tmp_path / "above" / "run", Path.mkdir, iter([True])

    def disturbed(path: Path, mode: int = 0o777) -> None:
        if path == folder and next(turns, False):
            if meanwhile == "it is made and removed":
                raise FileExistsError(path)
            folder.parent.rmdir()
        mkdir(path, mode)

    monkeypatch.setattr(Path, "mkdir", disturbed)
    make(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("what", ["file", "pipe", "link to nowhere"])
def test_what_is_no_folder_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    if what == "file":
        path.touch()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError), held(path):
        pass
