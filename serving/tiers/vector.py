"""The vector tier: which entry was asked in nearly the same words.

An index of int8 unit vectors beside the entries, one per arm, in the process. It holds no answers: its keys are looked up in the
other tiers, and what is gone or expired there is removed here when it is met.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.keys import key64
from serving.tiers.base import EntryMeta
from serving.tiers.vector_store import Neighbour, VectorItem, Where, components, cosines, deduplicated, load_ray_first

DIM = 384
"""Components of a vector (all-MiniLM-L6-v2)."""
SEARCH_LIMIT = 512
"""Most neighbours that one search looks at."""
SCAN_LIMIT = 256
"""A context with at most so many entries is compared one by one: exact, whatever crowd of other contexts is around it."""
EXPANSION = 96
"""Candidates that a search of the graph keeps (HNSW's ef). At 100,000 vectors 64 reach a recall@1 of 0.99; this has room."""


def _new_index(dim: int) -> Any:
    load_ray_first()
    from usearch.index import Index

    return Index(ndim=dim, metric="cos", dtype="i8", expansion_search=EXPANSION)


@dataclass(frozen=True, slots=True)
class _Held:
    key: bytes
    context: bytes
    vector: bytes
    meta: EntryMeta


@dataclass(slots=True)
class _Arm:
    index: Any
    limit: int
    # by name in the index, the earliest added first
    entries: OrderedDict[int, _Held] = field(default_factory=OrderedDict)
    # names by context
    members: dict[bytes, dict[int, None]] = field(default_factory=dict)

    def drop(self, name: int) -> None:
        held = self.entries.pop(name)
        self.index.remove(name)
        members = self.members[held.context]
        del members[name]
        if not members:
            del self.members[held.context]


class VectorTier:
    """Nearest neighbours by cosine (usearch's HNSW over int8), one index per arm.

    Adding, removing and searching are O(log n) (about 0.4 ms at 100,000 vectors). Vectors are unit vectors scaled by 127 and
    rounded; the cosine is the exact one of the integers, within 0.01 of the cosine of the floats. Search is approximate (recall@1
    about 0.99), but exact for a context of at most :data:`SCAN_LIMIT` entries. Nothing here awaits or fails for want of a
    service. Not thread-safe: one event loop.

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
        self._metas: dict[EntryMeta, EntryMeta] = {}

    def add(self, arm: str, key: bytes, context: bytes, vector: bytes, meta: EntryMeta | None = None) -> None:
        """Index a vector under its entry's key; replaces an earlier one of the same key.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        row = components(vector, self.dim)
        held = self._arm(arm)
        name = key64(key)
        item = _Held(key, context, vector, self._shared(meta or EntryMeta()))
        known = held.entries.get(name)
        if known == item:
            held.entries.move_to_end(name)
            return
        if known is not None:
            held.drop(name)
        held.index.add(name, row)
        held.entries[name] = item
        held.members.setdefault(context, {})[name] = None
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
        return self._neighbours(arm, components(vector, self.dim), k, None)

    def near(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[tuple[bytes, bytes, float]]:
        """Return neighbours like :meth:`neighbours`, looking further while all that is similar enough is of other contexts.

        Many conversations may hold the same sentence under contexts of their own; ``k`` of those must not hide the one that fits.
        Those of the context alone are returned where its entries were compared one by one and one is similar enough.

        Args:
            arm: The arm.
            context: The context sought.
            vector: int8 bytes.
            floor: Least cosine of interest.
            k: Neighbours looked at first; up to :data:`SEARCH_LIMIT` where needed.
            where: Filter on metadata.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        query = components(vector, self.dim)
        held = self._arms.get(arm)
        if held is None or not held.entries or not query.any():
            return []
        members = held.members.get(context, {})
        if 0 < len(members) <= SCAN_LIMIT:
            own = self._compared(query, [held.entries[name] for name in members], where)[:k]
            if own and own[0][2] >= floor:
                return own
            return sorted(own + [each for each in self._neighbours(arm, query, k, where) if each[1] != context], key=_descending)
        while True:
            reached, found = self._reached(held, query, k, where)
            crowded = reached >= floor and all(other != context or cosine < floor for _, other, cosine in found)
            if not members or not crowded or k >= min(SEARCH_LIMIT, len(held.entries)):
                return found
            k = min(k * 8, SEARCH_LIMIT)

    def search(self, arm: str, context: bytes, vector: bytes, k: int = 8) -> list[tuple[bytes, float]]:
        """Return (key, cosine) of those among the ``k`` nearest vectors that have this context, the most similar first."""
        return [(key, cosine) for key, other, cosine in self.neighbours(arm, vector, k) if other == context]

    def has(self, arm: str, key: bytes) -> bool:
        """Whether a vector is indexed under the key."""
        held = self._arms.get(arm)
        known = held.entries.get(key64(key)) if held is not None else None
        return known is not None and known.key == key

    def remove(self, arm: str, key: bytes) -> bool:
        """Remove the key's vector; whether it was there."""
        if not self.has(arm, key):
            return False
        self._arms[arm].drop(key64(key))
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
        self._metas.clear()

    def _arm(self, arm: str) -> _Arm:
        held = self._arms.get(arm)
        if held is None:
            held = self._arms[arm] = _Arm(_new_index(self.dim), self.max_entries)
        return held

    def _trim(self, held: _Arm) -> None:
        while len(held.entries) > held.limit:
            held.drop(next(iter(held.entries)))

    def _neighbours(self, arm: str, query: npt.NDArray[np.int8], k: int, where: Where | None) -> list[tuple[bytes, bytes, float]]:
        held = self._arms.get(arm)
        if held is None or not held.entries or not query.any():
            return []
        return self._reached(held, query, k, where)[1]

    def _reached(
        self, held: _Arm, query: npt.NDArray[np.int8], k: int, where: Where | None
    ) -> tuple[float, list[tuple[bytes, bytes, float]]]:
        """Return the least cosine met among the ``k`` nearest, whatever the filter, and those that pass it."""
        found = held.index.search(query, min(k, len(held.entries)))
        names = [name for name in found.keys.tolist() if name in held.entries]
        if not names:
            return -1.0, []
        met = self._compared(query, [held.entries[name] for name in names], None)
        if where is None:
            return met[-1][2], met
        wanted = {held.entries[name].key for name in names if where.fits(held.entries[name].meta)}
        return met[-1][2], [each for each in met if each[0] in wanted]

    def _compared(
        self, query: npt.NDArray[np.int8], entries: Sequence[_Held], where: Where | None
    ) -> list[tuple[bytes, bytes, float]]:
        """Return (key, context, exact cosine) of those that pass the filter, the most similar first."""
        if where is not None:
            entries = [entry for entry in entries if where.fits(entry.meta)]
        vectors = np.frombuffer(b"".join(entry.vector for entry in entries), np.int8).reshape(-1, self.dim)
        similarities = cosines(query, vectors).tolist()
        pairs = zip(entries, similarities, strict=True)
        return sorted(((entry.key, entry.context, cosine) for entry, cosine in pairs), key=_descending)

    def _shared(self, meta: EntryMeta) -> EntryMeta:
        """Return equal metadata as one object: many entries differ in nothing but their texts, which are not kept."""
        bare = replace(meta, text="") if meta.text else meta
        if len(self._metas) >= _MOST_METAS:
            self._metas.clear()
        return self._metas.setdefault(bare, bare)


_MOST_METAS = 10_000


def _descending(found: tuple[bytes, bytes, float]) -> float:
    return -found[2]


class UsearchStore:
    """A :class:`VectorTier` as a :class:`serving.tiers.vector_store.VectorStore`.

    Args:
        dim: Components of a vector.
        tier: The index; None makes one. Its methods do not await, for callers who cannot.
    """

    name = "usearch"
    shared = False

    def __init__(self, *, dim: int = DIM, tier: VectorTier | None = None) -> None:
        self.tier = tier or VectorTier(dim=dim)
        self.dim = self.tier.dim

    async def add(self, arm: str, items: Sequence[VectorItem]) -> None:
        """Keep vectors; see :meth:`serving.tiers.vector_store.VectorStore.add`.

        Raises:
            ValueError: If a vector does not have ``dim`` bytes; then none is kept.
        """
        for item in deduplicated(items, self.dim):
            self.tier.add(arm, item.key, item.context, item.vector, item.meta)

    async def remove(self, arm: str, keys: Sequence[bytes]) -> None:
        """Remove the keys' vectors."""
        for key in keys:
            self.tier.remove(arm, key)

    async def near(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[Neighbour]:
        """Return the nearest entries; :meth:`near_now` does the same without awaiting.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        return self.near_now(arm, context, vector, floor=floor, k=k, where=where)

    def near_now(
        self, arm: str, context: bytes, vector: bytes, *, floor: float, k: int = 8, where: Where | None = None
    ) -> list[Neighbour]:
        """Return the nearest entries; see :meth:`serving.tiers.vector_store.VectorStore.near`.

        Raises:
            ValueError: If the vector does not have ``dim`` bytes.
        """
        found = self.tier.near(arm, context, vector, floor=floor, k=k, where=where)
        alike = [Neighbour(*each) for each in found if each[2] >= floor]
        return [each for each in alike if each.context == context][:k] or alike

    async def count(self, arm: str) -> int:
        """Return how many vectors the arm has."""
        return self.tier.count(arm)

    async def limit(self, arm: str, entries: int) -> None:
        """Set how many vectors the arm may have; the earliest added beyond that are removed."""
        self.tier.limit(arm, entries)

    async def flush(self, arm: str) -> None:
        """Remove every vector of the arm."""
        self.tier.flush(arm)

    async def close(self) -> None:
        """Drop everything."""
        self.tier.close()
