"""Every replica's accesses, told to all: so that a ghost or a hot set sees the traffic of the cluster, not one replica's share.

A replica that saw a random half of the requests would take each key's first request twice for new, and every reuse for twice as
late. So replicas publish what they answered (names of keys, sizes, times; no text) over Redis once per tick, and each applies the
same merged stream. One of them at a time, the leader, exports what its ghost says. With Redis away each replica goes on with its
own accesses, and exports those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from redis.asyncio import Redis
from redis.exceptions import RedisError

from serving.ending import end

_log = logging.getLogger(__name__)

ACCESS = np.dtype([("arm", "<u2"), ("key", "<u8"), ("size", "<i8"), ("time", "<f8")])
"""One access: index of the arm, the entry's 64-bit name, its bytes, when it was answered (seconds since the epoch)."""

Accesses = npt.NDArray[np.void]

LEASE_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_DEADLINE = 0.5

# KEYS: lease. ARGV: replica, milliseconds -> 1 if it is (still, or from now on) ours.
_LEAD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""


class AccessFeed(Protocol):
    """Collects this replica's accesses and gives back the cluster's."""

    leading: bool
    """Whether this replica exports what is learnt from the feed."""

    def add(self, arm: int, key: int, size: int, time: float) -> None:
        """Note one access."""
        ...

    async def open(self) -> None:
        """Begin to listen; what others tell from now on is not missed."""
        ...

    async def exchange(self) -> Accesses:
        """Return the accesses to apply now, in order of time."""
        ...

    async def close(self) -> None:
        """Release the connection."""
        ...


class _Pending:
    """Rows not yet exchanged."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, float]] = []

    def add(self, arm: int, key: int, size: int, time: float) -> None:
        self._rows.append((arm, key, size, time))

    def take(self) -> Accesses:
        rows, self._rows = self._rows, []
        return np.array(rows, dtype=ACCESS)


class LocalFeed:
    """The feed of a gateway with one replica: what it answered is all there is."""

    leading = True

    def __init__(self) -> None:
        self._pending = _Pending()
        self.add = self._pending.add

    async def open(self) -> None:
        """Nothing to listen to."""

    async def exchange(self) -> Accesses:
        """Return the accesses to apply now, in order of time."""
        return merge([self._pending.take()])

    async def close(self) -> None:
        """Nothing to release."""


class RedisFeed:
    """The feed of several replicas that share a Redis.

    Args:
        url: Redis.
        namespace: Separates gateways that share it.
        replica: Name of this replica, unique in the namespace.
    """

    def __init__(self, url: str, namespace: str, replica: str) -> None:
        self.leading = False
        self._pending = _Pending()
        self.add = self._pending.add
        self._replica = replica.encode()
        self._channel = f"cachepilot:{{{namespace}}}:accesses"
        self._lease = f"cachepilot:{{{namespace}}}:leader"
        self._redis: Redis = Redis.from_url(url)
        self._lead = self._redis.register_script(_LEAD)
        self._received: list[Accesses] = []
        self._subscribed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Subscribe; does not wait long for a Redis that is away, the subscription is made when it is back."""
        self._task = asyncio.create_task(self._listen(), name="access-feed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEADLINE):
                await self._subscribed.wait()

    async def exchange(self) -> Accesses:
        """Publish this replica's accesses, renew the lease, and return all that has come in, in order of time."""
        own = self._pending.take()
        try:
            async with asyncio.timeout(_DEADLINE):
                if len(own):
                    await self._redis.publish(self._channel, self._replica + b"\0" + own.tobytes())
                lease = self._lead(keys=[self._lease], args=[self._replica, int(LEASE_SECONDS * 1000)])
                self.leading = bool(await lease)
        except (RedisError, OSError, TimeoutError) as error:
            if not self.leading:
                _log.warning("access feed: Redis is away, this replica exports what it sees alone: %s", error)
            self.leading = True
        received, self._received = self._received, []
        return merge([own, *received])

    async def close(self) -> None:
        """Give up the lease and release the connection."""
        if self._task is not None:
            await end([self._task])
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_DEADLINE):
                if self.leading and await self._redis.get(self._lease) == self._replica:
                    await self._redis.delete(self._lease)
        await _quietly(self._redis.aclose())

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(self._channel)
                    async for message in channel.listen():
                        if message["type"] == "message":
                            self._take_in(message["data"])
                        else:
                            self._subscribed.set()
            except (RedisError, OSError) as error:
                _log.info("access feed: subscription lost, subscribing again: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _take_in(self, data: bytes) -> None:
        sender, _, rows = data.partition(b"\0")
        if sender != self._replica and len(rows) % ACCESS.itemsize == 0:
            self._received.append(np.frombuffer(rows, dtype=ACCESS))


def merge(parts: Sequence[Accesses]) -> Accesses:
    """Return the accesses of all parts in order of time."""
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=ACCESS)
    return joined[np.argsort(joined["time"], kind="stable")]


async def _quietly(closing: Awaitable[object]) -> None:
    with contextlib.suppress(RedisError, OSError):
        await closing
