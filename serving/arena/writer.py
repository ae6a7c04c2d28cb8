"""Writing an arena, under the lease (:mod:`serving.arena.election`), so that it is whole at every instruction to those who read.

A record is written where nobody looks, then published by the one store of its slot. An entry that is overwritten stays readable
until its successor is. What a killed writer leaves behind is at worst room that nobody has and accounts that are wrong; the next
one finds the arena claimed and rebuilds them (:mod:`serving.arena.repair`).
"""

from __future__ import annotations

from serving.arena.atomic import add, exchange, keep_bits, load, replace, store
from serving.arena.eviction import arm_word, detach, enqueue, evict, evict_slot, remove, slot_of, withdraw
from serving.arena.layout import (
    A_BUDGET,
    A_BYTES,
    A_ENTRIES,
    A_OLDEST,
    ARMS,
    BUCKET_UNITS,
    CORRUPT,
    H_DIRTY,
    H_OWNER,
    H_SEQUENCE,
    INLINE_UNITS,
    KEYS,
    P_BUCKETS,
    P_EPOCH,
    P_EVICTED,
    P_INDEX,
    P_KEY,
    P_OLD,
    P_PAYLOAD,
    P_RECORD,
    P_SLOT,
    R_KEY,
    R_LENGTH,
    R_LINKS,
    R_PAYLOAD,
    R_SLOT,
    R_SUM,
    R_VERSION,
    SLOTS,
    UNIT_WORDS,
    Words,
    checksum,
    digest,
    digest_tag,
    home_bucket,
    other_bucket,
    record_arm,
    record_length,
    slot_at,
    slot_units,
    slot_word,
)
from serving.arena.reader import bucket_word, has_memory, locate, points_inside
from serving.arena.space import GROW, allocate, release
from serving.compiled import compiled

STORED, REFUSED, MORE = 1, 0, -5
"""Results of :func:`put`: done; not stored for want of room; call again, the array of evicted keys is full."""


@compiled("boolean(int64[::1], int64)", allocates=False)
def claim(words: Words, token: int) -> bool:
    """Say who writes; whether the one before had finished, else the arena is to be repaired first."""
    unfinished = exchange(words, H_OWNER, token)
    return bool(unfinished == 0 and load(words, H_DIRTY) == 0)


@compiled("boolean(int64[::1], int64)", allocates=False)
def disclaim(words: Words, token: int) -> bool:
    """Say that the writer has finished; False if another has claimed the arena meanwhile, which is to be repaired then."""
    if replace(words, H_OWNER, token, 0):
        return True
    store(words, H_DIRTY, 1)
    return False


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def _free_slot(words: Words, private: Words, value: int) -> int:
    """Return the word of an empty slot for the digest; if there is none, one of its first bucket is evicted."""
    bucket = home_bucket(value, private[P_BUCKETS])
    for _ in range(2):
        base = bucket_word(private, bucket)
        for number in range(1, SLOTS + 1):
            if words[base + number] == 0:
                return base + number
        bucket = other_bucket(value, private[P_BUCKETS])
    base = bucket_word(private, home_bucket(value, private[P_BUCKETS]))
    first = words[H_SEQUENCE] % SLOTS
    chosen: int = base + 1 + first
    for step in range(SLOTS):
        number = 1 + (first + step) % SLOTS
        if (load(words, base) >> number) & 1 == 0:
            chosen = base + number
            break
    if not points_inside(words, private, words[chosen]) or evict_slot(words, private, chosen) != 0:
        return CORRUPT
    return chosen


@compiled("int64(int64[::1], int64[::1], int64, int64)", allocates=False)
def _room(words: Words, private: Words, base: int, units: int) -> int:
    """Return where a record of so many units can be: behind its bucket if it is small and that is free; else as allocate()."""
    if units <= INLINE_UNITS:
        behind = base // UNIT_WORDS + 1
        free = True
        for number in range(1, SLOTS + 1):
            if words[base + number] != 0 and slot_at(words[base + number]) == behind:
                free = False
        if free:
            return behind
    return allocate(words, private, units)


@compiled("int64(int64[::1], int64)", allocates=False)
def _fullest(words: Words, arm: int) -> int:
    """Return the arm to take room from: this one if it has any, else the one with the most bytes; -1: none has."""
    if words[arm_word(arm) + A_ENTRIES] > 0:
        return arm
    best, most = -1, 0
    for other in range(ARMS):
        place = arm_word(other)
        if words[place + A_ENTRIES] > 0 and words[place + A_BYTES] >= most:
            best, most = other, words[place + A_BYTES]
    return best


@compiled("void(int64[::1], int64[::1], int64, int64, int64, int64)", allocates=False)
def _write(words: Words, private: Words, arm: int, length: int, at: int, position: int) -> None:
    """Write the record; its checksum is of what was meant, not of what is there: somebody else may write there by mistake."""
    record = at * UNIT_WORDS
    count = R_PAYLOAD + (length + 7) // 8
    version = words[H_SEQUENCE] + 1
    words[H_SEQUENCE] = version
    private[P_RECORD + R_LENGTH] = length | (arm << 32)
    private[P_RECORD + R_VERSION] = version
    for part in range(4):
        private[P_RECORD + R_KEY + part] = private[P_KEY + part]
    private[P_RECORD + R_SLOT] = position
    private[P_RECORD + R_LINKS] = 0
    if length & 7:
        private[P_RECORD + count - 1] &= (1 << (8 * (length & 7))) - 1
    private[P_RECORD] = checksum(private, P_RECORD + 1, P_RECORD + R_LINKS, P_RECORD + count, private[P_EPOCH])
    for number in range(count):
        words[record + number] = private[P_RECORD + number]


@compiled("int64(int64[::1], int64[::1], int64, int64, int64)", allocates=False)
def put(words: Words, private: Words, arm: int, length: int, old: int) -> int:
    """Store the key and payload of the private array as the arm's newest entry, and evict what no longer fits.

    Args:
        words: The arena.
        private: Has the key and the payload.
        arm: Number of the arm.
        length: Bytes of the payload.
        old: -1; when it is called again (after MORE, GROW) what ``P_OLD`` says.

    Returns:
        STORED, REFUSED (an older entry of the key is gone), MORE, GROW (reserve memory, or lower ``P_LIMIT``, and call again) or
        CORRUPT. ``P_EVICTED`` counts the keys of this call.
    """
    private[P_EVICTED] = 0
    place = arm_word(arm)
    if old < 0:
        old = locate(words, private, arm)
        if old != 0 and (slot_of(words, private, slot_at(words[old])) != old or not detach(words, private, old)):
            return CORRUPT
        private[P_OLD] = old
    units = (R_PAYLOAD * 8 + length + 63) // 64
    if length > words[place + A_BUDGET]:
        return CORRUPT if old != 0 and withdraw(words, private, old) != 0 else REFUSED
    while words[place + A_BYTES] + length > words[place + A_BUDGET]:
        if private[P_EVICTED] == KEYS:
            return MORE
        if words[place + A_ENTRIES] <= 0 or evict(words, private, arm) != 0:
            return CORRUPT
    value = digest(private[P_KEY], arm)
    word = old
    if word == 0:
        if private[P_EVICTED] == KEYS:
            return MORE
        word = _free_slot(words, private, value)
        if word < 0:
            return CORRUPT
    bucket = (word - private[P_INDEX] * UNIT_WORDS) // (BUCKET_UNITS * UNIT_WORDS)
    base = bucket_word(private, bucket)
    at = _room(words, private, base, units)
    while at <= 0:
        if at in (GROW, CORRUPT):
            return at
        if private[P_EVICTED] == KEYS:
            return MORE
        victim = _fullest(words, arm)
        if victim >= 0:
            if evict(words, private, victim) != 0:
                return CORRUPT
        elif old != 0:
            if withdraw(words, private, old) != 0:
                return CORRUPT
            old = 0
            private[P_OLD] = 0
        else:
            return REFUSED
        at = _room(words, private, base, units)
    _write(words, private, arm, length, at, bucket * 8 + word - base)
    before = load(words, word)
    keep_bits(words, base, ~(1 << (word - base)))
    store(words, word, slot_word(digest_tag(value), units, at))
    add(words, base, 1 << 32)
    home = home_bucket(value, private[P_BUCKETS])
    if old == 0 and home != bucket:
        add(words, bucket_word(private, home), 1 << 8)
    if not enqueue(words, private, arm, at):
        return CORRUPT
    words[place + A_BYTES] += length
    words[place + A_ENTRIES] += 1
    if old != 0 and release(words, private, slot_at(before), slot_units(before)) != 0:
        return CORRUPT
    return STORED


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def delete(words: Words, private: Words, arm: int) -> int:
    """Remove the entry whose key is in the private array; 1 if it was there, 0 if not, or CORRUPT."""
    word = locate(words, private, arm)
    if word == 0:
        return 0
    return CORRUPT if remove(words, private, word) != 0 else 1


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def trim(words: Words, private: Words, arm: int) -> int:
    """Evict what is over the arm's budget, ``P_EVICTED`` says how many; 0 when it is done, MORE or CORRUPT."""
    private[P_EVICTED] = 0
    place = arm_word(arm)
    while words[place + A_BYTES] > words[place + A_BUDGET]:
        if private[P_EVICTED] == KEYS:
            return MORE
        if words[place + A_ENTRIES] <= 0 or evict(words, private, arm) != 0:
            return CORRUPT
    return 0


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def flush(words: Words, private: Words, arm: int) -> int:
    """Remove all entries of the arm; how many there were, or CORRUPT."""
    place = arm_word(arm)
    count = words[place + A_ENTRIES]
    for _ in range(count):
        at = words[place + A_OLDEST]
        if at <= private[P_INDEX] or not has_memory(words, private, at, 2):
            return CORRUPT
        word = slot_of(words, private, at)
        if word < 0 or record_arm(words, at * UNIT_WORDS) != arm or remove(words, private, word) != 0:
            return CORRUPT
    return count  # type: ignore[no-any-return]


@compiled("boolean(int64[::1], int64[::1], int64, int64)", allocates=False)
def renew(words: Words, private: Words, arm: int, value: int) -> bool:
    """Set the word of the stored form that says when the entry's life began anew; whether the entry is there.

    The private array has the entry as :func:`serving.arena.reader.find` found it. Who reads it meanwhile finds it torn and looks
    again.
    """
    word = locate(words, private, arm)
    if word == 0:
        return False
    slot = load(words, word)
    if not points_inside(words, private, slot):
        return False
    record = slot_at(slot) * UNIT_WORDS
    count = R_PAYLOAD + (record_length(private, P_RECORD) + 7) // 8
    if words[record + R_VERSION] != private[P_RECORD + R_VERSION] or count < R_PAYLOAD + 4:
        return False
    private[P_PAYLOAD + 3] = value
    total = checksum(private, P_RECORD + 1, P_RECORD + R_LINKS, P_RECORD + count, private[P_EPOCH])
    store(words, record + R_PAYLOAD + 3, value)
    store(words, record + R_SUM, total)
    return True


@compiled("int64(int64[::1], int64[::1], int64, boolean)", allocates=False)
def revoke(words: Words, private: Words, arm: int, everything: bool) -> int:
    """Withdraw one entry or all of an arm from readers without the lease; how many. The next writer has to repair the arena."""
    count = 0
    if not everything:
        word = locate(words, private, arm)
        while word != 0 and count == 0:
            # Another slot by now: a writer has put another entry there, or a new one of this key, which has to go as well.
            if replace(words, word, private[P_SLOT], 0):
                count = 1
            else:
                word = locate(words, private, arm)
    else:
        for bucket in range(private[P_BUCKETS]):
            base = bucket_word(private, bucket)
            for number in range(1, SLOTS + 1):
                slot = load(words, base + number)
                if slot == 0 or not points_inside(words, private, slot) or record_arm(words, slot_at(slot) * UNIT_WORDS) != arm:
                    continue
                if replace(words, base + number, slot, 0):
                    count += 1
    if count:
        store(words, H_DIRTY, 1)
    return count
