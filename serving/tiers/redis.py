"""The Redis tier: the store that all replicas share, one budget per arm across the cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from serving.breaker import CircuitBreaker
from serving.crypto import Sealer
from serving.redis_url import shown
from serving.tiers import redis_scripts as scripts
from serving.tiers.base import KEY_BYTES, Change, Entry, OnEvict, Outdated, TierStats, TierUnavailable
from serving.tiers.codec import Seal, overhead, pack, unpack, unpack_head, unpack_vector
from serving.tiers.labels import labels_of, labels_where

_log = logging.getLogger(__name__)

T = TypeVar("T")

RESIZE_STEP = 500
"""Most evictions of one step of a shrink: Redis serves others in between (a step takes about 1 ms)."""
DELETE_STEP = 500
"""Keys of one step of :meth:`RedisTier.delete_many`."""
SCAN_STEP = 256
RECENT_STEP = 256
_SENDER_BYTES = 8
_NUMBER = struct.Struct("<d")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


_MOST_BACKOFF = 0.5

REJOIN_SECONDS = 3.0
"""So long after Redis has come up every client asks it again, and listens: the breaker's cool-down, and the feed's backoff."""

KEEP_ALIVE = {
    getattr(socket, option): value
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
    if hasattr(socket, option)
}
"""Options of connections: the system's own would find a Redis that is gone without a word after two hours, in which removals that
the feed does not tell would go on answering, and would not keep what is between the two from forgetting a feed that is silent."""


def _whole(value: bytes | None, default: int) -> int:
    """Return a number of Redis as a whole one: Lua writes large ones as ``1e+15``; what is none counts as ``default``."""
    try:
        return int(float(value)) if value else default
    except (ValueError, OverflowError):
        return default


def check_name(what: str, name: str) -> str:
    """Return a name that goes into Redis keys and channel patterns as it is.

    Raises:
        ValueError: If it has other characters than letters, digits, ``_``, ``.``, ``-``, or not 1 to 64 of them.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what}: expected 1 to 64 letters, digits, '_', '.' or '-', got {name!r}")
    return name


class RedisTier:
    """An exact LRU over entries in Redis, shared by every client of the same URL and namespace.

    Each operation is one atomic script and one round trip: O(log n) in the arm's entries, evictions O(log n) each. Touches by
    :meth:`touch_soon` are gathered and sent with this client's next operation, or after ``touch_interval``.

    Failure: a call that is not answered within its deadline, or refused, raises :class:`TierUnavailable`. After ``failures`` of
    those in a row calls fail at once for ``cooldown`` seconds, then one is let through as a probe. Touches under way are lost
    with a failed call. Redis EXPIRE is set on an arm as a whole, never on an entry, so it cannot disturb the byte accounting: an
    arm that nobody uses for ``idle_seconds`` disappears.

    Args:
        url: ``redis://``, ``rediss://`` (with certificates: :func:`serving.redis_url.secured`) or ``unix://``.
        namespace: Separates caches on one Redis.
        read_deadline: Seconds that a read may take.
        write_deadline: Seconds that any other call may take (each step of a shrink).
        failures: Failures in a row that open the circuit breaker.
        cooldown: Seconds that it stays open.
        touch_interval: Seconds after which gathered touches are sent at the latest.
        idle_seconds: Seconds after which an unused arm is garbage.
        max_connections: Connections of this client; a call that finds all of them busy waits, within its deadline, for one.
        sealer: Encrypts answers and metadata before they leave the process; None: they are stored in the clear. What was stored
            with another key, or without one, is a miss.
        clock: A monotonic clock, seconds.

    Raises:
        ValueError: If the URL or the namespace is not well-formed.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        namespace: str = "default",
        *,
        read_deadline: float = 0.05,
        write_deadline: float = 0.5,
        failures: int = 5,
        cooldown: float = 1.0,
        touch_interval: float = 0.05,
        idle_seconds: int = 7 * 86_400,
        max_connections: int = 16,
        sealer: Sealer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_evict: OnEvict | None = None
        self.url = shown(url)
        self.namespace = check_name("redis tier: namespace", namespace)
        self._sealer = sealer
        self._secret = sealer.secret(b"labels") if sealer is not None else b""
        self._read_deadline = read_deadline
        self._write_deadline = write_deadline
        self._touch_interval = touch_interval
        self._idle = idle_seconds
        self._clock = clock
        self._breaker = CircuitBreaker(failures, cooldown)
        self._sender = os.urandom(_SENDER_BYTES)
        # One retry, at once: a connection of the pool may have died with the last server.
        # No socket_timeout: redis-py would send inside asyncio.wait_for, which before Python 3.12 may swallow a cancellation; the
        # deadlines here bound every call instead, and keep-alive finds a dead peer of the feed.
        options: dict[str, Any] = {"socket_timeout": None, "retry": Retry(NoBackoff(), 1)}
        if not url.startswith("unix"):
            options["socket_keepalive"] = True
            options["socket_keepalive_options"] = KEEP_ALIVE
        pool = ConnectionPool.from_url(url, max_connections=max_connections, **options)
        self._turns = asyncio.Semaphore(max_connections)  # redis-py's pool that waits takes 0.1 ms more of a call
        try:
            pool.connection_class(**pool.connection_kwargs)
        except TypeError as error:  # else it would be the first request's
            raise ValueError(f"redis tier: {self.url}: expected options that the package redis knows: {error}") from error
        self._redis = Redis(connection_pool=pool)
        self._feed = Redis.from_url(url, **options)
        register = self._redis.register_script
        self._get = register(scripts.GET)
        self._put = register(scripts.PUT)
        self._touch = register(scripts.TOUCH)
        self._delete = register(scripts.DELETE)
        self._resize = register(scripts.RESIZE)
        self._renew = register(scripts.RENEW)
        self._flush = register(scripts.FLUSH)
        self._outdate = register(scripts.OUTDATE)
        self._renumber = register(scripts.RENUMBER)
        self._heads = register(scripts.HEADS)
        self._recent = register(scripts.RECENT)
        self._names: dict[str, tuple[str, str, str]] = {}
        self._budgets: dict[str, int] = {}
        self._evictions: dict[str, int] = {}
        self._touches: dict[str, dict[bytes, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    # -- Tier ----------------------------------------------------------------------------------------------------------------

    async def get(self, arm: str, key: bytes, *, touch: bool = True) -> Entry | None:
        """Return the entry, expired or not, and make it the most recently used if ``touch``.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        return (await self.get_numbered(arm, key, touch=touch))[0]

    async def put(self, arm: str, entry: Entry) -> int:
        """Store the entry as the most recently used; return how many others were evicted for it.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused; the entry may have been stored all the same.
            ValueError: If the key does not have 32 bytes.
        """
        return (await self.put_numbered(arm, entry))[0]

    def charged(self, entry: Entry) -> Entry:
        """Return the entry with the overhead that it has here: it is charged more where it is sealed."""
        return replace(entry, overhead=overhead(entry, self._seal(""))) if self._sealer is not None else entry

    async def touch(self, arm: str, key: bytes) -> None:
        """Make the entry the most recently used, if it is there.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        self._note_touch(arm, key)
        await self._run(self._touch, arm)

    def touch_soon(self, arm: str, key: bytes) -> None:
        """Like :meth:`touch` without waiting: sent with this client's next call on the arm, or after ``touch_interval``."""
        self._note_touch(arm, key)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._touch_interval, self._send_touches)

    async def renew(self, arm: str, key: bytes, at: float) -> bool:
        """Begin the entry's life anew at ``at``, if it is there; whether it was. O(size of the entry).

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        return bool(await self._run(self._renew, arm, key, at))

    async def heads(self, arm: str, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entries without body and vector; None where there is none, or none that can be read. One round trip.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        if not keys:
            return []
        entries, seal = self._keys(arm)[0], self._seal(arm)
        found = await self._call(lambda: self._heads(keys=[entries], args=keys), self._write_deadline)
        heads = zip(keys, found[::2], found[1::2], strict=True)
        return [None if head is None else unpack_head(key, head, size, seal) for key, head, size in heads]

    async def scan(self, arm: str) -> AsyncIterator[list[Entry]]:
        """Yield the heads of all entries that can be read, in steps of two round trips; one may come twice.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        order = self._keys(arm)[1]
        cursor = 0
        while True:
            cursor, members = await self._call(lambda: self._redis.zscan(order, cursor, count=SCAN_STEP), self._write_deadline)  # noqa: B023
            names: list[Any] = [name for name, _ in members]
            for first in range(0, len(names), SCAN_STEP):
                heads = await self.heads(arm, names[first : first + SCAN_STEP])
                yield [head for head in heads if head is not None]
            if cursor == 0:
                return

    async def delete(self, arm: str, key: bytes) -> bool:
        """Remove the entry; whether it was there.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        return bool(await self._run(self._delete, arm, key))

    async def delete_many(self, arm: str, keys: Sequence[bytes]) -> int:
        """Remove the entries; how many of them were there. A round trip for each :data:`DELETE_STEP`.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused; some may be gone.
        """
        count = 0
        for first in range(0, len(keys), DELETE_STEP):
            count += int(await self._run(self._delete, arm, *keys[first : first + DELETE_STEP]))
        return count

    async def resize(self, arm: str, budget: int) -> int:
        """Set the arm's budget in bytes; return how many entries were evicted.

        A shrink takes steps of :data:`RESIZE_STEP` evictions, and is complete on return. The budget is remembered: should Redis
        lose its data, the next :meth:`put` sets it again.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused; a shrink may be half done, never inconsistent.
            ValueError: If the budget is negative.
        """
        if budget < 0:
            raise ValueError(f"redis tier, arm {arm!r}: expected a budget >= 0 bytes, got {budget!r}")
        self._budgets[arm] = budget
        evicted = 0
        more = 1
        while more:
            more, gone = await self._run(self._resize, arm, budget, RESIZE_STEP)
            evicted += self._dropped(arm, gone)
        return evicted

    async def flush(self, arm: str) -> int:
        """Remove every entry of the arm; how many there were.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        return int(await self._run(self._flush, arm))

    async def outdate(self, arm: str, where: Mapping[str, str], *, told: bool = True) -> None:
        """Begin a flush: refuse from now on what was asked for before and is covered by it. It counts as a removal.

        Args:
            arm: The arm.
            where: What the flush chooses by (:func:`serving.tiers.labels.labels_where`).
            told: Whether other clients are told that what they have under way in the arm is outdated.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        await self._run(self._outdate, arm, labels_where(where, self._secret), int(told))

    async def stats(self, arm: str) -> TierStats:
        """Return what the arm holds for all clients together; the evictions are those that this client's calls made.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        entries, _, state = self._keys(arm)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hlen(entries)
            pipe.hmget(state, ["bytes", "budget"])
            count, (used, budget) = await self._call(pipe.execute, self._write_deadline)
        known = self._budgets.get(arm, 0)
        return TierStats(count, _whole(used, 0), _whole(budget, known), self._evictions.get(arm, 0))

    async def close(self) -> None:
        """Send the last touches and close the connections; a Redis that is away is not waited for."""
        if self._timer is not None:
            self._send_touches()
        await asyncio.gather(*self._sending)
        await self._feed.aclose()
        await self._redis.aclose()

    # -- SharedTier ----------------------------------------------------------------------------------------------------------

    async def removals(self, arm: str) -> int:
        """Return the number of the arm's last removal; 0: Redis knows nothing of the arm.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        state = self._keys(arm)[2]
        found: Any = await self._call(lambda: self._redis.hget(state, "removals"), self._write_deadline)
        return _whole(found, 0)

    async def renumber(self, arm: str) -> None:
        """Number the arm's removals on from the time, microseconds: more than all numbers so far.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        await self._run(self._renumber, arm)

    async def get_numbered(self, arm: str, key: bytes, *, touch: bool = True) -> tuple[Entry | None, int]:
        """:meth:`get`, and the number of the arm's last removal at that moment.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        if touch:
            stored, removals = await self._run(self._get, arm, key, deadline=self._read_deadline)
        else:
            entries, _, state = self._keys(arm)
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hget(entries, key)
                pipe.hget(state, "removals")
                stored, removals = await self._call(pipe.execute, self._read_deadline)
        return unpack(key, stored, self._seal(arm)) if stored is not None else None, int(removals or 0)

    async def put_numbered(self, arm: str, entry: Entry, *, since: int | None = None) -> tuple[int, int]:
        """:meth:`serving.tiers.base.SharedTier.put_numbered`.

        Raises:
            Outdated: If a flush later than ``since`` covers the entry, or may.
            TierUnavailable: If Redis did not answer in time or refused; the entry may have been stored all the same.
            ValueError: If the key does not have 32 bytes.
        """
        announcement = bytes([len(entry.context)]) + entry.context + entry.vector if entry.vector else b"\0"
        stored = pack(entry, self._seal(arm))
        labels = b"" if since is None else labels_of(entry, self._secret)
        gone, removals, refused = await self._run(
            self._put, arm, entry.key, stored, self._budgets.get(arm, 0), announcement, labels, "" if since is None else since
        )
        if refused:
            raise Outdated(f"arm {arm!r}: an answer was asked for before a flush that covers it, and is not stored")
        return self._dropped(arm, gone), int(removals)

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Yield what clients did, this one included.

        Reconnects with a backoff of 0.05 to 0.5 s; each (re)connection first yields a gap.
        """
        prefix = f"cachepilot:{{{self.namespace}:"
        backoff, lost = 0.05, False
        while True:
            try:
                async with self._feed.pubsub() as feed:
                    await feed.psubscribe(f"{prefix}*}}:changes")
                    async for message in feed.listen():
                        backoff, lost = 0.05, False
                        change = self._parse(message, prefix)
                        if change is not None:
                            yield change
            except (RedisError, OSError, TimeoutError) as error:
                if not lost:
                    _log.info("change feed of %s interrupted, next try in %.2g s: %s", self.url, backoff, error)
                    lost = True
                    yield Change("lost")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MOST_BACKOFF)

    async def until_all_listen(self) -> None:
        """:meth:`serving.tiers.base.SharedTier.until_all_listen`, by Redis' uptime; not where it does not tell that."""
        with suppress(TierUnavailable):
            told: Any = await self._call(lambda: self._redis.info("server"), self._write_deadline)
            await asyncio.sleep(max(0.0, REJOIN_SECONDS - float(told.get("uptime_in_seconds", REJOIN_SECONDS))))

    async def recent_vectors(self, arm: str, limit: int) -> list[tuple[bytes, bytes, bytes]]:
        """Return (key, context, vector) of those of the ``limit`` most recently used entries that have a vector, newest first.

        Raises:
            TierUnavailable: If Redis did not answer in time or refused.
        """
        entries, order, _ = self._keys(arm)
        result: list[tuple[bytes, bytes, bytes]] = []
        for first in range(0, limit, RECENT_STEP):
            last = min(first + RECENT_STEP, limit) - 1
            found = await self._call(lambda: self._recent(keys=[entries, order], args=[first, last]), self._write_deadline)  # noqa: B023
            for key, stored in zip(found[::2], found[1::2], strict=True):
                searched = unpack_vector(stored)
                if searched is not None and searched[1]:
                    result.append((key, *searched))
            if len(found) < 2 * (last - first + 1):
                break
        return result

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _keys(self, arm: str) -> tuple[str, str, str]:
        keys = self._names.get(arm)
        if keys is None:
            base = f"cachepilot:{{{self.namespace}:{check_name('redis tier: arm', arm)}}}"
            keys = self._names[arm] = (f"{base}:entries", f"{base}:order", f"{base}:state")
        return keys

    def _seal(self, arm: str) -> Seal | None:
        return Seal.of(self._sealer, self.namespace, arm)

    async def _run(self, script: Any, arm: str, *args: bytes | int | float | str, deadline: float | None = None) -> Any:
        """Run a script on the arm, touches first."""
        touched = self._touches.pop(arm, {})
        channel = f"cachepilot:{{{self.namespace}:{arm}}}:changes"
        argv = [self._idle, self._sender, channel, len(touched), *touched, *args]
        keys = self._keys(arm)
        return await self._call(lambda: script(keys=keys, args=argv), deadline or self._write_deadline)

    async def _call(self, call: Callable[[], Awaitable[T]], deadline: float) -> T:
        if not self._breaker.allow(self._clock()):
            raise TierUnavailable(f"redis tier: {self.url} failed several times in a row and is not asked for a moment")
        try:
            async with asyncio.timeout(deadline), self._turns:
                result = await call()
        except ResponseError as error:
            self._breaker.succeeded()  # it is alive
            raise TierUnavailable(f"redis tier: {self.url} refused: {error}") from error
        except (RedisError, OSError, TimeoutError) as error:
            self._breaker.failed(self._clock())
            reason = f"{type(error).__name__} {error}".strip()
            raise TierUnavailable(f"redis tier: no answer from {self.url} within {deadline:g} s: {reason}") from error
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        return result

    def _dropped(self, arm: str, keys: Sequence[bytes]) -> int:
        if keys:
            self._evictions[arm] = self._evictions.get(arm, 0) + len(keys)
            if self.on_evict is not None:
                self.on_evict(arm, keys)
        return len(keys)

    def _note_touch(self, arm: str, key: bytes) -> None:
        touched = self._touches.setdefault(arm, {})
        touched.pop(key, None)
        touched[key] = None  # the last touch counts: a dict keeps the order of insertion

    def _send_touches(self) -> None:
        self._timer = None
        for arm in [arm for arm, touched in self._touches.items() if touched]:
            task = asyncio.get_running_loop().create_task(self._send_touches_of(arm))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send_touches_of(self, arm: str) -> None:
        try:
            await self._run(self._touch, arm)
        except TierUnavailable as error:
            _log.debug("touches lost: %s", error)

    def _parse(self, message: dict[str, Any], prefix: str) -> Change | None:
        if message["type"] == "psubscribe":
            return Change("gap")
        data = message["data"]
        if message["type"] != "pmessage" or len(data) <= _SENDER_BYTES:
            return None
        arm = message["channel"].decode()[len(prefix) : -len("}:changes")]
        own, kind = data.startswith(self._sender), data[_SENDER_BYTES : _SENDER_BYTES + 1]
        if kind == b"O":
            return Change("outdated", arm, own=own)
        payload = data[_SENDER_BYTES + 1 + _NUMBER.size :]
        if len(data) < _SENDER_BYTES + 1 + _NUMBER.size:
            return Change("gap")  # of another version of this program: what it did is not known
        (number,) = _NUMBER.unpack_from(data, _SENDER_BYTES + 1)
        if not 0 <= number < 2**53:
            return Change("gap")
        removal = int(number)
        if kind == b"F":
            return Change("flush", arm, removal=removal, own=own)
        if kind == b"E":
            keys = tuple(payload[i : i + KEY_BYTES] for i in range(0, len(payload), KEY_BYTES))
            return Change("evict", arm, keys, removal=removal, own=own)
        announced = KEY_BYTES + _NUMBER.size
        if kind == b"P" and len(payload) > announced:
            (written_at,) = _NUMBER.unpack_from(payload, KEY_BYTES)
            end = announced + 1 + payload[announced]
            context, vector = payload[announced + 1 : end], payload[end:]
            return Change("put", arm, (payload[:KEY_BYTES],), context, vector, written_at, removal, own)
        return None
