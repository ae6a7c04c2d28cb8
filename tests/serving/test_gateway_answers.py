"""What a client of the gateway sees."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.llm_sim import LlmSimProcess, answer_size
from serving.settings import LlmSimSettings
from serving.tiers.base import EntryMeta
from tests.e2e.stack import chat
from tests.serving.gateways import Client, Model, gateway, running, served

COMPLETE: dict[str, Any] = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


@pytest.fixture(scope="module")
def model() -> Iterator[LlmSimProcess]:
    with LlmSimProcess(LlmSimSettings(port=0, ttft=0.0, tpot=0.0)) as process:
        yield process


@pytest.fixture
async def client(model: LlmSimProcess, redis_url: str, namespace: str) -> AsyncIterator[Client]:
    settings = {"redis_url": redis_url, "namespace": namespace, "upstream": {"base_url": model.base_url}}
    async with running(settings) as started:
        yield started


class Upstream:
    """A real HTTP server that gives the answers it is told to, and counts what it was asked."""

    def __init__(self, body: bytes = b"", status: int = 200, content_type: str = "application/json") -> None:
        self.body = body or json.dumps(COMPLETE).encode()
        self.status, self.content_type = status, content_type
        self.requests: list[dict[str, str]] = []
        self.release = asyncio.Event()
        self.release.set()
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        self.requests.append(dict(request.headers))
        await self.release.wait()
        return Response(self.body, self.status, media_type=self.content_type, headers={"retry-after": "7"})


async def test_the_second_identical_question_is_a_hit_with_the_same_bytes(client: Client) -> None:
    first, second = await client.ask("hello"), await client.ask("hello")
    assert (first.cache, second.cache) == ("MISS", "HIT")
    assert second.body == first.body
    assert (second.headers["x-cache-tier"], second.headers["age"]) == ("memory", "0")
    assert second.headers["x-cache-arm"] == first.headers["x-cache-arm"] == "control"


async def test_fields_that_do_not_change_the_answer_do_not_change_its_identity(client: Client) -> None:
    await client.ask("hello", temperature=0.5)
    assert (await client.ask("hello", temperature=0.5, user="somebody else")).cache == "HIT"
    assert (await client.ask("hello", temperature=0.6)).cache == "MISS"


async def test_the_stored_entry_has_the_size_that_the_simulator_expects(client: Client) -> None:
    await client.ask("hello", {"x-llm-sim-output-tokens": "123"})
    held = await client.metric('cachepilot_resident_bytes{arm="control",tier="memory"}')
    assert held == 32 + answer_size(123, "llm-sim") + len(EntryMeta(model="llm-sim").dump())


async def test_an_answer_cut_at_its_length_is_passed_on_and_not_kept(client: Client) -> None:
    for _ in range(2):
        reply = await client.ask("hello", max_tokens=2)
        assert (reply.cache, reply.json["choices"][0]["finish_reason"]) == ("MISS", "length")


async def test_a_streamed_answer_that_was_cut_passes_through_and_is_not_kept(client: Client) -> None:
    for _ in range(2):
        reply = await client.ask("hello", stream=True, max_tokens=3)
        assert (reply.status, reply.cache) == (200, "MISS")
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_the_models_of_the_upstream_are_listed(client: Client) -> None:
    assert [card["id"] for card in (await client.request("GET", "/v1/models")).json["data"]] == ["llm-sim"]


async def test_health_and_readiness_say_what_runs(client: Client) -> None:
    assert (await client.request("GET", "/healthz")).status == 200
    state = (await client.request("GET", "/readyz")).json
    assert (state["ready"], state["version"], state["config_store"]) == (True, 0, "ok")
    assert state["arms"]["control"]["ttl"] == 3600.0


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b'{"model": "llm-sim", "messages": [', None, "not valid JSON"),
        (b"[1]", None, "expected a JSON object, got list"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model", "expected the name of a model, got nothing"),
        (b'{"model": "llm-sim"}', "messages", "at least one message object, got nothing"),
        (b'{"model": "llm-sim", "messages": []}', "messages", "got []"),
        (b'{"model": "llm-sim", "messages": ["hi"]}', "messages", 'got ["hi"]'),
    ],
)
async def test_a_bad_body_is_a_400_in_the_shape_of_openai(client: Client, body: bytes, param: str | None, said: str) -> None:
    reply = await client.request("POST", "/v1/chat/completions", data=body)
    error = reply.json["error"]
    assert reply.status == 400
    assert said in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)


@pytest.mark.parametrize(
    ("fields", "param", "got"),
    [
        ({"stream": "false"}, "stream", 'got "false"'),
        ({"stream": "true"}, "stream", 'got "true"'),
        ({"stream": 1}, "stream", "got 1"),
        ({"stream": 0}, "stream", "got 0"),
        ({"stream": []}, "stream", "got []"),
        ({"stream": True, "stream_options": {"include_usage": "false"}}, "stream_options.include_usage", 'got "false"'),
        ({"stream": True, "stream_options": "include_usage"}, "stream_options", "expected an object"),
    ],
)
async def test_what_might_be_a_stream_or_not_is_refused_and_never_guessed(fields: dict[str, Any], param: str, got: str) -> None:
    model = Model()
    async with gateway(model) as client:
        await client.ask("hello")
        reply = await client.ask("hello", **fields)
        assert (reply.status, reply.json["error"]["type"], reply.json["error"]["param"]) == (400, "invalid_request_error", param)
        assert got in reply.json["error"]["message"]
        assert (await client.ask("hello", stream=None)).cache == "HIT"
        # Texts are not embedded in streams: there it is a field like any other, and the model's to judge.
        assert (await client.post({"model": "m", "input": "x", **fields}, "/v1/embeddings")).status == 200
    assert len(model.asked) == 2


async def test_other_paths_and_methods_are_refused_by_name(client: Client) -> None:
    missing = await client.request("GET", "/v1/nothing")
    assert missing.status == 404
    assert "/v1/nothing" in missing.json["error"]["message"]
    wrong = await client.request("GET", "/v1/chat/completions")
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")


async def _nothing() -> Any:
    return {"type": "http.request", "body": b""}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nothing"])
async def test_a_websocket_is_refused_in_words(client: Client, path: str) -> None:
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    reply = await client.request("GET", path, headers=headers)
    assert (reply.status, reply.json["error"]["code"]) == (400, "websocket_not_supported")
    assert reply.json["error"]["message"].startswith(f"{path} is no WebSocket: expected a plain HTTP request")


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_a_probe_may_ask_with_head(client: Client, path: str) -> None:
    got, head = await client.request("GET", path), await client.request("HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == str(len(got.body))
    sent: list[Any] = []

    async def send(message: Any) -> None:  # without the server, which would drop a body itself
        sent.append(message)

    await client.gateway({"type": "http", "method": "HEAD", "path": path, "headers": []}, _nothing, send)
    assert [message.get("body") for message in sent] == [None, b""]
    refused = await client.request("POST", path)
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")


async def test_a_body_over_the_limit_is_refused(model: LlmSimProcess) -> None:
    async with running({"upstream": {"base_url": model.base_url}, "max_request_bytes": 1000}) as client:
        assert (await client.ask("x" * 2000)).status == 413
        assert (await client.ask("x" * 100)).status == 200


@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
async def test_an_upstream_error_passes_through_and_is_asked_again(status: int) -> None:
    upstream = Upstream(b'{"error": {"message": "no", "type": "t", "param": null, "code": null}}', status)
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        for _ in range(2):
            reply = await client.ask("hello")
            assert (reply.status, reply.body, reply.cache) == (status, upstream.body, "MISS")
            assert reply.headers["retry-after"] == "7"
        assert await client.metric('cachepilot_requests_total{arm="control",outcome="error"}') == 2
        assert await client.metric('cachepilot_upstream_errors_total{arm="control"}') == 2
    assert len(upstream.requests) == 2


def _with(**changes: Any) -> bytes:
    return json.dumps({**COMPLETE, **changes}).encode()


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (_with(choices=[]), "application/json"),
        (_with(choices=[{"index": 0, "finish_reason": None}]), "application/json"),
        (_with(choices=[COMPLETE["choices"][0], {"index": 1, "finish_reason": "length"}]), "application/json"),
        (b"{", "application/json"),
        (json.dumps(COMPLETE).encode(), "text/plain"),
        (json.dumps(COMPLETE).encode(), "application/json-seq"),
    ],
    ids=["no choices", "unfinished", "one of two cut", "not JSON", "another media type", "a longer media type"],
)
async def test_what_is_not_a_complete_json_answer_is_passed_on_and_not_kept(body: bytes, content_type: str) -> None:
    upstream = Upstream(body, content_type=content_type)
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        assert [(await client.ask("hello")).body for _ in range(2)] == [body, body]
    assert len(upstream.requests) == 2


async def test_a_media_type_is_json_in_any_case_and_with_parameters() -> None:
    upstream = Upstream(content_type="Application/JSON ; charset=utf-8")
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        assert [(await client.ask("hello")).cache for _ in range(2)] == ["MISS", "HIT"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_redirect_of_the_upstream_is_passed_on_and_not_followed(stream: bool) -> None:
    upstream, asked = Upstream(), 0

    async def moved(request: Request) -> Response:
        nonlocal asked
        asked += 1
        return Response(status_code=307, headers={"location": "/v1/chat/completions"})

    upstream.app.routes.append(Route("/old/chat/completions", moved, methods=["POST"]))
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/old"}}) as client:
        reply = await client.request("POST", "/v1/chat/completions", json=chat("hello", stream=stream), allow_redirects=False)
        assert reply.status == 307
    assert (asked, upstream.requests) == (1, [])


async def test_an_unreachable_upstream_is_a_502_that_names_it() -> None:
    async with served(Upstream().app) as url:
        base_url = f"{url}/v1"
    async with running({"upstream": {"base_url": base_url}}) as client:
        reply = await client.ask("hello")
        assert (reply.status, reply.json["error"]["code"]) == (502, "upstream_unreachable")
        assert base_url in reply.json["error"]["message"]
        streamed = await client.ask("hello", stream=True)
        assert (streamed.status, streamed.json["error"]["code"]) == (502, "upstream_unreachable")


async def test_an_upstream_that_does_not_answer_in_time_is_a_504() -> None:
    upstream = Upstream()
    upstream.release.clear()
    async with served(upstream.app) as url:
        async with running({"upstream": {"base_url": f"{url}/v1", "timeout": 0.05}}) as client:
            reply = await client.ask("hello")
        assert (reply.status, reply.json["error"]["code"]) == (504, "upstream_timeout")
        upstream.release.set()


async def test_identical_misses_under_way_ask_the_upstream_once() -> None:
    upstream = Upstream()
    upstream.release.clear()
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        asked = [asyncio.create_task(client.ask("hello")) for _ in range(20)]
        while await client.metric('cachepilot_cacheable_lookups_total{arm="control"}') < 20:
            await asyncio.sleep(0.005)
        upstream.release.set()
        replies = await asyncio.gather(*asked)
        assert await client.metric('cachepilot_coalesced_requests_total{arm="control"}') == 19
        assert await client.metric('cachepilot_upstream_tokens_total{arm="control",cause="miss",kind="output"}') == 1
    assert sorted(str(reply.cache) for reply in replies) == ["COLLAPSED"] * 19 + ["MISS"]
    assert len(upstream.requests) == 1


async def test_one_clients_refusal_is_not_given_to_another_who_waited() -> None:
    upstream = Upstream(b'{"error": {}}', 401)
    upstream.release.clear()
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        asked = [asyncio.create_task(client.ask("hello", {"authorization": f"Bearer {n}"})) for n in range(2)]
        while await client.metric('cachepilot_cacheable_lookups_total{arm="control"}') < 2:
            await asyncio.sleep(0.005)
        upstream.release.set()
        await asyncio.gather(*asked)
    assert {headers["authorization"] for headers in upstream.requests} == {"Bearer 0", "Bearer 1"}


async def test_an_answer_is_kept_although_its_client_went_away() -> None:
    upstream = Upstream()
    upstream.release.clear()
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        asked = asyncio.create_task(client.ask("hello"))
        while not upstream.requests:
            await asyncio.sleep(0.005)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        upstream.release.set()
        assert (await client.ask("hello")).cache == "HIT"
    assert len(upstream.requests) == 1


async def test_the_configured_key_replaces_the_clients_and_only_listed_headers_pass() -> None:
    upstream = Upstream()
    sent = {"authorization": "Bearer client", "openai-organization": "org", "cookie": "secret", "x-other": "no"}
    async with served(upstream.app) as url:
        base = {"base_url": f"{url}/v1"}
        async with running({"upstream": {**base, "api_key": "ours"}}) as client:
            await client.ask("one", sent)
        async with running({"upstream": base}) as client:
            await client.ask("two", sent)
    assert [headers["authorization"] for headers in upstream.requests] == ["Bearer ours", "Bearer client"]
    assert all(headers["openai-organization"] == "org" for headers in upstream.requests)
    assert not any("cookie" in headers or "x-other" in headers for headers in upstream.requests)


async def test_an_entry_past_its_ttl_is_asked_for_again() -> None:
    upstream = Upstream()
    arms = {"control": {"knobs": {"ttl": 60.0}}}
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}, "arms": arms}) as client:
        await client.ask("hello")
        now = time.time()
        client.gateway.runtime.clock = lambda: now + 30.0
        assert (await client.ask("hello")).headers["age"] in ("29", "30")
        client.gateway.runtime.clock = lambda: now + 61.0
        assert (await client.ask("hello")).cache == "MISS"
        assert await client.metric('cachepilot_expirations_total{arm="control"}') == 1
    assert len(upstream.requests) == 2


async def test_one_question_written_in_two_ways_is_one_question(client: Client) -> None:
    text = "ünïcödé \u2028 \U0001f600"
    raw = json.dumps(chat(text), ensure_ascii=False, indent=3).encode()
    first = await client.request("POST", "/v1/chat/completions", data=raw)
    assert first.status == 200
    assert (await client.ask(text)).cache == "HIT"


@pytest.mark.parametrize("field", ['"model":"m","messages":[{"content":%s}]', '"messages":[{}],"model":%s'])
async def test_json_nested_too_deeply_is_a_400(client: Client, field: str) -> None:
    body = "{" + field % ("[" * 500 + "]" * 500) + "}"
    reply = await client.request("POST", "/v1/chat/completions", data=body)
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert "deep" in reply.json["error"]["message"]


@pytest.mark.parametrize(
    "changes",
    [{"choices": [{**COMPLETE["choices"][0], "finish_reason": reason}]} for reason in ("error", "content_filter", "", 5)]
    + [{"choices": [{"finish_reason": "stop"}]}, {"error": {"message": "overloaded"}}],
    ids=["error", "filtered", "empty reason", "no reason", "no message", "an error in a 200"],
)
async def test_an_answer_that_did_not_end_by_itself_is_not_kept(changes: dict[str, Any]) -> None:
    upstream = Upstream(_with(**changes))
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        assert [(await client.ask("hello")).cache for _ in range(2)] == ["MISS", "MISS"]


async def test_absurd_token_counts_are_no_error(redis_url: str, namespace: str) -> None:
    upstream = Upstream(_with(usage={"prompt_tokens": 2**40, "completion_tokens": 2**63}))
    settings = {"redis_url": redis_url, "namespace": namespace}
    async with served(upstream.app) as url, running({**settings, "upstream": {"base_url": f"{url}/v1"}}) as client:
        assert [(await client.ask("hello")).status for _ in range(2)] == [200, 200]


async def test_headers_that_are_not_latin_are_passed_back() -> None:
    upstream = Upstream(content_type="application/json; note=\u2026".encode().decode("latin-1"))
    async with served(upstream.app) as url, running({"upstream": {"base_url": f"{url}/v1"}}) as client:
        assert (await client.ask("hello")).status == 200
