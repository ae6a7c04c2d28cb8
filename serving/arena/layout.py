"""The layout of an arena: one file of 64-byte units that every process of a node maps, and that a network card may read.

All numbers are little-endian 64-bit words. From the start of the file (docs/arena.md has the picture)::

    header   512 words: what the file is (checked by a sum), who writes, the free lists
    arms     32 records of 16 words: budget, bytes, entries and queue of each arm
    edges    one bit per unit: whether it is the first or last unit of a free block
    index    buckets of one cache line (a state word and seven slots) with room for one small record behind it
    values   records and free blocks

A *slot* is one word, so that it is published and withdrawn by one store: 12 bits of the key's digest, the record's length in
units, its place in units; 0 is empty. A *record* is self-verifying: whoever has read it, by whatever means, knows from the record
alone whether it is whole and the one that was asked for. It starts on a unit::

    word 0    checksum of words 1 to 7 and of the payload, seeded with the arena's epoch
         1    bytes of the payload, and the number of the arm from bit 32
         2    version: the arena's count of writes when it was written
         3-6  the key, 32 bytes
         7    its slot: 8 x bucket + number of the slot
         8    links of the arm's queue: the next older and, from bit 32, the next newer record (not in the checksum)
         9-   the payload: an entry's stored form (:mod:`serving.tiers.codec`), filled up with zeros

Lookup from afar: read the bucket of the key's digest (its small record comes with it), then the record that the slot points to;
if the state word says that entries of this bucket had to go to their other one, and it was not here, the other bucket. Check with
:func:`record_length`, :func:`same_record` and :func:`checksum`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.compiled import compiled

Words = npt.NDArray[np.int64]

MAGIC = int.from_bytes(b"CPARENA\0", "little")
VERSION = 2
UNIT = 64
UNIT_WORDS = 8

# Words of the header. The first of them never change, and SUM is their checksum.
(
    H_MAGIC, H_VERSION, H_BYTES, H_UNITS, H_BUCKETS, H_BUCKET_WORDS, H_INDEX, H_EDGES, H_VALUES, H_EPOCH, H_SUM,
) = range(11)  # fmt: skip
H_OWNER, H_DIRTY = 16, 17
H_SEQUENCE, H_TOP, H_RESERVED, H_REPAIRS, H_STORE = 24, 25, 26, 27, 28
H_FREE = 64
FREE_CLASSES = 256
HEADER_WORDS = 512

# Words of an arm.
A_NAME, A_USED_BY, A_BUDGET, A_BYTES, A_ENTRIES, A_EVICTIONS, A_OLDEST, A_NEWEST, A_REMOVALS = 0, 2, 3, 4, 5, 6, 7, 8, 9
ARM_WORDS, ARMS = 16, 32

R_SUM, R_LENGTH, R_VERSION, R_KEY, R_SLOT, R_LINKS, R_PAYLOAD = 0, 1, 2, 3, 7, 8, 9

SLOTS = 7
INLINE_UNITS = 3
"""Units behind a bucket's cache line, for one small record."""
BUCKET_UNITS = 1 + INLINE_UNITS
LARGEST_UNITS = (1 << 20) - 1
LARGEST_FILE = (1 << 32) * UNIT

# Words of the array that a client hands to the compiled functions beside the arena: where things are, what is asked, what came.
P_BUCKETS, P_INDEX, P_UNITS, P_EDGES, P_VALUES, P_EPOCH, P_LIMIT, P_RESERVED = range(8)
P_KEY = 8
P_EVICTED, P_OLD, P_FOUND, P_SLOT = 12, 13, 14, 15
P_KEYS = 16
KEY_WORDS = 5
"""A key that is reported takes its 4 words and one for the arm."""
KEYS = 256
"""Keys that one call reports at most."""
P_RECORD = P_KEYS + KEY_WORDS * KEYS
P_PAYLOAD = P_RECORD + R_PAYLOAD

MISS, TORN, CORRUPT = -1, -2, -3
LOW = 0xFFFFFFFF
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_PRIME1, _PRIME2, _PRIME3 = 0x9E3779B185EBCA87 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64, 0x165667B19E3779F9


class ArenaError(RuntimeError):
    """An arena cannot be opened or made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the parts of an arena are.

    Attributes:
        bytes: Of the file, a multiple of 4096, and of the pages of its file system.
        buckets: Number of buckets.
        edges: First word of the edges.
        index: First unit of the buckets.
        values: First unit of the values.
        epoch: Made anew with each arena; seeds the checksums.
    """

    bytes: int
    buckets: int
    edges: int
    index: int
    values: int
    epoch: int

    @property
    def units(self) -> int:
        """Units of the whole file."""
        return self.bytes // UNIT

    @classmethod
    def plan(cls, size: int, entry_bytes: int, epoch: int, page: int = 4096) -> Geometry:
        """Return the geometry of an arena of about ``size`` bytes, whose entries are expected to have ``entry_bytes``.

        There is a bucket for every four of such entries, so that at most four of seven slots are taken on average.

        Args:
            size: Bytes of the file; it is a multiple of ``page`` afterwards, a smaller one, but at least one page.
            entry_bytes: What entries are expected to have on average.
            epoch: Names this arena.
            page: Bytes of a page of the file system, a multiple of 4096.

        Raises:
            ArenaError: If the size is too small or too large.
        """
        size = max(size // page, 1 if size >= MINIMUM else 0) * page
        if not MINIMUM <= size <= LARGEST_FILE:
            raise ArenaError(f"arena: expected a size from {MINIMUM} to {LARGEST_FILE} bytes, got {size}")
        edges = HEADER_WORDS + ARMS * ARM_WORDS
        index = -(-(edges + size // UNIT // 64) // UNIT_WORDS)
        buckets = max(2, size // (4 * max(1, entry_bytes)))
        # No more than a third of the file for the index, however small the entries.
        buckets = min(buckets, (size // UNIT - index) // (3 * BUCKET_UNITS))
        return cls(size, buckets, edges, index, index + buckets * BUCKET_UNITS, epoch)

    def header(self) -> Words:
        """Return the words that never change, their sum included, shape (11,)."""
        words = np.array(
            [
                MAGIC, VERSION, self.bytes, self.units, self.buckets, BUCKET_UNITS * UNIT_WORDS, self.index, self.edges,
                self.values, self.epoch, 0,
            ],
            np.int64,
        )  # fmt: skip
        words[H_SUM] = header_sum(words)
        return words

    @classmethod
    def read(cls, words: Words, path: str, size: int) -> Geometry:
        """Return the geometry that a header tells.

        Args:
            words: The first words of the file, shape (>= 11,).
            path: Of the file, for messages.
            size: Bytes of the file.

        Raises:
            ArenaError: If it is no arena, one of another layout, cut short or damaged.
        """
        way_out = "stop the gateways that use it and remove the file, or set another path"
        if int(words[H_MAGIC]) != MAGIC:
            raise ArenaError(f"arena {path}: the file is not an arena; remove it, or set another path")
        if int(words[H_VERSION]) != VERSION:
            raise ArenaError(
                f"arena {path}: expected layout version {VERSION}, found {int(words[H_VERSION])}: another version of cachepilot "
                f"made it; {way_out}"
            )
        found = cls(
            int(words[H_BYTES]), int(words[H_BUCKETS]), int(words[H_EDGES]), int(words[H_INDEX]), int(words[H_VALUES]),
            int(words[H_EPOCH]),
        )  # fmt: skip
        if found.bytes != size or header_sum(words) != int(words[H_SUM]):
            raise ArenaError(f"arena {path}: the header is damaged or the file of {size} bytes was cut short; {way_out}")
        return found


MINIMUM = 64 * 1024
"""Bytes of the smallest arena."""


def header_sum(words: Words) -> int:
    """Return the checksum of the words of the header that never change."""
    return int(checksum(words[:H_SUM].copy(), 0, 0, H_SUM, VERSION))


def scratch(geometry: Geometry, payload: int) -> Words:
    """Return the array that goes with the arena into the compiled functions, with room for a payload of so many bytes."""
    private = np.zeros(P_PAYLOAD + -(-payload // 8) + 8, np.int64)
    private[: P_LIMIT + 1] = (
        geometry.buckets, geometry.index, geometry.units, geometry.edges, geometry.values, geometry.epoch,
        geometry.units,
    )  # fmt: skip
    return private


def record_units(payload: int) -> int:
    """Return the units that a record with a payload of so many bytes takes."""
    return -(-(R_PAYLOAD * 8 + payload) // UNIT)


def name_words(name: str) -> tuple[int, int]:
    """Return the two words by which an arm is known in the directory."""
    first, second = struct.unpack("<qq", hashlib.blake2b(name.encode(), digest_size=16).digest())
    return first or 1, second


@compiled("int64(int64, int64)", allocates=False)
def digest(key: int, arm: int) -> int:
    """Return the digest of an entry: of the first word of its key and the number of its arm."""
    value = key ^ (arm * _PRIME1)
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@compiled("int64(int64, int64)", allocates=False)
def home_bucket(value: int, buckets: int) -> int:
    """Return the bucket in which the entry of that digest is looked for first."""
    return (((value >> 32) & LOW) * buckets) >> 32


@compiled("int64(int64, int64)", allocates=False)
def other_bucket(value: int, buckets: int) -> int:
    """Return the bucket where it is if the first had no room."""
    return (home_bucket(value, buckets) + 1 + ((value >> 12) & 0xFFFFF) % (buckets - 1)) % buckets


@compiled("int64(int64)", allocates=False)
def digest_tag(value: int) -> int:
    """Return the part of the digest that a slot keeps."""
    return value & 0xFFF


@compiled("int64(int64, int64, int64)", allocates=False)
def slot_word(tag: int, units: int, at: int) -> int:
    """Return a slot."""
    return (tag << 52) | (units << 32) | at


@compiled("int64(int64)", allocates=False)
def slot_tag(slot: int) -> int:
    """Return the slot's part of the digest."""
    return (slot >> 52) & 0xFFF


@compiled("int64(int64)", allocates=False)
def slot_units(slot: int) -> int:
    """Return the units of the record."""
    return (slot >> 32) & 0xFFFFF


@compiled("int64(int64)", allocates=False)
def slot_at(slot: int) -> int:
    """Return the first unit of the record."""
    return slot & LOW


@compiled("int64(int64, int64)", allocates=False)
def rotated(value: int, by: int) -> int:
    """Return the word rotated to the left."""
    return (value << by) | ((value >> (64 - by)) & ((1 << by) - 1))


@compiled("int64(int64[::1], int64, int64, int64, int64)", allocates=False)
def checksum(words: Words, begin: int, gap: int, end: int, seed: int) -> int:
    """Return a 64-bit checksum in the manner of xxHash: four lanes of multiply and rotate.

    Args:
        words: Where the words are.
        begin: The first of them.
        gap: One word of those that is left out; ``begin`` - 1 or less: none.
        end: The word behind the last.
        seed: Starts the lanes.
    """
    first, second, third, fourth = seed + _PRIME1, seed ^ _PRIME2, seed, seed - _PRIME1
    at = begin
    if begin <= gap < end:
        while at < gap:
            first = rotated(first + words[at] * _PRIME2, 31) * _PRIME1
            at += 1
        at = gap + 1
    while at + 4 <= end:
        first = rotated(first + words[at] * _PRIME2, 31) * _PRIME1
        second = rotated(second + words[at + 1] * _PRIME2, 31) * _PRIME1
        third = rotated(third + words[at + 2] * _PRIME2, 31) * _PRIME1
        fourth = rotated(fourth + words[at + 3] * _PRIME2, 31) * _PRIME1
        at += 4
    while at < end:
        second = rotated(second + words[at] * _PRIME2, 31) * _PRIME1
        at += 1
    value = rotated(first, 1) + rotated(second, 7) + rotated(third, 12) + rotated(fourth, 18) + (end - begin) * _PRIME3
    value = (value ^ ((value >> 29) & 0x7FFFFFFFF)) * _PRIME2
    value = (value ^ ((value >> 32) & LOW)) * _PRIME3
    return value ^ ((value >> 29) & 0x7FFFFFFFF)


@compiled("int64(int64[::1], int64)", allocates=False)
def record_length(words: Words, record: int) -> int:
    """Return the bytes of the payload of the record that begins at that word."""
    return words[record + R_LENGTH] & LOW  # type: ignore[no-any-return]


@compiled("int64(int64[::1], int64)", allocates=False)
def record_arm(words: Words, record: int) -> int:
    """Return the number of the record's arm."""
    return (words[record + R_LENGTH] >> 32) & 0xFF  # type: ignore[no-any-return]


@compiled("boolean(int64[::1], int64, int64[::1], int64)", allocates=False)
def same_record(words: Words, record: int, private: Words, arm: int) -> bool:
    """Whether the record at that word is of the arm and has the key that is asked for."""
    return bool(
        words[record + R_KEY] == private[P_KEY]
        and words[record + R_KEY + 1] == private[P_KEY + 1]
        and words[record + R_KEY + 2] == private[P_KEY + 2]
        and words[record + R_KEY + 3] == private[P_KEY + 3]
        and record_arm(words, record) == arm
    )
