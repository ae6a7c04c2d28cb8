"""The gateway: OpenAI's API over HTTP, answered from the cache or from the model behind it.

A plain ASGI application: it runs under Ray Serve (:mod:`serving.app`) and under uvicorn alike.

=====================================================  ===========================================================================
path                                                   is
=====================================================  ===========================================================================
``POST /v1/chat/completions``, ``/v1/completions``,    cached (:mod:`serving.answering`); every answer says in its headers how it
``/v1/embeddings``                                     came about (:mod:`serving.replies`)
``GET /v1/models``, ``GET /v1/models/{model}``,        passed through, streams included. Answers, and what a tenant's key may see,
``POST /v1/responses``                                 are the upstream's. Where there are tenants nothing that is stored there
                                                       may be referred to, for the reason below
``GET /v1/responses/{id}`` and what is below           passed through, but only where there are no tenants: the upstream knows one
                                                       key of all of them, and would show each the others' answers
``/admin/v1/...``                                      the admin API (:mod:`serving.admin`), off without a token
``GET /healthz``, ``GET /readyz``, ``GET /metrics``    for probes and scrapers; metrics only where Ray does not export them
=====================================================  ===========================================================================

Every other path is a 404: the operator's key opens more at the upstream (files, fine-tuning) than clients should reach.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from serving.admin import PREFIX as ADMIN
from serving.admin import AdminRoutes
from serving.administration import Administration, open_audit
from serving.answering import Answering
from serving.inbound import PATHS, Disconnected, Receive, Refused, Scope, Send, identify, read_body, unless_gone
from serving.keys import parse_body
from serving.metrics import PrometheusSink, Sink
from serving.openai_error import openai_error
from serving.replies import JSON_TYPE, Headers, respond
from serving.runtime import Runtime
from serving.settings import GatewaySettings
from serving.turns import Overloaded
from serving.upstream import Interrupted, overloaded

_PROBES = ("/healthz", "/readyz")
"""Paths that load balancers also ask with HEAD."""

_PASSED = re.compile(r"/(models(?:/[A-Za-z0-9._:@/-]+)?|responses(?:/[A-Za-z0-9_-]+(?:/[a-z_]+)?)?)")


class Gateway:
    """The ASGI application. Starts and stops with the server's lifespan events, or by :meth:`start` and :meth:`stop`.

    Args:
        settings: The data plane's settings.
        replica: Name of this replica, unique in the namespace; made up if not given.
        sink: Where metrics go; without one they are served at ``/metrics``, which is for gateways outside Ray.
    """

    def __init__(self, settings: GatewaySettings, *, replica: str | None = None, sink: Sink | None = None) -> None:
        self._prometheus = PrometheusSink() if sink is None else None
        name = replica if replica is not None else uuid.uuid4().hex[:8]
        self.runtime = Runtime(settings, replica=name, sink=sink if sink is not None else self._prometheus or PrometheusSink())
        answering = Answering(self.runtime)
        self._limit = settings.max_request_bytes
        self._audit = open_audit(settings)
        tenants = self.runtime.tenants
        self._admin = AdminRoutes(
            Administration(self.runtime), tenants, self._audit, enabled=tenants.administered, clock=lambda: self.runtime.clock()
        )
        self._routes: dict[str, tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]] = {
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
        }
        for endpoint, path in PATHS.items():
            self._routes[f"/v1{path}"] = ("POST", partial(answering, endpoint=endpoint))
        if self._prometheus is not None:
            self._routes["/metrics"] = ("GET", self._metrics)

    async def start(self) -> None:
        """Open everything; see :meth:`serving.runtime.Runtime.start`."""
        await self.runtime.start()

    async def stop(self) -> None:
        """Close everything."""
        await self.runtime.stop()
        await self._audit.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] == "websocket":
            await _refuse_websocket(scope, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"gateway: expected an HTTP connection, got {scope['type']!r}")
        path = scope["path"][len(scope.get("root_path", "")) :]
        route = self._routes.get(path)
        if route is None:
            await self._other(path, scope, receive, send)
        elif scope["method"] == "HEAD" and path in _PROBES:
            await route[1](scope, receive, _without_body(send))
        elif scope["method"] != route[0]:
            await _not_allowed(send, path, scope["method"], f"{route[0]}, HEAD" if path in _PROBES else route[0])
        else:
            await route[1](scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except Exception as error:  # noqa: BLE001 - the server has to be told, whatever it is
                    await self.stop()
                    await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    # -- what is not cached --------------------------------------------------------------------------------------------------

    async def _other(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path.startswith(ADMIN):
            await self._admin(scope, receive, send)
            return
        below = path[len("/v1") :] if path.startswith("/v1/") else ""
        passed = _PASSED.fullmatch(below)
        method = scope["method"]
        if passed is None or ".." in below or (below.startswith("/responses/") and self.runtime.tenants.configured):
            known = ", ".join(sorted([*self._routes, "/v1/models", "/v1/responses"]))
            body = openai_error(f"no such path: {path}; this gateway has {known}", "invalid_request_error", code="not_found")
            await respond(send, 404, [JSON_TYPE], body)
        elif (allowed := _methods(below)) and method not in allowed:
            await _not_allowed(send, path, method, ", ".join(allowed))
        else:
            with suppress(Disconnected):
                await self._pass(below, scope, receive, send)

    async def _pass(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the upstream and its answer back, as they are."""
        runtime, upstream = self.runtime, self.runtime.upstream
        try:
            identify(runtime.tenants, dict(scope["headers"]).get(b"authorization"))
            raw = await read_body(receive, self._limit)
            if path == "/responses" and runtime.tenants.configured:
                _stateless(raw)
        except Refused as refusal:
            await respond(send, refusal.status, refusal.headers, refusal.body)
            return
        query = scope.get("query_string", b"").decode("latin-1")
        target = f"{path}?{query}" if query else path
        headers = upstream.forwarded(scope["headers"], credentials=not runtime.tenants.configured)
        await unless_gone(receive, self._pass_back(scope["method"], target, raw or None, headers, send))

    async def _pass_back(self, method: str, target: str, raw: bytes | None, headers: dict[str, str], send: Send) -> None:
        begun = False
        try:
            async with self.runtime.upstream.stream(target, raw, headers, method=method) as (head, chunks):
                kind = (b"content-type", head.content_type.encode("latin-1"))
                await send({"type": "http.response.start", "status": head.status, "headers": [kind, *_back(head.headers)]})
                begun = True
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except Overloaded as error:
            refused = overloaded(error)
            await respond(send, refused.status, [JSON_TYPE, *_back(refused.headers)], refused.body)
        except Interrupted as error:
            if begun:  # the connection has to end without a proper end, as the upstream's did
                raise
            await respond(send, error.answer.status, [JSON_TYPE], error.answer.body)

    # -- the gateway itself --------------------------------------------------------------------------------------------------

    async def _healthz(self, scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, [JSON_TYPE], b'{"status":"ok"}')

    async def _readyz(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime = self.runtime
        state = {
            "ready": runtime.ready,
            "replica": runtime.replica,
            "version": runtime.version,
            "config_store": "off" if runtime.settings.redis_url is None else "ok" if runtime.store_reachable else "unreachable",
            "memory": runtime.memory.state if runtime.ready else "",
            "arms": {arm: runtime.cache.knobs(arm).to_dict() for arm in runtime.names} if runtime.ready else {},
        }
        await respond(send, 200 if runtime.ready else 503, [JSON_TYPE], orjson.dumps(state))

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._prometheus is not None
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await respond(send, 200, [kind], self._prometheus.exposition())


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """Answer a connection that would become a WebSocket; a server that can say no more says 403."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1003})
        return
    message = f"{scope['path']} is no WebSocket: expected a plain HTTP request, as OpenAI's clients send it"
    body = openai_error(message, "invalid_request_error", code="websocket_not_supported")
    await send({"type": "websocket.http.response.start", "status": 400, "headers": [JSON_TYPE]})
    await send({"type": "websocket.http.response.body", "body": body})


def _methods(path: str) -> tuple[str, ...]:
    if path.startswith("/models"):
        return ("GET",)
    return ("POST",) if path == "/responses" else ("GET", "POST", "DELETE")


def _back(headers: Any) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _stateless(raw: bytes) -> None:
    """Check that a request for a response refers to nothing that the upstream stores, where tenants share its key.

    Raises:
        Refused: If it does, or cannot be read.
    """
    try:
        body = parse_body(raw)
    except ValueError as error:
        raise Refused(str(error)) from error
    given = body.get("input")
    items = given if isinstance(given, list) else ()
    kinds = [item.get("type") for item in items if isinstance(item, dict) and "role" not in item]
    referred = None in kinds or "item_reference" in kinds
    for name, found in (
        ("previous_response_id", body.get("previous_response_id") is not None),
        ("conversation", body.get("conversation") is not None),
        ("input", referred),
    ):
        if found:
            raise Refused(f"{name}: expected all input in the request itself: what is stored is not told by tenant", param=name)


async def _not_allowed(send: Send, path: str, method: str, allowed: str) -> None:
    body = openai_error(f"{path}: expected {allowed}, got {method}", "invalid_request_error")
    await respond(send, 405, [JSON_TYPE, (b"allow", allowed.encode())], body)


def _without_body(send: Send) -> Send:
    async def bare(message: MutableMapping[str, Any]) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return bare
