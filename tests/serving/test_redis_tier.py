"""What is particular to the Redis tier: its failures, its change feed, its accounting when Redis does not play along."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from serving.redis_server import RedisServer
from serving.tiers.base import Change, SharedTier, TierUnavailable
from serving.tiers.codec import pack
from serving.tiers.redis import RedisTier
from tests.serving.entries import CONTEXT, entry, int8, key, unit
from tests.waiting import until


@pytest.fixture
async def tier(redis_url: str, namespace: str) -> AsyncIterator[RedisTier]:
    opened = RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5)
    yield opened
    await opened.close()


@pytest.fixture
async def other(redis_url: str, namespace: str) -> AsyncIterator[RedisTier]:
    opened = RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5)
    yield opened
    await opened.close()


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        yield client


@contextlib.asynccontextmanager
async def following(tier: RedisTier) -> AsyncIterator[list[Change]]:
    """Collects the changes that a client is told, from when it is connected."""
    seen: list[Change] = []

    async def collect() -> None:
        async for change in tier.changes():
            seen.append(change)  # noqa: PERF401 (never ends)

    task = asyncio.create_task(collect())
    try:
        await until(lambda: seen == [Change("gap")], "the feed to be connected")
        seen.clear()
        yield seen
        assert not task.done(), "the feed never ends"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_is_shared(tier: RedisTier) -> None:
    assert isinstance(tier, SharedTier)


async def test_touches_are_sent_by_themselves_after_a_while(redis_url: str, namespace: str, other: RedisTier, raw: Redis) -> None:
    tier = RedisTier(redis_url, namespace, touch_interval=0.001, write_deadline=5)
    await tier.resize("a", 2000)
    for number in (1, 2):
        await tier.put("a", entry(number))
    tier.touch_soon("a", key(1))
    order = f"cachepilot:{{{namespace}:a}}:order"

    async def touched() -> bool:
        return bool((await raw.zrange(order, 0, -1)) == [key(2), key(1)])

    await until(touched, "the touch to arrive")
    assert await other.put("a", entry(3)) == 1
    assert await other.heads("a", [key(1), key(2)]) == [entry(1).head(), None]
    await tier.close()


async def test_closing_sends_the_last_touches(redis_url: str, namespace: str, other: RedisTier) -> None:
    tier = RedisTier(redis_url, namespace, touch_interval=3600, write_deadline=5)
    await tier.resize("a", 2000)
    for number in (1, 2):
        await tier.put("a", entry(number))
    tier.touch_soon("a", key(1))
    await tier.close()
    await other.put("a", entry(3))
    assert await other.heads("a", [key(1), key(2)]) == [entry(1).head(), None]


async def test_other_clients_are_told_what_was_put_evicted_deleted_and_flushed(tier: RedisTier, other: RedisTier) -> None:
    vector = int8(unit(1))
    async with following(other) as told, following(tier) as own:
        await tier.resize("a", 2000)
        first = await tier.removals("a")
        await tier.put("a", entry(1))  # new and without a vector: nobody needs to know
        await tier.put("a", entry(2, vector=vector))
        await tier.put("a", entry(1, written_at=5.0))  # an overwrite: other replicas may hold the old answer in memory
        await tier.put("a", entry(3))
        await tier.delete("a", key(1))
        await tier.resize("a", 0)
        await tier.resize("a", 2000)
        await tier.put("a", entry(4))
        await tier.put("a", entry(4, size=2001))  # does not fit: the old answer is gone
        await tier.flush("b")
        expected = [
            Change("put", "a", (key(2),), CONTEXT, vector),  # replaces nothing, so it has no number
            Change("put", "a", (key(1),), written_at=5.0, removal=first + 1),
            Change("evict", "a", (key(2),), removal=first + 2),
            Change("evict", "a", (key(1),), removal=first + 3),
            Change("evict", "a", (key(3),), removal=first + 4),
            Change("evict", "a", (key(4),), removal=first + 5),
        ]
        await until(lambda: min(len(told), len(own)) > len(expected), "every change to arrive")
        assert told[:-1] == expected
        assert told[-1] == Change("flush", "b", removal=await tier.removals("b"))
        assert own == [replace(change, own=True) for change in told]
        count = len(own)
        await other.flush("a")
        await until(lambda: len(own) > count, "the other client's change")
        assert own[-1] == Change("flush", "a", removal=first + 6)
        assert (await tier.removals("a"), await tier.removals("c")) == (first + 6, 0)


async def test_what_is_read_and_written_comes_with_the_number_of_the_last_removal(tier: RedisTier, other: RedisTier) -> None:
    await tier.resize("a", 2000)
    first = await tier.removals("a")
    assert await tier.put_numbered("a", entry(1)) == (0, first), "it takes nothing away"
    assert await tier.put_numbered("a", entry(1)) == (0, first + 1)
    assert await other.get_numbered("a", key(1)) == (entry(1), first + 1)
    await other.delete("a", key(1))
    assert await tier.get_numbered("a", key(1), touch=False) == (None, first + 2)
    assert await tier.get_numbered("never", key(1)) == (None, 0)


async def test_numbers_of_a_redis_that_lost_its_data_begin_above_those_that_it_gave(tier: RedisTier, raw: Redis) -> None:
    await tier.resize("a", 10_000)
    await tier.flush("a")
    before = await tier.removals("a")
    for name in await raw.keys(f"cachepilot:{{{tier.namespace}:a}}:*"):
        await raw.delete(name)
    assert await tier.removals("a") == 0
    await tier.put("a", entry(1))
    assert await tier.removals("a") > before


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 1e300])
async def test_a_message_that_cannot_be_read_may_have_told_of_anything(tier: RedisTier, raw: Redis, number: float) -> None:
    async with following(tier) as told:
        channel = f"cachepilot:{{{tier.namespace}:a}}:changes"
        await raw.publish(channel, b"somebody" + b"E" + struct.pack("<d", number) + key(1))
        await raw.publish(channel, b"somebody" + b"E")
        await raw.publish(channel, b"somebody" + b"F" + struct.pack("<d", 7.0))
        await until(lambda: len(told) == 3, "all to be heard")
        assert told == [Change("gap"), Change("gap"), Change("flush", "a", removal=7)]


async def test_following_can_be_given_up_at_any_moment(redis_url: str, namespace: str) -> None:
    """Between Python 3.11 and redis-py a cancellation may get lost: closing a cache would then never end."""

    async def follow(tier: RedisTier) -> None:
        async for _ in tier.changes():
            pass

    for moment in range(30):
        tier = RedisTier(redis_url, namespace)
        task = asyncio.create_task(follow(tier))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await until(task.done, f"the feed cancelled at step {moment} to end", seconds=5)
        await tier.close()


async def test_the_vectors_of_the_most_recently_used_entries_can_be_read_back(tier: RedisTier, other: RedisTier) -> None:
    await tier.resize("a", 10_000_000)
    for number in range(600):
        await tier.put("a", entry(number, vector=int8(unit(number)) if number % 2 else b""))
    found = await other.recent_vectors("a", 1000)
    assert found == [(key(number), CONTEXT, int8(unit(number))) for number in range(599, 0, -2)]
    assert [name for name, _, _ in await other.recent_vectors("a", 300)] == [key(number) for number in range(599, 299, -2)]
    assert await other.recent_vectors("b", 1000) == []


async def test_an_entry_of_an_unknown_version_is_a_miss_but_keeps_paying_for_its_room(
    tier: RedisTier, raw: Redis, namespace: str
) -> None:
    await tier.resize("a", 3000)
    for number in (1, 2, 3):
        await tier.put("a", entry(number))
    await raw.hset(f"cachepilot:{{{namespace}:a}}:entries", key(1), b"\x63" + pack(entry(1))[1:])
    assert await tier.get("a", key(1), touch=False) is None
    assert await tier.heads("a", [key(1), key(2)]) == [None, entry(2).head()]
    assert await tier.recent_vectors("a", 10) == []
    assert await tier.put("a", entry(4)) == 1
    assert (await tier.stats("a")).bytes == 3000


async def test_an_unused_arm_is_garbage_as_a_whole_no_entry_by_itself(tier: RedisTier, raw: Redis, namespace: str) -> None:
    await tier.resize("a", 3000)
    await tier.put("a", entry(1))
    remaining = [await raw.ttl(f"cachepilot:{{{namespace}:a}}:{part}") for part in ("entries", "order", "state")]
    assert len(set(remaining)) == 1
    assert 6 * 86_400 < remaining[0] <= 7 * 86_400


async def test_numbers_as_lua_writes_them_and_what_is_none_are_read(tier: RedisTier, raw: Redis, namespace: str) -> None:
    await tier.resize("a", 3000)
    await raw.hset(f"cachepilot:{{{namespace}:a}}:state", mapping={"bytes": "1.5e+15", "budget": "junk"})
    stats = await tier.stats("a")
    assert (stats.bytes, stats.budget) == (1_500_000_000_000_000, 3000)


@pytest.mark.parametrize("lost", ["entries", "order", "state"])
async def test_should_redis_drop_a_part_the_budget_still_holds(tier: RedisTier, raw: Redis, namespace: str, lost: str) -> None:
    await tier.resize("a", 5000)
    for number in range(5):
        await tier.put("a", entry(number))
    await raw.delete(f"cachepilot:{{{namespace}:a}}:{lost}")
    for number in range(10, 30):
        await tier.put("a", entry(number))
    stored = await raw.hvals(f"cachepilot:{{{namespace}:a}}:entries")
    stats = await tier.stats("a")
    assert sum(len(one) for one in stored) == stats.bytes == 5000
    assert (stats.entries, stats.budget) == (5, 5000)
    kept = range(25, 30)
    assert await tier.heads("a", [key(number) for number in kept]) == [entry(number).head() for number in kept]


async def test_budgets_survive_a_redis_that_loses_its_data_and_its_scripts(tmp_path: Path, namespace: str) -> None:
    with RedisServer(tmp_path) as server:
        tier = RedisTier(server.url, namespace, failures=1_000, read_deadline=5, write_deadline=5)
        await tier.resize("a", 2000)
        await tier.put("a", entry(1))
        async with following(tier) as told:
            server.__exit__(None, None, None)
            with pytest.raises(TierUnavailable, match=r"no answer from unix://.*redis\.sock"):
                await tier.get("a", key(1))
            await until(lambda: told == [Change("lost")], "the feed to say once that it hears nothing")
            with RedisServer(tmp_path):
                assert await tier.get("a", key(1)) is None
                assert [await tier.put("a", entry(number)) for number in (1, 2, 3)] == [0, 0, 1]
                assert (await tier.stats("a")).budget == 2000
                await until(lambda: Change("gap") in told, "the feed to say that it may have missed something")
        await tier.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_redis_that_is_away_is_not_asked_again_until_the_cooldown_is_over(tmp_path: Path, namespace: str) -> None:
    clock = Clock()
    tier = RedisTier(
        f"unix://{tmp_path}/redis.sock", namespace, failures=2, cooldown=10.0, read_deadline=5, write_deadline=5, clock=clock
    )
    for _ in range(2):
        with pytest.raises(TierUnavailable, match="no answer"):
            await tier.get("a", key(1))
    with RedisServer(tmp_path):
        with pytest.raises(TierUnavailable, match="is not asked for a moment"):
            await tier.get("a", key(1))
        tier.touch_soon("a", key(1))  # is lost without a sound
        clock.now = 10.0
        assert await tier.get("a", key(1)) is None
        assert await tier.resize("a", 1000) == 0
    await tier.close()


async def test_a_frozen_redis_costs_a_deadline_and_heals(tmp_path: Path, namespace: str) -> None:
    with RedisServer(tmp_path) as server:
        tier = RedisTier(server.url, namespace, failures=1_000, read_deadline=0.02, write_deadline=5)
        await tier.resize("a", 2000)
        await tier.put("a", entry(1))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TierUnavailable, match=r"within 0\.02 s"):
                await tier.get("a", key(1))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await tier.put("a", entry(2)) == 0

        async def answered() -> bool:
            with contextlib.suppress(TierUnavailable):
                return await tier.get("a", key(1)) == entry(1)
            return False

        await until(answered, "an answer; never one that belongs to the call that was given up")
        assert await tier.heads("a", [key(1), key(2)]) == [entry(1).head(), entry(2).head()]
        await tier.close()


async def test_a_refusal_is_unavailable_but_does_not_open_the_breaker(tier: RedisTier, raw: Redis, namespace: str) -> None:
    await tier.resize("a", 1000)
    await raw.set(f"cachepilot:{{{namespace}:a}}:entries", "not a hash")
    for _ in range(10):
        with pytest.raises(TierUnavailable, match=r"refused: .*WRONGTYPE"):
            await tier.get("a", key(1))
    assert await tier.get("b", key(1)) is None


async def test_many_calls_at_once_are_all_answered(redis_url: str, namespace: str) -> None:
    tier = RedisTier(redis_url, namespace, max_connections=3, read_deadline=10, write_deadline=10)
    await tier.resize("a", 100_000)
    evicted = await asyncio.gather(*(tier.put("a", entry(number)) for number in range(300)))
    found = await asyncio.gather(*(tier.get("a", key(number)) for number in range(300)))
    assert sum(evicted) == 200
    assert sum(one is not None for one in found) == 100
    await tier.close()


async def test_with_all_connections_busy_a_call_is_unavailable_by_its_deadline_and_works_again(
    redis_url: str, namespace: str
) -> None:
    tier = RedisTier(redis_url, namespace, failures=1_000, max_connections=2, read_deadline=5, write_deadline=5)
    await tier.resize("a", 10_000)
    await tier.put("a", entry(1))
    name = f"cachepilot:{{{namespace}}}:nothing"
    pool = tier._redis.connection_pool

    async def wait_for_nothing() -> None:
        await tier._redis.blpop([name], timeout=0)

    busy = [asyncio.create_task(wait_for_nothing()) for _ in range(2)]
    await until(lambda: len(pool._in_use_connections) == 2, "every connection to be taken")
    tier._read_deadline, tier._write_deadline = 0.05, 0.1  # what comes before is not to fail of them
    pool.timeout = 0.1  # type: ignore[attr-defined]
    async with asyncio.timeout(20):  # far beyond the deadlines, and far below waiting for ever
        for call in (
            lambda: tier.get("a", key(1)), lambda: tier.get("a", key(1), touch=False), lambda: tier.put("a", entry(2)),
            lambda: tier.heads("a", [key(1)]), lambda: tier.stats("a"), lambda: tier.renew("a", key(1), 1.0),
        ):  # fmt: skip
            with pytest.raises(TierUnavailable, match=r"no answer from .* within 0\.\d+ s: "):
                await call()
        with pytest.raises(TierUnavailable):
            await anext(tier.scan("a"))
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    tier._read_deadline = 5
    assert len(pool._in_use_connections) == 0, "none is lost by the calls that were given up"

    async def answered() -> bool:
        with contextlib.suppress(TierUnavailable):
            return await tier.get("a", key(1)) == entry(1)
        return False

    await until(answered, "an answer")
    await tier.close()


async def test_a_crowd_that_waits_for_few_connections_is_answered_in_the_end_or_told_so(redis_url: str, namespace: str) -> None:
    tier = RedisTier(redis_url, namespace, failures=100_000, max_connections=2, read_deadline=0.01, write_deadline=5)
    await tier.resize("a", 10_000)
    await tier.put("a", entry(1))
    found = await asyncio.gather(*(tier.get("a", key(1)) for _ in range(500)), return_exceptions=True)
    assert all(one == entry(1) or isinstance(one, TierUnavailable) for one in found)
    assert len(tier._redis.connection_pool._in_use_connections) == 0
    assert (await tier.stats("a")).entries == 1
    await tier.close()


async def test_a_stored_form_that_is_cut_short_is_a_miss_everywhere(tier: RedisTier, raw: Redis, namespace: str) -> None:
    await tier.resize("a", 10_000)
    await tier.put("a", entry(1))
    for number, stored in enumerate((b"", b"\x02", pack(entry(1))[:20], pack(entry(1, vector=int8(unit(1))))[:50]), start=2):
        await tier.put("a", entry(number))
        await raw.hset(f"cachepilot:{{{namespace}:a}}:entries", key(number), stored)
        assert await tier.get("a", key(number)) is None
        assert await tier.renew("a", key(number), 5.0) in (True, False)
    assert await tier.heads("a", [key(number) for number in range(1, 6)]) == [entry(1).head(), None, None, None, None]
    assert [head async for step in tier.scan("a") for head in step] == [entry(1).head()]
    assert await tier.recent_vectors("a", 10) == []


async def test_other_clients_are_told_of_many_that_were_deleted_but_not_of_lives_begun_anew(
    tier: RedisTier, other: RedisTier
) -> None:
    await tier.resize("a", 100_000)
    for number in range(3):
        await tier.put("a", entry(number))
    async with following(other) as told:
        await tier.renew("a", key(0), 5.0)
        assert await tier.delete_many("a", [key(0), key(7), key(2)]) == 2
        await until(lambda: len(told) > 0, "the change to arrive")
        # Of what Redis has no more, others may still have copies.
        assert told == [Change("evict", "a", (key(0), key(7), key(2)), removal=await tier.removals("a"))]


async def test_interrupted_streams_are_kept_but_not_found_by_meaning(tier: RedisTier) -> None:
    await tier.resize("a", 100_000)
    vector = int8(unit(1))
    partial = replace(entry(1, vector=vector), complete=False, form="sse")
    await tier.put("a", partial)
    await tier.put("a", entry(2, vector=vector))
    assert await tier.get("a", key(1)) == partial
    assert [name for name, _, _ in await tier.recent_vectors("a", 10)] == [key(2)]


@pytest.mark.parametrize("name", ["", "a:b", "a}", "a*", "a b"])
async def test_names_that_do_not_fit_into_keys_are_refused(tier: RedisTier, name: str) -> None:
    with pytest.raises(ValueError, match="namespace: expected 1 to 64 letters"):
        RedisTier("redis://127.0.0.1:1", name)
    with pytest.raises(ValueError, match="arm: expected 1 to 64 letters"):
        await tier.get(name, key(1))


def test_a_url_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        RedisTier("http://127.0.0.1")


async def test_a_feed_from_a_redis_that_is_gone_without_a_word_is_given_up_within_a_minute() -> None:
    tier = RedisTier("redis://127.0.0.1:9/0", "test")
    connection = tier._feed.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    async with contextlib.AsyncExitStack() as stack:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        stack.push_async_callback(server.wait_closed)
        stack.callback(server.close)
        connection.port = server.sockets[0].getsockname()[1]
        await connection._connect()
        stack.push_async_callback(connection.disconnect)
        made = connection._writer.get_extra_info("socket")
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 60
    await tier.close()
