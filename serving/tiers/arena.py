"""The memory tier over a shared arena: what :class:`serving.tiers.memory.MemoryTier` does, for all replicas of a node at once."""

from __future__ import annotations

import hashlib
import logging
import secrets
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from serving.arena.election import PATIENCE, Lease
from serving.arena.eviction import arm_word
from serving.arena.layout import (
    A_BUDGET,
    A_BYTES,
    A_ENTRIES,
    A_NAME,
    A_REMOVALS,
    A_USED_BY,
    ARM_WORDS,
    ARMS,
    CORRUPT,
    H_DIRTY,
    H_REPAIRS,
    H_RESERVED,
    H_STORE,
    KEY_WORDS,
    LARGEST_UNITS,
    P_EVICTED,
    P_FOUND,
    P_KEY,
    P_KEYS,
    P_LIMIT,
    P_OLD,
    P_PAYLOAD,
    ArenaError,
    Words,
    name_words,
    record_units,
    scratch,
)
from serving.arena.mapping import Mapping
from serving.arena.reader import LARGER, collect, find, mark_used
from serving.arena.repair import rebuild
from serving.arena.space import GROW
from serving.arena.writer import MORE, STORED, delete, flush, put, renew, revoke, trim
from serving.crypto import Sealer
from serving.tiers.base import KEY_BYTES, Entry, Form, OnEvict, TierStats, TierUnavailable
from serving.tiers.codec import HEADER, VERSION, Seal, overhead, pack, unpack
from serving.tiers.local import LocalTier

FIRST_PAYLOAD = 1 << 16
"""Bytes of payload for which there is room before a larger one was met."""

RESERVE_AGAIN = 5.0
"""Seconds after which memory that was not to be had is asked for again."""

FIRM = 1.0
"""Seconds that what must not be lost (budgets, new arms) waits for another writer."""

STUCK_AGAIN = 0.002
"""Seconds that such a write waits for a writer who was waited for in vain before."""

LARGEST_MARK = 2**62
"""Of either sign; no store numbers that many removals."""

MOST_REVOKED = 1 << 14
"""Keys that are remembered until they can be removed under the lease; of more the whole arm goes."""

_FLOATS = struct.Struct("<ff")
_WRITTEN_AT = struct.Struct("<d")
_log = logging.getLogger(__name__)


class ArenaBusy(ArenaError, TierUnavailable):
    """Another writer did not let go in time; to be tried again."""


class ArenaTier(LocalTier):
    """A byte-bounded cache in memory that all processes of a node share, each with a client like this one.

    It has the protocol of a tier, and the ``*_now`` methods of the memory tier. Reads take no lock. Writes wait for each other,
    at most :data:`serving.arena.election.PATIENCE`, and are not done after that, which costs a miss. Deletions and flushes are
    done whatever other writers do. Who is evicted is decided by CLOCK: an entry that was used is spared once. Evictions are told
    to the client whose call made them, and count in its statistics. Not thread-safe, and to be opened anew after a fork.

    Args:
        path: The arena's file.
        size: Bytes of the file, which bounds all arms together with what records and index need besides.
        entry_bytes: What entries are expected to have on average.
        firm: Seconds that what must not be lost (budgets, new arms) waits for another writer.
        namespace: The cache's, to which sealed entries are bound.
        sealer: Encrypts answers and metadata before they leave the process; None: they are in the clear in the file, which is
            this user's alone. What is in it by another key, or by none, is a miss.
        clock: For memory that was not to be had.

    Attributes:
        dropped: Writes that were not done since another writer held the lease.
        repairs: How often this client has repaired the arena.

    Raises:
        ArenaError: If the arena cannot be opened.
    """

    name = "memory"
    shared = True

    def __init__(
        self,
        path: str | Path,
        size: int,
        *,
        entry_bytes: int = 1024,
        firm: float = FIRM,
        namespace: str = "default",
        sealer: Sealer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_evict: OnEvict | None = None
        self.dropped = 0
        self.repairs = 0
        self.mapping = Mapping(path, size, entry_bytes=entry_bytes)
        self._words = self.mapping.words
        self.lease = Lease(self.mapping.descriptor, self._words, secrets.randbits(62) | 1)
        self._arms: dict[str, int] = {}
        self._evictions: dict[str, int] = {}
        self._firm = firm
        self._namespace, self._sealer = namespace, sealer
        self._stuck = False
        self._revoked: dict[str, set[bytes] | None] = {}  # removals that are done again under the lease; None: of all
        self._clock = clock
        self._again = 0.0
        self._gone: list[tuple[int, bytes]] = []
        self._private: Words
        self._make_scratch(FIRST_PAYLOAD)

    # -- what the memory tier has --------------------------------------------------------------------------------------------

    def get_now(self, arm: str, key: bytes, *, touch: bool = True) -> Entry | None:
        """:meth:`get` without awaiting."""
        number = self._arms.get(arm, -1)
        if number < 0:
            number = self._find_arm(arm)
            if number < 0:
                return None
        self._key[:] = key
        length = find(self._words, self._private, number, touch)
        if length < 0:
            if length >= LARGER:
                return None
            self._make_scratch(8 * (LARGER - length))
            return self.get_now(arm, key, touch=touch)
        if self._sealer is not None:
            return unpack(key, self._payload[:length].tobytes(), self._seal(arm))
        return _entry(key, self._payload, length)

    def put_now(self, arm: str, entry: Entry, *, known: int | None = None) -> int:
        """:meth:`put` without awaiting; 0 also where it was not done."""
        stored = pack(entry, self._seal(arm))
        length = len(stored)
        if record_units(length) > LARGEST_UNITS or length > self.mapping.geometry.bytes:
            self.delete_now(arm, entry.key)
            return 0
        if length > len(self._payload):
            self._make_scratch(length)
        if not self._lease():
            return 0
        try:
            number = self._arm(arm)
            if known is not None and abs(int(self._words[arm_word(number) + A_REMOVALS])) > known:
                return 0
            self._key[:] = entry.key
            self._payload[:length] = stored
            evicted = self._put(number, length)
        finally:
            self.lease.release()
        self._tell()
        return self._count(arm, evicted)

    def delete_now(self, arm: str, key: bytes) -> bool:
        """:meth:`delete` without awaiting."""
        number = self._find_arm(arm)
        if number < 0:
            return False
        self._key[:] = key
        if not self._lease(count=False):
            return revoke(self._words, self._private, number, False) > 0
        try:
            return self._delete(number)
        finally:
            self.lease.release()

    def renew_now(self, arm: str, key: bytes, at: float) -> bool:
        """:meth:`renew` without awaiting."""
        entry = self.get_now(arm, key, touch=False)
        if entry is None:
            return False
        if at - entry.written_at <= entry.renewed:
            return True
        if not self._lease():
            return True
        try:
            # Another writer may have replaced it since.
            entry = self.get_now(arm, key, touch=False)
            if entry is None:
                return False
            word = int.from_bytes(_FLOATS.pack(entry.ttl, at - entry.written_at), "little", signed=True)
            return bool(renew(self._words, self._private, self._arms[arm], word))
        finally:
            self.lease.release()

    def resize_now(self, arm: str, budget: int) -> int:
        """:meth:`resize` without awaiting.

        Raises:
            ValueError: If the budget is negative.
            ArenaBusy: If another writer did not let go.
            ArenaError: If there is no room for a new arm.
        """
        if budget < 0:
            raise ValueError(f"arena, arm {arm!r}: expected a budget >= 0 bytes, got {budget!r}")
        self._lease_firmly()
        try:
            number = self._arm(arm)
            self._words[arm_word(number) + A_BUDGET] = min(budget, 2**62)
            evicted = self._trim(number)
        finally:
            self.lease.release()
        self._tell()
        return self._count(arm, evicted)

    def flush_now(self, arm: str) -> int:
        """:meth:`flush` without awaiting."""
        number = self._find_arm(arm)
        if number < 0:
            return 0
        if not self._lease(count=False):
            return revoke(self._words, self._private, number, True)
        try:
            return self._flush(number)
        finally:
            self.lease.release()

    def begin_now(self, store: str, arms: Sequence[str]) -> None:
        """Say of which store the entries are copies, and make the arms that nobody has made yet, without a budget.

        Arms of before that are not among them are removed with all that they hold, unless others use the arena.

        Args:
            store: Names the store, and who shares it; ``""``: there is none.
            arms: The arms.

        Raises:
            ArenaBusy: If another writer did not let go.
            ArenaError: If there is no room for that many, or others use the arena with another store: its removals are numbered
                by itself, so that those of the one would hide those of the other.
        """
        name = int.from_bytes(hashlib.blake2b(store.encode(), digest_size=8).digest(), "little", signed=True)
        self._check_store(name)
        self._lease_firmly()
        try:
            self._check_store(name)
            self._words[H_STORE] = name
            if not self.mapping.others():
                self._remove_others(arms)
            for arm in arms:
                self._arm(arm)
        finally:
            self.lease.release()

    def _check_store(self, name: int) -> None:
        if self._words[H_STORE] not in (0, name) and self.mapping.others():
            raise ArenaError(
                f"arena {self.mapping.path}: others use it with another Redis, or with another namespace; "
                "set another namespace or another memory.path here, and start again"
            )

    def _remove_others(self, arms: Sequence[str]) -> None:
        """Remove arms that are not among these; under the lease, and with no other user, who would know their numbers."""
        kept = {name_words(arm) for arm in arms}
        for number in range(ARMS):
            place = arm_word(number)
            if self._words[place + A_USED_BY] and tuple(self._words[place + A_NAME : place + A_NAME + 2].tolist()) not in kept:
                self._words[place + A_BUDGET] = 0
                self._trim(number)
                self._words[place : place + ARM_WORDS] = 0
        self._arms.clear()

    def mark_now(self, arm: str) -> int:
        """Return the arm's mark."""
        number = self._find_arm(arm)
        return int(self._words[arm_word(number) + A_REMOVALS]) if number >= 0 else 0

    def update_mark_now(self, arm: str, change: Callable[[int], int]) -> None:
        """Set the arm's mark to what ``change`` makes of it, with nobody else in between.

        Raises:
            ArenaBusy: If another writer did not let go.
            ArenaError: If there is no room for a new arm.
        """
        self._lease_firmly()
        try:
            place = arm_word(self._arm(arm)) + A_REMOVALS
            mark = change(int(self._words[place]))
            self._words[place] = min(max(mark, -LARGEST_MARK), LARGEST_MARK)  # one that was damaged may have no opposite
        finally:
            self.lease.release()

    def remove_now(self, arm: str, keys: Sequence[bytes] | None, *, removal: int = 0, unless: float | None = None) -> None:
        """Put one of the store's removals into effect."""
        number = self._find_arm(arm)
        if number < 0 or (0 < removal <= abs(self.mark_now(arm)) and arm not in self._revoked):
            return
        if not self._lease(count=False):
            for key in keys or (bytes(KEY_BYTES),):
                self._key[:] = key
                revoke(self._words, self._private, number, keys is None)
            self._revoked_now(arm, keys)
            return  # the mark comes with the next removal
        try:
            place = arm_word(number) + A_REMOVALS
            mark = int(self._words[place])
            # Who wrote meanwhile may have put a copy of what was only revoked, and goes by the mark from now on.
            revoked = self._revoked.pop(arm, set())
            if revoked is None:
                self._flush(number)
            for key in revoked or ():
                self._key[:] = key
                self._delete(number)
            if 0 < removal <= abs(mark):
                return
            if keys is None:
                self._flush(number)
            for key in keys or ():
                found = self.get_now(arm, key, touch=False)
                if found is not None and found.written_at != unless:
                    self._delete(number)
            if removal:
                self._words[place] = -removal if mark < 0 else removal
        finally:
            self.lease.release()

    def _revoked_now(self, arm: str, keys: Sequence[bytes] | None) -> None:
        revoked = self._revoked.setdefault(arm, set())
        if keys is None or (revoked is not None and len(revoked) + len(keys) > MOST_REVOKED):
            self._revoked[arm] = None
        elif revoked is not None:
            revoked.update(keys)

    def stats_now(self, arm: str) -> TierStats:
        """:meth:`stats` without awaiting."""
        number = self._find_arm(arm)
        if number < 0:
            return TierStats(0, 0, 0, 0)
        if self._words[H_DIRTY] and self._lease(count=False):  # repaired on the way
            self.lease.release()
        place = arm_word(number)
        entries, used, budget = (int(self._words[place + word]) for word in (A_ENTRIES, A_BYTES, A_BUDGET))
        return TierStats(entries, used, budget, self._evictions.get(arm, 0))

    def touch_soon(self, arm: str, key: bytes) -> None:
        """Note that the entry was used, if it is there: here at once."""
        number = self._find_arm(arm)
        if number >= 0:
            self._key[:] = key
            mark_used(self._words, self._private, number)

    # -- the protocol of tiers -----------------------------------------------------------------------------------------------

    async def scan(self, arm: str) -> AsyncIterator[list[Entry]]:
        """Yield the heads of all entries; those that were there all the time are among them."""
        number, bucket = self._find_arm(arm), 0
        while number >= 0 and bucket < self.mapping.geometry.buckets:
            bucket = collect(self._words, self._private, number, bucket)
            keys = [key for _, key in self._keys(int(self._private[P_FOUND]))]
            heads = [head for head in await self.heads(arm, keys) if head is not None]
            if heads:
                yield heads

    def charged(self, entry: Entry) -> Entry:
        """Return the entry with the overhead that it has here: it is charged more where it is sealed."""
        return replace(entry, overhead=overhead(entry, self._seal(""))) if self._sealer is not None else entry

    async def close(self) -> None:
        """Let go of the arena; what is in it stays for others, and for the next start."""
        self.close_now()

    def close_now(self) -> None:
        """:meth:`close` without awaiting."""
        if len(self._words):
            self._words = self._words[:0].copy()
            self.lease.close()
            self._private = self._private[:0]
            self.mapping.close()

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _seal(self, arm: str) -> Seal | None:
        return Seal.of(self._sealer, self._namespace, arm)

    def _put(self, number: int, length: int) -> int:
        evicted, old, repaired = 0, -1, False
        try:
            while True:
                done = put(self._words, self._private, number, length, old)
                evicted += self._note(int(self._private[P_EVICTED]))
                old = int(self._private[P_OLD])
                if done == GROW:
                    if self._clock() < self._again or not self.mapping.reserve():
                        if self._clock() >= self._again:
                            _log.warning("arena %s: no memory for more of it; it stays as large as it is", self.mapping.path)
                            self._again = self._clock() + RESERVE_AGAIN
                        self._private[P_LIMIT] = self._words[H_RESERVED]
                elif done == CORRUPT:
                    self._repair()
                    if repaired:
                        return evicted
                    repaired, old = True, -1
                elif done != MORE:
                    self._private[P_LIMIT] = self.mapping.geometry.units
                    if done != STORED:
                        _log.debug("arena %s: no room for an entry of %d bytes", self.mapping.path, length)
                    return evicted
        except BaseException:
            self._words[H_DIRTY] = 1  # given up between two steps: the next writer repairs
            raise

    def _delete(self, number: int) -> bool:
        done = delete(self._words, self._private, number)
        if done == CORRUPT:
            self._repair()
            done = delete(self._words, self._private, number)
        return done == 1

    def _flush(self, number: int) -> int:
        count = int(self._words[arm_word(number) + A_ENTRIES])
        if flush(self._words, self._private, number) == CORRUPT:
            revoke(self._words, self._private, number, True)
            self._repair()
        return count

    def _count(self, arm: str, evicted: int) -> int:
        if evicted:
            self._evictions[arm] = self._evictions.get(arm, 0) + evicted
        return evicted

    def _trim(self, number: int) -> int:
        evicted = repaired = 0
        try:
            while True:
                done = trim(self._words, self._private, number)
                evicted += self._note(int(self._private[P_EVICTED]))
                if done == CORRUPT and repaired < 3:
                    self._repair()
                    repaired += 1
                elif done != MORE:
                    return evicted
        except BaseException:
            self._words[H_DIRTY] = 1
            raise

    def _note(self, count: int) -> int:
        """Remember the keys that the last call evicted, until the lease is given back."""
        if count and self.on_evict is not None:
            self._gone += self._keys(count)
        return count

    def _tell(self) -> None:
        if not self._gone:
            return
        gone, self._gone = self._gone, []
        names = {number: name for name, number in self._arms.items()}
        by_arm: dict[str, list[bytes]] = {}
        for number, key in gone:
            if number in names:  # of an arm that this client does not know, nobody here has to hear
                by_arm.setdefault(names[number], []).append(key)
        if self.on_evict is not None:
            for name, keys in by_arm.items():
                self.on_evict(name, keys)

    def _keys(self, count: int) -> list[tuple[int, bytes]]:
        reported = self._private[P_KEYS : P_KEYS + KEY_WORDS * count].reshape(-1, KEY_WORDS)
        return [(int(row[4]), row[:4].tobytes()) for row in reported]

    def _lease(self, patience: float | None = None, *, count: bool = True) -> bool:
        if (
            patience is None
        ):  # one who is stopped while it writes may stay so for long: that is waited for once, not by each write
            patience = 0.0 if self._stuck else PATIENCE
        got = self.lease.acquire(patience)
        self._stuck = got is False
        if got is None:
            try:
                self._repair()
            except BaseException:
                self._words[H_DIRTY] = 1
                self.lease.release()
                raise
        elif not got and count:
            self.dropped += 1
        return got is not False

    def _lease_firmly(self) -> None:
        # One who is stuck is waited for once, not by each arm's budget: there may be many, and the event loop waits with them.
        if not self._lease(min(self._firm, STUCK_AGAIN) if self._stuck else self._firm):
            raise ArenaBusy(
                f"arena {self.mapping.path}: another process has been writing for {self._firm:g} s; is one of its users stopped?"
            )

    def _repair(self) -> None:
        self.mapping.bring_in()
        count = rebuild(self._words, self._private)
        for number in range(ARMS):  # it may have died while it made an arm smaller
            while trim(self._words, self._private, number) == MORE:
                pass
        self._words[H_REPAIRS] += 1
        self.repairs += 1
        _log.warning("arena %s: a writer did not finish; repaired, %d entries are left", self.mapping.path, count)

    def _find_arm(self, arm: str) -> int:
        """Return the arm's number; -1 where nobody has made it."""
        number = self._arms.get(arm, -1)
        if number >= 0:
            return number
        name = name_words(arm)
        for number in range(ARMS):
            place = arm_word(number)
            if self._words[place + A_USED_BY] == 1 and tuple(self._words[place + A_NAME : place + A_NAME + 2].tolist()) == name:
                self._arms[arm] = number
                return number
        return -1

    def _arm(self, arm: str) -> int:
        """Return the arm's number; it is made where there is none. Under the lease."""
        number = self._find_arm(arm)
        if number >= 0:
            return number
        for number in range(ARMS):
            place = arm_word(number)
            if self._words[place + A_USED_BY] == 0:
                self._words[place + A_NAME : place + A_NAME + 2] = name_words(arm)
                self._words[place + A_USED_BY] = 1
                self._arms[arm] = number
                return number
        raise ArenaError(
            f"arena {self.mapping.path}: expected at most {ARMS} arms, {arm!r} is one more; stop the gateways and remove the file"
        )

    def _make_scratch(self, payload: int) -> None:
        self._private = scratch(self.mapping.geometry, max(payload, FIRST_PAYLOAD))
        view = self._private.data.cast("B")
        self._key = view[P_KEY * 8 : P_KEY * 8 + KEY_BYTES]
        self._payload = view[P_PAYLOAD * 8 :]


class _Made:
    """An entry in the making: one that may be changed is filled in a fraction of the time that a frozen one takes."""

    __slots__ = Entry.__slots__

    def __init__(
        self,
        key: bytes,
        body: bytes,
        written_at: float,
        input_tokens: int,
        output_tokens: int,
        context: bytes,
        vector: bytes,
        meta: bytes,
        form: Form,
        ttl: float,
        renewed: float,
    ) -> None:
        self.key = key
        self.body = body
        self.written_at = written_at
        self.input_tokens = input_tokens
        self.output_tokens = output_tokens
        self.context = context
        self.vector = vector
        self.meta = meta
        self.form = form
        self.complete = True
        self.ttl = ttl
        self.renewed = renewed
        self.overhead = 0


def _entry(key: bytes, payload: memoryview, length: int) -> Entry | None:
    """:func:`serving.tiers.codec.unpack` without copying twice, for what most entries are: it takes most of the time of a hit."""
    version, context, vector, asked, answered, written_at, meta, flags, ttl, renewed = HEADER.unpack_from(payload)
    vector_at = HEADER.size + context
    meta_at = vector_at + vector
    body_at = meta_at + meta
    if version != VERSION or flags > 1 or body_at > length:
        return unpack(key, payload[:length].tobytes())
    made = _Made(
        key,
        payload[body_at:length].tobytes(),
        written_at,
        asked,
        answered,
        payload[HEADER.size : vector_at].tobytes() if context else b"",
        payload[vector_at:meta_at].tobytes() if vector else b"",
        payload[meta_at:body_at].tobytes() if meta else b"",
        "sse" if flags else "json",
        ttl,
        renewed,
    )
    made.__class__ = Entry  # type: ignore[assignment]
    return made  # type: ignore[return-value]
