"""The admin API: what operators see and change, under ``/admin/v1/``, with tokens of its own.

- ``GET stats``: what the answering replica counts and holds.
- ``GET knobs``: knobs by arm, and their version; only the tuner writes them.
- ``GET entries/{id}``: one entry's facts. ``?content=true`` shows its question and answer as well, and is recorded.
- ``POST entries/{id}/feedback`` ``{"verdict": "good"}`` or ``"bad"``, and optionally the ``similarity`` of the answer that was
  judged. A bad entry is removed.
- ``POST flush``: removes the entries that match all that is given of ``arm``, ``tenant``, ``namespace``, ``tag``, ``document``
  and ``model``; everything by ``{"all": true}``.

An entry's id is what the header ``x-cache-entry`` says: the first 16 hexadecimal digits of its key. Every change is recorded,
with what came of it, in the audit (:mod:`serving.audit`), from which it reaches the ledger. Without tokens the whole API is 404.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs

import orjson

from serving.audit import Audit, AuditEvent
from serving.openai_error import JSON, openai_error
from serving.tiers.base import Entry, EntryMeta, TierUnavailable

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Verdict = Literal["good", "bad"]

PREFIX = "/admin/v1/"
"""Where the API is; the gateway hands every path below it to :class:`AdminRoutes`."""

ID_DIGITS = 16
"""Hexadecimal digits of an entry's id."""

_LARGEST = 64 * 1024
"""Bytes of a request's body; a change is described in far fewer."""

_ENTRY = re.compile(rf"entries/([0-9a-f]{{{ID_DIGITS}}})(/feedback)?")


@dataclass(frozen=True, slots=True)
class FlushWhere:
    """Which entries to remove: those that match everything that is given; None matches all.

    Attributes:
        arm: Entries of this arm.
        tenant: Entries of this tenant; ``""``: those without one.
        namespace: Entries of this namespace of a caller; ``""``: those without one.
        tag: Entries with this tag.
        document: Entries made from this document.
        model: Entries of this model.
    """

    arm: str | None = None
    tenant: str | None = None
    namespace: str | None = None
    tag: str | None = None
    document: str | None = None
    model: str | None = None

    def matches(self, arm: str, meta: EntryMeta) -> bool:
        """Whether an entry of that arm with that metadata is to be removed."""
        return (
            self.arm in (None, arm)
            and self.tenant in (None, meta.tenant)
            and self.namespace in (None, meta.namespace)
            and self.model in (None, meta.model)
            and (self.tag is None or self.tag in meta.tags)
            and (self.document is None or self.document in meta.documents)
        )

    @property
    def whole_arms(self) -> bool:
        """Whether every entry of the arms concerned goes, so that no metadata has to be read."""
        return not (set(self.given()) - {"arm"})

    def given(self) -> dict[str, str]:
        """Return what is given, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """An entry and where it is.

    Attributes:
        arm: Its arm.
        entry: The entry.
        tiers: Names of the tiers that hold it.
    """

    arm: str
    entry: Entry
    tiers: tuple[str, ...] = ()


class AdminBackend(Protocol):
    """What the API asks of a replica. Any method may raise :class:`TierUnavailable`, which is answered with 503."""

    async def stats(self) -> Mapping[str, Any]:
        """Return what the replica counts and holds; JSON-ready."""
        ...

    async def knobs(self) -> Mapping[str, Any]:
        """Return ``{"version": ..., "arms": {arm: knobs}}``; JSON-ready."""
        ...

    async def find(self, entry_id: str) -> FoundEntry | None:
        """Return the entry whose key begins with these digits, without making it recently used; None: there is none."""
        ...

    async def feedback(self, entry_id: str, verdict: Verdict, similarity: float | None) -> bool | None:
        """Tell the acceptance rule that the entry answered well or badly; remove a bad one from every tier.

        Args:
            entry_id: The entry.
            verdict: ``good`` or ``bad``.
            similarity: Of the answer by meaning that is judged; None: an exact one, or not known.

        Returns:
            Whether the entry was removed; None where there is no such entry.
        """
        ...

    async def flush(self, where: FlushWhere) -> int:
        """Remove the entries that match, from every tier of every replica; how many there were."""
        ...


class AdminAuth(Protocol):
    """Who is an operator; :class:`serving.tenants.Tenants` knows."""

    def is_admin(self, authorization: bytes | None) -> bool:
        """Whether the ``Authorization`` header holds one of the admin API's tokens."""
        ...


class AdminRoutes:
    """The ASGI application of the API; its paths begin with :data:`PREFIX`.

    Args:
        backend: The replica.
        auth: Who is an operator.
        audit: Where changes are recorded.
        enabled: Whether there are tokens at all; without any, every path is 404.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        backend: AdminBackend,
        auth: AdminAuth,
        audit: Audit,
        *,
        enabled: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._auth = auth
        self._audit = audit
        self._enabled = enabled
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        try:
            status, answer = 200, await self._answer(scope, receive)
        except _Gone:
            return
        except _Refused as refused:
            await _respond(send, refused.status, refused.body, refused.headers)
            return
        await _respond(send, status, orjson.dumps(answer), [])

    async def _answer(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        path = scope["path"][len(scope.get("root_path", "")) :]
        if not self._enabled or not path.startswith(PREFIX):
            raise _Refused(f"no such path: {path}", 404, code="not_found")
        authorization = dict(scope["headers"]).get(b"authorization")
        if not self._auth.is_admin(authorization):
            _log.warning("admin: refused %s %s: not an operator's token", scope["method"], path)
            raise _Refused(
                "expected the header Authorization: Bearer <admin token>",
                401,
                code="invalid_admin_token",
                headers=[(b"www-authenticate", b"Bearer")],
            )
        try:
            return await self._route(scope, receive, path[len(PREFIX) :], _actor(authorization))
        except TierUnavailable as error:
            then = "" if scope["method"] == "GET" else "; a part of the change may be done: ask for it again when it is"
            raise _Refused(f"the cache's store is not reachable now: {error}{then}", 503, code="store_unavailable") from error

    async def _route(self, scope: Scope, receive: Receive, name: str, actor: str) -> Mapping[str, Any]:
        entry = _ENTRY.fullmatch(name)
        if name == "stats":
            _only(scope, "GET")
            return await self._backend.stats()
        if name == "knobs":
            _only(scope, "GET")
            return await self._backend.knobs()
        if name == "flush":
            _only(scope, "POST")
            return await self._flush(_where(await _read(receive)), actor)
        if entry is not None and entry[2]:
            _only(scope, "POST")
            return await self._feedback(entry[1], await _read(receive), actor)
        if entry is not None:
            _only(scope, "GET")
            return await self._entry(entry[1], scope.get("query_string", b""), actor)
        raise _Refused(
            f"no such path: {PREFIX}{name}; there are stats, knobs, flush, entries/<id> and entries/<id>/feedback, "
            f"<id> being {ID_DIGITS} hexadecimal digits as the header x-cache-entry says them",
            404,
            code="not_found",
        )

    async def _entry(self, entry_id: str, query: bytes, actor: str) -> Mapping[str, Any]:
        asked = parse_qs(query.decode("latin-1")).get("content", ["false"])[-1]
        if asked not in ("true", "false"):
            raise _Refused(f"content: expected true or false, got {asked!r}", param="content")
        found = await self._backend.find(entry_id)
        if found is None:
            raise _no_entry(entry_id)
        shown = describe(found, now=self._clock(), content=asked == "true")
        if asked == "true":  # somebody read what a user wrote: not a change, but to be known
            await self._record(actor, "read", {"entry": entry_id})
        return shown

    async def _feedback(self, entry_id: str, body: Mapping[str, Any], actor: str) -> Mapping[str, Any]:
        _known(body, ("verdict", "similarity"))
        verdict, similarity = body.get("verdict"), body.get("similarity")
        if verdict not in ("good", "bad"):
            raise _Refused(f"verdict: expected 'good' or 'bad', got {verdict!r}", param="verdict")
        if similarity is not None and not (_is_number(similarity) and -1.0 <= similarity <= 1.0):
            raise _Refused(f"similarity: expected a number from -1 to 1, got {similarity!r}", param="similarity")
        detail = {"entry": entry_id, **{name: value for name, value in body.items() if value is not None}}
        try:
            removed = await self._backend.feedback(entry_id, verdict, None if similarity is None else float(similarity))
        except TierUnavailable as error:
            await self._record(actor, "feedback", {**detail, "failed": str(error)})
            raise
        if removed is None:
            raise _no_entry(entry_id)
        await self._record(actor, "feedback", {**detail, "removed": removed})
        return {"id": entry_id, "verdict": verdict, "removed": removed}

    async def _flush(self, where: FlushWhere, actor: str) -> Mapping[str, Any]:
        detail: dict[str, Any] = {"where": where.given()}
        try:
            removed = await self._backend.flush(where)
        except TierUnavailable as error:  # a part may be gone already
            await self._record(actor, "flush", {**detail, "failed": str(error)})
            raise
        await self._record(actor, "flush", {**detail, "removed": removed})
        return {**detail, "removed": removed}

    async def _record(self, actor: str, action: str, detail: Mapping[str, Any]) -> None:
        await self._audit.record(AuditEvent(self._clock(), actor, action, detail))


def describe(found: FoundEntry, *, now: float, content: bool = False) -> dict[str, Any]:
    """Return an entry's facts, JSON-ready.

    Args:
        found: The entry.
        now: Seconds since the epoch, for its age.
        content: Whether the last user text and the answer are shown as well.
    """
    entry, meta = found.entry, EntryMeta.load(found.entry.meta)
    facts = {
        "id": entry.key.hex()[:ID_DIGITS],
        "key": entry.key.hex(),
        "arm": found.arm,
        "tiers": list(found.tiers),
        "bytes": entry.size,
        "written_at": entry.written_at,
        "age": max(0.0, now - entry.written_at),
        "renewed": entry.renewed,
        "ttl": entry.ttl if math.isfinite(entry.ttl) else None,
        "form": entry.form,
        "complete": entry.complete,
        "semantic": bool(entry.vector),
        "input_tokens": entry.input_tokens,
        "output_tokens": entry.output_tokens,
        "model": meta.model,
        "temperature": meta.temperature,
        "tenant": meta.tenant,
        "namespace": meta.namespace,
        "tags": list(meta.tags),
        "documents": list(meta.documents),
    }
    return {**facts, "text": meta.text, "body": entry.body.decode(errors="replace")} if content else facts


class _Refused(ValueError):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = openai_error(message, "invalid_request_error" if status < 500 else "server_error", param=param, code=code)
        self.headers = headers or []


class _Gone(Exception):
    """The client went away before its request was complete."""


def _no_entry(entry_id: str) -> _Refused:
    return _Refused(f"no entry {entry_id}: it was never stored, or it is evicted, expired or flushed", 404, code="no_such_entry")


def _actor(authorization: bytes | None) -> str:
    """The beginning of the token's hash, which the settings hold as well: it tells tokens apart and reveals none."""
    token = (authorization or b"").partition(b" ")[2].strip()
    return hashlib.sha256(token).hexdigest()[:8]


def _only(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise _Refused(f"expected {method}, got {scope['method']}", 405, headers=[(b"allow", method.encode())])


def _known(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = sorted(set(body) - set(names))
    if unknown:
        raise _Refused(f"{unknown[0]}: no such field; expected {', '.join(names)}", param=unknown[0])


def _where(body: Mapping[str, Any]) -> FlushWhere:
    names = tuple(item.name for item in fields(FlushWhere))
    _known(body, (*names, "all"))
    given = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise _Refused(f"{name}: expected a text, got {value!r}", param=name)
    # A mistyped filter must not empty the cache, nor may "all" hide that one was given.
    if not isinstance(body.get("all"), bool | None) or bool(body.get("all")) == bool(given):
        raise _Refused(f'expected at least one of {", ".join(names)}, or {{"all": true}} alone to remove everything')
    return FlushWhere(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


async def _read(receive: Receive) -> Mapping[str, Any]:
    raw = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        raw += message.get("body", b"")
        if len(raw) > _LARGEST:
            raise _Refused(f"the body is too large: expected at most {_LARGEST} bytes", 413)
        if not message.get("more_body"):
            break
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _Refused(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Refused(f"the body: expected a JSON object, got {type(body).__name__}")
    return body


async def _respond(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    head = [(b"content-type", JSON.encode()), (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
