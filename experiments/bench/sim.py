"""How fast the simulator is: intervals of requests through the whole of it, ghost curves included."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import Trace, entry_bytes, zipf_ranks
from experiments.bench.result import BenchResult
from serving.keys import mix64_array
from serving.knobs import MIB, Knobs

GOAL_SECONDS = 5.0
"""For 1,000 intervals of 1,000 requests on one core."""

INTERVAL = 60.0


def zipf_trace(requests: int, *, keys: int = 100_000, alpha: float = 0.9, duration: float, seed: int = 0) -> Trace:
    """Make the benchmark's trace: independent Zipf requests at a steady rate."""
    random = np.random.default_rng(seed)
    key = mix64_array(zipf_ranks(random, keys, alpha, requests).astype(np.uint64))
    tokens = (16 + key % np.uint64(500)).astype(np.int64)
    return Trace(
        name=f"zipf-{alpha:g}",
        time=np.sort(random.uniform(0.0, duration, requests)),
        key=key,
        size=entry_bytes(tokens, False),
        group=np.full(requests, -1, np.int64),
        input_tokens=np.full(requests, 100, np.int32),
        output_tokens=tokens.astype(np.int32),
        note="Made: independent requests, Zipf popularity.",
    )


def run(*, intervals: int = 1000, requests_per_interval: int = 1000, seed: int = 0) -> BenchResult:
    """Time the simulator, with and without ghost and warm-up, and cachetools' LRU beside it where it is installed.

    Compilation is not timed: a short run comes first. Everything runs in this one thread.

    Args:
        intervals: Windows to step through.
        requests_per_interval: Requests of each, on average.
        seed: Of the trace.

    Returns:
        Rows with ``what``, ``seconds``, ``cpu_seconds``, ``requests_per_second``; the ratio is requests per CPU second of the
        whole simulator over those of cachetools' LRU.
    """
    trace = zipf_trace(intervals * requests_per_interval, duration=intervals * INTERVAL, seed=seed)
    full = SimConfig()
    bare = replace(full, ghost_keys=0)
    budget = 64 * MIB

    def simulate(config: SimConfig, warmup: float, steps: int) -> None:
        simulator = CacheSimulator(trace, config, Knobs(budget, 3600.0, warmup), seed=seed)
        for _ in range(steps):
            simulator.step(INTERVAL)

    simulate(full, 0.2, 2)
    contestants: list[tuple[str, Callable[[], object]]] = [
        ("simulator, ghost and warm-up", lambda: simulate(full, 0.2, intervals)),
        ("simulator, ghost", lambda: simulate(full, 0.0, intervals)),
        ("simulator alone", lambda: simulate(bare, 0.0, intervals)),
    ]
    peer = "cachetools.LRUCache, bytes only"
    if importlib.util.find_spec("cachetools") is not None:
        contestants.append((peer, lambda: _cachetools(trace, budget)))
    rows: list[dict[str, Any]] = []
    for what, work in contestants:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rows.append({"what": what, "seconds": wall, "cpu_seconds": cpu, "requests_per_second": len(trace) / cpu})
    ratio = rows[0]["requests_per_second"] / rows[-1]["requests_per_second"] if rows[-1]["what"] == peer else None
    return BenchResult(
        "simulator",
        rows,
        ratio,
        "cachepilot bench sim",
        f"{intervals:,} intervals of {requests_per_interval:,} requests, Zipf 0.9; requests per CPU second. "
        f"The goal of {GOAL_SECONDS:g} s is for 1,000 intervals of 1,000 requests, the ghost included.",
    )


def _cachetools(trace: Trace, budget: int) -> int:
    import cachetools  # type: ignore[import-not-found, import-untyped, unused-ignore]

    cache: Any = cachetools.LRUCache(budget, getsizeof=lambda size: size)
    hits = 0
    for key, size in zip(trace.key.tolist(), trace.size.tolist(), strict=True):
        if cache.get(key) is not None:
            hits += 1
        else:
            cache[key] = size
    return hits
