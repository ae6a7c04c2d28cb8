"""Answers that come to the store after a flush but were asked for before it: they are not kept, whoever heard of the flush."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from serving.admin import FlushWhere
from serving.cache import CacheRules, TieredCache
from serving.crypto import Sealer
from serving.knobs import Knobs
from serving.tiers import redis_scripts
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Change, Entry, EntryMeta, Outdated, TierUnavailable
from serving.tiers.labels import LABEL_BYTES, labels_of, labels_where
from serving.tiers.redis import RedisTier
from serving.writing import STORE_FIRST_SECONDS
from tests.serving.entries import entry, key, request
from tests.serving.gateways import Model, before
from tests.waiting import until

ARM = "a"
KNOBS = Knobs(200_000, 100.0)
META = EntryMeta(model="m", tenant="acme", namespace="spring", tags=("red", "blue"), documents=("handbook",))
COVERS = [
    {"tenant": "acme"},
    {"namespace": "spring"},
    {"model": "m"},
    {"tag": "blue"},
    {"document": "handbook"},
    {"tag": "red", "model": "m"},
]
COVERS += [{"key": key(1).hex()}, {}]
SPARES = [
    {"tenant": ""},
    {"namespace": "autumn"},
    {"model": "n"},
    {"tag": "handbook"},
    {"tag": "red", "model": "n"},
    {"key": key(2).hex()},
]


def described(number: int, *, written_at: float = 0.0) -> Entry:
    return replace(entry(number, written_at=written_at), meta=META.dump())


@pytest.fixture(params=["in the clear", "sealed"])
async def tiers(request: pytest.FixtureRequest, redis_url: str, namespace: str) -> AsyncIterator[list[RedisTier]]:
    """Two clients."""
    sealer = Sealer(bytes(range(32))) if request.param == "sealed" else None
    opened = [RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5, sealer=sealer) for _ in range(2)]
    await opened[0].resize(ARM, 100_000)
    yield opened
    for each in opened:
        await each.close()


@pytest.fixture
async def tier(tiers: list[RedisTier]) -> RedisTier:
    return tiers[0]


async def held(tier: RedisTier, number: int = 1) -> bool:
    return await tier.get(ARM, key(number), touch=False) is not None


@pytest.mark.parametrize("where", COVERS, ids=str)
async def test_a_flush_refuses_what_it_covers_and_was_asked_for_before(tiers: list[RedisTier], where: dict[str, str]) -> None:
    here, there = tiers
    since = await here.removals(ARM)
    await there.outdate(ARM, where)
    with pytest.raises(Outdated):
        await here.put_numbered(ARM, described(1), since=since)
    assert not await held(here)
    await here.put_numbered(ARM, described(1), since=await here.removals(ARM))
    assert await held(here), "what is asked for afterwards is kept"


@pytest.mark.parametrize("where", SPARES, ids=str)
async def test_a_flush_refuses_nothing_else(tiers: list[RedisTier], where: dict[str, str]) -> None:
    here, there = tiers
    since = await here.removals(ARM)
    await there.outdate(ARM, where)
    await here.put_numbered(ARM, described(1), since=since)
    assert await held(here)


async def test_a_flush_of_everything_refuses_all_that_was_asked_for_before(tiers: list[RedisTier]) -> None:
    here, there = tiers
    since = await here.removals(ARM)
    await there.flush(ARM)
    with pytest.raises(Outdated):
        await here.put_numbered(ARM, entry(1), since=since)
    await here.put_numbered(ARM, entry(1), since=since + 1)
    assert await held(here)


async def test_what_is_refused_leaves_what_is_there(tier: RedisTier) -> None:
    since = await tier.removals(ARM)
    await tier.outdate(ARM, {"tag": "red"})
    await tier.put_numbered(ARM, entry(1))
    with pytest.raises(Outdated):
        await tier.put_numbered(ARM, described(1, written_at=1.0), since=since)
    assert await tier.get(ARM, key(1)) == entry(1)
    assert (await tier.stats(ARM)).bytes == entry(1).size if tier._sealer is None else True


async def test_a_flush_counts_as_a_removal_and_is_told_of(tiers: list[RedisTier]) -> None:
    here, there = tiers
    seen: list[Change] = []

    async def collect() -> None:
        async for change in here.changes():
            seen.append(change)  # noqa: PERF401 (never ends)

    task = asyncio.create_task(collect())
    await until(lambda: seen == [Change("gap")], "the feed to be connected")
    last = await here.removals(ARM)
    await there.outdate(ARM, {"tag": "red"})
    await there.outdate(ARM, {"key": key(1).hex()}, told=False)
    await until(lambda: len(seen) == 4, "both to be told of")
    assert seen[1:] == [Change("outdated", ARM), *(Change("evict", ARM, (), removal=last + number) for number in (1, 2))]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_record_of_flushes_is_bounded_and_what_is_older_than_it_is_refused(tier: RedisTier, redis_url: str) -> None:
    since = await tier.removals(ARM)
    where = {"tenant": "x" * 1000, "namespace": "n", "model": "m", "tag": "t", "document": "d"}
    for _ in range(3 * redis_scripts.MOST_FLUSHES):
        await tier.outdate(ARM, where)
    async with Redis.from_url(redis_url) as raw:
        assert len(await raw.hget(tier._keys(ARM)[2], "flushes") or b"") == redis_scripts.MOST_FLUSHES * (9 + 5 * LABEL_BYTES)
    last = await tier.removals(ARM)
    for late, kept in ((since, False), (last - redis_scripts.MOST_FLUSHES - 1, False), (last - redis_scripts.MOST_FLUSHES, True)):
        if not kept:
            with pytest.raises(Outdated):
                await tier.put_numbered(ARM, described(1), since=late)
        else:
            await tier.put_numbered(ARM, described(1), since=late)
    assert await held(tier)


async def test_a_redis_that_lost_its_flushes_refuses_what_was_asked_for_before_that(tier: RedisTier, redis_url: str) -> None:
    since = await tier.removals(ARM)
    await tier.outdate(ARM, {"tag": "red"})
    async with Redis.from_url(redis_url) as raw:
        await raw.flushall()
    for known in (0, since, since + 1):
        with pytest.raises(Outdated):
            await tier.put_numbered(ARM, described(1), since=known)
    await tier.put_numbered(ARM, described(1), since=await tier.removals(ARM))
    assert await held(tier)


async def test_a_redis_whose_numbers_went_back_refuses_until_they_go_on_and_what_was_asked_for_before(
    tier: RedisTier, redis_url: str
) -> None:
    since = await tier.removals(ARM)
    async with Redis.from_url(redis_url) as raw:
        await raw.hset(tier._keys(ARM)[2], "removals", since - 10)
    with pytest.raises(Outdated):
        await tier.put_numbered(ARM, described(1), since=since)
    await tier.outdate(ARM, {"tag": "red"})
    await tier.renumber(ARM)
    with pytest.raises(Outdated):
        await tier.put_numbered(ARM, described(1), since=since)
    await tier.put_numbered(ARM, described(1), since=await tier.removals(ARM))
    assert await held(tier)


async def test_an_arm_that_an_earlier_version_made_takes_answers(tier: RedisTier, redis_url: str) -> None:
    async with Redis.from_url(redis_url) as raw:
        await raw.hdel(tier._keys(ARM)[2], "floor")
    await tier.put_numbered(ARM, described(1), since=0)
    assert await held(tier)


_names = st.sampled_from(["", "a", "b"])
_given = st.dictionaries(st.sampled_from(["tenant", "namespace", "tag", "document", "model"]), _names)


@settings(max_examples=200, deadline=None)
@given(_names, _names, _names, st.lists(_names, max_size=3), st.lists(_names, max_size=3), _given)
def test_labels_cover_exactly_what_a_flush_matches(
    tenant: str, namespace: str, model: str, tags: list[str], documents: list[str], where: dict[str, str]
) -> None:
    meta = EntryMeta(model=model, tenant=tenant, namespace=namespace, tags=tuple(tags), documents=tuple(documents))
    secret = b"s" * 32
    has, wanted = (labels_of(replace(entry(1), meta=meta.dump()), secret), labels_where(where, secret))
    split = [{labels[at : at + LABEL_BYTES] for at in range(0, len(labels), LABEL_BYTES)} for labels in (has, wanted)]
    assert (split[1] <= split[0]) == FlushWhere(**where).matches(ARM, meta)


def test_labels_cannot_be_told_without_the_secret() -> None:
    assert labels_where({"tag": "red"}, b"one") != labels_where({"tag": "red"}, b"two") != labels_where({"tag": "red"})


def test_a_flush_by_what_entries_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="got colour"):
        labels_where({"colour": "red"})


# -- the cache over it -------------------------------------------------------------------------------------------------------


class Node:
    """A node: its arena, and what it has of the store."""

    def __init__(self, path: Path, url: str, namespace: str) -> None:
        self.memory = ArenaTier(path, 4 << 20)
        self.store = RedisTier(url, namespace, read_deadline=5, write_deadline=5, cooldown=0.01)
        self.cache = TieredCache(
            memory=self.memory, store=self.store, vectors=None, rules=CacheRules(ttl_jitter=0.0, l1_share=1.0)
        )

    async def start(self) -> None:
        await self.cache.apply({ARM: KNOBS})
        await asyncio.wait_for(self.cache.following(), 10)
        await until(lambda: not self.cache._coherence.unsure, "memory to be in step")  # type: ignore[union-attr]

    def remembers(self, number: int) -> bool:
        return self.cache.lookup_now(ARM, request(number), now=1.0) is not None


@pytest.fixture
async def nodes(redis_url: str, namespace: str, tmp_path: Path) -> AsyncIterator[list[Node]]:
    made = [Node(tmp_path / name, redis_url, namespace) for name in ("here", "there")]
    for node in made:
        await node.start()
    yield made
    for node in made:
        await node.cache.close()


async def flush_by(node: Node, how: str) -> None:
    """Flush what covers the first entry, which is nowhere yet."""
    if how == "all":
        await node.cache.flush(ARM)
    elif how == "tag":
        await node.cache.outdate(ARM, {"tag": "red"})
    else:
        assert await node.cache.withdraw(ARM, key(1)) is False


@pytest.mark.parametrize("how", ["all", "tag", "id"])
async def test_an_answer_that_lands_after_a_flush_of_which_its_node_has_not_heard_is_kept_nowhere(
    nodes: list[Node], how: str
) -> None:
    here, there = nodes
    since = here.cache.last_removal(ARM)
    here.cache.upkeep.heard = lambda change: None  # type: ignore[method-assign]  # it hears of nothing
    await flush_by(there, how)
    await here.cache.put(ARM, described(1), now=0.0, since=since)
    assert not here.remembers(1)
    assert [(await node.cache.lookup(ARM, request(1), now=1.0)).outcome for node in nodes] == ["miss", "miss"]
    await here.cache.put(ARM, described(1), now=0.0, since=here.cache.last_removal(ARM))
    assert here.remembers(1), "its miss has told it of the flush"


async def test_what_a_slow_store_refuses_in_the_end_leaves_memory(nodes: list[Node]) -> None:
    here, there = nodes
    since, put, go = here.cache.last_removal(ARM), here.store.put_numbered, asyncio.Event()

    async def slow(arm: str, entry: Entry, *, since: int | None = None) -> tuple[int, int]:
        await go.wait()
        return await put(arm, entry, since=since)

    here.store.put_numbered = slow  # type: ignore[method-assign]
    putting = asyncio.create_task(here.cache.put(ARM, described(1), now=0.0, since=since))
    await until(lambda: here.remembers(1), f"the store to be waited for no longer than {STORE_FIRST_SECONDS} s")
    await there.cache.outdate(ARM, {"tag": "red"})
    go.set()
    await putting
    assert not here.remembers(1)


@pytest.mark.parametrize("store", ["slow", "away"])
async def test_where_a_flush_was_heard_memory_gets_nothing_of_before_without_the_stores_word(
    nodes: list[Node], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.writing.STORE_FIRST_SECONDS", 0.0)
    here, there = nodes
    since = here.cache.last_removal(ARM)
    await there.cache.outdate(ARM, {"tag": "red"})
    coherence, last = here.cache._coherence, await there.store.removals(ARM)
    assert coherence is not None
    await until(lambda: coherence.position(ARM) == last, "the flush to be heard of")
    kept: list[Entry] = []

    def keep(arm: str, entry: Entry, *, known: int | None = None) -> int:
        kept.append(entry)
        return 0

    monkeypatch.setattr(here.memory, "put_now", keep)
    if store == "away":

        async def away(*_: object, **__: object) -> tuple[int, int]:
            raise TierUnavailable("away")

        monkeypatch.setattr(here.store, "put_numbered", away)
    await here.cache.put(ARM, described(1), now=0.0, since=since)
    assert kept == []
    await here.cache.put(ARM, described(1), now=0.0, since=here.cache.last_removal(ARM))
    assert kept == [described(1)]


async def test_what_was_removed_before_a_slow_store_said_that_it_has_it_leaves_memory(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.writing.STORE_FIRST_SECONDS", 0.0)
    here, there = nodes
    put = here.store.put_numbered

    async def slow(arm: str, entry: Entry, *, since: int | None = None) -> tuple[int, int]:
        stored = await put(arm, entry, since=since)
        await there.cache.delete_many(ARM, [key(1)])
        last = await there.store.removals(ARM)
        await until(lambda: here.memory.mark_now(ARM) == last, "the removal to take effect")
        here.memory.put_now(ARM, entry)  # as if the wait for the store had ended but now
        return stored

    here.store.put_numbered = slow  # type: ignore[method-assign]
    await here.cache.put(ARM, entry(1), now=0.0)
    assert not here.remembers(1)


async def test_a_flush_by_what_entries_are_takes_what_was_put_while_the_store_was_away_before_it_is_compared(
    nodes: list[Node],
) -> None:
    """The store, which alone is asked what there is, has never heard of it."""
    here, there = nodes
    put, removals, back = here.store.put_numbered, here.store.removals, asyncio.Event()

    async def away(arm: str, entry: Entry, *, since: int | None = None) -> tuple[int, int]:
        raise TierUnavailable("away")

    async def late(arm: str) -> int:
        if not back.is_set():
            raise TierUnavailable("away")
        return await removals(arm)

    here.store.put_numbered, here.store.removals = away, late  # type: ignore[method-assign]
    await here.cache.put(ARM, described(1), now=0.0)
    assert here.remembers(1)
    here.store.put_numbered = put  # type: ignore[method-assign]
    await there.cache.outdate(ARM, {"tag": "red"})
    await until(lambda: not here.remembers(1), "the flush to be heard of")
    back.set()
    await until(lambda: here.memory.mark_now(ARM) > 0, "memory to be compared")
    assert here.memory.get_now(ARM, key(1)) is None


async def test_a_flush_that_begins_at_the_node_itself_takes_what_it_put_while_the_store_was_away(nodes: list[Node]) -> None:
    here, _ = nodes
    put, removals = here.store.put_numbered, here.store.removals

    async def away(*_: object, **__: object) -> tuple[int, int]:
        raise TierUnavailable("away")

    here.store.put_numbered = here.store.removals = away  # type: ignore[method-assign,assignment]
    await here.cache.put(ARM, described(1), now=0.0)
    here.store.put_numbered = put  # type: ignore[method-assign]
    await here.cache.outdate(ARM, {"tag": "red"})
    assert not here.remembers(1)
    here.store.removals = removals  # type: ignore[method-assign]
    await until(lambda: here.memory.mark_now(ARM) > 0, "memory to be compared")


@pytest.mark.parametrize("how", ["all", "tag", "id"])
async def test_what_was_under_way_at_a_flush_by_the_node_itself_waits_for_the_stores_word_at_once(
    nodes: list[Node], how: str
) -> None:
    """The message by which it would hear of its own flush has not come yet, and the put fails."""
    here, _ = nodes
    since = here.cache.last_removal(ARM)
    here.cache.upkeep.heard = lambda change: None  # type: ignore[method-assign]
    await flush_by(here, how)

    async def away(*_: object, **__: object) -> tuple[int, int]:
        raise TierUnavailable("away")

    here.store.put_numbered = away  # type: ignore[method-assign]
    await here.cache.put(ARM, described(1), now=0.0, since=since)
    assert not here.remembers(1)


async def test_a_flush_that_the_store_has_not_heard_of_says_so(nodes: list[Node]) -> None:
    here, _ = nodes
    await here.cache.put(ARM, described(1), now=0.0)
    flush = here.store.flush

    async def away(arm: str) -> int:
        raise TierUnavailable("away")

    here.store.flush = away  # type: ignore[method-assign]
    with pytest.raises(TierUnavailable):
        await here.cache.flush(ARM)
    assert not here.remembers(1)
    here.store.flush = flush  # type: ignore[method-assign]
    assert await here.cache.flush(ARM) == 1


_operation = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 3)),
    st.tuples(st.just("land"), st.integers(0, 1), st.integers(0, 9)),
    st.tuples(
        st.sampled_from(["flush all", "flush red", "flush blue", "withdraw", "look"]), st.integers(0, 1), st.integers(0, 3)
    ),
    st.tuples(st.sampled_from(["lose", "deafen", "hear"]), st.integers(0, 1), st.just(0)),
)
_names_of_runs = iter(range(1_000_000))


def of(number: int, asked: int) -> Entry:
    """The answer to a question, which says when it was asked: two questions are red, two blue."""
    meta = EntryMeta(tags=("red" if number % 2 else "blue",))
    return replace(entry(number, written_at=float(asked)), meta=meta.dump())


async def flush(node: Node, tag: str) -> None:
    """As operators do it (:mod:`serving.administration`)."""
    await node.cache.outdate(ARM, {"tag": tag})
    where = FlushWhere(tag=tag)
    found = [head.key async for step in node.cache.heads(ARM) for head in step if where.matches(ARM, EntryMeta.load(head.meta))]
    await node.cache.delete_many(ARM, found)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(_operation, min_size=5, max_size=40))
async def test_nothing_answers_that_was_asked_for_before_a_flush_that_covers_it_whatever_happens(
    redis_url: str, tmp_path: Path, operations: list[tuple[str, int, int]]
) -> None:
    """Two nodes, either of which may hear of nothing for a while, ask, flush and put what they asked for in any order."""
    folder = tmp_path / str(next(_names_of_runs))
    folder.mkdir()
    nodes = [Node(folder / name, redis_url, f"late-{os.getpid()}-{folder.name}") for name in ("here", "there")]
    heard: list[Any] = [node.cache.upkeep.heard for node in nodes]
    missed: list[list[Change]] = [[], []]
    under_way: list[tuple[Node, int | None, Entry]] = []
    flushed = dict.fromkeys(range(4), -1)
    for node in nodes:
        await node.start()
    for at, (name, which, number) in enumerate(operations):
        node = nodes[which]
        if name == "ask":
            under_way.append((node, node.cache.last_removal(ARM), of(number, at)))
        elif name == "land" and under_way:
            asker, since, answer = under_way.pop(number % len(under_way))
            await asker.cache.put(ARM, answer, now=answer.written_at, since=since)
        elif name == "look":
            await node.cache.lookup(ARM, request(number), now=float(at))
        elif name == "withdraw":
            await node.cache.withdraw(ARM, key(number))
            flushed[number] = at
        elif name == "flush all":
            await node.cache.flush(ARM)
            flushed = dict.fromkeys(flushed, at)
        elif name.startswith("flush"):
            await flush(node, name.removeprefix("flush "))
            flushed |= {each: at for each in flushed if (each % 2 == 1) == (name == "flush red")}
        elif name == "lose":
            await node.store._redis.delete(*node.store._keys(ARM))
        elif name == "deafen":
            node.cache.upkeep.heard = missed[which].append  # type: ignore[method-assign,assignment]
        elif name == "hear":
            node.cache.upkeep.heard = heard[which]  # type: ignore[method-assign]
            for change in missed[which]:
                heard[which](change)
            missed[which].clear()
    for which, node in enumerate(nodes):
        node.cache.upkeep.heard = heard[which]  # type: ignore[method-assign]
        for change in missed[which]:
            heard[which](change)
    for asker, since, answer in under_way:
        await asker.cache.put(ARM, answer, now=answer.written_at, since=since)
    await nodes[0].store.delete(ARM, key(99))  # by its number a loss is noticed
    last = await nodes[0].store.removals(ARM)
    for node in nodes:
        await until(lambda: node.memory.mark_now(ARM) == last, "every removal to take effect")  # noqa: B023
        for number in range(4):
            found = await node.cache.lookup(ARM, request(number), now=float(len(operations)))
            assert found.entry is None or found.entry.written_at > flushed[number], f"question {number}"
    for node in nodes:
        await node.cache.close()


# -- the gateway -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_under_way_at_a_replica_that_has_not_heard_of_the_flush_is_not_kept(
    redis_url: str, namespace: str, stream: bool
) -> None:
    model = Model()
    auth = {"admin": [hashlib.sha256(b"root").hexdigest()]}
    tagged = {"x-cache-tags": "red"}
    async with before(model, replicas=2, auth=auth, redis_url=redis_url, namespace=namespace) as (one, other):
        one.gateway.runtime.cache.told.outdated = lambda _: None
        model.hold.clear()
        under_way = asyncio.create_task(one.ask("a question", tagged, stream=stream))
        await until(lambda: len(model.asked) == 1, "the question to have reached the model")
        reply = await other.request("POST", "/admin/v1/flush", json={"tag": "red"}, headers={"authorization": "Bearer root"})
        assert reply.status == 200, reply.body
        model.hold.set()
        assert (await under_way).status == 200
        asked = [(await client.ask("a question", tagged, stream=stream)).cache for client in (other, one)]
    assert asked == ["MISS", "HIT"]


@pytest.mark.parametrize("store", [False, True], ids=["memory alone", "redis"])
async def test_an_answer_under_way_when_the_one_before_it_is_judged_bad_is_not_kept_and_nobody_joins_it(
    redis_url: str, namespace: str, store: bool
) -> None:
    model, operator = Model(), {"authorization": "Bearer root"}
    settings: dict[str, Any] = {"auth": {"admin": [hashlib.sha256(b"root").hexdigest()]}}
    settings |= {"redis_url": redis_url, "namespace": namespace} if store else {}
    async with before(model, rules={"ttl_jitter": 0.0}, **settings) as (client,):
        runtime = client.gateway.runtime
        first, clock = await client.ask("a question"), runtime.clock
        runtime.clock = lambda: clock() + 2 * runtime.cache.knobs("control").ttl
        model.hold.clear()
        under_way = asyncio.create_task(client.ask("a question"))
        await until(lambda: len(model.asked) == 2, "the question to have reached the model again")
        path = f"/admin/v1/entries/{first.headers['x-cache-entry']}/feedback"
        assert (await client.request("POST", path, json={"verdict": "bad"}, headers=operator)).json["removed"]
        after = asyncio.create_task(client.ask("a question"))
        await until(lambda: len(model.asked) == 3, "who asks afterwards to ask for itself")
        model.hold.set()
        assert (await under_way).cache == (await after).cache == "MISS"
        again = await client.ask("a question")
    assert again.cache == "HIT"
    assert again.body == (await after).body
