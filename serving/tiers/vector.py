"""The vector tier: which entry was asked in nearly the same words.

An index of int8 unit vectors beside the entries, one per arm, in the process. It holds no answers: its keys are looked up in the
other tiers, and what is gone or expired there is removed here when it is met.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.keys import key64

DIM = 384
"""Components of a vector (all-MiniLM-L6-v2)."""
SEARCH_LIMIT = 512
"""Most neighbours that one search looks at."""


def _new_index(dim: int) -> Any:
    # The wheel of usearch brings symbols of libstdc++'s regex that do not fit Ray's: loaded first, it makes ray.init() abort the
    # process ("regex_error: Invalid range in brace expression"). Loaded after Ray's core it does no harm.
    with suppress(ImportError):
        import ray._raylet  # noqa: F401
    from usearch.index import Index

    return Index(ndim=dim, metric="cos", dtype="i8")


@dataclass(slots=True)
class _Arm:
    index: Any
    limit: int
    # name in the index -> (key, context, vector), the earliest added first
    entries: OrderedDict[int, tuple[bytes, bytes, bytes]] = field(default_factory=OrderedDict)


class VectorTier:
    """Nearest neighbours by cosine (usearch's HNSW over int8), one index per arm.

    Adding, removing and searching are O(log n) (about 0.1 ms at 5,000 vectors). Vectors are unit vectors scaled by 127 and
    rounded; usearch computes the cosine on the integers, within 0.01 of the cosine of the floats. Search is approximate (recall@1
    about 0.99). Nothing here awaits or fails for want of a service. Not thread-safe: one event loop.

    Args:
        dim: Components of a vector.
        max_entries: Most vectors kept per arm until :meth:`limit` says otherwise: a guard against vectors whose entries are long
            gone; the earliest added goes first.

    Raises:
        ValueError: If ``max_entries`` is below 1.
    """

    name = "vector"

    def __init__(self, *, dim: int = DIM, max_entries: int = 1_000_000) -> None:
        if max_entries < 1:
            raise ValueError(f"vector tier: max_entries: expected at least 1, got {max_entries!r}")
        self.dim = dim
        self.max_entries = max_entries
        self._arms: dict[str, _Arm] = {}

    def add(self, arm: str, key: bytes, context: bytes, vector: bytes) -> None:
        """Index a vector under its entry's key; replaces an earlier one of the same key.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        components = self._components(vector)
        held = self._arm(arm)
        name = key64(key)
        known = held.entries.get(name)
        if known == (key, context, vector):
            return
        if known is not None:
            held.index.remove(name)
            del held.entries[name]
        held.index.add(name, components)
        held.entries[name] = (key, context, vector)
        self._trim(held)

    def limit(self, arm: str, entries: int) -> None:
        """Set how many vectors the arm may have; the earliest added beyond that are removed."""
        held = self._arm(arm)
        held.limit = min(entries, self.max_entries)
        self._trim(held)

    def neighbours(self, arm: str, vector: bytes, k: int = 8) -> list[tuple[bytes, bytes, float]]:
        """Return (key, context, cosine) of up to ``k`` vectors of any context, the most similar first.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        components = self._components(vector)
        held = self._arms.get(arm)
        if held is None or not held.entries or not components.any():
            return []
        found = held.index.search(components, min(k, len(held.entries)))
        result: list[tuple[bytes, bytes, float]] = []
        for name, distance in zip(found.keys.tolist(), found.distances.tolist(), strict=True):
            entry = held.entries.get(name)
            if entry is not None:
                result.append((entry[0], entry[1], 1.0 - distance))
        return result

    def near(self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8) -> list[tuple[bytes, bytes, float]]:
        """Return neighbours like :meth:`neighbours`, looking further while all that is similar enough is of other contexts.

        Many conversations may hold the same sentence under contexts of their own; ``k`` of those must not hide the one that fits.

        Args:
            arm: The arm.
            context: The context sought.
            vector: int8 bytes.
            floor: Least cosine of interest.
            k: Neighbours looked at first; up to :data:`SEARCH_LIMIT` where needed.
        """
        while True:
            found = self.neighbours(arm, vector, k)
            crowded = len(found) >= k and found[-1][2] >= floor and all(other != context for _, other, _ in found)
            if not crowded or k >= SEARCH_LIMIT:
                return found
            k = min(k * 8, SEARCH_LIMIT)

    def search(self, arm: str, context: bytes, vector: bytes, k: int = 8) -> list[tuple[bytes, float]]:
        """Return (key, cosine) of those among the ``k`` nearest vectors that have this context, the most similar first."""
        return [(key, cosine) for key, other, cosine in self.neighbours(arm, vector, k) if other == context]

    def has(self, arm: str, key: bytes) -> bool:
        """Whether a vector is indexed under the key."""
        held = self._arms.get(arm)
        known = held.entries.get(key64(key)) if held is not None else None
        return known is not None and known[0] == key

    def remove(self, arm: str, key: bytes) -> bool:
        """Remove the key's vector; whether it was there."""
        if not self.has(arm, key):
            return False
        held = self._arms[arm]
        held.index.remove(key64(key))
        del held.entries[key64(key)]
        return True

    def count(self, arm: str) -> int:
        """Return how many vectors the arm has."""
        held = self._arms.get(arm)
        return len(held.entries) if held is not None else 0

    def flush(self, arm: str) -> int:
        """Remove every vector of the arm; how many there were."""
        held = self._arm(arm)
        count = len(held.entries)
        self._arms[arm] = _Arm(_new_index(self.dim), held.limit)
        return count

    def close(self) -> None:
        """Drop everything."""
        self._arms.clear()

    def _arm(self, arm: str) -> _Arm:
        held = self._arms.get(arm)
        if held is None:
            held = self._arms[arm] = _Arm(_new_index(self.dim), self.max_entries)
        return held

    def _trim(self, held: _Arm) -> None:
        while len(held.entries) > held.limit:
            oldest, _ = held.entries.popitem(last=False)
            held.index.remove(oldest)

    def _components(self, vector: bytes) -> npt.NDArray[np.int8]:
        if len(vector) != self.dim:
            raise ValueError(f"vector tier: expected a vector of {self.dim} int8 bytes, got {len(vector)} bytes")
        return np.frombuffer(vector, dtype=np.int8)
