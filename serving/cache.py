"""The tiered cache: carries out what :mod:`serving.policy` decides.

Inclusion: the store (Redis) holds everything of an arm under its whole budget, cluster-wide, in exact LRU order; each memory tier
holds a subset under ``l1_share / memories`` of it. A memory hit never waits for the store: its touch is batched and goes out at
the latest before this replica's next eviction decision there. Without a store the memory tier has it all. What leaves the store
leaves memory by :mod:`serving.coherence`.

A store that is down or slow is a miss, never an error, and so is a vector store. What the store missed meanwhile (a new budget)
is caught up when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from serving.adoption import Adoption
from serving.budgets import Budgets
from serving.coherence import Coherence, Store
from serving.keys import Fingerprint
from serving.knobs import Knobs
from serving.lookup import Lookup, answer_of
from serving.policy import Asked, CacheRules, Candidate, decide, is_live, worth_fetching
from serving.tiers.base import KEY_BYTES, Entry, EntryMeta, Outdated, Tier, TierStats, TierUnavailable
from serving.tiers.local import LocalTier
from serving.tiers.vector import VectorTier
from serving.tiers.vector_store import VectorStore
from serving.upkeep import Told, Upkeep
from serving.vector_index import VectorIndex
from serving.writing import Writing

__all__ = ["CacheRules", "Lookup", "TieredCache"]

VECTOR = "vector"
"""Label of the tier that answers by meaning, whichever store keeps the vectors."""

Embed = Callable[[str], Awaitable[bytes]]
Judge = Callable[[Entry, float], str]
"""Given a neighbour's entry and its similarity: the name of the check that refuses it as an answer, or ``""``."""

_log = logging.getLogger(__name__)

RENEW_SECONDS = 1.0
"""How much younger a hit has to make an entry for the store to be told."""


class NeighbourCache(Protocol):
    """Other nodes' memory; what is not to be had there is a miss, whatever the reason.

    Attributes:
        name: The label of its hits.
    """

    name: str

    async def get(self, arm: str, key: bytes, *, least: int = 0) -> Entry | None:
        """Return the entry of the key's owner, in bounded time; None also where removals up to ``least`` did not take effect."""
        ...

    def offer(self, arm: str, entry: Entry, known: int | None = None) -> None:
        """Give the entry to its key's owner, with the store's last removal when it had it; waits for nothing."""
        ...


class TieredCache:
    """Looks up, stores, resizes and flushes over the tiers; each arm has a budget and entries of its own, nothing is shared.

    Args:
        memory: The memory tier, of this replica or of all of its node.
        store: The tier that all replicas share, or None: then the memory tier is the whole cache.
        vectors: Where the vectors are, or None: then there is no semantic lookup.
        rules: Settings that do not change at run time.
        memories: How many memory tiers share the memory part of the budget, >= 1: replicas with one each, or nodes.
        rebuild_vectors: How many of an arm's most recently used entries are read from the store to build the index at a start.
        confidential: Whether a decision must not tell that another context holds something similar: where contexts are tenants'.

    Attributes:
        neighbours: Other nodes' memory, asked between this node's and the store; None: there is none.
        told: Who is told of what is not to be given any more; its functions may be set.
        upkeep: Hears of the store's changes, and catches up with what was missed.

    Raises:
        ValueError: If ``memories`` is below 1.
    """

    def __init__(
        self,
        *,
        memory: LocalTier,
        store: Tier | None,
        vectors: VectorStore | VectorTier | None,
        rules: CacheRules,
        memories: int = 1,
        rebuild_vectors: int = 10_000,
        confidential: bool = False,
    ) -> None:
        if memories < 1:
            raise ValueError(f"tiered cache: memories: expected at least 1, got {memories!r}")
        self.memory = memory
        self.store = store
        self.vectors = VectorIndex(vectors) if vectors is not None else None
        self.rules = rules
        self._confidential = confidential
        self.neighbours: NeighbourCache | None = None
        self.told = Told()
        self._work = asyncio.Event()
        self._budgets = Budgets(memory, store, l1_share=rules.l1_share, memories=memories, wake=self._work.set)
        self._renewing: set[asyncio.Task[None]] = set()
        self._shared: Store | None = store if isinstance(store, Store) else None
        self._coherence: Coherence | None = None
        self._adoption: Adoption | None = None
        if self._shared is not None:
            self._coherence = Coherence(memory, self._shared, self._budgets.introduce, self._work.set)
            self._adoption = Adoption(self._shared, self._coherence.position, self._promote)
        self._unsure: Mapping[str, object] = self._coherence.unsure if self._coherence is not None else {}
        self._writing = Writing(memory, store, self._coherence, self._shared) if store is not None else None
        self.upkeep = Upkeep(
            memory,
            store,
            self._coherence,
            self._shared,
            budgets=self._budgets,
            vectors=self.vectors,
            rebuild_vectors=rebuild_vectors,
            work=self._work,
            told=self.told,
        )
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
        return self._budgets.knobs(arm)

    async def apply(self, arms: Mapping[str, Knobs], *, provisional: bool = False) -> None:
        """Put knobs into effect: for reads at once, then the tiers are trimmed to the new budgets.

        Never fails for a tier that is away: it is told when it is back. Arms that are not named keep their knobs.

        Args:
            arms: Knobs by arm.
            provisional: Whether these are not known to be the cluster's: budgets that others gave the memory tier then stay.
        """
        begun = {arm for arm in arms if arm not in self._budgets}
        self.upkeep.index(begun)
        self._budgets.take(arms, provisional=provisional)
        if self.vectors is not None:
            for arm, knobs in arms.items():
                # An entry with a vector is at least this large, so more vectors than that cannot all have an entry.
                self.vectors.limit(arm, knobs.cache_size // (2 * KEY_BYTES + self.vectors.dim))
        for arm in begun:
            if self._coherence is not None:
                self._coherence.begin(arm)
            else:
                self._drop_copies(arm)
        await self._budgets.settle_store()
        self._work.set()
        self.upkeep.start()

    def share_memory(self, memories: int) -> None:
        """Divide the memory part of the budgets by another number of memory tiers, >= 1."""
        self._budgets.divide(memories)

    async def move_memory(self, memory: LocalTier, memories: int, *, provisional: bool = False) -> None:
        """Go on with another memory tier, and close the one so far. Without a store the other one gets what that held.

        Args:
            memory: The memory tier, of which what it has counts as much as at a start.
            memories: How many share the memory part of the budget then.
            provisional: As for :meth:`apply`.
        """
        before, self.memory, self.upkeep.memory = self.memory, memory, memory
        arms = self._budgets.arms
        if self.store is None:
            for arm in arms:
                self._drop_copies(arm)
        self._budgets.move(memory, memories, provisional=provisional)
        if self._writing is not None:
            self._writing.memory = memory
        if self._coherence is not None:
            self._coherence.move(memory, arms)
        else:
            before.on_evict, memory.on_evict = None, self._forget_vectors
            for arm in arms:
                async for heads in before.scan(arm):
                    for head in heads:
                        entry = before.get_now(arm, head.key, touch=False)
                        if entry is not None and memory.get_now(arm, head.key, touch=False) is None:
                            memory.put_now(arm, entry)
                    await asyncio.sleep(0)
        self._work.set()
        self.upkeep.start()
        await before.close()

    # -- reading -------------------------------------------------------------------------------------------------------------

    def lookup_now(self, arm: str, request: Asked | Fingerprint, *, now: float) -> Lookup | None:
        """Return an exact hit of the memory tier, without awaiting; None where :meth:`lookup` has to look further. O(1)."""
        if self.upkeep.deaf:  # the store is asked first, if it answers
            return None
        asked = request if isinstance(request, Asked) else Asked(request)
        entry = self.memory.get_now(arm, asked.fp.key, touch=False)
        if entry is None or (self._unsure and not self._usable(arm, asked.fp.key)):
            return None
        decision = decide(asked, entry, (), knobs=self.knobs(arm), rules=self.rules, now=now)
        if decision.outcome != "hit":
            return None
        self._touched(arm, entry, now)
        return answer_of(decision, self.memory.name)

    async def lookup(
        self,
        arm: str,
        request: Asked | Fingerprint,
        *,
        now: float,
        embed: Embed | None = None,
        judge: Judge | None = None,
        vector: bytes = b"",
    ) -> Lookup:
        """Find what may answer the request: exactly, in memory, at a neighbour and in the store, then by meaning.

        O(1) for an exact hit; a semantic lookup adds one embedding, one search of O(log n) and up to a few reads of the store.

        Args:
            arm: The arm; needs knobs.
            request: The request, or its identity where it asks for nothing particular.
            now: The clock, seconds, of the same kind as the entries' ``written_at``.
            embed: Gives a text's embedding as int8 bytes; None: no semantic lookup. What it raises passes through.
            judge: Checks neighbours that are similar enough; None: similarity alone decides.
            vector: The embedding, where it is known already.

        Raises:
            KeyError: If the arm has no knobs.
        """
        asked = request if isinstance(request, Asked) else Asked(request)
        quick = self.lookup_now(arm, asked, now=now)
        if quick is not None:
            return quick
        knobs, fp = self.knobs(arm), asked.fp
        if asked.directives.no_store or asked.directives.no_cache or asked.refresh:
            return answer_of(decide(asked, None, (), knobs=knobs, rules=self.rules, now=now), "", vector=vector)
        exact = self._remembered(arm, fp.key)  # there, but expired, or nothing is heard of what was removed
        if exact is None and self.neighbours is not None and not self.upkeep.deaf:
            found = await self._ask_neighbour(self.neighbours, arm, asked, now)
            if found is not None:
                return found
        reachable, known = True, None
        if self.store is not None:
            try:
                stored, known = await self._stored(self.store, arm, fp.key)
            except TierUnavailable:
                stored, reachable = None, False
            if stored is not None or (self.upkeep.deaf and reachable):
                exact = stored
        decision = decide(asked, exact, (), knobs=knobs, rules=self.rules, now=now)
        if decision.entry is not None:
            self._promote(arm, decision.entry, known)
            if not reachable:
                self.memory.touch_soon(arm, fp.key)
            if decision.outcome == "hit":
                self._renew(arm, decision.entry, now)
            return answer_of(decision, self.store.name if self.store is not None and reachable else self.memory.name)
        if self.vectors is None or not fp.text or not asked.directives.by_meaning:
            return answer_of(decision, "", exact=exact, vector=vector)

        if not vector and exact is not None and len(exact.vector) == self.vectors.dim:
            vector = exact.vector
        if not vector and embed is not None:
            vector = await embed(fp.text)
        if not vector:
            return answer_of(decision, "", exact=exact)
        numbers: dict[bytes, int | None] = {}
        try:
            candidates = await self._candidates(
                arm, asked, vector, knobs=knobs, now=now, reachable=reachable, judge=judge, numbers=numbers
            )
        except TierUnavailable:
            return answer_of(decision, "", exact=exact, vector=vector, search_failed=True)
        decision = decide(asked, exact, candidates, knobs=knobs, rules=self.rules, now=now)
        if decision.entry is not None:
            self._touched(arm, decision.entry, now)
            if decision.entry.key in numbers:
                self._promote(arm, decision.entry, numbers[decision.entry.key])
            return answer_of(decision, VECTOR, exact=exact, vector=vector)
        return answer_of(decision, "", exact=exact, vector=vector, candidates=candidates)

    async def find(self, arm: str, key: bytes) -> tuple[Entry, tuple[str, ...]] | None:
        """Return the entry as it is, expired or interrupted as it may be, and the names of the tiers that hold it.

        It does not become recently used. None where there is none, or the store is away and memory has none.
        """
        held = self._remembered(arm, key)
        tiers = [self.memory.name] if held is not None else []
        if self.store is not None:
            with suppress(TierUnavailable):
                stored = await self.store.get(arm, key, touch=False)
                if stored is not None:
                    held = stored
                    tiers.append(self.store.name)
        return (held, tuple(tiers)) if held is not None else None

    async def heads(self, arm: str) -> AsyncIterator[list[Entry]]:
        """Yield the heads of all entries of the arm (:meth:`serving.tiers.base.Entry.head`), in steps.

        Raises:
            TierUnavailable: If the store cannot be asked.
        """
        async for step in self.memory.scan(arm) if self.store is None else self.store.scan(arm):
            yield step

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

        known = await self.memory.heads(arm, keys)
        result = [live(head) and self._usable(arm, key) for key, head in zip(keys, known, strict=True)]
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

    def last_removal(self, arm: str) -> int | None:
        """Return what :meth:`put` is to be told of an answer that is asked for from now on; None where there is no store."""
        return self._coherence.last(arm) if self._coherence is not None else None

    async def put(self, arm: str, entry: Entry, *, now: float, since: int | None = None) -> int:
        """Store an answer as the arm's most recently used.

        An entry that is larger than the arm's budget, or already past its TTL, is not stored. With the store away it stays in the
        memory tier.

        Args:
            arm: The arm.
            entry: The answer.
            now: The clock, seconds.
            since: What :meth:`last_removal` said before the answer was asked for: it is not stored if a flush came since that
                covers it, whoever has heard of it. None: it is stored in any case.

        Returns:
            How many entries the store evicted for it (the memory tier, if there is no store).

        Raises:
            KeyError: If the arm has no knobs.
        """
        knobs = self.knobs(arm)
        if entry.complete and not is_live(entry, now=now, knobs=knobs, rules=self.rules):
            return 0
        if self._writing is None:
            evicted = self.memory.put_now(arm, entry)
        else:
            try:
                evicted = await self._writing.put(
                    arm, entry, since, self.neighbours.offer if self.neighbours is not None else None
                )
            except Outdated as error:
                _log.debug("%s", error)
                return 0
        fits = entry.complete and entry.size <= knobs.cache_size
        self._index(arm, entry.key, entry.context, entry.vector if fits else b"", EntryMeta.load(entry.meta) if fits else None)
        return evicted

    async def delete_many(self, arm: str, keys: Sequence[bytes]) -> int:
        """Remove entries and their vectors; how many there were.

        Raises:
            TierUnavailable: If the store cannot be asked; then they are gone from memory alone.
        """
        held = sum(self.memory.delete_now(arm, key) for key in keys)
        self._forget_vectors(arm, keys)
        if self.store is None:
            return held
        count = await self.store.delete_many(arm, keys)
        self._forget(arm, keys)  # what was read from the store before came meanwhile
        return count

    async def outdate(self, arm: str, where: Mapping[str, str]) -> None:
        """Begin to remove entries by what they are: no answer that is under way at any replica is kept if it is one of them.

        Args:
            arm: The arm.
            where: What they are (:func:`serving.tiers.labels.labels_where`).

        Raises:
            TierUnavailable: If the store cannot be asked.
        """
        self.told.outdated(arm)
        if self._shared is not None and self._coherence is not None:
            self._coherence.outdated(arm)
            await self._shared.outdate(arm, where)
            self._coherence.flushed(arm)
            self.told.outdated(arm)  # who asked meanwhile may follow what was under way elsewhere

    async def withdraw(self, arm: str, key: bytes) -> bool:
        """Remove an entry that should not have been given, and keep no answer to it that is under way; whether it was there.

        Raises:
            TierUnavailable: If the store cannot be asked; then it may be gone from memory alone.
        """
        self.told.withdrawn(arm, key)
        if self._shared is not None and self._coherence is not None:
            await self._shared.outdate(arm, {"key": key.hex()}, told=False)
            self._coherence.flushed(arm)
        return await self.delete_many(arm, [key]) > 0

    async def flush(self, arm: str) -> int:
        """Remove every entry of the arm; how many there were.

        Raises:
            TierUnavailable: If the store cannot be asked; then they are gone from memory alone, and what the store has is not.
        """
        self.told.outdated(arm)
        count = self.memory.flush_now(arm)
        if self.vectors is not None:
            self.vectors.flush(arm)
        if self.store is not None:
            count = await self.store.flush(arm)
            if self._coherence is not None:
                self._coherence.flushed(arm)
            self.memory.flush_now(arm)  # what was read from the store before came meanwhile
            self.told.outdated(arm)  # who asked meanwhile may follow what was under way elsewhere
        return count

    async def following(self) -> None:
        """Wait until what other replicas do to the store is heard of, and what was missed is known; at once without a store."""
        await self.upkeep.following()

    async def until_all_listen(self) -> None:
        """After a flush: wait until no replica can be that has not heard of it, though it could not listen, as after a restart of
        the store.
        """
        if self._shared is not None:
            await self._shared.until_all_listen()

    async def stats(self, arm: str) -> dict[str, TierStats]:
        """Return what the arm holds, by tier name; the store is missing while it is away."""
        result = {self.memory.name: self.memory.stats_now(arm)}
        if self.store is not None:
            with suppress(TierUnavailable):
                result[self.store.name] = await self.store.stats(arm)
        return result

    async def close(self) -> None:
        """Stop the background work and close the tiers."""
        await self.upkeep.stop()
        await asyncio.gather(*self._renewing, return_exceptions=True)
        if self._adoption is not None:
            await self._adoption.close()
        if self.store is not None:
            await self.store.close()
        await self.memory.close()
        if self.vectors is not None:
            await self.vectors.close()

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _drop_copies(self, arm: str) -> None:
        """Empty memory of an arm's copies of a store that is no longer there to say what it removed, if that is what it has."""
        if self.memory.mark_now(arm):
            self.memory.flush_now(arm)
            self.memory.update_mark_now(arm, lambda _: 0)

    def _usable(self, arm: str, key: bytes) -> bool:
        return self._coherence is None or self._coherence.usable(arm, key)

    def _remembered(self, arm: str, key: bytes) -> Entry | None:
        return self.memory.get_now(arm, key, touch=False) if self._usable(arm, key) else None

    async def _ask_neighbour(self, neighbours: NeighbourCache, arm: str, asked: Asked, now: float) -> Lookup | None:
        """A hit in another node's memory, if there is one and it has missed no removal of which this node knows."""
        position = self._coherence.position(arm) if self._coherence is not None else None
        if position is None:
            return None
        entry = await neighbours.get(arm, asked.fp.key, least=position)
        if entry is None or self._adoption is None or self._coherence is None or self._coherence.position(arm) is None:
            return None
        decision = decide(asked, entry, (), knobs=self.knobs(arm), rules=self.rules, now=now)
        if decision.outcome != "hit":
            return None
        self._adoption.propose(arm, entry)
        self._touched(arm, entry, now)
        return answer_of(decision, neighbours.name)

    async def _stored(self, store: Tier, arm: str, key: bytes, *, touch: bool = True) -> tuple[Entry | None, int | None]:
        """The store's entry, and the number of its last removal where it has numbers."""
        if self._shared is None or self._coherence is None:
            return await store.get(arm, key, touch=touch), None
        before = self._coherence.last(arm)
        entry, known = await self._shared.get_numbered(arm, key, touch=touch)
        self._coherence.learned(arm, known)
        if self.upkeep.deaf and known != before:
            self._coherence.begin(arm)
            self.told.unsure(arm)
        return entry, known

    def _touched(self, arm: str, entry: Entry, now: float) -> None:
        self.memory.touch_soon(arm, entry.key)
        if self.store is not None:
            self.store.touch_soon(arm, entry.key)
        if self.rules.hit_extends_ttl:
            self._renew(arm, entry, now)

    def _renew(self, arm: str, entry: Entry, now: float) -> None:
        """Begin the entry's life anew where hits do that; in the store soon, without waiting."""
        if not self.rules.hit_extends_ttl:
            return
        self.memory.renew_now(arm, entry.key, now)
        if self.store is not None and now - entry.written_at - entry.renewed >= RENEW_SECONDS:
            task = asyncio.get_running_loop().create_task(self._renew_stored(self.store, arm, entry.key, now))
            self._renewing.add(task)
            task.add_done_callback(self._renewing.discard)

    async def _renew_stored(self, store: Tier, arm: str, key: bytes, now: float) -> None:
        with suppress(TierUnavailable):
            await store.renew(arm, key, now)

    def _promote(self, arm: str, entry: Entry, known: int | None) -> None:
        """Put an entry of the store into memory; ``known``: its last removal when it had it, None where it was not asked."""
        if self._writing is None or known is None:
            return
        self._writing.remember(arm, entry, known)
        if entry.vector and self.vectors is not None and not self.vectors.shared and not self.vectors.has(arm, entry.key):
            self._index(arm, entry.key, entry.context, entry.vector, EntryMeta.load(entry.meta))

    def _index(self, arm: str, key: bytes, context: bytes, vector: bytes, meta: EntryMeta | None = None) -> None:
        if self.vectors is not None:
            self.vectors.replace(arm, key, context, vector, meta)

    def _forget(self, arm: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.memory.delete_now(arm, key)
        self._forget_vectors(arm, keys)

    def _forget_vectors(self, arm: str, keys: Sequence[bytes]) -> None:
        if self.vectors is not None:
            self.vectors.remove(arm, keys)

    async def _candidates(
        self,
        arm: str,
        asked: Asked,
        vector: bytes,
        *,
        knobs: Knobs,
        now: float,
        reachable: bool,
        judge: Judge | None,
        numbers: dict[bytes, int | None],
    ) -> list[Candidate]:
        """Neighbours; those worth it with their entries and what speaks against them, up to the first that may answer.

        ``numbers`` gets the keys of those that the store gave, with the number of its last removal.
        """
        assert self.vectors is not None
        threshold = max(self.rules.semantic_threshold, asked.directives.threshold or 0.0)
        found = await self.vectors.near(arm, asked.fp.context, vector, floor=threshold)
        own = [each for each in found if each.context == asked.fp.context] if self._confidential else found
        near = [Candidate(each.key, each.context, each.similarity) for each in own]
        known: dict[bytes, Candidate] = {}
        for candidate in worth_fetching(asked, near, self.rules):
            entry = self._remembered(arm, candidate.key)
            live = entry is not None and is_live(entry, now=now, knobs=knobs, rules=self.rules)
            if self.store is not None and reachable and (not live or self.upkeep.deaf):
                try:
                    entry, numbers[candidate.key] = await self._stored(self.store, arm, candidate.key, touch=False)
                    live = entry is not None and is_live(entry, now=now, knobs=knobs, rules=self.rules)
                except TierUnavailable:
                    reachable = False
            if not live and not reachable:
                continue
            objection = judge(entry, candidate.similarity) if live and entry is not None and judge is not None else ""
            if entry is not None:
                known[candidate.key] = replace(candidate, entry=entry, objection=objection)
            if not live:
                self.vectors.remove(arm, (candidate.key,))  # gone or expired: it need not be met again
            elif not objection:
                break
        return [known.get(candidate.key, candidate) for candidate in near]
