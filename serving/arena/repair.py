"""Rebuilding what a writer left half done: free room, queues, counts, all from the index, which alone says what is there."""

from __future__ import annotations

import numpy as np

from serving.arena.atomic import load, store
from serving.arena.eviction import arm_word, enqueue
from serving.arena.layout import (
    A_BYTES,
    A_ENTRIES,
    A_NEWEST,
    A_OLDEST,
    A_USED_BY,
    ARMS,
    FREE_CLASSES,
    H_DIRTY,
    H_FREE,
    H_RESERVED,
    H_SEQUENCE,
    H_TOP,
    P_BUCKETS,
    P_EDGES,
    P_UNITS,
    P_VALUES,
    R_KEY,
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
from serving.arena.reader import bucket_word, points_inside
from serving.arena.space import put_block
from serving.compiled import compiled


@compiled("boolean(int64[::1], int64[::1], int64, int64)", allocates=False)
def _belongs(words: Words, private: Words, bucket: int, number: int) -> bool:
    """Whether the slot points to a record that is its own, by all but the checksum, which every reader looks at itself."""
    slot = words[bucket_word(private, bucket) + number]
    if not points_inside(private, slot):
        return False
    at, units = slot_at(slot), slot_units(slot)
    behind = bucket_word(private, bucket) // UNIT_WORDS + 1
    if at < private[P_VALUES]:
        if at != behind:
            return False
    elif at + units > words[H_RESERVED]:
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
    tag = slot_tag(words[bucket_word(private, bucket) + number])
    home = home_bucket(digest(words[record + R_KEY], arm), private[P_BUCKETS])
    for turn in range(2):
        if turn == 1 and home == bucket:
            break
        where = bucket if turn == 0 else home
        for earlier in range(1, number if turn == 0 else SLOTS + 1):
            slot = words[bucket_word(private, where) + earlier]
            if slot == 0 or slot_tag(slot) != tag or not _belongs(words, private, where, earlier):
                continue
            other = slot_at(slot) * UNIT_WORDS
            same = record_arm(words, other) == arm
            for part in range(4):
                same = same and words[other + R_KEY + part] == words[record + R_KEY + part]
            if same:
                return True
    return False


@compiled("int64(int64[::1], int64[::1])")
def rebuild(words: Words, private: Words) -> int:
    """Rebuild everything but the records: slots that point nowhere are emptied, room that nobody has is free again.

    Under the lease. O(buckets + entries log entries); it looks at one or two cache lines of each entry.

    Returns:
        Entries that are there.
    """
    limit = min(max(words[H_RESERVED], private[P_VALUES]), private[P_UNITS])
    words[H_RESERVED] = limit
    taken = np.zeros(private[P_UNITS] // 64 + 1, np.int64)
    count = 0
    for bucket in range(private[P_BUCKETS]):
        base = bucket_word(private, bucket)
        store(words, base, words[base] & 0xFE)
        for number in range(1, SLOTS + 1):
            if words[base + number] != 0:
                count += 1
    starts = np.empty(count, np.int64)
    versions = np.empty(count, np.int64)
    count = 0
    for bucket in range(private[P_BUCKETS]):
        base = bucket_word(private, bucket)
        for number in range(1, SLOTS + 1):
            slot = words[base + number]
            if slot == 0:
                continue
            keep = _belongs(words, private, bucket, number)
            at, units = slot_at(slot), slot_units(slot)
            record = at * UNIT_WORDS
            if keep and _twice(words, private, bucket, number, record):
                keep = False
            if keep:
                for unit in range(at, at + units):
                    if (taken[unit >> 6] >> (unit & 63)) & 1:
                        keep = False
            if not keep:
                store(words, base + number, 0)
                continue
            for unit in range(at, at + units):
                taken[unit >> 6] |= 1 << (unit & 63)
            home = home_bucket(digest(words[record + R_KEY], record_arm(words, record)), private[P_BUCKETS])
            if home != bucket:
                first = bucket_word(private, home)
                store(words, first, load(words, first) + (1 << 8))
            starts[count] = at
            versions[count] = words[record + R_VERSION]
            count += 1
    for kind in range(FREE_CLASSES):
        words[H_FREE + kind] = 0
    for word in range(private[P_EDGES], private[P_EDGES] + private[P_UNITS] // 64):
        words[word] = 0
    for arm in range(ARMS):
        place = arm_word(arm)
        words[place + A_BYTES] = words[place + A_ENTRIES] = words[place + A_OLDEST] = words[place + A_NEWEST] = 0
    # The free room between what is taken; the file behind the last record counts as never used.
    ordered = np.sort(starts[:count])
    free = private[P_VALUES]
    words[H_TOP] = limit
    for index in range(count):
        at = ordered[index]
        if at < private[P_VALUES]:
            continue
        if at > free:
            put_block(words, private, free, at - free)
        free = at + (R_PAYLOAD * 8 + record_length(words, at * UNIT_WORDS) + 63) // 64
    words[H_TOP] = free
    for index in np.argsort(versions[:count]):
        at = starts[index]
        arm = record_arm(words, at * UNIT_WORDS)
        place = arm_word(arm)
        enqueue(words, private, arm, at)
        words[place + A_BYTES] += record_length(words, at * UNIT_WORDS)
        words[place + A_ENTRIES] += 1
        words[H_SEQUENCE] = max(words[H_SEQUENCE], versions[index])
    store(words, H_DIRTY, 0)
    return count
