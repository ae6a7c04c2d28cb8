import math

import numpy as np
import pytest

from envs.objective import Prices, Usage, price
from experiments import stats
from experiments.measure import Method, arm_source, figures, p99_difference, repriced
from serving.knobs import MIB, Knobs
from tests.experiments.samples import SPACE, START, STATIC, decision, frame, traffic

PRICES = Prices(slo_p99=0.3, time_scale=100.0)
QUICK = Method(replicates=100)


def measured(rows, decisions=(), *, initial=STATIC, start=0.0, end=100.0, prices=PRICES, **how):
    source = arm_source("control", frame(rows), list(decisions), initial=initial, space=SPACE)
    return figures(source, START + start, START + end, prices=prices, method=QUICK, **how)


ROWS = [
    {"at": START + 1, "key": 1, "outcome": "miss", "latency": 0.5},
    {"at": START + 2, "key": 1, "outcome": "hit", "tier": "memory", "latency": 0.01, "stale": 0.25},
    {"at": START + 3, "key": 2, "outcome": "miss", "latency": 0.4, "output_tokens": 300},
    {"at": START + 4, "key": 2, "outcome": "semantic_hit", "tier": "vector", "latency": 0.02, "stale": 0.5},
    {"at": START + 5, "key": 3, "outcome": "error", "latency": 0.2, "status": 502, "output_tokens": 999},
    {"at": START + 6, "key": 4, "outcome": "bypass", "latency": 9.0, "output_tokens": 999},
    {"at": START + 7, "key": 5, "arm": "treatment", "outcome": "miss", "latency": 9.0},
]


def test_hits_tokens_and_staleness_are_counted_as_the_objective_prices_them():
    result = measured(ROWS)
    assert (result.requests, result.keys, result.errors) == (5, 3, 1)
    assert result.hit_ratio.value == pytest.approx(2 / 5)
    assert result.hit_ratio_by_tier == {"memory": 0.2, "vector": 0.2}
    assert (result.p50, result.p99.value) == (0.2, 0.5)
    expected = Usage(
        requests=5,
        input_tokens=20,
        output_tokens=400,
        latency_seconds=1.13,
        p99=0.5,
        stale_hits=0.75,
        budget_bytes=16 * MIB,
        duration=100.0,
    )
    assert result.usage.output_tokens == expected.output_tokens
    assert result.terms.to_dict() == pytest.approx(price(expected, PRICES).to_dict())
    assert result.cost.value == pytest.approx(result.terms.total)
    assert result.cost.low <= result.cost.value <= result.cost.high


def test_a_request_on_the_border_belongs_to_one_window_only():
    first = measured(ROWS, end=3.0, last=False)
    second = measured(ROWS, start=3.0)
    assert (first.requests, second.requests) == (2, 3)
    assert measured(ROWS, end=3.0).requests == 3


def test_refreshes_evictions_and_changes_come_from_the_decisions():
    big = Knobs(64 * MIB, 360.0, 0.0)
    decisions = [
        decision(3.0, "control", window=3.0, applied=big, evictions=7.0, refresh_input_tokens=10.0, refresh_output_tokens=90.0),
        decision(5.5, "control", window=2.5, current=big, verdict="keep", evictions=1.0),
    ]
    result = measured(ROWS, decisions, end=10.0)
    assert result.evictions == pytest.approx(8.0)
    assert result.terms.refresh == pytest.approx((10 * PRICES.input_mtok + 90 * PRICES.output_mtok) * 1e-6 * 1000 / 5)
    assert result.usage.budget_bytes == pytest.approx((3 * 16 + 7 * 64) / 10 * MIB)
    steps = 15 * math.log(4) / math.log(256)
    assert result.usage.change_steps == pytest.approx(steps * 3 / 5)  # 3 of the 5 requests came in the interval after the change


def test_an_arm_without_requests_has_no_figures_but_no_failure():
    result = measured([{"at": START, "arm": "treatment"}])
    assert result.requests == 0
    assert math.isnan(result.hit_ratio.value)
    assert math.isnan(result.cost.value)
    assert not result.p99.known
    assert result.hit_ratio_by_tier == {}


def test_unknown_knobs_make_the_cost_unknown_and_nothing_else():
    result = measured(ROWS, initial=None)
    assert math.isnan(result.cost.value)
    assert not result.cost.known
    assert result.hit_ratio.value == pytest.approx(0.4)


def test_the_cost_of_skewed_keys_is_told_from_itself_as_rarely_as_it_should_be():
    log = traffic(3, requests=6000, keys=500, exponent=1.0)
    keys = np.unique(log["key"])
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(60):
        chosen = rng.permutation(keys)[: len(keys) // 2]
        split = log.assign(arm=np.where(np.isin(log["key"], chosen), "control", "treatment"))
        arms = [arm_source(arm, split, [], initial=STATIC, space=SPACE) for arm in ("control", "treatment")]
        prices = Prices(slo_p99=9.0)
        sides = [figures(arm, START, START + 120.0, prices=prices, method=QUICK).cost_estimate for arm in arms]
        difference = stats.interval(stats.difference(*sides))
        found += not difference.low <= 0 <= difference.high
    assert found <= 9  # nominal 3 of 60; more than 9 has a chance below 0.1 %


def test_the_p99_difference_of_like_arms_holds_zero_and_of_unlike_arms_does_not():
    log = traffic(4)
    slow = log.assign(latency=np.where(log["arm"] == "treatment", log["latency"] * 3, log["latency"]))
    for table, holds in ((log, True), (slow, False)):
        control, treatment = (
            figures(arm_source(arm, table, [], initial=STATIC, space=SPACE), START, START + 120, prices=PRICES, method=QUICK)
            for arm in ("control", "treatment")
        )
        difference = p99_difference(treatment, control, QUICK)
        assert (difference.low <= 0 <= difference.high) is holds


def test_other_prices_give_what_measuring_with_them_would():
    log = traffic(2, memory=(5.0, 30.0))
    decisions = [decision(20.0, "control", applied=Knobs(64 * MIB, 360.0, 0.1), refresh_output_tokens=500.0)]
    source = arm_source("control", log, decisions, initial=STATIC, space=SPACE)
    other = Prices(input_mtok=3.0, output_mtok=9.0, memory_gib_hour=4.0, stale_answer=0.1, slo_p99=0.05, time_scale=100.0)
    measured = [figures(source, START, START + 120.0, prices=prices, method=QUICK) for prices in (PRICES, other)]
    again = repriced(measured[0], other, QUICK)
    assert again.terms == measured[1].terms
    assert again.terms.slo > 0
    assert again.cost == measured[1].cost
    assert again.cost_estimate == measured[1].cost_estimate
    assert again.hit_ratio == measured[0].hit_ratio
