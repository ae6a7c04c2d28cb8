"""A flight whose leader died goes on with an answer in another form, and so does a gateway whose Redis dies meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from serving.flights import Flight, FlightFailed, Head
from serving.recording import to_json
from serving.redis_server import RedisServer
from serving.sse import events
from tests.serving.gateways import Model, before
from tests.serving.test_gateway_streaming import stream, told
from tests.waiting import until

STREAM = Head(200, "text/event-stream; charset=utf-8")
JSON = Head(200, "application/json")
TOP = {"id": "chatcmpl-1", "created": 1, "model": "m"}
TEXT = "one two three four five "


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({**TOP, "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def answer(text: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({**TOP, "object": "chat.completion", "choices": [choice]}).encode()


@pytest.mark.parametrize("had", [b"", chunk("one "), chunk("one ") + chunk("two thr")])
async def test_a_stream_that_goes_on_with_a_json_answer_is_one_stream_to_its_end(had: bytes) -> None:
    flight = Flight("control", b"k" * 32)
    flight.begin(STREAM)
    if had:
        await flight.append(had)
    flight.resume()
    flight.begin(JSON)
    whole = answer(TEXT)
    await flight.append(whole[:40])
    assert flight.body == had
    await flight.append(whole[40:])
    flight.finish(True)
    assert flight.state == "complete"
    assert flight.body is not None
    assert flight.body.startswith(had)
    assert told(flight.body) == TEXT
    assert events(flight.body)[-1].done
    assembled = to_json(flight.body)
    assert assembled is not None
    assert assembled["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_does_not_go_on_with_half_a_json_answer_or_another_one() -> None:
    for text in (answer(TEXT)[:50], answer("something else")):
        flight = Flight("control", b"k" * 32)
        flight.begin(STREAM)
        await flight.append(chunk("one "))
        flight.resume()
        flight.begin(JSON)
        await flight.append(text)
        with pytest.raises((ValueError, RuntimeError)):
            flight.finish(True)
        assert flight.body == chunk("one ")


async def test_a_json_answer_that_had_begun_does_not_go_on_as_a_stream() -> None:
    flight = Flight("control", b"k" * 32)
    flight.begin(JSON)
    flight.resume()
    with pytest.raises(FlightFailed):
        flight.begin(STREAM)
    assert flight.taken_over


@pytest.mark.parametrize("leads", [True, False], ids=["the stream leads", "the JSON leads"])
async def test_one_who_follows_another_replica_in_another_form_gets_its_answer_where_redis_dies(
    tmp_path: Path, leads: bool
) -> None:
    model = Model()
    model.message = lambda *_: {"content": TEXT}
    model.pause.clear()
    model.hold.clear()
    with RedisServer(tmp_path) as redis:
        async with before(model, replicas=2, redis_url=redis.url, redis_deadline=0.5) as clients:
            ways: list[Any] = [lambda client: stream(client), lambda client: client.ask("hello")]
            first, second = ways if leads else ways[::-1]
            leading = asyncio.create_task(first(clients[0]))
            await until(lambda: len(model.asked) == 1, "the first to ask the model")
            following = asyncio.create_task(second(clients[1]))
            await until(lambda: len(clients[1].gateway.runtime.flights) == 1, "the second to follow")
            if leads:  # it has begun to follow, and knows that it is a stream
                await until(lambda: _begun(clients[1]), "the second to have the first's head")
            redis.__exit__(None, None, None)
            await until(lambda: len(model.asked) == 2, "the second to ask for itself")
            model.pause.set()
            model.hold.set()
            for reply in (await leading, await following):
                assert reply.status == 200, reply.body
                kind = reply.headers["content-type"]
                text = (
                    told(reply.body) if kind.startswith("text/event-stream") else reply.json["choices"][0]["message"]["content"]
                )
                assert text == TEXT


def _begun(client: Any) -> bool:
    return all(flight.head is not None for flight in client.gateway.runtime.flights._tasks)


async def test_one_who_asks_for_json_does_not_get_the_half_of_a_stream_that_another_replica_got(
    redis_url: str, namespace: str
) -> None:
    model = Model()
    model.message = lambda *_: {"content": TEXT}
    model.finish, model.done = None, False
    model.pause.clear()
    model.hold.clear()
    async with before(model, replicas=2, redis_url=redis_url, namespace=namespace) as clients:
        leading = asyncio.create_task(stream(clients[0]))
        await until(lambda: len(model.asked) == 1, "the first to ask the model")
        following = asyncio.create_task(clients[1].ask("hello"))
        await until(lambda: len(clients[1].gateway.runtime.flights) == 1 and _begun(clients[1]), "the second to follow")
        model.pause.set()
        assert b"[DONE]" not in (await leading).body
        await until(lambda: len(model.asked) == 2, "the second to ask for itself")
        model.finish, model.done = "stop", True
        model.hold.set()
        reply = await following
        assert reply.json["choices"][0]["message"]["content"] == TEXT


async def test_one_who_asks_for_a_stream_gets_one_where_another_replica_asks_for_json(redis_url: str, namespace: str) -> None:
    model = Model()
    model.message = lambda *_: {"content": TEXT}
    model.hold.clear()
    async with before(model, replicas=2, redis_url=redis_url, namespace=namespace) as clients:
        leading = asyncio.create_task(clients[0].ask("hello"))
        await until(lambda: len(model.asked) == 1, "the first to ask the model")
        following = asyncio.create_task(stream(clients[1]))
        await until(lambda: len(clients[1].gateway.runtime.flights) == 1, "the second to follow")
        model.hold.set()
        reply = await following
        assert (await leading).json["choices"][0]["message"]["content"] == TEXT
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert told(reply.body) == TEXT
        assert events(reply.body)[-1].done
    assert len(model.asked) == 1
