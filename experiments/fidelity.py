"""The simulator beside the live tiers: one trace, one schedule of knobs and flushes, both in virtual time."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from envs.simulator import CacheSimulator, SimConfig
from envs.workloads.trace import Trace
from serving.cache import CacheRules, TieredCache
from serving.coherence import Store
from serving.keys import Fingerprint
from serving.knobs import MIB, Knobs
from serving.latency import UpstreamModel
from serving.tiers.arena import ArenaTier
from serving.tiers.base import KEY_BYTES, Entry, Tier, TierStats
from serving.tiers.local import LocalTier
from serving.tiers.memory import MemoryTier
from serving.warmup import Remembered, Warmer

_ARM = "fidelity"
_PATIENCE = 30.0
"""Seconds of the wall clock for news of the store to come round."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What happens in one stretch of the replay.

    Attributes:
        windows: Number of windows.
        duration: Length of each, seconds.
        knobs: Put into effect before the first; None keeps what there is.
        flush: Whether the cache is emptied before the first, after the knobs.
    """

    windows: int
    duration: float
    knobs: Knobs | None = None
    flush: bool = False


async def compare(trace: Trace, config: SimConfig, schedule: Sequence[Stage], store: Tier | None) -> pd.DataFrame:
    """Replay a trace through the simulator and through memory tier and store, warm-up included; set the windows side by side.

    The tiers are the gateway's own, driven with the trace's clock; an answer is stored at the moment of its miss, as in the
    simulator. Blocks of a prefix chain follow the simulator's rule where ``config.prefix`` is set: one whose predecessor in its
    request was not answered is not looked up, but made and stored anew. The store's arm ``fidelity`` is flushed first. The tiers
    know no model, so the simulated model answers at once. Where ``config.memory_eviction`` is ``clock`` the memory tier is an
    arena, so large that its budget alone makes it evict, else a replica's own.

    Args:
        trace: The workload, without events of its own: flushes are the schedule's.
        config: The simulator's settings; the tiers get the same. Answers by meaning are left out.
        schedule: Stages in order; the first needs knobs.
        store: The shared tier, e.g. a :class:`serving.tiers.redis.RedisTier` whose deadlines and touch interval are longer than
            the replay: they go by the wall clock, all else by the trace's. It is closed at the end. None: the memory tier is the
            whole cache.

    Returns:
        One row per window: ``window``, ``at`` (seconds), ``requests``, and for each of ``hit_ratio``, ``memory``, ``redis`` (hit
        ratios by tier), ``evictions``, ``expirations``, ``refreshes``, ``resident_bytes`` a pair of columns ``<name>_simulator``
        and ``<name>_tiers``. Ratios are NaN in windows without requests.

    Raises:
        ValueError: If the first stage has no knobs, or the trace has events.
    """
    if len(trace.flush_time) or len(trace.update_time):
        raise ValueError(
            f"fidelity: trace {trace.name}: expected no flushes or updates of its own; put flushes into the schedule"
        )
    if not schedule or schedule[0].knobs is None:
        raise ValueError("fidelity: schedule: expected at least one stage, the first with knobs")
    at_once = UpstreamModel(slots=1, ttft=0.0, tpot=0.0)
    config = replace(config, upstream=at_once, ghost_keys=0, refreshes_inflight=1, semantic=False, store=store is not None)
    simulator = CacheSimulator(trace, config, schedule[0].knobs)
    with ExitStack() as stack:
        memory: LocalTier = MemoryTier()
        if config.memory_eviction == "clock":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fidelity-"))
            largest = max(stage.knobs.cache_size for stage in schedule if stage.knobs is not None)
            memory = arena_for(trace, largest, Path(folder))
        return await _replay(trace, schedule, simulator, _LiveTiers(trace, config, memory, store))


def arena_for(trace: Trace, largest: int, folder: Path) -> ArenaTier:
    """Return an arena for the trace's entries that neither room nor places in the index ever make evict, but the budget alone.

    Args:
        trace: The workload.
        largest: The largest budget, bytes.
        folder: Where its file is made.
    """
    mean = int(trace.size.mean()) if len(trace) else 1024
    return ArenaTier(folder / "arena", 4 * largest + 16 * MIB, entry_bytes=max(128, mean // 2))


async def _replay(trace: Trace, schedule: Sequence[Stage], simulator: CacheSimulator, live: _LiveTiers) -> pd.DataFrame:
    assert schedule[0].knobs is not None
    rows: list[dict[str, float]] = []
    await live.cache.apply({_ARM: schedule[0].knobs})
    await live.cache.flush(_ARM)
    await live.cache.following()  # what the memory tier held before is dropped when the feed of changes begins
    live.start = await live.evictions()
    try:
        for stage in schedule:
            if stage.knobs is not None:
                simulator.apply(stage.knobs)
                await live.cache.apply({_ARM: stage.knobs})
            if stage.flush:
                simulator.flush()
                await live.cache.flush(_ARM)
            await live.settle()
            for _ in range(stage.windows):
                signals = simulator.step(stage.duration).signals
                measured = await live.run(simulator.now)
                simulated = {
                    "hit_ratio": signals.hit_ratio,
                    **signals.hit_ratio_by_tier,
                    "evictions": signals.evictions,
                    "expirations": signals.expirations,
                    "refreshes": float(simulator.refreshes),
                    "resident_bytes": signals.resident_bytes,
                }
                row: dict[str, float] = {"window": len(rows), "at": signals.at, "requests": signals.requests}
                for name, value in simulated.items():
                    row[f"{name}_simulator"], row[f"{name}_tiers"] = value, measured[name]
                rows.append(row)
    finally:
        await live.cache.close()
    return pd.DataFrame(rows)


class _LiveTiers:
    """The gateway's tiers and warm-up, driven by a trace's clock."""

    def __init__(self, trace: Trace, config: SimConfig, memory: LocalTier, store: Tier | None) -> None:
        self._trace = trace
        self._memory = memory
        self._numbers = store if isinstance(store, Store) else None
        self._whole = memory.name if store is None else store.name
        self._chain = trace.chain if config.prefix else np.zeros(len(trace), np.int32)
        self._broken = False
        self.cache = TieredCache(
            memory=memory,
            store=store,
            vectors=None,
            rules=CacheRules(config.l1_share, config.ttl_jitter, config.staleness_half_life),
        )
        self._warmer = Warmer(_ARM, self.cache, config.warmup, self._refresh, max_inflight=1 << 20)
        self._period = config.warmup.period
        self._next_tick = self._period
        self._row = 0
        self._tick_at = 0.0
        self._last: dict[int, int] = {}
        self._refreshes = 0
        self._answers = asyncio.Lock()
        self.start = 0

    async def settle(self) -> None:
        """Wait until the memory tier has heard what left the store: at once, by the trace's clock.

        Raises:
            TimeoutError: If it does not hear of it.
        """
        if self._numbers is not None:
            last = await self._numbers.removals(_ARM)
            async with asyncio.timeout(_PATIENCE):
                while self._memory.mark_now(_ARM) < last:
                    await asyncio.sleep(0)

    async def evictions(self) -> int:
        return (await self._held()).evictions

    async def _held(self) -> TierStats:
        """What the tier holds that has everything."""
        return (await self.cache.stats(_ARM))[self._whole]

    async def run(self, until: float) -> dict[str, float]:
        """Answer the requests that arrive before ``until``; return what the window was like."""
        trace, first = self._trace, self._row
        hits = {"memory": 0, "redis": 0}
        expirations = 0
        self._refreshes = 0
        while True:
            due = float(trace.time[self._row]) if self._row < len(trace) else math.inf
            while self._next_tick <= due and self._next_tick < until:
                self._tick_at = self._next_tick
                await self._warmer.tick(self._next_tick)
                await self._warmer.drain()
                await self.settle()
                self._next_tick += self._period
            if due >= until:
                break
            key = int(trace.key[self._row])
            self._warmer.access(key, due)
            self._last[key] = self._row
            request = _fingerprint(key)
            if not self._warmer.knows(key):
                self._warmer.remember(key, Remembered(request, b"", {}))
            found = None
            if not (self._broken and self._chain[self._row] > 0):
                found = await self.cache.lookup(_ARM, request, now=due)
                expirations += found.expired
            self._broken = found is None or found.outcome != "hit"
            if found is not None and found.outcome == "hit":
                hits[found.tier] += 1
            else:
                await self.cache.put(_ARM, self._entry(key, self._row, due), now=due)
                await self.settle()
            self._row += 1
        requests = self._row - first
        held = await self._held()
        evictions, self.start = held.evictions - self.start, held.evictions
        return {
            "hit_ratio": sum(hits.values()) / requests if requests else math.nan,
            **{tier: count / requests if requests else math.nan for tier, count in hits.items()},
            "evictions": float(evictions),
            "expirations": float(expirations),
            "refreshes": float(self._refreshes),
            "resident_bytes": float(held.bytes),
        }

    async def _refresh(self, arm: str, request: Remembered) -> None:
        key = int.from_bytes(request.fingerprint.key[:8], "big")
        self._refreshes += 1
        # The warmer starts the refreshes of a round in the plan's order and lets them run side by side: at a gateway they are
        # stored, and so ranked by recency, in the order in which the model answers. A model that answers at once does so in the
        # order in which it was asked; without the lock (it is fair) the order would be that in which tasks get a connection.
        async with self._answers:
            await self.cache.put(arm, self._entry(key, self._last[key], self._tick_at), now=self._tick_at)

    def _entry(self, key: int, row: int, now: float) -> Entry:
        return Entry(_fingerprint(key).key, bytes(int(self._trace.size[row]) - KEY_BYTES), now)


def _fingerprint(key: int) -> Fingerprint:
    """A fingerprint whose 64-bit name is ``key``."""
    return Fingerprint(key.to_bytes(8, "big") + bytes(KEY_BYTES - 8), bytes(KEY_BYTES), "")
