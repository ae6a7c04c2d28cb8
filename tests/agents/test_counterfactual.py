"""What another setting would have cost on the same requests, from the measured window and its ghost curve."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.counterfactual import FEWEST_WINDOWS, MOST_FACTOR, Service, ServiceMeter, counterfactual, refilled, usable
from envs.objective import COST_TERMS, Cost, price
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs
from tests.agents.observations import KNOBS, PRICES, SPACE, ghost, nothing, signals

SERVICE = Service(input_tokens=50.0, output_tokens=300.0, miss_latency=0.3, hit_latency=0.003)
LARGER = replace(KNOBS, cache_size=4 * KNOBS.cache_size)


def estimate(window: ArmSignals, other: Knobs, service: Service = SERVICE, applied: Knobs = KNOBS, steps: float = 0.0) -> Cost:
    cost = counterfactual(window, applied, other, service, PRICES, change_steps=steps)
    assert cost is not None
    return cost


@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_the_setting_that_was_in_force_costs_what_was_measured(warmup: float) -> None:
    window = signals(refresh_output_tokens=4000.0, refresh_input_tokens=900.0)
    applied = replace(KNOBS, warmup_ratio=warmup)
    service = replace(SERVICE, warmed_hits=0.05, warmed_stale=-0.01, miss_response=1e-3, p99_response=1e-3)
    measured = price(window.usage(applied.cache_size, 1.5), PRICES)
    assert estimate(window, applied, service, applied, steps=1.5).to_dict() == pytest.approx(measured.to_dict())


def test_hits_that_the_ghost_sees_at_the_other_setting_save_the_tokens_and_the_time_of_so_many_misses() -> None:
    window = signals()
    curve = window.ghost
    assert curve is not None
    # A point of the grid and one of 4 grid steps of size above it: what lies between is not interpolated.
    low, high = (Knobs(int(SPACE.sizes[row]), float(SPACE.ttls[5])) for row in (2, 6))
    more = float(curve.hits[6, 5] - curve.hits[2, 5])
    before, after = (price(window.usage(low.cache_size), PRICES), estimate(window, high, applied=low))
    tokens = more * (50.0 * PRICES.input_mtok + 300.0 * PRICES.output_mtok) * 1e-6 * 1000.0 / window.requests
    assert before.tokens - after.tokens == pytest.approx(tokens)
    seconds = more * (window.miss_latency - 0.003) * PRICES.latency_second * 1000.0 / window.requests
    assert before.latency - after.latency == pytest.approx(seconds)
    assert after.memory / before.memory == pytest.approx(high.cache_size / low.cache_size)


def test_what_the_ghost_is_wrong_by_at_both_settings_cancels() -> None:
    exact, worse = (estimate(signals(hit_ratio=ratio), LARGER) for ratio in (0.4, 0.3))
    assert exact.tokens == pytest.approx(worse.tokens)  # the measured tokens are the same, and so is the difference in hits


def test_without_warm_up_nothing_is_refreshed_and_what_warm_up_added_is_gone() -> None:
    window = signals(refresh_output_tokens=6000.0, refresh_input_tokens=100.0)
    warm = replace(KNOBS, warmup_ratio=0.2)
    service = replace(SERVICE, warmed_hits=0.1, warmed_stale=-0.005)
    measured, cold = price(window.usage(KNOBS.cache_size), PRICES), estimate(window, KNOBS, service, warm)
    assert cold.refresh == 0.0 < measured.refresh
    tokens = 0.1 * (50.0 * PRICES.input_mtok + 300.0 * PRICES.output_mtok) * 1e-6 * 1000.0
    assert cold.tokens - measured.tokens == pytest.approx(tokens)
    assert cold.staleness > measured.staleness * (0.3 / 0.4)
    half = estimate(window, replace(KNOBS, warmup_ratio=0.1), service, warm)
    assert half.refresh == pytest.approx(measured.refresh / 2)


def test_more_load_on_the_model_makes_misses_slower_and_p99_higher_up_to_a_bound() -> None:
    smaller = replace(KNOBS, cache_size=int(SPACE.min_size))
    answering = replace(SERVICE, miss_response=1e-4, p99_response=1e-4)
    window = signals(p99=PRICES.slo_p99 * 2)
    plain, slower = estimate(window, smaller), estimate(window, smaller, answering)
    assert slower.latency > plain.latency
    assert slower.slo > plain.slo == pytest.approx(PRICES.slo_p99 * PRICES.slo_second)
    wild = estimate(window, smaller, replace(answering, p99_response=1e9))
    assert wild.slo == pytest.approx((2 * MOST_FACTOR - 1) * PRICES.slo_p99 * PRICES.slo_second)


def test_the_change_is_the_other_settings_own() -> None:
    assert estimate(signals(), LARGER, steps=2.0).change == pytest.approx(2.0 * PRICES.change_step)


@pytest.mark.parametrize(
    "changes",
    [
        {"ghost": None}, {"requests": 0.0}, {"requests": math.nan}, {"hit_ratio": math.nan}, {"latency_sum": math.inf},
        {"input_tokens": -1.0}, {"window": 0.0}, {"stale_hits": math.nan}, {"ghost": ghost(requests=0.0)},
        {"ghost": GhostCurve(SPACE.sizes[::-1], SPACE.ttls, ghost().hits, ghost().stale_hits, 300.0)},
        {"ghost": GhostCurve(SPACE.sizes, SPACE.ttls, ghost().hits * math.nan, ghost().stale_hits, 300.0)},
        {"ghost": GhostCurve(SPACE.sizes, SPACE.ttls, ghost().hits[:3], ghost().stale_hits, 300.0)},
    ],
)  # fmt: skip
def test_a_window_that_cannot_tell_says_nothing(changes: dict[str, Any]) -> None:
    assert counterfactual(signals(**changes), KNOBS, LARGER, SERVICE, PRICES) is None


def test_nothing_is_said_before_the_first_miss_was_seen() -> None:
    assert counterfactual(signals(), KNOBS, LARGER, ServiceMeter().service, PRICES) is None
    meter = ServiceMeter()
    meter.update(nothing(), KNOBS)
    meter.update(signals(hit_ratio=1.0), KNOBS)
    assert not meter.service.known
    meter.update(signals(), KNOBS)
    assert meter.service.output_tokens == pytest.approx(5e4 / 180.0)


def test_the_meter_learns_how_latency_answers_to_load_and_says_nothing_of_it_too_early() -> None:
    meter = ServiceMeter()
    rng = np.random.default_rng(0)
    for number in range(60):
        load = float(rng.uniform(1e3, 1e4))
        meter.update(signals(output_tokens=5.0 * load, p99=0.2 * math.exp(2e-4 * load), miss_latency=0.3), KNOBS)
        if number < FEWEST_WINDOWS - 1:
            assert meter.service.p99_response == 0.0
    assert meter.service.p99_response == pytest.approx(2e-4, rel=0.01)
    assert meter.service.miss_response == 0.0  # it does not answer at all


def test_the_meter_credits_warm_up_only_with_what_windows_without_it_lack() -> None:
    meter = ServiceMeter()
    warm = replace(KNOBS, warmup_ratio=0.3)
    for _ in range(50):
        meter.update(signals(hit_ratio=0.5), warm)
    assert meter.service.warmed_hits == 0.0  # what the ghost is wrong by anyway is not known
    for _ in range(50):
        meter.update(signals(hit_ratio=0.45), KNOBS)
    assert 0.03 < meter.service.warmed_hits < 0.05


def test_a_reset_meter_is_a_new_one() -> None:
    meter = ServiceMeter()
    for number in range(20):
        meter.update(signals(output_tokens=1e4 + 1e3 * number, p99=1.0 + number), KNOBS)
    meter.reset()
    fresh = ServiceMeter()
    for each in (meter, fresh):
        each.update(signals(), KNOBS)
    assert meter.service == fresh.service


_ANY = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e308, -1.0, 5e-324, 1e14]))
_NUMBERS = [item.name for item in fields(ArmSignals) if item.name not in ("arm", "hit_ratio_by_tier", "age", "ghost")]


@pytest.mark.parametrize("p99", [math.inf, -1.0, 1e300])
def test_a_broken_p99_gives_no_estimate_and_a_missing_one_no_hinge(p99: float) -> None:
    meter = ServiceMeter()
    meter.update(signals(), KNOBS)
    assert counterfactual(signals(p99=p99), KNOBS, LARGER, meter.service, PRICES) is None
    missing = counterfactual(signals(p99=math.nan), KNOBS, LARGER, meter.service, PRICES)
    assert missing is not None
    assert missing.slo == 0.0


def test_requests_so_few_that_no_price_for_a_thousand_is_finite_give_no_estimate() -> None:
    meter = ServiceMeter()
    meter.update(signals(), KNOBS)
    assert counterfactual(signals(requests=5e-324, stale_hits=0.0), KNOBS, LARGER, meter.service, PRICES) is None


@settings(max_examples=150, deadline=None)
@given(
    windows=st.lists(st.dictionaries(st.sampled_from(_NUMBERS), _ANY, max_size=6), min_size=1, max_size=4),
    cell=_ANY,
    requests=_ANY,
    size=st.integers(0, 1 << 62),
    ttl=st.floats(1e-300, math.inf),
)
def test_an_estimate_is_finite_or_there_is_none(
    windows: list[dict[str, float]], cell: float, requests: float, size: int, ttl: float
) -> None:
    meter = ServiceMeter()
    for changes in windows:
        window = signals(**changes)
        meter.update(window, KNOBS)
        broken = ghost()
        broken.hits[3, 3] = cell
        for seen in (
            window,
            replace(window, ghost=GhostCurve(broken.sizes, broken.ttls, broken.hits, broken.stale_hits, requests)),
        ):
            cost = counterfactual(seen, Knobs(size, ttl, 0.4), LARGER, meter.service, PRICES)
            if cost is not None:
                assert all(math.isfinite(getattr(cost, term)) and getattr(cost, term) >= 0.0 for term in COST_TERMS)
    values = [getattr(meter.service, item.name) for item in fields(Service)]
    assert not any(math.isinf(value) for value in values if isinstance(value, float))


def test_a_whole_curve_is_usable_and_a_broken_one_is_not() -> None:
    assert usable(ghost())
    assert not usable(replace(ghost(), requests=math.nan))
    assert not usable(replace(ghost(), ttls=np.array([math.nan] * SPACE.ttl_steps)))


def test_a_cache_that_grew_fills_with_what_is_inserted_and_one_that_shrank_is_full() -> None:
    service = replace(SERVICE, entry_bytes=1000.0)
    window = signals(hit_ratio=0.4, expirations=30.0)  # 180 misses, of which 150 add an entry
    assert refilled(2e6, 1e6, window, service) == (1e6, 1e6)
    assert refilled(1e6, 2e6, window, service) == pytest.approx((1.075e6, 1.15e6))
    assert refilled(1e6, 1.1e6, window, service) == pytest.approx((1.05e6, 1.1e6))
    assert refilled(1e6, 2e6, window, SERVICE) == (2e6, 2e6)  # nobody knows how fast: as if it were full


def test_what_a_cache_still_has_to_fill_is_not_charged_as_filled() -> None:
    window, filling = signals(), (float(KNOBS.cache_size), float(KNOBS.cache_size))
    full = estimate(window, LARGER)
    empty = counterfactual(window, KNOBS, LARGER, SERVICE, PRICES, filled=filling)
    assert empty is not None
    assert empty.tokens == pytest.approx(price(window.usage(KNOBS.cache_size), PRICES).tokens)
    assert empty.tokens > full.tokens
    assert empty.memory == pytest.approx(full.memory)


def test_the_meter_learns_the_bytes_of_an_entry_from_how_the_cache_grows_and_evicts() -> None:
    meter = ServiceMeter()
    held = 1e6
    assert math.isnan(meter.service.entry_bytes)
    for evicted in (0.0, 0.0, 50.0, 400.0, 150.0):
        held += 2000.0 * (180.0 - 5.0 - evicted)
        meter.update(signals(resident_bytes=held, evictions=evicted), KNOBS)
    assert meter.service.entry_bytes == pytest.approx(2000.0)
    meter.update(signals(resident_bytes=10.0), KNOBS)  # flushed: nothing is learned from that
    assert meter.service.entry_bytes == pytest.approx(2000.0)


def test_signals_that_contradict_each_other_do_not_stay_in_the_averages() -> None:
    clean, dirty = ServiceMeter(), ServiceMeter()
    warm = replace(KNOBS, warmup_ratio=0.3)
    dirty.update(signals(requests=5e-324), warm)
    dirty.update(signals(hit_ratio=1e14), warm)
    for meter in (clean, dirty):
        for applied in (KNOBS, warm):
            for _ in range(20):
                meter.update(signals(hit_ratio=0.5), applied)
    assert dirty.service.warmed_hits == pytest.approx(clean.service.warmed_hits)
    assert math.isfinite(dirty.service.warmed_stale)
