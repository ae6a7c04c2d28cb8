"""Entries, requests and vectors for the tests of the data plane."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from serving.keys import Fingerprint
from serving.tiers.base import KEY_BYTES, Entry

CONTEXT = b"c" * 32
DIM = 384


def key(number: int) -> bytes:
    """A fingerprint's bytes."""
    return hashlib.sha256(number.to_bytes(8, "big", signed=True)).digest()


def request(number: int, text: str = "", context: bytes = CONTEXT) -> Fingerprint:
    """A request; with a text it may be answered by meaning."""
    return Fingerprint(key(number), context, text)


def entry(number: int, *, size: int = 1000, written_at: float = 0.0, vector: bytes = b"", context: bytes = CONTEXT) -> Entry:
    """An entry that is charged ``size`` bytes."""
    context = context if vector else b""
    body = bytes([number % 256]) * (size - KEY_BYTES - len(vector) - len(context))
    return Entry(key(number), body, written_at, 3, 5, context, vector)


def unit(seed: int) -> npt.NDArray[np.float64]:
    """A random unit vector."""
    vector = np.random.default_rng(seed).normal(size=DIM)
    return vector / np.linalg.norm(vector)


def int8(vector: npt.NDArray[np.float64]) -> bytes:
    """The stored form of a unit vector: scaled by 127 and rounded."""
    return np.rint(vector * 127).astype(np.int8).tobytes()


def tilted(seed: int, cosine: float) -> bytes:
    """The stored form of a unit vector at that cosine to ``unit(seed)``."""
    base = unit(seed)
    other = unit(seed + 10_000)
    other -= (other @ base) * base
    other /= np.linalg.norm(other)
    return int8(cosine * base + np.sqrt(1 - cosine**2) * other)
