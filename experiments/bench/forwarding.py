"""What a gateway on Ray Serve costs that does nothing: the bound below which none there can get."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import aiohttp

from serving.app import GatewayReplica, start
from serving.inbound import Receive, Scope, Send, read_body
from serving.replies import JSON_TYPE, respond
from serving.settings import GatewaySettings

_PATH = "/v1/chat/completions"
_MOST_BYTES = 1 << 20


class Forwarding:
    """The ASGI application: passes each completion on to the model, and the whole answer back.

    Args:
        base_url: The model.
    """

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url}/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every other path is answered with nothing, as where one asks whether it is ready."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        status, body = 200, b"{}"
        if scope["path"] == _PATH:
            assert self._session is not None
            asked = await read_body(receive, _MOST_BYTES)
            async with self._session.post(self._url, data=asked, headers={"content-type": "application/json"}) as answer:
                status, body = answer.status, await answer.read()
        await respond(send, status, [JSON_TYPE], body)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._session = aiohttp.ClientSession()
            elif self._session is not None:
                await self._session.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


class ForwardingReplica(GatewayReplica):
    """The deployment's class; give it to :func:`serving.app.start`."""

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application; Ray Serve calls it within the replica."""
        return Forwarding(self._settings.upstream.base_url)


@contextlib.contextmanager
def forwarding(base_url: str) -> Iterator[str]:
    """Run it as the gateway is run, one replica behind HAProxy; yields the URL of its chat completions.

    Args:
        base_url: The model.
    """
    settings = {"port": 0, "metrics_port": 0, "memory": {"shared": False}, "upstream": {"base_url": base_url}}
    with start(GatewaySettings.model_validate(settings), replica=ForwardingReplica) as running:
        yield f"{running.url}{_PATH}"
