"""Warm-up: keeps the share ``warmup_ratio`` of the hot set live, at the cost of upstream tokens and of no user's time.

Every ``period`` the plan of :mod:`serving.hotset` is walked in order; a planned key that is not live, or has less than
``refresh_ahead`` of its TTL left, is refreshed while the token bucket has tokens. With several replicas the bucket is divided
among them, and a lease per key in Redis keeps two of them from refreshing the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from serving.cache import TieredCache
from serving.ending import end
from serving.hotset import HotSet, WarmupRules
from serving.keys import Fingerprint

_log = logging.getLogger(__name__)

MAX_REMEMBERED_BODY = 1 << 18
"""Longer requests are not kept for refreshing, bytes."""

MAX_REMEMBERED_BYTES = 32 << 20
"""All bodies kept for refreshing, bytes per arm."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A request as it is sent again.

    Attributes:
        fingerprint: Its identity.
        body: Its body.
        headers: The headers to send upstream; no client's credentials.
        call: All that the one who sends it needs besides; the warmer does not look at it.
    """

    fingerprint: Fingerprint
    body: bytes
    headers: Mapping[str, str]
    call: object = None


class TokenBucket:
    """Allows ``rate`` per second on average and ``burst`` at once; pure but for its own state.

    Args:
        rate: Tokens per second, >= 0.
        burst: Size, full at first.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens = burst
        self._at: float | None = None

    def available(self, now: float) -> bool:
        """Whether there is a token at ``now`` (seconds, not before the last call's)."""
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now
        # Refilling in many small steps must not fall short of a whole token by rounding.
        return self._tokens >= 1.0 - 1e-9

    def take(self) -> None:
        """Take a token that :meth:`available` has granted."""
        self._tokens -= 1.0


class Leases(Protocol):
    """Grants one replica at a time the right to refresh a key."""

    async def acquire(self, arm: str, key: bytes) -> bool:
        """Whether the key is ours to refresh now."""
        ...

    async def release(self, arm: str, key: bytes) -> None:
        """Let others refresh the key again."""
        ...

    async def close(self) -> None:
        """Release the connection."""
        ...


class NoLeases:
    """For one replica, which competes with nobody."""

    async def acquire(self, arm: str, key: bytes) -> bool:
        """Whether the key is ours to refresh now: always."""
        return True

    async def release(self, arm: str, key: bytes) -> None:
        """Nothing to let go."""

    async def close(self) -> None:
        """Nothing to release."""


class RedisLeases:
    """Leases by ``SET NX PX``; one that is not released lapses by itself.

    Args:
        url: Redis.
        namespace: Separates gateways that share it.
        replica: Name of this replica.
        seconds: How long a refresh may take.
    """

    def __init__(self, url: str, namespace: str, replica: str, *, seconds: float = 60.0) -> None:
        self._redis: Redis = Redis.from_url(url)
        self._namespace, self._replica, self._milliseconds = namespace, replica, int(seconds * 1000)

    def _name(self, arm: str, key: bytes) -> str:
        return f"cachepilot:{{{self._namespace}:{arm}}}:refresh:{key.hex()}"

    async def acquire(self, arm: str, key: bytes) -> bool:
        """Whether the key is ours to refresh now; no where Redis cannot be asked, since the answer could not be stored either."""
        try:
            async with asyncio.timeout(0.5):
                return bool(await self._redis.set(self._name(arm, key), self._replica, nx=True, px=self._milliseconds))
        except (RedisError, OSError, TimeoutError):
            return False

    async def release(self, arm: str, key: bytes) -> None:
        """Let others refresh the key again."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(0.5):
                await self._redis.delete(self._name(arm, key))

    async def close(self) -> None:
        """Release the connection."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()


class Warmer:
    """The hot set of one arm and its refreshing.

    Args:
        arm: The arm.
        cache: Where liveness is asked; it also has the arm's knobs.
        rules: Settings of the algorithm.
        refresh: Asks the upstream and stores the answer; never raises for what the upstream does.
        leases: Keeps replicas apart.
        replicas: Replicas that share the budget of refreshes.
        max_inflight: Refreshes under way at the same time.
        max_bytes: Bytes of request bodies that are remembered.
    """

    def __init__(
        self,
        arm: str,
        cache: TieredCache,
        rules: WarmupRules,
        refresh: Callable[[str, Remembered], Awaitable[object]],
        *,
        leases: Leases | None = None,
        replicas: int = 1,
        max_inflight: int = 4,
        max_bytes: int = MAX_REMEMBERED_BYTES,
    ) -> None:
        self.hot: HotSet[int] = HotSet(rules)
        self._now = 0.0
        self._arm, self._cache, self._rules, self._refresh = arm, cache, rules, refresh
        self._leases: Leases = leases or NoLeases()
        self._bucket = TokenBucket(rules.refreshes_per_second / replicas, max(1.0, rules.burst / replicas))
        self._requests: dict[int, Remembered] = {}
        self._bytes = 0
        self._max_inflight, self._max_bytes = max_inflight, max_bytes
        self._running: dict[int, asyncio.Task[None]] = {}

    def remember(self, key: int, request: Remembered) -> None:
        """Keep a request, so that it can be sent again should its key become hot. O(1) amortised."""
        size = len(request.body)
        if key in self._requests or size > min(MAX_REMEMBERED_BODY, self._max_bytes):
            return
        if self._bytes + size > self._max_bytes:
            self._forget_coldest(size)
        self._requests[key] = request
        self._bytes += size
        if len(self._requests) > 4 * self._rules.capacity:
            # Those that the hot set has forgotten go, but for the newest: they have not been counted yet.
            newest = list(self._requests)[-self._rules.capacity :]
            keep = [key for key in self._requests if self.hot.score(key, self._now) > 0] + newest
            self._requests = {key: self._requests[key] for key in dict.fromkeys(keep)}
            self._bytes = sum(len(kept.body) for kept in self._requests.values())

    def knows(self, key: int) -> bool:
        """Whether the request of a key is kept already."""
        return key in self._requests

    def access(self, key: int, now: float) -> None:
        """Count one access; ``now`` in seconds, not before that of the last."""
        self._now = now
        self.hot.access(key, now)

    async def tick(self, now: float) -> int:
        """Walk the plan once and start the refreshes that are due; returns how many were started.

        Args:
            now: The clock, seconds.
        """
        ratio = self._cache.knobs(self._arm).warmup_ratio
        plan = [(key, self._requests[key]) for key in self.hot.plan(ratio, now) if key in self._requests]
        if not plan or not self._bucket.available(now) or len(self._running) >= self._max_inflight:
            return 0
        keys = [request.fingerprint.key for _, request in plan]
        live = await self._cache.are_live(self._arm, keys, now=now, ahead=self._rules.refresh_ahead)
        started = 0
        for (key, request), alive in zip(plan, live, strict=True):
            if alive or key in self._running:
                continue
            if len(self._running) >= self._max_inflight or not self._bucket.available(now):
                break
            if not await self._leases.acquire(self._arm, request.fingerprint.key):
                continue
            # Another replica may have refreshed it between our look and our lease.
            if await self._cache.is_live(self._arm, request.fingerprint.key, now=now, ahead=self._rules.refresh_ahead):
                await self._leases.release(self._arm, request.fingerprint.key)
                continue
            self._bucket.take()
            self._running[key] = asyncio.create_task(self._run(key, request), name=f"refresh-{self._arm}")
            started += 1
        return started

    async def drain(self) -> None:
        """Wait for the refreshes that are under way."""
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def close(self) -> None:
        """Give up the refreshes that are under way."""
        await end(self._running.values())

    def _forget_coldest(self, size: int) -> None:
        """Make room for ``size`` bytes: the coldest requests go, of equally cold ones the oldest."""
        # A quarter of the budget at a time: sorting for every request that comes would not be O(1) amortised.
        room = self._max_bytes - max(size, self._max_bytes // 4)
        for key in sorted(self._requests, key=lambda key: self.hot.score(key, self._now)):
            if self._bytes <= room:
                break
            self._bytes -= len(self._requests.pop(key).body)

    async def _run(self, key: int, request: Remembered) -> None:
        try:
            await self._refresh(self._arm, request)
        except Exception:  # noqa: BLE001 - one failed refresh must not end the loop; it is logged
            _log.exception("a refresh of arm %s failed", self._arm)
        finally:
            self._running.pop(key, None)
            await self._leases.release(self._arm, request.fingerprint.key)
