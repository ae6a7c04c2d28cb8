"""What tiers in this machine's memory have in common: operations that never wait, and the protocol of tiers over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence

from serving.tiers.base import Entry, OnEvict, TierStats


class LocalTier(ABC):
    """Gives a tier whose operations need not be awaited the protocol of :class:`serving.tiers.base.Tier`.

    The ``*_now`` methods are the operations, for callers on the hot path.

    Such a tier may hold copies of what a store has that all replicas share. It then keeps the *mark* of each arm: the number of
    the last of the store's removals (:class:`serving.tiers.base.SharedTier`) that took effect here, as did all before it. 0:
    nothing is known; below 0: that number, and there may be entries that the store does not have.

    Attributes:
        name: The label of its metrics.
        on_evict: See :class:`serving.tiers.base.Tier`.
        shared: Whether other processes use it too.
    """

    name: str
    on_evict: OnEvict | None
    shared: bool

    @abstractmethod
    def get_now(self, arm: str, key: bytes, *, touch: bool = True) -> Entry | None:
        """:meth:`get` without awaiting."""

    @abstractmethod
    def put_now(self, arm: str, entry: Entry, *, known: int | None = None) -> int:
        """:meth:`put` without awaiting.

        Args:
            arm: The arm.
            entry: The entry.
            known: The number of the store's last removal when it had this entry. Where a later one took effect here already, the
                entry may be what was removed, and is not stored. None: it is stored in any case.
        """

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
    def mark_now(self, arm: str) -> int:
        """Return the arm's mark."""

    @abstractmethod
    def update_mark_now(self, arm: str, change: Callable[[int], int]) -> None:
        """Set the arm's mark to what ``change`` makes of it, with nobody else in between.

        Raises:
            TierUnavailable: If others kept it from that.
        """

    @abstractmethod
    def remove_now(self, arm: str, keys: Sequence[bytes] | None, *, removal: int = 0, unless: float | None = None) -> None:
        """Put one of the store's removals into effect; nothing is done where the mark says that it was already.

        Args:
            arm: The arm.
            keys: What was removed; None: everything.
            removal: Its number, which becomes the mark: all before it have to be in effect. 0: the mark stays.
            unless: An entry that was written then stays: it is the one that replaces what was removed.
        """

    @abstractmethod
    def stats_now(self, arm: str) -> TierStats:
        """:meth:`stats` without awaiting."""

    @abstractmethod
    def touch_soon(self, arm: str, key: bytes) -> None:
        """Note that the entry was used, if it is there: here at once."""

    @abstractmethod
    def scan(self, arm: str) -> AsyncIterator[list[Entry]]:
        """Yield the heads of all entries, in steps."""

    @abstractmethod
    async def close(self) -> None:
        """Release what the tier has; it is not usable afterwards."""

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
