"""What a neighbour gave answers at once, and is kept only if the store has it as well: else no flush would ever find it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from serving import adoption
from serving.adoption import Adoption
from serving.cache import CacheRules, TieredCache
from serving.knobs import Knobs
from serving.tiers.base import Entry, TierUnavailable
from serving.tiers.memory import MemoryTier
from serving.tiers.redis import RedisTier
from tests.serving.entries import entry, key, request
from tests.waiting import until

ARM = "a"


class Neighbour:
    """Has what it is given."""

    name = "neighbour"

    def __init__(self) -> None:
        self.has: dict[bytes, Entry] = {}

    async def get(self, arm: str, key: bytes, *, least: int = 0) -> Entry | None:
        return self.has.get(key)

    def offer(self, arm: str, entry: Entry, known: int | None = None) -> None:
        pass


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[RedisTier]:
    opened = RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5)
    await opened.resize(ARM, 100_000)
    yield opened
    await opened.close()


async def asked(adopting: Adoption) -> None:
    await until(lambda: adopting._task is None, "the store to be asked")


async def test_a_neighbours_answer_is_kept_once_the_store_has_confirmed_it(redis_url: str, namespace: str) -> None:
    neighbour = Neighbour()
    store = RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5)
    cache = TieredCache(memory=MemoryTier(), store=store, vectors=None, rules=CacheRules(ttl_jitter=0.0, l1_share=1.0))
    cache.neighbours = neighbour
    await cache.apply({ARM: Knobs(100_000, 100.0)})
    await asyncio.wait_for(cache.following(), 10)
    await until(lambda: cache._coherence.position(ARM) is not None, "memory to be in step")  # type: ignore[union-attr]
    for number in (1, 2):
        neighbour.has[key(number)] = entry(number)
    await store.put(ARM, entry(1))  # of 2 it has never heard: the neighbour cannot reach it
    assert cache._adoption is not None
    for number in (1, 2):
        assert (await cache.lookup(ARM, request(number), now=1.0)).tier == "neighbour"
        await asked(cache._adoption)
    kept = [cache.lookup_now(ARM, request(number), now=1.0) is not None for number in (1, 2)]
    assert kept == [True, False]
    await cache.close()


async def test_what_the_store_has_anew_or_was_removed_since_is_not_taken(store: RedisTier) -> None:
    taken: list[tuple[int, float, int]] = []
    adopting = Adoption(store, lambda arm: 7, lambda arm, entry, known: taken.append((entry.body[0], entry.written_at, known)))
    for number in (1, 2, 3):
        await store.put(ARM, entry(number))
    await store.put(ARM, entry(1, written_at=1.0))
    await store.delete(ARM, key(2))
    for number in (1, 2, 3):
        adopting.propose(ARM, entry(number))
    await asked(adopting)
    assert taken == [(3, 0.0, 7)]
    await adopting.close()


async def test_what_was_removed_after_the_position_was_read_has_a_greater_number(store: RedisTier) -> None:
    position = await store.removals(ARM)
    known: list[int] = []

    def where(arm: str) -> int:
        return position

    await store.put(ARM, entry(1))
    adopting = Adoption(store, where, lambda arm, entry, number: known.append(number))
    adopting.propose(ARM, entry(1))
    await asked(adopting)
    await store.delete(ARM, key(1))
    assert known == [position] < [await store.removals(ARM)]


async def test_nothing_is_taken_while_the_arms_position_is_not_known_or_the_store_is_away(store: RedisTier) -> None:
    taken: list[Entry] = []
    await store.put(ARM, entry(1))
    unknown = Adoption(store, lambda arm: None, lambda arm, entry, known: taken.append(entry))
    unknown.propose(ARM, entry(1))
    await asked(unknown)

    async def away(arm: str, keys: Sequence[bytes]) -> list[Entry | None]:
        raise TierUnavailable("away")

    heads = store.heads
    store.heads = away  # type: ignore[method-assign]
    adopting = Adoption(store, lambda arm: 7, lambda arm, entry, known: taken.append(entry))
    adopting.propose(ARM, entry(1))
    await asked(adopting)
    assert not taken
    store.heads = heads  # type: ignore[method-assign]
    adopting.propose(ARM, entry(1))
    await asked(adopting)
    assert taken == [entry(1)], "it is asked again when the neighbour gave it again"


async def test_few_wait_for_a_store_that_is_slow_and_one_call_asks_for_all(
    store: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "MOST_WAITING", 3)
    calls: list[int] = []
    go = asyncio.Event()

    async def slow(arm: str, keys: Sequence[bytes]) -> list[Entry | None]:
        calls.append(len(keys))
        await go.wait()
        return [None] * len(keys)

    store.heads = slow  # type: ignore[method-assign]
    adopting = Adoption(store, lambda arm: 7, lambda arm, entry, known: None)
    adopting.propose(ARM, entry(0))
    await until(lambda: calls == [1], "the first to be asked for")
    for number in range(10):
        adopting.propose(ARM, entry(number))
    monkeypatch.setattr(adoption, "MOST_WAITING_BYTES", 3000)
    adopting.propose("b", entry(11))
    go.set()
    await asked(adopting)
    assert calls == [1, 3]
    await adopting.close()
