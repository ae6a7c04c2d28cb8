"""What goes back to the client: headers that say how an answer came about, and an entry's body in the form that was asked for.

Every answer has ``Cache-Status`` (RFC 9211); answers from the cache have ``Age`` (RFC 9111). For people and for clients of other
caches there are, unless turned off, ``x-cache`` (HIT, SEMANTIC, STALE, COLLAPSED, MISS, REFRESH, BYPASS), ``x-cache-tier``,
``x-cache-arm``, ``x-cache-similarity``, ``x-cache-entry``, ``x-cache-rule``, ``x-cache-saved-tokens``, ``x-cache-offset``,
``x-cachepilot-version`` and ``x-litellm-cache-key``. Streams have an ``ETag`` (:mod:`serving.validators`).
"""

from __future__ import annotations

import math
import uuid
from collections import OrderedDict
from collections.abc import Mapping

import orjson

from serving import recording, sse, validators
from serving.inbound import Inbound, Send
from serving.openai_error import JSON
from serving.tiers.base import Entry

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = (b"content-type", JSON.encode())
STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")

LABELS: Mapping[str, bytes] = {
    "hit": b"HIT",
    "semantic_hit": b"SEMANTIC",
    "stale": b"STALE",
    "collapsed": b"COLLAPSED",
    "miss": b"MISS",
    "refresh": b"REFRESH",
    "bypass": b"BYPASS",
}
"""``x-cache`` by outcome."""

_FORWARDED: Mapping[str, tuple[bytes, ...]] = {
    "miss": (b"fwd=uri-miss",),
    "collapsed": (b"fwd=uri-miss", b"collapsed"),
    "refresh": (b"fwd=request",),
    "bypass": (b"fwd=bypass",),
}
_BY_RULE: Mapping[str, tuple[bytes, ...]] = {
    "exact_expired": (b"fwd=stale",),
    "semantic_expired": (b"fwd=stale",),
    "max_age": (b"fwd=request",),
    "min_fresh": (b"fwd=request",),
    "only_if_cached": (),
}
"""Misses whose reason RFC 9211 has a word for: past its time, not as the request wants it, not forwarded at all."""


def entry_id(key: bytes) -> str:
    """Return the name by which an entry is known to clients and to the admin API: the first 16 hexadecimal digits of its key."""
    return key[:8].hex()


def cache_status(
    outcome: str,
    rule: str,
    key: bytes,
    *,
    ttl: float | None = None,
    status: int | None = None,
    stored: bool = False,
) -> bytes:
    """Return ``Cache-Status`` (RFC 9211).

    Args:
        outcome: What happened.
        rule: The rule that decided it, as ``detail``.
        key: The request's key, or the entry's that answered.
        ttl: Seconds that the entry has left, negative where it is stale; for hits.
        status: The upstream's status, where it was asked and another one than the client gets is possible.
        stored: Whether the answer was stored.
    """
    if outcome in ("hit", "semantic_hit", "stale"):
        left = b"; ttl=%d" % ttl if ttl is not None and math.isfinite(ttl) else b""
        return b'cachepilot; hit%b; key="%b"; detail=%b' % (left, entry_id(key).encode(), rule.encode())
    forwarded = _BY_RULE.get(rule, _FORWARDED[outcome]) if outcome == "miss" else _FORWARDED[outcome]
    parts = [b"; ".join((b"cachepilot", *forwarded))]
    if status is not None:
        parts.append(b"fwd-status=%d" % status)
    if stored:
        parts.append(b"stored")
    parts.append(b'key="%s"' % entry_id(key).encode())
    if rule:
        parts.append(b"detail=%s" % rule.encode())
    return b"; ".join(parts)


def saved_tokens(entry: Entry) -> tuple[bytes, bytes]:
    """Return the header that tells how many tokens an answer did not cost."""
    return b"x-cache-saved-tokens", b"%d" % (entry.input_tokens + entry.output_tokens)


_MOST_TAGS = 4096


class Renditions:
    """An entry's body in the form that a client asks for; those that take parsing are kept, the least recently used go.

    An event stream and a JSON object are two forms of one answer: whichever was stored, both can be served.

    Args:
        limit: Bytes kept.
    """

    def __init__(self, limit: int = 8 << 20) -> None:
        self._limit = limit
        self._used = 0
        self._kept: OrderedDict[tuple[bytes, float, bool, bool], bytes] = OrderedDict()
        self._tags: dict[tuple[bytes, float], str] = {}

    def body(self, entry: Entry, inbound: Inbound) -> bytes | None:
        """Return the whole of what the client gets, or None where the entry cannot be given in that form."""
        if not inbound.asked.stream:
            body = entry.body if entry.form == "json" else self._converted(entry, stream=False, usage=True)
        else:
            body = self._converted(entry, stream=True, usage=inbound.asked.usage)
        if body is not None and inbound.fresh_id:
            body = with_fresh_id(body, stream=inbound.asked.stream)
        return body

    def tag(self, entry: Entry) -> str:
        """Return the tag of an entry's stream (:mod:`serving.validators`)."""
        if entry.form == "sse":
            return validators.tag_of(entry)
        name = (entry.key, entry.written_at)
        known = self._tags.get(name)
        if known is None:  # a digest of the whole body, which may be long
            if len(self._tags) >= _MOST_TAGS:
                self._tags.clear()
            known = self._tags[name] = validators.tag_of(entry)
        return known

    def _converted(self, entry: Entry, *, stream: bool, usage: bool) -> bytes | None:
        if stream and usage and entry.form == "sse":
            return entry.body
        name = (entry.key, entry.written_at, stream, usage)
        known = self._kept.get(name)
        if known is not None:
            self._kept.move_to_end(name)
            return known
        made = convert(entry.body, entry.form, stream=stream, usage=usage)
        if made is not None and len(made) <= self._limit // 4:
            self._kept[name] = made
            self._used += len(made)
            while self._used > self._limit:
                self._used -= len(self._kept.popitem(last=False)[1])
        return made


def convert(body: bytes, form: str, *, stream: bool, usage: bool) -> bytes | None:
    """Return an answer's body as an event stream or as JSON; None where it cannot be read.

    Args:
        body: The answer.
        form: ``json`` or ``sse``: what it is.
        stream: What is wanted.
        usage: Whether a stream shall have the chunk with its tokens.
    """
    try:
        if stream:
            if form == "json":
                return recording.to_sse(body, usage=usage)
            return body if usage else recording.without_usage(body)
        if form == "json":
            return body
        parsed = recording.to_json(body)
        return None if parsed is None else orjson.dumps(parsed)
    except (ValueError, TypeError, KeyError):
        return None


def resumed(stream: bytes, inbound: Inbound, *, validator: str, events: int) -> bytes:
    """Return what follows the first events of a complete stream, with an id in each where the client counts by them.

    Args:
        stream: The stream.
        inbound: The request.
        validator: The stream's (:mod:`serving.validators`).
        events: How many the client has of it.
    """
    if inbound.numbered:
        ids = validators.EventIds(validator)
        stream = ids.feed(stream) + ids.close()
    return sse.tail(stream, events) if events else stream


def with_fresh_id(body: bytes, *, stream: bool) -> bytes:
    """Return the answer under an id that no other answer has."""
    first = body
    if stream:
        start = body.find(b"data:")
        end = body.find(b"\n", start)
        first = body[start + 5 : end] if start >= 0 and end > 0 else b""
    try:
        known = orjson.loads(first).get("id")
    except (orjson.JSONDecodeError, AttributeError):
        return body
    if not isinstance(known, str) or not known:
        return body
    prefix = known.partition("-")[0] + "-" if "-" in known else ""
    # Within a text quotation marks are escaped, so the quoted id is found as a value of its own only.
    return body.replace(orjson.dumps(known), orjson.dumps(prefix + uuid.uuid4().hex))


def error_event(error: bytes) -> bytes:
    """Return the event by which a stream says that it broke off; what follows it is nothing, no ``[DONE]``.

    Args:
        error: An error's body, as JSON.
    """
    return b"data: " + error + b"\n\n"


async def respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer."""
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
