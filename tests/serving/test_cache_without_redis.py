"""Redis away, slow or back again: a miss, never an error, and nothing is forgotten."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from serving.cache import CacheRules, TieredCache
from serving.knobs import Knobs
from serving.redis_server import RedisServer
from serving.tiers.base import TierUnavailable
from serving.tiers.memory import MemoryTier
from serving.tiers.redis import RedisTier
from serving.tiers.vector import VectorTier
from tests.serving.entries import entry, int8, key, request, unit
from tests.waiting import until


def replica(url: str, namespace: str) -> TieredCache:
    store = RedisTier(url, namespace, read_deadline=0.05, write_deadline=5, cooldown=0.01)
    return TieredCache(memory=MemoryTier(), store=store, vectors=VectorTier(), rules=CacheRules(ttl_jitter=0.0))


async def embed(text: str) -> bytes:
    return int8(unit(1))


async def test_redis_away_from_the_start_is_a_cache_in_memory(tmp_path: Path, namespace: str) -> None:
    cache = replica(f"unix://{tmp_path}/redis.sock", namespace)
    await cache.apply({"a": Knobs(10_000, 100.0)})
    assert (await cache.lookup("a", request(1), now=0.0)).outcome == "miss"
    assert await cache.put("a", entry(1, vector=int8(unit(1))), now=0.0) == 0
    assert (await cache.lookup("a", request(1), now=1.0)).tier == "memory"
    assert (await cache.lookup("a", request(2, "text"), now=1.0, embed=embed)).outcome == "semantic_hit"
    assert set(await cache.stats("a")) == {"memory"}
    with pytest.raises(TierUnavailable):
        await cache.flush("a")  # of memory all the same
    assert (await cache.lookup("a", request(1), now=1.0)).outcome == "miss"
    await cache.close()


async def test_nothing_is_refreshed_while_redis_cannot_say_what_is_live(tmp_path: Path, namespace: str) -> None:
    cache = replica(f"unix://{tmp_path}/redis.sock", namespace)
    await cache.apply({"a": Knobs(10_000, 100.0)})
    assert await cache.are_live("a", [key(1), key(2)], now=0.0) == [True, True]
    await cache.close()


async def test_a_budget_that_redis_missed_is_set_when_it_is_back(tmp_path: Path, namespace: str) -> None:
    cache = replica(f"unix://{tmp_path}/redis.sock", namespace)
    await cache.apply({"a": Knobs(10_000, 100.0)})
    with RedisServer(tmp_path) as server:
        observer = RedisTier(server.url, namespace, write_deadline=5)

        async def settled() -> bool:
            return (await observer.stats("a")).budget == 10_000

        await until(settled, "the budget to be set")
        await observer.close()
    await cache.apply({"a": Knobs(30_000, 100.0)})  # away again
    with RedisServer(tmp_path) as server:
        observer = RedisTier(server.url, namespace, write_deadline=5)

        async def settled_again() -> bool:
            return (await observer.stats("a")).budget == 30_000

        await until(settled_again, "the new budget to be set")
        await observer.close()
        await cache.close()


async def test_memory_goes_on_through_a_restart_and_redis_fills_again(tmp_path: Path, namespace: str) -> None:
    with RedisServer(tmp_path) as server:
        cache = replica(server.url, namespace)
        await cache.apply({"a": Knobs(10_000, 100.0)})
        await cache.following()
        await cache.put("a", entry(1), now=0.0)
    assert (await cache.lookup("a", request(1), now=1.0)).tier == "memory"
    assert (await cache.lookup("a", request(2), now=1.0)).outcome == "miss"
    with RedisServer(tmp_path):

        async def stored() -> bool:
            await cache.put("a", entry(2), now=1.0)
            stats = await cache.stats("a")
            return "redis" in stats and stats["redis"].entries == 1

        await until(stored, "an entry to be stored in the new Redis")
        await cache.close()


async def test_a_memory_hit_does_not_wait_for_a_frozen_redis(tmp_path: Path, namespace: str) -> None:
    with RedisServer(tmp_path) as server:
        cache = replica(server.url, namespace)
        await cache.apply({"a": Knobs(10_000, 100.0)})
        await cache.following()
        await cache.put("a", entry(1), now=0.0)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(StopIteration) as finished:  # one step by hand: a coroutine that waits does not finish in it
                cache.lookup("a", request(1), now=1.0).send(None)
            assert finished.value.value.tier == "memory"
            assert (await cache.lookup("a", request(2), now=1.0)).outcome == "miss"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await cache.close()
