"""The client of the model: what it passes on, tries again, gives up and lets go of; against a real server that misbehaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from serving.settings import UpstreamSettings
from serving.turns import Overloaded
from serving.upstream import Interrupted, Upstream, UpstreamAnswer, overloaded

HEADERS = {"content-type": "application/json"}
CHAT = "/chat/completions"
Answering = Callable[["Server", web.Request], Awaitable[web.StreamResponse]]


SHORT = 0.5
"""Seconds that end what never comes, and within which what comes does so, whatever else the machine does."""


class Server:
    """An upstream that does what a test says; ``calls`` counts the requests that reached it."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self.calls = 0
        self.reached = asyncio.Event()
        self.left = asyncio.Event()
        self.go = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        self.reached.set()
        try:
            return await self._answering(self, request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise


@asynccontextmanager
async def upstream(answering: Answering, **settings: Any) -> AsyncIterator[tuple[Upstream, Server]]:
    """A client before a server that answers with ``answering``."""
    server = Server(answering)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    client = Upstream(UpstreamSettings.model_validate({"base_url": server.url, "backoff": 0.001, **settings}), draw=lambda: 0.0)
    await client.open()
    try:
        yield client, server
    finally:
        await client.close()
        await runner.cleanup()


def statuses(*given: int, retry_after: str | None = None) -> Answering:
    """Answer with these statuses in turn, the last for ever."""

    async def answering(server: Server, request: web.Request) -> web.StreamResponse:
        status = given[min(server.calls, len(given)) - 1]
        headers = {"retry-after": retry_after} if retry_after is not None and status != 200 else {}
        return web.json_response({"call": server.calls}, status=status, headers=headers)

    return answering


async def hang(server: Server, request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def one_chunk_then(server: Server, request: web.Request) -> web.StreamResponse:
    """Send one chunk, and wait for ``go`` to lose the connection."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await server.go.wait()
    assert request.transport is not None
    request.transport.abort()
    return response


def message(answer: UpstreamAnswer) -> str:
    return str(json.loads(answer.body)["error"]["message"])


async def test_any_endpoint_can_be_called_and_its_answer_is_passed_on_as_it_came() -> None:
    async def echo(server: Server, request: web.Request) -> web.StreamResponse:
        body = json.dumps([request.method, request.path, (await request.read()).decode()]).encode()
        headers = {"x-request-id": "r1", "x-ratelimit-remaining-tokens": "7", "set-cookie": "private"}
        return web.Response(body=body, status=418, content_type="text/plain", headers=headers)

    async with upstream(echo) as (client, _):
        answer = await client.call("/embeddings", b"{}", HEADERS)
        assert (answer.status, json.loads(answer.body)) == (418, ["POST", "/v1/embeddings", "{}"])
        assert dict(answer.headers) == {"x-request-id": "r1", "x-ratelimit-remaining-tokens": "7"}
        assert answer.content_type.startswith("text/plain")
        assert json.loads((await client.models(HEADERS)).body) == ["GET", "/v1/models", ""]


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_an_upstream_that_says_not_now_is_tried_again(status: int) -> None:
    async with upstream(statuses(status, status, 200)) as (client, server):
        answer = await client.call(CHAT, b"{}", HEADERS)
        assert (answer.status, server.calls, client.retried) == (200, 3, 2)


async def test_after_the_last_try_the_upstreams_own_error_is_passed_on() -> None:
    async with upstream(statuses(503), retries=1) as (client, server):
        answer = await client.call(CHAT, b"{}", HEADERS)
        assert (answer.status, answer.body, server.calls) == (503, b'{"call": 2}', 2)


@pytest.mark.parametrize("status", [200, 400, 401, 404, 408, 429, 500])
async def test_what_would_not_be_better_a_moment_later_is_asked_once(status: int) -> None:
    async with upstream(statuses(status)) as (client, server):
        assert (await client.call(CHAT, b"{}", HEADERS)).status == status
        assert server.calls == 1


async def test_a_retry_after_longer_than_the_longest_wait_is_passed_on_instead_of_tried() -> None:
    async with upstream(statuses(503, 200, retry_after="120")) as (client, server):
        answer = await client.call(CHAT, b"{}", HEADERS)
        assert (answer.status, answer.headers["retry-after"], server.calls) == (503, "120", 1)
    async with upstream(statuses(503, 200, retry_after="0")) as (client, server):
        assert (await client.call(CHAT, b"{}", HEADERS)).status == 200
        assert server.calls == 2


async def test_a_connection_that_is_lost_before_the_first_byte_is_tried_again() -> None:
    async def lose_the_first(server: Server, request: web.Request) -> web.StreamResponse:
        if server.calls == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"call": server.calls})

    async with upstream(lose_the_first) as (client, _):
        assert (await client.call(CHAT, b"{}", HEADERS)).body == b'{"call": 2}'


async def test_an_upstream_that_is_not_there_is_an_error_that_names_it() -> None:
    async with upstream(statuses(200), base_url="http://127.0.0.1:1/v1") as (client, _):
        answer = await client.call(CHAT, b"{}", HEADERS)
        assert (answer.status, answer.reached, client.retried) == (502, False, 2)
        assert "http://127.0.0.1:1/v1 cannot be reached" in message(answer)
        async with client.stream(CHAT, b"{}", HEADERS) as (head, chunks):
            assert (head.status, head.body) == (502, b"")
            assert b"".join([chunk async for chunk in chunks]) == answer.body


async def test_a_first_byte_that_does_not_come_is_an_error_and_not_tried_again() -> None:
    async with upstream(hang, first_byte_timeout=SHORT) as (client, server):
        answer = await client.call(CHAT, b"{}", HEADERS)
        assert (answer.status, server.calls) == (504, 1)
        assert "did not answer within 0.5 s" in message(answer)
        await asyncio.wait_for(server.left.wait(), 10.0)


async def test_the_first_byte_is_one_of_the_body_not_the_head() -> None:
    async def head_alone(server: Server, request: web.Request) -> web.StreamResponse:
        await web.StreamResponse().prepare(request)
        return await hang(server, request)

    async with upstream(head_alone, first_byte_timeout=SHORT) as (client, _):
        assert (await client.call(CHAT, b"{}", HEADERS)).status == 504


async def test_the_whole_call_has_a_deadline_over_all_its_tries() -> None:
    async with upstream(statuses(503), timeout=SHORT, retries=10, backoff=60.0, max_backoff=60.0) as (client, server):
        assert (await client.call(CHAT, b"{}", HEADERS)).status == 503
        assert server.calls == 1
    async with upstream(one_chunk_then, timeout=SHORT) as (client, _):
        answer = await client.call(CHAT, b"{}", HEADERS)
        assert (answer.status, answer.reached) == (504, True)
        assert "did not go on with its answer within 0.5 s" in message(answer)


async def test_a_pause_within_an_answer_that_is_too_long_interrupts_it() -> None:
    async with upstream(one_chunk_then, idle_timeout=SHORT) as (client, server):
        async with client.stream(CHAT, b"{}", HEADERS) as (head, chunks):
            assert (head.status, await anext(chunks)) == (200, b"data: 1\n\n")
            with pytest.raises(Interrupted, match=r"did not go on with its answer within 0\.5 s"):
                await anext(chunks)
        await asyncio.wait_for(server.left.wait(), 10.0)
        assert (server.calls, client.inflight) == (1, 0)


async def test_an_answer_is_never_asked_for_again_after_its_first_byte() -> None:
    async with upstream(one_chunk_then) as (client, server):
        async with client.stream(CHAT, b"{}", HEADERS) as (_, chunks):
            assert await anext(chunks) == b"data: 1\n\n"
            server.go.set()
            with pytest.raises(Interrupted, match="broke off its answer"):
                await anext(chunks)
        answer = await client.call(CHAT, b"{}", HEADERS)
        assert (answer.status, answer.reached, server.calls) == (502, True, 2)
        assert "broke off its answer" in message(answer)


@pytest.mark.parametrize("answering", [hang, one_chunk_then])
async def test_a_cancelled_call_closes_the_upstreams_connection_at_once(answering: Answering) -> None:
    async with upstream(answering) as (client, server):
        call = asyncio.create_task(client.call(CHAT, b"{}", HEADERS))
        await server.reached.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(server.left.wait(), 10.0)
        assert client.inflight == 0


async def test_a_stream_that_is_left_closes_the_upstreams_connection_at_once() -> None:
    async with upstream(one_chunk_then) as (client, server):
        async with client.stream(CHAT, b"{}", HEADERS) as (_, chunks):
            await anext(chunks)
        await asyncio.wait_for(server.left.wait(), 10.0)


async def test_a_call_that_is_cancelled_between_two_tries_makes_no_other() -> None:
    async with upstream(statuses(503), backoff=60.0, max_backoff=60.0) as (client, server):
        call = asyncio.create_task(client.call(CHAT, b"{}", HEADERS))
        while not client.retried:
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (server.calls, client.inflight) == (1, 0)


async def test_connections_are_used_again_after_whole_answers() -> None:
    peers = set()

    async def note(server: Server, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response({})

    async with upstream(note) as (client, _):
        for _ in range(3):
            await client.call(CHAT, b"{}", HEADERS)
            async with client.stream(CHAT, b"{}", HEADERS) as (_, chunks):
                assert [chunk async for chunk in chunks] == [b"{}"]
    assert len(peers) == 1


async def test_more_calls_than_may_run_or_wait_are_refused_with_a_time_to_come_back() -> None:
    async def when_told(server: Server, request: web.Request) -> web.StreamResponse:
        await server.go.wait()
        return web.json_response({})

    async with upstream(when_told, max_inflight=1, max_waiting=1) as (client, server):
        first = asyncio.create_task(client.call(CHAT, b"{}", HEADERS))
        await server.reached.wait()
        second = asyncio.create_task(client.call(CHAT, b"{}", HEADERS))
        while client.waiting < 1:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refusal:
            await client.call(CHAT, b"{}", HEADERS)
        with pytest.raises(Overloaded):
            async with client.stream(CHAT, b"{}", HEADERS):
                pytest.fail("there was a turn")
        told = overloaded(refusal.value)
        assert (told.status, told.headers["retry-after"], json.loads(told.body)["error"]["code"]) == (429, "1", "overloaded")
        assert (server.calls, client.refused) == (1, 2)
        # what asks nothing of the model needs no turn
        models = asyncio.create_task(client.models(HEADERS))
        deleted = asyncio.create_task(client.call("/responses/r1", None, HEADERS, method="DELETE"))
        while server.calls < 3:
            await asyncio.sleep(0.001)
        server.go.set()
        assert {(await task).status for task in (first, second, models, deleted)} == {200}


async def test_a_client_that_was_not_opened_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"open\(\) was not awaited"):
        await Upstream(UpstreamSettings()).call(CHAT, b"{}", HEADERS)


async def test_redirects_are_passed_on_not_followed() -> None:
    async def elsewhere(server: Server, request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"location": "http://127.0.0.1:1/"})

    async with upstream(elsewhere) as (client, _):
        assert (await client.call(CHAT, b"{}", HEADERS)).status == 307


async def test_a_cookie_that_came_with_one_clients_answer_goes_with_no_others_call() -> None:
    sent: list[str | None] = []

    async def answering(server: Server, request: web.Request) -> web.StreamResponse:
        sent.append(request.headers.get("cookie"))
        response = web.json_response({})
        response.set_cookie("session", "of the first")
        return response

    async with upstream(answering) as (_, server):
        named = server.url.replace("127.0.0.1", "localhost")  # a host that is a number gets no cookies in any case
        client = Upstream(UpstreamSettings(base_url=named))
        await client.open()
        try:
            for _ in range(2):
                assert (await client.call(CHAT, b"{}", HEADERS)).ok
        finally:
            await client.close()
    assert sent == [None, None]


async def test_compressed_answers_arrive_as_text() -> None:
    async def packed(server: Server, request: web.Request) -> web.StreamResponse:
        response = web.json_response({"text": "a" * 5000})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async with upstream(packed) as (client, _):
        assert json.loads((await client.call(CHAT, b"{}", {**HEADERS, "accept-encoding": "gzip"})).body) == {"text": "a" * 5000}


def test_aiohttp_has_the_error_by_which_slow_connections_are_told_from_slow_answers() -> None:
    assert issubclass(aiohttp.ConnectionTimeoutError, TimeoutError)
