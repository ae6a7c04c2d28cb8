"""Two nodes, each with an arena of its own, over TCP: what one has, the other answers with, before Redis is asked."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from serving.keys import fingerprint
from serving.neighbours import dialing, peer, server
from serving.ports import free_port
from serving.runtime import Runtime
from serving.tiers.rdma import NeighbourTier
from tests.e2e.stack import chat
from tests.serving.gateways import Client, Model, running, served
from tests.waiting import until

SECRET = "shared by all the nodes"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is not there yet is tried again soon; a start, which takes the event loop of both, breaks off no exchange."""
    monkeypatch.setattr(peer, "BACKOFF", (0.05, 0.2))
    for module in (dialing, server):
        monkeypatch.setattr(module, "EXCHANGE_SECONDS", 30.0)


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@contextlib.asynccontextmanager
async def nodes(model: Model, folder: Path, *addresses: str, **settings: Any) -> AsyncIterator[list[Client]]:
    """A gateway on each node, which have found each other."""
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(model.app))
        clients = []
        for address in addresses:
            given = {
                "upstream": {"base_url": f"{url}/v1", "retries": 0},
                "memory": {"path": str(folder / address)},
                "neighbours": {"listen": address, "peers": addresses, "secret": SECRET, "transport": "tcp", "deadline": 10.0},
                "rules": {"semantic": {"enabled": False}},
                **settings,
            }
            clients.append(await stack.enter_async_context(running(given, replica=f"at-{address}")))
        for client in clients:
            tier = neighbours(client)
            await until(lambda tier=tier: set(tier.links().values()) == {"tcp"}, "the nodes to find each other")  # type: ignore[misc]
        yield clients


def neighbours(client: Client) -> NeighbourTier:
    found = client.gateway.runtime._neighbours
    assert found is not None
    return found.tier


def key(client: Client, question: str) -> bytes:
    return fingerprint(chat(question), namespace=client.gateway.runtime.settings.namespace).key


def owner(client: Client, question: str) -> str:
    """The node that owns the answer to a question."""
    return neighbours(client).owner(key(client, question))


async def all_stored(client: Client, questions: list[str]) -> None:
    """Wait until Redis has the answers: what is still on its way there is flushed by nobody."""
    store = client.gateway.runtime.cache.store
    assert store is not None
    for question in questions:
        while await store.get("control", key(client, question), touch=False) is None:
            await asyncio.sleep(0.005)


def held(client: Client, question: str) -> bool:
    """Whether the node's memory has it."""
    return client.gateway.runtime.cache.memory.get_now("control", key(client, question), touch=False) is not None


async def test_an_answer_goes_to_its_owner_and_comes_from_there(redis_url: str, namespace: str, tmp_path: Path) -> None:
    model, here, there = Model(), free_address(), free_address()
    async with nodes(model, tmp_path, here, there, redis_url=redis_url, namespace=namespace) as (one, other):
        tiers: dict[str, set[str]] = {here: set(), there: set()}
        for question in [f"question {number}" for number in range(12)]:
            assert (await one.ask(question)).cache == "MISS"
            owned = owner(one, question)
            if owned == there:
                await until(lambda question=question: held(other, question), "the owner to take it")  # type: ignore[misc]
            await all_stored(one, [question])
            tiers[owned].add((await other.ask(question)).headers["x-cache-tier"])
            await until(lambda question=question: held(other, question), "Redis to say that it has it")  # type: ignore[misc]
            assert (await other.ask(question)).headers["x-cache-tier"] == "memory", "it keeps what it has got"
        assert tiers == {here: {"neighbour"}, there: {"memory"}}
        assert len(model.asked) == 12
        counted = await other.metric('cachepilot_hits_total{arm="control",tier="neighbour"}')
        assert counted == await other.metric('cachepilot_neighbour_events_total{event="hits",transport="tcp"}') > 0
        assert await one.metric('cachepilot_neighbour_events_total{event="offered",transport="tcp"}') > 0
        for transport, count in (("tcp", 1), ("rdma", 0), ("none", 0)):
            assert await one.metric(f'cachepilot_neighbour_links{{transport="{transport}"}}') == count


async def test_what_was_flushed_or_deleted_comes_from_no_neighbour(redis_url: str, namespace: str, tmp_path: Path) -> None:
    model, here, there = Model(), free_address(), free_address()
    async with nodes(model, tmp_path, here, there, redis_url=redis_url, namespace=namespace) as (one, other):
        questions = [f"question {number}" for number in range(6)]
        for question in questions:
            assert (await one.ask(question)).cache == "MISS"
        await all_stored(one, questions)
        await other.gateway.runtime.cache.flush("control")
        for question in questions:
            assert (await other.ask(question)).cache == "MISS"
        await one.gateway.runtime.cache.delete_many("control", [key(one, questions[0])])
        await until(lambda: not held(other, questions[0]), "the other node to hear of it")
        for client in (other, one):
            assert (await client.ask(questions[0])).cache == ("MISS" if client is other else "HIT")


async def test_a_neighbour_that_has_not_heard_of_a_removal_is_not_believed(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    model, here, there = Model(), free_address(), free_address()
    async with nodes(model, tmp_path, here, there, redis_url=redis_url, namespace=namespace) as (one, other):
        questions = [f"question {number}" for number in range(12)]
        for question in questions:
            await one.ask(question)
        mine = [question for question in questions if owner(one, question) == here]
        assert mine
        await all_stored(one, questions)
        # It hears nothing more, and answers those who read its memory all the same.
        one.gateway.runtime.cache.upkeep.heard = lambda change: None  # type: ignore[method-assign]
        await other.gateway.runtime.cache.flush("control")
        assert all(held(one, question) for question in mine), "it still has them"
        for question in mine:
            assert (await other.ask(question)).cache == "MISS"
        assert await other.metric('cachepilot_neighbour_events_total{event="hits",transport="tcp"}') == 0


async def test_without_the_neighbour_redis_answers(redis_url: str, namespace: str, tmp_path: Path) -> None:
    model, here, there = Model(), free_address(), free_address()
    settings = {
        "redis_url": redis_url, "namespace": namespace, "memory": {"path": str(tmp_path / "one")},
        "neighbours": {"listen": here, "peers": [there], "secret": SECRET, "transport": "tcp"},
    }  # fmt: skip
    async with served(model.app) as url, running({**settings, "upstream": {"base_url": f"{url}/v1"}}) as client:
        for turn in range(2):
            assert (await client.ask("a question")).cache == ("HIT" if turn else "MISS")
        client.gateway.runtime.cache.memory.flush_now("control")
        assert (await client.ask("a question")).headers["x-cache-tier"] == "redis"


async def test_an_address_that_is_taken_or_no_arena_keeps_nobody_from_answering(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    model, here = Model(), free_address()
    (tmp_path / "arena").write_bytes(b"x" * 100_000)
    (tmp_path / "arena").chmod(0o600)
    settings = {
        "redis_url": redis_url, "namespace": namespace, "memory": {"path": str(tmp_path / "arena")},
        "neighbours": {"listen": here, "peers": [free_address()], "secret": SECRET, "transport": "tcp"},
    }  # fmt: skip
    async with served(model.app) as url:
        async with running({**settings, "upstream": {"base_url": f"{url}/v1"}}) as client:
            assert (await client.ask("a question")).cache == "MISS"
        with socket.create_server(("127.0.0.1", int(here.rpartition(":")[2]))):
            settings["memory"] = {"path": str(tmp_path / "another")}
            async with running({**settings, "upstream": {"base_url": f"{url}/v1"}}) as client:
                assert (await client.ask("a question")).cache == "HIT"


async def test_nodes_meet_before_they_are_asked_anything(redis_url: str, namespace: str, tmp_path: Path) -> None:
    model, here, there = Model(), free_address(), free_address()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(model.app))
        for address in (here, there):
            given = {
                "upstream": {"base_url": f"{url}/v1"},
                "redis_url": redis_url,
                "namespace": namespace,
                "memory": {"path": str(tmp_path / address)},
                "neighbours": {"listen": address, "secret": SECRET, "transport": "tcp"},
            }
            last = await stack.enter_async_context(running(given, replica=f"at-{address}"))
            if address == here:
                first = last

        async def linked() -> bool:
            return await first.metric('cachepilot_neighbour_links{transport="tcp"}') == 1

        await until(linked, "the first node to hear of the second, and to read it")


async def test_a_node_says_that_it_is_there_when_it_has_loaded_all(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Redis.from_url(redis_url)
    key = f"cachepilot:{{{namespace}}}:neighbours"
    said: list[int] = []
    load = Runtime._start_arms

    def loading(runtime: Runtime, *, shared: bool) -> None:
        said.append(store.exists(key))
        load(runtime, shared=shared)

    monkeypatch.setattr(Runtime, "_start_arms", loading)
    given = {
        "redis_url": redis_url,
        "namespace": namespace,
        "memory": {"path": str(tmp_path / "arena")},
        "neighbours": {"listen": free_address(), "secret": SECRET, "transport": "tcp"},
    }
    async with running(given):
        assert said == [0]
        assert store.exists(key) == 1
    store.close()
