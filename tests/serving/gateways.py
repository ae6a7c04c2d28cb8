"""A gateway under uvicorn in the test's own event loop, before a real model server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import uvicorn

from serving.gateway import Gateway
from serving.settings import GatewaySettings
from tests.e2e.stack import Reply, chat


class Client:
    """Talks to one gateway; ``gateway`` is the object itself, for what HTTP does not show."""

    def __init__(self, gateway: Gateway, url: str, session: aiohttp.ClientSession) -> None:
        self.gateway, self.url, self._session = gateway, url, session

    async def ask(self, text: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        """Ask a question."""
        return await self.request("POST", "/v1/chat/completions", json=chat(text, **fields), headers=headers)

    async def request(self, method: str, path: str, **arguments: Any) -> Reply:
        """Any request."""
        async with self._session.request(method, self.url + path, **arguments) as answer:
            return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.read())

    async def metric(self, line: str) -> float:
        """The value of one series as exported, after a flush; ``line`` is its name with labels."""
        await self.gateway.runtime.flush()
        text = (await self.request("GET", "/metrics")).body.decode()
        return next(float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line + " "))


@contextlib.asynccontextmanager
async def running(settings: Mapping[str, Any], *, replica: str = "r0") -> AsyncIterator[Client]:
    """Start a gateway and stop it, by the lifespan events a server sends."""
    # Redis may be slow on a machine that runs other tests: that is not what is tested here.
    common = {"ghost": {"window": 0.01}, "redis_deadline": 10.0}
    gateway = Gateway(GatewaySettings.model_validate({**common, **settings}), replica=replica)
    async with served(gateway, lifespan="on") as url, aiohttp.ClientSession() as session:
        yield Client(gateway, url, session)


@contextlib.asynccontextmanager
async def served(app: Any, *, lifespan: Any = "off") -> AsyncIterator[str]:
    """Serve an ASGI application on a free loopback port; gives its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan=lifespan, timeout_graceful_shutdown=2)
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
