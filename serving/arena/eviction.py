"""Who has to go: CLOCK, one queue for each arm. For the writer alone.

Entries stand in the order in which they came. The oldest goes, unless it was used since it came or was spared: then its bit is
cleared and it stands behind the newest. So a use costs readers one bit and no lock. On no trace it loses to LRU over the budgets
taken together (``cachepilot bench memory`` has the table). SIEVE and S3-FIFO win more on most traces, and lose up to a third of
the hits on conversations, whose parts come back after long. With more than one bit (GCLOCK) it would win a little more, and lose
twice as much at the one budget at which it does lose: 0.6 instead of 0.3 percentage points.
"""

from __future__ import annotations

from serving.arena.atomic import add, keep_bits, load, store
from serving.arena.layout import (
    A_BYTES,
    A_ENTRIES,
    A_EVICTIONS,
    A_NEWEST,
    A_OLDEST,
    ARM_WORDS,
    ARMS,
    CORRUPT,
    HEADER_WORDS,
    KEY_WORDS,
    LOW,
    P_BUCKETS,
    P_EVICTED,
    P_INDEX,
    P_KEYS,
    R_KEY,
    R_LINKS,
    R_SLOT,
    SLOTS,
    UNIT_WORDS,
    Words,
    digest,
    home_bucket,
    record_arm,
    record_length,
    slot_at,
    slot_units,
)
from serving.arena.reader import bucket_word, has_memory, points_inside, slot_number
from serving.arena.space import release
from serving.compiled import compiled


@compiled("int64(int64)", allocates=False)
def arm_word(arm: int) -> int:
    """Return the first word of the arm of that number."""
    return HEADER_WORDS + arm * ARM_WORDS


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def slot_of(words: Words, private: Words, at: int) -> int:
    """Return the word of the slot that points to the record at that unit; CORRUPT if none does."""
    if at <= private[P_INDEX] or not has_memory(words, private, at, 2):
        return CORRUPT
    position = words[at * UNIT_WORDS + R_SLOT]
    bucket, number = position >> 3, position & 7
    if bucket < 0 or bucket >= private[P_BUCKETS] or number < 1 or number > SLOTS:
        return CORRUPT
    word: int = bucket_word(private, bucket) + number
    slot = words[word]
    if slot == 0 or slot_at(slot) != at or not points_inside(words, private, slot):
        return CORRUPT
    return word


@compiled("boolean(int64[::1], int64[::1], int64)", allocates=False)
def is_record(words: Words, private: Words, at: int) -> bool:
    """Whether a record that is in the index begins at that unit."""
    return bool(private[P_INDEX] < at and has_memory(words, private, at, 2) and slot_of(words, private, at) > 0)


@compiled("boolean(int64[::1], int64[::1], int64, int64)", allocates=False)
def enqueue(words: Words, private: Words, arm: int, at: int) -> bool:
    """Put the record at that unit behind the arm's newest; False if that is not what it should be."""
    place = arm_word(arm)
    newest = words[place + A_NEWEST]
    if newest != 0 and not is_record(words, private, newest):
        return False
    words[at * UNIT_WORDS + R_LINKS] = newest
    if newest == 0:
        words[place + A_OLDEST] = at
    else:
        links = newest * UNIT_WORDS + R_LINKS
        words[links] = (words[links] & LOW) | (at << 32)
    words[place + A_NEWEST] = at
    return True


@compiled("boolean(int64[::1], int64[::1], int64, int64)", allocates=False)
def dequeue(words: Words, private: Words, arm: int, at: int) -> bool:
    """Take the record out of its arm's queue; False if its neighbours there are not what they should be."""
    place = arm_word(arm)
    links = words[at * UNIT_WORDS + R_LINKS]
    older, newer = links & LOW, (links >> 32) & LOW
    if (older != 0 and not is_record(words, private, older)) or (newer != 0 and not is_record(words, private, newer)):
        return False
    if older == 0:
        if words[place + A_OLDEST] != at:
            return False
        words[place + A_OLDEST] = newer
    else:
        before = older * UNIT_WORDS + R_LINKS
        words[before] = (words[before] & LOW) | (newer << 32)
    if newer == 0:
        if words[place + A_NEWEST] != at:
            return False
        words[place + A_NEWEST] = older
    else:
        behind = newer * UNIT_WORDS + R_LINKS
        words[behind] = (words[behind] & (LOW << 32)) | older
    return True


@compiled("boolean(int64[::1], int64[::1], int64)", allocates=False)
def detach(words: Words, private: Words, word: int) -> bool:
    """Take the record of the slot at that word out of queue and accounts; readers still find it."""
    slot = load(words, word)
    if not points_inside(words, private, slot):
        return False
    at = slot_at(slot)
    record = at * UNIT_WORDS
    arm = record_arm(words, record)
    if arm >= ARMS:
        return False
    place = arm_word(arm)
    if not dequeue(words, private, arm, at):
        return False
    words[place + A_BYTES] -= record_length(words, record)
    words[place + A_ENTRIES] -= 1
    return True


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def withdraw(words: Words, private: Words, word: int) -> int:
    """Empty the slot at that word and give its record's room back; 0, or CORRUPT."""
    slot = load(words, word)
    if not points_inside(words, private, slot):
        return CORRUPT
    at = slot_at(slot)
    record = at * UNIT_WORDS
    position = words[record + R_SLOT]
    bucket, number = position >> 3, position & 7
    value = digest(words[record + R_KEY], record_arm(words, record))
    home = home_bucket(value, private[P_BUCKETS])
    base = bucket_word(private, bucket)
    if base + number != word:
        return CORRUPT
    store(words, word, 0)
    keep_bits(words, base, ~(1 << number))
    add(words, base, 1 << 32)
    if home != bucket:
        add(words, bucket_word(private, home), -(1 << 8))
    return release(words, private, at, slot_units(slot))


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def remove(words: Words, private: Words, word: int) -> int:
    """Remove the entry of the slot at that word altogether; 0, or CORRUPT."""
    if slot_of(words, private, slot_at(words[word])) != word or not detach(words, private, word):
        return CORRUPT
    return withdraw(words, private, word)


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def evict_slot(words: Words, private: Words, word: int) -> int:
    """Remove the entry of the slot at that word for want of room and report its key; 0, or CORRUPT."""
    slot = load(words, word)
    if not points_inside(words, private, slot):
        return CORRUPT
    record = slot_at(slot) * UNIT_WORDS
    count = private[P_EVICTED]
    arm = record_arm(words, record)
    if arm >= ARMS:
        return CORRUPT
    for part in range(4):
        private[P_KEYS + count * KEY_WORDS + part] = words[record + R_KEY + part]
    private[P_KEYS + count * KEY_WORDS + 4] = arm
    if remove(words, private, word) != 0:
        return CORRUPT
    words[arm_word(arm) + A_EVICTIONS] += 1
    private[P_EVICTED] = count + 1
    return 0


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def evict(words: Words, private: Words, arm: int) -> int:
    """Evict one entry of the arm, which has some; 0, or CORRUPT."""
    place = arm_word(arm)
    spared = 2 * words[place + A_ENTRIES] + 2  # readers may use them again meanwhile
    while True:
        at = words[place + A_OLDEST]
        if not is_record(words, private, at) or record_arm(words, at * UNIT_WORDS) != arm:
            return CORRUPT
        word = slot_of(words, private, at)  # looked for again: it need not be what it was
        if word < 0:
            return CORRUPT
        number = slot_number(private, word)
        if (load(words, word - number) >> number) & 1 == 0 or spared <= 0:
            return evict_slot(words, private, word)
        keep_bits(words, word - number, ~(1 << number))
        if not dequeue(words, private, arm, at) or not enqueue(words, private, arm, at):
            return CORRUPT
        spared -= 1
