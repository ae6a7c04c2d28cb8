"""Copies of what a shared store has, kept right: whatever leaves the store leaves the memory tier, however it was missed.

The store numbers an arm's removals (:class:`serving.tiers.base.SharedTier`) and publishes each with its number; the memory tier
keeps its *mark*, the number up to which all of them took effect in it (:class:`serving.tiers.local.LocalTier`). It may be an
arena that several replicas of a node share and that outlives them all, so that the mark answers for it, not for a process:

* While a replica hears every number, it puts each into effect in turn. Replicas of a node do the same work; the first is enough.
* A replica that begins to listen, or missed a number, asks the store for its own. Where the mark is the same, or another replica
  of the node raises it to that within :data:`SIBLINGS_SECONDS`, nothing was missed and everything is kept.
* Else removals were missed: while the node was down, after a kill between a removal and its effect, or since the store lost its
  data (its numbers then begin anew, with greater ones). The copies are compared with what the store has, and those that it has
  not, or has anew, are dropped. Until that is done, only what this replica has put there since may answer: all else comes from
  the store.
* A store whose numbers went back, since a copy that had not heard of the last ones took its place, goes on from greater ones.
* What is put while the store does not answer makes the mark negative: there may be entries of which the store never hears, so
  that nobody could remove them. They are compared as well when it answers again. A flush that chooses by what entries are asks
  the store alone what there is: from then on nothing of such an arm answers until it is compared.

A copy that was read from the store may be late: it is stored only if no removal after the reading took effect yet. An answer may
be late as well, and a flush have come since it was asked for: whoever asks notes the last removal that is known then
(:meth:`Coherence.last`), and the store refuses what a later flush covers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from serving.tiers.base import Change, Entry, SharedTier, Tier
from serving.tiers.local import LocalTier

SIBLINGS_SECONDS = 0.25
"""How long a replica waits for others of its node to put into effect what it has not heard of itself."""

MOST_SURE = 1 << 16
"""Keys that are remembered as right while others are not; of more it is not known until all are."""

_POLL_SECONDS = 0.005
_log = logging.getLogger(__name__)


@runtime_checkable
class Store(Tier, SharedTier, Protocol):
    """A store that all replicas share."""


class Coherence:
    """What one replica knows of its memory tier's agreement with the store.

    Args:
        memory: The memory tier.
        store: The store of whose entries it holds copies.
        introduce: Makes an arm known to the store, which has lost what it knew of it.
        wake: Called when there is something to :meth:`settle`.

    Attributes:
        unsure: Arms of which not every entry may answer: the keys of those that may, by arm.
    """

    def __init__(
        self, memory: LocalTier, store: Store, introduce: Callable[[str], Awaitable[object]], wake: Callable[[], None]
    ) -> None:
        self.unsure: dict[str, set[bytes]] = {}
        self._memory = memory
        self._store = store
        self._introduce = introduce
        self._wake = wake
        self._listening = False
        self._owed: set[str] = set()
        self._missed: set[str] = set()
        self._doubts: dict[str, int] = {}  # how often there was one
        self._heard: dict[str, int] = {}  # last number of arms whose position is not known
        self._positions: dict[str, int] = {}  # number up to which all was heard
        self._flushed: dict[str, int] = {}  # number of the last flush that was heard, or at least that of one's own
        self._last: dict[str, int] = {}  # greatest number that the store has told, whatever was heard of those before it

    @property
    def owes(self) -> bool:
        """Whether there is something to settle, and the store's changes are heard."""
        return self._listening and bool(self._owed)

    def position(self, arm: str) -> int | None:
        """Return the number up to which the arm's removals were heard and took effect; None where that is not known."""
        return None if arm in self.unsure else self._positions.get(arm)

    def last(self, arm: str) -> int:
        """Return the number of the arm's last removal as far as it is known here; 0: none is."""
        return self._last.get(arm, 0)

    def learned(self, arm: str, number: int) -> None:
        """Note that the store has told of a removal by its number."""
        if number > self._last.get(arm, 0):
            self._last[arm] = number

    def flushed(self, arm: str) -> None:
        """Note that this replica itself has flushed: what was asked for by now may be covered, before the store tells of it."""
        self._flushed[arm] = max(self._flushed.get(arm, 0), self.last(arm) + 1)

    def late(self, arm: str, since: int | None) -> bool:
        """Whether a flush was heard that may cover what was asked for when that was the last removal known: the store knows."""
        return since is not None and since < self._flushed.get(arm, 0)

    def usable(self, arm: str, key: bytes) -> bool:
        """Whether the memory tier's entry under that key may answer."""
        sure = self.unsure.get(arm)
        return sure is None or key in sure

    def put(self, arm: str, entry: Entry) -> None:
        """Note that this replica has put an entry into the memory tier, if it is there."""
        sure = self.unsure.get(arm)
        if sure is not None and len(sure) < MOST_SURE:
            held = self._memory.get_now(arm, entry.key, touch=False)
            if held is not None and held.written_at == entry.written_at:
                sure.add(entry.key)

    def begin(self, arm: str) -> None:
        """Take up an arm, or begin it again: what was heard of it so far does not count."""
        self._positions.pop(arm, None)
        self._heard.pop(arm, None)
        self._missed.discard(arm)
        self.unsure[arm] = set()
        self._owed.add(arm)
        self._wake()

    def move(self, memory: LocalTier, arms: list[str]) -> None:
        """Go on with another memory tier, of which nothing is known so far."""
        self._memory = memory
        for arm in arms:
            self.begin(arm)

    def listening(self, arms: list[str]) -> None:
        """Begin all arms: from now on the store's changes are heard."""
        self._listening = True
        for arm in arms:
            self.begin(arm)

    def deaf(self) -> None:
        """The store's changes are not heard any more, so that nothing can be made sure of."""
        self._listening = False

    def doubt(self, arm: str) -> None:
        """Note that the memory tier has an entry of which the store does not know.

        Raises:
            TierUnavailable: If that cannot be noted where it outlives the process.
        """
        self._owed.add(arm)
        self._doubts[arm] = self._doubts.get(arm, 0) + 1
        self._wake()
        self._memory.update_mark_now(arm, lambda mark: -abs(mark))

    def outdated(self, arm: str) -> None:
        """Note that entries are being flushed by what they are: those of which the store does not know would be left out."""
        if arm in self._owed or self._memory.mark_now(arm) < 0:
            self.begin(arm)

    def heard(self, change: Change) -> None:
        """Put a change into effect in the memory tier."""
        arm, number = change.arm, change.removal
        self.learned(arm, number)
        if change.kind == "flush" or not change.keys:
            self._flushed[arm] = number
        keys = None if change.kind == "flush" else change.keys
        unless = change.written_at if change.kind == "put" else None
        position = self._positions.get(arm)
        if number and position is not None and number != position + 1:
            if number <= position:
                return
            _log.info("arm %s: removals %d to %d were missed", arm, position + 1, number - 1)
            self.begin(arm)
            position = None
        if number and position is None:
            last = self._heard.get(arm, number - 1)
            if number != last + 1:
                self._missed.add(arm)
            self._heard[arm] = number
        elif number:
            self._positions[arm] = number
        settled = position is not None and arm not in self.unsure
        self._memory.remove_now(arm, keys, removal=number if settled else 0, unless=unless)

    async def settle(self) -> None:
        """Make sure of all arms that are owed.

        Raises:
            TierUnavailable: If the store does not answer, or the memory tier cannot be written to; the rest is still owed.
        """
        for arm in sorted(self._owed):
            await self._settle(arm)

    async def _settle(self, arm: str) -> None:
        doubts, last = self._doubts.get(arm, 0), self.last(arm)
        count = await self._store.removals(arm)
        if count == 0:
            await self._introduce(arm)
            count = await self._store.removals(arm)
        if count < last:  # they went back: what was noted before means nothing now, and would be taken for what is to come
            await self._store.renumber(arm)
            count = self._last[arm] = await self._store.removals(arm)
        self.learned(arm, count)
        while arm in self._missed:
            self._missed.discard(arm)
            self._heard.pop(arm, None)
            count = await self._store.removals(arm)
        position = self._positions.get(arm)
        if position is None:
            position = self._positions[arm] = max(count, self._heard.pop(arm, 0))
        if not await self._complete(arm, count):
            await self._compare(arm, count)
        if arm not in self._positions or self._doubts.get(arm, 0) != doubts:
            return  # something was missed meanwhile, or put without the store
        position = self._positions[arm]
        self._memory.update_mark_now(arm, lambda mark: max(abs(mark), position))
        self.unsure.pop(arm, None)
        self._owed.discard(arm)

    async def _complete(self, arm: str, count: int) -> bool:
        """Whether all removals up to that number took effect."""
        mark = self._memory.mark_now(arm)
        if self._memory.shared:
            end = asyncio.get_running_loop().time() + SIBLINGS_SECONDS
            while 0 < mark < count and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(_POLL_SECONDS)
                mark = self._memory.mark_now(arm)
        if mark > count:  # others have heard of more since; or the mark is of a store that there is no more
            count = await self._store.removals(arm)
            if mark > count:  # else others, to whom its numbers tell what they have heard of, would take new ones for old
                await self._store.renumber(arm)
            return 0 < mark <= count
        return mark == count

    async def _compare(self, arm: str, count: int) -> None:
        """Drop what the store has not, or has anew."""
        self._memory.update_mark_now(arm, lambda _: -count)
        kept = dropped = 0
        async for heads in self._memory.scan(arm):
            stored = await self._store.heads(arm, [head.key for head in heads])
            gone = [head.key for head, now in zip(heads, stored, strict=True) if now is None or now.written_at != head.written_at]
            if gone:
                self._memory.remove_now(arm, gone)
            kept, dropped = kept + len(heads) - len(gone), dropped + len(gone)
            if self._memory.mark_now(arm) >= count:
                return  # another replica was faster
        if kept or dropped:
            _log.info("arm %s: of the entries in memory %d are kept, %d were removed meanwhile", arm, kept, dropped)
