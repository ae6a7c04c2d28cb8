"""The vectors beside the entries: told in order, in batches, without anybody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from serving.tiers.base import EntryMeta, TierUnavailable
from serving.tiers.vector import VectorTier
from serving.tiers.vector_store import Neighbour, VectorItem, Where
from serving.vector_index import VectorIndex
from tests.serving.entries import CONTEXT, int8, key, unit


class SlowStore:
    """A store that takes its time, and writes down what it is told."""

    name = "slow"
    shared = True
    dim = 384

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self.away = False
        self.closed = False

    async def _note(self, what: str, count: int) -> None:
        await self.gate.wait()
        if self.away:
            raise TierUnavailable("away")
        self.told.append((what, count))

    async def add(self, arm: str, items: Sequence[VectorItem]) -> None:
        await self._note("add", len(items))

    async def remove(self, arm: str, keys: Sequence[bytes]) -> None:
        await self._note("remove", len(keys))

    async def near(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[Neighbour]:
        if self.away:
            raise TierUnavailable("away")
        return []

    async def count(self, arm: str) -> int:
        return 0

    async def limit(self, arm: str, entries: int) -> None:
        await self._note("limit", entries)

    async def flush(self, arm: str) -> None:
        await self._note("flush", 0)

    async def close(self) -> None:
        self.closed = True


VECTOR = int8(unit(1))


async def test_a_slow_store_is_told_everything_in_order_and_in_batches() -> None:
    store = SlowStore()
    index = VectorIndex(store)
    index.limit("a", 7)
    for number in range(3):
        index.add("a", key(number), CONTEXT, VECTOR)
    index.remove("a", [key(0), key(1)])
    index.remove("a", [])
    index.remove("b", [key(0)])
    index.add("a", key(5), CONTEXT, VECTOR, EntryMeta(model="m"))
    index.flush("a")
    assert store.told == []
    store.gate.set()
    await index.settled()
    assert store.told == [("limit", 7), ("add", 3), ("remove", 2), ("remove", 1), ("add", 1), ("flush", 0)]
    await index.close()
    assert store.closed


async def test_what_a_store_misses_is_lost_and_what_follows_is_not() -> None:
    store = SlowStore()
    store.gate.set()
    index = VectorIndex(store)
    store.away = True
    index.add("a", key(1), CONTEXT, VECTOR)
    await index.settled()
    store.away = False
    index.add("a", key(2), CONTEXT, VECTOR)
    await index.settled()
    assert store.told == [("add", 1)]
    assert not index.has("a", key(2))  # only the store knows
    await index.close()


async def test_closing_does_not_wait_for_a_store_that_hangs() -> None:
    store = SlowStore()
    index = VectorIndex(store)
    index.add("a", key(1), CONTEXT, VECTOR)
    await asyncio.sleep(0)
    await index.close()
    assert (store.told, store.closed) == ([], True)


async def test_the_index_in_the_process_follows_at_once() -> None:
    index = VectorIndex(VectorTier())
    index.add("a", key(1), CONTEXT, VECTOR)
    assert index.has("a", key(1))
    assert [found.key for found in await index.near("a", CONTEXT, VECTOR, floor=0.9)] == [key(1)]
    index.remove("a", [key(1)])
    assert not index.has("a", key(1))
    await index.close()
