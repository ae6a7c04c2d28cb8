"""Who may ask, who sees what, and what operators may do."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import orjson
import pytest

from serving.audit import RedisAudit
from serving.redis_server import RedisServer
from serving.tiers.base import Change, TierUnavailable
from tests.serving.gateways import Client, Model, before, gateway
from tests.waiting import until


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


AUTH = {"required": True, "tenants": {"acme": [hashed("a1"), hashed("a2")], "beta": [hashed("b1")]}, "admin": [hashed("root")]}
ADMIN = bearer("root")


async def admin(client: Client, path: str, body: dict[str, Any] | None = None) -> Any:
    method = "GET" if body is None else "POST"
    reply = await client.request(method, f"/admin/v1/{path}", json=body, headers=ADMIN)
    assert reply.status == 200, reply.body
    return reply.json


async def test_tenants_never_share_an_answer_and_keys_of_one_tenant_do() -> None:
    async with gateway(Model(), auth=AUTH) as client:
        first = await client.ask("hello", bearer("a1"))
        assert (await client.ask("hello", bearer("a2"))).body == first.body
        other = await client.ask("hello", bearer("b1"))
        assert (other.cache, other.body == first.body) == ("MISS", False)


async def test_a_tenant_is_who_the_key_says_whatever_the_request_says() -> None:
    async with gateway(Model(), auth=AUTH) as client:
        await client.ask("hello", bearer("a1"))
        claims = {"user": "acme", "tenant": "acme", "metadata": {"tenant": "acme"}}
        assert (await client.ask("hello", {**bearer("b1"), "x-tenant": "acme"}, **claims)).cache == "MISS"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_request_without_a_known_key_is_refused(path: str) -> None:
    model = Model()
    async with gateway(model, auth=AUTH) as client:
        for headers in ({}, bearer("unknown"), {"authorization": "Basic a1"}):
            reply = await client.request("POST", path, json={"model": "m", "messages": [{}], "input": "x"}, headers=headers)
            assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
        assert (await client.request("GET", "/v1/models")).status == 401
    assert model.asked == []


async def test_a_tenants_key_does_not_reach_the_model() -> None:
    model = Model()
    async with gateway(model, auth=AUTH, upstream={"api_key": "ours"}) as client:
        await client.ask("hello", bearer("a1"))
        await client.request("POST", "/v1/responses", json={"model": "m", "input": "x"}, headers=bearer("a1"))
        await client.request("GET", "/v1/models", headers=bearer("a1"))
    assert [headers["authorization"] for headers in model.headers] == ["Bearer ours"] * 3


async def test_responses_and_models_pass_through() -> None:
    model = Model()
    async with gateway(model) as client:
        made = await client.request("POST", "/v1/responses", json={"model": "m", "input": "x", "extra": 1})
        assert (made.json["id"], model.asked[0]) == ("resp-1", {"model": "m", "input": "x", "extra": 1})
        got = await client.request("GET", "/v1/responses/resp-1?include=a")
        assert (got.json["id"], got.json["query"]) == ("resp-1", "include=a")
        streamed = await client.request("POST", "/v1/responses", json={"model": "m", "input": "x", "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.body.startswith(b"event: response.created")
        assert (await client.request("GET", "/v1/models/org/name")).json["id"] == "org/name"
        assert (await client.request("DELETE", "/v1/models/m")).status == 405
        for path in ("/v1/files", "/v1/fine_tuning/jobs", "/v1/models/../files", "/v1/responses/a/b/c"):
            assert (await client.request("GET", path)).status == 404


async def test_a_response_that_is_fetched_as_a_stream_comes_as_it_is_made() -> None:
    model = Model()
    model.pause.clear()
    async with gateway(model) as client, client._session.get(f"{client.url}/v1/responses/resp-1?stream=true") as reply:
        assert await reply.content.readuntil(b"\n\n") == b"event: response.created\ndata: {}\n\n"
        model.pause.set()
        assert await reply.content.read() == b"event: response.completed\ndata: {}\n\n"


async def test_one_tenant_cannot_read_anothers_stored_responses() -> None:
    async with gateway(Model(), auth=AUTH) as client:
        assert (await client.request("GET", "/v1/responses/resp-1", headers=bearer("b1"))).status == 404


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp-1"}),
        ("conversation", {"conversation": {"id": "conv-1"}}),
        ("input", {"input": [{"type": "item_reference", "id": "msg-1"}]}),
        ("input", {"input": [{"role": "user", "content": "x"}, {"id": "msg-1"}]}),
    ],
)
async def test_one_tenant_cannot_go_on_with_anothers_stored_responses(param: str, fields: dict[str, Any]) -> None:
    model = Model()
    async with gateway(model, auth=AUTH) as client:
        given = {"model": "m", "input": "what was said?", **fields}
        reply = await client.request("POST", "/v1/responses", json=given, headers=bearer("b1"))
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
        turns = [{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "c", "output": "o"}]
        whole = {"model": "m", "input": turns, "previous_response_id": None}
        assert (await client.request("POST", "/v1/responses", json=whole, headers=bearer("b1"))).status == 200
    assert len(model.asked) == 1


async def test_the_admin_api_is_not_there_without_a_token_and_not_for_tenants() -> None:
    async with gateway(Model(), auth={**AUTH, "admin": []}) as client:
        assert (await client.request("GET", "/admin/v1/stats", headers=ADMIN)).status == 404
    async with gateway(Model(), auth=AUTH) as client:
        assert (await client.request("GET", "/admin/v1/stats", headers=bearer("a1"))).status == 401
        assert (await client.request("GET", "/admin/v1/stats", headers=ADMIN)).status == 200
        assert (await client.ask("hello", ADMIN)).status == 401


async def test_operators_see_what_is_held_and_judge_it(redis_url: str, namespace: str) -> None:
    async with gateway(Model(), auth=AUTH, redis_url=redis_url, namespace=namespace) as client:
        name = (await client.ask("hello", bearer("a1"))).headers["x-cache-entry"]
        entry = await admin(client, f"entries/{name}")
        assert (entry["tenant"], entry["model"], entry["arm"], entry["output_tokens"]) == ("acme", "llm-sim", "control", 5)
        assert sorted(entry["tiers"]) == ["memory", "redis"]
        assert "answer 1" not in str(entry)
        assert "answer 1" in (await admin(client, f"entries/{name}?content=true"))["body"]
        assert (await admin(client, "stats"))["arms"]["control"]["redis"]["entries"] == 1
        assert (await admin(client, "knobs"))["arms"]["control"]["ttl"] == 3600.0
        await admin(client, f"entries/{name}/feedback", {"verdict": "good"})
        assert (await client.ask("hello", bearer("a1"))).cache == "HIT"
        await admin(client, f"entries/{name}/feedback", {"verdict": "bad"})
        assert (await client.ask("hello", bearer("a1"))).cache == "MISS"
        audit = RedisAudit(redis_url, namespace)
        assert [event.action for _, event in await audit.read()] == ["read", "feedback", "feedback"]
        await audit.close()


FILTERS: dict[str, tuple[dict[str, str], int, set[str]]] = {
    "a tenant": ({"tenant": "acme"}, 3, {"beta"}),
    "a tag": ({"tag": "red"}, 1, {"plain", "beta"}),
    "a document": ({"document": "d2"}, 1, {"plain", "tagged", "beta"}),
    "a namespace": ({"namespace": "own"}, 1, {"plain", "tagged", "beta"}),
    "a model": ({"model": "llm-sim"}, 4, set()),
    "what nothing has": ({"tag": "blue"}, 0, {"plain", "tagged", "beta"}),
}


@pytest.mark.parametrize(("where", "removed", "left"), FILTERS.values(), ids=FILTERS.keys())
async def test_a_flush_removes_what_matches_from_every_replica(
    where: dict[str, str], removed: int, left: set[str], redis_url: str, namespace: str
) -> None:
    settings: dict[str, Any] = {"auth": AUTH, "redis_url": redis_url, "namespace": namespace}
    async with before(Model(), replicas=2, **settings) as (one, other):
        ask: dict[str, Any] = {
            "plain": lambda client, **more: client.ask("hello", {**bearer("a1"), **more}),
            "tagged": lambda client, **more: client.ask("tagged", {**bearer("a1"), "x-cache-tags": "red, green", **more}),
            "beta": lambda client, **more: client.ask("hello", {**bearer("b1"), **more}),
        }
        for asking in ask.values():
            await asking(one)
            await asking(other)
        await one.ask("cited", {**bearer("a1"), "x-cache-documents": "d1,d2"}, cache={"namespace": "own"})
        assert (await admin(other, "flush", where))["removed"] == removed
        only = {"cache-control": "only-if-cached"}

        async def found() -> bool:
            return {name for name, asking in ask.items() if (await asking(one, **only)).status == 200} == left

        await until(found, "the flush to be heard of by the other replica")


@pytest.mark.parametrize("where", [{"all": True}, {"tag": "red"}], ids=["all", "tag"])
@pytest.mark.parametrize("failing", ["control", "treatment"])
async def test_a_flush_that_fails_in_one_arm_is_done_in_the_others_and_says_that_it_failed(
    where: dict[str, Any], failing: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"control": {"share": 0.5}, "treatment": {"share": 0.5}}
    async with gateway(Model(), auth=AUTH, redis_url=redis_url, namespace=namespace, arms=arms) as client:
        runtime = client.gateway.runtime
        answers = [await client.ask(f"question {number}", {**bearer("a1"), "x-cache-tags": "red"}) for number in range(20)]
        await runtime.fetcher.storing.all_arrived()
        assert {answer.headers["x-cache-arm"] for answer in answers} == set(arms)
        for name in ("flush", "outdate"):
            call = getattr(runtime.cache, name)

            async def one_fails(arm: str, *more: Any, call: Any = call) -> Any:
                if arm == failing:
                    raise TierUnavailable(f"away for {arm}")
                return await call(arm, *more)

            monkeypatch.setattr(runtime.cache, name, one_fails)
        reply = await client.request("POST", "/admin/v1/flush", json=where, headers=ADMIN)
        assert (reply.status, reply.json["error"]["code"]) == (503, "store_unavailable")
        held = {arm: (await runtime.cache.stats(arm))["redis"].entries for arm in arms}
        assert {arm for arm, entries in held.items() if entries} == {failing}


async def test_changes_are_recorded_beside_the_access_log_where_there_is_no_redis(tmp_path: Path) -> None:
    async with gateway(Model(), auth=AUTH, access_log=str(tmp_path)) as client:
        await client.ask("hello", bearer("a1"))
        await admin(client, "flush", {"all": True})
        assert (await client.ask("hello", bearer("a1"))).cache == "MISS"
    events = [orjson.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    assert [(event["action"], event["detail"]["removed"]) for event in events] == [("flush", 1)]
    assert "root" not in (tmp_path / "audit.jsonl").read_text()


async def test_an_answer_that_was_refreshed_is_still_flushed_by_the_document_it_was_made_from() -> None:
    rules = {"stale_while_revalidate": 30.0, "ttl_jitter": 0.0}
    async with gateway(Model(), auth={"admin": AUTH["admin"]}, rules=rules, arms={"control": {"knobs": {"ttl": 60.0}}}) as client:
        made = await client.ask("hello", {"x-cache-documents": "handbook", "x-cache-tags": "faq"})
        later = client.gateway.runtime.clock() + 70.0
        client.gateway.runtime.clock = lambda: later
        assert (await client.ask("hello", {"x-cache-tags": "other"})).cache == "STALE"
        entry = f"entries/{made.headers['x-cache-entry']}"

        async def refreshed() -> bool:
            return bool((await admin(client, entry))["written_at"] == later)

        await until(refreshed, "the entry to be refreshed")
        held = await admin(client, entry)
        assert (held["documents"], held["tags"]) == (["handbook"], ["faq"])
        assert (await admin(client, "flush", {"document": "handbook"}))["removed"] == 1


def outdated(client: Client) -> bool:
    """Whether it has heard that all its answers under way are."""
    return all(flight.outdated for flight in client.gateway.runtime.flights._tasks)


@pytest.mark.parametrize("where", [{"all": True}, {"tag": "red"}], ids=["of everything", "of a tag"])
async def test_an_answer_under_way_at_a_flush_is_not_kept_by_any_replica(
    where: dict[str, Any], redis_url: str, namespace: str
) -> None:
    model = Model()
    settings: dict[str, Any] = {"auth": AUTH, "redis_url": redis_url, "namespace": namespace}
    async with before(model, replicas=2, **settings) as (one, other):
        model.hold.clear()
        asked = {"red": {**bearer("a1"), "x-cache-tags": "red"}, "plain": bearer("a1")}
        under_way = [asyncio.create_task(client.ask(name, headers)) for name, headers in asked.items() for client in (one, other)]
        await until(lambda: len(model.asked) == 2, "both questions to have reached the model")
        flights = [client.gateway.runtime.flights for client in (one, other)]
        await until(lambda: [len(each) for each in flights] == [2, 2], "all four to be under way")
        await admin(other, "flush", where)
        await until(lambda: all(outdated(client) for client in (one, other)), "the flush to be heard of")
        model.hold.set()
        assert {reply.status for reply in await asyncio.gather(*under_way)} == {200}
        assert [(await client.ask("red", asked["red"])).cache for client in (one, other)] == ["MISS", "HIT"]


@pytest.mark.parametrize("where", [{"all": True}, {"tag": "red"}], ids=["of everything", "of a tag"])
async def test_who_asks_after_a_flush_gets_no_answer_that_was_under_way_at_any_replica(
    where: dict[str, Any], redis_url: str, namespace: str
) -> None:
    model = Model()
    settings: dict[str, Any] = {"auth": AUTH, "redis_url": redis_url, "namespace": namespace}
    headers = {**bearer("a1"), "x-cache-tags": "red"}
    async with before(model, replicas=2, **settings) as (one, other):
        model.hold.clear()
        under_way = asyncio.create_task(one.ask("red", headers))
        await until(lambda: len(model.asked) == 1, "the question to have reached the model")
        await admin(other, "flush", where)
        await until(lambda: outdated(one), "the flush to be heard of")
        later = asyncio.create_task(other.ask("red", headers))
        await until(lambda: len(model.asked) == 2, "the model to be asked anew")
        model.hold.set()
        assert "answer 1" in str((await under_way).json)
        assert "answer 2" in str((await later).json)
        assert "answer 2" in str((await one.ask("red", headers)).json)


async def test_a_tenant_is_not_told_that_another_one_asked_something_similar() -> None:
    rules = {"semantic": {"enabled": True, "threshold": 0.6, "deadline": 60.0}}
    async with gateway(Model(), auth=AUTH, rules=rules) as client:
        await client.ask("How do I reset my card PIN?", bearer("a1"))
        own = await client.ask("How can I reset my card PIN?", bearer("a1"))
        told = [await client.ask(text, bearer("b1")) for text in ("How could I reset my card PIN?", "Name three rivers")]
        assert own.cache == "SEMANTIC"
        assert [reply.headers["x-cache-rule"] for reply in told] == ["miss", "below_threshold"]


@pytest.mark.parametrize("where", [{"all": True}, {"tag": "red"}], ids=["of everything", "of a tag"])
async def test_who_asks_after_a_flush_joins_no_answer_at_a_replica_that_could_not_listen(
    where: dict[str, Any], redis_url: str, namespace: str
) -> None:
    model = Model()
    settings: dict[str, Any] = {"auth": AUTH, "redis_url": redis_url, "namespace": namespace}
    async with before(model, replicas=2, **settings) as (one, other):
        model.hold.clear()
        headers = {**bearer("a1"), "x-cache-tags": "red"}
        first = asyncio.create_task(one.ask("hello", headers))
        await until(lambda: len(model.asked) == 1, "the model to be asked")
        cache = one.gateway.runtime.cache
        cache.upkeep.heard(Change("lost"))
        cache.upkeep.heard = lambda change: None  # type: ignore[method-assign]
        await admin(other, "flush", where)
        second = asyncio.create_task(one.ask("hello", headers))
        await until(lambda: len(model.asked) == 2, "the model to be asked again")
        model.hold.set()
        assert [(reply.status, reply.cache) for reply in await asyncio.gather(first, second)] == [(200, "MISS"), (200, "MISS")]


async def test_a_flush_right_after_a_restart_of_redis_holds_at_replicas_that_did_not_listen_again_yet(
    tmp_path: Path, namespace: str
) -> None:
    model = Model()
    settings: dict[str, Any] = {"auth": AUTH, "redis_url": f"unix://{tmp_path}/redis.sock", "namespace": namespace}
    headers = {**bearer("a1"), "x-cache-tags": "red"}
    async with before(model, replicas=2, **settings) as (one, other):
        with RedisServer(tmp_path):
            await until(lambda: not other.gateway.runtime.cache.upkeep.deaf, "the feed to be connected")
            await one.ask("hello", headers)
        model.hold.clear()
        under_way = asyncio.create_task(other.ask("under way", headers))
        await until(lambda: len(model.asked) == 2, "the model to be asked")
        with RedisServer(tmp_path):

            async def flushed() -> bool:  # by a replica that listens already, maybe
                reply = await one.request("POST", "/admin/v1/flush", json={"tag": "red"}, headers=ADMIN)
                return reply.status == 200

            await until(flushed, "Redis to be asked again")
            asked = [asyncio.create_task(other.ask(text, headers)) for text in ("hello", "under way")]
            await until(lambda: len(model.asked) == 4, "the model to be asked anew")
            model.hold.set()
            assert [reply.cache for reply in await asyncio.gather(*asked)] == ["MISS", "MISS"]
            await under_way
