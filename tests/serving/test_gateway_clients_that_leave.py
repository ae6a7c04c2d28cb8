"""A client that goes away before its answer's end leaves a line of the access log, and no trace in any figure about answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.serving.gateways import Client, Model, gateway
from tests.waiting import until


def lines(folder: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for path in folder.iterdir() for line in path.read_bytes().splitlines()]


async def leave(client: Client, model: Model, *, stream: bool) -> None:
    if stream:
        async with client.stream("hello") as (_, events):
            await anext(events)
        return
    asking = asyncio.create_task(client.ask("hello"))
    await until(lambda: len(model.asked) == 1, "the model to be asked")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_client_left_has_its_line_and_counts_for_itself(stream: bool, tmp_path: Path) -> None:
    model = Model()
    model.hold.clear()
    model.pause.clear()
    async with gateway(model, access_log=str(tmp_path), streams={"grace": 60.0}) as client:

        async def counted() -> bool:
            return await client.metric('cachepilot_clients_left_total{arm="control"}') == 1

        await leave(client, model, stream=stream)
        await until(counted, "the client to be missed")
        model.hold.set()
        model.pause.set()
        assert (await client.ask("hello", stream=stream)).status == 200
        text = (await client.request("GET", "/metrics")).body.decode()
        assert 'cachepilot_requests_total{arm="control",outcome="left"}' not in text
        assert len(model.asked) == 1
    left, stayed = sorted(lines(tmp_path), key=lambda line: float(line["at"]))
    assert (left["outcome"], left["status"], left["size"], left["rule"]) == ("left", 499, 0, "miss")
    assert (left["key"], stayed["outcome"], stayed["status"]) == (stayed["key"], "hit", 200)
