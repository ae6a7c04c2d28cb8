"""Fingerprints: what makes two requests the same, and the hashes derived from that."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

_MASK = (1 << 64) - 1

IGNORED_FIELDS = frozenset({"user", "stream", "stream_options", "metadata", "store", "cache"})
"""Body fields that do not change the answer. ``stream`` changes its form only."""


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


def fingerprint(body: Mapping[str, Any], *, namespace: str = "") -> Fingerprint:
    """Return the identity of a chat completion request.

    The form is canonical JSON (sorted keys), so key order does not matter; an absent field differs from one given its default.

    Args:
        body: The request's JSON object; ``messages`` is a list of objects.
        namespace: Separates caches that must not share answers (tenant, generation).
    """
    kept = {name: value for name, value in body.items() if name not in IGNORED_FIELDS}
    messages = list(kept.get("messages") or [])
    text = ""
    rest = kept
    if messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "user":
        content = messages[-1].get("content")
        if isinstance(content, str) and content.strip():
            text = content
            rest = {**kept, "messages": [*messages[:-1], {**messages[-1], "content": None}]}
    return Fingerprint(_digest(namespace, kept), _digest(namespace, rest), text)


def _digest(namespace: str, value: Mapping[str, Any]) -> bytes:
    canonical = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(namespace.encode() + b"\0" + canonical).digest()


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
