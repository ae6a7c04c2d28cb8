"""What settings ask for: runs by variant and seed, randomisation by workload, and what a result does not depend on."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.settings import PPOSettings
from envs.task import Randomisation
from experiments.train_settings import Run, TrainSettings, runs


def only(variant: str, **changes: object) -> Run:
    return runs(TrainSettings.model_validate({"variants": [variant], **changes}))[0]


def test_a_single_seed_is_not_named() -> None:
    settings = TrainSettings(name="x", seeds=(3,), variants=("default", "article"))
    assert [(run.name, run.seed) for run in runs(settings)] == [("x", 3), ("x-article", 3)]


def test_each_variant_changes_what_it_says() -> None:
    assert only("no-curve", hidden=["entropy"]).settings.hidden == ("entropy", "curve")
    absolute = only("absolute", ppo={"initial_action": [0.5, 0.0, 0.0]}).settings
    assert (absolute.actions.kind, absolute.ppo.initial_action) == ("absolute", (0.0, 0.0, 0.0))
    assert only("no-warmup", radius=[3, 2, 2]).settings.actions.radius == (3.0, 2.0, 0.0)
    assert only("recurrent").settings.ppo.recurrent
    plain = only("no-randomisation", workload="suites", randomise={"start": True}).settings.randomise
    assert plain == Randomisation(start=True, knobs=False, prices=1.0)
    assert only("no-foresight").settings.hidden == ("foresight",)
    begun = {"workload": "suites", "imitate": True, "ppo": {"beat": "imitation", "hold_noise": 8}}
    assert only("imitation", **begun).settings.ppo.rollouts == only("imitation", **begun).settings.ppo.critic_rollouts == 1
    for alone in ("no-imitation", "recurrent"):
        changed = only(alone, **begun).settings
        assert (changed.imitate, changed.ppo.beat, changed.ppo.hold_noise) == (False, "task", 0)
    article = only("article", ppo={"learning_rate": 0.1, "gamma": 0.5}).settings.ppo
    assert article == PPOSettings(profile="article", gamma=0.5)


def test_randomisation_is_the_workloads_own_where_nothing_is_said() -> None:
    assert TrainSettings.model_validate({"workload": "suites", "randomise": {"prices": 3.0}}).randomise == Randomisation(
        start=False, knobs=False, prices=3.0, clock=True, absent=0.1
    )
    assert TrainSettings().randomise == Randomisation(start=False, clock=True, absent=0.2)
    stored = TrainSettings(workload="suites").model_dump(mode="json")
    assert TrainSettings.model_validate(stored).model_dump(mode="json") == stored


def test_the_folder_of_the_traces_is_the_settings_own_then_the_environments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CACHEPILOT_TRACES", str(tmp_path / "a"))
    assert TrainSettings().traces_folder == (tmp_path / "a").resolve()
    assert TrainSettings(traces_dir=tmp_path / "b").traces_folder == (tmp_path / "b").resolve()
    assert TrainSettings(traces_dir=Path("b")).located().traces_dir == Path("b").resolve()


def test_where_it_runs_and_how_many_actors_it_has_change_neither_identity_nor_digest(tmp_path: Path) -> None:
    one = only("default")
    other = only("default", output=str(tmp_path), ray={"actors": 7}, traces_dir=str(tmp_path), jobs=3)
    assert (one.identity, one.digest) == (other.identity, other.digest)
    assert one.identity != only("default", interval=6.0).identity
    more = only("default", held_out=3)
    assert one.identity == more.identity  # a checkpoint does not care what comes after it
    assert one.digest != more.digest
