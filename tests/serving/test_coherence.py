"""Copies in memory and the store they are of: what left the store does not answer, whoever missed it; all else stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.cache import CacheRules, TieredCache
from serving.knobs import Knobs
from serving.redis_server import RedisServer
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Change, TierUnavailable
from serving.tiers.local import LocalTier
from serving.tiers.memory import MemoryTier
from serving.tiers.redis import RedisTier
from tests.serving.arenas import Worker
from tests.serving.entries import entry, key, request
from tests.waiting import until

SIZE = 4 << 20
KNOBS = Knobs(200_000, 100.0)
ARM = "a"
Start = Callable[..., Awaitable["Node"]]


class Node:
    """A replica: its cache, and the tiers under it."""

    def __init__(self, memory: LocalTier, url: str | None, namespace: str) -> None:
        self.memory = memory
        self.store = RedisTier(url, namespace, read_deadline=5, write_deadline=5, cooldown=0.01) if url is not None else None
        self.cache = TieredCache(memory=memory, store=self.store, vectors=None, rules=CacheRules(ttl_jitter=0.0, l1_share=1.0))

    async def start(self) -> None:
        await self.cache.apply({ARM: KNOBS})
        await asyncio.wait_for(self.cache.following(), 10)

    def held(self, *numbers: int) -> list[int]:
        """Those that memory answers."""
        return [number for number in numbers if self.cache.lookup_now(ARM, request(number), now=1.0) is not None]

    async def answered(self, *numbers: int) -> list[int]:
        """Those that memory answers, where Redis is asked first as it may not be heard of what it removes."""
        return [number for number in numbers if (await self.cache.lookup(ARM, request(number), now=1.0)).tier == "memory"]

    async def put(self, *numbers: int, written_at: float = 0.0) -> None:
        for number in numbers:
            await self.cache.put(ARM, entry(number, written_at=written_at), now=written_at)

    async def close(self) -> None:
        await self.cache.close()


@pytest.fixture
async def start(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts replicas: ``node`` names the arena that they share, None: one with memory of its own."""
    nodes: list[Node] = []

    async def made(node: str | None = "here", url: str | None = redis_url) -> Node:
        memory: LocalTier = MemoryTier() if node is None else ArenaTier(tmp_path / node, SIZE)
        nodes.append(Node(memory, url, namespace))
        await nodes[-1].start()
        return nodes[-1]

    yield made
    for each in nodes:
        await each.close()


async def test_a_replica_that_starts_finds_the_memory_of_its_node_warm(start: Start) -> None:
    one = await start()
    await one.put(1, 2, 3)
    other = await start()
    assert other.held(1, 2, 3) == [1, 2, 3]
    await one.close()
    assert other.held(1, 2, 3) == [1, 2, 3]
    await other.close()
    alone = await start()
    assert alone.held(1, 2, 3) == [1, 2, 3], "all were down, and nothing was removed meanwhile"


async def test_a_replica_that_starts_amid_evictions_keeps_what_the_others_have(start: Start) -> None:
    one = await start()
    await one.cache.apply({ARM: Knobs(20_000, 100.0)})
    over = asyncio.Event()

    async def churn() -> None:
        number = 1000
        while not over.is_set():
            await one.put(number)
            number += 1

    task = asyncio.create_task(churn())
    for _ in range(5):
        await until(lambda: one.memory.stats_now(ARM).entries > 10, "the memory to fill")
        other = await start()
        assert other.memory.stats_now(ARM).entries > 10
        await other.close()
        await other.cache.apply({})
    over.set()
    await task


@pytest.mark.parametrize("kind", ["flush", "delete", "evict", "replace"])
async def test_what_was_removed_while_the_node_was_down_does_not_answer(start: Start, kind: str) -> None:
    here = await start()
    await here.put(1, 2, 3)
    await here.close()
    there = await start("there")
    if kind == "flush":
        await there.cache.flush(ARM)
    elif kind == "delete":
        await there.cache.delete_many(ARM, [key(1)])
    elif kind == "evict":
        await there.cache.apply({ARM: Knobs(2_000, 100.0)})
        await there.cache.apply({ARM: KNOBS})
    else:
        await there.put(1, written_at=1.0)
    back = await start()
    assert back.held(1, 2, 3) == ([] if kind == "flush" else [2, 3])
    found = await back.cache.lookup(ARM, request(1), now=2.0)
    assert (found.outcome, found.age) == (("hit", 1.0) if kind == "replace" else ("miss", 0.0))


async def test_nodes_hear_of_each_others_removals_while_they_run(start: Start) -> None:
    here, sibling, there = await start(), await start(), await start("there")
    await here.put(1, 2, 3)
    await there.cache.lookup(ARM, request(1), now=0.0)
    assert (sibling.held(1, 2, 3), there.held(1)) == ([1, 2, 3], [1])
    await there.cache.delete_many(ARM, [key(1)])
    await until(lambda: here.held(1) == [], "the deletion to be heard of")
    assert here.held(2, 3) == [2, 3]
    await there.cache.flush(ARM)
    await until(lambda: here.held(2, 3) == [], "the flush to be heard of")
    marks = [await there.cache.store.removals(ARM)] * 2  # type: ignore[union-attr]
    await until(lambda: [node.memory.mark_now(ARM) for node in (here, there)] == marks, "the marks to follow")


async def test_what_one_replica_has_just_stored_stays_in_the_memory_of_its_node(start: Start) -> None:
    one, other = await start(), await start()
    for turn in range(20):
        await one.put(1, written_at=float(turn))
    await until(lambda: other.cache._coherence._positions[ARM] == one.memory.mark_now(ARM), "all to be heard of")  # type: ignore[union-attr]
    found = other.cache.lookup_now(ARM, request(1), now=20.0)
    assert found is not None
    assert found.age == 1.0


async def test_a_copy_read_before_a_removal_took_effect_is_not_stored_after_it(start: Start) -> None:
    here, there = await start(), await start("there")
    await there.put(1)
    assert here.store is not None
    late, known = await here.store.get_numbered(ARM, key(1))
    await there.cache.flush(ARM)
    mark = await here.store.removals(ARM)
    await until(lambda: here.memory.mark_now(ARM) == mark, "the flush to take effect")
    assert late is not None
    here.memory.put_now(ARM, late, known=known)
    assert here.held(1) == []


async def test_a_copy_read_before_a_removal_that_could_not_be_noted_in_the_arena_is_not_stored_after_it(
    start: Start, tmp_path: Path
) -> None:
    here = await start()
    await here.put(1)
    assert here.store is not None
    late, known = await here.store.get_numbered(ARM, key(1))
    stuck = ArenaTier(tmp_path / "here", SIZE)
    assert stuck.lease.acquire() is True
    await here.cache.delete_many(ARM, [key(1)])
    coherence = here.cache._coherence
    assert coherence is not None
    assert known is not None
    await until(lambda: (coherence.position(ARM) or 0) > known, "the removal to be heard")
    stuck.lease.release()
    assert late is not None
    here.cache._promote(ARM, late, known)
    assert here.held(1) == []
    await stuck.close()


async def test_a_copy_that_a_writer_finished_after_its_removal_was_heard_by_others_goes_with_their_next(tmp_path: Path) -> None:
    stopped, other = (ArenaTier(tmp_path / "arena", SIZE) for _ in range(2))
    stopped.resize_now(ARM, 100_000)
    stopped.update_mark_now(ARM, lambda _: 10)
    assert stopped.lease.acquire() is True  # in the middle of storing a copy read at 10
    other.remove_now(ARM, [key(1)], removal=11)
    stopped.lease.release()
    stopped.put_now(ARM, entry(1), known=10)
    other.remove_now(ARM, [key(2)], removal=12)
    stopped.remove_now(ARM, [key(1)], removal=11)
    assert other.mark_now(ARM) == 12
    assert stopped.get_now(ARM, key(1)) is None
    for each in (stopped, other):
        await each.close()


async def test_a_flush_that_was_heard_while_another_wrote_takes_what_that_one_finished(tmp_path: Path) -> None:
    stopped, other = (ArenaTier(tmp_path / "arena", SIZE) for _ in range(2))
    stopped.resize_now(ARM, 100_000)
    stopped.update_mark_now(ARM, lambda _: 10)
    assert stopped.lease.acquire() is True
    other.remove_now(ARM, None, removal=11)
    stopped.lease.release()
    stopped.put_now(ARM, entry(1), known=10)
    other.remove_now(ARM, [key(2)], removal=12)
    assert stopped.get_now(ARM, key(1)) is None
    for each in (stopped, other):
        await each.close()


async def test_a_redis_that_lost_its_data_takes_it_from_memory_too(tmp_path: Path, namespace: str) -> None:
    memory = ArenaTier(tmp_path / "arena", SIZE)
    with RedisServer(tmp_path) as server:
        node = Node(memory, server.url, namespace)
        await node.start()
        await node.put(1, 2)
    assert node.held(1, 2) == [1, 2], "away, it costs nothing that is in memory"
    with RedisServer(tmp_path):
        await until(lambda: node.held(1, 2) == [], "the loss to be noticed")
        await node.put(3)
        assert node.held(3) == [3]
        await until(lambda: memory.mark_now(ARM) > 0, "the memory to be in step with the new Redis")
    await node.close()


async def test_a_redis_that_is_emptied_without_a_break_is_noticed_by_the_first_removal(start: Start) -> None:
    here = await start()
    await here.put(1, 2)
    assert here.store is not None
    await here.store._redis.flushall()
    await here.put(3)
    await here.put(3, written_at=1.0)
    await until(lambda: here.held(1, 2, 3) == [3], "the loss to be noticed")


async def test_a_redis_whose_copy_without_the_last_removals_took_its_place_goes_on_from_greater_numbers(start: Start) -> None:
    here = await start()
    await here.put(1, 2)
    assert here.store is not None
    await here.cache.delete_many(ARM, [key(3)])
    last = await here.store.removals(ARM)
    await until(lambda: here.memory.mark_now(ARM) == last, "the removal to take effect")
    redis = here.store._redis
    await redis.hset(here.store._keys(ARM)[2], "removals", last - 1)
    await redis.client_kill_filter(_type="pubsub")
    await until(lambda: here.memory.mark_now(ARM) > last + 1000, "numbers that nobody has heard of, and memory compared")
    assert here.held(1, 2) == [1, 2]
    await here.cache.flush(ARM)
    assert here.held(1, 2) == []
    await here.put(4)
    await until(lambda: here.held(4) == [4], "it to go on")


async def test_without_redis_entries_outlive_a_restart(start: Start) -> None:
    one = await start(url=None)
    await one.put(1, 2)
    await one.close()
    again = await start(url=None)
    assert again.held(1, 2) == [1, 2]
    await again.cache.flush(ARM)
    await again.close()
    assert (await start(url=None)).held(1, 2) == []


async def test_copies_of_a_redis_that_is_no_longer_in_the_settings_do_not_answer(start: Start) -> None:
    one = await start()
    await one.put(1)
    await one.close()
    assert (await start(url=None)).held(1) == []


async def test_what_was_put_without_redis_goes_when_redis_is_back_and_has_it_not(tmp_path: Path, namespace: str) -> None:
    """Else nobody could ever remove it by what it is: a flush by tag asks Redis what there is."""
    memory = ArenaTier(tmp_path / "arena", SIZE)
    node = Node(memory, f"unix://{tmp_path}/redis.sock", namespace)
    await node.cache.apply({ARM: KNOBS})
    await node.put(1)
    assert await node.answered(1) == [1], "what this replica stored answers"
    assert memory.mark_now(ARM) == 0
    with RedisServer(tmp_path):
        await until(lambda: memory.mark_now(ARM) > 0, "the memory to be compared")
        assert node.held(1) == []
        await node.put(2)
        assert node.held(2) == [2]
    await node.put(3)
    assert memory.mark_now(ARM) < 0, "it says so to whoever opens it, should this process be killed"
    assert await node.answered(2, 3) == [2, 3]
    await node.close()


async def test_an_arena_of_before_is_not_believed_while_redis_cannot_say_what_was_removed(tmp_path: Path, namespace: str) -> None:
    with RedisServer(tmp_path) as server:
        node = Node(ArenaTier(tmp_path / "arena", SIZE), server.url, namespace)
        await node.start()
        await node.put(1)
        await node.close()
    back = Node(ArenaTier(tmp_path / "arena", SIZE), f"unix://{tmp_path}/redis.sock", namespace)
    await back.cache.apply({ARM: KNOBS})
    assert (await back.cache.lookup(ARM, request(1), now=1.0)).outcome == "miss"
    await back.put(2)
    assert await back.answered(1, 2) == [2]
    await back.close()


@pytest.mark.parametrize("how", ["flush", "delete", "tag"])
async def test_what_is_removed_while_a_replica_cannot_listen_is_not_given_by_it(start: Start, how: str) -> None:
    """The connection by which it hears of removals is gone, that by which it asks is not: as first after a restart of Redis."""
    one, other = await start("one"), await start("other")
    await one.put(1, 2)
    assert one.held(1, 2) == [1, 2]
    one.cache.upkeep.heard(Change("lost"))
    unsure: list[str] = []
    one.cache.told.unsure = unsure.append
    assert (await one.cache.lookup(ARM, request(1), now=1.0)).outcome == "hit"
    assert unsure == [], "nothing was removed, so that who asks may still join what is under way"
    one.cache.upkeep.heard = lambda change: None  # type: ignore[method-assign]
    if how == "flush":
        await other.cache.flush(ARM)
    elif how == "delete":
        await other.cache.delete_many(ARM, [key(1)])
    else:
        await other.cache.outdate(ARM, {"tag": "red"})
        await other.cache.delete_many(ARM, [key(1)])
    found = await one.cache.lookup(ARM, request(1), now=1.0)
    assert (found.outcome, unsure) == ("miss", [ARM])
    assert (await one.cache.lookup(ARM, request(2), now=1.0)).outcome == ("miss" if how == "flush" else "hit")


async def test_a_removal_that_cannot_be_put_into_effect_is_as_one_that_was_missed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OverflowError("as memory that is damaged may")

    one, other = await start("one"), await start("other")
    await one.put(1, 2)
    assert one.held(1, 2) == [1, 2]
    with monkeypatch.context() as patched:
        patched.setattr(one.memory, "remove_now", fails)
        await other.cache.flush(ARM)
        await until(lambda: one.cache.upkeep.deaf, "the fault to be met")
        assert (await one.cache.lookup(ARM, request(1), now=1.0)).outcome == "miss"
    await until(lambda: not one.cache.upkeep.deaf, "it to listen again")
    await one.put(3)
    await until(lambda: one.held(1, 2, 3) == [3], "memory to be compared with the store")
    await other.cache.delete_many(ARM, [key(3)])
    await until(lambda: one.held(3) == [], "the next removal to be heard")


async def test_upkeep_that_failed_is_tried_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await start("one")
    budgets, tries = one.cache._budgets, []
    settle = budgets.settle_memory

    def fails_once() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OverflowError("as memory that is damaged may")
        settle()

    monkeypatch.setattr(budgets, "settle_memory", fails_once)
    one.cache._work.set()
    await until(lambda: len(tries) == 2, "another try")


async def test_memory_answers_where_nothing_is_heard_and_redis_does_not_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await start("one")
    await one.put(1)
    one.cache.upkeep.heard(Change("lost"))

    async def away(*_: object, **__: object) -> tuple[None, int]:
        raise TierUnavailable("away")

    monkeypatch.setattr(one.store, "get_numbered", away)
    assert await one.answered(1) == [1]


def flush_and_die(connection: object, path: str, url: str, namespace: str, after: int) -> None:
    """Flush; stop for ever at one step of it: before the store, at the store, behind it."""

    async def work() -> None:
        node = Node(ArenaTier(path, SIZE), url, namespace)
        await node.start()
        store = node.store
        assert store is not None
        flush = store.flush

        async def stopped(arm: str) -> int:
            if after == 1:
                await flush(arm)
            connection.send("there")  # type: ignore[attr-defined]
            await asyncio.Event().wait()
            return 0

        store.flush = stopped  # type: ignore[method-assign]
        node.memory.remove_now = lambda *_, **__: None  # type: ignore[method-assign]
        if after == 1:
            node.memory.flush_now = lambda arm: 0  # type: ignore[method-assign]
        await node.cache.flush(ARM)

    asyncio.run(work())


@pytest.mark.parametrize("after", [0, 1])
async def test_a_flush_in_which_all_gateways_of_the_node_were_killed_counts(
    start: Start, redis_url: str, namespace: str, tmp_path: Path, after: int
) -> None:
    before = await start()
    await before.put(1, 2)
    await before.close()
    worker = Worker(flush_and_die, str(tmp_path / "here"), redis_url, namespace, after)
    assert worker.answer() == "there"
    worker.kill()
    back = await start()
    assert back.held(1, 2) == []
    # Killed before Redis was told, nobody was told that it is done: Redis still has them.
    found = [(await back.cache.lookup(ARM, request(number), now=1.0)).tier for number in (1, 2)]
    assert found == (["redis"] * 2 if after == 0 else [""] * 2)


@asynccontextmanager
async def two_nodes(url: str, namespace: str, folder: Path) -> AsyncIterator[list[Node]]:
    nodes = [Node(ArenaTier(folder / f"{namespace}-{name}", SIZE), url, namespace) for name in ("here", "here", "there")]
    for node in nodes:
        await node.start()
    yield nodes
    for node in nodes:
        await node.close()


_numbers = iter(range(1_000_000))
_operation = st.one_of(
    st.tuples(st.sampled_from(["put", "look", "delete"]), st.integers(0, 2), st.integers(0, 5)),
    st.tuples(st.sampled_from(["flush", "restart", "shrink"]), st.integers(0, 2), st.just(0)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(_operation, min_size=5, max_size=30))
async def test_memory_never_has_what_the_store_has_not_whatever_happens(
    redis_url: str, tmp_path: Path, operations: list[tuple[str, int, int]]
) -> None:
    """Two replicas of one node and one of another do what comes to mind; in the end memory has copies and nothing else."""
    namespace = f"coherence-{next(_numbers)}"
    async with two_nodes(redis_url, namespace, tmp_path) as nodes:
        for at, (name, which, number) in enumerate(operations):
            node = nodes[which]
            if name == "put":
                await node.put(number, written_at=float(at))
            elif name == "look":
                await node.cache.lookup(ARM, request(number), now=float(at))
            elif name == "delete":
                await node.cache.delete_many(ARM, [key(number)])
            elif name == "flush":
                await node.cache.flush(ARM)
            elif name == "shrink":
                await node.cache.apply({ARM: Knobs(2_000, 100.0)})
                await node.cache.apply({ARM: KNOBS})
            else:
                await node.close()
                path = tmp_path / f"{namespace}-{'there' if which == 2 else 'here'}"
                nodes[which] = Node(ArenaTier(path, SIZE), redis_url, namespace)
                await nodes[which].start()
        store = nodes[0].store
        assert store is not None
        last = await store.removals(ARM)
        for node in nodes:
            await until(lambda: node.memory.mark_now(ARM) == last, "every removal to take effect")  # noqa: B023
            for number in range(6):
                copy = node.memory.get_now(ARM, key(number), touch=False)
                assert copy is None or copy == await store.get(ARM, key(number), touch=False)
