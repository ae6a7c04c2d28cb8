"""OpenAI's own client, unchanged, with the gateway as its base URL: each way of asking, from the model and from the cache."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.requirements import module
from tests.serving.gateways import Client, Model, gateway
from tests.waiting import until

openai = module("openai")

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "reply", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}


@contextlib.asynccontextmanager
async def session(model: Model, **settings: Any) -> AsyncIterator[tuple[Client, Any, Any]]:
    """A gateway, and a synchronous and an asynchronous client of it."""
    async with gateway(model, **settings) as client:
        options = {"base_url": f"{client.url}/v1", "api_key": "sk-test", "max_retries": 0}
        with openai.OpenAI(**options) as plain:
            async with openai.AsyncOpenAI(**options) as awaited:
                yield client, plain, awaited


async def test_the_synchronous_and_the_asynchronous_client_get_the_same_answer() -> None:
    model = Model()
    async with session(model) as (_, plain, awaited):
        first = await asyncio.to_thread(plain.chat.completions.create, model="m", messages=MESSAGES, temperature=0)
        second = await awaited.chat.completions.create(model="m", messages=MESSAGES, temperature=0)
        assert first.model_dump() == second.model_dump()
        assert first.choices[0].message.content == "this is answer 1"
        assert second.usage.total_tokens == 8
        raw = await awaited.chat.completions.with_raw_response.create(model="m", messages=MESSAGES, temperature=0)
        assert (raw.headers["x-cache"], raw.parse().id) == ("HIT", first.id)
    assert len(model.asked) == 1
    assert model.headers[0]["authorization"] == "Bearer sk-test"


async def test_streams_are_the_same_from_the_model_from_the_cache_and_for_both_clients() -> None:
    model = Model()
    asked: Any = {"model": "m", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    async with session(model) as (_, plain, awaited):
        live = [chunk async for chunk in await awaited.chat.completions.create(**asked)]
        replayed = [chunk async for chunk in await awaited.chat.completions.create(**asked)]
        drawn = await asyncio.to_thread(lambda: list(plain.chat.completions.create(**asked)))
        assert [chunk.model_dump() for chunk in live] == [chunk.model_dump() for chunk in replayed]
        assert [chunk.model_dump() for chunk in live] == [chunk.model_dump() for chunk in drawn]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in live if chunk.choices)
        assert text == "this is answer 1 "
        assert live[-1].usage.completion_tokens == 5
        whole = await awaited.chat.completions.create(model="m", messages=MESSAGES)
        assert whole.choices[0].message.content == text
        async with awaited.chat.completions.stream(model="m", messages=MESSAGES) as helper:
            final = await helper.get_final_completion()
        assert final.choices[0].message.content == text
    assert len(model.asked) == 1


async def test_tools_are_called_from_the_model_and_from_the_cache_and_their_results_make_another_question() -> None:
    model = Model()

    def message(_: int, asked: dict[str, Any]) -> dict[str, Any]:
        return {"content": "It rains."} if asked["messages"][-1]["role"] == "tool" else {"tool_calls": [CALL]}

    model.message = message
    async with session(model, admission={"tool_calls": True}) as (_, plain, awaited):
        for _ in range(2):
            reply = await awaited.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS)
            call = reply.choices[0].message.tool_calls[0]
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
        stream = await awaited.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS, stream=True)
        streamed = [chunk async for chunk in stream]
        names = [call.function.name for chunk in streamed for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        assert names == ["weather"]
        result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
        told = [*MESSAGES, reply.choices[0].message.model_dump(exclude_none=True), result]
        for _ in range(2):
            reply = await asyncio.to_thread(plain.chat.completions.create, model="m", messages=told, tools=TOOLS)
            assert reply.choices[0].message.content == "It rains."
    assert len(model.asked) == 2


async def test_a_response_format_reaches_the_model_and_parsed_answers_come_from_the_cache() -> None:
    model = Model()
    model.message = lambda *_: {"content": '{"ok": true}'}
    async with session(model) as (_, _, awaited):
        for _ in range(2):
            reply = await awaited.chat.completions.create(model="m", messages=MESSAGES, response_format=SCHEMA)
            assert json.loads(reply.choices[0].message.content) == {"ok": True}
        await awaited.chat.completions.create(model="m", messages=MESSAGES)
    assert [asked.get("response_format") for asked in model.asked] == [SCHEMA, None]


async def test_embeddings_completions_models_and_responses_work() -> None:
    model = Model()
    async with session(model) as (_, plain, awaited):
        for _ in range(2):
            made = await awaited.embeddings.create(model="m", input=["one", "two"], encoding_format="float")
            assert [item.embedding for item in made.data] == [[1.0, 0.0], [1.0, 1.0]]
        for _ in range(2):
            text = await asyncio.to_thread(plain.completions.create, model="m", prompt="Once")
            assert text.choices[0].text == "text 2"
        assert [card async for card in awaited.models.list()] == []
        reply = await awaited.responses.create(model="m", input="hello")
        assert reply.id == "resp-3"


async def test_cache_directives_go_through_the_clients_own_options() -> None:
    model = Model()
    async with session(model) as (_, _, awaited):
        create = awaited.chat.completions.with_raw_response.create
        await create(model="m", messages=MESSAGES)
        body = await create(model="m", messages=MESSAGES, extra_body={"cache": {"no-store": True}})
        header = await create(model="m", messages=MESSAGES, extra_headers={"cache-control": "no-cache"})
        assert (body.headers["x-cache"], header.headers["x-cache"]) == ("BYPASS", "REFRESH")
    assert all("cache" not in asked for asked in model.asked)


async def test_errors_are_the_exceptions_that_the_client_knows() -> None:
    model = Model()
    model.status, model.error = 429, b'{"error":{"message":"slow down","type":"rate","param":null,"code":"rate_limit"}}'
    async with session(model) as (_, plain, awaited):
        with pytest.raises(openai.RateLimitError, match="slow down"):
            await awaited.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.RateLimitError, match="slow down"):
            await asyncio.to_thread(plain.chat.completions.create, model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.BadRequestError, match="messages: expected a list"):
            await awaited.chat.completions.create(model="m", messages=[])
        model.status, model.cut_after = 200, 3
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in await awaited.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                pass


async def test_a_client_that_closes_its_stream_lets_go_of_the_model() -> None:
    model = Model()
    model.pause.clear()
    async with session(model, streams={"grace": 0.01}) as (client, _, awaited):
        stream = await awaited.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await until(lambda: client.gateway.runtime.upstream.inflight == 0, "the call to be given up")
        await until(lambda: model.left == 1, "the model to see that nobody waits")
