"""How entries get into the store and the memory tier: first the store, then memory, and nothing that a removal covers.

The store decides whether an answer is kept (:meth:`serving.tiers.base.SharedTier.put_numbered`), and numbers it. A store that is
slow keeps nobody from an answer: it is put into memory meanwhile, and taken back if the store turns out to have removed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from serving.coherence import Coherence, Store
from serving.tiers.base import Entry, Outdated, Tier, TierUnavailable
from serving.tiers.local import LocalTier

STORE_FIRST_SECONDS = 0.02
"""How long an answer waits for the store before it is put into memory: it is there sooner where the store is slow."""

Offer = Callable[[str, Entry, int | None], None]
"""Gives an arm's entry to its key's owner, with the store's last removal when it had it."""


class Writing:
    """Puts entries into a store and into the memory tier that holds copies of what that has.

    Args:
        memory: The memory tier.
        store: The store.
        coherence: What is known of their agreement, where the store is shared and numbers its removals; else None.
        shared: That store; else None.
    """

    def __init__(self, memory: LocalTier, store: Tier, coherence: Coherence | None, shared: Store | None) -> None:
        self.memory = memory
        self._store = store
        self._coherence = coherence
        self._shared = shared

    async def put(self, arm: str, entry: Entry, since: int | None, offer: Offer | None) -> int:
        """Put into the store and then into memory; how many the store evicted.

        Args:
            arm: The arm.
            entry: The answer.
            since: The last removal that was known when it was asked for; None: it is kept whatever was removed since.
            offer: Where the entry is offered to once it is in the store.

        Raises:
            Outdated: If the store has refused it.
        """
        writing = asyncio.ensure_future(self._put_stored(arm, entry, since))
        try:
            done, _ = await asyncio.wait({writing}, timeout=STORE_FIRST_SECONDS)
            early = not done and not self._late(arm, since)
            if early:  # a store that is slow keeps nobody from it
                self.remember(arm, entry)
            evicted, known = await writing
        except TierUnavailable:
            if not early and not self._late(arm, since):
                self.remember(arm, entry)
            if self._coherence is not None:
                with suppress(TierUnavailable):
                    self._coherence.doubt(arm)
            return 0
        except Outdated:
            if early:
                self._take_back(arm, entry)
            raise
        except BaseException:
            writing.cancel()
            raise
        if early and known is not None and abs(self.memory.mark_now(arm)) > known:
            self._take_back(arm, entry)  # it may be what was removed since, before it was put into memory
        elif not early:
            self.remember(arm, entry, known)
        if offer is not None and entry.complete:
            offer(arm, entry, known)
        return evicted

    def remember(self, arm: str, entry: Entry, known: int | None = None) -> None:
        """Put a copy into memory, unless a removal after ``known``, the store's last when it had the entry, took effect there."""
        position = self._coherence.position(arm) if self._coherence is not None else None
        if known is not None and position is not None and known < position:
            return  # as the memory tier's mark says, unless another writer kept it from being set
        self.memory.put_now(arm, entry, known=known)
        if self._coherence is not None and self._coherence.unsure:
            self._coherence.put(arm, entry)

    async def _put_stored(self, arm: str, entry: Entry, since: int | None) -> tuple[int, int | None]:
        if self._shared is None or self._coherence is None:
            return await self._store.put(arm, entry), None
        evicted, known = await self._shared.put_numbered(arm, entry, since=since)
        self._coherence.learned(arm, known)
        return evicted, known

    def _late(self, arm: str, since: int | None) -> bool:
        return self._coherence is not None and self._coherence.late(arm, since)

    def _take_back(self, arm: str, entry: Entry) -> None:
        """Remove an entry from memory that was put there before the store had answered."""
        held = self.memory.get_now(arm, entry.key, touch=False)
        if held is not None and held.written_at == entry.written_at:
            self.memory.delete_now(arm, entry.key)
