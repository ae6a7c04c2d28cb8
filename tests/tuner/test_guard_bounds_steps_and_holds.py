"""The guard: bounds, step limit, dead band, and holding where the evidence is missing, stale or not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.policy import Proposal
from envs.signals import ArmSignals
from serving.knobs import MIB, Knobs, KnobSpace
from tuner.guard import GuardLimits, judge

SPACE = KnobSpace()
LIMITS = GuardLimits()
GOOD = ArmSignals(arm="treatment", at=100.0, window=10.0, requests=500.0, hit_ratio=0.5, p99=0.8, age={"requests": 1.0})
HERE = SPACE.from_steps([6, 4, 1])


def propose(knobs: Knobs) -> Proposal:
    return Proposal(knobs, "a test")


def test_a_small_enough_proposal_is_applied_as_it_is() -> None:
    wanted = SPACE.from_steps([7.5, 3, 2])
    verdict = judge(propose(wanted), HERE, GOOD, SPACE, LIMITS)
    assert (verdict.action, verdict.knobs, verdict.changes) == ("apply", wanted, True)


def test_a_far_proposal_is_limited_to_the_step_and_names_the_knob() -> None:
    verdict = judge(propose(SPACE.from_steps([14, 4.5, 1])), HERE, GOOD, SPACE, LIMITS)
    assert verdict.action == "limit"
    assert "cache_size" in verdict.reason
    assert "ttl" not in verdict.reason
    np.testing.assert_allclose(SPACE.to_steps(verdict.knobs), [8, 4.5, 1], atol=1e-3)


def test_a_proposal_out_of_bounds_is_moved_inside() -> None:
    top = SPACE.from_steps([15, 7, 5])
    verdict = judge(propose(Knobs(5 * SPACE.max_size, 10 * SPACE.max_ttl, 1.0)), top, GOOD, SPACE, LIMITS)
    assert verdict.action in ("limit", "keep")
    assert SPACE.contains(verdict.knobs)


def test_a_change_within_the_dead_band_writes_no_version() -> None:
    verdict = judge(propose(SPACE.from_steps([6.1, 4.1, 1.1])), HERE, GOOD, SPACE, LIMITS)
    assert (verdict.action, verdict.knobs, verdict.changes) == ("keep", HERE, False)


@pytest.mark.parametrize("name", ["requests", "hit_ratio", "p99"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_missing_or_non_finite_signals_hold_the_knobs(name: str, value: float) -> None:
    verdict = judge(propose(SPACE.from_steps([8, 4, 1])), HERE, replace(GOOD, **{name: value}), SPACE, LIMITS)  # type: ignore[arg-type]
    assert (verdict.action, verdict.knobs) == ("hold", HERE)
    assert name in verdict.reason


QUIET = replace(GOOD, requests=0.0, hit_ratio=math.nan, p99=math.nan)
UNASKED = replace(GOOD, hit_ratio=math.nan, hit_ratio_by_tier={"memory": math.nan}, age={"requests": 1.0, "hits": 1.0})


@pytest.mark.parametrize(("signals", "told"), [(QUIET, "no traffic in the window of 10 s"), (UNASKED, "no lookups in the")])
def test_a_window_in_which_nothing_happened_is_told_as_such(signals: ArmSignals, told: str) -> None:
    verdict = judge(propose(SPACE.from_steps([8, 4, 1])), HERE, signals, SPACE, LIMITS)
    assert (verdict.action, verdict.knobs) == ("hold", HERE)
    assert told in verdict.reason
    assert "missing" not in verdict.reason


@pytest.mark.parametrize(
    ("signals", "told"),
    [
        (replace(QUIET, requests=math.nan), "missing or not finite: requests, hit_ratio, p99"),
        (replace(QUIET, age={"requests": LIMITS.max_age + 1}), "stale: requests"),
        (replace(UNASKED, age={"hits": LIMITS.max_age + 1}), "stale: hits"),
        (replace(UNASKED, age={"hits": math.inf}), "missing or not finite: hit_ratio"),
        (replace(UNASKED, hit_ratio_by_tier={"memory": 0.1}), "missing or not finite: hit_ratio"),
        (replace(UNASKED, hit_ratio_by_tier={}), "missing or not finite: hit_ratio"),
        (replace(UNASKED, p99=math.nan), "missing or not finite: hit_ratio, p99"),
    ],
)
def test_a_real_lack_of_signals_is_not_taken_for_a_quiet_window(signals: ArmSignals, told: str) -> None:
    assert told in judge(propose(HERE), HERE, signals, SPACE, LIMITS).reason


@pytest.mark.parametrize("age", [LIMITS.max_age + 1, math.inf, math.nan])
def test_stale_signals_hold_the_knobs(age: float) -> None:
    verdict = judge(propose(SPACE.from_steps([8, 4, 1])), HERE, replace(GOOD, age={"requests": age}), SPACE, LIMITS)
    assert verdict.action == "hold"
    assert "stale" in verdict.reason


def test_too_few_requests_hold_the_knobs() -> None:
    verdict = judge(propose(SPACE.from_steps([8, 4, 1])), HERE, replace(GOOD, requests=3.0), SPACE, LIMITS)
    assert verdict.action == "hold"


def test_holding_keeps_even_knobs_outside_the_space() -> None:
    outside = Knobs(MIB // 2, 1.0, 0.9)
    verdict = judge(propose(HERE), outside, replace(GOOD, p99=math.nan), SPACE, LIMITS)
    assert verdict.knobs == outside


finite = st.floats(-30, 30)


@given(
    st.tuples(finite, finite, finite),
    st.tuples(finite, finite, finite),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_whatever_comes_the_move_is_bounded_and_inside(
    wanted: tuple[float, float, float], here: tuple[float, float, float], hit_ratio: float, p99: float
) -> None:
    current = SPACE.from_steps(here)
    verdict = judge(propose(SPACE.from_steps(wanted)), current, replace(GOOD, hit_ratio=hit_ratio, p99=p99), SPACE, LIMITS)
    assert SPACE.contains(verdict.knobs)
    move = np.abs(SPACE.to_steps(verdict.knobs) - SPACE.to_steps(current))
    assert np.all(move <= np.asarray(LIMITS.max_steps) + 1e-3)
    if not verdict.changes:
        assert verdict.knobs == current


@pytest.mark.parametrize("bad", [{"max_steps": (0.0, 1.0, 1.0)}, {"max_steps": (1.0, math.inf, 1.0)}, {"max_age": math.nan}])
def test_nonsensical_limits_are_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        GuardLimits(**bad)  # type: ignore[arg-type]
