"""One suite for every tier: each must behave as one cache bounded by bytes, whatever holds it and however many clients it has.

The order of eviction is exactly LRU's, but for the arena's: that is CLOCK's.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.crypto import Sealer
from serving.redis_server import RedisServer
from serving.tiers.arena import ArenaTier
from serving.tiers.base import KEY_BYTES, Entry, EntryMeta, Tier
from serving.tiers.memory import MemoryTier
from serving.tiers.redis import RedisTier

_numbers = itertools.count()


@asynccontextmanager
async def opened(kind: str, url: str) -> AsyncIterator[Callable[[], Tier]]:
    """Gives a function that opens one more client of one and the same tier; a memory tier is its own only client."""
    tiers: list[Tier] = []
    memory = MemoryTier()
    namespace = f"tiers-{os.getpid()}-{next(_numbers)}"
    sealer = Sealer(bytes(range(32))) if "sealed" in kind else None
    folder = tempfile.TemporaryDirectory()

    def client() -> Tier:
        tier: Tier
        if kind == "memory":
            tier = memory
        elif "arena" in kind:
            tier = ArenaTier(Path(folder.name) / "arena", 4 << 20, namespace=namespace, sealer=sealer)
        else:
            tier = RedisTier(url, namespace, read_deadline=5, write_deadline=5, sealer=sealer)
        tiers.append(tier)
        return tier

    try:
        yield client
    finally:
        for tier in tiers:
            await tier.close()
        folder.cleanup()


@pytest.fixture(params=["memory", "arena", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def tier(kind: str, redis_server: RedisServer) -> AsyncIterator[Tier]:
    async with opened(kind, redis_server.url) as client:
        yield client()


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def entry(number: int, size: int = 100, written_at: float = 0.0) -> Entry:
    """An entry that is charged ``size`` bytes."""
    return Entry(key(number), bytes([number % 256]) * (size - KEY_BYTES), written_at, 3, 5)


async def held(tier: Tier, arm: str, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if await tier.get(arm, key(number), touch=False) is not None]


async def test_it_is_a_tier(tier: Tier) -> None:
    assert isinstance(tier, Tier)


async def test_an_entry_comes_back_as_it_was_put(tier: Tier) -> None:
    whole = Entry(key(1), b"\x00body\xff", 1234.5, 7, 9, b"c" * 32, bytes(range(256)) + bytes(128))
    await tier.resize("a", 10_000)
    await tier.put("a", whole)
    assert await tier.get("a", key(1)) == whole
    assert (await tier.stats("a")).bytes == whole.size


async def test_an_arm_without_a_budget_holds_nothing(tier: Tier) -> None:
    assert await tier.put("a", entry(1)) == 0
    assert await tier.get("a", key(1)) is None
    stats = await tier.stats("a")
    assert (stats.entries, stats.bytes, stats.budget) == (0, 0, 0)


async def test_the_least_recently_used_goes_first(tier: Tier) -> None:
    await tier.resize("a", 300)
    for number in (1, 2, 3):
        await tier.put("a", entry(number))
    await tier.get("a", key(1))
    await tier.touch("a", key(2))
    await tier.get("a", key(3), touch=False)
    assert await tier.put("a", entry(4)) == 1
    assert await held(tier, "a", (1, 2, 3, 4)) == [1, 2, 4]


async def test_a_touch_that_does_not_wait_counts_before_the_next_eviction(tier: Tier) -> None:
    await tier.resize("a", 300)
    for number in (1, 2, 3):
        await tier.put("a", entry(number))
    for number in (2, 1, 2):
        tier.touch_soon("a", key(number))
    assert await tier.put("a", entry(4)) == 1
    assert await held(tier, "a", (1, 2, 3, 4)) == [1, 2, 4]
    assert await tier.put("a", entry(5)) == 1
    assert await held(tier, "a", (1, 2, 4, 5)) == [2, 4, 5]
    tier.touch_soon("a", key(2))
    assert await tier.resize("a", 100) == 2
    assert await held(tier, "a", (2, 4, 5)) == [2]


async def test_touching_what_is_not_there_stores_nothing(tier: Tier) -> None:
    await tier.resize("a", 300)
    await tier.touch("a", key(1))
    tier.touch_soon("a", key(2))
    await tier.put("a", entry(3))
    stats = await tier.stats("a")
    assert (stats.entries, stats.bytes) == (1, 100)


async def test_overwriting_a_key_at_capacity_evicts_nobody_else(tier: Tier) -> None:
    await tier.resize("a", 300)
    for number in (1, 2, 3):
        await tier.put("a", entry(number))
    assert await tier.put("a", entry(1, written_at=5.0)) == 0
    assert await held(tier, "a", (1, 2, 3)) == [1, 2, 3]
    assert await tier.put("a", entry(2, size=50)) == 0
    assert (await tier.stats("a")).bytes == 250
    assert await tier.put("a", entry(2, size=101)) == 1, "only as many as the growth needs"
    assert await held(tier, "a", (1, 2, 3)) == [1, 2]
    assert (await tier.stats("a")).bytes == 201


async def test_an_entry_larger_than_the_budget_is_not_stored_and_its_older_self_is_gone(tier: Tier) -> None:
    await tier.resize("a", 300)
    for number in (1, 2):
        await tier.put("a", entry(number))
    assert await tier.put("a", entry(1, size=301)) == 0
    assert await held(tier, "a", (1, 2)) == [2]
    assert (await tier.stats("a")).bytes == 100
    assert await tier.put("a", entry(3, size=300)) == 1, "one that just fits takes it all"
    assert await held(tier, "a", (1, 2, 3)) == [3]


async def test_shrinking_evicts_at_once_oldest_first_and_growing_drops_nothing(tier: Tier) -> None:
    await tier.resize("a", 1000)
    for number in range(10):
        await tier.put("a", entry(number))
    assert await tier.resize("a", 399) == 7
    assert await held(tier, "a", range(10)) == [7, 8, 9]
    assert await tier.resize("a", 5000) == 0
    assert await held(tier, "a", range(10)) == [7, 8, 9]
    stats = await tier.stats("a")
    assert (stats.entries, stats.bytes, stats.budget, stats.evictions) == (3, 300, 5000, 7)
    assert await tier.resize("a", 0) == 3
    assert (await tier.stats("a")).bytes == 0


async def test_a_long_shrink_is_complete_on_return(tier: Tier) -> None:
    await tier.resize("a", 1_000_000)
    for number in range(1300):
        await tier.put("a", entry(number, size=64))
    gone: list[bytes] = []
    tier.on_evict = lambda arm, keys: gone.extend(keys)
    assert await tier.resize("a", 10 * 64) == 1290
    assert gone == [key(number) for number in range(1290)]
    assert await held(tier, "a", range(1280, 1300)) == list(range(1290, 1300))
    assert (await tier.stats("a")).bytes == 640


async def test_a_negative_budget_is_refused(tier: Tier) -> None:
    with pytest.raises(ValueError, match="expected a budget >= 0"):
        await tier.resize("a", -1)


async def test_deleting_frees_the_bytes(tier: Tier) -> None:
    await tier.resize("a", 300)
    await tier.put("a", entry(1))
    assert await tier.delete("a", key(1)) is True
    assert await tier.delete("a", key(1)) is False
    assert (await tier.stats("a")).bytes == 0


async def test_flush_removes_one_arm_only_and_keeps_its_budget(tier: Tier) -> None:
    for arm in ("a", "b"):
        await tier.resize(arm, 300)
        for number in (1, 2):
            await tier.put(arm, entry(number))
    assert await tier.flush("a") == 2
    assert await held(tier, "a", (1, 2)) == []
    assert await held(tier, "b", (1, 2)) == [1, 2]
    await tier.put("a", entry(3))
    stats = await tier.stats("a")
    assert (stats.entries, stats.bytes, stats.budget) == (1, 100, 300)


def described(number: int, body: int = 100) -> Entry:
    """An entry with everything that a head tells."""
    return Entry(
        key(number),
        bytes(body),
        11.5,
        3,
        5,
        b"c" * 32,
        bytes(384),
        EntryMeta(model="m", tags=("t",)).dump(),
        "sse",
        False,
        60.0,
        2.0,
    )


async def test_heads_tell_everything_but_body_and_vector_and_make_nothing_recent(tier: Tier) -> None:
    first, second = entry(1), described(2)
    await tier.resize("a", first.size + second.size)
    await tier.put("a", first)
    await tier.put("a", second)
    heads = await tier.heads("a", [key(2), key(9), key(1)])
    assert heads == [second.head(), None, first.head()]
    assert [head.size for head in heads if head is not None] == [second.size, first.size]
    assert (second.head().body, second.head().vector) == (b"", b"")
    assert await tier.heads("a", []) == []
    await tier.put("a", entry(3))
    assert await held(tier, "a", (1, 2, 3)) == [2, 3]


@pytest.mark.parametrize("count", [0, 1, 100, 700])
async def test_a_scan_meets_every_entry_of_its_arm_and_makes_nothing_recent(tier: Tier, count: int) -> None:
    for arm in ("a", "b"):
        await tier.resize(arm, 1_000_000)
    for number in range(count):
        await tier.put("a", described(number, body=number))
    await tier.put("b", entry(1000))
    found = {head.key: head async for step in tier.scan("a") for head in step}
    assert found == {key(number): described(number, body=number).head() for number in range(count)}
    if count > 1:
        await tier.resize("a", described(count - 1, body=count - 1).size)
        assert await held(tier, "a", range(count)) == [count - 1], "the order is that of the puts"


async def test_a_scan_goes_on_while_entries_come_and_go(tier: Tier) -> None:
    await tier.resize("a", 1_000_000)
    for number in range(700):
        await tier.put("a", entry(number))
    found: set[bytes] = set()
    async for step in tier.scan("a"):
        found.update(head.key for head in step)
        await tier.delete_many("a", [key(number) for number in range(100)])
        await tier.put("a", entry(5000 + len(found)))
    assert found >= {key(number) for number in range(100, 700)}, "what was there all the time is met"


async def test_many_entries_are_deleted_at_once(tier: Tier) -> None:
    await tier.resize("a", 1_000_000)
    for number in range(1200):
        await tier.put("a", entry(number))
    assert await tier.delete_many("a", [key(number) for number in range(0, 2400, 2)]) == 600
    assert await tier.delete_many("a", [key(0)]) == 0
    assert await tier.delete_many("a", []) == 0
    stats = await tier.stats("a")
    assert (stats.entries, stats.bytes, stats.evictions) == (600, 60_000, 0)
    assert await held(tier, "a", range(6)) == [1, 3, 5]


async def test_a_life_begins_anew_without_making_the_entry_recent_or_larger(tier: Tier) -> None:
    first, second = described(1), entry(2, written_at=10.0)
    await tier.resize("a", first.size + second.size)
    await tier.put("a", first)
    await tier.put("a", second)
    assert await tier.renew("a", key(1), 15.5) is True
    assert await tier.get("a", key(1), touch=False) == replace(first, renewed=4.0)
    assert await tier.renew("a", key(1), 12.0) is True, "it is there, but began later already"
    assert await tier.get("a", key(1), touch=False) == replace(first, renewed=4.0)
    assert await tier.renew("a", key(2), 10.0) is True
    assert await tier.get("a", key(2), touch=False) == second
    assert await tier.renew("a", key(3), 15.0) is False
    assert await tier.renew("b", key(1), 15.0) is False
    assert (await tier.stats("a")).bytes == first.size + second.size
    assert await tier.put("a", entry(3)) == 1
    assert await held(tier, "a", (1, 2, 3)) == [2, 3]


async def test_a_size_says_what_is_charged(tier: Tier) -> None:
    await tier.resize("a", 10_000)
    await tier.put("a", tier.charged(described(1)))
    got = await tier.get("a", key(1))
    assert got is not None
    assert got.size == tier.charged(described(1)).size == (await tier.stats("a")).bytes


ARMS = ("a", "b")


class Model:
    """What every tier must do: an ordered dict per arm."""

    def __init__(self) -> None:
        self.entries: dict[str, OrderedDict[bytes, Entry]] = {arm: OrderedDict() for arm in ARMS}
        self.budget = dict.fromkeys(ARMS, 0)
        self.evicted: list[tuple[str, bytes]] = []

    def used(self, arm: str) -> int:
        return sum(held.size for held in self.entries[arm].values())

    def trim(self, arm: str) -> int:
        count = 0
        while self.used(arm) > self.budget[arm]:
            gone, _ = self.entries[arm].popitem(last=False)
            self.evicted.append((arm, gone))
            count += 1
        return count

    def get(self, arm: str, name: bytes, touch: bool) -> Entry | None:
        if touch and name in self.entries[arm]:
            self.entries[arm].move_to_end(name)
        return self.entries[arm].get(name)

    def put(self, arm: str, new: Entry) -> int:
        self.entries[arm].pop(new.key, None)
        if new.size > self.budget[arm]:
            return 0
        self.entries[arm][new.key] = new
        return self.trim(arm)

    def resize(self, arm: str, budget: int) -> int:
        self.budget[arm] = budget
        return self.trim(arm)

    def renew(self, arm: str, name: bytes, at: float) -> bool:
        held = self.entries[arm].get(name)
        if held is not None and at - held.written_at > held.renewed:
            self.entries[arm][name] = replace(held, renewed=at - held.written_at)
        return held is not None

    def delete(self, arm: str, name: bytes) -> bool:
        return self.entries[arm].pop(name, None) is not None

    def flush(self, arm: str) -> int:
        count = len(self.entries[arm])
        self.entries[arm].clear()
        return count


class ClockModel(Model):
    """The same with the order of CLOCK: the oldest goes, unless it was used since it came or was spared."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: set[tuple[str, bytes]] = set()

    def trim(self, arm: str, room: int = 0) -> int:
        count = 0
        while self.used(arm) + room > self.budget[arm]:
            oldest = next(iter(self.entries[arm]))
            if (arm, oldest) in self.recent:
                self.recent.discard((arm, oldest))
                self.entries[arm].move_to_end(oldest)
                continue
            del self.entries[arm][oldest]
            self.evicted.append((arm, oldest))
            count += 1
        return count

    def get(self, arm: str, name: bytes, touch: bool) -> Entry | None:
        if touch and name in self.entries[arm]:
            self.recent.add((arm, name))
        return self.entries[arm].get(name)

    def put(self, arm: str, new: Entry) -> int:
        self.delete(arm, new.key)
        if new.size > self.budget[arm]:
            return 0
        count = self.trim(arm, new.size)
        self.entries[arm][new.key] = new
        return count

    def delete(self, arm: str, name: bytes) -> bool:
        self.recent.discard((arm, name))
        return super().delete(arm, name)

    def flush(self, arm: str) -> int:
        self.recent = {(other, name) for other, name in self.recent if other != arm}
        return super().flush(arm)


_arm = st.sampled_from(ARMS)
_number = st.integers(0, 7)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("get"), _arm, _number, st.booleans()),
        st.tuples(st.just("put"), _arm, _number, st.integers(KEY_BYTES, 200)),
        st.tuples(st.just("put"), _arm, _number, st.integers(KEY_BYTES, 200)),
        st.tuples(st.just("touch"), _arm, _number, st.none()),
        st.tuples(st.just("touch_soon"), _arm, _number, st.none()),
        st.tuples(st.just("delete"), _arm, _number, st.none()),
        st.tuples(st.just("delete_many"), _arm, _number, st.integers(0, 7)),
        st.tuples(st.just("renew"), _arm, _number, st.integers(0, 60)),
        st.tuples(st.just("resize"), _arm, st.integers(0, 800), st.none()),
        st.tuples(st.just("flush"), _arm, st.just(0), st.none()),
    ),
    max_size=40,
)


async def run(
    operations: Sequence[tuple[str, str, int, int | bool | None]], tiers: Sequence[Tier], chosen: Sequence[int]
) -> None:
    """Do the same to the tier, by the chosen clients, and to the model; compare every answer and the final contents."""
    model = ClockModel() if isinstance(tiers[0], ArenaTier) else Model()
    evicted: list[tuple[str, bytes]] = []
    for tier in tiers:
        tier.on_evict = lambda arm, keys: evicted.extend((arm, gone) for gone in keys)
    for arm in ARMS:
        await tiers[0].resize(arm, 500)
        model.resize(arm, 500)
    for step, (operation, arm, number, extra) in enumerate(operations):
        tier = tiers[chosen[step % len(chosen)]]
        if operation == "get":
            assert await tier.get(arm, key(number), touch=bool(extra)) == model.get(arm, key(number), bool(extra))
        elif operation == "put":
            new = tier.charged(entry(number, int(extra or 0), written_at=float(step)))
            assert await tier.put(arm, new) == model.put(arm, new)
        elif operation == "touch":
            await tier.touch(arm, key(number))
            model.get(arm, key(number), True)
        elif operation == "touch_soon":
            # Not waiting means that only this client's order is promised: settled here unless it is the only client.
            tier.touch_soon(arm, key(number))
            if len(tiers) > 1:
                await tier.touch(arm, key(number))
            model.get(arm, key(number), True)
        elif operation == "delete":
            assert await tier.delete(arm, key(number)) == model.delete(arm, key(number))
        elif operation == "delete_many":
            chosen_keys = [key(number), key(int(extra or 0))]
            expected = sum(model.delete(arm, name) for name in chosen_keys)
            assert await tier.delete_many(arm, chosen_keys) == expected
        elif operation == "renew":
            assert await tier.renew(arm, key(number), float(extra or 0)) == model.renew(arm, key(number), float(extra or 0))
        elif operation == "resize":
            assert await tier.resize(arm, number) == model.resize(arm, number)
        else:
            assert await tier.flush(arm) == model.flush(arm)
    assert evicted == model.evicted
    for tier in tiers:
        for arm in ARMS:
            stats = await tier.stats(arm)
            assert (stats.entries, stats.bytes, stats.budget) == (
                len(model.entries[arm]), model.used(arm), model.budget[arm],
            )  # fmt: skip
            held = [model.entries[arm].get(key(number)) for number in range(8)]
            assert await tier.heads(arm, [key(number) for number in range(8)]) == [one and one.head() for one in held]
            for number in range(8):
                assert await tier.get(arm, key(number), touch=False) == held[number]


@pytest.mark.parametrize("kind", ["memory", "arena", "redis", "sealed", "sealed arena"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations)
async def test_any_history_is_that_of_a_byte_bounded_cache(
    kind: str, redis_server: RedisServer, operations: list[tuple[str, str, int, int | bool | None]]
) -> None:
    async with opened(kind, redis_server.url) as client:
        await run(operations, [client()], [0])


@pytest.mark.parametrize("kind", ["arena", "redis"])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations, chosen=st.lists(st.integers(0, 1), min_size=1, max_size=40))
async def test_two_clients_share_one_budget_and_one_order(
    kind: str, redis_server: RedisServer, operations: list[tuple[str, str, int, int | bool | None]], chosen: list[int]
) -> None:
    async with opened(kind, redis_server.url) as client:
        await run(operations, [client(), client()], chosen)
