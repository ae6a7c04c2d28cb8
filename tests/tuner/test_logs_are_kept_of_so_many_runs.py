"""What replicas of `cachepilot serve` said is found after its end, and does not pile up."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from tuner import kept_logs
from tuner.kept_logs import RUNS, logs_root, why_not


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "cachepilot" / "logs"


def run(number: int, size: int = 1, *, namespace: str = "shop") -> Path:
    """A run that leaves a log of so many bytes; later ones have greater numbers."""
    with kept_logs.kept_logs(f"{namespace}-{number}") as folder:
        assert folder is not None
        (folder / "replica_a.log").write_bytes(b"x" * size)
    for file in (*folder.iterdir(), folder):
        os.utime(file, (number, number))
    return folder


def test_a_runs_logs_stay_for_this_user_alone(state: Path) -> None:
    folder = run(1)
    assert folder.parent == state == logs_root()
    assert folder.name.startswith("shop-1-20")
    assert (folder / "replica_a.log").read_bytes() == b"x"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_last_runs_are_kept_and_those_that_go_on_whatever_their_number(state: Path) -> None:
    with kept_logs.kept_logs("long") as long:
        assert long is not None
        (long / "replica_a.log").touch()
        for file in (*long.iterdir(), long):
            os.utime(file, (0, 0))
        stranger = state / "stranger"
        stranger.mkdir()
        folders = [run(number) for number in range(1, RUNS + 5)]
        assert [folder.exists() for folder in folders] == [False] * 4 + [True] * RUNS
        assert long.exists()
        assert stranger.exists()


def test_earlier_runs_have_so_many_bytes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_logs, "MOST_BYTES", 1000)
    folders = [run(1, 10), run(2, 600), run(3, 300), run(4, 300)]
    run(5)
    assert [folder.exists() for folder in folders] == [False, False, True, True]


def test_a_run_that_did_not_come_to_replicas_leaves_nothing(state: Path) -> None:
    with pytest.raises(ZeroDivisionError), kept_logs.kept_logs("shop"):
        raise ZeroDivisionError
    assert list(state.iterdir()) == []


def test_without_a_place_for_them_they_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with kept_logs.kept_logs("shop") as folder:
        assert folder is None
    assert why_not() == f"{logs_root()} cannot be written to"


def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> pwd.struct_passwd:
        raise KeyError

    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with kept_logs.kept_logs("shop") as folder:
        assert folder is None
    assert why_not() == "this user has no home, and XDG_STATE_HOME names no folder"


def test_a_file_that_cannot_be_looked_at_keeps_no_other_run(state: Path) -> None:
    folders = [run(number) for number in range(1, RUNS + 1)]
    (folders[5] / "replica_b.log").symlink_to(state / "nowhere")
    run(RUNS + 1)
    assert not folders[0].exists()


def test_a_state_folder_that_is_not_absolute_is_not_heeded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert logs_root() == tmp_path / ".local" / "state" / "cachepilot" / "logs"
