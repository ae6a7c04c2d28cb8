"""What tiers in this machine's memory have in common: operations that never wait, and the protocol of tiers over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from serving.tiers.base import Entry, TierStats


class LocalTier(ABC):
    """Gives a tier whose operations need not be awaited the protocol of :class:`serving.tiers.base.Tier`.

    The ``*_now`` methods are the operations, for callers on the hot path. A tier adds ``name``, ``on_evict``, ``scan`` and
    ``close``.
    """

    @abstractmethod
    def get_now(self, arm: str, key: bytes, *, touch: bool = True) -> Entry | None:
        """:meth:`get` without awaiting."""

    @abstractmethod
    def put_now(self, arm: str, entry: Entry) -> int:
        """:meth:`put` without awaiting."""

    @abstractmethod
    def delete_now(self, arm: str, key: bytes) -> bool:
        """:meth:`delete` without awaiting."""

    @abstractmethod
    def renew_now(self, arm: str, key: bytes, at: float) -> bool:
        """:meth:`renew` without awaiting."""

    @abstractmethod
    def resize_now(self, arm: str, budget: int) -> int:
        """:meth:`resize` without awaiting."""

    @abstractmethod
    def flush_now(self, arm: str) -> int:
        """:meth:`flush` without awaiting."""

    @abstractmethod
    def stats_now(self, arm: str) -> TierStats:
        """:meth:`stats` without awaiting."""

    @abstractmethod
    def touch_soon(self, arm: str, key: bytes) -> None:
        """Note that the entry was used, if it is there: here at once."""

    async def get(self, arm: str, key: bytes, *, touch: bool = True) -> Entry | None:
        """Return the entry, expired or not, and note that it was used if ``touch``."""
        return self.get_now(arm, key, touch=touch)

    async def put(self, arm: str, entry: Entry) -> int:
        """Store the entry as the newest; return how many others were evicted for it."""
        return self.put_now(arm, entry)

    def charged(self, entry: Entry) -> Entry:
        """Return the entry as it is: what it takes besides is not charged."""
        return entry

    async def touch(self, arm: str, key: bytes) -> None:
        """Note that the entry was used, if it is there."""
        self.touch_soon(arm, key)

    async def renew(self, arm: str, key: bytes, at: float) -> bool:
        """Begin the entry's life anew at ``at``, if it is there; whether it was."""
        return self.renew_now(arm, key, at)

    async def heads(self, arm: str, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the entries without body and vector; None where there is none."""
        found = (self.get_now(arm, key, touch=False) for key in keys)
        return [None if entry is None else entry.head() for entry in found]

    async def delete(self, arm: str, key: bytes) -> bool:
        """Remove the entry; whether it was there."""
        return self.delete_now(arm, key)

    async def delete_many(self, arm: str, keys: Sequence[bytes]) -> int:
        """Remove the entries; how many of them were there."""
        return sum(self.delete_now(arm, key) for key in keys)

    async def resize(self, arm: str, budget: int) -> int:
        """Set the arm's budget in bytes; return how many entries were evicted.

        Raises:
            ValueError: If the budget is negative.
        """
        return self.resize_now(arm, budget)

    async def flush(self, arm: str) -> int:
        """Remove every entry of the arm; how many there were."""
        return self.flush_now(arm)

    async def stats(self, arm: str) -> TierStats:
        """Return what the arm holds."""
        return self.stats_now(arm)
