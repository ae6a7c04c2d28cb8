"""`cachepilot train` as a command: what it cannot do is one message and an exit code, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import experiments.train
from agents.checkpoint import CheckpointError
from agents.imitation import Demonstrations
from tuner.cli import main

Refusal = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    def run(*arguments: object, code: int) -> str:
        monkeypatch.setattr(sys, "argv", ["cachepilot", "train", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == code
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seeds: []", "seeds = []"),
        ("nmae: x", "nmae = 'x': unknown key; did you mean 'name'?"),
        ("ppo: {n_step: 128}", "ppo.n_step = 128: unknown key; did you mean 'n_steps'?"),
        ("ray: {xyz: 1}", "ray.xyz = 1: unknown key; expected one of: "),
        ("a: [", "expected a readable YAML file"),
        ("- x", "a mapping"),
    ],
)
def test_bad_settings_are_a_fault_of_usage(refused: Refusal, text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    told = refused("--config", path, code=2)
    assert told.startswith("error: training settings")
    assert words in told


def test_an_unknown_variant_is_a_fault_of_usage(refused: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("name: good")
    assert "variants.0 = 'best'" in refused("--config", path, "--variant", "best", code=2)


def test_what_stands_in_the_way_of_a_training_is_told(refused: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("name: good")

    def begun_before(*arguments: object, **named: object) -> list[Path]:
        raise CheckpointError("000003: begun by another training: begin anew (--fresh)")

    def unreadable(*arguments: object, **named: object) -> list[Path]:
        Demonstrations.load(tmp_path / "nowhere.safetensors")
        return []

    for run, words in ((begun_before, "begin anew (--fresh)"), (unreadable, "nowhere.safetensors: expected a safetensors file")):
        monkeypatch.setattr(experiments.train, "train", run)
        told = refused("--config", path, "--output", tmp_path, code=1)
        assert told.startswith("error: train: ")
        assert words in told


def test_a_learning_rate_with_which_nothing_can_be_learned_is_a_fault_of_usage(refused: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("ppo: {learning_rate: 1.0e+30}")
    assert "ppo.learning_rate = 1e+30: Input should be less than or equal to 1" in refused("--config", path, code=2)


def test_a_training_that_diverges_is_told_in_one_line(refused: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    endless = "vf_coef: 1.0e+39"  # beyond what a float32 holds
    path.write_text(f"{{intervals: [6, 8], ppo: {{total_steps: 128, n_envs: 2, n_steps: 32, batch_size: 64, {endless}}}}}")
    told = refused("--config", path, "--output", tmp_path, code=1)
    assert told[told.index("error:") :] == (
        "error: train: training diverged in update 1 of 2, weights or actions are no longer finite numbers: lower "
        "ppo.learning_rate (it was 0.001 in this update, 0.001 in the first); no checkpoint had been made yet"
    )


def test_who_interrupts_a_training_is_told_how_it_goes_on(
    refused: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("name: good")

    def interrupted(*arguments: object, **named: object) -> list[Path]:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments.train, "train", interrupted)
    assert "the same command goes on from its last checkpoint" in refused("--config", path, "--output", tmp_path, code=130)
