"""Fingerprints: what makes two requests the same, and the hashes derived from that.

A request is told apart by its canonical JSON: keys sorted, no spaces, numbers exact, everything as given. Absent is not the same
as a default (``temperature`` left out is not 0), an unknown field counts, and so do images, audio and files. An image that is
given by its address counts by its address alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

_MASK = (1 << 64) - 1

Endpoint = Literal["chat", "completions", "embeddings"]

IGNORED_FIELDS = frozenset(
    {
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream", "stream_options", "metadata",
        "store", "cache",
    }
)  # fmt: skip
"""Body fields that do not change the answer. ``stream`` and ``stream_options`` change its form only."""

MAX_DEPTH = 128
"""Levels of nesting that a body may have."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of a request.

    Attributes:
        key: SHA-256 over everything that changes the answer, 32 bytes.
        context: SHA-256 over the same without the last user text, 32 bytes. Two requests may share an answer by meaning only if
            their contexts are equal.
        text: The last user text, or ``""`` where the last message is not plain user text: then there is no semantic lookup.
    """

    key: bytes
    context: bytes
    text: str


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request, whole numbers exact whatever their size.

    A key given twice is refused: servers differ in which of the two counts, so an answer could be kept under a question that was
    not asked.

    Raises:
        ValueError: If it is not an object in valid JSON (with the position), names a key twice, or is nested deeper than
            :data:`MAX_DEPTH`.
    """
    try:
        body = orjson.loads(raw)
        # What can be written as it was read has lost nothing. Spaces and escapes need the slower parser to tell.
        if not _reads_back(body, raw):
            body = json.loads(raw, object_pairs_hook=_unique)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not valid JSON: {error}") from error
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(body, dict):
        raise ValueError(f"the body: expected a JSON object, got {type(body).__name__}")
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(body)
    return body


def _reads_back(body: object, raw: bytes) -> bool:
    try:
        return orjson.dumps(body) == raw
    except orjson.JSONEncodeError:  # it reads deeper than it writes
        return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the body: expected each key of an object once, got {twice[:80]!r} twice")
    return made


def _check_depth(body: Mapping[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            inner += [value for value in values if isinstance(value, dict | list)]
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"the body is nested too deeply: expected at most {MAX_DEPTH} levels")


def fingerprint(
    body: Mapping[str, Any], *, endpoint: Endpoint = "chat", tenant: str = "", namespace: str = "", generation: str = ""
) -> Fingerprint:
    """Return the identity of a request. O(size of the body): about 1 ms for 1 MB.

    Only chat requests have a text: what continues a prompt, or embeds one, belongs to its very words.

    Args:
        body: The request's JSON object, as :func:`parse_body` gives it.
        endpoint: What was asked for; the same body at another endpoint is another request.
        tenant: Whose request it is, by authentication; tenants never share an answer.
        namespace: The caller's own division of its cache.
        generation: Of the cache: another one makes every earlier answer unreachable.

    Raises:
        ValueError: If the body is nested too deeply to be written down.
    """
    kept = {name: value for name, value in body.items() if name not in IGNORED_FIELDS}
    scope = _scope(endpoint, tenant, namespace, generation)
    text, rest = _without_text(kept) if endpoint == "chat" else ("", kept)
    whole = _canonical(kept)
    return Fingerprint(
        hashlib.sha256(b"key" + scope + whole).digest(),
        hashlib.sha256(b"context" + scope + (whole if rest is kept else _canonical(rest))).digest(),
        text,
    )


@lru_cache(maxsize=4096)
def _scope(*parts: str) -> bytes:
    """Return the parts, each with its length: no two lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in (value.encode() for value in parts))


def _without_text(body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the last user text and the body with nothing in its place; ``""`` and the body itself where there is none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "", body
    last = messages[-1]
    if not isinstance(last, Mapping) or last.get("role") != "user":
        return "", body
    content = last.get("content")
    text, blank = (content, None) if isinstance(content, str) else _text_of_parts(content)
    if not text.strip():
        return "", body
    return text, {**body, "messages": [*messages[:-1], {**last, "content": blank}]}


def _text_of_parts(content: object) -> tuple[str, object]:
    """Return the text of a list of text parts and the list without it; ``""`` where one of them is of another kind."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return "", content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return "", content
    return "\n".join(part["text"] for part in content), [{**part, "text": None} for part in content]


def _canonical(value: Mapping[str, Any]) -> bytes:
    """Return JSON that only an equal value gives: it parses back to the value, numbers exact."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # a whole number beyond 64 bits, or deeper than 254 levels
        _check_depth(value)
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def key64(key: bytes) -> int:
    """Return the first 8 bytes of a fingerprint as an unsigned integer: the short name used by ghosts and logs."""
    return int.from_bytes(key[:8], "big")


def mix64(value: int) -> int:
    """Return a well-mixed 64-bit hash of an unsigned 64-bit integer (splitmix64's finaliser after its increment).

    0 does not map to 0: a hash that does would put key 0 into every sample.
    """
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return :func:`mix64` of each value, same shape."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def ttl_jitter(key: int, spread: float) -> float:
    """Return the factor on the TTL of one key, in ``(1 - spread, 1]``, the same wherever it is asked.

    Args:
        key: The key's 64-bit name (:func:`key64`).
        spread: Width of the jitter, 0..1; 0 turns it off.
    """
    return 1.0 - spread * (mix64(key ^ 0x7474_6C00) / 2.0**64)
