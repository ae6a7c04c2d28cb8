"""A gateway under uvicorn in the test's own event loop, before a real model server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from serving.gateway import Gateway
from serving.settings import GatewaySettings
from serving.sse import EventParser
from tests.e2e.stack import Reply, chat

ARENA_BYTES = 64 << 20


class Client:
    """Talks to one gateway; ``gateway`` is the object itself, for what HTTP does not show."""

    def __init__(self, gateway: Gateway, url: str, session: aiohttp.ClientSession) -> None:
        self.gateway, self.url, self._session = gateway, url, session

    async def ask(self, text: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        """Ask a question."""
        return await self.request("POST", "/v1/chat/completions", json=chat(text, **fields), headers=headers)

    async def post(self, body: Mapping[str, Any], path: str = "/v1/chat/completions", **headers: str) -> Reply:
        """Send any body; ``_`` in a header's name stands for ``-``."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.request("POST", path, json=body, headers=given)

    async def request(self, method: str, path: str, **arguments: Any) -> Reply:
        """Any request."""
        async with self._session.request(method, self.url + path, **arguments) as answer:
            return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read())

    @contextlib.asynccontextmanager
    async def stream(
        self, text: str, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncIterator[bytes]]]:
        """Ask for a stream; gives the response and its events as they come. Leaving the context goes away."""
        body = chat(text, stream=True, **fields)
        async with self._session.post(self.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            yield answer, _events(answer)

    async def metric(self, line: str) -> float:
        """The value of one series as exported, after a flush; ``line`` is its name with labels. 0 where there is none."""
        await self.gateway.runtime.flush()
        text = (await self.request("GET", "/metrics")).body.decode()
        return next((float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line + " ")), 0.0)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    parser = EventParser()
    async for chunk in answer.content.iter_any():
        for event in parser.feed(chunk):
            yield event.data


class Model:
    """A real HTTP server that answers as it is told, and knows what it was asked.

    By default each call is answered with a text of its own, ``answer <number>``, in words of which a stream has one per event.

    Attributes:
        asked: The bodies that came, in order.
        headers: Their headers.
        message: Makes the message of an answer from its number and the request.
        finish: ``finish_reason`` of the answers.
        extra: Further fields of an answer.
        sends: Headers of the answers of chat completions.
        status: HTTP status; other than 200 the body is ``error``.
        hold: A JSON answer waits for it.
        pause: A stream waits for it after ``pause_after`` events.
        cut_after: Events after which a stream's connection is broken; None: none is.
        left: How often a client went away before the end of its answer.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.message: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda number, _: {"content": f"this is answer {number}"}
        self.finish: str | None = "stop"
        self.extra: dict[str, Any] = {}
        self.sends: dict[str, str] = {}
        self.status = 200
        self.error = b'{"error":{"message":"no","type":"t","param":null,"code":"c"}}'
        self.hold, self.pause = asyncio.Event(), asyncio.Event()
        self.hold.set()
        self.pause.set()
        self.pause_after = 2
        self.cut_after: int | None = None
        self.done = True
        self.left = 0
        self._numbers = itertools.count(1)
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/responses/{id}", self._responses, methods=["GET"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{id:path}", self._models),
            ]
        )

    async def _begin(self, request: Request) -> tuple[int, dict[str, Any]]:
        body = json.loads(await request.body() or b"{}")
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        return next(self._numbers), body

    async def _chat(self, request: Request) -> Response:
        number, body = await self._begin(request)
        if self.status != 200:
            await self.hold.wait()
            return Response(self.error, self.status, media_type="application/json")
        message = {"role": "assistant", **self.message(number, body)}
        if body.get("stream"):
            return StreamingResponse(self._stream(number, message, body), headers=self.sends, media_type="text/event-stream")
        await self.hold.wait()
        choices = [{"index": index, "message": message, "finish_reason": self.finish} for index in range(body.get("n") or 1)]
        answer = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": body["model"]}
        return _json({**answer, "choices": choices, "usage": usage(3, 5), **self.extra}, self.sends)

    async def _stream(self, number: int, message: Mapping[str, Any], body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1, "model": body["model"], **self.extra}
        chunks: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        for name, value in message.items():
            if isinstance(value, str) and name != "role":
                chunks += [{name: word + " "} for word in value.split()]
            elif name == "tool_calls":
                chunks += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(value)]
        events = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in chunks]
        if self.finish is not None:
            events.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**head, "choices": [], "usage": usage(3, 5)})
        finished = False
        try:
            for place, event in enumerate(events):
                if place == self.pause_after:
                    await self.pause.wait()
                if place == self.cut_after:
                    finished = True
                    raise ConnectionError("cut")
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
            if self.done:
                yield b"data: [DONE]\n\n"
            finished = True
        finally:
            self.left += not finished

    async def _completions(self, request: Request) -> Response:
        number, body = await self._begin(request)
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choices = [{"index": index, "text": f"text {number}", "finish_reason": "stop"} for index in range(len(prompts))]
        return _json({"id": f"cmpl-{number}", "object": "text_completion", "choices": choices, "usage": usage(2, 2)})

    async def _embeddings(self, request: Request) -> Response:
        number, body = await self._begin(request)
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"object": "embedding", "index": index, "embedding": [float(number), index]} for index in range(len(inputs))]
        return _json({"object": "list", "data": data, "model": body["model"], "usage": {"prompt_tokens": 4, "total_tokens": 4}})

    async def _responses(self, request: Request) -> Response:
        number, body = await self._begin(request)
        if request.query_params.get("stream") == "true":

            async def events() -> AsyncIterator[bytes]:
                yield b"event: response.created\ndata: {}\n\n"
                await self.pause.wait()
                yield b"event: response.completed\ndata: {}\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        if body.get("stream"):
            return Response(b"event: response.created\ndata: {}\n\n", media_type="text/event-stream")
        return _json(
            {"id": request.path_params.get("id", f"resp-{number}"), "object": "response", "query": str(request.query_params)}
        )

    async def _models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return _json({"object": "list", "data": [], "id": request.path_params.get("id")})


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The tokens of an answer."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _json(value: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value).encode(), headers=headers, media_type="application/json")


@contextlib.asynccontextmanager
async def before(model: Model, *, replicas: int = 1, **settings: Any) -> AsyncIterator[list[Client]]:
    """Start gateways of one node before a model; ``settings`` as of the gateway, ``upstream`` besides its address."""
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(model.app))
        upstream = {"base_url": f"{url}/v1", "retries": 0, **settings.pop("upstream", {})}
        arena = stack.enter_context(tempfile.TemporaryDirectory(prefix="cp-")) + "/arena"
        memory = {"path": arena, "size": ARENA_BYTES, **settings.pop("memory", {})}
        shared = {**settings, "memory": memory, "upstream": upstream, "replicas": replicas}
        clients = [await stack.enter_async_context(running(shared, replica=f"r{number}")) for number in range(replicas)]
        try:
            yield clients
        finally:  # a test that failed must not wait for what it holds up
            model.hold.set()
            model.pause.set()


@contextlib.asynccontextmanager
async def gateway(model: Model, **settings: Any) -> AsyncIterator[Client]:
    """Start one gateway before a model; see :func:`before`."""
    async with before(model, **settings) as clients:
        yield clients[0]


@contextlib.asynccontextmanager
async def running(settings: Mapping[str, Any], *, replica: str = "r0") -> AsyncIterator[Client]:
    """Start a gateway and stop it, by the lifespan events a server sends."""
    # Redis may be slow on a machine that runs other tests: that is not what is tested here.
    common = {"ghost": {"window": 0.01}, "redis_deadline": 10.0}
    with tempfile.TemporaryDirectory(prefix="cp-") as folder:
        memory = {"path": f"{folder}/arena", "size": ARENA_BYTES, **settings.get("memory", {})}
        made = Gateway(GatewaySettings.model_validate({**common, **settings, "memory": memory}), replica=replica)
        async with served(made, lifespan="on") as url, aiohttp.ClientSession() as session:
            yield Client(made, url, session)


@contextlib.asynccontextmanager
async def served(app: Any, *, lifespan: Any = "off") -> AsyncIterator[str]:
    """Serve an ASGI application on a free loopback port; gives its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan=lifespan, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not task.done(), "the server ended at its start"
            await asyncio.sleep(0.002)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
