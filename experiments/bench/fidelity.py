"""Does the simulator mean the same as the live tiers? One slice of a real trace through both, side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pandas as pd

from envs.simulator import SimConfig
from envs.workloads.readers import load
from envs.workloads.trace import Trace
from experiments.bench.result import BenchResult
from experiments.fidelity import Stage, compare
from serving.knobs import Knobs, KnobSpace
from serving.redis_server import RedisServer
from serving.tiers.redis import RedisTier

GOAL = 0.01
"""Largest difference in hit ratio per window."""


def run(trace: Path, *, requests: int = 20_000, command: str = "cachepilot bench fidelity") -> BenchResult:
    """Replay the first requests of a trace through the simulator and through memory tier and a real Redis.

    The knobs change on the way: the cache is halved, then the TTL shortened, then warm-up switched on; at last it is flushed.

    Args:
        trace: The trace's file.
        requests: Requests of the slice.
        command: What makes it again.

    Returns:
        One row per window with the hit ratios of both; the ratio is None, since nothing is raced.
    """
    workload = load(trace, limit=requests)
    schedule = _schedule(workload)
    with RedisServer() as server:
        table = asyncio.run(_both(workload, schedule, server.url))
    worst = float(np.nanmax(np.abs(table["hit_ratio_simulator"] - table["hit_ratio_tiers"])))
    rows = [
        {
            "window": int(row["window"]),
            "until_s": round(float(row["at"]), 1),
            "requests": int(row["requests"]),
            "simulator": float(row["hit_ratio_simulator"]),
            "tiers": float(row["hit_ratio_tiers"]),
            "sim_memory": float(row["memory_simulator"]),
            "tiers_memory": float(row["memory_tiers"]),
            "sim_evicted": float(row["evictions_simulator"]),
            "tiers_evicted": float(row["evictions_tiers"]),
        }
        for row in table.to_dict("records")
    ]
    note = (
        f"the first {len(workload):,} requests of {workload.name}; largest difference in hit ratio of a window {worst:.4f} "
        f"(goal: at most {GOAL}): {'met' if worst <= GOAL else 'MISSED'}"
    )
    return BenchResult("fidelity", rows, None, command, note)


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


async def _both(workload: Trace, schedule: list[Stage], url: str) -> pd.DataFrame:
    store = RedisTier(url, "fidelity", read_deadline=30.0, write_deadline=30.0, touch_interval=3600.0)
    return await compare(workload, SimConfig(space=KnobSpace(), ttl_jitter=0.1), schedule, store)
