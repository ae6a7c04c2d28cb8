"""Which requests share an answer, and which never do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.gateways import Model, gateway

USER = {"role": "user", "content": "What is the capital of France?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages) or [USER], **fields}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


DIFFERENT = {
    "another system prompt": (body(system("Be brief."), USER), body(system("Be verbose."), USER)),
    "a system prompt and none": (body(system("Be brief."), USER), body()),
    "another history": (
        body({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}, USER),
        body({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}, USER),
    ),
    "roles swapped": (body(system("x"), USER), body({"role": "developer", "content": "x"}, USER)),
    "tools": (body(), body(tools=[TOOL])),
    "other tools": (
        body(tools=[TOOL]),
        body(tools=[{"type": "function", "function": {"name": "listen", "parameters": {"type": "object", "properties": {}}}}]),
    ),
    "another response format": (
        body(response_format={"type": "text"}),
        body(response_format={"type": "json_object"}),
    ),
    "temperature 0 and none": (body(temperature=0), body()),
    "seed": (body(seed=1), body(seed=2)),
    "n": (body(n=1), body(n=2)),
    "max_tokens": (body(max_tokens=100), body(max_tokens=200)),
    "stop": (body(stop=["."]), body()),
    "logit_bias": (body(logit_bias={"1": 1}), body(logit_bias={"1": 2})),
    "another model": (body(), {**body(), "model": "other"}),
    "one digit": (
        body({"role": "user", "content": "What is 12 times 13?"}),
        body({"role": "user", "content": "What is 12 times 14?"}),
    ),
    "an image": (body(said(IMAGE)), body(said({"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}))),
    "audio": (
        body(said({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})),
        body(said({"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}})),
    ),
    "a file": (
        body(said({"type": "file", "file": {"file_id": "f1"}})),
        body(said({"type": "file", "file": {"file_id": "f2"}})),
    ),
    "a field nobody knows": (body(), body(reasoning_budget=3)),
    "whole numbers beyond 64 bits": (body(seed=2**70), body(seed=2**70 + 1)),
    "white space": (body({"role": "user", "content": "a b"}), body({"role": "user", "content": "a  b"})),
    "the case of a Chinese text": (
        body({"role": "user", "content": "\u4eca\u5929\u661f\u671f\u51e0?"}),
        body({"role": "user", "content": "\u6628\u5929\u661f\u671f\u51e0?"}),
    ),
    "an emoji's colour": (
        body({"role": "user", "content": "\U0001f44d\U0001f3fb"}),
        body({"role": "user", "content": "\U0001f44d\U0001f3ff"}),
    ),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT.keys())
async def test_requests_that_differ_in_what_changes_the_answer_share_none(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    async with gateway(Model()) as client:
        first, second = [await client.post(each) for each in pair]
        assert (first.cache, second.cache) == ("MISS", "MISS")
        assert [(await client.post(each)).body for each in pair] == [first.body, second.body]


async def test_a_cached_tool_call_does_not_answer_a_request_that_forbids_tools() -> None:
    model = Model()
    model.message = lambda _, asked: {"content": "no tool"} if asked["tool_choice"] == "none" else {"tool_calls": [CALL]}
    async with gateway(model, admission={"tool_calls": True}) as client:
        asked = body(tools=[TOOL], tool_choice="auto")
        assert [(await client.post(asked)).cache for _ in range(2)] == ["MISS", "HIT"]
        without = await client.post({**asked, "tool_choice": "none"})
        assert (without.cache, without.json["choices"][0]["message"]["content"]) == ("MISS", "no tool")


async def test_the_order_of_keys_and_the_way_of_writing_do_not_matter() -> None:
    async with gateway(Model()) as client:
        asked = body(temperature=0.5, tools=[TOOL])
        first = await client.post(asked)
        turned = json.dumps(dict(reversed(asked.items())), indent=2, ensure_ascii=True).encode()
        again = await client.request("POST", "/v1/chat/completions", data=turned)
        assert (again.cache, again.body, again.headers["x-cache-entry"]) == ("HIT", first.body, first.headers["x-cache-entry"])


async def test_who_asks_and_in_which_form_does_not_matter() -> None:
    async with gateway(Model()) as client:
        await client.post(body())
        for fields in ({"user": "somebody"}, {"metadata": {"a": "b"}}, {"stream": True}, {"stream": False}):
            assert (await client.post(body(**fields))).cache == "HIT"


async def test_the_same_body_at_another_endpoint_is_another_request() -> None:
    async with gateway(Model()) as client:
        both = {"model": "m", "prompt": "x", "input": "x"}
        assert (await client.post(both, "/v1/completions")).json["object"] == "text_completion"
        second = await client.post(both, "/v1/embeddings")
        assert (second.cache, second.json["object"]) == ("MISS", "list")


async def test_embeddings_of_several_texts_are_one_entry() -> None:
    model = Model()
    async with gateway(model) as client:
        both = {"model": "m", "input": ["one", "two"]}
        first, second = [await client.post(both, "/v1/embeddings") for _ in range(2)]
        assert (first.cache, second.cache, second.body) == ("MISS", "HIT", first.body)
        assert len(second.json["data"]) == 2
        assert second.headers["x-cache-saved-tokens"] == "4"
        for other in (["two", "one"], ["one"], "one", [1, 2, 3], [[1, 2, 3]]):
            assert (await client.post({"model": "m", "input": other}, "/v1/embeddings")).cache == "MISS"


async def test_completions_are_kept_as_chats_are() -> None:
    async with gateway(Model()) as client:
        asked = {"model": "m", "prompt": ["one", "two"], "max_tokens": 5}
        replies = [await client.post(asked, "/v1/completions") for _ in range(2)]
        assert [reply.cache for reply in replies] == ["MISS", "HIT"]
        assert replies[0].body == replies[1].body


async def test_a_huge_prompt_and_an_empty_one_are_answered_and_kept() -> None:
    model = Model()
    async with gateway(model) as client:
        for text in ("x" * (1 << 20), ""):
            assert [(await client.ask(text)).cache for _ in range(2)] == ["MISS", "HIT"]
        assert [len(asked["messages"][0]["content"]) for asked in model.asked] == [1 << 20, 0]


async def test_what_the_gateway_does_not_know_reaches_the_model_as_it_is() -> None:
    model = Model()
    async with gateway(model) as client:
        await client.post(body(mystery={"deep": [1, 2.5, None]}, seed=2**70))
        assert model.asked[0]["mystery"] == {"deep": [1, 2.5, None]}
        assert model.asked[0]["seed"] == 2**70


async def test_another_generation_finds_nothing_of_the_one_before(redis_url: str, namespace: str) -> None:
    model, found = Model(), []
    for generation in ("", "2", "3", "2"):
        async with gateway(model, redis_url=redis_url, namespace=namespace, generation=generation) as client:
            found.append((await client.ask("hello")).cache)
    assert found == ["MISS", "MISS", "MISS", "HIT"]
