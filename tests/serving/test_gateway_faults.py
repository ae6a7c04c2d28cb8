"""What the gateway uses fails, hangs or is full: the client gets its answer, and the model's own errors as they are."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

import pytest
from redis import Redis

from serving.redis_server import RedisServer
from tests.serving.gateways import Client, Model, before, gateway
from tests.waiting import until


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_models_errors_pass_through_and_are_not_kept(status: int, stream: bool) -> None:
    model = Model()
    model.status, model.error = status, b'{"error":{"message":"as it was","type":"own","param":"p","code":7,"more":[1]}}'
    async with gateway(model) as client:
        for _ in range(2):
            reply = await client.ask("hello", stream=stream)
            assert (reply.status, reply.body, reply.cache) == (status, model.error, "MISS")
        assert f"fwd-status={status}" in reply.headers["cache-status"]
        assert await client.metric('cachepilot_requests_total{arm="control",outcome="error"}') == 2
    assert len(model.asked) == 2


async def test_an_error_of_the_model_itself_is_told_to_all_who_waited_without_asking_again() -> None:
    model = Model()
    model.hold.clear()
    model.status = 503
    async with gateway(model) as client:
        asked = [asyncio.create_task(client.ask("hello")) for _ in range(10)]
        await until(lambda: _looked_up(client, 10), "all to have come")
        model.hold.set()
        assert {reply.status for reply in await asyncio.gather(*asked)} == {503}
    assert len(model.asked) == 1


async def _looked_up(client: Client, count: int) -> bool:
    return await client.metric('cachepilot_cacheable_lookups_total{arm="control"}') >= count


async def test_more_calls_than_may_run_and_wait_are_refused_with_a_time_to_come_back() -> None:
    model = Model()
    model.hold.clear()
    upstream = {"max_inflight": 1, "max_waiting": 1}
    async with gateway(model, upstream=upstream) as client:
        first = asyncio.create_task(client.ask("one"))
        await until(lambda: len(model.asked) == 1, "the first to be asked")
        second = asyncio.create_task(client.ask("two"))
        await until(lambda: client.gateway.runtime.upstream.waiting == 1, "the second to wait")
        for stream in (False, True):
            refused = await client.ask("three", stream=stream)
            assert (refused.status, refused.json["error"]["code"]) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
        assert await client.metric('cachepilot_upstream_rejections_total{arm="control"}') == 2
        assert await client.metric('cachepilot_upstream_errors_total{arm="control"}') == 0
        model.hold.set()
        assert [reply.status for reply in await asyncio.gather(first, second)] == [200, 200]


async def test_a_call_that_failed_before_its_first_byte_is_made_again() -> None:
    model = Model()
    model.status = 503

    def recover(number: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"content": f"answer {number}"}

    model.message = recover
    async with gateway(model, upstream={"retries": 3, "backoff": 0.01}) as client:
        asked = asyncio.create_task(client.ask("hello"))
        await until(lambda: len(model.asked) >= 1, "the first try")
        model.status = 200
        assert (await asked).status == 200
        assert await client.metric("cachepilot_upstream_retries_total") == len(model.asked) - 1 >= 1


async def test_a_stream_is_not_asked_for_again_after_its_first_byte() -> None:
    model = Model()
    model.cut_after = 1
    async with gateway(model, upstream={"retries": 3, "backoff": 0.01}) as client:
        reply = await client.ask("hello", stream=True)
        assert b"upstream_interrupted" in reply.body
    assert len(model.asked) == 1


async def test_a_redis_that_hangs_costs_no_request_its_answer() -> None:
    model = Model()
    with RedisServer() as redis:
        async with gateway(model, redis_url=redis.url, redis_deadline=0.05) as client:
            await client.ask("hello")
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGSTOP)
            try:
                assert (await client.ask("hello")).cache == "HIT"
                for number in range(4):
                    reply = await client.ask(f"question {number}")
                    assert (reply.status, reply.cache) == (200, "MISS")
                    assert (await client.ask(f"question {number}")).cache == "HIT"  # from memory
            finally:
                os.kill(redis.pid, signal.SIGCONT)


async def test_more_requests_than_redis_has_connections_are_all_answered(redis_url: str, namespace: str) -> None:
    model = Model()
    settings = {"redis_url": redis_url, "namespace": namespace, "rules": {"l1_share": 0.0}}
    async with gateway(model, **settings) as client:
        store = client.gateway.runtime.cache.store
        pool = store._redis.connection_pool  # type: ignore[union-attr]
        held = [await pool.get_connection() for _ in range(pool.max_connections)]
        try:
            client.gateway.runtime.cache.store._read_deadline = 0.05  # type: ignore[union-attr]
            model.hold.clear()
            asked = [asyncio.create_task(client.ask(f"question {number % 20}")) for number in range(60)]
            await until(lambda: _looked_up(client, 60), "all to have come")
            model.hold.set()
            replies = await asyncio.gather(*asked)
        finally:
            for connection in held:
                await pool.release(connection)
        assert {reply.status for reply in replies} == {200}
        assert len({reply.body for reply in replies}) == 20


async def test_overwriting_an_entry_at_capacity_evicts_nobody_else(redis_url: str, namespace: str) -> None:
    model = Model()
    model.message = lambda *_: {"content": "x" * 1000}
    arms = {"control": {"knobs": {"cache_size": 5000}}}
    for settings in ({}, {"redis_url": redis_url, "namespace": namespace}):
        async with gateway(model, arms=arms, **settings) as client:
            texts = ["one", "two", "three"]
            for text in texts:
                await client.ask(text)
            for _ in range(5):
                assert (await client.ask("two", {"cache-control": "no-cache"})).cache == "REFRESH"
            tier = "redis" if settings else "memory"
            assert await client.metric(f'cachepilot_evictions_total{{arm="control",tier="{tier}"}}') == 0
            assert [(await client.ask(text)).cache for text in texts] == ["HIT"] * 3


async def test_a_replica_that_dies_while_it_leads_is_replaced_by_one_that_waits(redis_url: str, namespace: str) -> None:
    model = Model()
    model.pause.clear()
    async with before(model, replicas=2, redis_url=redis_url, namespace=namespace) as (one, other):
        leading = asyncio.create_task(one.ask("hello", stream=True))
        await until(lambda: len(model.asked) == 1, "the first to lead")
        following = asyncio.create_task(other.ask("hello", stream=True))
        await until(lambda: _looked_up(other, 1), "the second to come")
        await one.gateway.runtime.flights.close()
        model.pause.set()
        reply = await following
        assert (reply.status, reply.body.endswith(b"data: [DONE]\n\n")) == (200, True)
        await asyncio.gather(leading, return_exceptions=True)


async def test_nothing_of_a_prompt_or_an_answer_is_logged(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    model = Model()
    model.message = lambda *_: {"content": "confidential-answer"}
    async with gateway(model, access_log=str(tmp_path)) as client:
        for _ in range(2):
            await client.ask("confidential-question")
        model.status = 500
        await client.ask("confidential-question", temperature=0.5)
    logged = "".join(file.read_text() for file in tmp_path.iterdir()) + caplog.text
    assert '"rule":"exact_hit"' in logged
    assert "confidential" not in logged


async def test_nor_where_what_handles_it_fails(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(texts: list[str]) -> Any:
        raise RuntimeError(f"cannot embed {texts}")

    for noisy in ("numba", "asyncio"):
        logging.getLogger(noisy).setLevel("INFO")
    caplog.set_level("DEBUG")
    model = Model()
    model.message = lambda *_: {"content": "confidential-answer and more"}
    semantic = {"rules": {"semantic": {"enabled": True, "threshold": 0.5, "deadline": 60.0, "max_error": 0.5}}}
    with RedisServer() as redis:
        async with before(model, replicas=2, redis_url=redis.url, **semantic) as (one, other):

            async def ask(about: str) -> None:
                for client in (one, other):
                    for start in ("How do I use", "How can I use"):
                        await client.ask(f"{start} confidential-question {about}?")
                await asyncio.gather(*(client.ask(f"confidential-stream {about}", stream=True) for client in (one, other)))
                for cut in (3, None):
                    model.cut_after = cut
                    await one.ask(f"confidential-question, cut {about}", stream=True, cache={"namespace": "confidential"})
                wrong = b'{"model": "m", "messages": [{"role": "user", "content": "confidential"}], "model": "confidential"}'
                for body in (wrong, wrong[:60]):
                    assert (await one.request("POST", "/v1/chat/completions", data=body)).status == 400
                assert (await one.ask("hello", cache={"ttl": "confidential"})).status == 400
                await one.gateway.runtime.meaning.verified()

            await ask("healthy")
            with Redis.from_url(redis.url) as full:
                full.config_set("maxmemory", "1")  # the server refuses each write, and tells which
            await ask("full")
            embedder = one.gateway.runtime.meaning.embedder
            assert embedder is not None
            monkeypatch.setattr(embedder, "_encode", refuse)
            monkeypatch.setattr(other.gateway.runtime.cache, "put", None)
            await ask("broken")
    assert "could not be kept" in caplog.text
    assert "confidential" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_too_large_to_be_kept_reaches_all_who_wait_for_it(stream: bool) -> None:
    model = Model()
    word = "x" * 1000
    model.message = lambda *_: {"content": " ".join([word] * 3000)}
    async with gateway(model, admission={"max_entry_bytes": 1 << 20}) as client:
        for _ in range(2):
            replies = await asyncio.gather(*(client.ask("hello", stream=stream) for _ in range(2)))
            assert {reply.body.count(word.encode()) for reply in replies} == {3000}
            assert "HIT" not in {reply.cache for reply in replies}
