"""The folder of the sockets of `cachepilot serve` is this user's alone and goes with the run, or with the next one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from serving.app import Running
from serving.run_folders import FolderHeld, held
from tuner import serving_commands
from tuner.config import Settings
from tuner.errors import CommandError
from tuner.local import own_run_directory, run_directory


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return run_directory("shop").parent


def test_it_goes_with_the_run_and_takes_along_what_is_left_of_others(runtime: Path) -> None:
    with held(runtime / "killed"):  # as one that was killed leaves it
        (runtime / "killed" / "redis.log").touch()
    with held(runtime / "runs") as other, own_run_directory("shop") as folder:
        assert folder == runtime / "shop"
        assert sorted(path.name for path in runtime.iterdir()) == ["runs", "shop"]
        with pytest.raises(FolderHeld), own_run_directory("runs"):
            pass
        assert other.exists()
    assert [path.name for path in runtime.iterdir()] == ["runs"]


def test_the_last_run_takes_the_folder_above_along(runtime: Path) -> None:
    with own_run_directory("shop"):
        assert runtime.stat().st_mode & 0o777 == 0o700
    assert not runtime.exists()


@pytest.mark.parametrize("planted", ["writable", "link"])
def test_a_folder_that_others_can_write_to_is_refused(planted: str, runtime: Path, tmp_path: Path) -> None:
    if planted == "writable":
        runtime.mkdir()
        runtime.chmod(0o777)
    else:
        (tmp_path / "elsewhere").mkdir()
        runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CommandError, match="that this user alone may write to"), own_run_directory("shop"):
        pass


def test_serve_leaves_no_folder_and_refuses_a_namespace_that_another_run_has(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running("http://127.0.0.1:9", 1, None, lambda: [], lambda: None, lambda *_: 0, tmp_path)
    monkeypatch.setattr(serving_commands, "start", lambda *_, **__: contextlib.nullcontext(running))
    settings = Settings.model_validate({"gateway": {"namespace": "shop"}})

    def say(text: str) -> None:
        if text.startswith("gateway: "):
            assert (runtime / "shop" / "redis.sock").exists()
            with pytest.raises(CommandError, match="another gateway with an embedded Redis runs in namespace 'shop'"):
                serving_commands.serve_gateway(settings, port=None, dashboard=False, say=lambda _: None)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        serving_commands.serve_gateway(settings, port=None, dashboard=False, say=say)
    assert not runtime.exists()
    with held(runtime / "shop"), pytest.raises(CommandError, match="another gateway"):  # its Redis does not answer yet
        serving_commands.serve_gateway(settings, port=None, dashboard=False, say=say)
