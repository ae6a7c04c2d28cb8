"""The gateway: OpenAI's API over HTTP, answered from the cache or from the model behind it.

A plain ASGI application: it runs under Ray Serve (:mod:`serving.app`) and under uvicorn alike. Every answer says in its headers
how it came about: ``x-cache`` (HIT, SEMANTIC, MISS, BYPASS), ``x-cache-tier``, ``x-cache-arm``, ``x-cachepilot-version``, and
``Age``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from serving.access_log import Outcome
from serving.cache import Lookup
from serving.keys import Fingerprint, fingerprint, key64, parse_body
from serving.metrics import PrometheusSink, Sink
from serving.runtime import Runtime
from serving.settings import GatewaySettings
from serving.tiers.base import Entry
from serving.upstream import JSON, UpstreamAnswer, openai_error
from serving.warmup import Remembered

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_CHAT = "/v1/chat/completions"
_PROBES = ("/healthz", "/readyz")
"""Paths that load balancers also ask with HEAD."""
_JSON = (b"content-type", JSON.encode())
_CACHE = {"hit": (b"x-cache", b"HIT"), "semantic_hit": (b"x-cache", b"SEMANTIC")}
_MISS = (b"x-cache", b"MISS")
_BYPASS = (b"x-cache", b"BYPASS")


class _Refused(ValueError):
    """A request that is answered with an error before it reaches cache or upstream."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = openai_error(message, "invalid_request_error", param=param, code=code)


class _Disconnected(Exception):
    """The client went away before its request was complete."""


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
        self._limit = settings.max_request_bytes
        self._routes: dict[str, tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]] = {
            _CHAT: ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
        }
        if self._prometheus is not None:
            self._routes["/metrics"] = ("GET", self._metrics)

    async def start(self) -> None:
        """Open everything; see :meth:`serving.runtime.Runtime.start`."""
        await self.runtime.start()

    async def stop(self) -> None:
        """Close everything."""
        await self.runtime.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"gateway: expected an HTTP connection, got {scope['type']!r}")
        path = scope["path"][len(scope.get("root_path", "")) :]
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(sorted(self._routes))
            body = openai_error(f"no such path: {path}; this gateway has {known}", "invalid_request_error", code="not_found")
            await _respond(send, 404, [_JSON], body)
        elif scope["method"] == "HEAD" and path in _PROBES:
            await route[1](scope, receive, _without_body(send))
        elif scope["method"] != route[0]:
            allowed = f"{route[0]}, HEAD" if path in _PROBES else route[0]
            body = openai_error(f"{path}: expected {allowed}, got {scope['method']}", "invalid_request_error")
            await _respond(send, 405, [_JSON, (b"allow", allowed.encode())], body)
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

    # -- chat completions ----------------------------------------------------------------------------------------------------

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        runtime = self.runtime
        at = runtime.clock()
        try:
            raw = await _read(receive, self._limit)
            body = _parse(raw)
            fp = _identity(body, runtime.settings.namespace)
        except _Refused as refusal:
            await _respond(send, refusal.status, [_JSON], refusal.body)
            return
        except _Disconnected:
            return
        arm = runtime.arms.arm(fp.key)
        if body.get("stream"):
            await self._bypass(scope, send, raw, fp, arm, at, began)
            return
        found = await runtime.lookup(arm, fp, at)
        if found.entry is not None:
            entry = found.entry
            await _respond(send, 200, self._headers(arm, _CACHE[found.outcome], found.tier, found.age), entry.body)
            runtime.hit(arm, found)
            runtime.record(
                at, time.perf_counter() - began, fp, arm, found.outcome, 200,
                tier=found.tier, entry=entry, age=found.age, stale=found.stale,
            )  # fmt: skip
            self._settle(scope, raw, fp, arm, entry, at)
            return
        await self._miss(scope, send, raw, fp, arm, at, began, found)

    async def _miss(
        self, scope: Scope, send: Send, raw: bytes, fp: Fingerprint, arm: str, at: float, began: float, found: Lookup
    ) -> None:
        runtime = self.runtime
        headers = runtime.upstream.forwarded(scope["headers"])
        answer, entry, shared = await runtime.fetch(arm, fp, raw, headers, found.vector)
        if shared:
            # It waited for an identical request and was answered without an upstream call of its own: a hit, as in HTTP caches.
            await _respond(send, 200, self._headers(arm, _CACHE["hit"], "memory", 0.0), answer.body)
            runtime.coalesced(arm)
            outcome: Outcome = "hit"
        else:
            await _respond(send, answer.status, self._headers(arm, _MISS, "", None, answer), answer.body)
            outcome = "miss" if answer.ok else "error"
        tier = "memory" if shared else ""
        runtime.record(at, time.perf_counter() - began, fp, arm, outcome, answer.status, tier=tier, entry=entry)
        if entry is not None:
            self._settle(scope, raw, fp, arm, entry, at)

    async def _bypass(self, scope: Scope, send: Send, raw: bytes, fp: Fingerprint, arm: str, at: float, began: float) -> None:
        runtime = self.runtime
        async with runtime.upstream.stream(raw, runtime.upstream.forwarded(scope["headers"])) as (head, chunks):
            headers = self._headers(arm, _BYPASS, "", None, head)
            await send({"type": "http.response.start", "status": head.status, "headers": headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        if not head.ok:
            runtime.metrics.count("cachepilot_upstream_errors_total", arm)
        runtime.record(at, time.perf_counter() - began, fp, arm, "bypass" if head.ok else "error", head.status)

    def _settle(self, scope: Scope, raw: bytes, fp: Fingerprint, arm: str, entry: Entry, at: float) -> None:
        """After the answer: tell the ghost and the hot set, and keep the request for refreshing."""
        runtime = self.runtime
        runtime.answered(arm, entry, at)
        if entry.key != fp.key:  # a semantic hit: it is the other request's entry that is hot
            return
        warmer, key = runtime.warmers[arm], key64(fp.key)
        if not warmer.knows(key):
            headers = runtime.upstream.forwarded(scope["headers"], credentials=False)
            warmer.remember(key, Remembered(fp, raw, headers))

    def _headers(
        self, arm: str, cache: tuple[bytes, bytes], tier: str, age: float | None, answer: UpstreamAnswer | None = None
    ) -> Headers:
        headers = [
            _JSON if answer is None else (b"content-type", answer.content_type.encode("latin-1")),
            cache,
            (b"x-cache-arm", arm.encode()),
            (b"x-cachepilot-version", b"%d" % self.runtime.version),
        ]
        if tier:
            headers.append((b"x-cache-tier", tier.encode()))
        if age is not None:
            headers.append((b"age", b"%d" % age))
        if answer is not None:
            headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
        return headers

    # -- the rest ------------------------------------------------------------------------------------------------------------

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        upstream = self.runtime.upstream
        answer = await upstream.models(upstream.forwarded(scope["headers"]))
        await _respond(send, answer.status, [(b"content-type", answer.content_type.encode("latin-1"))], answer.body)

    async def _healthz(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _respond(send, 200, [_JSON], b'{"status":"ok"}')

    async def _readyz(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime = self.runtime
        state = {
            "ready": runtime.ready,
            "replica": runtime.replica,
            "version": runtime.version,
            "config_store": "off" if runtime.settings.redis_url is None else "ok" if runtime.store_reachable else "unreachable",
            "arms": {arm: runtime.cache.knobs(arm).to_dict() for arm in runtime.names} if runtime.ready else {},
        }
        await _respond(send, 200 if runtime.ready else 503, [_JSON], orjson.dumps(state))

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._prometheus is not None
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await _respond(send, 200, [kind], self._prometheus.exposition())


async def _respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _without_body(send: Send) -> Send:
    async def bare(message: MutableMapping[str, Any]) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return bare


async def _read(receive: Receive, limit: int) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        body += message.get("body", b"")
        if len(body) > limit:
            break
    if message["type"] == "http.disconnect":
        raise _Disconnected
    if len(body) > limit:
        raise _Refused(f"the body is too large: expected at most {limit} bytes", status=413, code="request_too_large")
    return body


def _parse(raw: bytes) -> Mapping[str, Any]:
    try:
        body = parse_body(raw)
    except ValueError as error:
        raise _Refused(str(error)) from error
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise _Refused(f"model: expected the name of a model, got {_excerpt(body.get('model'))}", param="model")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise _Refused(f"messages: expected a list of at least one message object, got {_excerpt(messages)}", param="messages")
    return body


def _identity(body: Mapping[str, Any], namespace: str) -> Fingerprint:
    return fingerprint(body, namespace=namespace)


def _excerpt(value: object) -> str:
    if value is None:
        return "nothing"
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
