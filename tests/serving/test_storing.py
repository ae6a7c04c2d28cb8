"""Answers that are being stored: whoever may be answered by one waits for it, and nobody waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serving import fetching
from serving.storing import Storing
from tests.serving.gateways import Model, gateway

KEY, OTHER, CONTEXT = b"k" * 32, b"o" * 32, b"c" * 32


def held(gate: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """A store that answers when it is let."""

    async def store() -> None:
        await gate.wait()

    return store


async def test_who_asks_for_the_key_or_in_its_context_waits_and_nobody_else_does() -> None:
    storing, gate = Storing(60.0), asyncio.Event()
    storing.begin("arm", KEY, CONTEXT, held(gate))
    assert storing.under_way("arm", KEY)
    assert not storing.under_way("other", KEY)
    waiting = [
        asyncio.create_task(storing.arrived("arm", KEY)),
        asyncio.create_task(storing.arrived("arm", OTHER, CONTEXT)),
        asyncio.create_task(storing.all_arrived()),
    ]
    await storing.arrived("arm", OTHER)
    await storing.arrived("other", KEY, CONTEXT)
    assert not any(task.done() for task in waiting)
    gate.set()
    await asyncio.gather(*waiting)
    assert not storing.under_way("arm", KEY)
    assert len(storing) == 0


async def test_a_slow_store_keeps_nobody() -> None:
    storing, gate = Storing(0.0), asyncio.Event()
    storing.begin("arm", KEY, b"", held(gate))
    await storing.arrived("arm", KEY)
    assert storing.under_way("arm", KEY)
    gate.set()
    await storing.close()
    assert len(storing) == 0


async def test_of_two_answers_to_a_key_the_newer_is_waited_for() -> None:
    storing, first, second = Storing(60.0), asyncio.Event(), asyncio.Event()
    storing.begin("arm", KEY, b"", held(first))
    storing.begin("arm", KEY, b"", held(second))
    first.set()
    waiting = asyncio.create_task(storing.arrived("arm", KEY))
    while len(storing) > 1:
        await asyncio.sleep(0)
    assert storing.under_way("arm", KEY)
    assert not waiting.done()
    second.set()
    await waiting
    assert not storing.under_way("arm", KEY)


async def test_of_two_answers_to_a_key_the_newer_is_stored_last() -> None:
    storing, gate, order = Storing(60.0), asyncio.Event(), list[str]()

    async def slow() -> None:
        await gate.wait()
        order.append("older")

    async def quick() -> None:
        order.append("newer")

    storing.begin("arm", KEY, b"", slow)
    storing.begin("arm", KEY, b"", quick)
    storing.begin("arm", OTHER, b"", quick)
    await storing.arrived("arm", OTHER)
    gate.set()
    await storing.close()
    assert order == ["newer", "older", "newer"]


async def test_the_answer_goes_first() -> None:
    storing, order = Storing(60.0), list[str]()

    async def store() -> None:
        order.append("stored")

    async def answer() -> None:
        order.append("answered")

    storing.begin("arm", KEY, b"", store, rounds=1)
    answering = asyncio.create_task(answer())
    await storing.arrived("arm", KEY)
    await answering
    assert order == ["answered", "stored"]


async def test_an_answer_is_given_before_it_is_stored_and_who_asks_next_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STORE_SECONDS", 60.0)
    model, gate, waits = Model(), asyncio.Event(), asyncio.Event()
    async with gateway(model) as client:
        runtime = client.gateway.runtime
        put, arrived = runtime.cache.put, runtime.fetcher.storing.arrived

        async def late(*args: Any, **named: Any) -> int:
            await gate.wait()
            return await put(*args, **named)

        async def told(*args: Any) -> None:
            waits.set()
            await arrived(*args)

        monkeypatch.setattr(runtime.cache, "put", late)
        monkeypatch.setattr(runtime.fetcher.storing, "arrived", told)
        assert (await client.ask("hello")).cache == "MISS"
        waits.clear()
        asking = asyncio.create_task(client.ask("hello"))
        await waits.wait()
        gate.set()
        assert (await asking).cache == "HIT"
    assert len(model.asked) == 1


async def test_an_answer_that_is_not_stored_yet_at_a_flush_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STORE_SECONDS", 60.0)
    monkeypatch.setattr(fetching, "ROUNDS", 10_000)
    async with gateway(Model()) as client:
        storing = client.gateway.runtime.fetcher.storing
        assert (await client.ask("hello")).cache == "MISS"
        assert len(storing) == 1
        await client.gateway.runtime.cache.flush("control")
        await storing.all_arrived()
        assert (await client.ask("hello")).cache == "MISS"


async def test_who_would_have_nothing_stored_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "STORE_SECONDS", 3600.0)
    gate = asyncio.Event()
    async with gateway(Model()) as client:
        put = client.gateway.runtime.cache.put

        async def late(*args: Any, **named: Any) -> int:
            await gate.wait()
            return await put(*args, **named)

        monkeypatch.setattr(client.gateway.runtime.cache, "put", late)
        assert (await client.ask("hello")).cache == "MISS"
        assert (await client.ask("hello", {"cache-control": "no-store"})).cache == "BYPASS"
        assert len(client.gateway.runtime.fetcher.storing) == 1
        gate.set()
