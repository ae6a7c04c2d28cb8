"""Without a TTL the simulator hits and evicts what libcachesim's LRU does, request by request.

libcachesim's rules, as found by trying (0.3.5, ``consider_obj_metadata=False``): an object may enter if its size is at most the
cache's; before it enters, the least recently used go while ``occupied + size > cache_size``; a hit makes the object the most
recently used and never changes its size, whatever the request says. The simulator's rules are the same, so traces are compared
as they are, sizes that change included. Not compared: TTL (libcachesim's Python build does not honour one) and prefix chains
(it knows independent objects only).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import Trace, load
from experiments.bench.sim import independent, zipf_trace
from serving.knobs import Knobs
from tests.requirements import module
from tests.requirements import trace as trace_file

libcachesim = module("libcachesim")

WINDOWS = 200
CONFIG = SimConfig(ghost_keys=0)


def libcachesim_windows(trace: Trace, budget: int, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Hits within each window, and entries and bytes at its end, (windows, 3)."""
    cache: Any = libcachesim.LRU(budget, hashpower=18, consider_obj_metadata=False)
    request = libcachesim.Request()
    _, names = np.unique(trace.key, return_inverse=True)
    rows, hits, window = [], 0, 0
    for at, name, size in zip(trace.time.tolist(), names.tolist(), trace.size.tolist(), strict=True):
        while at >= edges[window]:
            rows.append((hits, cache.get_n_obj(), cache.get_occupied_byte()))
            hits, window = 0, window + 1
        request.obj_id, request.obj_size = name, size
        hits += cache.get(request)
    rows.append((hits, cache.get_n_obj(), cache.get_occupied_byte()))
    while len(rows) < len(edges):
        rows.append((0, *rows[-1][1:]))
    return np.array(rows, np.int64)


def simulator_windows(trace: Trace, budget: int, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    simulator = CacheSimulator(independent(trace), CONFIG, Knobs(budget, math.inf))
    rows = []
    for edge in edges.tolist():
        signals = simulator.step(edge - simulator.now).signals
        hits = round(signals.hit_ratio * signals.requests) if signals.requests else 0
        rows.append((hits, *simulator.resident["redis"]))
    return np.array(rows, np.int64)


def assert_equal(trace: Trace, budget: int, windows: int = WINDOWS) -> None:
    edges = np.linspace(0.0, trace.duration + 1.0, windows + 1)[1:]
    ours, theirs = simulator_windows(trace, budget, edges), libcachesim_windows(trace, budget, edges)
    assert np.array_equal(ours, theirs), f"first at window {np.argmax((ours != theirs).any(axis=1))}: hits, entries, bytes"


def footprint(trace: Trace) -> int:
    _, first = np.unique(trace.key, return_index=True)
    return int(trace.size[first].sum())


@pytest.mark.parametrize("share", [0.003, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl.gz", "elastic_apache.csv.gz"])
def test_a_real_trace(name: str, share: float) -> None:
    trace = load(trace_file(name))
    assert_equal(trace, int(footprint(trace) * share))


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.3])
def test_zipf_requests_of_many_sizes(share: float) -> None:
    trace = zipf_trace(200_000, keys=20_000, duration=10_000.0, seed=4)
    assert_equal(trace, int(footprint(trace) * share))


def test_sizes_that_change_between_the_requests_of_a_key() -> None:
    made = zipf_trace(50_000, keys=2_000, duration=10_000.0, seed=5)
    trace = replace(made, size=np.random.default_rng(6).integers(1, 40_000, len(made)))
    assert_equal(trace, 4_000_000)


@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=60),
    budget=st.integers(1, 40),
)
@settings(max_examples=100, deadline=None)
def test_any_few_requests_one_at_a_time(requests: list[tuple[int, int]], budget: int) -> None:
    made = zipf_trace(len(requests), keys=7, duration=1.0)
    key, size = np.array(requests, np.int64).T
    trace = replace(made, time=np.arange(len(requests), dtype=np.float64), key=key.astype(np.uint64), size=size)
    assert_equal(trace, budget, windows=len(requests))
