"""Answers under way, shared between replicas by Redis: one of them calls the model, the others read what it publishes.

Per key there is a lease (``SET NX PX``, renewed): its holder leads. A replica that finds the lease taken follows: it tells the
leader so, and reads the leader's Redis stream from its beginning (``XREAD BLOCK``, on a connection that nothing else waits for).
As soon as it has followers, the leader writes there what it gets from the model, gathered so that a stream of tokens costs a
round trip per ``interval`` or ``batch`` and not one per token. Without followers it writes the answer once, when it has ended.

* The leader is told of followers by publication, and by each renewal at the latest; while it has some, its own clients' leaving
  does not cancel the call.
* A leader that dies lets the lease lapse. Followers notice and claim anew: one of them leads, from where they are.
* Where Redis does not answer for a while, shorter than the lease, leader and followers try again: a reader who has the beginning
  of one answer could not go on with that of another call.
* What a flush found under way goes on for those who follow it, and nobody follows it any more: whoever asks next leads anew.
* A flight that ended well is still joined by a request that began before it ended, by Redis' clock and the request's own
  stopwatch: no clocks are compared.
* Everything expires by itself. With Redis away each replica calls the model for itself, at the cost of one deadline per
  cool-down.

Keys, all in the arm's hash slot: ``cachepilot:{<namespace>:<arm>}:flight:<key>:<numbers of the arm's last flushes>`` holds the
leader's token; with ``:waiting``, whether somebody follows; with ``:ended``, token and time of the last one that ended well; with
``:<token>``, the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import orjson
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MaxConnectionsError, RedisError

from serving.breaker import CircuitBreaker
from serving.crypto import Sealer
from serving.ending import end
from serving.flights import Flight, FlightFailed, Head, Relayed
from serving.tiers.redis import check_name

_log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_SECONDS = 0.1

READ_ENTRIES = 256
"""Most entries of one read: at most 4 MiB."""

# KEYS: the arm's state (serving/tiers/redis_scripts.py), the key's own. What began before a flush has the name of the one before.
_OF_THE_LAST_FLUSH = """
local floor, flushed = unpack(redis.call('HMGET', KEYS[1], 'floor', 'flushed'))
local lease = KEYS[2] .. ':' .. (floor or '') .. '-' .. (flushed or '')
"""

# ARGV: token, lease and waited in milliseconds, channel -> whether it is ours, whose it is, the lease.
_CLAIM = (
    _OF_THE_LAST_FLUSH
    + """
local holder = redis.call('GET', lease)
if not holder then
  local ended = redis.call('GET', lease .. ':ended')
  if ended then
    local time = redis.call('TIME')
    local token, at = string.match(ended, '^(%x+):(%d+)$')
    if at and tonumber(at) >= time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(ARGV[3]) then return {0, token, lease} end
  end
  redis.call('SET', lease, ARGV[1], 'PX', ARGV[2])
  return {1, ARGV[1], lease}
end
redis.call('SET', lease .. ':waiting', 1, 'PX', ARGV[2])
redis.call('PUBLISH', ARGV[4], holder)
return {0, holder, lease}
"""
)

# ARGV: token. Of a claim whose answer nobody got.
_GIVE_BACK = (
    _OF_THE_LAST_FLUSH
    + """
if redis.call('GET', lease) == ARGV[1] then redis.call('DEL', lease) end
"""
)

# KEYS: lease, waiting, stream. ARGV: token, lease and the stream's life in milliseconds -> -1: lost, else if somebody follows.
# One that lapsed while Redis hung, and that nobody has taken, is taken again.
_RENEW = """
if (redis.call('GET', KEYS[1]) or ARGV[1]) ~= ARGV[1] then return -1 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return redis.call('EXISTS', KEYS[2])
"""

# KEYS: lease, ended, stream. ARGV: token, whether it ended well, milliseconds that it can still be read.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  if ARGV[2] == '1' then
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    redis.call('SET', KEYS[2], ARGV[1] .. ':' .. string.format('%.0f', now), 'PX', ARGV[3])
  end
end
redis.call('PEXPIRE', KEYS[3], ARGV[3])
"""

# KEYS: lease, waiting. ARGV: token, lease in milliseconds -> whether the leader lives.
_WATCH = """
redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
return redis.call('GET', KEYS[1]) == ARGV[1] and 1 or 0
"""


class FeedUnavailable(RuntimeError):
    """Redis did not answer in time or refused."""


class FlightFeed:
    """The feed of one replica.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: Separates gateways that share a Redis.
        deadline: Seconds that a call may take.
        lease: Seconds after which a leader that is silent counts as dead; renewed three times as often.
        interval: Seconds for which bytes are gathered before they are published; the first are published at once.
        batch: Bytes that are published without waiting longer.
        max_bytes: Bytes of an answer that are published at most; followers of a larger one call the model themselves.
        linger: Seconds for which a flight that ended can be read.
        connections: Flights that this replica follows at the same time at most; for more it calls the model itself.
        sealer: Encrypts head and bytes; None: they are kept as they are.
        failures: Failures in a row after which Redis is left alone.
        cooldown: For so long, seconds.
        options: For the connections: TLS and so on.

    Attributes:
        round_trips: Calls made to Redis.
        followed: For each flight that this replica leads, by its token, what is set once it has followers.

    Raises:
        ValueError: If the URL or the namespace is not well-formed.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        deadline: float = 0.25,
        lease: float = 5.0,
        interval: float = 0.02,
        batch: int = 16 << 10,
        max_bytes: int = 4 << 20,
        linger: float = 5.0,
        connections: int = 64,
        sealer: Sealer | None = None,
        failures: int = 3,
        cooldown: float = 1.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.url, self.namespace = url, check_name("flight feed: namespace", namespace)
        self.lease, self.interval, self.batch, self.max_bytes, self.linger = lease, interval, batch, max_bytes, linger
        self.sealer = sealer
        self.round_trips = 0
        self.followed: dict[str, asyncio.Event] = {}
        self._channel = f"cachepilot:{{{namespace}}}:followed"
        self._subscribed = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._giving_back: set[asyncio.Task[None]] = set()
        self._deadline = deadline
        self._breaker = CircuitBreaker(failures, cooldown)
        # As in the Redis tier: deadlines here bound every call, so that the client sets none; it tries once more at once.
        given: dict[str, Any] = {"socket_timeout": None, "retry": Retry(NoBackoff(), 1), **(options or {})}
        if not url.startswith("unix"):
            given["socket_keepalive"] = True
        self._redis = Redis(connection_pool=BlockingConnectionPool.from_url(url, max_connections=16, timeout=deadline, **given))
        self._reading = Redis(connection_pool=ConnectionPool.from_url(url, max_connections=connections, **given))
        register = self._redis.register_script
        self._claim, self._return, self.renew = register(_CLAIM), register(_GIVE_BACK), register(_RENEW)
        self.release, self.watch = register(_RELEASE), register(_WATCH)

    async def open(self) -> None:
        """Begin to hear of followers; does not wait long for a Redis that is away. Without it, the first claim begins."""
        self._listen_from_now_on()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline):
                await self._subscribed.wait()

    async def claim(self, arm: str, key: bytes, *, waited: float = 0.0) -> Claim | None:
        """Lead the flight of a key, or follow the one who does.

        Args:
            arm: The arm.
            key: Fingerprint of the request.
            waited: Seconds since the request began: a flight that ended well since can still be followed.

        Returns:
            The role; None where Redis is away: then everyone is on their own.
        """
        of_arm = f"cachepilot:{{{self.namespace}:{check_name('flight feed: arm', arm)}}}"
        keys = [f"{of_arm}:state", f"{of_arm}:flight:{key.hex()}"]
        token = os.urandom(8).hex()
        args: list[str | int] = [token, int(self.lease * 1000), int(waited * 1000), self._channel]
        self._listen_from_now_on()
        try:
            ours, holder, lease = await self.call(lambda: self._claim(keys=keys, args=args))
        except FeedUnavailable as error:
            _log.debug("a flight is not shared: %s", error)
            return None
        except asyncio.CancelledError:
            # Redis may have granted it all the same: nobody shall wait for a leader that is none.
            task = asyncio.create_task(self._give_back(keys, token), name="flight-lease")
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)
            raise
        return Claim(self, lease.decode(), holder.decode(), key, leading=bool(ours))

    async def close(self) -> None:
        """Close the connections."""
        if self._listener is not None:
            await end([self._listener])
        await asyncio.gather(*self._giving_back, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()
            await self._redis.connection_pool.disconnect()
            await self._reading.aclose()
            await self._reading.connection_pool.disconnect()

    def _listen_from_now_on(self) -> None:
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen(), name="flight-followers")

    async def _listen(self) -> None:
        backoff = 0.05
        while True:
            try:
                async with self._reading.pubsub() as channel:
                    await channel.subscribe(self._channel)
                    async for message in channel.listen():
                        backoff = 0.05
                        self._subscribed.set()
                        if message["type"] == "message" and (event := self.followed.get(message["data"].decode())) is not None:
                            event.set()
            except (RedisError, OSError) as error:
                _log.info("followers are heard of late, next try in %.2g s: %s", backoff, error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, 2.0)

    async def _give_back(self, keys: list[str], token: str) -> None:
        with contextlib.suppress(FeedUnavailable):
            await self.call(lambda: self._return(keys=keys, args=[token]))

    # -- for claims ----------------------------------------------------------------------------------------------------------

    async def call(self, call: Callable[[], Awaitable[T]], *, more: float = 0.0) -> T:
        """Make one call within the deadline, and ``more`` seconds.

        Raises:
            FeedUnavailable: If Redis does not answer in time, refuses, or is left alone for the moment.
        """
        if not self._breaker.allow(time.monotonic()):
            raise FeedUnavailable(f"flight feed: {self.url} failed several times in a row and is not asked for a moment")
        self.round_trips += 1
        try:
            async with asyncio.timeout(self._deadline + more):
                result = await call()
        except MaxConnectionsError as error:
            self._breaker.abandoned()
            raise FeedUnavailable("flight feed: as many flights are followed as there are connections for it") from error
        except (RedisError, OSError, TimeoutError) as error:
            self._breaker.failed(time.monotonic())
            raise FeedUnavailable(f"flight feed: no answer from {self.url} within {self._deadline:g} s: {error!r}") from error
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return result

    async def send(self, stream: str, entries: list[dict[bytes, bytes]]) -> None:
        """Add entries to a stream, in one round trip."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for entry in entries:
                pipe.xadd(stream, entry)  # type: ignore[arg-type]
            pipe.pexpire(stream, self.life)
            await self.call(pipe.execute)

    async def entries(self, stream: str, last: bytes, *, block: float) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the entries behind ``last``; waits ``block`` seconds for the first; 0: not at all."""
        wait = max(1, int(block * 1000)) if block else None
        found: Any = await self.call(lambda: self._reading.xread({stream: last}, count=READ_ENTRIES, block=wait), more=block)
        if isinstance(found, dict):  # RESP3
            found = list(found.items())
        read = found[0][1] if found else []
        return read[0] if read and isinstance(read[0], list) else read

    @property
    def life(self) -> int:
        """Milliseconds that a stream lives without its leader."""
        return int((2 * self.lease + self.linger) * 1000)


class Claim:
    """A replica's role in one flight.

    Attributes:
        leading: Whether it calls the model and publishes, or else follows the one that does.
    """

    def __init__(self, feed: FlightFeed, base: str, token: str, key: bytes, *, leading: bool) -> None:
        self.leading = leading
        self._feed, self._base, self._token, self._key = feed, base, token, key
        self._stream = f"{base}:{token}"
        self._begun = False  # of the leader's answer, its head was read

    # -- leading -------------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def publishing(self, flight: Flight) -> AsyncIterator[None]:
        """Publish the flight while the context is open; on leaving it, publish its end and give back the lease."""
        followed = self._feed.followed[self._token] = asyncio.Event()
        publisher = asyncio.create_task(self._publish(flight, followed), name="flight-publisher")
        renewal = asyncio.create_task(self._renew(flight, publisher, followed), name="flight-lease")
        try:
            yield
            if flight.done:
                await asyncio.wait([publisher])
        finally:
            await end((publisher, renewal))
            del self._feed.followed[self._token]
            flight.hold(False)
            await self._release(flight)

    async def _release(self, flight: Flight) -> None:
        feed = self._feed
        keys = [self._base, f"{self._base}:ended", self._stream]
        args: list[str | int] = [self._token, int(flight.state == "complete"), int(feed.linger * 1000)]
        try:
            await feed.call(lambda: feed.release(keys=keys, args=args))
        except FeedUnavailable as error:
            _log.debug("a lease was not given back and lapses: %s", error)

    async def _publish(self, flight: Flight, followed: asyncio.Event) -> None:
        feed, sent, begun = self._feed, 0, False
        try:
            await self._until_followed(flight, followed)
            while True:
                entries: list[dict[bytes, bytes]] = []
                if flight.head is not None and not begun:
                    begun = True
                    entries.append({b"h": self._sealed(_head_bytes(flight.head), b"h")})
                if flight.position > feed.max_bytes:
                    await self._send([*entries, {b"e": b"large"}])
                    return
                while piece := flight.piece(sent)[: feed.batch]:
                    entries.append({b"c": self._sealed(piece, b"c%d" % sent), b"o": b"%d" % sent})
                    sent += len(piece)
                if flight.done:
                    why = b": " + str(flight.error).encode() if flight.state == "failed" else b""
                    await self._send([*entries, {b"e": flight.state.encode() + why, b"o": b"%d" % sent}])
                    return
                if entries:
                    await self._send(entries)
                    await self._gather(flight, sent)
                else:
                    await flight.news()
        except (FeedUnavailable, FlightFailed) as error:
            # The renewal stops with it: followers see the lease lapse, and help themselves.
            _log.info("a flight is shared no further: %s", error)

    async def _send(self, entries: list[dict[bytes, bytes]]) -> None:
        """Publish; for as long as the lease lasts again where Redis does not answer. Then some may come twice."""
        end = time.monotonic() + self._feed.lease
        while True:
            try:
                await self._feed.send(self._stream, entries)
                return
            except FeedUnavailable:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def _until_followed(self, flight: Flight, followed: asyncio.Event) -> None:
        following = asyncio.create_task(followed.wait())
        ended = asyncio.create_task(flight.over.wait())
        try:
            await asyncio.wait([following, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            following.cancel()
            ended.cancel()
        if not flight.done:
            flight.hold(True)

    async def _gather(self, flight: Flight, sent: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._feed.interval):
                while not flight.done and flight.position - sent < self._feed.batch:
                    await flight.news()

    async def _renew(self, flight: Flight, publisher: asyncio.Task[None], followed: asyncio.Event) -> None:
        feed = self._feed
        keys = [self._base, f"{self._base}:waiting", self._stream]
        args: list[str | int] = [self._token, int(feed.lease * 1000), feed.life]
        while not publisher.done() or flight.done:
            await asyncio.sleep(feed.lease / 3)
            try:
                following = await feed.call(lambda: feed.renew(keys=keys, args=args))
            except FeedUnavailable:
                following = 0
            if following < 0:
                publisher.cancel()
                break
            if following:
                followed.set()
            flight.hold(bool(following))
        flight.hold(False)

    # -- following -----------------------------------------------------------------------------------------------------------

    async def relay(self, flight: Flight) -> Relayed:
        """Feed a flight with what the leader publishes.

        Returns:
            ``ended``: the flight has ended as the leader's did; ``lost``: the leader died or gave up; ``alone``: the answer
            is not for others, too large to be shared, or Redis is away.

        Raises:
            Diverged: If the flight goes on after another leader's death, and this one says something else.
        """
        feed, last, checked = self._feed, b"0-0", time.monotonic()
        received, failing = 0, math.inf  # since when
        while True:
            try:
                entries = await feed.entries(self._stream, last, block=feed.lease / 3)
                now = time.monotonic()
                if not entries or now - checked >= feed.lease / 3:
                    checked = now
                    keys = [self._base, f"{self._base}:waiting"]
                    args: list[str | int] = [self._token, int(feed.lease * 1000)]
                    alive = await feed.call(lambda: feed.watch(keys=keys, args=args))  # noqa: B023 - awaited at once
                    if not entries and not alive:
                        entries = await feed.entries(self._stream, last, block=0.0)  # what it said at the very last
                        if not entries:
                            return "lost"
            except FeedUnavailable as error:
                failing = min(failing, time.monotonic())
                if not flight.position or time.monotonic() - failing >= feed.lease:
                    _log.info("a flight is followed no further: %s", error)
                    return "alone"
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            failing = math.inf
            for last, fields in entries:  # noqa: B007 - goes on from there
                outcome, received = await self._apply(flight, fields, received)
                if outcome is not None:
                    return outcome

    async def _apply(self, flight: Flight, fields: dict[bytes, bytes], received: int) -> tuple[Relayed | None, int]:
        if b"h" in fields:
            plain = self._opened(fields[b"h"], b"h")
            if plain is None:
                return "alone", received
            head = _head_of(plain)
            if not head.shareable:
                return "alone", received
            if not self._begun:  # else it comes once more
                self._begun = True
                flight.origin = "replica"
                flight.begin(head)
        elif b"c" in fields:
            plain = self._opened(fields[b"c"], b"c" + fields[b"o"])
            if plain is None or int(fields[b"o"]) > received:
                return "lost", received
            new = plain[received - int(fields[b"o"]) :]  # less, or nothing, where it comes once more
            if new:
                await flight.append(new)
            return None, received + len(new)
        elif b"e" in fields:
            state, _, why = fields[b"e"].partition(b": ")
            if state == b"large":
                return "alone", received
            if state == b"abandoned" or flight.head is None or int(fields[b"o"]) != received:
                return "lost", received
            if state == b"failed":
                flight.fail(FlightFailed(why.decode("utf-8", "replace")))
            else:
                flight.finish(state == b"complete")
            return "ended", received
        return None, received

    def _sealed(self, plain: bytes, part: bytes) -> bytes:
        sealer = self._feed.sealer
        return plain if sealer is None else sealer.seal(self._stream.encode() + part, plain)

    def _opened(self, sealed: bytes, part: bytes) -> bytes | None:
        sealer = self._feed.sealer
        return sealed if sealer is None else sealer.open(self._stream.encode() + part, sealed)


def _head_bytes(head: Head) -> bytes:
    return orjson.dumps([head.status, head.content_type, dict(head.headers), head.private])


def _head_of(written: bytes) -> Head:
    status, content_type, headers, private = orjson.loads(written)
    return Head(status, content_type, headers, private)
