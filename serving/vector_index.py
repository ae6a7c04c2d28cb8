"""The vectors beside the entries of a cache, whichever store keeps them: written without waiting, searched within a deadline.

The index in the process follows every change at once. A store that takes its time (a service, or one that trains itself) is told
by one worker in the background, in order, so that nobody waits for it. What such a store misses while it is away is lost, which
costs hits and never a wrong answer, since a neighbour is worth nothing without its entry.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from serving.ending import end
from serving.tiers.base import EntryMeta, TierUnavailable
from serving.tiers.vector import UsearchStore, VectorTier
from serving.tiers.vector_store import Neighbour, VectorItem, VectorStore

_log = logging.getLogger(__name__)

MOST_WAITING = 20_000
"""Changes that wait for a store; the oldest are given up first."""
_BATCH = 256


@dataclass(frozen=True, slots=True)
class _Change:
    kind: str  # add, remove, flush, limit
    arm: str
    items: tuple[VectorItem, ...] = ()
    keys: tuple[bytes, ...] = ()
    entries: int = 0


class VectorIndex:
    """One store, as the tiered cache uses it. Not thread-safe: one event loop.

    Args:
        store: Where the vectors are.
    """

    def __init__(self, store: VectorStore | VectorTier) -> None:
        self.store: VectorStore = UsearchStore(tier=store) if isinstance(store, VectorTier) else store
        self.dim = self.store.dim
        self.shared = self.store.shared
        self._tier = self.store.tier if isinstance(self.store, UsearchStore) else None
        self._waiting: deque[_Change] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._failing = False

    def add(self, arm: str, key: bytes, context: bytes, vector: bytes, meta: EntryMeta | None = None) -> None:
        """Keep a vector under its entry's key."""
        if self._tier is not None:
            self._tier.add(arm, key, context, vector, meta)
        else:
            self._tell(_Change("add", arm, items=(VectorItem(key, context, vector, meta or EntryMeta()),)))

    def replace(self, arm: str, key: bytes, context: bytes, vector: bytes, meta: EntryMeta | None = None) -> None:
        """Keep an entry's vector in place of the one before; where it has none of this index's kind, remove that one."""
        if len(vector) == self.dim:
            self.add(arm, key, context, vector, meta)
        else:
            self.remove(arm, (key,))

    def remove(self, arm: str, keys: Sequence[bytes]) -> None:
        """Remove the keys' vectors."""
        if self._tier is not None:
            for key in keys:
                self._tier.remove(arm, key)
        elif keys:
            self._tell(_Change("remove", arm, keys=tuple(keys)))

    def flush(self, arm: str) -> None:
        """Remove every vector of the arm."""
        if self._tier is not None:
            self._tier.flush(arm)
        else:
            self._tell(_Change("flush", arm))

    def limit(self, arm: str, entries: int) -> None:
        """Set how many vectors the arm may have."""
        if self._tier is not None:
            self._tier.limit(arm, entries)
        else:
            self._tell(_Change("limit", arm, entries=entries))

    def has(self, arm: str, key: bytes) -> bool:
        """Whether the index in the process has the key's vector; False where another store would have to be asked."""
        return self._tier is not None and self._tier.has(arm, key)

    async def count(self, arm: str) -> int:
        """Return how many vectors the arm has.

        Raises:
            TierUnavailable: If the store did not answer.
        """
        return await self.store.count(arm)

    async def near(self, arm: str, context: bytes, vector: bytes, *, floor: float) -> list[Neighbour]:
        """Return the nearest entries, the most similar first; some of other contexts, or less similar, may be among them.

        Raises:
            TierUnavailable: If the store did not answer.
        """
        if self._tier is not None:
            return [Neighbour(*found) for found in self._tier.near(arm, context, vector, floor=floor)]
        return await self.store.near(arm, context, vector, floor=floor)

    async def settled(self) -> None:
        """Wait until the store has been told everything so far."""
        while self._worker is not None and not self._worker.done():
            await asyncio.wait({self._worker})

    async def close(self) -> None:
        """Give up what waits and close the store."""
        self._waiting.clear()
        if self._worker is not None:
            await end([self._worker])
        await self.store.close()

    def _tell(self, change: _Change) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
        self._waiting.append(change)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work(), name="vector-index")

    async def _work(self) -> None:
        while self._waiting:
            change = self._waiting.popleft()
            items, keys = list(change.items), list(change.keys)
            while self._waiting and len(items) + len(keys) < _BATCH:
                following = self._waiting[0]
                if following.kind != change.kind or following.arm != change.arm or change.kind not in ("add", "remove"):
                    break
                self._waiting.popleft()
                items += following.items
                keys += following.keys
            try:
                await self._apply(change, items, keys)
            except TierUnavailable as error:
                if not self._failing:
                    _log.warning("vectors are not kept for a while: %s", error)
                self._failing = True
            except Exception:  # noqa: BLE001 - one change that a store does not take must not end its upkeep
                _log.exception("a change of the vectors of arm %s was not taken", change.arm)
            else:
                self._failing = False

    async def _apply(self, change: _Change, items: list[VectorItem], keys: list[bytes]) -> None:
        if change.kind == "add":
            await self.store.add(change.arm, items)
        elif change.kind == "remove":
            await self.store.remove(change.arm, keys)
        elif change.kind == "flush":
            await self.store.flush(change.arm)
        else:
            await self.store.limit(change.arm, change.entries)
