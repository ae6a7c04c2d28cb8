"""The inbox: slots of memory that peers write new entries into, by one-sided WRITEs, for the node that owns their keys.

Each peer has slots that are its alone. An entry in a slot, in little-endian words, after docs/neighbours.md::

    word 0     checksum of all that follows, seeded with the epoch of the owner's arena
         1     number of the entry in this slot: 1, 2, ...; 0: nothing was written yet
         2     bytes of the payload, and of the arm's name from bit 32
         3-6   the key
         7-14  the arm's name
        15     number of the store's last removal when it had the entry (:mod:`serving.coherence`); -1: not known
        16-    the payload: an entry's stored form (:mod:`serving.tiers.codec`), filled up with zeros

The owner tells what it has taken out by the number of the last entry of each slot, in words of its arena's header that peers can
read: a slot is free when the number there is that of the last entry written into it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

import numpy as np

from serving.arena.layout import FREE_CLASSES, H_FREE, HEADER_WORDS, Words, checksum
from serving.tiers.base import KEY_BYTES

H_TAKEN = 384
"""First word of the arena's header that says what was taken out of the inbox, one word a slot. The layout leaves them free."""

MOST_SLOTS = 128
"""Slots of the largest inbox: as many as there are such words."""

assert H_FREE + FREE_CLASSES <= H_TAKEN
assert H_TAKEN + MOST_SLOTS <= HEADER_WORDS

HEAD_WORDS = 16
HEAD_BYTES = 8 * HEAD_WORDS
_NAME_BYTES = 64
_SUM, _NUMBER, _LENGTHS, _KEY, _NAME, _KNOWN = 0, 1, 2, 3, 7, 15
_LOW = 0xFFFFFFFF
_HEAD = struct.Struct(f"<qqq{KEY_BYTES}s{_NAME_BYTES}sq")

SHARE = 16
"""A peer gets one in so many of the slots that are free."""

UNFINISHED = 1.0
"""Seconds after which what is not whole is taken out of its slot and thrown away: writes take milliseconds."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The slots of one peer: ``count`` of them from ``first`` on; may be none."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """An entry that was in a slot, whole: arm, key, stored form, and the number of the store's last removal when it had it."""

    arm: str
    key: bytes
    stored: bytes
    known: int | None = None


def encode(arm: str, key: bytes, stored: bytes, number: int, epoch: int, known: int | None = None) -> bytes:
    """Return what is written into a slot.

    Args:
        arm: Name of the arm, at most 64 bytes.
        key: Of the entry, 32 bytes.
        stored: Its stored form.
        number: Of the entry in its slot, >= 1.
        epoch: Of the owner's arena.
        known: Number of the store's last removal when it had the entry; None: not known.

    Raises:
        ValueError: If name or key have another length.
    """
    name = arm.encode()
    if not 0 < len(name) <= _NAME_BYTES or len(key) != KEY_BYTES:
        raise ValueError(f"inbox: expected a name of 1 to 64 bytes and a key of 32, got {len(name)} and {len(key)}")
    words = np.zeros(HEAD_WORDS + (len(stored) + 7) // 8, np.int64)
    view = words.data.cast("B")
    _HEAD.pack_into(view, 0, 0, number, len(stored) | len(name) << 32, key, name, -1 if known is None else known)
    view[HEAD_BYTES : HEAD_BYTES + len(stored)] = stored
    words[_SUM] = checksum(words, 1, 0, len(words), epoch)
    return words.tobytes()


def decode(words: Words, epoch: int) -> Arrived | None:
    """Return the entry in a slot; None if it is not whole.

    Args:
        words: A copy of the slot that nobody else writes to.
        epoch: Of the owner's arena.
    """
    lengths = int(words[_LENGTHS])
    length, name_length = lengths & _LOW, lengths >> 32
    end = HEAD_WORDS + (length + 7) // 8
    if end > len(words) or not 0 < name_length <= _NAME_BYTES or checksum(words, 1, 0, end, epoch) != words[_SUM]:
        return None
    head = words[:HEAD_WORDS].tobytes()
    try:
        arm = head[8 * _NAME : 8 * _NAME + name_length].decode()
    except UnicodeDecodeError:
        return None
    stored = words[HEAD_WORDS:end].tobytes()[:length]
    known = int(words[_KNOWN])
    return Arrived(arm, head[8 * _KEY : 8 * _KEY + KEY_BYTES], stored, None if known < 0 else known)


class Inbox:
    """The memory of an inbox, who has which of its slots, and what is in them.

    Args:
        slots: How many, 1 to :data:`MOST_SLOTS`.
        slot_bytes: Of each, a multiple of 64 from 256 on.
        taken: Words in which it is told what was taken out, shape (slots,).
        epoch: Of the arena.

    Attributes:
        words: The memory, shape (slots * slot_bytes / 8,), starting on a page.
        damaged: Entries that were thrown away since they were never whole.

    Raises:
        ValueError: If a value is out of its range.
    """

    def __init__(self, slots: int, slot_bytes: int, taken: Words, epoch: int) -> None:
        if not 1 <= slots <= MOST_SLOTS or slot_bytes < 256 or slot_bytes % 64:
            raise ValueError(
                f"inbox: expected 1 to {MOST_SLOTS} slots of a multiple of 64 bytes, at least 256; got {slots} of {slot_bytes}"
            )
        self.slots, self.slot_bytes = slots, slot_bytes
        self.words: Words = np.frombuffer(mmap.mmap(-1, slots * slot_bytes), np.int64)
        self.damaged = 0
        self._slot = self.words.reshape(slots, slot_bytes // 8)
        self._numbers = self._slot[:, _NUMBER]
        self._taken = taken
        self._taken[:] = 0
        self._epoch = epoch
        self._free = np.ones(slots, bool)
        self._grants: list[Grant] = []
        self._turn = 0
        self._since: dict[int, tuple[int, float]] = {}

    def grant(self) -> Grant:
        """Give a share of the free slots to a peer; the longest free run, where that is shorter."""
        wanted = -(-int(self._free.sum()) // SHARE)
        first = count = run = 0
        for slot in range(self.slots):
            run = run + 1 if self._free[slot] else 0
            if run > count:
                first, count = slot + 1 - run, run
            if count == wanted:
                break
        self._free[first : first + count] = False
        granted = Grant(first, count)
        if count:
            self._grants.append(granted)
        return granted

    def release(self, grant: Grant) -> None:
        """Take a peer's slots back, once it can write to them no more; what is in them is lost."""
        if grant not in self._grants:
            return
        self._grants.remove(grant)
        mine = slice(grant.first, grant.first + grant.count)
        self._slot[mine] = 0
        self._taken[mine] = 0
        self._free[mine] = True
        for slot in range(grant.first, grant.first + grant.count):
            self._since.pop(slot, None)

    def close(self) -> None:
        """Let go of the arena's words."""
        self._taken = self._taken.copy()

    def take(self, most: int, now: float) -> tuple[list[Arrived], bool]:
        """Take entries out of the slots, of each peer in turn.

        Args:
            most: How many at most, those included that are thrown away.
            now: A monotonic clock, seconds.

        Returns:
            The entries, and whether others are waiting, or not whole yet.
        """
        waiting = np.flatnonzero(self._numbers != self._taken)
        if not len(waiting):
            return [], False
        queues = [
            [slot for slot in range(grant.first, grant.first + grant.count) if self._numbers[slot] != self._taken[slot]]
            for grant in self._grants[self._turn :] + self._grants[: self._turn]
        ]
        self._turn = (self._turn + 1) % max(1, len(self._grants))
        arrived: list[Arrived] = []
        done = 0
        while done < most and any(queues):
            for queue in queues:
                if queue and done < most:
                    done += self._take(queue.pop(0), arrived, now)
        return arrived, bool(self._since) or any(queues)

    def _take(self, slot: int, arrived: list[Arrived], now: float) -> bool:
        number = int(self._numbers[slot])
        # As much as it says it has; the copy is believed only for what it says of itself.
        end = HEAD_WORDS + (int(self._slot[slot, _LENGTHS]) & _LOW) // 8 + 1
        copy = self._slot[slot, :end].copy()
        entry = decode(copy, self._epoch) if copy[_NUMBER] == number else None
        if entry is None:
            seen, since = self._since.setdefault(slot, (number, now))
            if seen != number:
                self._since[slot] = (number, now)
                return False
            if now - since < UNFINISHED:
                return False
            self.damaged += 1
        else:
            arrived.append(entry)
        self._since.pop(slot, None)
        self._taken[slot] = number
        return True
