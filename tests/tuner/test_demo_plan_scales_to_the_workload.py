"""The plan of a demo run: how a workload is cut, squeezed and given a cache and a model of its size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workloads.generators import sessions
from envs.workloads.trace import Trace
from tests.requirements import trace as real_trace
from tuner.demo_plan import EXACT_RATE, plan


def made(count: int, gap: float, kind: str = "exact") -> Trace:
    rows = np.arange(count)
    return Trace(
        name="made",
        time=rows * gap,
        key=(rows % 50).astype(np.uint64),
        size=np.full(count, 1000, np.int64),
        group=np.full(count, -1, np.int64),
        input_tokens=np.full(count, 10, np.int32),
        output_tokens=np.full(count, 100, np.int32),
        kind=kind,
    )


@given(st.integers(2, 3000), st.floats(0.001, 1000), st.floats(1, 600))
@settings(max_examples=60, deadline=None)
def test_any_workload_fits_the_time_and_pays_for_its_own(count: int, gap: float, seconds: float) -> None:
    planned = plan(made(count, gap), seconds)
    assert planned.trace.duration == pytest.approx(seconds)
    assert len(planned.trace) <= max(2, EXACT_RATE * seconds)
    assert 0 < planned.compression * planned.seconds <= gap * (count - 1) * (1 + 1e-9)
    assert planned.space.contains(planned.static)
    assert planned.static.ttl >= seconds, "the static arm is an LRU: nothing may expire within the run"


def test_the_largest_size_holds_one_arms_share_of_everything() -> None:
    planned = plan(made(3000, 1.0), 60.0)
    assert planned.space.max_size >= 50 * 1000 / 2
    assert planned.static.cache_size == planned.space.max_size // 16


def test_the_model_carries_the_misses_it_was_sized_for_at_full_contention() -> None:
    planned = plan(made(3000, 1.0), 60.0)
    model = planned.model
    service = model.ttft + 100 * model.tpot * (1 + model.contention)
    assert model.slots / service > 0.5 * len(planned.trace) / planned.seconds, "half of the hits would not be enough"


def test_semantic_traffic_is_slower_since_embedding_is_dear() -> None:
    assert len(plan(made(30_000, 1.0, "semantic"), 60.0).trace) < len(plan(made(30_000, 1.0), 60.0).trace)


def test_a_sample_of_keys_keeps_the_reuse_of_the_whole() -> None:
    whole = sessions(60_000, 6_000, alpha=0.7, duration=86_400.0, seed=2)
    part = plan(whole, 60.0)
    assert len(part.trace) < len(whole) / 10
    assert part.compression * part.seconds == pytest.approx(whole.duration, rel=0.02), "it spans the whole time"
    reuse = [1.0 - len(np.unique(trace.key)) / len(trace) for trace in (whole, part.trace)]
    assert reuse[1] == pytest.approx(reuse[0], abs=0.05)


def test_what_was_cut_and_squeezed_is_said() -> None:
    note = plan(sessions(50_000, 500, duration=86_400.0, seed=1), 60.0).note
    assert "of 50,000 requests" in note
    assert "times faster" in note
    assert "not a real workload" in note


@pytest.mark.parametrize("name", ["elastic_apache.csv.gz", "mooncake_conversation.jsonl.gz"])
def test_real_traces_are_planned(name: str) -> None:
    from envs.workloads.readers import load

    planned = plan(load(real_trace(name)), 120.0)
    assert planned.trace.duration == pytest.approx(120.0)
    assert planned.space.contains(planned.static)


@pytest.mark.parametrize(("count", "gap"), [(1, 1.0), (5, 0.0)])
def test_a_trace_without_duration_is_refused(count: int, gap: float) -> None:
    with pytest.raises(ValueError, match="at least two requests at different times"):
        plan(made(count, gap), 60.0)
