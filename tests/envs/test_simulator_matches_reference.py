"""The compiled kernel does what the same rules in plain Python do, on small random traces under random knobs and flushes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.signals import ArmSignals
from envs.simulator import CacheSimulator, SimConfig
from envs.simulator.batch import SimulatorBatch
from envs.workloads import Trace, sessions
from serving.hotset import WarmupRules
from serving.keys import mix64
from serving.knobs import Knobs
from serving.latency import UpstreamModel
from tests.envs.simulator_reference import ReferenceSimulator

# Times are multiples of 1/4 s: exact in binary, so that both sides see the same ties.
quarters = st.integers(0, 400).map(lambda quarter: quarter / 4)


@dataclass(frozen=True)
class Step:
    duration: float
    knobs: Knobs | None
    flush: bool


all_knobs = st.builds(
    Knobs,
    st.sampled_from([0, 50, 120, 300, 700, 1500, 10_000]),
    st.sampled_from([0.5, 2.0, 7.0, 30.0, 1e9]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
configs = st.builds(
    SimConfig,
    l1_share=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    memory_eviction=st.sampled_from(["lru", "clock"]),
    store=st.booleans(),
    ttl_jitter=st.sampled_from([0.0, 0.1, 0.5]),
    staleness_half_life=st.sampled_from([5.0, float("inf")]),
    upstream=st.builds(
        UpstreamModel,
        slots=st.sampled_from([1, 2, 3, 7]),
        ttft=st.sampled_from([0.0, 0.5]),
        tpot=st.sampled_from([0.03125, 0.25]),
        contention=st.sampled_from([0.0, 0.5]),
    ),
    warmup=st.builds(
        WarmupRules,
        capacity=st.integers(1, 6),
        half_life=st.sampled_from([0.125, 4.0, 64.0]),
        min_score=st.sampled_from([0.3, 0.9, 1.4]),
        period=st.sampled_from([0.5, 2.0]),
        refresh_ahead=st.sampled_from([0.0, 0.25]),
        refreshes_per_second=st.sampled_from([0.25, 2.0]),
        burst=st.sampled_from([1, 4]),
    ),
    refreshes_inflight=st.integers(1, 3),
    ghost_keys=st.just(0),
    semantic=st.booleans(),
    prefix=st.booleans(),
)


rows = st.tuples(
    quarters, st.integers(0, 12), st.sampled_from([40, 60, 100, 260]), st.integers(1, 20), st.integers(-1, 2), st.integers(-1, 2)
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    drawn = sorted(draw(st.lists(rows, max_size=80)), key=lambda row: row[0])
    columns = np.array(drawn, dtype=np.float64).reshape(-1, 6).T
    # A key has one group and one document: those of its first request.
    kin = {number: (group, document) for _, number, _, _, group, document in reversed(drawn)}
    chain = np.zeros(len(drawn), np.int32)
    if draw(st.booleans()):
        for row in range(1, len(drawn)):
            if drawn[row][0] == drawn[row - 1][0]:
                chain[row] = chain[row - 1] + 1
    updates = sorted(draw(st.lists(st.tuples(quarters, st.integers(0, 2)), max_size=4)))
    return Trace(
        "drawn",
        columns[0],
        np.array([mix64(int(number)) for number in columns[1]], np.uint64),
        columns[2].astype(np.int64),
        np.array([kin[number][0] for _, number, *_ in drawn], np.int64),
        columns[3].astype(np.int32) * 3,
        columns[3].astype(np.int32),
        document=np.array([kin[number][1] for _, number, *_ in drawn], np.int64),
        chain=chain,
        update_time=np.array([moment for moment, _ in updates], np.float64),
        update_document=np.array([document for _, document in updates], np.int64),
        flush_time=np.array(sorted(draw(st.lists(quarters, max_size=2))), np.float64),
        match_probability=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
    )


steps = st.lists(
    st.builds(Step, st.integers(1, 160).map(lambda quarter: quarter / 4), st.none() | all_knobs, st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), configs, all_knobs, steps)
def test_kernel_agrees_with_reference(trace: Trace, config: SimConfig, knobs: Knobs, schedule: list[Step]) -> None:
    kernel, reference = CacheSimulator(trace, config, knobs), ReferenceSimulator(trace, config, knobs)
    for step in schedule:
        if step.knobs is not None:
            kernel.apply(step.knobs)
            reference.apply(step.knobs)
        if step.flush:
            assert kernel.flush() == len(reference.store)
            reference.flush()
        window, expected = kernel.step(step.duration), reference.step(step.duration)
        signals = window.signals
        requests = len(expected.latency)
        assert signals.requests == requests
        assert window.done == (reference.row == len(trace))
        ratios = signals.hit_ratio_by_tier
        counted = {"memory": expected.memory_hits, "redis": expected.store_hits}
        if config.semantic and trace.match_probability > 0:
            counted["vector"] = expected.vector_hits
        assert set(ratios) == set(counted)
        for tier, hits in counted.items():
            assert ratios[tier] * requests == pytest.approx(hits) if requests else np.isnan(ratios[tier])
        assert (signals.evictions, signals.expirations) == (expected.evictions, expected.expirations)
        assert kernel.refreshes == expected.refreshes
        assert (signals.input_tokens, signals.output_tokens) == expected.miss_tokens
        assert (signals.refresh_input_tokens, signals.refresh_output_tokens) == expected.refresh_tokens
        assert signals.resident_bytes == expected.resident
        assert kernel.resident["memory"] == (len(reference.memory), sum(reference.memory.values()))
        assert signals.latency_sum == pytest.approx(sum(expected.latency))
        assert signals.p50 == pytest.approx(reference.quantile(expected, 0.5), nan_ok=True)
        assert signals.p99 == pytest.approx(reference.quantile(expected, 0.99), nan_ok=True)
        assert signals.stale_hits == pytest.approx(expected.stale)
        assert signals.upstream_running == pytest.approx(expected.running, abs=1e-9)
        assert signals.upstream_waiting == pytest.approx(expected.waiting, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5]),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_calls_that_end_at_one_moment_keep_their_slots_busy_until_then(
    batches: list[tuple[int, int]], slots: int, contention: float, tokens: int, window: int
) -> None:
    # Batches of equal calls: several slots become free at once while others wait, within a window and at its very end.
    seconds = np.cumsum([gap / 4 for gap, _ in batches])
    time = np.repeat(seconds, [count for _, count in batches])
    rows, same = len(time), np.zeros(len(time), np.int64)
    column = np.full(rows, tokens, np.int32)
    trace = Trace("batches", time, np.full(rows, mix64(1), np.uint64), same + 40, same, column, column)
    config = SimConfig(store=False, upstream=UpstreamModel(slots, ttft=0.0, tpot=0.25, contention=contention), ghost_keys=0)
    knobs = Knobs(0, 1e9, 0.0)
    kernel, reference = CacheSimulator(trace, config, knobs), ReferenceSimulator(trace, config, knobs)
    for _ in range(math.ceil((time[-1] + rows * tokens) * 4 / window) + 1):
        signals, expected = kernel.step(window / 4).signals, reference.step(window / 4)
        assert signals.upstream_running == pytest.approx(expected.running, abs=1e-9)
        assert signals.upstream_waiting == pytest.approx(expected.waiting, abs=1e-9)
        assert signals.latency_sum == pytest.approx(sum(expected.latency))
    assert signals.upstream_running == signals.upstream_waiting == 0


def test_a_hot_set_that_changes_much_between_rounds() -> None:
    # Hundreds of changes per round, and a table that overflows: both ways of sorting and the pruning are met.
    trace = sessions(1_500, 600, duration=32.0, think_time=1.0, seed=6)
    rules = WarmupRules(capacity=120, half_life=8.0, min_score=1.1, period=4.0, refreshes_per_second=5.0, burst=20)
    config = SimConfig(warmup=rules, upstream=UpstreamModel(slots=64), refreshes_inflight=40, ghost_keys=0)
    knobs = Knobs(60_000, 6.0, 0.8)
    kernel, reference = CacheSimulator(trace, config, knobs), ReferenceSimulator(trace, config, knobs)
    refreshed = 0
    for _ in range(8):
        signals, expected = kernel.step(4.0).signals, reference.step(4.0)
        assert kernel.refreshes == expected.refreshes
        assert signals.evictions == expected.evictions
        assert signals.latency_sum == pytest.approx(sum(expected.latency))
        assert (signals.refresh_input_tokens, signals.refresh_output_tokens) == expected.refresh_tokens
        refreshed += expected.refreshes
    assert refreshed > 50


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), configs, all_knobs, steps, st.integers(1, 40))
def test_a_trace_in_chunks_is_the_same_as_in_one(
    trace: Trace, config: SimConfig, knobs: Knobs, schedule: list[Step], chunk: int
) -> None:
    pieces = list(chunks(trace, chunk))
    whole, piecewise = CacheSimulator(trace, config, knobs), CacheSimulator(pieces.pop(0), config, knobs)
    for step in schedule:
        for simulator in (whole, piecewise):
            if step.knobs is not None:
                simulator.apply(step.knobs)
            if step.flush:
                simulator.flush()
        while pieces and last_time(piecewise) < piecewise.now + step.duration:
            piecewise.extend(pieces.pop(0))
        expected, window = whole.step(step.duration), piecewise.step(step.duration)
        assert_same(window.signals, expected.signals)
        assert (window.refreshes, piecewise.resident) == (expected.refreshes, whole.resident)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(traces(), configs, all_knobs), min_size=1, max_size=4),
    st.lists(quarters.filter(bool), min_size=1, max_size=5),
)
def test_lanes_of_a_batch_are_the_same_as_one_by_one(lanes: list[tuple[Trace, SimConfig, Knobs]], durations: list[float]) -> None:
    single = [CacheSimulator(trace, config, knobs) for trace, config, knobs in lanes]
    batch = SimulatorBatch([simulator.clone() for simulator in single])
    for duration in durations:
        got = batch.step(np.full(len(lanes), duration))
        for lane, simulator in enumerate(single):
            expected = simulator.step(duration)
            for name in ("requests", "hit_ratio", "p50", "p99", "latency_sum", "resident_bytes", "stale_hits", "input_tokens"):
                assert got.columns[name][lane] == pytest.approx(getattr(expected.signals, name), nan_ok=True, rel=1e-12)
            assert bool(got.done[lane]) == expected.done
            assert got.columns["refreshes"][lane] == expected.refreshes
            assert batch[lane].resident == simulator.resident


def chunks(trace: Trace, size: int) -> list[Trace]:
    """Pieces of a trace on its own clock; each has the events up to its last request, the last one those that are left."""
    edges = [*range(0, len(trace), size), len(trace)] if len(trace) else [0, 0]
    pieces, since = [], -math.inf
    for low, high in itertools.pairwise(edges):
        last = high == len(trace)
        until = math.inf if last else float(trace.time[high - 1])
        update = (trace.update_time > since) & (trace.update_time <= until)
        flush = (trace.flush_time > since) & (trace.flush_time <= until)
        piece = trace.take(np.arange(low, high))
        pieces.append(
            replace(
                piece,
                update_time=trace.update_time[update],
                update_document=trace.update_document[update],
                flush_time=trace.flush_time[flush],
            )
        )
        since = until
    return pieces


def last_time(simulator: CacheSimulator) -> float:
    times = simulator.columns.time
    return float(times[-1]) if len(times) else -math.inf


def assert_same(got: ArmSignals, expected: ArmSignals) -> None:
    for field in fields(ArmSignals):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        if isinstance(one, float):
            assert one == pytest.approx(other, nan_ok=True, rel=1e-9, abs=1e-12), field.name
        elif field.name == "hit_ratio_by_tier":
            assert one == pytest.approx(other, nan_ok=True)
