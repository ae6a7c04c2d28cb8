"""The soak's troubles are real: Redis is gone and comes back where it was, the embedder hangs, replicas say what they hold."""

from __future__ import annotations

import asyncio
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
            with redis.Redis.from_url(url, socket_timeout=0.3) as client:
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
        gate.set()
        assert await embedder.embed("two") == b"\x01" * 384
    finally:
        gate.set()
        await embedder.close()


async def test_a_replica_says_which_of_the_products_tasks_flights_and_calls_are_under_way() -> None:
    model = Model()
    model.hold.clear()
    async with served(model.app) as url:
        settings = GatewaySettings.model_validate({"upstream": {"base_url": f"{url}/v1"}, "streams": {"grace": 0.01}})
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
