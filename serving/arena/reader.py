"""Reading an arena without locks: whatever writers do meanwhile, or leave undone, a reader gets a whole entry or none.

A reader copies a record out before it looks at it, and believes the copy alone: its key, its length and its checksum. A record
that was overwritten while it was copied is looked for again. The one thing that readers write is the bit that says that an entry
was used.
"""

from __future__ import annotations

from serving.arena.atomic import fence, load, set_bits
from serving.arena.layout import (
    BUCKET_UNITS,
    H_RESERVED,
    KEY_WORDS,
    KEYS,
    MISS,
    P_BUCKETS,
    P_EPOCH,
    P_FOUND,
    P_INDEX,
    P_KEY,
    P_KEYS,
    P_RECORD,
    P_RESERVED,
    P_SLOT,
    P_UNITS,
    R_KEY,
    R_LINKS,
    R_PAYLOAD,
    R_SUM,
    SLOTS,
    TORN,
    UNIT_WORDS,
    Words,
    checksum,
    digest,
    digest_tag,
    home_bucket,
    other_bucket,
    record_arm,
    record_length,
    same_record,
    slot_at,
    slot_tag,
    slot_units,
)
from serving.compiled import compiled

ATTEMPTS = 16
"""How often an entry that changes while it is read is looked for."""

LARGER = -16
"""Results below: the record has so many words more than that, and the private array is too short for it."""

_BUCKET_WORDS = BUCKET_UNITS * UNIT_WORDS


@compiled("int64(int64[::1], int64)", allocates=False)
def bucket_word(private: Words, bucket: int) -> int:
    """Return the first word of a bucket: its state, with the slots behind it."""
    return private[P_INDEX] * UNIT_WORDS + bucket * _BUCKET_WORDS  # type: ignore[no-any-return]


@compiled("int64(int64[::1], int64)", allocates=False)
def slot_number(private: Words, word: int) -> int:
    """Return which slot of its bucket the one at that word is, from 1."""
    return (word - private[P_INDEX] * UNIT_WORDS) % _BUCKET_WORDS  # type: ignore[no-any-return]


@compiled("int64(int64)", allocates=False)
def overflowed(state: int) -> int:
    """Return how many entries of the bucket are in their other one, by its state."""
    return (state >> 8) & 0xFFFFFF


@compiled("boolean(int64[::1], int64)", allocates=False)
def inside_file(private: Words, slot: int) -> bool:
    """Whether the slot points to where the file is large enough for a record."""
    at, units = slot_at(slot), slot_units(slot)
    return bool(units >= 2 and at > private[P_INDEX] and at + units <= private[P_UNITS])


@compiled("boolean(int64[::1], int64[::1], int64, int64)", allocates=False)
def has_memory(words: Words, private: Words, unit: int, count: int) -> bool:
    """Whether the file has memory for so many units from that one on: to touch what has none ends the process where none is left.

    It never has less than it had, so that the header, where others write, is looked into for news alone. Nothing is added up:
    what is damaged may be so great that there is no word for the sum, and the compiler takes it that there is.
    """
    if unit < 0 or count < 0:
        return False
    if unit > private[P_RESERVED] - count:
        private[P_RESERVED] = min(load(words, H_RESERVED), private[P_UNITS])
    return bool(unit <= private[P_RESERVED] - count)


@compiled("boolean(int64[::1], int64[::1], int64)", allocates=False)
def points_inside(words: Words, private: Words, slot: int) -> bool:
    """Whether the slot points to where a record can be."""
    return bool(inside_file(private, slot) and has_memory(words, private, slot_at(slot), slot_units(slot)))


@compiled("int64(int64[::1], int64[::1], int64, int64)", allocates=False)
def copy_record(words: Words, private: Words, slot: int, arm: int) -> int:
    """Copy the record of a slot into the private array and check it there.

    Returns:
        Bytes of its payload; :data:`MISS` if it is another one, :data:`TORN` if it is not whole, below :data:`LARGER` if it does
        not fit.
    """
    record = slot_at(slot) * UNIT_WORDS
    if not same_record(words, record, private, arm):
        return MISS
    length = record_length(words, record)
    count = R_PAYLOAD + (length + 7) // 8
    if count > slot_units(slot) * UNIT_WORDS:
        return TORN
    if P_RECORD + count > len(private):
        return LARGER - count
    for number in range(count):
        private[P_RECORD + number] = words[record + number]
    fence()
    if not same_record(private, P_RECORD, private, arm) or record_length(private, P_RECORD) != length:
        return TORN
    total = checksum(private, P_RECORD + 1, P_RECORD + R_LINKS, P_RECORD + count, private[P_EPOCH])
    return length if total == private[P_RECORD + R_SUM] else TORN


@compiled("int64(int64[::1], int64[::1], int64, int64)", allocates=False)
def candidate(words: Words, private: Words, value: int, after: int) -> int:
    """Return the word of the next slot that may be that of the entry with the digest; 0 if there is none.

    Args:
        words: The arena.
        private: ``P_SLOT`` says afterwards what the slot was.
        value: The digest.
        after: The word of the candidate before; 0: begin with the first bucket.
    """
    tag = digest_tag(value)
    home: int = bucket_word(private, home_bucket(value, private[P_BUCKETS]))
    base, number = home, 1
    if after != 0:
        number = slot_number(private, after) + 1
        base = after + 1 - number
    while True:
        while number <= SLOTS:
            slot = load(words, base + number)
            if slot != 0 and slot_tag(slot) == tag and points_inside(words, private, slot):
                private[P_SLOT] = slot
                return base + number
            number += 1
        if base != home or overflowed(load(words, base)) == 0:
            return 0
        base, number = bucket_word(private, other_bucket(value, private[P_BUCKETS])), 1


@compiled("void(int64[::1], int64[::1], int64)", allocates=False)
def mark(words: Words, private: Words, word: int) -> None:
    """Set the bit that says that the entry of the slot at that word was used."""
    number = slot_number(private, word)
    if (load(words, word - number) >> number) & 1 == 0:  # else a line that all read would go from processor to processor
        set_bits(words, word - number, 1 << number)


@compiled("int64(int64[::1], int64[::1], int64, boolean)", allocates=False)
def find(words: Words, private: Words, arm: int, touch: bool) -> int:
    """Look for the entry of an arm whose key is in the private array, and copy it there.

    Returns:
        Bytes of the payload, from word ``P_PAYLOAD`` of the private array; else as :func:`copy_record`.
    """
    value = digest(private[P_KEY], arm)
    for _ in range(ATTEMPTS):
        torn = False
        word = candidate(words, private, value, 0)
        while word != 0:
            found = copy_record(words, private, private[P_SLOT], arm)
            if found >= 0:
                if touch:
                    mark(words, private, word)
                return found
            if found < LARGER:
                return found
            torn = torn or found == TORN
            word = candidate(words, private, value, word)
        if not torn:
            return MISS
    return TORN


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def locate(words: Words, private: Words, arm: int) -> int:
    """Return the word of the slot of the entry whose key is in the private array, unchecked; 0 where there is none."""
    value = digest(private[P_KEY], arm)
    word = candidate(words, private, value, 0)
    while word != 0 and not same_record(words, slot_at(private[P_SLOT]) * UNIT_WORDS, private, arm):
        word = candidate(words, private, value, word)
    return word


@compiled("boolean(int64[::1], int64[::1], int64)", allocates=False)
def mark_used(words: Words, private: Words, arm: int) -> bool:
    """Set the bit that says that the entry was used; whether it is there."""
    word = locate(words, private, arm)
    if word != 0:
        mark(words, private, word)
    return word != 0


@compiled("int64(int64[::1], int64[::1], int64, int64)", allocates=False)
def collect(words: Words, private: Words, arm: int, bucket: int) -> int:
    """Collect the keys of an arm from a bucket on; ``P_FOUND`` says how many.

    Returns:
        The bucket to go on with; the number of buckets at the end.
    """
    count = 0
    while bucket < private[P_BUCKETS] and count + SLOTS <= KEYS:
        base = bucket_word(private, bucket)
        for number in range(1, SLOTS + 1):
            slot = load(words, base + number)
            if slot == 0 or not points_inside(words, private, slot):
                continue
            record = slot_at(slot) * UNIT_WORDS
            if record_arm(words, record) == arm:
                for part in range(4):
                    private[P_KEYS + count * KEY_WORDS + part] = words[record + R_KEY + part]
                count += 1
        bucket += 1
    private[P_FOUND] = count
    return bucket
