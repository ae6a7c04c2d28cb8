"""What every policy keeps, whatever it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.artifact import Artifact
from agents.baselines import HoldPolicy, MiddlePolicy, StaticPolicy
from agents.curve import CurvePolicy, LastCurvePolicy, OffsetPolicy
from agents.hill_climbing import HillClimbingPolicy
from agents.marginal_hits import MarginalHitsPolicy
from agents.policy import Policy, Proposal
from agents.ppo import PPOPolicy
from agents.registry import load_policy, policies, pretrained
from agents.ttl_approximation import TTLApproximationPolicy
from agents.ttl_rule import TTLRulePolicy
from envs.objective import Prices
from envs.observation import Observation, ObservationBuilder
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace
from tests.agents.observations import KNOBS, PRICES, SPACE, ghost, network, nothing, recurrent, signals

MIXED = [
    signals(), signals(p99=math.nan), signals(ghost=ghost(3), output_tokens=2e5), nothing(), signals(ghost=ghost(12)),
    signals(ghost=None), signals(stale_hits=30.0), signals(qps=1e3, latency_sum=math.nan), signals(ghost=ghost(5)), signals(),
]  # fmt: skip
"""Windows of all kinds, one after the other."""

BLIND: dict[str, Callable[[], Policy]] = {
    "static": lambda: StaticPolicy(Knobs(1 << 22, 60.0, 0.1)),
    "static to the last bit": lambda: StaticPolicy(Knobs((1 << 22) + 1, 61.234567891, 0.1 + 1e-9)),
    "static outside the space": lambda: StaticPolicy(Knobs(1 << 50, math.inf, 1.0)),
    "hold": HoldPolicy,
    "middle of the grid": MiddlePolicy,
}
"""Policies that do not look."""

SEEING: dict[str, Callable[[], Policy]] = {
    "curve": CurvePolicy,
    "curve with hysteresis": lambda: CurvePolicy(0.1),
    "curve with a smoothing of its own": lambda: CurvePolicy(smoothing=0.1),
    "curve with both": lambda: CurvePolicy(0.02, 1.0),
    "last curve": LastCurvePolicy,
    "curve with an offset": lambda: OffsetPolicy((2.0, -3.0, 9.0)),
    "curve with a fine offset": lambda: OffsetPolicy((0.1234567, -0.0, 1e-7)),
    "hill climbing": HillClimbingPolicy,
    "hill climbing in one window": lambda: HillClimbingPolicy(step=0.5, restart=0.1, decay=0.9, period=1),
    "marginal hits": MarginalHitsPolicy,
    "marginal hits without smoothing": lambda: MarginalHitsPolicy(average=0.0, band=0.0, step=2.5),
    "ttl rule": TTLRulePolicy,
    "ttl rule with a base": lambda: TTLRulePolicy(12.5),
    "ttl approximation": TTLApproximationPolicy,
    "ttl approximation in leaps": lambda: TTLApproximationPolicy(gain=1e6, coverage=1.0, smoothing=1.0),
}
"""Policies that decide from what they see."""

TRAINED: dict[str, Callable[[], Policy]] = {
    "untrained network": lambda: PPOPolicy(Artifact("untrained", network(0))),
    "untrained network that remembers": lambda: PPOPolicy(Artifact("remembering", recurrent(0))),
    **{f"ppo:{name}": lambda name=name: load_policy(f"ppo:{name}") for name in pretrained()},  # type: ignore[misc]
}

POLICIES = {**BLIND, **SEEING, **TRAINED}

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())


def legal(proposal: Proposal, space: KnobSpace) -> None:
    knobs = proposal.knobs
    assert math.isfinite(knobs.ttl)
    assert space.contains(knobs)
    assert proposal.reason


def observe(*windows: ArmSignals, knobs: Knobs = KNOBS, prices: Prices = PRICES) -> list[Observation]:
    builder = ObservationBuilder(SPACE, prices)
    return [builder.build(window, knobs) for window in windows]


@every_policy
def test_it_is_a_policy_with_a_name(make: Callable[[], Policy]) -> None:
    policy = make()
    assert isinstance(policy, Policy)
    assert policy.name
    assert policy.name == make().name


def test_names_are_unique() -> None:
    names = [make().name for make in POLICIES.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("make", [*BLIND.values(), *SEEING.values()], ids=[*BLIND, *SEEING])
def test_its_name_loads_an_equal_policy(make: Callable[[], Policy]) -> None:
    policy = make()
    again = load_policy(policy.name)
    assert type(again) is type(policy)
    assert again.name == policy.name
    windows = observe(*MIXED)
    assert [again.decide(window) for window in windows] == [policy.decide(window) for window in windows]


def test_every_policy_that_has_a_name_is_held_to_this_contract() -> None:
    names = [make().name for make in [*BLIND.values(), *SEEING.values()]] + [f"ppo:{name}" for name in pretrained()]
    kinds = {name.partition(":")[0] for name in names} | {"ppo"}
    assert {listed.name for listed in policies()} <= kinds


@pytest.mark.parametrize("make", [*SEEING.values(), *TRAINED.values()], ids=[*SEEING, *TRAINED])
def test_it_holds_and_says_so_when_nothing_is_known(make: Callable[[], Policy]) -> None:
    policy = make()
    for observation in observe(nothing(), nothing(), nothing()):
        proposal = policy.decide(observation)
        assert proposal.knobs == KNOBS
        assert proposal.reason.startswith("held: ")


@every_policy
def test_it_proposes_legal_knobs_when_nothing_is_known(make: Callable[[], Policy]) -> None:
    for observation in observe(nothing(), nothing()):
        legal(make().decide(observation), SPACE)


@every_policy
def test_it_proposes_legal_knobs_from_a_space_of_another_scale(make: Callable[[], Policy]) -> None:
    space = KnobSpace(min_size=1 << 30, max_size=1 << 34, min_ttl=3600.0, max_ttl=1e6, max_warmup=0.0, size_steps=5, ttl_steps=3)
    builder = ObservationBuilder(space, PRICES)
    policy = make()
    for window in (signals(), signals(ghost=None), nothing()):
        legal(policy.decide(builder.build(window, KNOBS)), space)


@every_policy
def test_it_is_deterministic_after_a_reset(make: Callable[[], Policy]) -> None:
    windows = observe(*MIXED)
    policy = make()
    policy.reset()
    first = [policy.decide(window) for window in windows]
    policy.reset()
    assert [policy.decide(window) for window in windows] == first
    assert [proposal for policy in [make()] for proposal in map(policy.decide, windows)] == first


@every_policy
def test_two_of_a_kind_do_not_share_what_they_know(make: Callable[[], Policy]) -> None:
    windows = observe(*MIXED)
    alone = [proposal for policy in [make()] for proposal in map(policy.decide, windows)]
    one, other = make(), make()
    beside = []
    for window, elsewhere in zip(windows, reversed(windows), strict=True):
        other.decide(elsewhere)
        beside.append(one.decide(window))
    assert beside == alone


@every_policy
def test_it_does_not_change_the_observation(make: Callable[[], Policy]) -> None:
    observation = observe(signals())[0]
    before = observation.vector.copy()
    make().decide(observation)
    assert np.array_equal(observation.vector, before)
    assert observation.knobs == KNOBS


FREE = replace(PRICES, **{item.name: 0.0 for item in fields(Prices) if item.name != "time_scale"})
DEAR = replace(PRICES, memory_gib_hour=1e12, stale_answer=1e12, change_step=1e12, time_scale=1e12)

_ANY = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e308, -1.0, 5e-324]))
_NUMBERS = [f.name for f in fields(ArmSignals) if f.name not in ("arm", "hit_ratio_by_tier", "age", "ghost")]


@st.composite
def _windows(draw: st.DrawFn) -> ArmSignals:
    values: dict[str, Any] = {name: draw(_ANY) for name in draw(st.sets(st.sampled_from(_NUMBERS)))}
    kind = draw(st.sampled_from(["whole", "none", "broken"]))
    if kind == "none":
        values["ghost"] = None
    elif kind == "broken":
        whole = ghost()
        hits = whole.hits.copy()
        hits[draw(st.integers(0, 15)), draw(st.integers(0, 7))] = draw(_ANY)
        values["ghost"] = GhostCurve(whole.sizes, whole.ttls, hits, whole.stale_hits, draw(_ANY))
    return signals(**values)


@every_policy
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    windows=st.lists(_windows(), min_size=1, max_size=5),
    size=st.integers(0, 1 << 62),
    ttl=st.floats(5e-324, math.inf, exclude_min=False),
    prices=st.sampled_from([PRICES, FREE, DEAR]),
)
def test_it_proposes_legal_knobs_whatever_the_observation_holds(
    make: Callable[[], Policy], windows: list[ArmSignals], size: int, ttl: float, prices: Prices
) -> None:
    policy = make()
    for observation in observe(*windows, knobs=Knobs(size, ttl, 0.9), prices=prices):
        legal(policy.decide(observation), SPACE)
