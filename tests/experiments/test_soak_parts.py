"""The soak's troubles are real: Redis is gone and comes back where it was, the embedder hangs, replicas say what they hold."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import redis

from experiments.soak.replica import STATE, SoakedGateway, hang_while
from experiments.soak.run import replica_states
from experiments.soak.stack import RestartedRedis
from serving.embedding import Embedder, EmbeddingUnavailable
from serving.metrics import PrometheusSink
from serving.settings import GatewaySettings
from tests.serving.gateways import Client, Model, served
from tests.waiting import until


def test_redis_is_killed_and_comes_back_empty_at_its_address_and_answers_nothing_while_it_is_frozen(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        server = RestartedRedis(tmp_path, thread)
        url = server.url
        try:
            with redis.Redis.from_url(url, socket_timeout=1.5) as client:
                client.set("a", "b")
                server.freeze(True)
                with pytest.raises(redis.exceptions.TimeoutError):
                    client.get("a")
                server.freeze(False)
                assert client.get("a") == b"b"
                server.kill()
                with pytest.raises(redis.exceptions.ConnectionError):
                    client.get("a")
                server.start()
                assert server.url == url
                assert client.get("a") is None
        finally:
            server.end()
        server.end()


async def test_the_embedder_hangs_for_as_long_as_it_is_told_to_and_goes_on_then() -> None:
    gate = threading.Event()
    embedder = Embedder(deadline=0.2)
    embedder._encode = lambda texts: np.ones((len(texts), 384), np.int8)  # type: ignore[method-assign]
    hang_while(embedder, lambda: not gate.is_set())
    try:
        with pytest.raises(EmbeddingUnavailable):
            await embedder.embed("one")
        embedder._deadline = 60.0
        gate.set()
        assert await embedder.embed("two") == b"\x01" * 384
    finally:
        gate.set()
        await embedder.close()


async def test_a_replica_says_which_of_the_products_tasks_flights_and_calls_are_under_way() -> None:
    model = Model()
    model.hold.clear()
    async with served(model.app) as url:
        settings = GatewaySettings.model_validate(
            {"upstream": {"base_url": f"{url}/v1"}, "streams": {"grace": 0.01}, "memory": {"shared": False}}
        )
        gateway = SoakedGateway(settings, replica="r7", sink=PrometheusSink())
        async with served(gateway, lifespan="on") as at, aiohttp.ClientSession() as session:
            client = Client(gateway, at, session)

            async def state() -> Any:
                return (await client.request("GET", STATE)).json

            before = await state()
            assert (before["replica"], before["pid"], before["flights"], before["calls"]) == ("r7", os.getpid(), 0, 0)
            asking = asyncio.create_task(client.ask("hello"))
            await until(lambda: len(model.asked) == 1, "the model to be asked")
            during = await state()
            assert (during["flights"], during["calls"]) == (1, 1)
            assert sum(during["tasks"].values()) > sum(before["tasks"].values())
            model.hold.set()
            assert (await asking).cache == "MISS"
            await until(lambda: gateway.state() == before, "nothing to be left")


async def answered(status: int, body: bytes) -> str:
    """What is said where the ingress answers the question for a replica's state like this."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    async with served(app) as url, aiohttp.ClientSession() as session:
        with pytest.raises(RuntimeError) as raised:
            await replica_states(session, url, seconds=0.2)
    return str(raised.value)


@pytest.mark.parametrize(
    ("status", "body"), [(404, b'{"error": {"code": "not_found"}}'), (200, b'{"status": "ok"}'), (200, b"hello"), (200, b"[]")]
)
async def test_what_is_no_replica_of_the_soak_is_told_with_what_it_answered(status: int, body: bytes) -> None:
    said = await answered(status, body)
    assert f"status {status}, {body.decode()!r}" in said
    assert "something else listens there" in said


async def test_an_ingress_that_is_not_ready_is_asked_again_and_told_in_the_end() -> None:
    said = await answered(503, b"no replica")
    assert "expected two replicas" in said
    assert "status 503, 'no replica'" in said


async def test_both_replicas_are_waited_for() -> None:
    names = iter(["r1", "r1"] + ["r2", "r1"] * 1000)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        state = {"replica": next(names), "pid": 1, "tasks": {}, "flights": 0, "calls": 0}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(state).encode()})

    async with served(app) as url, aiohttp.ClientSession() as session:
        assert set(await replica_states(session, url)) == {"r1", "r2"}
