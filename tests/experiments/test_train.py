"""Training end to end in small: from settings to an artifact that loads, with a card that says what it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agents.checkpoint import save_checkpoint
from agents.registry import load_policy
from agents.settings import PPOSettings
from envs.workloads import sessions
from experiments.train import Watch, main, progress_bars, train
from experiments.train_settings import TrainSettings, load_train_settings, runs
from tests.requirements import ROOT, trace

TINY = PPOSettings(total_steps=128, n_envs=2, n_steps=32, batch_size=64, n_epochs=2, segment=1)


def quiet() -> Console:
    return Console(file=StringIO(), width=160)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_policy_is_trained_evaluated_and_saved(tmp_path: Path) -> None:
    console = quiet()
    settings = TrainSettings(name="small", output=tmp_path, seeds=(5,), intervals=(6, 8), held_out=2, ppo=TINY)
    (directory,) = train(settings, console=console, command="the command")
    assert directory == tmp_path / "small"
    assert load_policy(str(directory)).name == "ppo:small"

    card = json.loads((directory / "card.json").read_text())
    assert card["training"]["command"] == "the command"
    assert card["training"]["seed"] == 5
    assert card["training"]["settings"]["ppo"]["n_steps"] == 32
    assert card["training"]["steps"] == 128
    assert [entry["steps"] for entry in card["training"]["learning_curve"]] == [64, 128]
    assert set(card["training"]["versions"]) >= {"python", "cachepilot", "torch", "stable-baselines3", "sb3-contrib", "numpy"}
    assert str(tmp_path) not in (directory / "card.json").read_text()

    standings = {row["policy"]: row for row in card["evaluation"]["standings"]}
    assert set(standings) >= {"hold", "mid-grid", "last-curve", "curve", "curve+2+0+0", "ppo:small"}
    assert standings["curve"]["relative"] == 1.0
    for row in standings.values():
        assert row["cost"] == pytest.approx(sum(row["terms"].values()), rel=1e-3)
        assert row["low"] <= row["relative"] <= row["high"]
    comparisons = {row["against"]: row for row in card["evaluation"]["comparisons"]}
    assert set(comparisons) == set(standings) - {"ppo:small"}
    assert comparisons["hold"]["relative"] == pytest.approx(
        standings["ppo:small"]["relative"] / standings["hold"]["relative"], rel=1e-4
    )
    assert card["evaluation"]["verdict"].startswith(("beats", "ties", "is worse"))
    assert "mid-grid" in printed(console)
    assert printed(console).count("small: 128 steps, a checkpoint after every 64") == 1
    assert "small: 64 of 128 steps, reward" in printed(console)
    assert "small: evaluated 16 of 16, held out" in printed(console)
    assert list((tmp_path / ".training" / "small").iterdir()) == [tmp_path / ".training" / "small" / "tensorboard"]


def test_without_a_terminal_a_line_tells_of_the_first_rollout_of_each_tenth_and_of_each_half_minute() -> None:
    console, now = quiet(), [0.0]
    ppo = PPOSettings(total_steps=6_400, n_envs=2, n_steps=32, batch_size=64, segment=16)
    (run,) = runs(TrainSettings(name="long", ppo=ppo))
    with progress_bars(console) as bars:
        watch = Watch(bars, [run], clock=lambda: now[0])
        watch.begin(["long"])
        for steps, at in ((64, 1.0), (128, 2.0), (640, 3.0), (704, 32.0), (768, 33.0), (832, 34.0), (6_400, 35.0)):
            now[0] = at
            watch.progress("long", steps, 0.0)
        watch.hindsight(16, 280)
        watch.hindsight(27, 280)
    told = [line for line in printed(console).splitlines() if line.startswith(("long", "hindsight"))]
    assert told == [
        "long: 6,400 steps, a checkpoint after every 1,024",
        *(f"long: {steps:,} of 6,400 steps, reward +0.0000" for steps in (64, 640, 768, 6_400)),
        "hindsight: 16 of 280 training scenarios",
    ]


def test_an_artifact_is_evaluated_again_without_changing_what_it_does(tmp_path: Path) -> None:
    settings = TrainSettings(name="again", output=tmp_path, intervals=(4, 5), held_out=1, ppo=TINY)
    (directory,) = train(settings, console=quiet())
    before, weights = json.loads((directory / "card.json").read_text()), (directory / "policy.safetensors").read_bytes()
    config = tmp_path / "again.yaml"
    config.write_text("name: again\nintervals: [4, 5]\nheld_out: 2\nheld_out_seed: 9\n")
    assert main(["--config", str(config), "--evaluate", str(directory), "--note", "fresh seeds"]) == 0
    after = json.loads((directory / "card.json").read_text())
    assert (directory / "policy.safetensors").read_bytes() == weights
    assert (after["probes"], after["training"]) == (before["probes"], before["training"])
    assert (after["evaluation"]["held_out_scenarios"], after["evaluation"]["held_out_seed"]) == (2, 9)
    assert after["evaluation"]["note"] == "fresh seeds"


def test_every_variant_and_seed_is_an_artifact_of_its_own_and_repeats(tmp_path: Path) -> None:
    settings = TrainSettings(
        name="many", output=tmp_path, seeds=(1, 2), variants=("default", "no-curve"), intervals=(4, 5), held_out=1, ppo=TINY
    )
    found = train(settings, console=quiet())
    assert [path.name for path in found] == ["many-seed1", "many-seed2", "many-no-curve-seed1", "many-no-curve-seed2"]
    weights = [(path / "policy.safetensors").read_bytes() for path in found]
    assert len(set(weights)) == 4
    assert json.loads((found[2] / "card.json").read_text())["hidden"] == ["curve"]

    console = quiet()
    assert train(settings, console=console) == found
    assert printed(console).count("trained already") == 4
    assert "a checkpoint after" not in printed(console)
    (found[1] / "policy.safetensors").unlink()
    assert train(settings, console=console, fresh=True) == found
    assert [(path / "policy.safetensors").read_bytes() for path in found] == weights


def test_a_training_that_was_killed_goes_on_when_it_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = TrainSettings(name="same", output=tmp_path / "one", intervals=(4, 5), held_out=1, ppo=TINY)
    disturbed = undisturbed.model_copy(update={"output": tmp_path / "two"})
    (expected,) = train(undisturbed, console=quiet())

    def save_and_die(*arguments: object) -> None:
        save_checkpoint(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr("agents.training.save_checkpoint", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(disturbed, console=quiet())
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"ppo\.gamma was 0\.97, is 0\.9.*--fresh"):
        train(disturbed.model_copy(update={"ppo": TINY.model_copy(update={"gamma": 0.9})}), console=quiet())
    console = quiet()
    (resumed,) = train(disturbed, console=console)
    assert "same: goes on from its checkpoint at 64 of 128 steps" in printed(console)
    assert (resumed / "policy.safetensors").read_bytes() == (expected / "policy.safetensors").read_bytes()


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
        traces=(path,),
        stretch=(300, 400),
        intervals=(5, 6),
        held_out=2,
        ppo=TINY,
    )
    card = json.loads((train(settings, console=quiet())[0] / "card.json").read_text())
    assert card["training"]["settings"]["traces"] == ["mooncake_made.jsonl"]
    assert card["evaluation"]["held_out_scenarios"] == 2


@pytest.mark.slow
def test_it_trains_on_the_suites_and_is_compared_case_by_case(tmp_path: Path) -> None:
    folder = trace("servegen_m_large.csv.gz").parent
    settings = TrainSettings(name="suited", output=tmp_path, workload="suites", traces_dir=folder, episode=8, ppo=TINY)
    card = json.loads((train(settings, console=quiet())[0] / "card.json").read_text())
    assert str(folder) not in json.dumps(card)
    rows = card["evaluation"]["comparisons"]
    assert {row["suite"] for row in rows} == {"steady", "non-stationary"}
    assert {row["against"] for row in rows} == {"mid-grid", "curve"}
    assert "steady: " in card["evaluation"]["verdict"]


def test_the_shipped_configurations_are_valid() -> None:
    folder = ROOT / "experiments" / "configs"
    paths = sorted(set(folder.glob("*.yaml")) - {folder / "evaluation.yaml"})
    assert paths
    for path in paths:
        assert load_train_settings(path).name == path.stem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nmae: x", "nmae = 'x'"),
        ("seeds: [-1]", "seeds.0 = -1"),
        ("seeds: [1, 1]", "seeds: expected each once"),
        ("variants: [best]", "variants.0 = 'best'"),
        ("name: Not Good", "name = 'Not Good'"),
        ("ppo: {total_steps: 0}", "ppo.total_steps = 0"),
        ("workload: traces", "expected at least one file"),
        ("intervals: [9, 3]", "expected 2 <= fewest <= most"),
        ("radius: [1, 2, -1]", "radius"),
        ("radius: [0, 0, 0]", "expected at least one knob"),
        ("hidden: [nothing-such]", "nothing-such"),
        ("randomise: {price: 2}", "randomise: expected some of"),
        ("randomise: {prices: 0.5}", "expected a factor >= 1"),
        ("randomise: {prices: two}", "randomise"),
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


def test_the_command_prints_one_directory_per_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, object] = {}

    def run(settings: TrainSettings, **options: object) -> Sequence[Path]:
        seen.update(options, settings=settings)
        return [Path("a"), Path("b")]

    config = tmp_path / "some.yaml"
    config.write_text("name: some\n")
    assert main(["--config", str(config), "--output", "there", "--fresh", "--no-ray"], run=run) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().out == "a\nb\n"
    assert (seen["fresh"], seen["ray"], seen["command"]) == (True, False, "python -m experiments.train --config some.yaml")
