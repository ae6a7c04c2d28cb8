"""Rebuilding what a writer left half done: free room, queues, counts, all from the index, which alone says what is there."""

from __future__ import annotations

import numpy as np

from serving.arena.atomic import load, store
from serving.arena.eviction import arm_word
from serving.arena.layout import (
    A_BYTES,
    A_ENTRIES,
    A_NEWEST,
    A_OLDEST,
    A_USED_BY,
    ARMS,
    BUCKET_UNITS,
    FREE_CLASSES,
    H_DIRTY,
    H_FREE,
    H_RESERVED,
    H_SEQUENCE,
    H_TOP,
    LOW,
    P_BUCKETS,
    P_EDGES,
    P_UNITS,
    P_VALUES,
    R_KEY,
    R_LENGTH,
    R_LINKS,
    R_PAYLOAD,
    R_SLOT,
    R_VERSION,
    SLOTS,
    UNIT_WORDS,
    Words,
    digest,
    digest_tag,
    home_bucket,
    other_bucket,
    record_arm,
    record_length,
    slot_at,
    slot_tag,
    slot_units,
)
from serving.arena.reader import bucket_word, has_memory, points_inside
from serving.arena.space import put_block
from serving.compiled import compiled


@compiled("boolean(int64[::1], int64[::1], int64, int64, int64)", allocates=False)
def _belongs(words: Words, private: Words, slot: int, bucket: int, number: int) -> bool:
    """Whether the slot points to a record that is its own, by all but the checksum, which every reader looks at itself."""
    if not points_inside(words, private, slot):
        return False
    at, units = slot_at(slot), slot_units(slot)
    behind = bucket_word(private, bucket) // UNIT_WORDS + 1
    if at < private[P_VALUES] and at != behind:
        return False
    record = at * UNIT_WORDS
    arm = record_arm(words, record)
    if arm >= ARMS or words[arm_word(arm) + A_USED_BY] != 1 or words[record + R_SLOT] != bucket * 8 + number:
        return False
    if (R_PAYLOAD * 8 + record_length(words, record) + 63) // 64 != units:
        return False
    value = digest(words[record + R_KEY], arm)
    home = home_bucket(value, private[P_BUCKETS])
    return slot_tag(slot) == digest_tag(value) and (bucket == home or bucket == other_bucket(value, private[P_BUCKETS]))


@compiled("boolean(int64[::1], int64[::1], int64, int64, int64)", allocates=False)
def _twice(words: Words, private: Words, bucket: int, number: int, record: int) -> bool:
    """Whether the record's key is in an earlier slot of its bucket, or in its first bucket while this is the other one."""
    arm = record_arm(words, record)
    value = digest(words[record + R_KEY], arm)
    home = home_bucket(value, private[P_BUCKETS])
    for turn in range(2):
        if turn == 1 and home == bucket:
            break
        where = bucket if turn == 0 else home
        for earlier in range(1, number if turn == 0 else SLOTS + 1):
            slot = load(words, bucket_word(private, where) + earlier)
            if slot_tag(slot) != digest_tag(value) or not _belongs(words, private, slot, where, earlier):
                continue
            other = slot_at(slot) * UNIT_WORDS
            same = record_arm(words, other) == arm
            for part in range(4):
                same = same and words[other + R_KEY + part] == words[record + R_KEY + part]
            if same:
                return True
    return False


def rebuild(words: Words, private: Words) -> int:
    """Rebuild everything but the records: slots that point nowhere are emptied, room that nobody has is free again.

    Under the lease. O(buckets + entries log entries). It goes through the index, and then to the records in the order in which
    they lie, one cache line of each: in the order of the index it would take three times as long.

    Returns:
        Entries that are there.
    """
    places = np.empty(_clear(words, private), np.int64)
    slots = np.empty_like(places)
    count = _listed(words, private, places, slots)
    places, slots = places[:count], slots[:count]
    order = np.argsort(slots & LOW)  # NumPy sorts many times faster than what numba compiles
    starts, versions, lengths = np.empty_like(places), np.empty_like(places), np.empty_like(places)
    count = _gather(words, private, places[order], slots[order], starts, versions, lengths)
    starts, versions, lengths = starts[:count], versions[:count], lengths[:count]
    _free_between(words, private, starts, lengths)
    _relink(words, private, starts, lengths, np.argsort(versions))
    if count:
        words[H_SEQUENCE] = max(words[H_SEQUENCE], versions.max())
    words[H_DIRTY] = 0
    return count


@compiled("int64(int64[::1], int64[::1])", allocates=False)
def _clear(words: Words, private: Words) -> int:
    """Forget what is counted in the buckets, but not what was used; return how many slots are taken."""
    words[H_RESERVED] = min(max(words[H_RESERVED], private[P_VALUES]), private[P_UNITS])
    count = 0
    for bucket in range(private[P_BUCKETS]):
        base = bucket_word(private, bucket)
        if words[base] & ~0xFE:
            store(words, base, words[base] & 0xFE)
        for number in range(1, SLOTS + 1):
            if words[base + number] != 0:
                count += 1
    return count


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1])", allocates=False)
def _listed(words: Words, private: Words, places: Words, slots: Words) -> int:
    """List the slots: twice the word where each is, one more if an earlier one of its bucket has its tag, and what it is."""
    count = 0
    for bucket in range(private[P_BUCKETS]):
        base = bucket_word(private, bucket)
        for number in range(1, SLOTS + 1):
            slot = load(words, base + number)
            if slot == 0:
                continue
            if count == len(places):  # a second writer, there by mistake, has filled more since they were counted
                store(words, base + number, 0)
                continue
            alike = 0
            for earlier in range(1, number):
                if words[base + earlier] != 0 and slot_tag(words[base + earlier]) == slot_tag(slot):
                    alike = 1
            places[count], slots[count] = 2 * (base + number) + alike, slot
            count += 1
    return count


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])", allocates=False)
def _gather(words: Words, private: Words, places: Words, slots: Words, starts: Words, versions: Words, lengths: Words) -> int:
    """Empty the slots that are not right; return how many are, and their records' first units, versions and words of length.

    The slots are sorted by where they point to.
    """
    count = end = 0
    for index in range(len(places)):
        place, alike, slot = places[index] >> 1, places[index] & 1, slots[index]
        offset = place - bucket_word(private, 0)
        bucket, number = offset // (BUCKET_UNITS * UNIT_WORDS), offset % (BUCKET_UNITS * UNIT_WORDS)
        at = slot_at(slot)
        record = at * UNIT_WORDS
        keep = at >= end and _belongs(words, private, slot, bucket, number)
        home = bucket
        if keep:
            home = home_bucket(digest(words[record + R_KEY], record_arm(words, record)), private[P_BUCKETS])
            if (alike or home != bucket) and _twice(words, private, bucket, number, record):
                keep = False
        if not keep:
            store(words, place, 0)
            continue
        if home != bucket:
            first = bucket_word(private, home)
            store(words, first, load(words, first) + (1 << 8))
        end = at + slot_units(slot)
        starts[count] = at
        versions[count] = words[record + R_VERSION]
        lengths[count] = words[record + R_LENGTH]
        count += 1
    return count


@compiled("void(int64[::1], int64[::1], int64[::1], int64[::1])", allocates=False)
def _free_between(words: Words, private: Words, starts: Words, lengths: Words) -> None:
    """Make the free lists anew; the file behind the last record counts as never used. The starts are sorted."""
    for kind in range(FREE_CLASSES):
        words[H_FREE + kind] = 0
    for word in range(private[P_EDGES], private[P_EDGES] + private[P_UNITS] // 64):
        words[word] = 0
    free = private[P_VALUES]
    words[H_TOP] = words[H_RESERVED]
    for index in range(len(starts)):
        at = starts[index]
        if at < private[P_VALUES]:
            continue
        if at > free:
            put_block(words, private, free, at - free)
        free = max(free, at + (R_PAYLOAD * 8 + (lengths[index] & LOW) + 63) // 64)
    words[H_TOP] = min(free, private[P_UNITS])


@compiled("void(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])", allocates=False)
def _relink(words: Words, private: Words, starts: Words, lengths: Words, order: Words) -> None:
    """Make queues and accounts anew; ``order`` is that of the versions."""
    for arm in range(ARMS):
        place = arm_word(arm)
        words[place + A_BYTES] = words[place + A_ENTRIES] = words[place + A_OLDEST] = words[place + A_NEWEST] = 0
    for index in order:
        at, length = starts[index], lengths[index]
        if ((length >> 32) & 0xFF) >= ARMS:
            continue
        place = arm_word((length >> 32) & 0xFF)
        newest = words[place + A_NEWEST]
        words[at * UNIT_WORDS + R_LINKS] = newest
        if newest < 1 or not has_memory(words, private, newest, 2):
            words[place + A_OLDEST] = at
        else:
            words[newest * UNIT_WORDS + R_LINKS] |= at << 32
        words[place + A_NEWEST] = at
        words[place + A_BYTES] += length & LOW
        words[place + A_ENTRIES] += 1
