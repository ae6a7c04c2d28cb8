"""Answers under way, shared between replicas by a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from serving.crypto import Sealer
from serving.flight_feed import FeedUnavailable, FlightFeed
from serving.flights import Flight, FlightFailed, Flights, Head, Reader
from serving.recording import finished, to_json
from serving.redis_server import RedisServer
from serving.tiers.redis import RedisTier
from tests.serving.streams import chunk, delta, spoken
from tests.waiting import until

KEY = b"k" * 32
STREAM = Head(200, "text/event-stream", {"x-request-id": "r1"})
SAID = [b"data: %d\n\n" % number for number in range(200)]


class Replica:
    """One replica's flights, and a model that each of its calls asks."""

    def __init__(self, url: str, namespace: str, *, head: Head = STREAM, grace: float = 2.0, **feed: Any) -> None:
        # Redis may be slow on a machine that runs other tests: that is not what is tested here.
        self.feed = FlightFeed(url, namespace, **{"deadline": 10.0, **feed})
        self.flights = Flights(feed=self.feed, grace=grace)
        self.head = head
        self.chunks = SAID
        self.ok = True
        self.calls = 0
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.stop_at: int | None = None
        self.settled: list[str] = []

    async def produce(self, flight: Flight) -> None:
        self.calls += 1
        flight.begin(self.head)
        for number, said in enumerate(self.chunks):
            if number == self.stop_at:
                self.going_on.clear()
            await self.going_on.wait()
            await flight.append(said)
            await asyncio.sleep(0)
        flight.finish(self.ok)

    async def settle(self, flight: Flight) -> None:
        self.settled.append(flight.state)

    def ask(self, key: bytes = KEY, since: float | None = None) -> Reader:
        return self.flights.join_or_start("control", key, self.produce, settle=self.settle, since=since)

    async def answer(self, key: bytes = KEY, since: float | None = None) -> bytes:
        with self.ask(key, since) as reader:
            return await reader.body()


@pytest.fixture
async def replicas(redis_url: str, namespace: str) -> AsyncIterator[list[Replica]]:
    made = [Replica(redis_url, namespace) for _ in range(2)]
    for replica in made:
        await replica.feed.open()
    yield made
    await close(*made)


async def close(*made: Replica) -> None:
    for replica in made:
        await replica.flights.close()
        await replica.feed.close()


@contextlib.asynccontextmanager
async def stopped_in_the_middle(leader: Replica, at: int) -> AsyncIterator[Reader]:
    """The leader's stream, waiting after so many chunks; goes on when the context ends."""
    leader.stop_at = at
    with leader.ask() as reader:
        await until(lambda: not leader.going_on.is_set(), "the leader to get so far")
        leader.stop_at = None
        yield reader
        leader.going_on.set()


async def test_twenty_identical_misses_on_two_replicas_are_one_call(replicas: list[Replica]) -> None:
    answers = await asyncio.gather(*(replicas[number % 2].answer() for number in range(20)))
    assert set(answers) == {b"".join(SAID)}
    assert sum(replica.calls for replica in replicas) == 1
    # Whoever called keeps the answer, the other does not keep it twice.
    await until(lambda: not any(len(replica.flights) for replica in replicas), "the flights to land")
    assert [state for replica in replicas for state in replica.settled] == ["complete"]


async def test_a_follower_reads_along_while_the_leader_still_runs(replicas: list[Replica]) -> None:
    leader, follower = replicas
    async with stopped_in_the_middle(leader, 100):
        with follower.ask() as reader:
            head = await reader.head()
            assert (head.status, head.content_type, head.headers) == (200, "text/event-stream", {"x-request-id": "r1"})
            await until(lambda: reader.flight.position == len(b"".join(SAID[:100])), "what the leader has")
            assert (reader.leader, reader.shared, reader.flight.origin) == (True, True, "replica")
            leader.going_on.set()
            assert await reader.body() == b"".join(SAID)
            assert reader.flight.state == "complete"
    assert (leader.calls, follower.calls) == (1, 0)


async def test_a_stream_that_nobody_follows_costs_three_round_trips(replicas: list[Replica]) -> None:
    leader = replicas[0]
    await leader.answer()
    await until(lambda: len(leader.flights) == 0, "the flight to land")
    assert leader.feed.round_trips == 3  # the claim, the whole answer, the release


async def test_a_followed_stream_of_tokens_is_published_in_batches(redis_url: str, namespace: str) -> None:
    leader, follower = (Replica(redis_url, namespace, interval=60.0, lease=60.0) for _ in range(2))
    await leader.feed.open()
    leader.chunks = [b"data: token %d\n\n" % number for number in range(2000)]
    async with stopped_in_the_middle(leader, 1):
        with follower.ask() as reader:
            await until(lambda: reader.flight.position > 0, "what the leader has")
            leader.going_on.set()
            assert await reader.body() == b"".join(leader.chunks)
    await until(lambda: len(leader.flights) == 0, "the leader to land")
    # The claim, the first bytes, one for each 16 KiB begun, the release.
    assert leader.feed.round_trips <= 4 + len(b"".join(leader.chunks)) // (16 << 10)
    await close(leader, follower)


async def test_followers_are_served_although_the_leader_was_not_told_of_them(redis_url: str, namespace: str) -> None:
    leader, follower = (Replica(redis_url, namespace, lease=0.9) for _ in range(2))
    leader.feed._channel = "another"  # as with a subscription that is down: the next renewal sees the follower
    async with stopped_in_the_middle(leader, 100):
        with follower.ask() as reader:
            await until(lambda: reader.flight.position > 0, "what the leader has")
            leader.going_on.set()
            assert await reader.body() == b"".join(SAID)
    assert (leader.calls, follower.calls) == (1, 0)
    await close(leader, follower)


async def test_a_leader_whose_clients_leave_goes_on_for_followers(redis_url: str, namespace: str) -> None:
    leader, follower = (Replica(redis_url, namespace, grace=1.0, lease=1.5) for _ in range(2))
    async with stopped_in_the_middle(leader, 100) as own:
        with follower.ask() as reader:
            await reader.head()
            await until(lambda: own.flight._held, "the leader to hear of its follower")
            own.close()
            assert own.flight.readers == 0
            leader.going_on.set()
            assert await reader.body() == b"".join(SAID)
    assert (leader.calls, follower.calls) == (1, 0)
    await close(leader, follower)


async def test_a_leader_that_gives_up_leaves_its_place_to_a_follower_that_goes_on(replicas: list[Replica]) -> None:
    leader, follower = replicas
    pieces = ["Hel", "lo, ", "wor", "ld"]
    leader.chunks = [spoken(pieces[:2], done=False, finish=None, usage=False), b"never said"]
    follower.chunks = [spoken(pieces, name="chatcmpl-2", created=1_800_000_000)]
    async with stopped_in_the_middle(leader, 1):
        with follower.ask() as reader:
            await until(lambda: reader.flight.position == len(leader.chunks[0]), "what the leader has")
            await leader.flights.close()
            whole = await reader.body()
            assert reader.flight.origin == "upstream"
    assert to_json(whole) == to_json(spoken(pieces))
    assert finished(whole)
    assert (leader.calls, follower.calls) == (1, 1)
    await until(lambda: follower.settled == ["complete"], "the answer to be kept")
    assert leader.settled == ["abandoned"]


async def test_a_follower_notices_a_leader_that_died_and_calls_itself(redis_url: str, namespace: str) -> None:
    follower = Replica(redis_url, namespace, lease=0.6)
    dead = FlightFeed(redis_url, namespace, lease=0.6, deadline=10.0)
    claim = await dead.claim("control", KEY)
    assert claim is not None
    assert claim.leading
    # It never says anything, and nobody renews its lease.
    assert await follower.answer() == b"".join(SAID)
    assert follower.calls == 1
    await dead.close()
    await close(follower)


async def test_of_several_followers_of_a_dead_leader_one_calls_and_the_others_follow_it(redis_url: str, namespace: str) -> None:
    followers = [Replica(redis_url, namespace, lease=0.6) for _ in range(3)]
    dead = FlightFeed(redis_url, namespace, lease=0.6, deadline=10.0)
    assert await dead.claim("control", KEY) is not None
    now = time.monotonic()  # one may hear of the death only when the answer of another is complete
    answers = await asyncio.gather(*(replica.answer(since=now) for replica in followers))
    assert set(answers) == {b"".join(SAID)}
    assert sum(replica.calls for replica in followers) == 1
    await dead.close()
    await close(*followers)


async def test_a_continuation_that_says_something_else_is_told_to_the_readers(replicas: list[Replica]) -> None:
    leader, follower = replicas
    leader.chunks = [chunk(delta(content="forty-two")), b"never said"]
    follower.chunks = [chunk(delta(content="forty-three"))]
    async with stopped_in_the_middle(leader, 1):
        with follower.ask() as reader:
            await until(lambda: reader.flight.position == len(leader.chunks[0]), "what the leader has")
            await leader.flights.close()
            with pytest.raises(FlightFailed, match="the new stream says something else"):
                await reader.body()
    await until(lambda: follower.settled == ["failed"], "the flight to land")


async def test_an_error_that_may_be_the_leaders_own_is_not_given_to_others(redis_url: str, namespace: str) -> None:
    leader, follower = Replica(redis_url, namespace, head=Head(401)), Replica(redis_url, namespace)
    async with stopped_in_the_middle(leader, 1):
        with follower.ask() as reader:
            assert (await reader.head()).status == 200
            assert await reader.body() == b"".join(SAID)
    await close(leader, follower)


async def test_an_error_of_the_upstream_is_shared(redis_url: str, namespace: str) -> None:
    leader, follower = Replica(redis_url, namespace, head=Head(503)), Replica(redis_url, namespace)
    async with stopped_in_the_middle(leader, 1):
        with follower.ask() as reader:
            assert (await reader.head()).status == 503
            leader.going_on.set()
            assert await reader.body() == b"".join(SAID)
    assert follower.calls == 0
    await close(leader, follower)


async def test_a_cut_stream_is_cut_for_followers_and_joined_by_nobody_later(replicas: list[Replica]) -> None:
    leader, follower = replicas
    leader.ok = False
    async with stopped_in_the_middle(leader, 100):
        with follower.ask() as reader:
            await reader.head()
            leader.going_on.set()
            assert await reader.body() == b"".join(SAID)
            assert reader.flight.state == "cut"
    await until(lambda: len(leader.flights) == 0, "the leader to land")
    with follower.ask(since=0.0) as later:
        assert await later.body() == b"".join(SAID)
    assert follower.calls == 1


async def test_a_leaders_failure_reaches_the_readers_of_a_follower(replicas: list[Replica]) -> None:
    leader, follower = replicas

    async def breaks(flight: Flight) -> None:
        flight.begin(STREAM)
        await flight.append(b"data: a\n\n")
        await leader.going_on.wait()
        raise ConnectionResetError("the upstream hung up")

    leader.going_on.clear()
    with leader.flights.join_or_start("control", KEY, breaks) as own:
        await own.head()
        with follower.ask() as reader:
            pieces = reader.read()
            assert await anext(pieces) == b"data: a\n\n"
            leader.going_on.set()
            with pytest.raises(FlightFailed, match="the upstream hung up"):
                await anext(pieces)
    assert follower.calls == 0


async def test_a_request_from_before_the_end_follows_what_has_just_ended_elsewhere(replicas: list[Replica]) -> None:
    leader, follower = replicas
    since = asyncio.get_running_loop().time() - 1.0  # the way to Redis takes time as well
    await leader.answer()
    await until(lambda: len(leader.flights) == 0, "the leader to land")
    with follower.ask(since=since) as reader:
        assert await reader.body() == b"".join(SAID)
    assert follower.calls == 0
    await until(lambda: len(follower.flights) == 0, "the follower to land")
    # Who asks only now has looked into the cache after the answer was there: the call is its own.
    claim = await follower.feed.claim("control", KEY, waited=0.0)
    assert claim is not None
    assert claim.leading


async def test_who_asks_after_a_flush_leads_anew_and_those_who_follow_already_get_what_they_follow(
    replicas: list[Replica], redis_url: str, namespace: str
) -> None:
    leader, follower = replicas
    late = Replica(redis_url, namespace)
    late.chunks = [b"data: anew\n\n"]
    tier = RedisTier(redis_url, namespace, write_deadline=10.0)
    await tier.resize("control", 1000)
    for flush in (tier.flush("control"), tier.outdate("control", {"tag": "red"})):
        async with stopped_in_the_middle(leader, 100):
            with follower.ask() as reader:
                await until(lambda reader=reader: reader.flight.position > 0, "what the leader has")  # type: ignore[misc]
                await flush
                assert await late.answer() == b"data: anew\n\n"
                leader.going_on.set()
                assert await reader.body() == b"".join(SAID)
        await until(lambda: not any(len(replica.flights) for replica in (*replicas, late)), "the flights to land")
    assert (leader.calls, follower.calls, late.calls) == (2, 0, 2)
    await tier.close()
    await close(late)


async def test_a_large_answer_is_shared_up_to_a_bound_and_followers_then_call_themselves(redis_url: str, namespace: str) -> None:
    leader, follower = (Replica(redis_url, namespace, max_bytes=1000) for _ in range(2))
    async with stopped_in_the_middle(leader, 50):
        with follower.ask() as reader:
            await until(lambda: reader.flight.position > 0, "what the leader has")
            leader.chunks[:] = SAID
            follower.chunks = [chunk(delta(content="x"))]
            leader.going_on.set()
            # What it has read is no completion that could be compared: better an error than a mixture.
            with pytest.raises(FlightFailed):
                await reader.body()
    await close(leader, follower)


async def test_everything_in_redis_expires(replicas: list[Replica], redis_url: str, namespace: str) -> None:
    leader, follower = replicas
    redis: Redis = Redis.from_url(redis_url)
    pattern = f"cachepilot:{{{namespace}:control}}:flight:*"
    seen: set[bytes] = set()
    async with stopped_in_the_middle(leader, 100):
        with follower.ask() as reader:
            await until(lambda: reader.flight.position > 0, "what the leader has")
            keys = {name async for name in redis.scan_iter(pattern)}
            seen |= keys
            assert len(keys) == 3
            assert all([0 < await redis.pttl(name) <= 15_000 for name in keys])
            leader.going_on.set()
            await reader.body()
    await until(lambda: len(leader.flights) == 0, "the leader to land")
    left = {name async for name in redis.scan_iter(pattern)}
    assert all([0 < await redis.pttl(name) <= 5_000 for name in left])
    await redis.aclose()


async def values(redis: Redis, stream: bytes) -> list[bytes]:
    entries: Any = await redis.xrange(stream)
    return [value for _, fields in entries for value in fields.values()]


async def test_what_is_published_is_sealed_where_values_are(redis_url: str, namespace: str) -> None:
    sealer = Sealer(os.urandom(32))
    leader, follower = (Replica(redis_url, namespace, sealer=sealer) for _ in range(2))
    stranger = Replica(redis_url, namespace, sealer=Sealer(os.urandom(32)))
    redis: Redis = Redis.from_url(redis_url)
    async with stopped_in_the_middle(leader, 100):
        with follower.ask() as reader, stranger.ask() as other:
            await until(lambda: reader.flight.position > 0, "what the leader has")
            streams = [name async for name in redis.scan_iter(f"cachepilot:{{{namespace}:control}}:flight:*", _type="stream")]
            stored = [value for name in streams for value in await values(redis, name)]
            assert stored
            assert not any(b"data" in value or b"event-stream" in value for value in stored)
            # With another key nothing can be followed: a call of its own.
            assert await other.body() == b"".join(SAID)
            leader.going_on.set()
            assert await reader.body() == b"".join(SAID)
    assert (leader.calls, follower.calls, stranger.calls) == (1, 0, 1)
    await redis.aclose()
    await close(leader, follower, stranger)


async def test_without_redis_each_replica_calls_for_itself(namespace: str) -> None:
    with RedisServer() as server:
        url = server.url
    replicas = [Replica(url, namespace, deadline=0.5) for _ in range(2)]
    answers = await asyncio.gather(*(replicas[number % 2].answer() for number in range(20)))
    assert set(answers) == {b"".join(SAID)}
    assert [replica.calls for replica in replicas] == [1, 1]
    await close(*replicas)


async def test_a_redis_that_dies_in_the_middle_takes_no_answer_with_it(namespace: str) -> None:
    pieces = ["Hel", "lo"]
    with RedisServer() as server:
        leader, follower = (Replica(server.url, namespace, lease=0.6, deadline=0.5) for _ in range(2))
        leader.chunks = [spoken(pieces[:1], done=False, finish=None, usage=False), chunk(delta(content="lo", finish="stop"))]
        follower.chunks = [spoken(pieces, name="chatcmpl-2")]
        async with stopped_in_the_middle(leader, 1) as own:
            with follower.ask() as reader:
                await until(lambda: reader.flight.position == len(leader.chunks[0]), "what the leader has")
                server.__exit__(None, None, None)
                leader.going_on.set()
                assert await own.body() == b"".join(leader.chunks)
                assert to_json(await reader.body()) == to_json(spoken(pieces))
    assert (leader.calls, follower.calls) == (1, 1)
    await close(leader, follower)


async def test_a_redis_that_hangs_takes_no_answer_with_it(namespace: str) -> None:
    pieces = ["Hel", "lo"]
    with RedisServer() as server:
        leader, follower = (Replica(server.url, namespace, lease=3.0, deadline=0.5) for _ in range(2))
        await leader.feed.open()
        leader.chunks = [spoken(pieces[:1], done=False, finish=None, usage=False), chunk(delta(content="lo", finish="stop"))]
        follower.chunks = [spoken(pieces, name="chatcmpl-2")]
        async with stopped_in_the_middle(leader, 1) as own:
            with follower.ask() as reader:
                await until(lambda: reader.flight.position == len(leader.chunks[0]), "what the leader has")
                assert server.pid is not None
                os.kill(server.pid, signal.SIGSTOP)
                try:
                    leader.going_on.set()
                    assert await own.body() == b"".join(leader.chunks)
                    assert to_json(await reader.body()) == to_json(spoken(pieces))
                    # Left alone for a while, it is not even asked.
                    for _ in range(3):
                        assert await follower.answer(os.urandom(32)) == follower.chunks[0]
                    await until(lambda: len(leader.flights) == 0, "the leader to land")
                    await close(leader, follower)
                finally:
                    os.kill(server.pid, signal.SIGCONT)
    assert (leader.calls, follower.calls) == (1, 4)


async def test_a_redis_that_hangs_for_less_than_the_lease_costs_no_further_call(namespace: str) -> None:
    """Whatever the model would say the second time: who has the beginning of its answer gets the rest of that one."""
    with RedisServer() as server:
        leader, follower = (Replica(server.url, namespace, lease=6.0, deadline=0.5, cooldown=0.1) for _ in range(2))
        await leader.feed.open()
        leader.chunks = [chunk(delta(content=f"{number} ")) for number in range(50)]
        follower.chunks = [chunk(delta(content="something else"))]
        failures = [failures_of(replica.feed) for replica in (leader, follower)]
        async with stopped_in_the_middle(leader, 10):
            with follower.ask() as reader:
                await until(lambda: reader.flight.position == len(b"".join(leader.chunks[:10])), "what the leader has")
                assert server.pid is not None
                os.kill(server.pid, signal.SIGSTOP)
                try:
                    leader.going_on.set()
                    await until(lambda: all(failures), "both to fail")
                finally:
                    os.kill(server.pid, signal.SIGCONT)
                assert await reader.body() == b"".join(leader.chunks)
        assert (leader.calls, follower.calls) == (1, 0)
        await close(leader, follower)


async def test_a_lease_that_lapsed_while_redis_hung_is_taken_again_by_its_leader(redis_url: str, namespace: str) -> None:
    leader, follower = (Replica(redis_url, namespace, lease=0.6) for _ in range(2))
    redis = Redis.from_url(redis_url)
    pattern = f"cachepilot:{{{namespace}:control}}:flight:{KEY.hex()}:*-"

    async def lease() -> bytes | None:
        names = await redis.keys(pattern)
        return await redis.get(names[0]) if names else None

    async with stopped_in_the_middle(leader, 1):
        held = await lease()
        assert held is not None
        assert await redis.delete(*await redis.keys(pattern)) == 1
        await until(lambda: _equals(lease, held), "the lease to be taken again")
        with follower.ask() as reader:
            await until(lambda: reader.flight.position == len(SAID[0]), "what the leader has")
            leader.going_on.set()
            assert await reader.body() == b"".join(SAID)
    assert (leader.calls, follower.calls) == (1, 0)
    await close(leader, follower)
    await redis.aclose()


async def _equals(read: Callable[[], Awaitable[bytes | None]], value: bytes) -> bool:
    return await read() == value


def failures_of(feed: FlightFeed) -> list[FeedUnavailable]:
    """Collects what calls of a feed fail with."""
    failures: list[FeedUnavailable] = []
    call = feed.call

    async def noted(*given: Any, **more: Any) -> Any:
        try:
            return await call(*given, **more)
        except FeedUnavailable as error:
            failures.append(error)
            raise

    feed.call = noted  # type: ignore[method-assign]
    return failures


async def test_more_flights_than_connections_are_not_followed_and_hurt_nobody(redis_url: str, namespace: str) -> None:
    leader, follower = Replica(redis_url, namespace), Replica(redis_url, namespace, connections=2)  # one hears of followers
    await follower.feed.open()
    leader.stop_at = 100
    keys = [os.urandom(32) for _ in range(4)]
    with contextlib.ExitStack() as stack:
        own = [stack.enter_context(leader.ask(key)) for key in keys]
        await until(lambda: leader.calls == 4, "the leader's calls")
        reading = [asyncio.create_task(follower.answer(key)) for key in keys]
        await until(lambda: sum(task.done() for task in reading) == 3, "those that cannot be followed")
        leader.stop_at = None
        leader.going_on.set()
        assert set(await asyncio.gather(*reading)) == {b"".join(SAID)}
        assert {await reader.body() for reader in own} == {b"".join(SAID)}
    assert follower.calls == 3
    await close(leader, follower)


_LEADER = """
import asyncio, sys
from serving.flight_feed import FlightFeed
from serving.flights import Flights, Head

async def produce(flight):
    flight.begin(Head(200, "text/event-stream"))
    await flight.append(sys.stdin.buffer.read())
    print("said", flush=True)
    await asyncio.Event().wait()

async def main():
    flights = Flights(feed=FlightFeed(sys.argv[1], sys.argv[2], lease=2.0, deadline=10.0))
    with flights.join_or_start("control", b"k" * 32, produce) as reader:
        await reader.body()

asyncio.run(main())
"""


async def test_a_replica_that_is_killed_in_the_middle_of_a_stream_leaves_it_to_a_follower(redis_url: str, namespace: str) -> None:
    pieces = ["Hel", "lo, ", "wor", "ld"]
    said = spoken(pieces[:2], done=False, finish=None, usage=False)
    follower = Replica(redis_url, namespace, lease=2.0)
    follower.chunks = [spoken(pieces, name="chatcmpl-2", created=1_800_000_000)]
    leader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _LEADER, redis_url, namespace, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert leader.stdin is not None
        assert leader.stdout is not None
        leader.stdin.write(said)
        leader.stdin.close()
        assert await leader.stdout.readline() == b"said\n"
        with follower.ask() as reader:
            await until(lambda: reader.flight.position == len(said), "what the leader has")
            assert follower.calls == 0
            leader.kill()
            whole = await reader.body()
    finally:
        with contextlib.suppress(ProcessLookupError):
            leader.kill()
        await leader.wait()
    assert whole.startswith(said)
    assert to_json(whole) == to_json(spoken(pieces))
    assert finished(whole)
    assert follower.calls == 1
    await until(lambda: follower.settled == ["complete"], "the answer to be kept")
    await close(follower)
