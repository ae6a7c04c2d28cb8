"""The memory tier as the gateway's arena keeps it (:mod:`serving.arena.eviction`): CLOCK, entry by entry what that does.

Entries stand in a queue in the order in which they came. The oldest goes, unless it was used since it came or was spared: then it
counts as unused again and stands behind the newest. Room is made before an entry comes, which so is never asked itself; one that
is put again comes as a new one. The queue is a ring of keys: an entry that went otherwise, or came again, leaves a place behind
that is skipped when it is met.
"""

from __future__ import annotations

from envs.simulator.entries import drop
from envs.simulator.state import (
    ALONE,
    EVICTIONS,
    MEMORY_BUDGET,
    MEMORY_BYTES,
    MEMORY_ENTRIES,
    QUEUE_HEAD,
    QUEUE_TAIL,
    USED,
    Ints,
    Places,
    Records,
    State,
)
from serving.compiled import compiled


@compiled(allocates=False)
def close_ranks(records: Records, queue: Places, ints: Ints, into: Places) -> None:
    """Write the places of the queue that are still valid into another ring (or the same), without gaps."""
    mask, to = len(queue) - 1, len(into) - 1
    first = ints[QUEUE_TAIL] if len(queue) == len(into) else 0
    head = first
    for counter in range(ints[QUEUE_TAIL], ints[QUEUE_HEAD]):
        place = counter & mask
        key = queue[place]
        record = records[key]
        if record.queued == place and record.resident:
            into[head & to] = key
            record.queued = head & to
            head += 1
    ints[QUEUE_TAIL], ints[QUEUE_HEAD] = first, head


@compiled(allocates=False)
def enqueue(records: Records, queue: Places, ints: Ints, key: int) -> None:
    """Put the entry behind the newest."""
    if ints[QUEUE_HEAD] - ints[QUEUE_TAIL] == len(queue):
        close_ranks(records, queue, ints, queue)
    place = ints[QUEUE_HEAD] & (len(queue) - 1)
    queue[place] = key
    records[key].queued = place
    ints[QUEUE_HEAD] += 1


@compiled(allocates=False)
def next_to_go(records: Records, queue: Places, ints: Ints) -> int:
    """Take the entry that has to go out of the queue, which has some, and return its key."""
    mask = len(queue) - 1
    while True:
        place = ints[QUEUE_TAIL] & mask
        ints[QUEUE_TAIL] += 1
        key: int = queue[place]
        record = records[key]
        if record.queued == place and record.resident:
            if record.resident != USED:
                return key
            record.resident = 1
            enqueue(records, queue, ints, key)


@compiled(allocates=False)
def make_room(state: State, size: int) -> int:
    """Evict until an entry of so many bytes, which the budget has room for, fits; return how many entries the cache has lost."""
    ints, queue, records = state.ints, state.queue, state.records
    most, alone = state.params[MEMORY_BUDGET] - size, state.params[ALONE] > 0.0
    lost = 0
    while ints[MEMORY_BYTES] > most:
        key = next_to_go(records, queue, ints)
        if alone:
            drop(state, key)
            lost += 1
        else:
            record = records[key]
            record.resident = 0
            ints[MEMORY_BYTES] -= record.held
            ints[MEMORY_ENTRIES] -= 1
    ints[EVICTIONS] += lost
    return lost
