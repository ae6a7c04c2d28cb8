"""How a replica keeps in step with its store: it hears what others do to it, and catches up with what was missed.

While the store's changes are not heard (*deaf*: the connection is gone, or the store is), whoever looks up asks the store first,
if it answers. When they are heard again, every arm begins anew (:mod:`serving.coherence`), and the index is read from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serving.budgets import Budgets
from serving.coherence import Coherence, Store
from serving.ending import end, report_failure
from serving.reindexing import index_from_memory, index_from_store
from serving.tiers.base import Change, Tier, TierUnavailable
from serving.tiers.local import LocalTier
from serving.vector_index import VectorIndex

RETRY_SECONDS = 1.0
"""How often what a tier missed while it was away is offered again."""

_log = logging.getLogger(__name__)


@dataclass
class Told:
    """Who is told of what is not to be given any more.

    Attributes:
        outdated: Told the arm whose answers under way are older than a flush, here or at another replica.
        unsure: Told the arm whose answers under way may be older than a flush that was not heard of.
        withdrawn: Told the arm and the key of an entry that should not have been given, here.
        removed: Told the arm and the keys that left the store; None: all of the arm.
    """

    outdated: Callable[[str], None] = lambda arm: None
    unsure: Callable[[str], None] = lambda arm: None
    withdrawn: Callable[[str, bytes], None] = lambda arm, key: None
    removed: Callable[[str, Sequence[bytes] | None], None] = lambda arm, keys: None


class Upkeep:
    """The work in the background of one replica's cache.

    Args:
        memory: The memory tier.
        store: The store, or None: then what there is to do is the memory tier's.
        coherence: What is known of their agreement, where the store is shared; else None.
        shared: That store; else None.
        budgets: Each arm's budget in both.
        vectors: Where the vectors are, or None.
        rebuild_vectors: How many of an arm's most recently used entries are read from the store to build the index.
        work: Set where there is something to do.
        told: Who is told of what was heard.

    Attributes:
        memory: The memory tier; may be changed.
        deaf: Whether what others remove is not heard of at the moment.
    """

    def __init__(
        self,
        memory: LocalTier,
        store: Tier | None,
        coherence: Coherence | None,
        shared: Store | None,
        *,
        budgets: Budgets,
        vectors: VectorIndex | None,
        rebuild_vectors: int,
        work: asyncio.Event,
        told: Told,
    ) -> None:
        self.memory = memory
        self.deaf = False
        self._store = store
        self._coherence = coherence
        self._shared = shared
        self._budgets = budgets
        self._vectors = vectors
        self._rebuild_limit = rebuild_vectors
        self._work = work
        self._told = told
        self._unindexed: set[str] = set()  # arms whose vectors are to be read from the store
        self._following = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin, if there is anything to do and it was not begun; needs the running event loop."""
        if not self._tasks and (self._store is not None or self.memory.shared):
            self._tasks = [asyncio.create_task(self._maintain(), name="cache-maintenance")]
            if self._shared is not None:
                self._tasks.append(asyncio.create_task(self._follow(self._shared), name="cache-change-feed"))
            for task in self._tasks:
                task.add_done_callback(report_failure)

    async def stop(self) -> None:
        """End it."""
        await end(self._tasks)
        self._tasks = []

    def index(self, arms: Iterable[str]) -> None:
        """Have the vectors of arms read that outlived the process before; the work begins when it is set."""
        self._unindexed.update(arms)

    async def following(self) -> None:
        """Wait until what other replicas do to the store is heard of, and what was missed is known; at once without a store."""
        if self._shared is not None:
            await self._following.wait()

    def heard(self, change: Change) -> None:
        """Keep the memory tier and the index in step with a change of the shared store, and tell of it."""
        assert self._coherence is not None
        if change.kind == "lost":
            self.deaf = True
            self._coherence.deaf()
            return
        if change.kind == "gap":
            self.deaf = False
            self._coherence.listening(self._budgets.arms)
            for arm in self._budgets.arms:
                self._told.unsure(arm)
            self.index(self._budgets.arms)
            self._work.set()
            return
        if change.arm not in self._budgets:
            return
        if change.kind == "outdated":
            self._coherence.outdated(change.arm)
        else:
            self._coherence.heard(change)
        if change.kind == "evict" and not change.keys:
            return
        if change.kind in ("evict", "flush"):
            self._told.removed(change.arm, change.keys if change.kind == "evict" else None)
        if change.own:
            return
        # Vectors that all replicas share were told by the one that made the change.
        vectors = self._vectors if self._vectors is not None and not self._vectors.shared else None
        if change.kind == "put":
            if vectors is not None:
                vectors.replace(change.arm, change.keys[0], change.context, change.vector)
        elif change.kind == "evict":
            if vectors is not None:
                vectors.remove(change.arm, change.keys)
        else:
            self._told.outdated(change.arm)
            if change.kind == "flush" and vectors is not None:
                vectors.flush(change.arm)

    async def _follow(self, store: Store) -> None:
        """Hear of every change; what cannot be put into effect, whatever the reason, is as if nothing had been heard of it."""
        while True:
            try:
                async with contextlib.aclosing(store.changes()) as changes:
                    async for change in changes:
                        self.heard(change)
            except Exception:  # noqa: BLE001 - who stopped to listen would go on to give what is removed from now on
                _log.exception("a change of the store had no effect here: until memory is compared with the store, that is asked")
            self.heard(Change("lost"))
            await asyncio.sleep(RETRY_SECONDS)

    async def _maintain(self) -> None:
        """Catch up with what was missed: budgets, what left the store, and the vectors that other replicas wrote."""
        while True:
            await self._work.wait()
            self._work.clear()
            failed = False
            try:
                self._budgets.settle_memory()
                await self._budgets.settle_store()
                await self._settle_memory()
                await self._rebuild()
            except Exception:  # noqa: BLE001 - it is owed still, and what is not settled does not answer
                _log.exception("upkeep failed, and is tried again")
                failed = True
            if failed or self._budgets.owes or self._unindexed or (self._coherence is not None and self._coherence.owes):
                self._work.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def _settle_memory(self) -> None:
        if self._coherence is None or not self._coherence.owes:
            return
        try:
            await self._coherence.settle()
        except TierUnavailable as error:
            _log.debug("memory will be compared with the store when that answers: %s", error)
        self._following.set()

    async def _rebuild(self) -> None:
        """Index what there was before this process, where the index is the process's own."""
        vectors, pending = self._vectors, sorted(self._unindexed)
        self._unindexed.clear()
        if vectors is None or vectors.shared:
            return
        for done, arm in enumerate(pending):
            try:
                if self._shared is not None:
                    await index_from_store(self._shared, arm, vectors, self._rebuild_limit)
                elif self._store is None:
                    await index_from_memory(self.memory, arm, vectors)
            except Exception as error:
                self._unindexed.update(pending[done:])
                if isinstance(error, TierUnavailable):
                    return
                raise
