"""Warm-up over the real cache: what is refreshed, in which order, how often, by whom."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.cache import TieredCache
from serving.hotset import WarmupRules
from serving.keys import Fingerprint, key64
from serving.knobs import Knobs
from serving.policy import CacheRules
from serving.tiers.base import Entry
from serving.tiers.memory import MemoryTier
from serving.tiers.redis import RedisTier
from serving.warmup import RedisLeases, Remembered, TokenBucket, Warmer
from tests.waiting import until

ARM = "control"


class Arm:
    """One arm with a cache, a clock, and an upstream that writes what it is asked for."""

    def __init__(self, warmup: WarmupRules, cache: TieredCache | None = None, **arguments: object) -> None:
        self.cache = cache or TieredCache(memory=MemoryTier(), store=None, vectors=None, rules=CacheRules(ttl_jitter=0.0))
        self.now = 1000.0
        self.refreshed: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.warmer = Warmer(ARM, self.cache, warmup, self._refresh, **arguments)  # type: ignore[arg-type]

    async def set(self, warmup_ratio: float, *, ttl: float = 100.0) -> None:
        await self.cache.apply({ARM: Knobs(1 << 20, ttl, warmup_ratio)})

    def ask(self, name: str, times: int = 1) -> None:
        request = _request(name)
        for _ in range(times):
            self.warmer.access(key64(request.fingerprint.key), self.now)
        self.warmer.remember(key64(request.fingerprint.key), request)

    async def tick(self, seconds: float = 0.0) -> list[str]:
        """Let time pass, walk once, and return what was refreshed."""
        self.now += seconds
        before = len(self.refreshed)
        await self.warmer.tick(self.now)
        await self.warmer.drain()
        return self.refreshed[before:]

    async def _refresh(self, arm: str, request: Remembered) -> None:
        self.refreshed.append(request.body.decode())
        await self.gate.wait()
        await self.cache.put(arm, Entry(request.fingerprint.key, b"answer", self.now), now=self.now)


def _request(name: str) -> Remembered:
    return Remembered(Fingerprint(hashlib.sha256(name.encode()).digest(), b"", name), name.encode(), {})


def _key(name: str) -> int:
    return key64(_request(name).fingerprint.key)


async def test_the_hottest_share_is_refreshed_the_hottest_first() -> None:
    arm = Arm(WarmupRules(), max_inflight=10)
    await arm.set(0.5)
    for name, times in (("a", 2), ("b", 5), ("c", 3), ("d", 4), ("cold", 1)):
        arm.ask(name, times)
    assert await arm.tick() == ["b", "d"]
    assert await arm.tick(1.0) == []


async def test_nothing_is_refreshed_at_ratio_zero() -> None:
    arm = Arm(WarmupRules())
    await arm.set(0.0)
    arm.ask("a", 10)
    assert await arm.tick() == []


async def test_an_entry_is_refreshed_ahead_of_its_end_and_not_before() -> None:
    arm = Arm(WarmupRules(refresh_ahead=0.2))
    await arm.set(1.0, ttl=100.0)
    arm.ask("a", 50)
    assert await arm.tick() == ["a"]
    assert await arm.tick(79.0) == []
    assert await arm.tick(2.0) == ["a"]


async def test_refreshes_keep_to_their_budget() -> None:
    arm = Arm(WarmupRules(refreshes_per_second=2.0, burst=3), max_inflight=100)
    await arm.set(1.0)
    for number in range(20):
        arm.ask(f"q{number}", 5)
    assert len(await arm.tick()) == 3
    assert len(await arm.tick(1.0)) == 2
    assert len(await arm.tick(0.5)) == 1


async def test_no_more_run_at_once_than_allowed() -> None:
    arm = Arm(WarmupRules(), max_inflight=2)
    await arm.set(1.0)
    for number in range(6):
        arm.ask(f"q{number}", 5)
    arm.gate.clear()
    assert await arm.warmer.tick(arm.now) == 2
    assert await arm.warmer.tick(arm.now) == 0
    arm.gate.set()
    await arm.warmer.drain()
    assert len(await arm.tick()) == 2


async def test_remembered_bodies_keep_to_their_bytes_and_the_coldest_go_first() -> None:
    arm = Arm(WarmupRules(), max_bytes=40)
    for number in range(4):
        arm.ask(f"request {number}", 3 if number == 0 else 2 if number == 3 else 1)  # 9 bytes each
    arm.ask("request 4")
    arm.ask("x" * 41)
    known = [name for name in (*(f"request {number}" for number in range(5)), "x" * 41) if arm.warmer.knows(_key(name))]
    # Of the two that are coldest the older one goes; a body that would not fit at all is not kept.
    assert known == ["request 0", "request 2", "request 3", "request 4"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=80))
def test_no_sequence_of_requests_is_remembered_beyond_the_bytes(asked: list[tuple[int, int]]) -> None:
    arm = Arm(WarmupRules(capacity=3), max_bytes=60)
    for number, times in asked:
        arm.ask("b" * number + "!", times)
        assert arm.warmer.knows(_key("b" * number + "!"))
        held = sum(length + 1 for length in range(31) if arm.warmer.knows(_key("b" * length + "!")))
        assert held <= 60


async def test_a_key_whose_request_is_not_known_here_is_left_to_others() -> None:
    arm = Arm(WarmupRules())
    await arm.set(1.0)
    arm.warmer.access(key64(_request("elsewhere").fingerprint.key), arm.now)
    arm.warmer.access(key64(_request("elsewhere").fingerprint.key), arm.now)
    arm.ask("here", 2)
    assert await arm.tick() == ["here"]


async def test_remembered_requests_are_bounded_and_the_hot_ones_stay() -> None:
    arm = Arm(WarmupRules(capacity=8))
    await arm.set(1.0)
    arm.ask("hot", 100)
    for number in range(200):
        arm.ask(f"q{number}")
    assert len(arm.warmer._requests) <= 4 * 8
    assert arm.warmer.knows(key64(_request("hot").fingerprint.key))


async def test_a_refresh_that_fails_does_not_end_the_warming() -> None:
    class Failing(Arm):
        async def _refresh(self, arm: str, request: Remembered) -> None:
            self.refreshed.append(request.body.decode())
            raise ConnectionError("the upstream is away")

    arm = Failing(WarmupRules())
    await arm.set(1.0)
    arm.ask("a", 5)
    assert await arm.tick() == ["a"]
    assert await arm.tick(1.0) == ["a"]


async def test_two_replicas_never_refresh_the_same_key_twice(redis_url: str, namespace: str) -> None:
    def replica(name: str) -> Arm:
        cache = TieredCache(
            memory=MemoryTier(),
            store=RedisTier(redis_url, namespace, read_deadline=10.0, write_deadline=10.0),
            vectors=None,
            rules=CacheRules(ttl_jitter=0.0),
            memories=2,
        )
        leases = RedisLeases(redis_url, namespace, name)
        return Arm(WarmupRules(burst=200), cache, leases=leases, replicas=2, max_inflight=100)

    one, other = replica("a"), replica("b")
    for arm in (one, other):
        await arm.set(1.0)
        for number in range(30):
            arm.ask(f"q{number}", 5)

    async def done() -> bool:
        await asyncio.gather(one.tick(), other.tick())
        return len(set(one.refreshed + other.refreshed)) == 30

    await until(done, "every key to be refreshed")
    assert len(one.refreshed + other.refreshed) == 30
    for arm in (one, other):
        await arm.warmer.close()
        await arm.cache.close()


@given(
    st.floats(0, 100),
    st.integers(1, 50),
    st.lists(st.floats(0, 10, allow_nan=False), min_size=1, max_size=60),
)
def test_a_token_bucket_never_gives_more_than_burst_and_rate_allow(rate: float, burst: int, gaps: list[float]) -> None:
    bucket, now, taken = TokenBucket(rate, burst), 0.0, 0
    for gap in gaps:
        now += gap
        while bucket.available(now) and taken < 10_000:
            bucket.take()
            taken += 1
        assert taken <= burst + rate * now + 1e-6


def test_a_token_bucket_gives_a_whole_token_after_many_small_steps() -> None:
    bucket = TokenBucket(1.0, 1.0)
    assert bucket.available(0.0)
    bucket.take()
    given = [bucket.available(step / 10) for step in range(1, 11)]
    assert given == [False] * 9 + [True]


@pytest.mark.parametrize("size", [1 << 18, (1 << 18) + 1])
async def test_requests_too_long_to_keep_are_not_kept(size: int) -> None:
    arm = Arm(WarmupRules())
    request = Remembered(Fingerprint(b"k" * 32, b"", ""), b"x" * size, {})
    arm.warmer.remember(1, request)
    assert arm.warmer.knows(1) == (size <= 1 << 18)
