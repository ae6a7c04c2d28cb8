"""Scenarios are drawn at the workload's own scale, and evaluation pairs policies on the same requests."""

from __future__ import annotations

import numpy as np
import pytest

from agents.baselines import HoldPolicy, MiddlePolicy
from agents.curve import CurvePolicy
from envs.objective import Prices
from envs.workloads import sessions
from experiments.evaluate import TERMS, compare, play
from experiments.scenarios import Scale, one_arm, scale_to, session_trace, stretches

SHORT = Scale(intervals=(6, 6))


def test_a_workload_is_squeezed_with_memory_priced_by_its_own_time() -> None:
    rng = np.random.default_rng(0)
    trace = session_trace(rng)
    scenario = scale_to(trace, rng, scale=Scale(intervals=(30, 30), own_memory_price=1.0), static_start=1.0)
    assert scenario.trace.duration == pytest.approx(150.0)
    assert scenario.config.prices.time_scale == pytest.approx(trace.duration / 150.0)
    assert scenario.config.prices.memory_gib_hour == Prices().memory_gib_hour
    footprint = int(trace.size[np.unique(trace.key, return_index=True)[1]].sum())
    space = scenario.config.space
    assert space.max_size / 2 < footprint <= space.max_size
    assert scenario.initial is not None
    assert space.contains(scenario.initial)


def test_a_drawn_memory_price_is_the_asked_share_of_the_tokens() -> None:
    rng = np.random.default_rng(1)
    trace = session_trace(rng)
    scenario = scale_to(trace, rng, scale=Scale(memory_share=(0.5, 0.5), own_memory_price=0.0))
    prices = scenario.config.prices
    tokens = 1e-6 * (trace.input_tokens.sum() * prices.input_mtok + trace.output_tokens.sum() * prices.output_mtok)
    memory = scenario.config.space.max_size / 2**30 * trace.duration / 3600 * prices.memory_gib_hour
    assert memory == pytest.approx(0.5 * tokens)


def test_equal_seeds_draw_equal_scenarios() -> None:
    one, two = (scale_to(session_trace(rng), rng) for rng in (np.random.default_rng(7), np.random.default_rng(7)))
    assert np.array_equal(one.trace.key, two.trace.key)
    assert (one.config, one.interval, one.initial) == (two.config, two.interval, two.initial)


def test_arms_share_the_keys_out() -> None:
    trace = sessions(4_000, 1_000, seed=3)
    arm = one_arm(trace, salt=5)
    other = set(np.unique(trace.key)) - set(np.unique(arm.key))
    assert 0.4 < len(np.unique(arm.key)) / len(np.unique(trace.key)) < 0.6
    assert not other & set(arm.key)
    assert np.sum(np.isin(trace.key, arm.key)) == len(arm)


def test_stretches_stay_within_their_part_of_the_trace() -> None:
    trace = sessions(3_000, 3_000, alpha=0.0, drift=0.0, repeat=0.0, seed=2)
    late = stretches(trace, requests=(200, 300), within=(0.7, 1.0))
    allowed = set(trace.key[int(0.7 * len(trace)) :])
    for seed in range(5):
        part = late(np.random.default_rng(seed))
        assert 50 < len(part) <= 300
        assert set(part.key) <= allowed


def test_a_trace_too_short_to_squeeze_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two requests at different times, got 1"):
        scale_to(sessions(1, 1), np.random.default_rng(0))


def test_policies_are_compared_on_the_same_requests() -> None:
    scenarios = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        scenarios.append(scale_to(session_trace(rng), rng, scale=SHORT, static_start=1.0))
    standings = compare([HoldPolicy(), MiddlePolicy(), CurvePolicy()], scenarios, length=6)
    hold, middle, curve = standings
    assert [row.policy for row in standings] == ["hold", "mid-grid", "curve"]
    assert (curve.relative, curve.typical, curve.low, curve.high, curve.wins) == (1.0, 1.0, 1.0, 1.0, 0)
    each = [play(HoldPolicy(), item, length=6, seed=n).dollars / play(CurvePolicy(), item, length=6, seed=n).dollars
            for n, item in enumerate(scenarios)]  # fmt: skip
    assert hold.typical == pytest.approx(np.prod(each) ** (1 / 3))
    assert hold.relative == pytest.approx(hold.cost / curve.cost)
    for row in (hold, middle):
        assert row.low <= row.relative <= row.high
        assert sum(row.terms.values()) == pytest.approx(row.cost)
        assert set(row.terms) == set(TERMS)
    requests = {play(policy, scenarios[0], length=6).requests for policy in (HoldPolicy(), CurvePolicy())}
    assert len(requests) == 1


def test_a_comparison_without_its_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="'curve' among the policies"):
        compare([HoldPolicy()], [], length=5)
