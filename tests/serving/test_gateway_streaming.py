"""Streams: kept as they pass, replayed to the byte, shared while they run, gone on with where they broke off."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serving.sse import EventParser, events
from tests.e2e.stack import Reply, chat
from tests.serving.gateways import Client, Model, before, gateway
from tests.waiting import until


async def stream(client: Client, text: str = "hello", headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return await client.request("POST", "/v1/chat/completions", json=chat(text, stream=True, **fields), headers=headers)


def back(before: Reply, had: int) -> dict[str, str]:
    """What one sends who comes back with so many events of an answer."""
    return {"x-cache-offset": str(had), "if-range": before.headers["etag"]}


def told(body: bytes) -> str:
    """What a stream says."""
    parser = EventParser()
    chunks = [event.data for event in parser.feed(body) if not event.done]

    parsed = [json.loads(chunk) for chunk in chunks]
    return "".join(choice["delta"].get("content") or "" for chunk in parsed for choice in chunk.get("choices", []))


async def test_a_stream_is_replayed_to_the_byte_with_the_same_events() -> None:
    model = Model()
    async with gateway(model) as client:
        first, second = [await stream(client, stream_options={"include_usage": True}) for _ in range(2)]
        assert (first.cache, second.cache) == ("MISS", "HIT")
        assert second.body == first.body
        assert second.headers["content-type"].startswith("text/event-stream")
        assert len(events(second.body)) == len(events(first.body)) == 8
        assert b'"usage": {"prompt_tokens": 3' in second.body
        assert second.body.endswith(b"data: [DONE]\n\n")
    assert len(model.asked) == 1


async def test_a_client_that_did_not_ask_for_the_usage_does_not_see_it_although_the_gateway_knows_it() -> None:
    model = Model()
    async with gateway(model) as client:
        first, second = [await stream(client) for _ in range(2)]
        assert model.asked[0]["stream_options"] == {"include_usage": True}
        assert b"prompt_tokens" not in first.body
        assert second.body == first.body
        assert second.headers["x-cache-saved-tokens"] == "8"
        assert await client.metric('cachepilot_upstream_tokens_total{arm="control",cause="miss",kind="output"}') == 5
        asked = await stream(client, stream_options={"include_usage": True})
        assert (asked.cache, len(events(asked.body))) == ("HIT", len(events(first.body)) + 1)


async def test_the_model_is_not_asked_for_the_usage_where_the_operator_would_not_have_that() -> None:
    model = Model()
    async with gateway(model, streams={"usage": False}) as client:
        await stream(client)
    assert "stream_options" not in model.asked[0]


async def test_a_stream_and_its_json_are_one_entry() -> None:
    model = Model()
    async with gateway(model) as client:
        first = await stream(client, "one")
        whole = await client.ask("one")
        assert (whole.cache, whole.headers["content-type"]) == ("HIT", "application/json")
        assert whole.json["choices"][0]["message"]["content"] == told(first.body)
        assert whole.json["object"] == "chat.completion"
        assert whole.json["usage"]["completion_tokens"] == 5
        kept = await client.ask("two")
        played = await stream(client, "two")
        assert (played.cache, told(played.body)) == ("HIT", kept.json["choices"][0]["message"]["content"])
        assert played.body.endswith(b"data: [DONE]\n\n")
    assert len(model.asked) == 2


async def test_reasoning_and_refusal_survive_replay_in_both_forms() -> None:
    model = Model()
    model.message = lambda *_: {"reasoning_content": "let me think", "refusal": "I will not", "content": "sorry"}
    async with gateway(model) as client:
        first, again = [await stream(client) for _ in range(2)]
        assert again.body == first.body
        assert b"reasoning_content" in again.body
        message = (await client.ask("hello")).json["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["refusal"].strip()) == ("let me think", "I will not")


async def test_tool_calls_of_a_stream_survive_as_json() -> None:
    model = Model()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    model.message, model.finish = lambda *_: {"tool_calls": [call]}, "tool_calls"
    async with gateway(model, admission={"tool_calls": True}) as client:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        await stream(client, tools=tools)
        again = await client.ask("hello", tools=tools)
        assert (again.cache, again.json["choices"][0]["message"]["tool_calls"]) == ("HIT", [call])


@pytest.mark.parametrize("how", ["cut off", "no end", "no finish_reason"])
async def test_a_stream_that_is_not_whole_is_never_served_as_an_answer(how: str) -> None:
    model = Model()
    model.cut_after, model.done = (3, True) if how == "cut off" else (None, how != "no end")
    model.finish = None if how == "no finish_reason" else "stop"
    async with gateway(model) as client:
        broken = await stream(client)
        assert broken.cache == "MISS"
        if how == "cut off":
            assert b'"code":"upstream_interrupted"' in broken.body
            assert b"[DONE]" not in broken.body
        model.cut_after, model.done, model.finish = None, True, "stop"
        for form in (stream, Client.ask):
            reply = await form(client, "hello")
            assert reply.cache == ("MISS" if form is stream else "HIT")
            assert b"answer 2" in reply.body or "answer 2" in told(reply.body)
    assert len(model.asked) == 2


async def test_twenty_identical_streams_are_one_call_and_those_who_join_late_get_all() -> None:
    model = Model()
    model.pause.clear()
    async with gateway(model) as client:
        async with client.stream("hello") as (response, chunks):
            assert response.headers["x-cache"] == "MISS"
            await anext(chunks)
            others = [asyncio.create_task(stream(client)) for _ in range(18)]
            whole = asyncio.create_task(client.ask("hello"))
            runtime = client.gateway.runtime
            name = 'cachepilot_cacheable_lookups_total{arm="control"}'
            await until(lambda: _at_least(client, name, 20), "all to have come")
            assert len(runtime.flights) == 1
            model.pause.set()
            rest = [chunk async for chunk in chunks]
        replies = await asyncio.gather(*others)
        assert {reply.cache for reply in replies} == {"COLLAPSED"}
        assert len({reply.body for reply in replies}) == 1
        assert replies[0].body.count(b"data: ") == len(rest) + 1
        assert told(replies[0].body) == (await whole).json["choices"][0]["message"]["content"]
        assert (await whole).cache == "COLLAPSED"
    assert len(model.asked) == 1


async def _at_least(client: Client, name: str, count: int) -> bool:
    return await client.metric(name) >= count


async def test_twenty_identical_misses_over_two_replicas_are_one_call(redis_url: str, namespace: str) -> None:
    model = Model()
    model.pause.clear()
    async with before(model, replicas=2, redis_url=redis_url, namespace=namespace) as clients:
        asked = [asyncio.create_task(stream(clients[number % 2])) for number in range(20)]

        async def come() -> bool:
            name = 'cachepilot_cacheable_lookups_total{arm="control"}'
            return sum([await client.metric(name) for client in clients]) >= 20

        await until(come, "all to have come")
        model.pause.set()
        replies = await asyncio.gather(*asked)
        assert len({reply.body for reply in replies}) == 1
        assert sorted(str(reply.cache) for reply in replies) == ["COLLAPSED"] * 19 + ["MISS"]
    assert len(model.asked) == 1


async def test_the_upstream_is_given_up_when_the_last_client_has_gone() -> None:
    model = Model()
    model.pause.clear()
    async with gateway(model, streams={"grace": 0.01, "keep_partial": False}) as client:
        async with client.stream("hello") as (_, chunks):
            await anext(chunks)
            async with client.stream("hello") as (response, others):
                assert response.headers["x-cache"] == "COLLAPSED"
                await anext(others)
            assert model.left == 0
        await until(lambda: model.left == 1, "the call to be given up")
        await until(lambda: client.gateway.runtime.upstream.inflight == 0, "nothing to be under way")
        model.pause.set()
        assert (await stream(client)).cache == "MISS"


async def test_a_client_that_leaves_takes_the_answer_from_nobody_else() -> None:
    model = Model()
    model.pause.clear()
    async with gateway(model, streams={"grace": 0.0}) as client:
        async with client.stream("hello") as (_, chunks):
            await anext(chunks)
            other = asyncio.create_task(stream(client))
            name = 'cachepilot_cacheable_lookups_total{arm="control"}'
            await until(lambda: _at_least(client, name, 2), "the other to have come")
        model.pause.set()
        assert "answer 1" in told((await other).body)
    assert len(model.asked) == 1


@pytest.mark.parametrize("header", ["last-event-id", "x-cache-offset"])
async def test_one_who_comes_back_gets_the_rest_of_a_kept_stream(header: str) -> None:
    async with gateway(Model()) as client:
        whole = await stream(client, headers={"last-event-id": ""} if header == "last-event-id" else {})
        third, named = events(whole.body)[2], whole.headers["etag"]
        asked = {header: str(third.id)} if header == "last-event-id" else {header: "3", "if-range": named}
        rest = await stream(client, headers=asked)
        assert (rest.cache, rest.headers["x-cache-offset"], rest.body) == ("HIT", "3", whole.body[third.end :])
        assert rest.headers["etag"] == named
        if header == "last-event-id":
            count = len(events(whole.body))
            assert [event.id for event in events(whole.body)] == [f"{number + 1}-{named[1:-1]}" for number in range(count)]
        else:
            assert all(event.id is None for event in events(whole.body))


async def test_one_who_comes_back_joins_the_stream_that_still_runs() -> None:
    model = Model()
    model.pause.clear()
    async with gateway(model) as client:
        async with client.stream("hello") as (response, chunks):
            await anext(chunks)
        coming = {"x-cache-offset": "1", "if-range": response.headers["etag"]}
        async with client.stream("hello", coming) as (response, chunks):
            assert (response.headers["x-cache"], response.headers["x-cache-offset"]) == ("COLLAPSED", "1")
            model.pause.set()
            rest = [chunk async for chunk in chunks]
        whole = await stream(client)
        assert [event.data for event in events(whole.body)][1:] == rest
    assert len(model.asked) == 1


async def test_an_interrupted_stream_goes_on_where_the_model_says_the_same_again() -> None:
    model = Model()
    model.message = lambda *_: {"content": "one two three four five"}
    model.cut_after = 4
    async with gateway(model) as client:
        broken = await stream(client)
        had = events(broken.body)[:-1]  # the last one says that it broke off
        model.cut_after = None
        rest = await stream(client, headers=back(broken, len(had)))
        assert rest.headers["x-cache-offset"] == str(len(had))
        assert told(broken.body[: had[-1].end] + rest.body) == "one two three four five "
        assert rest.body.endswith(b"data: [DONE]\n\n")
        again = await stream(client)
        assert (again.cache, told(again.body)) == ("HIT", "one two three four five ")


async def test_a_stream_that_was_given_up_goes_on_for_one_who_comes_back_later() -> None:
    model = Model()
    model.message, model.pause_after = lambda *_: {"content": "one two three four five"}, 3
    model.pause.clear()
    async with gateway(model, streams={"grace": 0.01}) as client:
        async with client.stream("hello") as (response, chunks):
            had = [await anext(chunks) for _ in range(3)]
        await until(lambda: model.left == 1 and len(client.gateway.runtime.flights) == 0, "the call to be given up and kept")
        model.pause.set()
        rest = await stream(client, headers={"x-cache-offset": "3", "if-range": response.headers["etag"]})
        assert rest.headers["x-cache-offset"] == "3"
        assert told(b"".join(b"data: " + data + b"\n\n" for data in had) + rest.body) == "one two three four five "
    assert len(model.asked) == 2


async def test_an_interrupted_stream_ends_in_an_error_where_the_model_says_something_else() -> None:
    model = Model()
    model.cut_after = 6
    async with gateway(model) as client:
        broken = await stream(client)
        had = events(broken.body)[:-1]
        model.cut_after = None
        rest = await stream(client, headers=back(broken, len(had)))
        assert b'"error"' in rest.body
        assert b"[DONE]" not in rest.body
        assert "answer" not in told(broken.body[: had[-1].end]) or "2" not in told(rest.body.partition(b'{"error"')[0])
        assert "answer 3" in told((await stream(client)).body)


async def test_an_interrupted_stream_is_continued_by_a_model_that_can() -> None:
    model = Model()

    def message(_: int, asked: dict[str, Any]) -> dict[str, Any]:
        return {"content": "four five" if asked.get("continue_final_message") else "one two three four five"}

    model.message, model.cut_after = message, 4
    async with gateway(model, streams={"resume": "continue"}) as client:
        broken = await stream(client)
        had = events(broken.body)[:-1]
        model.cut_after = None
        rest = await stream(client, headers=back(broken, len(had)))
        assert told(broken.body[: had[-1].end] + rest.body) == "one two three four five "
        assert model.asked[1]["messages"][-1] == {"role": "assistant", "content": "one two three "}
        assert (await stream(client)).cache == "MISS"


async def test_one_whose_beginning_nobody_knows_gets_the_whole_answer_and_is_told_so() -> None:
    async with gateway(Model()) as client:
        reply = await stream(client, headers={"x-cache-offset": "5"})
        assert (reply.cache, reply.headers["x-cache-offset"]) == ("MISS", "0")
        assert "answer 1" in told(reply.body)


@pytest.mark.parametrize("offset", ["-1", "1.5", "9" * 5000])
async def test_an_offset_that_is_no_number_of_events_is_refused(offset: str) -> None:
    async with gateway(Model()) as client:
        reply = await stream(client, headers={"x-cache-offset": offset})
        assert (reply.status, reply.json["error"]["param"]) == (400, "x-cache-offset")


async def test_a_model_that_cannot_stream_answers_as_it_can() -> None:
    model = Model()
    model.status, model.error = 400, b'{"error":{"message":"no streams","type":"t","param":"stream","code":null}}'
    async with gateway(model) as client:
        reply = await stream(client)
        assert (reply.status, reply.body, reply.headers["content-type"]) == (400, model.error, "application/json")
