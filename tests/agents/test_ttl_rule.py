"""The article's TTL rule is its formula on a base that does not move."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.ttl_rule import TTLRulePolicy, ttl_factor
from envs.objective import Prices
from envs.observation import Observation, ObservationBuilder
from serving.knobs import Knobs
from tests.agents.observations import PRICES, SPACE, signals

KNOBS = Knobs(1 << 20, 30.0, 0.2)


def observed(knobs: Knobs = KNOBS, prices: Prices = PRICES, **changes: float) -> Observation:
    return ObservationBuilder(SPACE, prices).build(signals(**changes), knobs)


@pytest.mark.parametrize(
    ("error_rate", "qps", "factor"),
    [(0.0, 0.0, 1.5), (0.0, 9.0, 1.8), (0.0, 99.0, 2.0), (0.25, 0.0, 1.0), (0.5, 9.0, 0.8), (0.6, 0.0, 0.5), (1.0, 1e6, 1.3)],
)
def test_the_factor_is_the_formula(error_rate: float, qps: float, factor: float) -> None:
    assert ttl_factor(error_rate, qps) == pytest.approx(factor)


@settings(max_examples=60, deadline=None)
@given(error_rate=st.floats(0, 1), qps=st.floats(0, 1e9), more=st.floats(0, 1e9))
def test_more_load_never_shortens_and_more_errors_never_lengthen(error_rate: float, qps: float, more: float) -> None:
    factor = ttl_factor(error_rate, qps)
    assert 0.5 <= factor <= 2.0
    assert ttl_factor(error_rate, qps + more) >= factor
    assert ttl_factor(min(error_rate + more, 1.0), qps) <= factor


def test_it_is_the_base_times_the_factor_of_the_stale_share_of_hits() -> None:
    # 300 requests, half of them hits, 30 of those stale
    proposal = TTLRulePolicy(40.0).decide(observed(qps=9.0, hit_ratio=0.5, stale_hits=30.0))
    assert proposal.details["error_rate"] == pytest.approx(0.2)
    assert proposal.knobs.ttl == pytest.approx(40.0 * (1.5 - 0.4 + 0.3))
    assert (proposal.knobs.cache_size, proposal.knobs.warmup_ratio) == (KNOBS.cache_size, KNOBS.warmup_ratio)
    assert "20.0% of hits stale, 9 requests/s" in proposal.reason


def test_the_base_is_the_ttl_that_was_in_force_first_and_does_not_grow_with_its_own_proposals() -> None:
    policy = TTLRulePolicy()
    knobs = KNOBS
    for _ in range(5):
        knobs = policy.decide(observed(knobs, qps=0.0, stale_hits=0.0)).knobs
        assert knobs.ttl == pytest.approx(1.5 * KNOBS.ttl)
    policy.reset()
    assert policy.decide(observed(knobs, qps=0.0, stale_hits=0.0)).knobs.ttl == pytest.approx(1.5 * knobs.ttl)


def test_load_is_counted_in_the_workloads_own_time() -> None:
    compressed = replace(PRICES, time_scale=1000.0)
    proposal = TTLRulePolicy().decide(observed(prices=compressed, qps=9000.0, stale_hits=0.0))
    assert proposal.details["factor"] == pytest.approx(1.8)


def test_the_ttl_stays_within_the_space_and_the_reason_says_so() -> None:
    proposal = TTLRulePolicy(500.0).decide(observed(qps=99.0, stale_hits=0.0))
    assert proposal.knobs.ttl == SPACE.max_ttl
    assert "bounded to 10 min" in proposal.reason
    assert TTLRulePolicy(5e-324).decide(observed(stale_hits=1e9)).knobs.ttl == SPACE.min_ttl


def test_without_hits_there_is_no_wrong_answer() -> None:
    proposal = TTLRulePolicy().decide(observed(qps=0.0, hit_ratio=0.0, stale_hits=0.0))
    assert proposal.details["error_rate"] == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qps": math.nan}, "requests per second are not known"),
        ({"qps": math.inf}, "requests per second are not known"),
        ({"stale_hits": math.nan}, "stale share of hits is not known"),
        ({"hit_ratio": math.nan}, "stale share of hits is not known"),
        ({"stale_hits": -1.0}, "stale share of hits is not known"),
    ],
)
def test_what_it_cannot_compute_it_does_not_change(changes: dict[str, Any], words: str) -> None:
    proposal = TTLRulePolicy(40.0).decide(observed(**changes))
    assert proposal.knobs == KNOBS
    assert words in proposal.reason
