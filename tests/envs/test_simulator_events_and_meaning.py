"""What a trace may say of its own: prefix chains, groups of one meaning, changed documents, releases of the model; and edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from envs.simulator import CacheSimulator, SimConfig
from envs.simulator.batch import SimulatorBatch
from envs.workloads import Trace, sessions
from serving.hotset import WarmupRules
from serving.knobs import Knobs
from serving.latency import UpstreamModel

CONFIG = SimConfig(ttl_jitter=0.0, ghost_keys=256)
FOREVER = Knobs(10_000, math.inf)


def trace_of(*rows: tuple[float, int], size: int = 100, **columns: Any) -> Trace:
    """A trace from (time, key) pairs."""
    count = len(rows)
    group = np.asarray(columns.pop("group", [-1] * count), np.int64)
    return Trace(
        "rows",
        np.array([at for at, _ in rows], np.float64),
        np.array([key for _, key in rows], np.uint64),
        np.full(count, size, np.int64),
        group,
        np.full(count, 10, np.int32),
        np.full(count, 100, np.int32),
        **columns,
    )


def hits(trace: Trace, config: SimConfig = CONFIG, knobs: Knobs = FOREVER) -> float:
    signals = CacheSimulator(trace, config, knobs).step(100.0).signals
    return signals.hit_ratio * signals.requests


def test_a_block_is_answered_only_if_its_predecessors_are() -> None:
    # The second request begins otherwise: its second and third block are stored, but follow what nobody has computed.
    rows = [(0.0, 1), (0.0, 2), (0.0, 3), (5.0, 9), (5.0, 2), (5.0, 3), (6.0, 1), (6.0, 2), (6.0, 3)]
    trace = trace_of(*rows, chain=np.array([0, 1, 2] * 3, np.int32))
    assert hits(trace) == 3
    assert hits(trace, replace(CONFIG, prefix=False)) == 5


def test_a_live_entry_of_the_same_meaning_answers_and_nothing_is_stored_for_the_other_wording() -> None:
    trace = trace_of((0, 1), (1, 2), (2, 2), (3, 3), group=[7, 7, 7, 8], match_probability=1.0)
    simulator = CacheSimulator(trace, CONFIG, FOREVER)
    signals = simulator.step(10.0).signals
    assert signals.hit_ratio_by_tier == {"memory": 0.0, "redis": 0.0, "vector": 0.5}
    assert signals.hit_latency == CONFIG.semantic_latency
    assert simulator.resident["redis"] == (2, 200)
    assert hits(trace, replace(CONFIG, semantic=False)) == 1
    assert hits(replace(trace, match_probability=0.0)) == 1


def test_matches_come_as_often_as_the_trace_says() -> None:
    # Every second request asks for the same by a wording of its own, which is never asked again.
    rows = [(float(second), 1_000 + second if second % 2 else 1) for second in range(4_000)]
    trace = trace_of(*rows, group=[0] * len(rows), match_probability=0.3)
    signals = CacheSimulator(trace, CONFIG, Knobs(1 << 20, math.inf)).step(5_000.0).signals
    assert signals.hit_ratio_by_tier["vector"] * 2 == pytest.approx(0.3, abs=0.03)


def test_an_expired_entry_of_the_same_meaning_does_not_answer() -> None:
    trace = trace_of((0, 1), (20, 2), group=[7, 7], match_probability=1.0)
    assert hits(trace, knobs=Knobs(10_000, 15.0)) == 0
    assert hits(trace, knobs=Knobs(10_000, 25.0)) == 1


def test_what_was_written_before_its_document_changed_is_stale() -> None:
    trace = trace_of(
        (0, 1), (1, 1), (2, 2), (6, 1), (7, 2), (8, 1),
        document=np.array([4, 4, -1, 4, -1, 4]),
        update_time=np.array([5.0]),
        update_document=np.array([4]),
    )  # fmt: skip
    simulator = CacheSimulator(trace, CONFIG, FOREVER)
    assert simulator.step(4.0).signals.stale_hits == 0
    assert simulator.step(10.0).signals.stale_hits == 2  # key 1 twice; key 2 rests on no document


def test_a_refresh_after_the_update_is_fresh() -> None:
    rules = WarmupRules(period=1.0, refresh_ahead=0.0, min_score=0.1)
    trace = trace_of(
        (0, 1), (6, 1), (9, 1), document=np.array([4, 4, 4]), update_time=np.array([5.0]), update_document=np.array([4])
    )
    simulator = CacheSimulator(trace, replace(CONFIG, warmup=rules), Knobs(10_000, 5.5, 1.0))
    assert simulator.step(10.0).signals.stale_hits == 0


def test_a_release_of_the_model_empties_cache_and_ghost() -> None:
    trace = trace_of((0, 1), (1, 1), (5, 1), (6, 1), flush_time=np.array([5.0]))
    simulator = CacheSimulator(trace, CONFIG, FOREVER)
    signals = simulator.step(10.0).signals
    assert signals.hit_ratio == 0.5
    assert signals.ghost is not None
    assert signals.ghost.hits.max() == 2


def test_events_before_the_start_never_happened() -> None:
    trace = trace_of((0, 1), (10, 1), (11, 1), flush_time=np.array([5.0]))
    simulator = CacheSimulator(trace, CONFIG, FOREVER, start=1)
    assert simulator.step(5.0).signals.hit_ratio == 0.5
    warmed = CacheSimulator(trace, CONFIG, FOREVER, start=1, warm_from=0)
    assert warmed.step(5.0).signals.hit_ratio == 0.5  # the flush came between


def test_without_a_budget_nothing_is_kept() -> None:
    simulator = CacheSimulator(trace_of((0, 1), (1, 1)), CONFIG, Knobs(0, math.inf, 1.0))
    signals = simulator.step(10.0).signals
    assert (signals.hit_ratio, signals.resident_bytes, signals.evictions) == (0.0, 0.0, 0.0)


def test_an_answer_larger_than_the_budget_pushes_nothing_out() -> None:
    trace = trace_of((0, 1), (1, 2), (2, 1), (3, 2))
    trace = replace(trace, size=np.array([100, 5_000, 100, 5_000], np.int64))
    signals = CacheSimulator(trace, CONFIG, Knobs(1_000, math.inf)).step(10.0).signals
    assert (signals.hit_ratio, signals.evictions) == (0.25, 0.0)


def test_one_key_and_one_request() -> None:
    assert hits(trace_of((0, 5))) == 0
    assert hits(trace_of(*[(float(second), 5) for second in range(50)])) == 49
    empty = trace_of()
    window = CacheSimulator(empty, CONFIG, FOREVER).step(1.0)
    assert window.done
    assert math.isnan(window.signals.hit_ratio)


def test_extending_refuses_what_comes_too_early() -> None:
    simulator = CacheSimulator(trace_of((0, 1), (8, 1)), CONFIG, FOREVER)
    with pytest.raises(ValueError, match=r"extend: time: expected seconds >= 8, got 7\.0"):
        simulator.extend(trace_of((7, 1)))
    with pytest.raises(ValueError, match="match_probability"):
        simulator.extend(trace_of((9, 1), match_probability=0.5))
    simulator.step(20.0)
    with pytest.raises(ValueError, match="flush_time: expected seconds >= 20"):
        simulator.extend(trace_of((30, 1), flush_time=np.array([3.0])))


def test_memory_grows_with_keys_not_with_requests() -> None:
    simulator = CacheSimulator(trace_of((0, 1)), replace(CONFIG, ghost_keys=0), FOREVER)
    for chunk in range(200):
        simulator.extend(trace_of(*[(chunk + step / 100, step % 20) for step in range(1, 100)]))
        simulator.step(1.0)
    assert len(simulator.columns.time) < 200
    assert sum(array.nbytes for array in simulator.state) < 200_000


def test_the_key_table_grows_with_the_keys_not_with_the_chunks() -> None:
    simulator = CacheSimulator(trace_of((0, 0)), replace(CONFIG, ghost_keys=0), FOREVER)
    for chunk in range(1, 16):
        simulator.extend(trace_of((chunk, chunk), (chunk, chunk % 3)))
        simulator.step(1.0)
    assert len(simulator.state.records) <= 2 * 16
    assert len(simulator.state.ring) <= 8 * 16


@pytest.mark.parametrize("warmup_ratio", [0.0, 1.0])
def test_a_window_of_years_needs_no_room_for_its_rounds(warmup_ratio: float) -> None:
    config = replace(CONFIG, ghost_keys=0, warmup=WarmupRules(period=1e6, refreshes_per_second=1e3))
    simulator = CacheSimulator(trace_of((0, 1), (1e9, 1)), config, Knobs(10_000, math.inf, warmup_ratio))
    assert simulator.step(1e9 + 1).signals.requests == 2
    assert len(simulator.state.starts) < 100


def test_refreshes_that_wait_for_a_slow_model_have_room() -> None:
    # One slot that is busy for hours: every refresh waits beyond its window, and no more of them than may be under way.
    config = replace(
        CONFIG,
        ghost_keys=0,
        upstream=UpstreamModel(slots=1, ttft=5_000.0),
        refreshes_inflight=3,
        warmup=WarmupRules(min_score=0.5, refreshes_per_second=50.0, burst=100),
    )
    simulator = CacheSimulator(trace_of(*[(float(at), at) for at in range(40)]), config, Knobs(10_000, 5.0, 1.0))
    waiting, refreshes = [], 0
    for _ in range(60):
        window = simulator.step(1.0)
        waiting.append(window.signals.upstream_waiting)
        refreshes += window.refreshes
    assert refreshes == 3
    # All that was sent waits behind the first but for the one that runs.
    assert waiting[-1] == pytest.approx(40 + 3 - 1)


def test_recency_survives_a_key_table_that_grows() -> None:
    # Each chunk brings as many new keys as there were: every time the table, the records and the ring are made anew.
    trace = sessions(4_000, 1_500, duration=4_000.0, seed=5)
    knobs, config = Knobs(60_000, math.inf), replace(CONFIG, ghost_keys=0)
    whole, grown = CacheSimulator(trace, config, knobs), CacheSimulator(trace.take(np.arange(50)), config, knobs)
    for first in range(50, len(trace), 450):
        grown.extend(trace.take(np.arange(first, min(first + 450, len(trace)))))
        until = float(grown.columns.time[-1])
        if until > grown.now:
            expected, got = whole.step(until - whole.now).signals, grown.step(until - grown.now).signals
            assert (got.requests, got.hit_ratio, got.evictions) == (expected.requests, expected.hit_ratio, expected.evictions)
    assert whole.resident == grown.resident


def test_an_idle_year_with_warm_up_costs_no_rounds_and_ends_warm() -> None:
    year = 365 * 86_400.0
    rules = WarmupRules(period=1.0, refreshes_per_second=10.0, burst=10, min_score=0.5)
    rows = [(0.0, 1), (1.0, 1), *((year + second, 1 + second % 2) for second in range(20))]
    config = replace(CONFIG, warmup=rules, ghost_keys=0)
    simulator = CacheSimulator(trace_of(*rows), config, Knobs(10_000, 5.0, 1.0))
    assert simulator.step(year).refreshes > 0
    signals = simulator.step(30.0).signals
    assert signals.hit_ratio == pytest.approx(18 / 20)


def test_thousands_of_slots_queue_as_few_do() -> None:
    # Twice as many calls at one moment as there are slots: the second half starts when the first one ends.
    model = UpstreamModel(slots=5_000, ttft=1.0, tpot=0.0, contention=0.0)
    trace = trace_of(*[(0.0, key) for key in range(10_000)])
    signals = CacheSimulator(trace, replace(CONFIG, upstream=model, ghost_keys=0), Knobs(0, 1.0)).step(10.0).signals
    assert (signals.p50, signals.p99, signals.latency_sum) == (pytest.approx(1.5), 2.0, pytest.approx(15_000.0))


def test_a_follower_sees_the_leaders_ghost() -> None:
    trace = sessions(2_000, 200, duration=600.0, seed=3)
    leader = CacheSimulator(trace, CONFIG, FOREVER)
    alone, follower = leader.clone(), leader.clone()
    follower.follow(leader)
    for _ in range(3):
        leader.step(100.0)
        seen, expected = follower.step(100.0).signals, alone.step(100.0).signals
        assert seen.ghost is not None
        assert expected.ghost is not None
        np.testing.assert_array_equal(seen.ghost.hits, expected.ghost.hits)
        assert (seen.entropy, seen.regret) == (expected.entropy, expected.regret)
    with pytest.raises(ValueError, match="expected a leader at"):
        follower.step(100.0)


def test_a_batch_has_each_lanes_ghost_and_its_knobs() -> None:
    trace = sessions(2_000, 200, duration=600.0, seed=3)
    alone = CacheSimulator(trace, CONFIG, FOREVER)
    batch = SimulatorBatch([alone.clone(), CacheSimulator(trace, replace(CONFIG, ghost_keys=0), FOREVER)])
    batch.apply(0, Knobs(5_000, 300.0))
    alone.apply(Knobs(5_000, 300.0))
    window, expected = batch.step(np.array([100.0, 50.0])), alone.step(100.0)
    assert expected.signals.ghost is not None
    np.testing.assert_array_equal(window.ghost_hits[0], expected.signals.ghost.hits)
    assert window.ghost_requests[0] == expected.signals.ghost.requests
    assert math.isnan(window.ghost_requests[1])
    assert window.columns["hit_ratio"][0] == expected.signals.hit_ratio
    batch.replace(1, alone)
    assert batch.step(np.array([10.0, 10.0])).columns["at"].tolist() == [110.0, 110.0]


def test_a_batch_refuses_what_does_not_fit() -> None:
    simulator = CacheSimulator(trace_of((0, 1)), CONFIG, FOREVER)
    other = CacheSimulator(trace_of((0, 1)), replace(CONFIG, space=replace(CONFIG.space, ttl_steps=4)), FOREVER)
    with pytest.raises(ValueError, match="at least one simulator"):
        SimulatorBatch([])
    with pytest.raises(ValueError, match="expected a grid of 16 sizes and 8 TTLs"):
        SimulatorBatch([simulator, other])
    with pytest.raises(ValueError, match="durations: expected 1 finite seconds > 0"):
        SimulatorBatch([simulator]).step(np.array([math.inf]))
