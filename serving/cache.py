"""The tiered cache: carries out what :mod:`serving.policy` decides.

Inclusion: the store (Redis) holds everything of an arm under its whole budget, cluster-wide, in exact LRU order; the memory tier
of each replica holds a subset under ``l1_share / replicas`` of it. A memory hit never waits for the store: its touch is batched
and goes out at the latest before this replica's next eviction decision there. Without a store the memory tier has it all.

A store that is down or slow is a miss, never an error. What it missed meanwhile (a new budget) is caught up when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from serving.keys import Fingerprint
from serving.knobs import Knobs
from serving.policy import Asked, CacheRules, Candidate, Decision, Outcome, decide, is_live, worth_fetching
from serving.tiers.base import KEY_BYTES, Change, Entry, SharedTier, Tier, TierStats, TierUnavailable
from serving.tiers.memory import MemoryTier
from serving.tiers.vector import VectorTier

__all__ = ["CacheRules", "Lookup", "TieredCache"]

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""How often what a store missed while it was away is offered again."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the cache answers to one request.

    Attributes:
        outcome: ``hit``, ``semantic_hit`` or ``miss``.
        entry: The entry to answer with; None for a miss.
        tier: The tier that answered: ``memory``, ``redis``, ``vector`` for a semantic hit, ``""`` for a miss.
        age: Age of the entry in seconds; 0 for a miss.
        stale: Expected staleness, 0..1: ``1 - 0.5 ** (age / half-life)``.
        similarity: 1 for an exact hit, the cosine for a semantic one, 0 for a miss.
        expired: Whether an entry that would have answered was past its TTL.
        vector: The request's embedding (int8 bytes) if it was computed on the way, to be stored with the answer; else ``b""``.
        rule: The rule of :class:`serving.policy.Rule` that fired.
    """

    outcome: Outcome
    entry: Entry | None
    tier: str
    age: float
    stale: float
    similarity: float
    expired: bool
    vector: bytes
    rule: str


class TieredCache:
    """Looks up, stores, resizes and flushes over the tiers; each arm has a budget and entries of its own, nothing is shared.

    Args:
        memory: The memory tier of this replica.
        store: The tier that all replicas share, or None: then the memory tier is the whole cache.
        vectors: The vector index of this replica, or None: then there is no semantic lookup.
        rules: Settings that do not change at run time.
        replicas: How many replicas share the memory part of the budget, >= 1.
        rebuild_vectors: How many of an arm's most recently used entries are read from the store to build the index at a start.

    Raises:
        ValueError: If ``replicas`` is below 1.
    """

    def __init__(
        self,
        *,
        memory: MemoryTier,
        store: Tier | None,
        vectors: VectorTier | None,
        rules: CacheRules,
        replicas: int = 1,
        rebuild_vectors: int = 10_000,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"tiered cache: replicas: expected at least 1, got {replicas!r}")
        self.memory = memory
        self.store = store
        self.vectors = vectors
        self.rules = rules
        self.replicas = replicas
        self._rebuild_limit = rebuild_vectors
        self._knobs: dict[str, Knobs] = {}
        self._owed: set[str] = set()  # arms whose budget the store has not taken yet
        self._unindexed: set[str] = set()  # arms whose vectors are to be read from the store
        self._waiting = False  # for a store that is away; said once
        self._work = asyncio.Event()
        self._following = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._resizing = asyncio.Lock()
        if store is None:
            memory.on_evict = self._forget_vectors
        else:
            store.on_evict = self._forget

    # -- knobs ---------------------------------------------------------------------------------------------------------------

    def knobs(self, arm: str) -> Knobs:
        """Return the arm's knobs.

        Raises:
            KeyError: If none were applied to it.
        """
        try:
            return self._knobs[arm]
        except KeyError:
            raise KeyError(f"arm {arm!r} has no knobs; apply() gave some to {sorted(self._knobs)}") from None

    async def apply(self, arms: Mapping[str, Knobs]) -> None:
        """Put knobs into effect: for reads at once, then the tiers are trimmed to the new budgets.

        Never fails for a store that is away: it is told when it is back. Arms that are not named keep their knobs.
        """
        self._unindexed.update(set(arms) - set(self._knobs))
        self._knobs = {**self._knobs, **arms}
        for arm, knobs in arms.items():
            self.memory.resize_now(arm, self._memory_budget(knobs))
            if self.vectors is not None:
                # An entry with a vector is at least this large, so more vectors than that cannot all have an entry.
                self.vectors.limit(arm, knobs.cache_size // (2 * KEY_BYTES + self.vectors.dim))
        if self.store is not None:
            self._owed.update(arms)
            await self._settle_budgets()
            self._work.set()
        self._start()

    # -- reading -------------------------------------------------------------------------------------------------------------

    def lookup_now(self, arm: str, fp: Fingerprint, *, now: float) -> Lookup | None:
        """Return an exact hit of the memory tier, without awaiting; None where :meth:`lookup` has to look further. O(1)."""
        entry = self.memory.get_now(arm, fp.key, touch=False)
        if entry is None:
            return None
        decision = decide(Asked(fp), entry, (), knobs=self.knobs(arm), rules=self.rules, now=now)
        if decision.outcome != "hit":
            return None
        self._touched(arm, fp.key)
        return _lookup(decision, "memory", b"")

    async def lookup(
        self, arm: str, fp: Fingerprint, *, now: float, embed: Callable[[str], Awaitable[bytes]] | None = None
    ) -> Lookup:
        """Find what may answer the request: exactly, in memory and then in the store, then by meaning.

        O(1) for an exact hit; a semantic lookup adds one embedding, one search of O(log n) and up to a few reads of the store.

        Args:
            arm: The arm; needs knobs.
            fp: The request's identity.
            now: The clock, seconds, of the same kind as the entries' ``written_at``.
            embed: Gives a text's embedding as int8 bytes; None: no semantic lookup. What it raises passes through.

        Raises:
            KeyError: If the arm has no knobs.
        """
        quick = self.lookup_now(arm, fp, now=now)
        if quick is not None:
            return quick
        knobs = self.knobs(arm)
        exact = self.memory.get_now(arm, fp.key, touch=False)  # there, but expired
        reachable = True
        if self.store is not None:
            try:
                stored = await self.store.get(arm, fp.key)
            except TierUnavailable:
                stored, reachable = None, False
            if stored is not None:
                exact = stored
        decision = decide(Asked(fp), exact, (), knobs=knobs, rules=self.rules, now=now)
        if decision.entry is not None:
            self._promote(arm, decision.entry)
            return _lookup(decision, self.store.name if self.store is not None else self.memory.name, b"")
        if self.vectors is None or not fp.text:
            return _lookup(decision, "", b"")

        vector = exact.vector if exact is not None and len(exact.vector) == self.vectors.dim else b""
        if not vector and embed is not None:
            vector = await embed(fp.text)
        if not vector:
            return _lookup(decision, "", b"")
        candidates = await self._candidates(arm, fp, vector, knobs=knobs, now=now, reachable=reachable)
        decision = decide(Asked(fp), exact, candidates, knobs=knobs, rules=self.rules, now=now)
        if decision.entry is not None:
            self._touched(arm, decision.entry.key)
            self._promote(arm, decision.entry)
            return _lookup(decision, self.vectors.name, vector)
        return _lookup(decision, "", vector)

    async def is_live(self, arm: str, key: bytes, *, now: float, ahead: float = 0.0) -> bool:
        """Whether the key has an entry that is live and not within the last ``ahead`` share (0..1) of its TTL.

        True where the store cannot be asked: a refresh costs tokens, and could not be stored either. Does not touch the entry.
        """
        return (await self.are_live(arm, [key], now=now, ahead=ahead))[0]

    async def are_live(self, arm: str, keys: Sequence[bytes], *, now: float, ahead: float = 0.0) -> list[bool]:
        """:meth:`is_live` of many keys in one round trip to the store, no bodies fetched; in the order of ``keys``."""
        knobs = self.knobs(arm)

        def live(head: Entry | None) -> bool:
            return head is not None and is_live(head, now=now, knobs=knobs, rules=self.rules, ahead=ahead)

        result = [live(head) for head in await self.memory.heads(arm, keys)]
        if self.store is None or all(result):
            return result
        unsure = [index for index, known in enumerate(result) if not known]
        try:
            heads = await self.store.heads(arm, [keys[index] for index in unsure])
        except TierUnavailable:
            return [True] * len(keys)
        for index, head in zip(unsure, heads, strict=True):
            result[index] = live(head)
        return result

    # -- writing -------------------------------------------------------------------------------------------------------------

    async def put(self, arm: str, entry: Entry, *, now: float) -> int:
        """Store an answer as the arm's most recently used.

        An entry that is larger than the arm's budget, or already past its TTL, is not stored. With the store away it stays in the
        memory tier.

        Returns:
            How many entries the store evicted for it (the memory tier, if there is no store).

        Raises:
            KeyError: If the arm has no knobs.
        """
        knobs = self.knobs(arm)
        if not is_live(entry, now=now, knobs=knobs, rules=self.rules):
            return 0
        if self.store is None:
            evicted = self.memory.put_now(arm, entry)
        else:
            try:
                evicted = await self.store.put(arm, entry)
            except TierUnavailable:
                evicted = 0
            self._promote(arm, entry)
        self._index(arm, entry.key, entry.context, entry.vector if entry.size <= knobs.cache_size else b"")
        return evicted

    async def flush(self, arm: str) -> int:
        """Remove every entry of the arm; how many there were (of the memory tier alone if the store is away)."""
        count = self.memory.flush_now(arm)
        if self.vectors is not None:
            self.vectors.flush(arm)
        if self.store is not None:
            try:
                return await self.store.flush(arm)
            except TierUnavailable as error:
                _log.warning("arm %s was flushed in memory only: %s", arm, error)
        return count

    async def stats(self, arm: str) -> dict[str, TierStats]:
        """Return what the arm holds, by tier name; the store is missing while it is away."""
        result = {self.memory.name: self.memory.stats_now(arm)}
        if self.store is not None:
            with suppress(TierUnavailable):
                result[self.store.name] = await self.store.stats(arm)
        return result

    async def close(self) -> None:
        """Stop the background work and close the tiers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self.store is not None:
            await self.store.close()
        await self.memory.close()
        if self.vectors is not None:
            self.vectors.close()

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _memory_budget(self, knobs: Knobs) -> int:
        if self.store is None:
            return knobs.cache_size
        return int(knobs.cache_size * self.rules.l1_share / self.replicas)

    def _touched(self, arm: str, key: bytes) -> None:
        self.memory.touch_soon(arm, key)
        if self.store is not None:
            self.store.touch_soon(arm, key)

    def _promote(self, arm: str, entry: Entry) -> None:
        if self.store is None:
            return
        self.memory.put_now(arm, entry)
        if entry.vector and self.vectors is not None and not self.vectors.has(arm, entry.key):
            self._index(arm, entry.key, entry.context, entry.vector)

    def _index(self, arm: str, key: bytes, context: bytes, vector: bytes) -> None:
        if self.vectors is None:
            return
        if len(vector) == self.vectors.dim:
            self.vectors.add(arm, key, context, vector)
        else:
            self.vectors.remove(arm, key)

    def _forget(self, arm: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.memory.delete_now(arm, key)
        self._forget_vectors(arm, keys)

    def _forget_vectors(self, arm: str, keys: Sequence[bytes]) -> None:
        if self.vectors is not None:
            for key in keys:
                self.vectors.remove(arm, key)

    async def _candidates(
        self, arm: str, fp: Fingerprint, vector: bytes, *, knobs: Knobs, now: float, reachable: bool
    ) -> list[Candidate]:
        """Neighbours of the request; those worth it with their entries, up to the first that is live."""
        assert self.vectors is not None
        threshold = self.rules.semantic_threshold
        near = [Candidate(*found) for found in self.vectors.near(arm, fp.context, vector, floor=threshold)]
        fetched: dict[bytes, Entry] = {}
        for candidate in worth_fetching(Asked(fp), near, self.rules):
            entry = self.memory.get_now(arm, candidate.key, touch=False)
            live = entry is not None and is_live(entry, now=now, knobs=knobs, rules=self.rules)
            if not live and self.store is not None:
                if not reachable:
                    continue
                try:
                    stored = await self.store.get(arm, candidate.key, touch=False)
                except TierUnavailable:
                    reachable = False
                    continue
                entry = stored
                live = entry is not None and is_live(entry, now=now, knobs=knobs, rules=self.rules)
            if entry is not None:
                fetched[candidate.key] = entry
            if live:
                break
            self.vectors.remove(arm, candidate.key)  # gone or expired: it need not be met again
        return [replace(candidate, entry=fetched.get(candidate.key)) for candidate in near]

    def _start(self) -> None:
        if not self._tasks and self.store is not None:
            self._tasks = [asyncio.create_task(self._maintain(self.store), name="cache-maintenance")]
            if isinstance(self.store, SharedTier):
                self._tasks.append(asyncio.create_task(self._follow(self.store), name="cache-change-feed"))
            for task in self._tasks:
                task.add_done_callback(_report_failure)

    async def _settle_budgets(self) -> None:
        assert self.store is not None
        async with self._resizing:
            for arm in sorted(self._owed):
                budget = self._knobs[arm].cache_size
                try:
                    await self.store.resize(arm, budget)
                except TierUnavailable as error:
                    if not self._waiting:
                        _log.warning("budgets will be set when the store is back: %s", error)
                    self._waiting = True
                    return
                if self._knobs[arm].cache_size == budget:
                    self._owed.discard(arm)
            self._waiting = False

    async def _maintain(self, store: Tier) -> None:
        """Catch up with what the store missed: budgets, and the vectors that other replicas wrote."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self._owed:
                await self._settle_budgets()
            if isinstance(store, SharedTier) and self.vectors is not None:
                await self._rebuild(store, self.vectors)
            else:
                self._unindexed.clear()
            if self._owed or self._unindexed:
                self._work.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def _rebuild(self, store: SharedTier, vectors: VectorTier) -> None:
        for arm in sorted(self._unindexed):
            try:
                found = await store.recent_vectors(arm, self._rebuild_limit)
            except TierUnavailable:
                return
            self._unindexed.discard(arm)
            for number, (key, context, vector) in enumerate(reversed(found)):
                if len(vector) == vectors.dim and not vectors.has(arm, key):
                    vectors.add(arm, key, context, vector)
                if number % 16 == 0:
                    await asyncio.sleep(0)  # indexing takes about 0.2 ms each; requests go first

    async def following(self) -> None:
        """Wait until what other replicas do to the store is heard of; returns at once without a shared store."""
        if self.store is not None and isinstance(self.store, SharedTier):
            await self._following.wait()

    async def _follow(self, store: SharedTier) -> None:
        """Keep the memory tier and the index in step with what other replicas do to the shared store."""
        async for change in store.changes():
            self._changed(change)

    def _changed(self, change: Change) -> None:
        if change.kind == "gap":
            for arm in self._knobs:  # what was flushed or evicted meanwhile was not heard of; the store still has what is valid
                self.memory.flush_now(arm)
            self._unindexed.update(self._knobs)
            self._work.set()
            self._following.set()
        elif change.arm not in self._knobs:
            return
        elif change.kind == "put":
            self.memory.delete_now(change.arm, change.keys[0])  # an older answer than the store's
            self._index(change.arm, change.keys[0], change.context, change.vector)
        elif change.kind == "evict":
            self._forget(change.arm, change.keys)
        else:
            self.memory.flush_now(change.arm)
            if self.vectors is not None:
                self.vectors.flush(change.arm)


def _lookup(decision: Decision, tier: str, vector: bytes) -> Lookup:
    return Lookup(
        decision.outcome, decision.entry, tier, decision.age, decision.stale, decision.similarity, decision.expired, vector,
        str(decision.rule),
    )  # fmt: skip


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("%s stopped", task.get_name(), exc_info=task.exception())
