"""Entries that are encrypted at rest: Redis holds nothing that can be read, and nothing but what was sealed here is believed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from serving.crypto import OVERHEAD, Sealer
from serving.tiers.base import Entry, EntryMeta
from serving.tiers.codec import pack
from serving.tiers.redis import RedisTier
from tests.serving.entries import CONTEXT, int8, key, unit

SEALER = Sealer(bytes(range(32)))
Opener = Callable[..., RedisTier]


@pytest.fixture
async def client(redis_url: str, namespace: str) -> AsyncIterator[Opener]:
    """Opens clients of one cache, with the sealer that is given."""
    async with AsyncExitStack() as stack:

        def opened(sealer: Sealer | None = SEALER, *, name: str = namespace) -> RedisTier:
            tier = RedisTier(redis_url, name, read_deadline=5, write_deadline=5, sealer=sealer)
            stack.push_async_callback(tier.close)
            return tier

        yield opened


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        yield client


def entry(number: int, answer: bytes = b"the answer is 42") -> Entry:
    meta = EntryMeta(text="a private question", model="m", tenant="acme", tags=("t",)).dump()
    return Entry(key(number), answer, 10.0, 3, 5, CONTEXT, int8(unit(number)), meta, "sse", True, 60.0)


def place(namespace: str) -> str:
    return f"cachepilot:{{{namespace}:a}}:entries"


async def test_redis_holds_neither_answers_nor_questions_but_gives_them_back(client: Opener, raw: Redis, namespace: str) -> None:
    tier = client()
    await tier.resize("a", 100_000)
    await tier.put("a", entry(1))
    stored = await raw.hget(place(namespace), key(1))
    assert stored is not None
    for secret in (b"answer", b"private", b"acme"):
        assert secret not in stored
    assert await tier.get("a", key(1)) == await tier.get("a", key(1), touch=False) == await client().get("a", key(1)) == entry(1)
    assert await tier.heads("a", [key(1)]) == [entry(1).head()]
    assert [head async for step in tier.scan("a") for head in step] == [entry(1).head()]
    assert await tier.recent_vectors("a", 10) == [(key(1), CONTEXT, int8(unit(1)))]


async def test_what_sealing_adds_is_charged_and_told(client: Opener) -> None:
    tier = client()
    await tier.resize("a", 100_000)
    bare = replace(entry(2), meta=b"")
    assert (tier.charged(entry(1)).overhead, tier.charged(bare).overhead) == (2 * OVERHEAD, OVERHEAD)
    for one in (entry(1), bare):
        await tier.put("a", one)
    sizes = [tier.charged(one).size for one in (entry(1), bare)]
    assert (await tier.stats("a")).bytes == sum(sizes)
    assert [found.size for name in (key(1), key(2)) if (found := await tier.get("a", name))] == sizes
    assert [head.size for head in await tier.heads("a", [key(1), key(2)]) if head] == sizes
    assert await tier.resize("a", sum(sizes)) == 0
    assert await tier.resize("a", sum(sizes) - 1) == 1


async def test_overwriting_a_sealed_entry_at_capacity_evicts_nobody_else(client: Opener) -> None:
    tier = client()
    entries = [entry(number) for number in range(3)]
    await tier.resize("a", sum(tier.charged(one).size for one in entries))
    for one in entries:
        await tier.put("a", one)
    assert await tier.put("a", entry(1, b"the answer is 43")) == 0
    assert [head is not None for head in await tier.heads("a", [key(number) for number in range(3)])] == [True] * 3


@pytest.mark.parametrize("other", [Sealer(bytes(32)), None], ids=["another key", "no key"])
async def test_with_another_key_everything_is_a_miss_until_it_is_written_anew(client: Opener, other: Sealer | None) -> None:
    mine, others = client(), client(other)
    await mine.resize("a", 100_000)
    await mine.put("a", entry(1))
    assert await others.get("a", key(1)) is None
    assert await others.heads("a", [key(1)]) == [None]
    assert [head async for step in others.scan("a") for head in step] == []
    await others.put("a", entry(1, b"another"))
    assert await others.get("a", key(1)) == entry(1, b"another")
    assert await mine.get("a", key(1)) is None, "nor the other way round"
    assert (await mine.stats("a")).entries == 1


async def test_an_entry_moved_elsewhere_in_redis_does_not_open(client: Opener, raw: Redis, namespace: str) -> None:
    tier = client()
    for arm in ("a", "b"):
        await tier.resize(arm, 100_000)
    await tier.put("a", entry(1))
    await tier.put("b", entry(2))
    stored = await raw.hget(place(namespace), key(1))
    assert stored is not None
    await raw.hset(place(namespace), key(3), stored)
    await raw.hset(place(namespace).replace(":a}", ":b}"), key(1), stored)
    assert await tier.get("a", key(3)) is None
    assert await tier.get("b", key(1)) is None
    assert await tier.get("a", key(1)) == entry(1)


@pytest.mark.parametrize("position", [0, 4, 12, 22, 24, 40, 100, -1])
async def test_an_entry_that_was_changed_in_redis_is_a_miss(client: Opener, raw: Redis, namespace: str, position: int) -> None:
    tier = client()
    await tier.resize("a", 100_000)
    await tier.put("a", entry(1))
    held = await raw.hget(place(namespace), key(1))
    assert isinstance(held, bytes)
    stored = bytearray(held)
    stored[position] ^= 1
    await raw.hset(place(namespace), key(1), bytes(stored))
    assert await tier.get("a", key(1)) is None
    await tier.put("a", entry(1))
    assert await tier.get("a", key(1)) == entry(1)


async def test_an_answer_that_somebody_put_there_in_the_clear_is_not_believed(client: Opener, raw: Redis, namespace: str) -> None:
    tier = client()
    await tier.resize("a", 100_000)
    await raw.hset(place(namespace), key(1), pack(entry(1, b"a forgery")))
    assert await tier.get("a", key(1)) is None


async def test_a_sealed_life_can_begin_anew(client: Opener) -> None:
    tier = client()
    await tier.resize("a", 100_000)
    await tier.put("a", entry(1))
    assert await tier.renew("a", key(1), 14.0)
    assert await client().get("a", key(1)) == replace(entry(1), renewed=4.0)


async def test_other_replicas_hear_of_vectors_not_of_texts(client: Opener) -> None:
    tier = client()
    await tier.resize("a", 100_000)
    changes = client().changes()
    assert (await anext(changes)).kind == "gap"
    await tier.put("a", entry(1))
    told = await anext(changes)
    assert (told.kind, told.keys, told.context, told.vector) == ("put", (key(1),), CONTEXT, int8(unit(1)))
