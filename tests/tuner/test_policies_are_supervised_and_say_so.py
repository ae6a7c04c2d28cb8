"""The policy that rules a live cache: supervised, the curve where the shipped one cannot be loaded, and a ledger that says so."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tuner.policies
from agents.artifact import ArtifactError
from agents.curve import CurvePolicy
from agents.policy import Policy, Proposal
from agents.registry import load_policy
from agents.supervised import SupervisedPolicy, Supervision
from envs.live_signals import read_signals
from envs.observation import Observation, ObservationBatch, ObservationBuilder
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.redis_config_store import RedisConfigStore
from tests.exporter import Exporter
from tests.tuner.test_loop_observes_decides_applies_and_records import INITIAL, REPORTS_LIVE, SPACE, Bench, traffic
from tuner.config import Settings, SettingsError, TunerSettings, load_settings
from tuner.errors import CommandError
from tuner.loop import Interval, LoopSettings
from tuner.policies import ruling_policy
from tuner.tune_command import line_of


class Failing:
    """A policy that fails whenever it is asked."""

    name = "failing"

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        raise RuntimeError("out of order")


class Least:
    """Always goes to the least of everything."""

    name = "least"

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        return Proposal(observation.space.from_steps([0.0, 0.0, 0.0]), "less is less")


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter() as running:
        for arm in INITIAL:
            traffic(running, arm, 0, 0)
        yield running


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[RedisConfigStore]:
    opened = RedisConfigStore(redis_url, namespace, REPORTS_LIVE)
    yield opened
    await opened.close()


async def turns(
    count: int, policy: Policy, store: RedisConfigStore, exporter: Exporter, directory: Path, namespace: str
) -> tuple[list[Interval], list[Any]]:
    """Let a policy rule the treatment for so many turns; return them and what the ledger has of it."""
    bench = Bench(store, exporter, directory, policy, namespace)
    try:
        await bench.tuner.start(INITIAL)
        made = []
        for number in range(count):
            bench.serve()
            await bench.report(number + 2, "a")
            made.append(await bench.tuner.step())
        return made, [row for row in bench.ledger.decisions(namespace=namespace) if row.arm == "treatment"]
    finally:
        bench.source.close()
        bench.ledger.close()


async def test_a_policy_that_fails_is_benched_and_the_ledger_says_since_when_and_why(
    store: RedisConfigStore, exporter: Exporter, tmp_path: Path, namespace: str
) -> None:
    policy = SupervisedPolicy(Failing())
    made, records = await turns(2, policy, store, exporter, tmp_path, namespace)
    assert [record.policy for record in records] == ["failing (supervised)"] * 2
    assert "failing benched now" in records[0].reason
    assert "RuntimeError: out of order" in records[0].reason
    assert "benched for 1 intervals" in records[1].reason
    line = line_of(made[-1])
    assert line["arms"]["treatment"]["details"]["benched"] == 1.0
    assert "failing benched for 1" in line["text"]
    json.dumps(line, allow_nan=False)


async def test_a_policy_that_fails_unsupervised_holds_and_does_not_end_the_loop(
    store: RedisConfigStore, exporter: Exporter, tmp_path: Path, namespace: str
) -> None:
    made, records = await turns(2, Failing(), store, exporter, tmp_path, namespace)
    assert [record.verdict for record in records] == ["hold", "hold"]
    assert "policy failed: RuntimeError: out of order" in records[0].reason
    assert made[-1].state.version == 1


async def test_a_policy_that_costs_more_than_the_curve_is_benched_by_the_loop(
    store: RedisConfigStore, exporter: Exporter, tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = read_signals

    def with_a_ghost(source: Any, arm: str, **options: Any) -> ArmSignals:
        # The exporter has no ghost: what every setting would have hit grows with the size, and is 0.6 where the loop starts.
        seen = measured(source, arm, **options)
        hits = 100.0 * np.linspace(0.2, 0.8, SPACE.size_steps)[:, None] * np.ones(SPACE.ttl_steps)
        values = {name: getattr(seen, name) for name in seen.__dataclass_fields__}
        return ArmSignals(**{**values, "ghost": GhostCurve(SPACE.sizes, SPACE.ttls, hits, 0.0 * hits, 100.0)})

    monkeypatch.setattr("tuner.loop.read_signals", with_a_ghost)
    supervision = Supervision(window=6, least=3, margin=0.02, rest=3, longest_rest=3)
    _, records = await turns(10, SupervisedPolicy(Least(), supervision=supervision), store, exporter, tmp_path, namespace)
    said = [record for record in records if "least benched now" in record.reason]
    assert said
    assert "more than curve would have over" in said[0].reason
    assert any("on probation" in record.reason for record in records)


def test_policies_are_supervised_as_the_settings_say() -> None:
    settings = load_settings(environ={"CACHEPILOT_TUNER__SUPERVISION__MARGIN": "0.2"}).tuner
    policy = ruling_policy("last-curve", settings, pytest.fail)
    assert isinstance(policy, SupervisedPolicy)
    assert policy.supervision.margin == 0.2
    assert policy.name == "last-curve (supervised)"
    alone = ruling_policy("last-curve", TunerSettings(supervise=False), pytest.fail)
    assert alone.name == "last-curve"


@pytest.mark.parametrize("name", ["curve", "hold", "static:64MiB,3600,0"])
def test_the_curve_and_settings_by_hand_are_not_supervised(name: str) -> None:
    assert type(ruling_policy(name, TunerSettings(), pytest.fail)) is type(load_policy(name))


def test_without_a_usable_shipped_policy_the_curve_rules_and_a_warning_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable(name: str) -> Policy:
        raise ArtifactError(f"{name}: trained for another observation")

    monkeypatch.setattr(tuner.policies, "load_policy", unusable)
    said: list[str] = []
    assert isinstance(ruling_policy("ppo", TunerSettings(), said.append), CurvePolicy)
    assert len(said) == 1
    assert "trained for another observation" in said[0]
    assert "the curve" in said[0]
    with pytest.raises(CommandError, match="trained for another observation"):
        ruling_policy("ppo:suites", TunerSettings(), pytest.fail)


def test_a_name_that_means_nothing_is_refused() -> None:
    with pytest.raises(CommandError, match="curv"):
        ruling_policy("curv", TunerSettings(), pytest.fail)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{margin: -1}", ["tuner.supervision.margin", "greater than or equal to 0"]),
        ("{least: 99, window: 9}", ["tuner.supervision", "least", "99"]),
        ("{rest: 9, longest_rest: 3}", ["tuner.supervision", "rest", "9"]),
        ("{margn: 1}", ["tuner.supervision.margn", "'margin'"]),
    ],
)
def test_settings_of_the_supervision_that_make_no_sense_are_named(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"tuner: {{supervision: {text}}}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(path, {})
    for part in expected:
        assert part in str(caught.value)


def test_the_defaults_are_the_supervisors_own() -> None:
    assert Settings().tuner.supervise
    assert Settings().tuner.supervision.supervision() == Supervision()


def test_a_live_policy_sees_what_is_smoothed_as_the_environment_smooths_it() -> None:
    trained = {inspect.signature(made).parameters["smoothing"].default for made in (ObservationBatch, ObservationBuilder)}
    assert trained == {TunerSettings().smoothing, LoopSettings.__dataclass_fields__["smoothing"].default}
