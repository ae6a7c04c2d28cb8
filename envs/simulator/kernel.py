"""The compiled core of the simulator: one arm's tiers, hot set and upstream queue, request by request.

Recency is a log, not a list. Every access appends its key to a ring and notes the place in the key's record; an entry of the ring
whose key has moved on since is skipped when it is met. The least recently used entry is the first one from the tail that is still
in place, so that an access touches one record and appends to memory that is written in order, where a linked list would touch
three records far apart. Each place of the ring is passed once, so eviction costs O(1) amortised. The memory tier's entries are a
part of the store's. If it is LRU it follows the same accesses with a smaller budget, in the same order, and needs only a tail of
its own; if it is CLOCK it has a queue of its own (:mod:`envs.simulator.clock`), which without a store decides what the cache has
at all.

The hot set is counted when a warm-up round asks for it, from the requests since the last one: a cache that is not warmed does not
pay for it.
"""

from __future__ import annotations

import math

import numpy as np

from envs.simulator.clock import enqueue, make_room, next_to_go
from envs.simulator.entries import drop, join_group, leave_group
from envs.simulator.hot_set import count_hot
from envs.simulator.state import (
    ALL_BYTES,
    ALONE,
    ASKED_INPUT,
    ASKED_OUTPUT,
    ASKED_SIZE,
    BROKEN,
    BUCKET,
    BUDGET,
    BURST,
    BUSY_SECONDS,
    CLOCK,
    CONTENTION,
    DOCUMENTS,
    EARLY,
    EVICTIONS,
    EXPIRATIONS,
    FLUSH,
    GROUP,
    HALF_LIFE,
    HEAD,
    HIT_BYTES,
    HOT_HALF_LIFE,
    HOT_KEYS,
    IN_FLIGHT,
    INPUT,
    JITTER,
    LANDMARK,
    MATCH,
    MEMORY_BUDGET,
    MEMORY_BYTES,
    MEMORY_ENTRIES,
    MEMORY_HITS,
    MEMORY_TAIL,
    MIN_SCORE,
    MISS_SECONDS,
    MISSES,
    NEXT_TICK,
    OLDER,
    OUTPUT,
    PENDING,
    PERIOD,
    POSITION,
    PREFIX,
    QUEUE_HEAD,
    QUEUE_TAIL,
    REFRESH_AHEAD,
    REFRESH_INPUT,
    REFRESH_OUTPUT,
    REFRESH_RATE,
    REFRESHES,
    STALE,
    STORE_BYTES,
    STORE_ENTRIES,
    STORE_HITS,
    TAIL,
    TPOT,
    TTFT,
    TTL,
    UPDATE,
    USED,
    VECTOR_HITS,
    WAIT_SECONDS,
    WARMUP,
    Columns,
    Floats,
    Places,
    State,
)  # fmt: skip
from envs.simulator.upstream import free_slot, occupy
from serving.compiled import compiled
from serving.ghost_kernel import mix64

_AHEAD = 8

_TOKEN = 1.0 - 1e-9
"""Refilling in many small steps must not fall short of a whole token by rounding."""

_LN2 = math.log(2.0)


@compiled(allocates=False)
def trim(state: State) -> int:
    """Evict what exceeds the budgets, as the gateway does when they change; return how many entries the cache has lost."""
    ints, params = state.ints, state.params
    lost = 0
    if params[ALONE] > 0.0:
        params[MEMORY_BUDGET] = params[BUDGET]
    if params[CLOCK] > 0.0:  # before the store: who goes depends on what is there
        lost = make_room(state, 0)
    lost += _trim_store(state)
    if ints[MEMORY_BYTES] > params[MEMORY_BUDGET]:
        _trim_memory(state)
    return lost


@compiled(allocates=False)
def _trim_store(state: State) -> int:
    """Evict from the store, oldest first, what exceeds its budget; return how many entries."""
    ints, params, ring, records = state.ints, state.params, state.ring, state.records
    mask = len(ring) - 1
    evicted = 0
    while ints[STORE_BYTES] > params[BUDGET]:
        place = ints[TAIL] & mask
        key = ring[place]
        ints[TAIL] += 1
        if records[key].place == place and records[key].held > 0:
            drop(state, key)
            evicted += 1
    ints[EVICTIONS] += evicted
    return evicted


@compiled(allocates=False)
def _trim_memory(state: State) -> None:
    """Evict from a memory tier that is LRU, oldest first, what exceeds its budget."""
    ints, params, ring, records = state.ints, state.params, state.ring, state.records
    mask = len(ring) - 1
    ints[MEMORY_TAIL] = max(ints[MEMORY_TAIL], ints[TAIL])
    while ints[MEMORY_BYTES] > params[MEMORY_BUDGET]:
        place = ints[MEMORY_TAIL] & mask
        record = records[ring[place]]
        ints[MEMORY_TAIL] += 1
        if record.place == place and record.resident:
            record.resident = 0
            ints[MEMORY_BYTES] -= record.held
            ints[MEMORY_ENTRIES] -= 1


@compiled(allocates=False)
def compact(state: State, into: Places) -> None:
    """Write the places of the ring that are still valid into another ring (or the same), without gaps."""
    ints, ring, records = state.ints, state.ring, state.records
    mask, to = len(ring) - 1, len(into) - 1
    head = memory_tail = 0
    first = ints[TAIL] if len(ring) == len(into) else 0
    head = memory_tail = first
    for counter in range(ints[TAIL], ints[HEAD]):
        if counter == ints[MEMORY_TAIL]:
            memory_tail = head
        place = counter & mask
        key = ring[place]
        record = records[key]
        if record.place == place and record.held > 0:
            into[head & to] = key
            record.place = head & to
            head += 1
    if ints[MEMORY_TAIL] == ints[HEAD]:
        memory_tail = head
    ints[TAIL], ints[HEAD], ints[MEMORY_TAIL] = first, head, memory_tail


@compiled(allocates=False)
def _touch(state: State, key: int) -> None:
    """Make the entry the most recently used."""
    ints, ring = state.ints, state.ring
    if ints[HEAD] - ints[TAIL] == len(ring):
        compact(state, ring)
    place = ints[HEAD] & (len(ring) - 1)
    ring[place] = key
    state.records[key].place = place
    ints[HEAD] += 1


@compiled(allocates=False)
def _promote(state: State, key: int) -> None:
    """Put an entry of the cache that is not resident into the memory tier, if that has room for it at all."""
    record, ints, params = state.records[key], state.ints, state.params
    if record.held <= params[MEMORY_BUDGET]:
        if params[CLOCK] > 0.0:
            make_room(state, record.held)
            enqueue(state.records, state.queue, ints, key)
        record.resident = 1
        ints[MEMORY_BYTES] += record.held
        ints[MEMORY_ENTRIES] += 1
        if ints[MEMORY_BYTES] > params[MEMORY_BUDGET]:
            _trim_memory(state)


@compiled(allocates=False)
def _put(state: State, key: int, size: int, group: int, now: float) -> None:
    """Store an answer, first in the store, then in memory."""
    drop(state, key)
    record = state.records[key]
    if size <= state.params[BUDGET]:
        if state.params[ALONE] > 0.0 and state.params[CLOCK] > 0.0:
            make_room(state, size)  # the memory tier decides, and the store then has room
        _touch(state, key)
        record.written = now
        record.held = size
        state.ints[STORE_BYTES] += size
        state.ints[STORE_ENTRIES] += 1
        if state.params[MATCH] > 0.0:
            if group:
                join_group(state, key, group)
            else:
                state.kin[key, GROUP] = 0
        _trim_store(state)
        _promote(state, key)


@compiled(allocates=False)
def _call(state: State, now: float, output_tokens: int, until: float) -> float:
    """Send one request upstream; return its latency. Calls are made in order of time, so the queue is first come first served."""
    busy, params = state.busy, state.params
    start, beside = free_slot(busy, state.ints, now)
    load = params[CONTENTION] * beside / len(busy)
    finish = start + params[TTFT] + output_tokens * params[TPOT] * (1.0 + load)
    occupy(busy, state.ints, finish)
    if start < until:
        state.floats[BUSY_SECONDS] += min(finish, until) - start
    else:
        state.starts[state.ints[PENDING]] = start
        state.ints[PENDING] += 1
    state.floats[WAIT_SECONDS] += min(start, until) - now
    latency: float = finish - now
    return latency


@compiled(allocates=False)
def _first_free(until: Floats) -> int:
    """Return which of some slots is free first."""
    first = 0
    for slot in range(1, len(until)):
        if until[slot] < until[first]:
            first = slot
    return first


@compiled(allocates=False)
def _tick(state: State, now: float, until: float) -> bool:
    """One round of warm-up: refresh what is planned and not live, best first, while the token bucket lasts.

    Returns:
        Whether no key is hot enough to be planned: nor will one be before the next request.
    """
    ints, floats, params, asked, refreshing = state.ints, state.floats, state.params, state.asked, state.refreshing
    floats[BUCKET] = min(params[BURST], floats[BUCKET] + params[REFRESH_RATE] * params[PERIOD])
    if floats[BUCKET] < _TOKEN or refreshing[_first_free(refreshing)] > now:
        return False
    decay = 2.0 ** (-(now - floats[LANDMARK]) / params[HOT_HALF_LIFE])
    low, high = 0, ints[HOT_KEYS]
    while low < high:
        middle = (low + high) // 2
        if state.weight[middle] * decay >= params[MIN_SCORE]:
            low = middle + 1
        else:
            high = middle
    # What is live is asked once for the whole plan, before anything is refreshed, as the gateway does: a planned entry that a
    # refresh of this round evicts waits for the next round.
    planned = math.ceil(params[WARMUP] * low)
    due, most, found = state.changed, min(planned, int(floats[BUCKET] + 1.0)), 0
    for place in range(planned):
        if found == most:
            break
        key = state.hot[place]
        record = state.records[key]
        life = params[TTL] * (1.0 - params[JITTER] * record.unit) * (1.0 - params[REFRESH_AHEAD])
        if record.held == 0 or now - record.written > life:
            due[found] = key
            found += 1
    for place in range(found):
        key, free = due[place], _first_free(refreshing)
        if floats[BUCKET] < _TOKEN or refreshing[free] > now:
            return False
        floats[BUCKET] -= 1.0
        ints[REFRESHES] += 1
        ints[REFRESH_INPUT] += asked[key, ASKED_INPUT]
        ints[REFRESH_OUTPUT] += asked[key, ASKED_OUTPUT]
        refreshing[free] = now + _call(state, now, asked[key, ASKED_OUTPUT], until)
        group = state.kin[key, GROUP] if params[MATCH] > 0.0 else 0
        _put(state, key, asked[key, ASKED_SIZE], group, now)
    return low == 0


@compiled(allocates=False)
def _relative(state: State, columns: Columns, key: int, row: int, now: float) -> int:
    """Return a live entry of the request's group, the one written last, if this request is among those that one answers; or 0."""
    group = columns.group[row]
    if group == 0:
        return 0
    # A number in 0..1 that is the request's own, whatever the cache holds.
    drawn = mix64(state.names[key] ^ np.uint64(np.int64(now * 1e6))) / 2.0**64
    if drawn >= state.params[MATCH]:
        return 0
    other: int = state.newest[group]
    while other != 0:
        record = state.records[other]
        if other != key and now - record.written <= state.params[TTL] * (1.0 - state.params[JITTER] * record.unit):
            return other
        other = state.kin[other, OLDER]
    return 0


@compiled(allocates=False)
def _serve_relative(state: State, columns: Columns, key: int, row: int, now: float) -> None:
    """Answer a request by the entry of another key."""
    ints, floats, params = state.ints, state.floats, state.params
    record = state.records[key]
    _touch(state, key)
    if record.resident:
        record.resident = USED
    else:
        _promote(state, key)
    ints[VECTOR_HITS] += 1
    ints[HIT_BYTES] += record.held
    if params[DOCUMENTS] > 0.0 and record.written < state.updated[columns.document[row]]:
        floats[STALE] += 1.0
    elif params[HALF_LIFE] < math.inf:
        floats[STALE] += 1.0 - math.exp(-_LN2 * max(now - record.written, 0.0) / params[HALF_LIFE])


@compiled(allocates=False)
def _serve(state: State, columns: Columns, missed: int, horizon: float, until: float) -> int:
    """Answer the requests that arrive before ``horizon``; return how many of the window have missed.

    Everything that most requests need is written out here: a call that takes ``state`` along costs more than the request.
    """
    records, ring, ints, floats, params = state.records, state.ring, state.ints, state.floats, state.params
    updated, busy, starts, misses = state.updated, state.busy, state.starts, state.misses
    times, keys, sizes = columns.time, columns.key, columns.size
    input_tokens, output_tokens, chain, document = columns.input_tokens, columns.output_tokens, columns.chain, columns.document
    budget, memory_budget = np.int64(params[BUDGET]), np.int64(params[MEMORY_BUDGET])
    ttl, jitter, half_life, match = params[TTL], params[JITTER], params[HALF_LIFE], params[MATCH]
    ttft, tpot, contention = params[TTFT], params[TPOT], params[CONTENTION] / len(busy)
    prefix, documents, aging = params[PREFIX] > 0.0, params[DOCUMENTS] > 0.0, half_life < math.inf
    clock, alone, queue = params[CLOCK] > 0.0, params[ALONE] > 0.0, state.queue
    # Where the memory tier decides who goes, the store never does.
    store_budget = np.iinfo(np.int64).max if clock and alone else budget
    mask = len(ring) - 1
    row, count, early = ints[POSITION], len(times), 0
    stale = floats[STALE]
    while row < count and times[row] < horizon:
        now, key, size = times[row], keys[row], sizes[row]
        # Read early what will be needed soon: memory answers while the requests between are served.
        early += records[keys[min(row + _AHEAD, count - 1)]].held
        record = records[key]
        ints[ALL_BYTES] += size
        held = record.held
        hit = False
        if not (prefix and chain[row] > 0 and ints[BROKEN] != 0):
            if held > 0:
                hit = now - record.written <= ttl * (1.0 - jitter * record.unit)
                ints[EXPIRATIONS] += not hit
            if not hit and match > 0.0:
                other = _relative(state, columns, key, row, now)
                if other != 0:
                    floats[STALE] = stale
                    _serve_relative(state, columns, other, row, now)
                    stale = floats[STALE]
                    ints[BROKEN] = 0
                    row += 1
                    continue
        if ints[HEAD] - ints[TAIL] > mask:
            compact(state, ring)
        if hit:
            if documents and record.written < updated[document[row]]:
                stale += 1.0
            elif aging:
                stale += 1.0 - math.exp(-_LN2 * max(now - record.written, 0.0) / half_life)
            ints[HIT_BYTES] += held
            if record.resident:
                record.resident = USED
                ints[MEMORY_HITS] += 1
            else:
                ints[STORE_HITS] += 1
        else:
            # Sent upstream, first come first served: calls are made in order of time.
            tokens = output_tokens[row]
            start, beside = free_slot(busy, ints, now)
            finish = start + ttft + tokens * tpot * (1.0 + contention * beside)
            occupy(busy, ints, finish)
            if start < until:
                floats[BUSY_SECONDS] += min(finish, until) - start
            else:
                starts[ints[PENDING]] = start
                ints[PENDING] += 1
            floats[WAIT_SECONDS] += min(start, until) - now
            misses[missed] = finish - now
            missed += 1
            ints[INPUT] += input_tokens[row]
            ints[OUTPUT] += tokens
            floats[MISS_SECONDS] += finish - now
            # Stored at once, in place of what has expired.
            if held > 0:
                ints[STORE_BYTES] -= held
                ints[STORE_ENTRIES] -= 1
                if record.resident:
                    ints[MEMORY_BYTES] -= held
                    ints[MEMORY_ENTRIES] -= 1
                    record.resident = 0
                record.held = 0
                if match > 0.0 and state.kin[key, GROUP]:
                    leave_group(state, key)
            held = 0
            if size <= budget:
                record.written = now
                record.held = held = size
                ints[STORE_BYTES] += size
                ints[STORE_ENTRIES] += 1
                if match > 0.0:
                    join_group(state, key, columns.group[row])
        ints[BROKEN] = not hit
        if held > 0:
            place = ints[HEAD] & mask
            ring[place] = key
            record.place = place
            ints[HEAD] += 1
            # As in :func:`_trim_store`.
            while ints[STORE_BYTES] > store_budget:
                place = ints[TAIL] & mask
                ints[TAIL] += 1
                other = ring[place]
                oldest = records[other]
                if oldest.place == place and oldest.held > 0:
                    ints[STORE_BYTES] -= oldest.held
                    ints[STORE_ENTRIES] -= 1
                    ints[EVICTIONS] += 1
                    if oldest.resident:
                        ints[MEMORY_BYTES] -= oldest.held
                        ints[MEMORY_ENTRIES] -= 1
                        oldest.resident = 0
                    oldest.held = 0
                    if match > 0.0 and state.kin[other, GROUP]:
                        leave_group(state, other)
            if not record.resident and held <= memory_budget:
                if clock:
                    # As in :func:`envs.simulator.clock.make_room`.
                    while ints[MEMORY_BYTES] + held > memory_budget:
                        other = next_to_go(records, queue, ints)
                        oldest = records[other]
                        ints[MEMORY_BYTES] -= oldest.held
                        ints[MEMORY_ENTRIES] -= 1
                        oldest.resident = 0
                        if alone:
                            ints[STORE_BYTES] -= oldest.held
                            ints[STORE_ENTRIES] -= 1
                            ints[EVICTIONS] += 1
                            oldest.held = 0
                            if match > 0.0 and state.kin[other, GROUP]:
                                leave_group(state, other)
                    enqueue(records, queue, ints, key)
                record.resident = 1
                ints[MEMORY_BYTES] += held
                ints[MEMORY_ENTRIES] += 1
            if ints[MEMORY_BYTES] > memory_budget:
                ints[MEMORY_TAIL] = max(ints[MEMORY_TAIL], ints[TAIL])
                while ints[MEMORY_BYTES] > memory_budget:
                    place = ints[MEMORY_TAIL] & mask
                    ints[MEMORY_TAIL] += 1
                    oldest = records[ring[place]]
                    if oldest.place == place and oldest.resident:
                        oldest.resident = 0
                        ints[MEMORY_BYTES] -= oldest.held
                        ints[MEMORY_ENTRIES] -= 1
        row += 1
    ints[POSITION] = row
    ints[EARLY] = early
    floats[STALE] = stale
    return missed


@compiled(allocates=False)
def empty(state: State) -> int:
    """Remove every entry of both tiers; return how many the store had. The hot set stays."""
    ints, ring = state.ints, state.ring
    count: int = ints[STORE_ENTRIES]
    for counter in range(ints[TAIL], ints[HEAD]):
        drop(state, ring[counter & (len(ring) - 1)])
    ints[TAIL] = ints[MEMORY_TAIL] = ints[HEAD]
    ints[QUEUE_TAIL] = ints[QUEUE_HEAD]
    return count


@compiled(allocates=False)
def _skip_rounds(state: State, until: float) -> None:
    """Let the token bucket fill in the rounds before ``until`` in which nothing is refreshed."""
    floats, params = state.floats, state.params
    if floats[NEXT_TICK] < until:
        rounds = max(math.ceil((until - floats[NEXT_TICK]) / params[PERIOD]), 1)
        floats[BUCKET] = min(params[BURST], floats[BUCKET] + rounds * params[REFRESH_RATE] * params[PERIOD])
        floats[NEXT_TICK] += rounds * params[PERIOD]


@compiled()
def room(state: State, columns: Columns, until: float) -> tuple[int, int]:
    """Return the room that :func:`run` needs in ``starts`` and in ``misses`` at most."""
    ints = state.ints
    requests = max(np.searchsorted(columns.time, until, side="left") - ints[POSITION], 0)
    # Each request may come to wait, and as many refreshes as may be under way: one that waits beyond the window keeps its place.
    return ints[PENDING] + requests + len(state.refreshing), requests


@compiled(allocates=False)
def run(state: State, columns: Columns, begin: float, until: float) -> None:
    """Answer the requests that arrive before ``until``; make the warm-up rounds, updates and flushes that are due before it.

    At equal times a flush comes first, then updates, the warm-up round, and requests last.

    Args:
        state: The arm.
        columns: The trace.
        begin: The window's begin, seconds.
        until: The window's end, seconds.
    """
    ints, floats, params, starts = state.ints, state.floats, state.params, state.starts
    waiting = ints[PENDING]
    ints[PENDING] = 0
    for place in range(waiting):
        floats[WAIT_SECONDS] += min(starts[place], until) - begin
        if starts[place] >= until:
            starts[ints[PENDING]] = starts[place]
            ints[PENDING] += 1
    for slot in range(ints[IN_FLIGHT]):
        # A slot that is busy beyond the last window is so without a gap: whatever waits for it starts when it becomes free.
        floats[BUSY_SECONDS] += max(0.0, min(state.busy[slot], until) - begin)

    missed = 0
    while True:
        flush = columns.flush_time[ints[FLUSH]] if ints[FLUSH] < len(columns.flush_time) else math.inf
        update = columns.update_time[ints[UPDATE]] if ints[UPDATE] < len(columns.update_time) else math.inf
        tick = floats[NEXT_TICK] if params[WARMUP] > 0.0 else math.inf
        horizon = min(min(flush, update), min(tick, until))
        missed = _serve(state, columns, missed, horizon, until)
        if horizon >= until:
            break
        if flush <= horizon:
            empty(state)
            ints[FLUSH] += 1
        elif update <= horizon:
            state.updated[columns.update_document[ints[UPDATE]]] = update
            ints[UPDATE] += 1
        else:
            count_hot(state, columns)
            cold = _tick(state, tick, until)
            floats[NEXT_TICK] += params[PERIOD]
            if cold:
                # Idle hours have no rounds that could matter.
                row = ints[POSITION]
                _skip_rounds(state, min(columns.time[row] if row < len(columns.time) else math.inf, until))
    ints[MISSES] = missed
    if params[WARMUP] <= 0.0:
        _skip_rounds(state, until)
