"""The memory tier: a byte-bounded LRU in the process, one budget per arm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from serving.tiers.base import Entry, OnEvict, TierStats
from serving.tiers.local import LocalTier

SCAN_STEP = 256
"""Entries of one step of a scan."""


@dataclass(slots=True)
class _Arm:
    budget: int = 0
    used: int = 0
    evictions: int = 0
    mark: int = 0
    entries: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)


class MemoryTier(LocalTier):
    """An exact LRU over entries, in one process: each replica has its own.

    Reads, writes, touches and deletions are O(1); evictions O(1) each; nothing is ever awaited, so the ``*_now`` methods are the
    same operations for callers on the hot path. It cannot be unavailable. An arm has no room until :meth:`resize` gives it some.
    Not thread-safe: one event loop.
    """

    name = "memory"
    shared = False

    def __init__(self) -> None:
        self.on_evict: OnEvict | None = None
        self._arms: dict[str, _Arm] = {}

    def get_now(self, arm: str, key: bytes, *, touch: bool = True) -> Entry | None:
        """:meth:`get` without awaiting."""
        held = self._arms.get(arm)
        if held is None:
            return None
        entry = held.entries.get(key)
        if entry is not None and touch:
            held.entries.move_to_end(key)
        return entry

    def put_now(self, arm: str, entry: Entry, *, known: int | None = None) -> int:
        """:meth:`put` without awaiting."""
        held = self._arm(arm)
        if known is not None and abs(held.mark) > known:
            return 0
        old = held.entries.pop(entry.key, None)
        if old is not None:
            held.used -= old.size
        size = entry.size
        if size > held.budget:
            return 0
        held.entries[entry.key] = entry
        held.used += size
        return self._evict(arm, held)

    def delete_now(self, arm: str, key: bytes) -> bool:
        """:meth:`delete` without awaiting."""
        held = self._arms.get(arm)
        old = held.entries.pop(key, None) if held is not None else None
        if held is None or old is None:
            return False
        held.used -= old.size
        return True

    def renew_now(self, arm: str, key: bytes, at: float) -> bool:
        """:meth:`renew` without awaiting."""
        held = self._arms.get(arm)
        entry = held.entries.get(key) if held is not None else None
        if held is None or entry is None:
            return False
        if at - entry.written_at > entry.renewed:
            held.entries[key] = replace(entry, renewed=at - entry.written_at)
        return True

    def resize_now(self, arm: str, budget: int) -> int:
        """:meth:`resize` without awaiting."""
        if budget < 0:
            raise ValueError(f"memory tier, arm {arm!r}: expected a budget >= 0 bytes, got {budget!r}")
        held = self._arm(arm)
        held.budget = budget
        return self._evict(arm, held)

    def flush_now(self, arm: str) -> int:
        """:meth:`flush` without awaiting."""
        held = self._arm(arm)
        count = len(held.entries)
        held.entries.clear()
        held.used = 0
        return count

    def mark_now(self, arm: str) -> int:
        """Return the arm's mark."""
        return self._arm(arm).mark

    def update_mark_now(self, arm: str, change: Callable[[int], int]) -> None:
        """Set the arm's mark to what ``change`` makes of it."""
        held = self._arm(arm)
        held.mark = change(held.mark)

    def remove_now(self, arm: str, keys: Sequence[bytes] | None, *, removal: int = 0, unless: float | None = None) -> None:
        """Put one of the store's removals into effect."""
        held = self._arm(arm)
        if 0 < removal <= abs(held.mark):
            return
        if keys is None:
            self.flush_now(arm)
        for key in keys or ():
            entry = held.entries.get(key)
            if entry is not None and entry.written_at != unless:
                self.delete_now(arm, key)
        if removal:
            held.mark = -removal if held.mark < 0 else removal

    def stats_now(self, arm: str) -> TierStats:
        """:meth:`stats` without awaiting."""
        held = self._arm(arm)
        return TierStats(len(held.entries), held.used, held.budget, held.evictions)

    def touch_soon(self, arm: str, key: bytes) -> None:
        """Make the entry the most recently used, if it is there: here at once."""
        self.get_now(arm, key)

    async def scan(self, arm: str) -> AsyncIterator[list[Entry]]:
        """Yield the heads of all entries that were there at the start."""
        held = self._arms.get(arm)
        entries = list(held.entries.values()) if held is not None else []
        for first in range(0, len(entries), SCAN_STEP):
            yield [entry.head() for entry in entries[first : first + SCAN_STEP]]

    async def close(self) -> None:
        """Drop everything."""
        self._arms.clear()

    def _arm(self, arm: str) -> _Arm:
        held = self._arms.get(arm)
        if held is None:
            held = self._arms[arm] = _Arm()
        return held

    def _evict(self, arm: str, held: _Arm) -> int:
        gone: list[bytes] = []
        while held.used > held.budget:
            key, entry = held.entries.popitem(last=False)
            held.used -= entry.size
            gone.append(key)
        held.evictions += len(gone)
        if gone and self.on_evict is not None:
            self.on_evict(arm, gone)
        return len(gone)
