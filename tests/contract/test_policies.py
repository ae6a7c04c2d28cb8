"""What every policy keeps, whatever it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.artifact import Artifact
from agents.baselines import HoldPolicy, MiddlePolicy, StaticPolicy
from agents.curve import CurvePolicy, LastCurvePolicy, OffsetPolicy
from agents.policy import Policy, Proposal
from agents.ppo import PPOPolicy
from agents.registry import load_policy, pretrained
from envs.observation import Observation, ObservationBuilder
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace
from tests.agents.observations import KNOBS, PRICES, SPACE, ghost, network, nothing, signals

POLICIES: dict[str, Callable[[], Policy]] = {
    "static": lambda: StaticPolicy(Knobs(1 << 22, 60.0, 0.1)),
    "static outside the space": lambda: StaticPolicy(Knobs(1 << 50, math.inf, 1.0)),
    "hold": HoldPolicy,
    "middle of the grid": MiddlePolicy,
    "curve": CurvePolicy,
    "curve with hysteresis": lambda: CurvePolicy(0.1),
    "last curve": LastCurvePolicy,
    "curve with an offset": lambda: OffsetPolicy((2.0, -3.0, 9.0)),
    "untrained network": lambda: PPOPolicy(Artifact("untrained", network(0), (3.0, 2.0, 2.0), {})),
    **{f"ppo:{name}": lambda name=name: load_policy(f"ppo:{name}") for name in pretrained()},  # type: ignore[misc]
}

every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES.keys())


def legal(proposal: Proposal, space: KnobSpace) -> None:
    knobs = proposal.knobs
    assert math.isfinite(knobs.ttl)
    assert space.contains(knobs)
    assert proposal.reason


def observe(*windows: ArmSignals, knobs: Knobs = KNOBS) -> list[Observation]:
    builder = ObservationBuilder(SPACE, PRICES)
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
    windows = observe(signals(), signals(p99=math.nan), signals(ghost=ghost(3)), nothing(), signals(ghost=ghost(12)))
    policy = make()
    policy.reset()
    first = [policy.decide(window) for window in windows]
    policy.reset()
    assert [policy.decide(window) for window in windows] == first
    assert [proposal for policy in [make()] for proposal in map(policy.decide, windows)] == first


@every_policy
def test_it_does_not_change_the_observation(make: Callable[[], Policy]) -> None:
    observation = observe(signals())[0]
    before = observation.vector.copy()
    make().decide(observation)
    assert np.array_equal(observation.vector, before)
    assert observation.knobs == KNOBS


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
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(windows=st.lists(_windows(), min_size=1, max_size=3), size=st.integers(0, 1 << 62), ttl=st.floats(1e-300, math.inf))
def test_it_proposes_legal_knobs_whatever_the_observation_holds(
    make: Callable[[], Policy], windows: list[ArmSignals], size: int, ttl: float
) -> None:
    policy = make()
    for observation in observe(*windows, knobs=Knobs(size, ttl, 0.9)):
        legal(policy.decide(observation), SPACE)
