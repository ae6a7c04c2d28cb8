"""What replicas tell each other of their accesses."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.feed import ACCESS, LocalFeed, RedisFeed, merge
from serving.redis_server import RedisServer
from tests.waiting import until

rows = st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1), st.integers(1, 10**9), st.floats(0, 2e9))


@given(st.lists(st.lists(rows, max_size=8), max_size=4))
def test_a_merge_keeps_every_access_and_orders_them_by_time(parts: list[list[tuple[int, int, int, float]]]) -> None:
    merged = merge([np.array(part, dtype=ACCESS) for part in parts])
    assert sorted(merged.tolist()) == sorted(row for part in parts for row in part)
    assert np.all(np.diff(merged["time"]) >= 0)


async def test_one_replica_hears_itself() -> None:
    feed = LocalFeed()
    await feed.open()
    feed.add(1, 2**64 - 1, 100, 2.0)
    feed.add(0, 5, 50, 1.0)
    assert (await feed.exchange()).tolist() == [(0, 5, 50, 1.0), (1, 2**64 - 1, 100, 2.0)]
    assert len(await feed.exchange()) == 0
    await feed.close()


async def test_every_replica_gets_every_access_once_and_one_leads(redis_url: str, namespace: str) -> None:
    feeds = [RedisFeed(redis_url, namespace, name) for name in ("a", "b", "c")]
    for number, feed in enumerate(feeds):
        await feed.open()
        feed.add(0, number, 10, float(number))
    heard: list[list[int]] = [[] for _ in feeds]

    async def complete() -> bool:
        for seen, feed in zip(heard, feeds, strict=True):
            seen += (await feed.exchange())["key"].tolist()
        return all(len(seen) >= 3 for seen in heard)

    await until(complete, "all to hear all")
    assert [sorted(seen) for seen in heard] == [[0, 1, 2]] * 3
    assert [feed.leading for feed in feeds] == [True, False, False]
    await feeds[0].close()
    for feed in feeds[1:]:
        await feed.exchange()
    assert [feed.leading for feed in feeds[1:]] == [True, False]
    for feed in feeds[1:]:
        await feed.close()


async def test_without_redis_a_replica_goes_on_with_its_own_and_leads(namespace: str) -> None:
    with RedisServer() as redis:
        feed = RedisFeed(redis.url, namespace, "a")
        other = RedisFeed(redis.url, namespace, "b")
        for one in (other, feed):
            await one.open()
            await one.exchange()
        led = [feed.leading]
        redis.__exit__(None, None, None)
        feed.add(0, 7, 10, 1.0)
        assert (await feed.exchange())["key"].tolist() == [7]
        assert [*led, feed.leading] == [False, True]
        await feed.close()
        await other.close()
