"""What a request asks of the gateway: read, authenticated, parsed, with its directives and its identity.

Whatever is wrong with a request is found here, before cache or upstream hear of it, and said in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from serving import validators
from serving.directives import NO_DIRECTIVES, DirectiveError, parse_directives
from serving.keys import Endpoint, Fingerprint, fingerprint, parse_body
from serving.openai_error import JSON, openai_error
from serving.policy import Asked
from serving.settings import GatewaySettings
from serving.tenants import Tenants, Unauthorised
from serving.tiers.base import EntryMeta

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
PATHS: Mapping[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions", "embeddings": "/embeddings"}
"""The endpoints whose answers are cached, and their paths below the API's version."""

_READ: Mapping[bytes, str] = {
    name.encode(): name
    for name in (
        "cache-control", "last-event-id", "x-cache-threshold", "x-cache-max-error", "x-cache-tags", "x-cache-documents",
        "x-cache-offset", "x-cache-fresh-id", "if-range",
    )
}  # fmt: skip
"""Headers that ask something of the cache."""

_MOST_EVENTS = 10**9


class Refused(ValueError):
    """A request that is answered with an error before it reaches cache or upstream.

    Attributes:
        status: HTTP status.
        body: The error in OpenAI's shape.
        headers: What is sent with it: a 401 says how to authenticate (RFC 9110, 11.6.1).
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = openai_error(message, "invalid_request_error", param=param, code=code)
        self.headers = [(b"content-type", JSON.encode()), *([(b"www-authenticate", b"Bearer")] if status == 401 else [])]


class Disconnected(Exception):
    """The client went away."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """One request, understood.

    Attributes:
        endpoint: What is asked.
        raw: The body's bytes, as they came.
        body: The same, parsed.
        asked: The request as the decision core sees it.
        tenant: Who asks; ``""`` where there are no tenants.
        resume: Events of a streamed answer that the client has already; None where it did not say.
        validator: Which stream they are of (:mod:`serving.validators`); ``""`` where it did not say.
        numbered: Whether events shall carry their number, for clients that come back with ``Last-Event-ID``.
        fresh_id: Whether a hit shall get an id of its own.
    """

    endpoint: Endpoint
    raw: bytes
    body: Mapping[str, Any]
    asked: Asked
    tenant: str
    resume: int | None = None
    validator: str = ""
    numbered: bool = False
    fresh_id: bool = False

    @property
    def fp(self) -> Fingerprint:
        """Its identity."""
        return self.asked.fp

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.body.get("tools") or self.body.get("functions"))

    def validator_of(self, tag: str) -> str:
        """Return the validator of a stream in the form that this client gets; ``""`` where that is made for it alone."""
        if not tag or self.fresh_id:
            return ""
        return f"{'u' if self.asked.usage else 'p'}{'n' if self.numbered else ''}{tag}"

    def meta(self, *, text: bool) -> EntryMeta:
        """Return what is kept of the request beside its answer.

        Args:
            text: Whether with its text, for an entry that may answer by meaning.
        """
        asked, given = self.asked, self.asked.directives
        return EntryMeta(
            asked.fp.text if text else "", str(self.body["model"]), asked.temperature, self.tenant, given.namespace, given.tags,
            given.documents,
        )  # fmt: skip


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return the whole body.

    Raises:
        Refused: If it is longer than ``limit`` bytes.
        Disconnected: If the client went away before it was complete.
    """
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        parts, size = [body], len(body)
        while message.get("more_body") and size <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
        body = b"".join(parts)
    if message["type"] == "http.disconnect":
        raise Disconnected
    if len(body) > limit:
        raise Refused(f"the body is too large: expected at most {limit} bytes", status=413, code="request_too_large")
    return body


async def unless_gone(receive: Receive, work: Awaitable[None], left: Callable[[], None] = lambda: None) -> None:
    """Do the work, and give it up when the client goes away.

    The work runs in the caller's own task: another one would cost a miss two more rounds of the event loop.

    Args:
        receive: Says when the client goes.
        work: What to do.
        left: Told that it did, also where the server cancels the request for that by itself, as Ray Serve does.

    Raises:
        Disconnected: If it did.
    """
    loop = asyncio.get_running_loop()
    working = True

    def ended(watching: asyncio.Task[None]) -> None:
        if not watching.cancelled():
            watching.exception()  # a server that fails to say that the client has gone says that it has
        if working:
            scope.reschedule(loop.time())

    gone = loop.create_task(_disconnected(receive), name="client-gone")
    try:
        async with asyncio.timeout(None) as scope:
            gone.add_done_callback(ended)
            try:
                await work
            finally:
                working = False
                gone.cancel()
    except TimeoutError:
        if scope.expired():
            left()
            raise Disconnected from None
        raise
    except asyncio.CancelledError:
        if gone.done() and not gone.cancelled():
            left()
        raise


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def identify(tenants: Tenants, authorization: bytes | None) -> str:
    """Return the tenant that asks.

    Raises:
        Refused: If a known key is required and the request has none.
    """
    try:
        return tenants.tenant_of(authorization)
    except Unauthorised as error:
        raise Refused(error.message, status=error.status, code=error.code) from None


def understand(
    headers: Iterable[tuple[bytes, bytes]], raw: bytes, endpoint: Endpoint, *, settings: GatewaySettings, tenants: Tenants
) -> Inbound:
    """Return the request.

    Args:
        headers: Its headers, lower-case names, as ASGI gives them.
        raw: Its body.
        endpoint: What is asked.
        settings: The data plane's settings.
        tenants: Who may ask.

    Raises:
        Refused: If it is not one that can be answered; the error says what was expected.
    """
    given: dict[str, str] = {}
    authorization: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            authorization = value
        elif name in _READ:
            known, text = _READ[name], value.decode("latin-1")
            given[known] = f"{given[known]}, {text}" if known in given else text  # several lines are one list (RFC 9110, 5.3)
    tenant = identify(tenants, authorization)
    body = _parse(raw, endpoint)
    directives = NO_DIRECTIVES
    if given or "cache" in body:
        try:
            directives = parse_directives(given.get("cache-control"), given, body.get("cache"), settings.callers)
        except DirectiveError as error:
            raise Refused(str(error), param=error.param) from None
    fp = _identity(body, endpoint, tenant, namespace_of(settings.namespace, directives.namespace), settings.generation)
    stream, usage = _form(body, endpoint)
    asked = Asked(fp, directives, stream, usage, False, _temperature(body), _choices(body, endpoint))
    if not given:
        return Inbound(endpoint, raw, body, asked, tenant)
    resume, validator = _events(given) if stream else (None, "")
    return Inbound(
        endpoint, raw, body, asked, tenant, resume, validator,
        stream and "last-event-id" in given,
        given.get("x-cache-fresh-id", "").lower() in ("1", "true", "yes"),
    )  # fmt: skip


def namespace_of(own: str, callers: str) -> str:
    """Return the namespace of a request's identity: the deployment's, divided by the caller's.

    No two pairs give the same, since the deployment's has no ``/``.
    """
    return f"{own}/{callers}" if callers else own


def upstream_body(raw: bytes, body: Mapping[str, Any], *, usage: bool) -> bytes:
    """Return the body to send to the model: as it came, but for what is the gateway's own.

    Args:
        raw: The request's bytes.
        body: The same, parsed.
        usage: Whether a streamed answer shall be asked for its tokens.
    """
    options = body.get("stream_options")
    add_usage = usage and bool(body.get("stream")) and not (isinstance(options, Mapping) and options.get("include_usage"))
    own_cache = isinstance(body.get("cache"), Mapping)
    if not add_usage and not own_cache:
        return raw
    changed = {name: value for name, value in body.items() if not (own_cache and name == "cache")}
    if add_usage:
        changed["stream_options"] = {**(options if isinstance(options, Mapping) else {}), "include_usage": True}
    return dumps(changed)


def dumps(value: object) -> bytes:
    """Return JSON; integers of any size."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits
        import json

        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _parse(raw: bytes, endpoint: Endpoint) -> Mapping[str, Any]:
    try:
        body = parse_body(raw)
    except ValueError as error:
        raise Refused(str(error)) from error
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise Refused(f"model: expected the name of a model, got {_excerpt(body.get('model'))}", param="model")
    if endpoint == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise Refused(f"messages: expected a list of at least one message object, got {_excerpt(messages)}", param="messages")
    elif endpoint == "completions":
        if not isinstance(body.get("prompt"), str | list):
            raise Refused(f"prompt: expected a text or a list, got {_excerpt(body.get('prompt'))}", param="prompt")
    elif not isinstance(body.get("input"), str | list) or body["input"] == []:
        raise Refused(f"input: expected a text or a list of at least one, got {_excerpt(body.get('input'))}", param="input")
    return body


def _identity(body: Mapping[str, Any], endpoint: Endpoint, tenant: str, namespace: str, generation: str) -> Fingerprint:
    try:
        return fingerprint(body, endpoint=endpoint, tenant=tenant, namespace=namespace, generation=generation)
    except ValueError as error:
        raise Refused(str(error)) from error


def _form(body: Mapping[str, Any], endpoint: Endpoint) -> tuple[bool, bool]:
    """Whether a stream is asked for, and whether with its usage.

    What is no boolean is refused. OpenAI refuses it too; other servers take ``"false"`` for false, or, as any text, for true. The
    gateway has to know before the model does, since one entry answers in either form: what it guessed could be the other form.

    Raises:
        Refused: If it cannot be told.
    """
    if endpoint == "embeddings" or not _flag(body.get("stream"), "stream"):
        return False, False
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise Refused(f"stream_options: expected an object, got {_excerpt(options)}", param="stream_options")
    return True, options is not None and _flag(options.get("include_usage"), "stream_options.include_usage")


def _flag(value: object, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name}: expected true or false, got {_excerpt(value)}", param=name)
    return bool(value)


def _temperature(body: Mapping[str, Any]) -> float | None:
    value = body.get("temperature")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _choices(body: Mapping[str, Any], endpoint: Endpoint) -> int:
    """How many answers are asked for: a list of texts, or of lists of tokens, is several; a list of tokens is one."""
    count = body.get("n")
    choices = count if isinstance(count, int) and not isinstance(count, bool) and count > 0 and endpoint != "embeddings" else 1
    if endpoint == "chat":
        return choices
    given = body["prompt" if endpoint == "completions" else "input"]
    several = isinstance(given, list) and given and isinstance(given[0], str | list)
    return choices * len(given) if several else choices


def _events(given: Mapping[str, str]) -> tuple[int | None, str]:
    """How many events a client has, and of which stream: the one that its last event names, or else ``If-Range``."""
    name = next((name for name in ("x-cache-offset", "last-event-id") if name in given), None)
    if name is None:
        return None, ""
    named = validators.of_if_range(given.get("if-range"))
    text = given[name].strip()
    if not text:
        return 0, named
    found = validators.of_event_id(text)
    if found is None or found[0] > _MOST_EVENTS or (found[1] and name == "x-cache-offset"):
        what = "the number of events received" if name == "x-cache-offset" else "the id of the last event received"
        raise Refused(f"{name}: expected {what}, got {given[name][:40]!r}", param=name)
    return found[0], found[1] or named


def _excerpt(value: object) -> str:
    if value is None:
        return "nothing"
    try:
        text = dumps(value).decode()
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
