"""`cachepilot policy` prints a policy's card and exports it, and an unusable one is told in one message."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agents.artifact import ArtifactError, load
from agents.card import readme
from agents.output_file import OutputError
from tests.agents.observations import store
from tests.requirements import module
from tuner.errors import CommandError
from tuner.policy_commands import policy_app

runner = CliRunner()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return store(tmp_path / "policy", evaluation={"verdict": "ties with the curve"})


def test_show_prints_the_card_for_people_or_for_programs(directory: Path) -> None:
    shown = runner.invoke(policy_app, ["show", str(directory)])
    assert shown.exit_code == 0
    assert shown.stdout == (directory / "README.md").read_text() == readme(load(directory).card)
    assert shown.stderr == ""
    printed = runner.invoke(policy_app, ["show", str(directory), "--json"])
    assert json.loads(printed.stdout) == json.loads((directory / "card.json").read_text())


def test_show_says_when_the_page_is_not_what_the_card_says(directory: Path) -> None:
    (directory / "README.md").write_text("the best policy of all")
    shown = runner.invoke(policy_app, ["show", str(directory)])
    assert shown.stdout == readme(load(directory).card)
    assert "is not what the card says" in shown.stderr
    (directory / "README.md").unlink()
    assert "is not what the card says" in runner.invoke(policy_app, ["show", str(directory)]).stderr


@pytest.mark.parametrize("command", [["show"], ["export", "--onnx", "policy.onnx"]])
def test_a_policy_that_cannot_be_used_is_told(directory: Path, command: list[str], tmp_path: Path) -> None:
    (directory / "policy.safetensors").write_bytes(b"")
    for given, words in ((str(directory), "do not belong together"), ("nobody", "expected the directory")):
        failed = runner.invoke(policy_app, [command[0], given, *command[1:]])
        assert failed.exit_code == 1
        assert isinstance(failed.exception, ArtifactError)
        assert words in str(failed.exception)


def test_export_writes_a_graph_that_is_the_policy(directory: Path, tmp_path: Path) -> None:
    onnx = module("onnx")
    path = tmp_path / "out" / "policy.onnx"
    done = runner.invoke(policy_app, ["export", str(directory), "--onnx", str(path), "--json"])
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert (result["policy"], result["kind"], result["bytes"]) == ("one", "feedforward", path.stat().st_size)
    assert {entry.key: entry.value for entry in onnx.load(path).metadata_props}["name"] == "one"
    assert "written to" in runner.invoke(policy_app, ["export", str(directory), "--onnx", str(path)]).stdout


def test_export_writes_into_a_pipe_and_does_not_replace_it_or_a_directory(directory: Path, tmp_path: Path) -> None:
    onnx = module("onnx")
    pipe, heard = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reading = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reading.start()
    done = runner.invoke(policy_app, ["export", str(directory), "--onnx", str(pipe)])
    reading.join(30)
    assert done.exit_code == 0
    assert f"written to {pipe}, opset" in done.stdout
    assert onnx.load_from_string(heard[0]).producer_name == "cachepilot"
    assert pipe.is_fifo()
    failed = runner.invoke(policy_app, ["export", str(directory), "--onnx", str(tmp_path)])
    assert isinstance(failed.exception, OutputError)
    assert str(failed.exception).startswith(f"{tmp_path}: cannot be written: Is a directory")


def test_an_export_for_which_there_is_no_room_is_told(directory: Path) -> None:
    module("onnx")
    failed = runner.invoke(policy_app, ["export", str(directory), "--onnx", "/dev/full"])
    assert "/dev/full: cannot be written: No space left on device: free room there" in str(failed.exception)


def test_export_without_onnx_says_what_to_install(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    failed = runner.invoke(policy_app, ["export", str(directory), "--onnx", str(tmp_path / "policy.onnx")])
    assert isinstance(failed.exception, CommandError)
    assert "pip install 'cachepilot[onnx]'" in str(failed.exception)
