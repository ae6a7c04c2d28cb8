"""A client that comes back for the rest of its stream, while the answer has come another way: in another form, cut otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.sse import events
from tests.e2e.stack import Reply
from tests.serving.gateways import Client, Model, before, gateway
from tests.serving.test_gateway_streaming import back, stream, told
from tests.waiting import until

TEXT = "one two three four five "


def telling() -> Model:
    model = Model()
    model.message, model.pause_after = lambda *_: {"content": TEXT}, 3
    return model


async def beginning(client: Client, model: Model, **settings: Any) -> tuple[bytes, dict[str, str]]:
    """The first three events of a stream that was given up then, and what asks for its rest."""
    model.pause.clear()
    left = model.left
    async with client.stream("hello", **settings) as (response, chunks):
        had = [await anext(chunks) for _ in range(3)]
    await until(lambda: model.left == left + 1 and len(client.gateway.runtime.flights) == 0, "the call to be given up")
    model.pause.set()
    coming = {"x-cache-offset": "3", "if-range": response.headers["etag"]}
    return b"".join(b"data: " + data + b"\n\n" for data in had), coming


def joined(had: bytes, rest: Reply) -> bytes:
    """What the client has, by what it was told."""
    assert rest.headers["x-cache-offset"] in ("0", str(len(events(had))))
    return rest.body if rest.headers["x-cache-offset"] == "0" else had + rest.body


async def test_the_rest_of_a_stream_goes_on_to_its_end_where_the_answer_was_kept_as_json_meanwhile() -> None:
    model = telling()
    async with gateway(model, streams={"grace": 0.01}) as client:
        had, coming_back = await beginning(client, model)
        assert (await client.ask("hello")).cache == "MISS"
        rest = await stream(client, headers=coming_back)
        assert (rest.cache, rest.headers["x-cache-offset"]) == ("HIT", "3")
        assert told(had + rest.body) == TEXT
        assert rest.body.endswith(b"data: [DONE]\n\n")
        assert b'"usage"' not in rest.body
        # One who loses that as well, beyond where the first one broke off, can come back once more.
        whole = had + rest.body
        again = await stream(client, headers=back(rest, 4))
        assert (again.headers["x-cache-offset"], again.headers["etag"]) == ("4", rest.headers["etag"])
        assert whole[: events(whole)[3].end] + again.body == whole
    assert len(model.asked) == 2


async def test_one_whose_beginning_nobody_knows_gets_the_whole_of_an_answer_that_was_kept_as_json() -> None:
    model = telling()
    async with gateway(model, streams={"grace": 0.01, "keep_partial": False}) as client:
        had, coming_back = await beginning(client, model)
        await client.ask("hello")
        rest = await stream(client, headers=coming_back)
        assert told(joined(had, rest)) == TEXT
        assert rest.body.endswith(b"data: [DONE]\n\n")


async def test_one_who_comes_back_while_the_answer_is_under_way_as_json_is_told_that_it_gets_the_whole() -> None:
    model = telling()
    async with gateway(model, streams={"grace": 0.01}) as client:
        had, coming_back = await beginning(client, model)
        model.hold.clear()
        other = asyncio.create_task(client.ask("hello"))
        await until(lambda: len(model.asked) == 2, "the other to ask")
        coming = asyncio.create_task(stream(client, headers=coming_back))
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
        broken = await stream(client)
        had = events(broken.body)[:3]
        model.cut_after = None
        model.pause.clear()
        model.pause_after = 5
        other = asyncio.create_task(stream(client))
        await until(lambda: len(model.asked) == 2, "the other to ask")
        coming = asyncio.create_task(stream(client, headers=back(broken, 3)))
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


@pytest.mark.parametrize("named", ["not at all", "weakly", "by another answer", "by the usage's form"])
async def test_one_who_does_not_name_the_stream_it_has_gets_the_whole_answer_and_is_told_so(named: str) -> None:
    async with gateway(Model()) as client:
        first = await stream(client)
        other = await stream(client, stream_options={"include_usage": True})
        second = await stream(client, headers={"cache-control": "no-cache"})
        assert len({first.headers["etag"], second.headers["etag"], other.headers["etag"]}) == 3
        tag = {
            "weakly": f"W/{second.headers['etag']}", "by another answer": first.headers["etag"],
            "by the usage's form": other.headers["etag"],
        }.get(named)  # fmt: skip
        rest = await stream(client, headers={"x-cache-offset": "3", **({"if-range": tag} if tag else {})})
        assert (rest.cache, rest.headers["x-cache-offset"], rest.body) == ("HIT", "0", second.body)
        assert rest.headers["etag"] == second.headers["etag"]
        assert (await stream(client, headers=back(rest, 3))).headers["x-cache-offset"] == "3"


async def test_a_number_of_events_without_their_stream_is_no_place_in_another() -> None:
    async with gateway(Model()) as client:
        whole = await stream(client)
        rest = await stream(client, headers={"last-event-id": "3"})
        assert rest.headers["x-cache-offset"] == "0"
        assert [event.data for event in events(rest.body)] == [event.data for event in events(whole.body)]


async def test_a_stream_made_of_an_answer_kept_as_json_can_be_gone_on_with() -> None:
    async with gateway(Model()) as client:
        await client.ask("hello")
        whole = await stream(client)
        rest = await stream(client, headers=back(whole, 1))
        assert (rest.headers["x-cache-offset"], rest.body) == ("1", whole.body[events(whole.body)[0].end :])


async def test_an_answer_under_an_id_of_its_own_names_no_stream() -> None:
    async with gateway(Model()) as client:
        await stream(client)
        fresh = await stream(client, headers={"x-cache-fresh-id": "true", "last-event-id": ""})
        assert "etag" not in fresh.headers
        again = await stream(client, headers={"x-cache-fresh-id": "true", "last-event-id": str(events(fresh.body)[2].id)})
        assert again.headers["x-cache-offset"] == "0"


async def test_one_who_comes_back_to_another_replica_gets_the_rest(redis_url: str, namespace: str) -> None:
    model = Model()
    model.pause.clear()
    async with before(model, replicas=2, redis_url=redis_url, namespace=namespace) as (one, other):
        async with one.stream("hello") as (response, chunks):
            named = response.headers["etag"]
            await anext(chunks)
            async with other.stream("hello", {"x-cache-offset": "1", "if-range": named}) as (following, rest):
                assert (following.headers["x-cache-offset"], following.headers["etag"]) == ("1", named)
                model.pause.set()
                told_there = [chunk async for chunk in rest]
            told_here = [chunk async for chunk in chunks]
        assert told_there == told_here
        kept = await stream(other, headers={"x-cache-offset": "2", "if-range": named})
        assert (kept.cache, kept.headers["x-cache-offset"]) == ("HIT", "2")
        assert [event.data for event in events(kept.body)] == told_here[1:]
    assert len(model.asked) == 1


async def test_a_second_client_of_a_stream_that_broke_off_gets_its_rest_from_the_one_that_went_on() -> None:
    model = telling()
    async with gateway(model, streams={"grace": 0.01}) as client:
        had, coming_back = await beginning(client, model)
        first = await stream(client, headers=coming_back)
        second = await stream(client, headers=coming_back)
        assert (first.cache, second.cache, second.headers["x-cache-offset"]) == ("MISS", "HIT", "3")
        assert second.body == first.body
        assert told(had + second.body) == TEXT
        # More than the stream that broke off had, and under its name: nobody knows where that was cut.
        more = await stream(client, headers={**coming_back, "x-cache-offset": "4"})
        assert more.headers["x-cache-offset"] == "0"
    assert len(model.asked) == 2


async def test_a_stream_that_another_replica_went_on_with_is_not_taken_for_the_one_that_the_first_began(
    redis_url: str, namespace: str
) -> None:
    model = telling()
    model.pause.clear()
    settings = {"redis_url": redis_url, "namespace": namespace, "streams": {"keep_partial": False}}
    async with before(model, replicas=2, **settings) as (one, other):
        leading = asyncio.create_task(stream(one))
        await until(lambda: len(model.asked) == 1, "the first to lead")
        async with other.stream("hello") as (response, chunks):
            named = response.headers["etag"]
            for _ in range(3):
                await anext(chunks)
            await one.gateway.runtime.flights.close()
            await until(lambda: len(model.asked) == 2, "the other to ask instead")
            late = {"x-cache-offset": "3", "if-range": named}
            async with other.stream("hello", late) as (joined_late, rest):
                assert joined_late.headers["x-cache-offset"] == "0"
                assert joined_late.headers["etag"] != named
                model.pause.set()
                assert [chunk async for chunk in rest]
            assert [chunk async for chunk in chunks]
        kept = await stream(other)
        assert (kept.cache, kept.headers["etag"], told(kept.body)) == ("HIT", joined_late.headers["etag"], TEXT)
        assert (await stream(other, headers=late)).headers["x-cache-offset"] == "0"
        await asyncio.gather(leading, return_exceptions=True)
