"""What each arm may hold: the knobs in effect, and the budgets that tiers have not taken yet.

A tier that is away or busy keeps its budget for now, which is offered to it again: knobs never fail to take effect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from serving.knobs import Knobs
from serving.tiers.base import Tier, TierUnavailable
from serving.tiers.local import LocalTier

_log = logging.getLogger(__name__)


class Budgets:
    """Budgets of the store and of the memory tier, by arm.

    Args:
        memory: The memory tier.
        store: The tier that all replicas share; None: the memory tier has each arm's whole budget.
        l1_share: The memory tiers' part of an arm's budget where there is a store, 0..1.
        memories: How many memory tiers share that part, >= 1.
        wake: Called when a tier has not taken a budget: call :meth:`settle_memory` and :meth:`settle_store` in a while.
    """

    def __init__(
        self, memory: LocalTier, store: Tier | None, *, l1_share: float, memories: int, wake: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._store = store
        self._l1_share = l1_share
        self._memories = memories
        self._wake = wake
        self._knobs: Mapping[str, Knobs] = {}
        self._owed_store: set[str] = set()
        self._owed_memory: set[str] = set()
        self._waiting = False  # for a store that is away; said once
        self._resizing = asyncio.Lock()

    def __contains__(self, arm: str) -> bool:
        """Whether the arm has knobs."""
        return arm in self._knobs

    @property
    def arms(self) -> list[str]:
        """The arms that have knobs."""
        return list(self._knobs)

    @property
    def owes(self) -> bool:
        """Whether a tier has not taken a budget yet."""
        return bool(self._owed_store or self._owed_memory)

    def knobs(self, arm: str) -> Knobs:
        """Return the arm's knobs.

        Raises:
            KeyError: If none were applied to it.
        """
        try:
            return self._knobs[arm]
        except KeyError:
            raise KeyError(f"arm {arm!r} has no knobs; apply() gave some to {sorted(self._knobs)}") from None

    def take(self, arms: Mapping[str, Knobs], *, provisional: bool) -> None:
        """Put knobs into effect, and trim the memory tier to them; :meth:`settle_store` tells the store.

        Args:
            arms: Knobs by arm.
            provisional: Whether a budget that others gave the memory tier is to stay.
        """
        self._knobs = {**self._knobs, **arms}
        if self._store is not None:
            self._owed_store.update(arms)
        self._resize_memory(arms, provisional=provisional)

    def divide(self, memories: int) -> None:
        """Divide the memory part by another number of memory tiers, >= 1."""
        if memories != self._memories and memories >= 1:
            self._memories = memories
            self._resize_memory(self._knobs)

    def move(self, memory: LocalTier, memories: int, *, provisional: bool) -> None:
        """Go on with another memory tier, one of ``memories``; ``provisional`` as for :meth:`take`."""
        self._memory, self._memories = memory, memories
        self._resize_memory(self._knobs, provisional=provisional)

    def settle_memory(self) -> None:
        """Offer the memory tier what it has not taken."""
        self._resize_memory(sorted(self._owed_memory))

    async def settle_store(self) -> None:
        """Offer the store what it has not taken; it may be away still."""
        if self._store is None or not self._owed_store:
            return
        async with self._resizing:
            for arm in sorted(self._owed_store):
                budget = self._knobs[arm].cache_size
                try:
                    await self._store.resize(arm, budget)
                except TierUnavailable as error:
                    if not self._waiting:
                        _log.warning("budgets will be set when the store is back: %s", error)
                    self._waiting = True
                    return
                if self._knobs[arm].cache_size == budget:
                    self._owed_store.discard(arm)
            self._waiting = False

    async def introduce(self, arm: str) -> None:
        """Tell a store the arm's budget that has lost what it knew of it.

        Raises:
            TierUnavailable: If it cannot be asked.
        """
        assert self._store is not None
        await self._store.resize(arm, self._knobs[arm].cache_size)

    def _resize_memory(self, arms: Mapping[str, Knobs] | list[str], *, provisional: bool = False) -> None:
        for arm in arms:
            if provisional and self._memory.shared and self._memory.stats_now(arm).budget:
                continue
            budget = self._knobs[arm].cache_size
            if self._store is not None:
                budget = int(budget * self._l1_share / self._memories)
            try:
                self._memory.resize_now(arm, budget)
                self._owed_memory.discard(arm)
            except TierUnavailable as error:
                if arm not in self._owed_memory:
                    _log.warning("arm %s keeps its budget in memory for now: %s", arm, error)
                self._owed_memory.add(arm)
                self._wake()
