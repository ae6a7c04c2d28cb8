"""A workload that takes turns, for which the right answer is known: a large cache is worth its price in half of each period."""

from __future__ import annotations

import numpy as np

from envs.objective import GIB, Prices
from envs.simulator import SimConfig
from envs.task import Scenario
from envs.workloads import Trace
from serving.keys import mix64_array
from serving.knobs import KnobSpace
from serving.latency import UpstreamModel

INTERVAL = 10.0
PERIOD = 200.0
KEYS = 60
ENTRY = 1000
SPACE = KnobSpace(
    min_size=2 * ENTRY, max_size=128 * ENTRY, min_ttl=INTERVAL, max_ttl=5000.0, size_steps=8, ttl_steps=4, warmup_steps=3
)


def two_regimes(seed: int, *, periods: int = 5, flush: bool = False, busy_from: float = 0.5) -> Scenario:
    """Return a realisation: first nothing is asked for twice, then 60 keys are asked for again and again, and so on.

    Holding the 60 keys for a quiet half costs more than to fetch them anew, and for a busy half much less than to be without.

    Args:
        seed: Of times, keys and their order.
        periods: How often the regime comes back.
        flush: Whether everything is lost at the begin of each quiet half.
        busy_from: Share of the period after which the busy part begins.
    """
    rng = np.random.default_rng(seed)
    count = int(periods * PERIOD * 4)
    time = np.sort(rng.uniform(0.0, periods * PERIOD, count))
    time[0], time[-1] = 0.0, periods * PERIOD - 1e-3
    busy = (time % PERIOD) / PERIOD >= busy_from
    names = np.where(busy, rng.integers(0, KEYS, count), KEYS + np.arange(count)).astype(np.uint64)
    trace = Trace(
        name=f"two-regimes-{seed}",
        time=time,
        key=mix64_array(names ^ np.uint64(seed << 32)),
        size=np.full(count, ENTRY, np.int64),
        group=np.full(count, -1, np.int64),
        input_tokens=np.full(count, 100, np.int32),
        output_tokens=np.full(count, 100, np.int32),
        flush_time=np.arange(1 if flush else periods, periods, dtype=np.float64) * PERIOD + 1e-3,
    )
    miss = 0.2e-3  # dollars: about two seconds of waiting
    held = KEYS * ENTRY / GIB * INTERVAL / 3600.0
    prices = Prices(
        input_mtok=0.0,
        output_mtok=1e6 * miss / 100,
        latency_second=0.0,
        stale_answer=0.0,
        slo_second=0.0,
        change_step=1e-4,
        # An interval of the 60 keys costs a third of what its 40 requests cost as misses.
        memory_gib_hour=40.0 * miss / 3.0 / held,
    )
    config = SimConfig(space=SPACE, upstream=UpstreamModel(slots=64, ttft=0.01, tpot=0.0001), ghost_keys=512, prices=prices)
    return Scenario(trace, config, INTERVAL, SPACE.from_steps([3.5, 2.0, 0.0]))
