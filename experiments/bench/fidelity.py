"""Does the simulator mean the same as the live tiers, and as the running gateway? One real trace through both, side by side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from envs.simulator import MemoryEviction, SimConfig
from envs.workloads.readers import load
from envs.workloads.trace import Trace
from experiments.bench.result import BenchResult
from experiments.fidelity import Stage, compare
from experiments.live_fidelity import Phase, compare_live, worst
from serving.knobs import Knobs
from serving.redis_server import RedisServer
from serving.tiers.redis import RedisTier

GOAL = 0.01
"""Largest difference in hit ratio per window."""

GOAL_BYTES = 0.05
"""Largest relative difference in resident bytes per window."""

_MEMORIES: tuple[tuple[str, MemoryEviction, bool], ...] = (
    ("arena", "clock", True),
    ("own", "lru", True),
    ("arena alone", "clock", False),
)
"""Memory tiers: a label, who goes from it, whether there is a store behind it."""


def run(trace: Path, *, requests: int = 20_000, command: str = "cachepilot bench fidelity") -> BenchResult:
    """Replay the first requests of a trace through the simulator and through memory tier and a real Redis.

    The knobs change on the way: the cache is halved, then the TTL shortened, then warm-up switched on; at last it is flushed. The
    memory tier is an arena (CLOCK), then a replica's own (LRU), then an arena without a store behind it.

    Args:
        trace: The trace's file.
        requests: Requests of the slice.
        command: What makes it again.

    Returns:
        One row per memory tier and window with the hit ratios, evictions and bytes of both, blocks of prefix chains once with and
        once without their chains; the ratio is None, since nothing is raced.
    """
    workload = load(trace, limit=requests)
    schedule = _schedule(workload)
    chained = bool(workload.chain.any())
    rows: list[dict[str, Any]] = []
    worst_ratio = worst_memory = worst_bytes = 0.0
    with RedisServer() as server:
        for prefix, (label, eviction, store) in itertools.product((True, False) if chained else (False,), _MEMORIES):
            config = SimConfig(prefix=prefix, memory_eviction=eviction)
            table = asyncio.run(_both(workload, schedule, server.url if store else None, config))
            ratio, size = worst(table, "tiers")
            worst_ratio, worst_bytes = max(worst_ratio, ratio), max(worst_bytes, size)
            worst_memory = max(worst_memory, float((table["memory_simulator"] - table["memory_tiers"]).abs().max()))
            rows += [
                {
                    "memory": label,
                    "blocks": "chained" if prefix else "independent",
                    "window": int(row["window"]),
                    "requests": int(row["requests"]),
                    "simulator": float(row["hit_ratio_simulator"]),
                    "tiers": float(row["hit_ratio_tiers"]),
                    "sim_memory": float(row["memory_simulator"]),
                    "tiers_memory": float(row["memory_tiers"]),
                    "sim_evicted": int(row["evictions_simulator"]),
                    "tiers_evicted": int(row["evictions_tiers"]),
                    "sim_refreshes": int(row["refreshes_simulator"]),
                    "tiers_refreshes": int(row["refreshes_tiers"]),
                    "sim_MB": float(row["resident_bytes_simulator"]) / 1e6,
                    "tiers_MB": float(row["resident_bytes_tiers"]) / 1e6,
                }
                for row in table.to_dict("records")
            ]
    met = worst_ratio <= GOAL and worst_bytes <= GOAL_BYTES
    note = (
        f"The first {len(workload):,} requests of {workload.name}; halved, TTL cut, warm-up on, flushed. Largest difference of a "
        f"window: hit ratio {worst_ratio:.4f} (goal: at most {GOAL}), bytes {worst_bytes:.2%} (goal: at most {GOAL_BYTES:.0%}): "
        f"{'met' if met else 'MISSED'}. Hits in memory alone: {worst_memory:.4f} (no goal: where Redis is slow, as on a busy "
        "machine, the gateway puts answers into memory before the store has them, and those then evict others)."
    )
    return BenchResult("fidelity", rows, None, command, note)


def run_live(
    trace: Path,
    *,
    seconds: float = 100.0,
    requests: int | None = None,
    command: str = "cachepilot bench fidelity-live",
    say: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Replay a trace through the running gateway (Ray Serve, Redis, the simulated model) and through the simulator.

    The cache shrinks on the way, grows again under a short TTL, warm-up is switched on, and at last it is flushed.

    Args:
        trace: The trace's file.
        seconds: Length of the replay; starting and ending take some 15 s more.
        requests: Only the first so many.
        command: What makes it again.
        say: Told what happens.

    Returns:
        One row per window with the hit ratios and bytes of both; the ratio is None, since nothing is raced.
    """
    workload = load(trace, limit=requests)
    phases = live_phases(workload, seconds, windows=2)
    table = compare_live(workload, phases, seconds=seconds, say=say)
    rows = [
        {
            "window": int(row["window"]),
            "requests": int(row["requests"]),
            "cache_KB": round(row["cache_size"] / 1000),
            "ttl": float(row["ttl"]),
            "warmup": float(row["warmup_ratio"]),
            "flush": "yes" if row["flush"] else "",
            "simulator": float(row["hit_ratio_simulator"]),
            "gateway": float(row["hit_ratio_gateway"]),
            "difference": float(row["hit_ratio_simulator"] - row["hit_ratio_gateway"]),
            "sim_KB": float(row["resident_bytes_simulator"]) / 1000,
            "gateway_KB": float(row["resident_bytes_gateway"]) / 1000,
            "sim_refreshes": int(row["refreshes_simulator"]),
            "gateway_refreshes": int(row["refreshes_gateway"]),
        }
        for row in table.to_dict("records")
    ]
    ratio, size = worst(table, "gateway")
    met = ratio <= GOAL and size <= GOAL_BYTES
    note = (
        f"{len(workload):,} requests of {workload.name} ({workload.duration / 3600:.1f} h) in {seconds:.0f} s through one "
        f"gateway replica on Ray Serve, Redis and the simulated model; largest difference of a window: hit ratio {ratio:.4f} "
        f"(goal: at most {GOAL}), bytes {size:.2%} (goal: at most {GOAL_BYTES:.0%}): {'met' if met else 'MISSED'}. Requests of "
        "one instant are sent one after another; the simulator gets the arrivals of the gateway's access log. What differs with "
        "warm-up: the gateway's rounds are as late as its event loop, and a refresh asks for the key's first request, in the "
        "simulator for its last, whose length may be another."
    )
    return BenchResult("fidelity-live", rows, None, command, note)


def live_phases(workload: Trace, seconds: float, *, windows: int = 1) -> list[Phase]:
    """Return a run of five phases: all fits; shrunk to an eighth; half under a TTL; warm-up with it; flushed.

    Args:
        workload: What is replayed; its distinct entries' bytes are what the budgets are parts of.
        seconds: Length of the replay; the TTL is a tenth of it.
        windows: Windows of each phase.
    """
    _, first = np.unique(workload.key, return_index=True)
    everything = int(workload.size[first].sum())
    long, short = 10.0 * seconds, seconds / 10.0
    return [
        Phase(windows, Knobs(everything, long)),
        Phase(windows, Knobs(everything // 8, long)),
        Phase(windows, Knobs(everything // 2, short)),
        Phase(windows, Knobs(everything // 2, short, 0.2)),
        Phase(windows, Knobs(everything // 2, short, 0.2), flush=True),
    ]


def _schedule(workload: Trace) -> list[Stage]:
    _, first = np.unique(workload.key, return_index=True)
    half = int(workload.size[first].sum()) // 2
    window = workload.duration / 10.0
    return [
        Stage(4, window, Knobs(half, workload.duration * 2)),
        Stage(2, window, Knobs(half // 2, workload.duration * 2)),
        Stage(2, window, Knobs(half // 2, window)),
        Stage(1, window, Knobs(half // 2, window, 0.5)),
        Stage(1, window * 1.01, Knobs(half // 2, window, 0.5), flush=True),
    ]


async def _both(workload: Trace, schedule: list[Stage], url: str | None, config: SimConfig) -> pd.DataFrame:
    store = None
    if url is not None:
        store = RedisTier(url, "fidelity", read_deadline=30.0, write_deadline=30.0, touch_interval=3600.0)
    return await compare(workload, config, schedule, store)
