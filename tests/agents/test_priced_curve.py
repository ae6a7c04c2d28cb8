"""A policy's own smoothed curve is what the observation's would be under that smoothing, and follows the prices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agents.curve import CurvePolicy
from agents.priced_curve import PricedCurve
from envs.observation import Observation, ObservationBuilder
from serving.knobs import KnobSpace
from tests.agents.observations import KNOBS, PRICES, SPACE, ghost, nothing, signals

WINDOWS = [
    signals(ghost=ghost(row, requests), requests=requests, output_tokens=tokens)
    for row, requests, tokens in ((8, 300.0, 5e4), (3, 900.0, 2e5), (12, 100.0, 1e4), (6, 300.0, 5e4), (10, 500.0, 9e4))
]
DEAR = replace(PRICES, memory_gib_hour=300.0)


def observe(smoothing: float = 0.3, **changes: object) -> list[Observation]:
    builder = ObservationBuilder(SPACE, DEAR, smoothing)
    return [replace(builder.build(window, KNOBS), **changes) for window in WINDOWS]  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [0.05, 0.3, 1.0])
def test_a_smoothing_of_its_own_is_what_the_observations_would_be(weight: float) -> None:
    own = CurvePolicy(smoothing=weight)
    for seen, other in zip(observe(), observe(weight), strict=True):
        proposal = own.decide(seen)
        assert proposal == CurvePolicy().decide(other)
        assert proposal.knobs == other.anchor


def test_the_smoothing_makes_a_difference() -> None:
    slow, fast = CurvePolicy(smoothing=0.05), CurvePolicy(smoothing=1.0)
    paths = [[policy.decide(observation).knobs for observation in observe()] for policy in (slow, fast)]
    assert paths[0] != paths[1]


def test_its_own_curve_has_hysteresis_too() -> None:
    policy, eager = CurvePolicy(0.9, smoothing=0.3), CurvePolicy(smoothing=0.3)
    for observation in observe():
        assert policy.decide(observation).knobs == KNOBS
        assert eager.decide(observation).knobs != KNOBS


def test_after_a_reset_nothing_is_left_of_the_windows_before() -> None:
    policy = CurvePolicy(smoothing=0.05)
    first, *rest = observe()
    fresh = policy.decide(first)
    for observation in rest:
        policy.decide(observation)
    policy.reset()
    assert policy.decide(first) == fresh


def test_when_the_prices_change_the_same_windows_are_read_under_the_new_ones() -> None:
    changing, always = PricedCurve(0.3), PricedCurve(0.3)
    for number, observation in enumerate(observe()):
        old = changing.read(replace(observation, prices=DEAR if number >= 3 else PRICES))
        new = always.read(replace(observation, prices=DEAR))
        assert old is not None
        assert new is not None
        same = np.allclose(old.costs, new.costs, rtol=1e-12)
        assert same == (number >= 3)
        assert np.array_equal(old.curve.hits, new.curve.hits)


def test_a_curve_that_is_not_there_for_a_while_is_no_longer_trusted() -> None:
    curve = PricedCurve(1.0, patience=2)
    first = observe()[0]
    missing = ObservationBuilder(SPACE, DEAR).build(nothing(), KNOBS)
    assert curve.read(first) is not None
    assert [curve.read(missing) is None for _ in range(3)] == [False, False, True]


def test_prices_that_change_while_the_curve_is_missing_do_not_forget_it() -> None:
    curve = PricedCurve(1.0, patience=3)
    missing = ObservationBuilder(SPACE, DEAR).build(nothing(), KNOBS)
    curve.read(observe()[0])
    curve.read(missing)
    reading = curve.read(replace(missing, prices=PRICES))
    assert reading is not None
    assert reading.curve.requests == 300.0


def test_another_grid_starts_the_curve_anew() -> None:
    other = KnobSpace(min_size=1 << 20, max_size=1 << 30, min_ttl=2.0, max_ttl=600.0)
    curve = PricedCurve(0.05)
    for observation in observe():
        curve.read(observation)
    moved = replace(ghost(4), sizes=other.sizes)
    reading = curve.read(ObservationBuilder(other, DEAR).build(signals(ghost=moved), KNOBS))
    assert reading is not None
    assert np.array_equal(reading.curve.sizes, other.sizes)


@pytest.mark.parametrize("weight", [0.0, -0.1, 1.1, float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"smoothing: expected a weight in \(0, 1\]"):
        PricedCurve(weight)
    with pytest.raises(ValueError, match=r"curve policy: smoothing: expected a weight in \(0, 1\]"):
        CurvePolicy(smoothing=weight)
