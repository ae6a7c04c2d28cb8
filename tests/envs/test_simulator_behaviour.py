"""What the knobs do to a simulated arm, and what its windows say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from envs.simulator import CacheSimulator, MemoryEviction, SimConfig
from envs.simulator.prepared import prepare
from envs.workloads import Trace, sessions
from serving.hotset import WarmupRules
from serving.knobs import Knobs
from serving.latency import UpstreamModel

CONFIG = SimConfig(ttl_jitter=0.0, ghost_keys=256)
FOREVER = 1e9


def requests(*rows: tuple[float, int], size: int = 100, output_tokens: int = 100) -> Trace:
    """A trace from (time, key) pairs."""
    count = len(rows)
    return Trace(
        "rows",
        np.array([at for at, _ in rows], np.float64),
        np.array([key for _, key in rows], np.uint64),
        np.full(count, size, np.int64),
        np.full(count, -1, np.int64),
        np.full(count, 10, np.int32),
        np.full(count, output_tokens, np.int32),
    )


def test_shrinking_evicts_the_oldest_at_once_and_growing_drops_nothing() -> None:
    trace = requests((0, 1), (1, 2), (2, 3), (3, 1), (10, 1), (11, 3), (12, 2))
    simulator = CacheSimulator(trace, CONFIG, Knobs(300, FOREVER))
    simulator.step(5.0)
    assert simulator.apply(Knobs(1000, FOREVER)) == 0
    assert simulator.apply(Knobs(200, FOREVER)) == 1  # key 2: 1 was used after it
    window = simulator.step(15.0)
    assert window.signals.hit_ratio == pytest.approx(2 / 3)
    # The shrink's eviction counts in the window that it opens, with the one that the last miss made.
    assert window.signals.evictions == 2


def test_a_new_ttl_acts_on_entries_already_stored() -> None:
    trace = requests((0, 1), (8, 1), (12, 1), (13, 1))
    simulator = CacheSimulator(trace, CONFIG, Knobs(1000, 10.0))
    assert simulator.step(9.0).signals.hit_ratio == 0.5
    simulator.apply(Knobs(1000, 5.0))
    signals = simulator.step(5.0).signals
    # 12 s old: expired and rewritten, so that the next is a hit.
    assert (signals.expirations, signals.hit_ratio) == (1, 0.5)


def test_flush_empties_both_tiers_but_the_hot_set_refills_them() -> None:
    rows = [(second / 2, second % 3) for second in range(40)]
    config = replace(CONFIG, warmup=WarmupRules(period=1.0, refreshes_per_second=10.0, burst=10))
    trace = requests(*rows)
    simulator = CacheSimulator(trace, config, Knobs(10_000, FOREVER, 1.0))
    simulator.step(20.0)
    assert simulator.flush() == 3
    assert simulator.resident == {"memory": (0, 0), "redis": (0, 0)}
    signals = simulator.step(5.0).signals
    assert simulator.resident["redis"] == (3, 300)
    assert (simulator.refreshes, signals.refresh_input_tokens, signals.refresh_output_tokens) == (3, 30, 300)


def test_without_warm_up_nothing_is_refreshed() -> None:
    simulator = CacheSimulator(requests((0, 1), (1, 1), (2, 1)), CONFIG, Knobs(10_000, FOREVER, 0.0))
    simulator.step(3.0)
    simulator.flush()
    simulator.step(10.0)
    assert simulator.resident["redis"] == (0, 0)


def test_an_entry_larger_than_the_budget_is_not_stored() -> None:
    simulator = CacheSimulator(requests((0, 1), (1, 1), size=101), CONFIG, Knobs(100, FOREVER))
    assert simulator.step(2.0).signals.hit_ratio == 0.0
    assert simulator.resident["redis"] == (0, 0)


def test_an_entry_larger_than_the_memory_tier_is_served_from_the_store() -> None:
    trace = requests((0, 1), (1, 1), size=30)
    signals = CacheSimulator(trace, replace(CONFIG, l1_share=0.25), Knobs(100, FOREVER)).step(2.0).signals
    assert signals.hit_ratio_by_tier == {"memory": 0.0, "redis": 0.5}


def test_clock_spares_an_entry_that_was_used_once() -> None:
    # 1 is used once, so for 3 it is 2 that goes; unused since, 1 goes for 4 before 3 does. LRU would have done the same for 3.
    trace = requests((0, 1), (1, 2), (2, 1), (3, 3), (4, 3), (5, 4), (6, 1))
    config = replace(CONFIG, store=False, memory_eviction="clock")
    simulator = CacheSimulator(trace, config, Knobs(200, FOREVER))
    hits = [simulator.step(1.0).signals.hit_ratio for _ in range(7)]
    assert hits == [0, 0, 1, 0, 1, 0, 0]
    assert simulator.resident == {"memory": (2, 200), "redis": (2, 200)}


def test_without_a_store_all_of_the_budget_is_memory_and_its_hits_are_as_fast() -> None:
    config = replace(CONFIG, store=False, l1_share=0.0, memory_latency=0.25)
    signals = CacheSimulator(requests((0, 1), (1, 1)), config, Knobs(100, FOREVER)).step(2.0).signals
    assert signals.hit_ratio_by_tier == {"memory": 0.5, "redis": 0.0}
    assert signals.hit_latency == 0.25


@pytest.mark.parametrize(("eviction", "outlives"), [("clock", 2), ("lru", 1)])
def test_clock_does_not_know_which_of_two_uses_was_the_later(eviction: MemoryEviction, outlives: int) -> None:
    # Both were used when 3 comes: CLOCK then goes by when they came, LRU by when they were used.
    trace = requests((0, 1), (1, 2), (2, 2), (3, 1), (4, 3), (5, outlives))
    config = replace(CONFIG, store=False, memory_eviction=eviction)
    simulator = CacheSimulator(trace, config, Knobs(200, FOREVER))
    simulator.step(5.0)
    assert simulator.step(1.0).signals.hit_ratio == 1.0


def test_misses_queue_for_the_slots_and_the_queue_outlives_the_window() -> None:
    # 1 slot, 10 s each: starts at 0, 10 and 20.
    config = replace(CONFIG, upstream=UpstreamModel(slots=1, ttft=0.0, tpot=0.1))
    simulator = CacheSimulator(requests((0, 1), (0, 2), (0, 3)), config, Knobs(1000, FOREVER))
    first, second = simulator.step(15.0).signals, simulator.step(25.0).signals
    assert first.latency_sum == pytest.approx(10 + 20 + 30)
    assert first.miss_latency == pytest.approx(20)
    assert (first.p50, first.p99) == (pytest.approx(20), pytest.approx(29.8))
    assert (first.upstream_running, second.upstream_running) == (pytest.approx(1.0), pytest.approx(15 / 25))
    assert (first.upstream_waiting, second.upstream_waiting) == (pytest.approx((10 + 15) / 15), pytest.approx(5 / 25))


def test_an_empty_window_says_nothing_rather_than_zero() -> None:
    simulator = CacheSimulator(requests((100, 1)), CONFIG, Knobs(1000, FOREVER))
    window = simulator.step(10.0)
    signals = window.signals
    assert (signals.requests, signals.qps) == (0, 0)
    unknown = (signals.hit_ratio, *signals.hit_ratio_by_tier.values(), signals.p50, signals.p99, signals.hit_latency)
    assert all(math.isnan(value) for value in (*unknown, signals.miss_latency, signals.entropy, signals.drift, signals.regret))
    assert math.isnan(window.usage.p99)
    assert not window.done
    assert simulator.step(100.0).done


def test_a_window_of_hits_alone_has_no_miss_latency() -> None:
    simulator = CacheSimulator(requests((0, 1), (5, 1)), CONFIG, Knobs(1000, FOREVER))
    simulator.step(1.0)
    signals = simulator.step(10.0).signals
    assert signals.hit_ratio == 1.0
    assert math.isnan(signals.miss_latency)


def test_usage_prices_the_budget_in_force_and_the_distance_moved() -> None:
    space = CONFIG.space
    first = space.from_steps([4, 4, 0])
    simulator = CacheSimulator(requests((0, 1), (1, 1)), CONFIG, first)
    assert simulator.step(1.0).usage.change_steps == 0.0
    simulator.apply(space.from_steps([7, 0, 0]))
    usage = simulator.step(1.0).usage
    assert usage.change_steps == pytest.approx(5.0, abs=1e-3)
    assert usage.budget_bytes == space.from_steps([7, 0, 0]).cache_size
    assert simulator.step(1.0).usage.change_steps == 0.0


def test_staleness_adds_up_by_age() -> None:
    simulator = CacheSimulator(requests((0, 1), (10, 1)), replace(CONFIG, staleness_half_life=10.0), Knobs(1000, FOREVER))
    assert simulator.step(20.0).signals.stale_hits == pytest.approx(0.5)


def test_regret_is_zero_at_the_curves_best_setting_and_positive_away_from_it() -> None:
    trace = sessions(20_000, 2_000, duration=600.0, seed=1)
    small, large = Knobs(CONFIG.space.min_size, CONFIG.space.max_ttl), Knobs(4 << 20, CONFIG.space.max_ttl)
    regrets = {}
    for knobs in (small, large):
        simulator = CacheSimulator(trace, SimConfig(), knobs)
        simulator.step(300.0)
        regrets[knobs] = simulator.step(300.0).signals.regret
    assert 0 <= regrets[large] < regrets[small]


def test_equal_arguments_give_equal_windows() -> None:
    trace = sessions(5_000, 500, duration=300.0, seed=2)
    left, right = (CacheSimulator(trace, SimConfig(ghost_keys=64), Knobs(1 << 20, 60.0, 0.2), seed=5) for _ in range(2))
    for _ in range(6):
        a, b = left.step(50.0), right.step(50.0)
        assert repr(a.usage) == repr(b.usage)
        assert a.signals.ghost is not None
        assert b.signals.ghost is not None
        assert np.array_equal(a.signals.ghost.hits, b.signals.ghost.hits)


def test_a_clone_continues_alike_and_apart() -> None:
    trace = sessions(5_000, 500, duration=300.0, seed=3)
    simulator = CacheSimulator(trace, SimConfig(), Knobs(1 << 20, 60.0, 0.2))
    simulator.step(100.0)
    twin, other = simulator.clone(), simulator.clone()
    other.flush()
    expected, alike, apart = simulator.step(100.0), twin.step(100.0), other.step(100.0)
    assert repr(expected.usage) == repr(alike.usage)
    assert apart.signals.hit_ratio < expected.signals.hit_ratio


def test_a_warm_start_is_the_same_cache_without_the_earlier_windows() -> None:
    trace = sessions(5_000, 500, duration=300.0, seed=4)
    warm = CacheSimulator(trace, CONFIG, Knobs(1 << 20, 60.0), start=2_500, warm_from=0)
    cold = CacheSimulator(trace, CONFIG, Knobs(1 << 20, 60.0), start=2_500)
    assert warm.now == cold.now == trace.time[2_500]
    assert warm.position == cold.position == 2_500
    first, second = warm.step(10.0).signals, cold.step(10.0).signals
    assert first.requests == second.requests
    assert first.hit_ratio > second.hit_ratio


def test_a_trace_is_prepared_once() -> None:
    trace = sessions(100, 10, seed=5)
    assert prepare(trace) is prepare(trace)
    assert prepare(trace.slice(0, 50)) is not prepare(trace)


@pytest.mark.parametrize(("start", "warm_from"), [(-1, None), (101, None), (10, 11), (10, -1)])
def test_a_start_outside_the_trace_is_refused(start: int, warm_from: int | None) -> None:
    with pytest.raises(ValueError, match="0 <= warm_from <= start <= 100"):
        CacheSimulator(sessions(100, 10), CONFIG, Knobs(1000, 1.0), start=start, warm_from=warm_from)


@pytest.mark.parametrize("duration", [0.0, -1.0, math.inf, math.nan])
def test_a_step_needs_a_duration(duration: float) -> None:
    with pytest.raises(ValueError, match="duration"):
        CacheSimulator(sessions(10, 10), CONFIG, Knobs(1000, 1.0)).step(duration)


def test_an_empty_trace_is_done_at_once() -> None:
    assert CacheSimulator(requests(), CONFIG, Knobs(1000, 1.0)).step(1.0).done


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"l1_share": 1.5}, "l1_share"),
        ({"memory_eviction": "fifo"}, "memory_eviction"),
        ({"ttl_jitter": 1.0}, "ttl_jitter"),
        ({"staleness_half_life": 0.0}, "staleness_half_life"),
        ({"memory_latency": -1.0}, "memory_latency"),
        ({"refreshes_inflight": 0}, "refreshes_inflight"),
        ({"ghost_keys": 3}, "ghost_keys"),
    ],
)
def test_bad_configurations_are_named(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SimConfig(**values)  # type: ignore[arg-type]
