"""The compiled kernel does what the same rules in plain Python do, on small random traces under random knobs and flushes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.simulator import CacheSimulator, SimConfig
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
    ttl_jitter=st.sampled_from([0.0, 0.1, 0.5]),
    staleness_half_life=st.sampled_from([5.0, float("inf")]),
    upstream=st.builds(
        UpstreamModel,
        slots=st.integers(1, 3),
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
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rows = draw(
        st.lists(st.tuples(quarters, st.integers(0, 12), st.sampled_from([40, 60, 100, 260]), st.integers(1, 20)), max_size=80)
    )
    rows.sort(key=lambda row: row[0])
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return Trace(
        "drawn",
        columns[0],
        np.array([mix64(int(number)) for number in columns[1]], np.uint64),
        columns[2].astype(np.int64),
        np.full(len(rows), -1, np.int64),
        columns[3].astype(np.int32) * 3,
        columns[3].astype(np.int32),
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
