"""Looking an entry up in a peer's arena by one-sided reads; the peer's processor need not know.

One READ brings the bucket, with a small record in it; a second one the record itself, where it is larger. What came is believed
for what it says of itself only: key, arm, length, and a checksum that is seeded with the arena's epoch, as in
:mod:`serving.arena.reader`. Whatever else comes is looked for again a few times, and then a miss.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable

import numpy as np

from serving.arena.layout import (
    A_NAME,
    A_REMOVALS,
    A_USED_BY,
    ARM_WORDS,
    ARMS,
    BUCKET_UNITS,
    HEADER_WORDS,
    MISS,
    P_KEY,
    P_PAYLOAD,
    P_RECORD,
    R_LINKS,
    R_PAYLOAD,
    R_SUM,
    SLOTS,
    TORN,
    UNIT,
    Words,
    checksum,
    digest,
    digest_tag,
    home_bucket,
    name_words,
    other_bucket,
    record_length,
    same_record,
    scratch,
    slot_at,
    slot_tag,
    slot_units,
)
from serving.arena.reader import inside_file, overflowed
from serving.neighbours.link import LARGEST_READ, Link, LinkLost
from serving.tiers.base import KEY_BYTES, Entry
from serving.tiers.codec import unpack

ATTEMPTS = 4
"""How often an entry that changes while it is read is looked for."""

ARMS_AGAIN = 1.0
"""Seconds between two reads of the peer's table of arms."""

_BUCKET_BYTES = BUCKET_UNITS * UNIT
_STATE_AND_SLOTS = struct.Struct(f"<{1 + SLOTS}q")
_WORD = struct.Struct("<q")


class RemoteArena:
    """A peer's arena, read over a link. For one event loop; lookups may run concurrently.

    Args:
        link: To the peer.
        clock: A monotonic clock, seconds.

    Attributes:
        link: As given.
        torn: Lookups in which an entry was not whole at first; whoever counts them may set it back.
        behind: Lookups that were given up since removals had not taken effect there; likewise.
    """

    def __init__(self, link: Link, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.link = link
        self.torn = self.behind = 0
        self._geometry = link.hello.geometry
        self._clock = clock
        self._arms: dict[tuple[int, int], int] = {}
        self._arms_again = 0.0
        self._marks: dict[int, int] = {}
        self._private: Words
        self._make_scratch(1 << 14)

    async def open(self) -> None:
        """Read which arms the peer has, and so make sure that it can be read at all.

        Raises:
            LinkLost: If it cannot.
        """
        self._arms_again = self._clock() + ARMS_AGAIN
        data = await self.link.read(8 * HEADER_WORDS, 8 * ARMS * ARM_WORDS)
        if len(data) != 8 * ARMS * ARM_WORDS:
            raise LinkLost(f"expected {8 * ARMS * ARM_WORDS} bytes of arms, got {len(data)}")
        for number, row in enumerate(np.frombuffer(data, np.int64).reshape(ARMS, ARM_WORDS)):
            if row[A_USED_BY] == 1:
                self._arms[int(row[A_NAME]), int(row[A_NAME + 1])] = number
                self._note_mark(number, int(row[A_REMOVALS]))

    async def find(self, arm: str, key: bytes, least: int = 0) -> bytes | None:
        """Return the stored form of the entry (:mod:`serving.tiers.codec`), or None: a miss.

        Args:
            arm: Name of the arm.
            key: Of the entry, 32 bytes.
            least: Number of one of the store's removals (:meth:`serving.tiers.local.LocalTier.mark_now`): a miss unless all up to
                that took effect in the peer's arena before it is looked into. Costs one more read where that is not known yet.

        Raises:
            LinkLost: If the peer does not answer.
        """
        name = name_words(arm)
        number = self._arms.get(name, -1)
        if number < 0:
            if self._clock() < self._arms_again:
                return None
            await self.open()
            number = self._arms.get(name, -1)
            if number < 0:
                return None
        if least > self._marks.get(number, 0) and not await self._has_heard(number, least):
            self.behind += 1
            return None
        value = digest(_WORD.unpack_from(key)[0], number)
        for attempt in range(ATTEMPTS):
            found = await self._look(value, number, key)
            if isinstance(found, bytes):
                return found
            if found == MISS:
                return None
            if attempt == 0:
                self.torn += 1
        return None

    async def _has_heard(self, number: int, least: int) -> bool:
        """Read the arm's mark, and return whether the removals up to that number took effect."""
        data = await self.link.read(8 * (HEADER_WORDS + number * ARM_WORDS), 8 * ARM_WORDS)
        if len(data) != 8 * ARM_WORDS:
            return False
        self._note_mark(number, _WORD.unpack_from(data, 8 * A_REMOVALS)[0])
        return self._marks.get(number, 0) >= least

    def _note_mark(self, number: int, mark: int) -> None:
        # What took effect once has taken effect. Below 0 the peer is in doubt of what it has: asked again until it is not.
        self._marks[number] = max(mark, self._marks.get(number, 0)) if mark >= 0 else 0

    async def _look(self, value: int, number: int, key: bytes) -> bytes | int:
        """Look once into the one or two buckets of the digest."""
        result, tag, buckets = MISS, digest_tag(value), self._geometry.buckets
        bucket = home_bucket(value, buckets)
        for turn in range(2):
            first = self._geometry.index + bucket * BUCKET_UNITS
            data = bytes(await self.link.read(first * UNIT, _BUCKET_BYTES))
            if len(data) != _BUCKET_BYTES:
                return TORN
            state, *slots = _STATE_AND_SLOTS.unpack_from(data)
            for slot in slots:
                if slot == 0 or slot_tag(slot) != tag or not inside_file(self._private, slot):
                    continue
                at, size = slot_at(slot), slot_units(slot) * UNIT
                if size > LARGEST_READ:
                    continue
                if first < at and at * UNIT + size <= first * UNIT + _BUCKET_BYTES:
                    begin = (at - first) * UNIT
                    found = self._check(data[begin : begin + size], number, key)
                else:
                    found = self._check(await self.link.read(at * UNIT, size), number, key)
                if isinstance(found, bytes):
                    return found
                if found == TORN:
                    result = TORN
            if turn == 1 or overflowed(state) == 0:
                break
            bucket = other_bucket(value, buckets)
        return result

    def _check(self, record: bytes | memoryview, number: int, key: bytes) -> bytes | int:
        """Return the record's payload if it is the one that is asked for and whole; else MISS or TORN."""
        count = len(record) // 8
        if count < R_PAYLOAD:
            return TORN
        if P_RECORD + count > len(self._private):
            self._make_scratch(len(record))
        private, view = self._private, self._view
        view[8 * P_KEY : 8 * P_KEY + KEY_BYTES] = key
        view[8 * P_RECORD : 8 * (P_RECORD + count)] = record[: 8 * count]
        if not same_record(private, P_RECORD, private, number):
            return MISS
        length = record_length(private, P_RECORD)
        end = P_RECORD + R_PAYLOAD + (length + 7) // 8
        if end > P_RECORD + count:
            return TORN
        total = checksum(private, P_RECORD + 1, P_RECORD + R_LINKS, end, self._geometry.epoch)
        if total != private[P_RECORD + R_SUM]:
            return TORN
        return bytes(view[8 * P_PAYLOAD : 8 * P_PAYLOAD + length])

    def _make_scratch(self, size: int) -> None:
        self._private = scratch(self._geometry, size)
        self._view = self._private.data.cast("B")


def to_entry(key: bytes, stored: bytes) -> Entry | None:
    """Return the entry of a stored form that came from another node; None where it is not one that a cache could have stored.

    Times that are no numbers would make an entry that never expires.
    """
    entry = unpack(key, stored)
    if entry is None or not (math.isfinite(entry.written_at) and math.isfinite(entry.renewed) and entry.ttl >= 0):
        return None
    return entry
