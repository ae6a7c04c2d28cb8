"""Neighbours' answers are taken only from memory that has heard of every removal of which this node has.

A neighbour may have just begun, have lost Redis, or be a little late: its arena then still has what was flushed, and one-sided
reads do not ask it. So its mark (:class:`serving.tiers.local.LocalTier`) is read as well, before the entry: what is in the arena
after all removals up to that number took effect is none of what they removed.
"""

from __future__ import annotations

import asyncio
import struct

from serving.arena.layout import A_REMOVALS, ARM_WORDS, HEADER_WORDS, UNIT, UNIT_WORDS, name_words
from serving.neighbours.link import LinkLost
from serving.tiers.base import Entry
from serving.tiers.rdma import NeighbourTier

_WORD = struct.Struct("<q")


class MarkedNeighbours:
    """A tier of neighbours that checks marks; see :class:`serving.cache.NeighbourCache`.

    Args:
        tier: The neighbours.
    """

    def __init__(self, tier: NeighbourTier) -> None:
        self.name = tier.name
        self._tier = tier

    async def get(self, arm: str, key: bytes, *, least: int = 0) -> Entry | None:
        """Return the entry of the key's owner; None also where removals up to ``least`` did not take effect there."""
        peer = self._tier._owner(key)
        remote = peer._arena if peer is not None else None
        number = remote._arms.get(name_words(arm), -1) if remote is not None else -1
        if remote is None or number < 0:
            return await self._tier.get(arm, key)
        word = HEADER_WORDS + number * ARM_WORDS + A_REMOVALS
        reading = asyncio.ensure_future(remote.link.read(word // UNIT_WORDS * UNIT, UNIT))
        await asyncio.sleep(0)  # it is on its way first, and links keep the order
        entry = await self._tier.get(arm, key)
        if entry is None:
            reading.cancel()
            return None
        try:
            data = await reading
        except LinkLost:
            return None
        mark = _WORD.unpack_from(data, 8 * (word % UNIT_WORDS))[0] if len(data) == UNIT else 0
        if mark < least:
            self._tier.counts[remote.link.transport, "behind"] += 1
            return None
        return entry

    def offer(self, arm: str, entry: Entry) -> None:
        """Give the entry to its key's owner; waits for nothing."""
        self._tier.offer(arm, entry)
