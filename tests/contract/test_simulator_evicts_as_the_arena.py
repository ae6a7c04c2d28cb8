"""What is in the simulated memory tier is what is in a real arena, after each single request."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import Trace, load, make
from experiments.fidelity import arena_for
from serving.cache import CacheRules, TieredCache
from serving.keys import Fingerprint, mix64
from serving.knobs import Knobs
from serving.tiers.base import KEY_BYTES, Change, Entry
from serving.tiers.memory import MemoryTier
from tests.requirements import trace as trace_file

ARM = "a"
FOREVER = 1e12


@dataclass(frozen=True)
class Turn:
    """What is done before a request."""

    knobs: Knobs | None = None
    flush: bool = False


class Store(MemoryTier):
    """The rules of the store in this process: everything under the whole budget, exact LRU. Nobody else uses it."""

    name = "redis"

    async def changes(self) -> AsyncIterator[Change]:
        yield Change("gap")
        await asyncio.Event().wait()

    async def until_all_listen(self) -> None:
        pass

    async def removals(self, arm: str) -> int:
        return 1

    async def renumber(self, arm: str) -> None:
        pass

    async def get_numbered(self, arm: str, key: bytes, *, touch: bool = True) -> tuple[Entry | None, int]:
        return self.get_now(arm, key, touch=touch), 1

    async def put_numbered(self, arm: str, entry: Entry, *, since: int | None = None) -> tuple[int, int]:
        return self.put_now(arm, entry), 1

    async def recent_vectors(self, arm: str, limit: int) -> list[tuple[bytes, bytes, bytes]]:
        return []

    async def outdate(self, arm: str, where: Mapping[str, str], *, told: bool = True) -> None:
        pass


class Live:
    """The gateway's tiers, their memory an arena."""

    def __init__(self, trace: Trace, config: SimConfig, folder: Path, largest: int) -> None:
        self.trace = trace
        self.arena = arena_for(trace, largest, folder)
        self.cache = TieredCache(
            memory=self.arena,
            store=Store() if config.store else None,
            vectors=None,
            rules=CacheRules(config.l1_share, config.ttl_jitter),
        )

    async def apply(self, knobs: Knobs) -> None:
        await self.cache.apply({ARM: knobs})

    async def ask(self, row: int) -> str:
        """Return the tier that answers; ``""``: none did, and the model's answer is stored."""
        name, now = int(self.trace.key[row]), float(self.trace.time[row])
        request = Fingerprint(name.to_bytes(8, "big") + bytes(KEY_BYTES - 8), bytes(KEY_BYTES), "")
        found = await self.cache.lookup(ARM, request, now=now)
        if found.outcome != "hit":
            await self.cache.put(ARM, Entry(request.key, bytes(int(self.trace.size[row]) - KEY_BYTES), now), now=now)
            return ""
        return found.tier

    def held(self) -> tuple[int, int]:
        """Entries and bytes of the arena."""
        stats = self.arena.stats_now(ARM)
        return stats.entries, stats.bytes


@asynccontextmanager
async def live(trace: Trace, config: SimConfig, largest: int) -> AsyncIterator[Live]:
    with tempfile.TemporaryDirectory() as folder:
        tiers = Live(trace, config, Path(folder), largest)
        try:
            yield tiers
        finally:
            await tiers.cache.close()


async def assert_same(trace: Trace, config: SimConfig, knobs: Knobs, turns: Mapping[int, Turn]) -> dict[str, int]:
    """Ask both for every request, with turns before some; return the count of requests by who answered."""
    # A second between two requests, so that a window has one.
    trace = replace(trace, time=np.arange(len(trace), dtype=np.float64))
    config = replace(config, ghost_keys=0, prefix=False)
    simulator = CacheSimulator(trace, config, knobs)
    largest = max([knobs.cache_size, *(turn.knobs.cache_size for turn in turns.values() if turn.knobs is not None)])
    answered = {"memory": 0, "redis": 0, "": 0}
    async with live(trace, config, largest) as tiers:
        await tiers.apply(knobs)
        await tiers.cache.following()
        for row in range(len(trace)):
            turn = turns.get(row, Turn())
            if turn.knobs is not None:
                lost = await evictions(tiers)
                gone = simulator.apply(turn.knobs)
                await tiers.apply(turn.knobs)
                assert gone == await evictions(tiers) - lost, f"row {row}: entries evicted by {turn.knobs}"
            if turn.flush:
                assert simulator.flush() == await tiers.cache.flush(ARM), f"row {row}: entries flushed"
            assert simulator.resident["memory"] == tiers.held(), f"row {row}: entries and bytes before it"
            ratios = simulator.step(1.0).signals.hit_ratio_by_tier
            expected = next((tier for tier, ratio in ratios.items() if ratio > 0), "")
            tier = await tiers.ask(row)
            assert expected == tier, f"row {row}: who answered"
            assert simulator.resident["memory"] == tiers.held(), f"row {row}: entries and bytes after it"
            answered[tier] += 1
        stats = await tiers.cache.stats(ARM)
        assert simulator.resident["redis"] == (list(stats.values())[-1].entries, list(stats.values())[-1].bytes)
    return answered


async def evictions(tiers: Live) -> int:
    """Entries that the cache, as a whole, has lost for want of room."""
    return list((await tiers.cache.stats(ARM)).values())[-1].evictions


def real(name: str, limit: int) -> Trace:
    if name.startswith("made:"):
        return make(name).take(np.arange(limit))
    return load(trace_file(name), limit=limit)


@pytest.mark.parametrize("store", [True, False], ids=["before a store", "alone"])
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("elastic_apache.csv.gz", 10_000),
        ("mooncake_conversation.jsonl.gz", 10_000),
        ("banking77.csv.gz", 10_000),
        ("made:flash-crowd?seed=3", 5_000),
        ("made:scan?seed=1", 5_000),
    ],
)
async def test_traces_under_small_budgets_that_change(name: str, limit: int, store: bool) -> None:
    trace = real(name, limit)
    # Memory has a twentieth of what is asked for, and a store ten times that; it shrinks, is flushed, grows.
    whole = int(trace.size[np.unique(trace.key, return_index=True)[1]].sum())
    budget, config = (whole // 2, SimConfig(l1_share=0.1)) if store else (whole // 20, SimConfig(store=False))
    turns = {
        len(trace) * 3 // 10: Turn(Knobs(budget // 3, FOREVER)),
        len(trace) * 5 // 10: Turn(Knobs(budget, len(trace) / 10)),
        len(trace) * 7 // 10: Turn(flush=True),
        len(trace) * 8 // 10: Turn(Knobs(budget // 2, FOREVER)),
    }
    answered = await assert_same(trace, config, Knobs(budget, FOREVER), turns)
    assert answered["memory"] > 0
    assert answered[""] > 0
    assert (answered["redis"] > 0) == store


@st.composite
def made(draw: st.DrawFn) -> Trace:
    """Requests for few keys, whose entries are of any size, an empty body included, and may change it."""
    count = draw(st.integers(1, 120))
    keys = draw(st.lists(st.integers(0, 11), min_size=count, max_size=count))
    sizes = draw(st.lists(st.sampled_from([32, 33, 90, 184, 185, 400, 1500]), min_size=count, max_size=count))
    return Trace(
        "made",
        np.arange(count, dtype=np.float64),
        np.array([mix64(key) for key in keys], np.uint64),
        np.array(sizes, np.int64),
        np.full(count, -1, np.int64),
        np.full(count, 10, np.int32),
        np.full(count, 10, np.int32),
    )


some_knobs = st.builds(Knobs, st.sampled_from([0, 32, 100, 500, 1000, 3000, 20_000]), st.sampled_from([3.0, 20.0, FOREVER]))
turns_of = st.dictionaries(
    st.integers(0, 119), st.builds(Turn, st.none() | some_knobs, st.sampled_from([False, False, True])), max_size=8
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(made(), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans(), some_knobs, turns_of)
async def test_made_workloads_with_budgets_of_a_few_entries(
    trace: Trace, share: float, store: bool, knobs: Knobs, turns: dict[int, Turn]
) -> None:
    await assert_same(trace, SimConfig(l1_share=share, store=store, ttl_jitter=0.5), knobs, turns)
