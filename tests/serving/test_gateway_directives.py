"""What callers and operators ask of the cache, and what each answer says of itself."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from tests.serving.gateways import Client, Model, before, gateway
from tests.waiting import until

TTL = {"control": {"knobs": {"ttl": 60.0}}}


def later(client: Client, seconds: float) -> None:
    """Set the gateway's clock forward."""
    now = time.time()
    client.gateway.runtime.clock = lambda: now + seconds


async def test_no_store_neither_reads_nor_writes() -> None:
    model = Model()
    async with gateway(model) as client:
        first = await client.ask("hello", {"cache-control": "no-store"})
        assert (first.cache, first.headers["cache-status"].split("; ")[1]) == ("BYPASS", "fwd=bypass")
        assert (await client.ask("hello")).cache == "MISS"
        assert (await client.ask("hello", {"cache-control": "no-store"})).cache == "BYPASS"
        assert (await client.ask("hello", cache={"no-store": True})).cache == "BYPASS"
        assert await client.metric('cachepilot_requests_total{arm="control",outcome="bypass"}') == 3
        assert await client.metric('cachepilot_cacheable_lookups_total{arm="control"}') == 1
    assert len(model.asked) == 4
    assert all("cache" not in asked for asked in model.asked)


async def test_no_cache_asks_anew_and_replaces_what_is_kept() -> None:
    model = Model()
    async with gateway(model) as client:
        await client.ask("hello")
        fresh = await client.ask("hello", {"cache-control": "no-cache"})
        assert (fresh.cache, fresh.headers["cache-status"].split("; ")[1]) == ("REFRESH", "fwd=request")
        again = await client.ask("hello")
        assert (again.cache, again.body) == ("HIT", fresh.body)
        assert b"answer 2" in again.body


async def test_max_age_and_min_fresh_refuse_what_is_too_old() -> None:
    async with gateway(Model(), arms=TTL, rules={"ttl_jitter": 0.0}) as client:
        await client.ask("hello")
        later(client, 30.0)
        for given in ({"cache-control": "max-age=40"}, {"cache-control": "min-fresh=20"}, {"cache-control": "max-age=40, foo=1"}):
            assert (await client.ask("hello", given)).cache == "HIT"
        old = await client.ask("hello", {"cache-control": "max-age=20"})
        assert (old.cache, old.headers["x-cache-rule"]) == ("MISS", "max_age")
        later(client, 60.0)
        assert (await client.ask("hello", {"cache-control": "min-fresh=40"})).headers["x-cache-rule"] == "min_fresh"


async def test_only_if_cached_never_reaches_the_model() -> None:
    model = Model()
    async with gateway(model) as client:
        nothing = await client.ask("hello", {"cache-control": "only-if-cached"})
        assert (nothing.status, nothing.json["error"]["code"]) == (504, "only_if_cached")
        assert model.asked == []
        await client.ask("hello")
        assert (await client.ask("hello", {"cache-control": "only-if-cached"})).cache == "HIT"


async def test_a_callers_ttl_is_kept_within_the_operators_bounds() -> None:
    async with gateway(Model(), arms=TTL, rules={"ttl_jitter": 0.0}, callers={"min_ttl": 10.0}) as client:
        for text, ttl in (("short", 20), ("shorter", 1), ("long", 10_000)):
            await client.ask(text, cache={"ttl": ttl})
        for seconds, kept in ((9.0, "short shorter long"), (19.0, "short long"), (59.0, "long"), (61.0, "")):
            later(client, seconds)
            given = {"cache-control": "only-if-cached"}
            assert [
                text for text in ("short", "shorter", "long") if (await client.ask(text, given)).cache == "HIT"
            ] == kept.split()


async def test_a_ttl_of_none_is_for_ever() -> None:
    async with gateway(Model(), arms={"control": {"knobs": {"ttl": None}}}) as client:
        await client.ask("hello")
        later(client, 1e9)
        reply = await client.ask("hello")
        assert (reply.cache, "ttl=" in reply.headers["cache-status"]) == ("HIT", False)


@pytest.mark.parametrize("extends", [False, True])
async def test_a_hit_extends_the_ttl_only_where_that_is_configured(extends: bool, redis_url: str, namespace: str) -> None:
    settings: dict[str, Any] = {"redis_url": redis_url, "namespace": namespace}
    async with gateway(Model(), arms=TTL, rules={"hit_extends_ttl": extends, "ttl_jitter": 0.0}, **settings) as client:
        await client.ask("hello")
        later(client, 40.0)
        assert (await client.ask("hello")).cache == "HIT"
        later(client, 80.0)
        reply = await client.ask("hello")
        assert reply.cache == ("HIT" if extends else "MISS")
        if extends:
            assert int(reply.headers["age"]) >= 79  # it is no younger for that


async def test_namespaces_of_a_caller_share_nothing() -> None:
    async with gateway(Model()) as client:
        for namespace in ("a", "b"):
            assert [(await client.ask("hello", cache={"namespace": namespace})).cache for _ in range(2)] == ["MISS", "HIT"]
        assert (await client.ask("hello")).cache == "MISS"


async def test_directives_are_not_heeded_where_the_operator_would_not_have_that() -> None:
    async with gateway(Model(), callers={"directives": False, "namespaces": False}) as client:
        await client.ask("hello")
        assert (await client.ask("hello", {"cache-control": "no-store"})).cache == "HIT"
        refused = await client.ask("hello", cache={"namespace": "a"})
        assert (refused.status, refused.json["error"]["param"]) == (400, "cache.namespace")


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({}, {"cache": {"ttl": "soon"}}, "cache.ttl"),
        ({}, {"cache": {"nonsense": 1}}, "cache.nonsense"),
        ({"x-cache-threshold": "2"}, {}, "x-cache-threshold"),
    ],
)
async def test_a_directive_that_cannot_be_understood_is_a_400(
    headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    async with gateway(Model()) as client:
        reply = await client.ask("hello", headers, **fields)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)


async def test_what_is_past_its_ttl_is_served_while_it_is_refreshed_once() -> None:
    model = Model()
    rules = {"stale_while_revalidate": 30.0, "ttl_jitter": 0.0}
    async with gateway(model, arms=TTL, rules=rules) as client:
        first = await client.ask("hello")
        later(client, 70.0)
        model.hold.clear()
        stale = [await client.ask("hello") for _ in range(3)]
        assert {(reply.cache, reply.body) for reply in stale} == {("STALE", first.body)}
        assert "; hit; ttl=-" in stale[0].headers["cache-status"]
        model.hold.set()

        async def refreshed() -> bool:
            return b"answer 2" in (await client.ask("hello")).body

        await until(refreshed, "the entry to be refreshed")
        assert (await client.ask("hello")).cache == "HIT"
        assert await client.metric('cachepilot_upstream_tokens_total{arm="control",cause="refresh",kind="output"}') == 5
        later(client, 200.0)
        assert (await client.ask("hello")).cache == "MISS"
    assert len(model.asked) == 3


@pytest.mark.parametrize(("made", "met"), [(20.0, None), (20.0, 45.0), (None, 20.0)])
async def test_what_is_refreshed_keeps_its_own_ttl_whoever_met_it_when_it_was_old(made: float | None, met: float | None) -> None:
    def asking(ttl: float | None) -> dict[str, Any]:
        return {} if ttl is None else {"cache": {"ttl": ttl}}

    async with gateway(Model(), arms=TTL, rules={"stale_while_revalidate": 30.0, "ttl_jitter": 0.0}) as client:
        first = await client.ask("hello", **asking(made))
        runtime, key = client.gateway.runtime, bytes.fromhex(first.headers["x-litellm-cache-key"])
        later(client, 30.0 if made else 70.0)
        assert (await client.ask("hello", **asking(met))).cache == "STALE"
        renewed = runtime.clock()

        async def refreshed() -> bool:
            found = await runtime.cache.find("control", key)
            return found is not None and found[0].written_at == renewed

        await until(refreshed, "the entry to be refreshed")
        found = await runtime.cache.find("control", key)
        assert found is not None
        assert found[0].ttl == (math.inf if made is None else made)


async def test_what_is_past_its_ttl_is_served_where_the_model_fails() -> None:
    model = Model()
    async with gateway(model, arms=TTL, rules={"stale_if_error": 100.0, "ttl_jitter": 0.0}) as client:
        first = await client.ask("hello")
        later(client, 90.0)
        model.status = 500
        for stream in (False, True):
            stale = await client.ask("hello", stream=stream)
            assert (stale.status, stale.cache, stale.headers["x-cache-rule"]) == (200, "STALE", "stale_if_error")
        assert stale.headers["content-type"].startswith("text/event-stream")
        assert (await client.ask("hello")).body == first.body
        assert (await client.ask("hello", {"cache-control": "stale-if-error=10"})).status == 500
        model.status = 429
        assert (await client.ask("hello")).status == 429
        model.status = 500
        later(client, 170.0)
        assert (await client.ask("hello")).status == 500


async def test_answers_say_how_they_came_about() -> None:
    async with gateway(Model(), arms=TTL, rules={"ttl_jitter": 0.0}) as client:
        miss = await client.ask("hello")
        entry = miss.headers["x-cache-entry"]
        assert miss.headers["cache-status"] == f'cachepilot; fwd=uri-miss; fwd-status=200; stored; key="{entry}"; detail=miss'
        assert "age" not in miss.headers
        later(client, 20.5)
        hit = await client.ask("hello")
        assert hit.headers["cache-status"] == f'cachepilot; hit; ttl=39; key="{entry}"; detail=exact_hit'
        assert (hit.headers["age"], hit.headers["x-cache-tier"], hit.headers["x-cache-similarity"]) == ("20", "memory", "1")
        assert (hit.headers["x-cache-saved-tokens"], len(hit.headers["x-litellm-cache-key"])) == ("8", 64)
        assert hit.headers["x-litellm-cache-key"].startswith(entry)
        later(client, 70.0)
        assert "; fwd=stale; " in (await client.ask("hello")).headers["cache-status"]


async def test_without_debugging_only_the_standards_headers_are_sent() -> None:
    async with gateway(Model(), callers={"debug": False}) as client:
        await client.ask("hello")
        headers = (await client.ask("hello")).headers
        assert headers["cache-status"].startswith("cachepilot; hit")
        assert "age" in headers
        assert not any(name.startswith(("x-cache", "x-litellm")) for name in headers)


async def test_a_hit_has_the_first_answers_id_unless_a_fresh_one_is_asked_for() -> None:
    async with gateway(Model()) as client:
        first = (await client.ask("hello")).json
        assert (await client.ask("hello")).json["id"] == first["id"]
        for stream in (False, True):
            fresh = await client.ask("hello", {"x-cache-fresh-id": "1"}, stream=stream)
            assert f'"{first["id"]}"'.encode() not in fresh.body
            assert b"chatcmpl-" in fresh.body
            assert b"this is answer 1" in fresh.body


@pytest.mark.parametrize(
    ("settings", "fields", "reason"),
    [
        ({}, {"temperature": 1.5}, "temperature"),
        ({"max_entry_bytes": 50}, {}, "too_large"),
        ({}, {"tools": [{"type": "function", "function": {"name": "look"}}]}, "tool_calls"),
        ({}, {"logprobs": True}, "low_logprob"),
    ],
)
async def test_answers_that_the_operator_does_not_want_kept_are_passed_on(
    settings: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    model = Model()
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    if "tools" in fields:
        model.message = lambda *_: {"tool_calls": [call]}
    async with gateway(model, admission=settings) as client:
        if "logprobs" in fields:
            model.message = lambda *_: {"content": "unsure"}
            low = [{"index": 0, "message": {"content": "unsure"}, "finish_reason": "stop"}]
            low[0]["logprobs"] = {"content": [{"token": "unsure", "logprob": -5.0}]}
            model.extra = {"choices": low}
        assert [(await client.ask("hello", **fields)).cache for _ in range(2)] == ["MISS", "MISS"]
        assert await client.metric(f'cachepilot_answers_not_kept_total{{arm="control",reason="{reason}"}}') == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("heeded", "sent", "cache"),
    [(True, "no-store", "MISS"), (True, "Private, No-Store", "MISS"), (True, "no-cache", "HIT"), (False, "no-store", "HIT")],
)
async def test_an_answer_that_the_models_server_would_not_have_stored(heeded: bool, sent: str, cache: str, stream: bool) -> None:
    model = Model()
    model.sends = {"cache-control": sent}
    async with gateway(model, admission={"heed_no_store": heeded}) as client:
        assert [(await client.ask("hello", stream=stream)).cache for _ in range(2)] == ["MISS", cache]
        refused = await client.metric('cachepilot_answers_not_kept_total{arm="control",reason="upstream"}')
        assert refused == (2 if cache == "MISS" else 0)


async def test_an_answer_that_is_not_to_be_stored_is_nobody_elses_and_not_gone_on_with(redis_url: str, namespace: str) -> None:
    model = Model()
    model.sends = {"cache-control": "no-store"}
    settings = {"redis_url": redis_url, "namespace": namespace, "admission": {"heed_no_store": True}}
    async with before(model, replicas=2, **settings) as clients:
        for stream in (False, True):
            model.hold.clear()
            asked = [asyncio.create_task(client.ask("hello", stream=stream)) for client in clients for _ in range(2)]
            await until(lambda: len(model.asked) >= 1, "the first to be asked")
            model.hold.set()
            replies = await asyncio.gather(*asked)
            assert len({reply.body for reply in replies}) == 4
            assert {reply.cache for reply in replies} == {"MISS"}
        model.cut_after = 4
        await clients[0].ask("cut", stream=True)
        model.cut_after = None
        assert (await clients[0].ask("cut", {"x-cache-offset": "4"}, stream=True)).headers["x-cache-offset"] == "0"


async def test_requests_whose_answers_are_not_kept_do_not_wait_for_one_another() -> None:
    model = Model()
    model.hold.clear()
    async with gateway(model) as client:
        asked = [asyncio.create_task(client.ask("hello", temperature=1.9)) for _ in range(3)]
        await until(lambda: len(model.asked) == 3, "each to have asked for itself")
        model.hold.set()
        assert len({reply.body for reply in await asyncio.gather(*asked)}) == 3
