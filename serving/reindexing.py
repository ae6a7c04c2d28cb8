"""Building the index of a process that starts, from what outlived the one before."""

from __future__ import annotations

import asyncio

from serving.tiers.base import EntryMeta, SharedTier
from serving.tiers.local import LocalTier
from serving.vector_index import VectorIndex

_STEP = 16
"""Vectors that are added without a pause: one takes about 0.2 ms, and requests go first."""


async def index_from_store(store: SharedTier, arm: str, vectors: VectorIndex, limit: int) -> None:
    """Index the vectors of the ``limit`` most recently used entries of a store, but those that are there already.

    Raises:
        TierUnavailable: If the store does not answer.
    """
    found = await store.recent_vectors(arm, limit)
    for number, (key, context, vector) in enumerate(reversed(found)):
        if len(vector) == vectors.dim and not vectors.has(arm, key):
            vectors.add(arm, key, context, vector)
        if number % _STEP == 0:
            await asyncio.sleep(0)


async def index_from_memory(memory: LocalTier, arm: str, vectors: VectorIndex) -> None:
    """Index the vectors of an arena that is the whole cache, but those that are there already."""
    async for heads in memory.scan(arm):
        for number, head in enumerate(heads):
            entry = memory.get_now(arm, head.key, touch=False) if head.context and head.complete else None
            if entry is not None and len(entry.vector) == vectors.dim and not vectors.has(arm, head.key):
                vectors.add(arm, head.key, entry.context, entry.vector, EntryMeta.load(entry.meta))
            if number % _STEP == 0:
                await asyncio.sleep(0)
