"""What neighbours gave is taken into this node's memory once the store says that it has it too.

A neighbour may hold what was put while it could not reach the store. It answers while that lasts, and is compared with the store
afterwards (:mod:`serving.coherence`). A copy here would not be: nothing here says that the store has never heard of it, so that
no flush by what entries are would reach it. Asking takes no request's time, and one call serves all that wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serving.ending import end
from serving.tiers.base import Entry, Tier, TierUnavailable

MOST_WAITING = 256
"""Entries that wait for the store at most; others are asked of the neighbour again."""

MOST_WAITING_BYTES = 8 << 20
"""Bytes that wait for it."""


class Adoption:
    """Entries that wait for the store's word.

    Args:
        store: Has all that may be taken.
        position: The number of the arm's last removal that took effect here; None: it is not known, and nothing is taken.
        adopt: Takes an entry into memory: the arm, the entry, and a number; what was removed since the store had it has a greater
            one.
    """

    def __init__(self, store: Tier, position: Callable[[str], int | None], adopt: Callable[[str, Entry, int], None]) -> None:
        self._store = store
        self._position = position
        self._adopt = adopt
        self._waiting: dict[str, dict[bytes, Entry]] = {}
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None

    def propose(self, arm: str, entry: Entry) -> None:
        """Have an entry taken in if the store has it; waits for nothing."""
        waiting = self._waiting.setdefault(arm, {})
        if entry.key in waiting or len(waiting) >= MOST_WAITING or self._bytes + entry.size > MOST_WAITING_BYTES:
            return
        waiting[entry.key] = entry
        self._bytes += entry.size
        if self._task is None:
            self._task = asyncio.create_task(self._ask(), name="neighbours-entries")

    async def close(self) -> None:
        """Take nothing more."""
        if self._task is not None:
            await end([self._task])

    async def _ask(self) -> None:
        try:
            while self._waiting:
                arm, entries = self._waiting.popitem()
                self._bytes -= sum(entry.size for entry in entries.values())
                known = self._position(arm)  # before the store is asked: what is removed since has a greater number
                if known is None or not entries:
                    continue
                heads = await self._store.heads(arm, list(entries))
                for entry, head in zip(entries.values(), heads, strict=True):
                    if head is not None and head.written_at == entry.written_at:
                        self._adopt(arm, entry, known)
        except TierUnavailable:
            self._waiting.clear()
            self._bytes = 0
        finally:
            self._task = None
