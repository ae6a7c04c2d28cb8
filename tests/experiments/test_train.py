"""Training end to end in small: from settings to an artifact that loads, with a card that says what it is."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agents.registry import load_policy
from agents.settings import PPOSettings
from envs.workloads import sessions
from experiments.train import TrainSettings, load_train_settings, main, train
from tests.requirements import ROOT

TINY = PPOSettings(total_steps=128, n_envs=2, n_steps=32, batch_size=64, n_epochs=2)


def quiet() -> Console:
    return Console(file=StringIO(), width=120)


def test_a_policy_is_trained_evaluated_and_saved(tmp_path: Path) -> None:
    console = quiet()
    settings = TrainSettings(name="small", output=tmp_path, seed=5, intervals=(6, 8), held_out=2, ppo=TINY)
    directory = train(settings, console=console, command="the command")
    assert directory == tmp_path / "small"
    assert load_policy(str(directory)).name == "ppo:small"

    card = json.loads((directory / "card.json").read_text())
    assert card["training"]["command"] == "the command"
    assert card["training"]["seed"] == 5
    assert card["training"]["settings"]["ppo"]["n_steps"] == 32
    assert card["training"]["steps"] == 128
    assert set(card["training"]["versions"]) == {"python", "cachepilot", "torch", "stable-baselines3", "gymnasium", "numpy"}
    assert str(tmp_path) not in (directory / "card.json").read_text()

    standings = {row["policy"]: row for row in card["evaluation"]["standings"]}
    assert set(standings) >= {"hold", "mid-grid", "last-curve", "curve", "curve+2+0+0", "ppo:small"}
    assert standings["curve"]["relative"] == 1.0
    for row in standings.values():
        assert row["cost"] == pytest.approx(sum(row["terms"].values()), rel=1e-3)
        assert row["low"] <= row["relative"] <= row["high"]
    assert card["evaluation"]["verdict"].startswith(("beats", "ties", "is worse"))
    assert "ppo:small" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_artifact_is_evaluated_again_without_changing_what_it_does(tmp_path: Path) -> None:
    settings = TrainSettings(name="again", output=tmp_path, intervals=(4, 5), held_out=1, ppo=TINY)
    directory = train(settings, console=quiet())
    before, weights = json.loads((directory / "card.json").read_text()), (directory / "policy.safetensors").read_bytes()
    config = tmp_path / "again.yaml"
    config.write_text("name: again\nintervals: [4, 5]\nheld_out: 2\nheld_out_seed: 9\n")
    assert main(["--config", str(config), "--evaluate", str(directory), "--note", "fresh seeds"]) == 0
    after = json.loads((directory / "card.json").read_text())
    assert (directory / "policy.safetensors").read_bytes() == weights
    assert (after["probe"]["observation"], after["training"]) == (before["probe"]["observation"], before["training"])
    assert (after["evaluation"]["held_out_scenarios"], after["evaluation"]["held_out_seed"]) == (2, 9)
    assert after["evaluation"]["note"] == "fresh seeds"


def test_training_repeats_from_its_seed(tmp_path: Path) -> None:
    probes = []
    for place in ("one", "two"):
        settings = TrainSettings(name="same", output=tmp_path / place, intervals=(4, 5), held_out=1, ppo=TINY)
        card = json.loads((train(settings, console=quiet()) / "card.json").read_text())
        probes.append((card["probe"], card["evaluation"]))
    assert probes[0] == probes[1]


def test_it_trains_on_a_trace_file_and_keeps_its_end_for_the_evaluation(tmp_path: Path) -> None:
    made = sessions(2_000, 200, duration=3600.0, seed=1)
    path = tmp_path / "mooncake_made.jsonl"
    blocks = made.key % np.uint64(1 << 40)
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": int(1000 * at), "input_length": 512, "output_length": 16, "hash_ids": [int(block)]})
            for at, block in zip(made.time, blocks, strict=True)
        )
    )
    settings = TrainSettings(
        name="traced",
        output=tmp_path,
        workload="traces",
        traces=[path],
        stretch=(300, 400),
        intervals=(5, 6),
        held_out=2,
        ppo=TINY,
    )
    card = json.loads((train(settings, console=quiet()) / "card.json").read_text())
    assert card["training"]["settings"]["traces"] == ["mooncake_made.jsonl"]
    assert card["evaluation"]["held_out_scenarios"] == 2


def test_the_shipped_configurations_are_valid() -> None:
    paths = sorted((ROOT / "experiments" / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        assert load_train_settings(path).name == path.stem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nmae: x", "nmae = 'x'"),
        ("seed: -1", "seed = -1"),
        ("name: Not Good", "name = 'Not Good'"),
        ("ppo: {total_steps: 0}", "ppo.total_steps = 0"),
        ("workload: traces", "expected at least one file"),
        ("intervals: [9, 3]", "expected 2 <= fewest <= most"),
        ("radius: [1, 2, 0]", "radius"),
        ("- a list", "expected a mapping"),
        ("a: [", "expected a readable YAML file"),
    ],
)
def test_bad_settings_are_refused_by_name_with_exit_code_2(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.yaml"):
        load_train_settings(path)
    assert main(["--config", str(path)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml: expected a readable YAML file"):
        load_train_settings(tmp_path / "nowhere.yaml")
