"""A client that comes back for the rest of its stream, while the answer has come another way: in another form, cut otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

from serving.sse import events
from tests.e2e.stack import Reply
from tests.serving.gateways import Client, Model, gateway
from tests.serving.test_gateway_streaming import stream, told
from tests.waiting import until

TEXT = "one two three four five "


def telling() -> Model:
    model = Model()
    model.message, model.pause_after = lambda *_: {"content": TEXT}, 3
    return model


async def beginning(client: Client, model: Model, **settings: Any) -> bytes:
    """The first three events of a stream that was given up then."""
    model.pause.clear()
    left = model.left
    async with client.stream("hello", **settings) as (_, chunks):
        had = [await anext(chunks) for _ in range(3)]
    await until(lambda: model.left == left + 1 and len(client.gateway.runtime.flights) == 0, "the call to be given up")
    model.pause.set()
    return b"".join(b"data: " + data + b"\n\n" for data in had)


def joined(had: bytes, rest: Reply) -> bytes:
    """What the client has, by what it was told."""
    assert rest.headers["x-cache-offset"] in ("0", str(len(events(had))))
    return rest.body if rest.headers["x-cache-offset"] == "0" else had + rest.body


async def test_the_rest_of_a_stream_goes_on_to_its_end_where_the_answer_was_kept_as_json_meanwhile() -> None:
    model = telling()
    async with gateway(model, streams={"grace": 0.01}) as client:
        had = await beginning(client, model)
        assert (await client.ask("hello")).cache == "MISS"
        for usage in (False, True):
            options: Any = {"stream_options": {"include_usage": True}} if usage else {}
            rest = await stream(client, headers={"x-cache-offset": "3"}, **options)
            assert (rest.cache, rest.headers["x-cache-offset"]) == ("HIT", "3")
            assert told(had + rest.body) == TEXT
            assert rest.body.endswith(b"data: [DONE]\n\n")
            assert (b'"usage"' in rest.body) == usage
    assert len(model.asked) == 2


async def test_one_whose_beginning_nobody_knows_gets_the_whole_of_an_answer_that_was_kept_as_json() -> None:
    model = telling()
    async with gateway(model, streams={"grace": 0.01, "keep_partial": False}) as client:
        had = await beginning(client, model)
        await client.ask("hello")
        rest = await stream(client, headers={"x-cache-offset": "3"})
        assert told(joined(had, rest)) == TEXT
        assert rest.body.endswith(b"data: [DONE]\n\n")


async def test_one_who_comes_back_while_the_answer_is_under_way_as_json_is_told_that_it_gets_the_whole() -> None:
    model = telling()
    async with gateway(model, streams={"grace": 0.01}) as client:
        had = await beginning(client, model)
        model.hold.clear()
        other = asyncio.create_task(client.ask("hello"))
        await until(lambda: len(model.asked) == 2, "the other to ask")
        coming = asyncio.create_task(stream(client, headers={"x-cache-offset": "3"}))
        name = 'cachepilot_cacheable_lookups_total{arm="control"}'

        async def come() -> bool:
            return await client.metric(name) >= 3

        await until(come, "the client to have come back")
        model.hold.set()
        assert told(joined(had, await coming)) == TEXT
        assert (await other).json["choices"][0]["message"]["content"] == TEXT


async def test_one_who_comes_back_while_another_answer_is_under_way_is_not_given_that_ones_rest() -> None:
    model = Model()
    model.message = lambda number, _: {"content": f"one{number} two{number} three{number} four{number} five{number}"}
    async with gateway(model) as client:
        model.cut_after = 4
        had = events((await stream(client)).body)[:3]
        model.cut_after = None
        model.pause.clear()
        model.pause_after = 5
        other = asyncio.create_task(stream(client))
        await until(lambda: len(model.asked) == 2, "the other to ask")
        coming = asyncio.create_task(stream(client, headers={"x-cache-offset": "3"}))
        name = 'cachepilot_cacheable_lookups_total{arm="control"}'

        async def come() -> bool:
            return await client.metric(name) >= 3

        await until(come, "the client to have come back")
        model.pause.set()
        rest = await coming
        assert len(had) == 3
        assert rest.headers["x-cache-offset"] == "0"
        assert rest.body == (await other).body
        assert told(rest.body) == "one2 two2 three2 four2 five2 "
