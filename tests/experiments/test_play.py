"""Policies that are played side by side get what they get alone in the environment, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agents.baselines import HoldPolicy, MiddlePolicy, StaticPolicy
from agents.curve import CurvePolicy, LastCurvePolicy, OffsetPolicy
from agents.policy import Policy
from envs.cache_env import FIXED, CacheTuningEnv
from envs.objective import COST_TERMS
from envs.task import Scenario
from envs.workloads import sessions
from experiments.play import Run, play_all
from experiments.scenarios import Scale, scale_to
from serving.knobs import Knobs


def scenario(seed: int = 3, intervals: int = 14) -> Scenario:
    rng = np.random.default_rng(seed)
    trace = sessions(3_000, 400, duration=6 * 3600.0, hot_swaps=(3 * 3600.0,), seed=seed)
    return scale_to(trace, rng, scale=Scale(intervals=(intervals, intervals)), static_start=1.0)


def policies() -> list[Policy]:
    return [
        CurvePolicy(), MiddlePolicy(), LastCurvePolicy(), HoldPolicy(), OffsetPolicy((1.0, 0.5, 1.0)),
        StaticPolicy(Knobs(1 << 16, 40.0, 0.2)),
    ]  # fmt: skip


def alone(policy: Policy, scenario: Scenario, *, length: int, seed: int) -> Run:
    """What the environment of one cache gives the policy."""
    env = CacheTuningEnv(scenarios=lambda rng: scenario, episode_length=length, reference="hold", randomise=FIXED)
    policy.reset()
    env.reset(seed=seed)
    infos = []
    over = False
    while not over:
        _, _, _, over, info = env.step_knobs(policy.decide(env.observation).knobs)
        infos.append((info, env.observation.signals.p99))
    requests = np.array([info["requests"] for info, _ in infos])
    return Run(
        policy=policy.name,
        dollars=np.array([info["dollars"] for info, _ in infos]),
        requests=requests,
        hits=requests * np.array([info.get("hit_ratio", 0.0) for info, _ in infos]),
        terms={name: np.array([info["cost"].get(name, 0.0) for info, _ in infos]) * requests / 1000.0 for name in COST_TERMS},
        p99=np.array([p99 for _, p99 in infos]),
        knobs=np.array([list(info["knobs"].values()) for info, _ in infos], np.float64),
    )


def equal(one: Run, other: Run) -> None:
    assert one.policy == other.policy
    for name in ("dollars", "requests", "hits", "p99", "knobs"):
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name
    for name in COST_TERMS:
        assert np.array_equal(one.terms[name], other.terms[name]), name


@pytest.mark.parametrize("seed", [0, 7])
def test_each_policy_gets_what_it_gets_alone_in_the_environment(seed: int) -> None:
    played = play_all(policies(), scenario(), seed=seed)
    assert len({run.dollars.sum() for run in played}) == len(played), "policies that do the same test little"
    for run, policy in zip(played, policies(), strict=True):
        equal(run, alone(policy, scenario(), length=1000, seed=seed))


def test_knobs_out_of_bounds_are_held_as_the_environment_holds_them() -> None:
    base = scenario()
    outside = replace(base, initial=Knobs(base.config.space.max_size * 4, base.config.space.max_ttl * 9, 0.0))

    class Stay(HoldPolicy):
        def decide(self, observation):  # type: ignore[no-untyped-def]
            return replace(super().decide(observation), knobs=observation.knobs)

    stayed, moved = play_all([Stay(), CurvePolicy()], outside)
    assert (stayed.knobs[:, 0] == base.config.space.max_size * 4).all()
    assert base.config.space.max_size >= moved.knobs[-1, 0]
    equal(stayed, alone(Stay(), outside, length=1000, seed=0))
    equal(moved, alone(CurvePolicy(), outside, length=1000, seed=0))


def test_a_run_is_as_long_as_asked_and_no_longer_than_its_trace() -> None:
    short, whole = play_all([CurvePolicy()], scenario(), length=4)[0], play_all([CurvePolicy()], scenario(), length=99)[0]
    assert len(short.dollars) == 4
    assert np.array_equal(short.dollars, whole.dollars[:4])
    made = scenario()
    assert len(whole.dollars) == len(play_all([CurvePolicy()], made)[0].dollars)
    assert len(whole.dollars) <= made.trace.duration / made.interval + 1


def test_dollars_are_the_sum_of_their_terms() -> None:
    for run in play_all(policies(), scenario()):
        assert run.dollars == pytest.approx(sum(run.terms.values()), rel=1e-12)
        assert (run.hits <= run.requests).all()


def test_a_policy_starts_afresh_in_every_run() -> None:
    policy = OffsetPolicy((0.0, 1.0, 0.0))
    equal(play_all([policy], scenario(5))[0], play_all([policy], scenario(5))[0])


def test_one_object_for_two_lanes_is_refused() -> None:
    policy = CurvePolicy()
    for given in ([], [policy, policy]):
        with pytest.raises(ValueError, match="each an object of its own"):
            play_all(given, scenario())
