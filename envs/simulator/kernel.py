"""The compiled core of the simulator: one arm's tiers, hot set and upstream queue, request by request.

Keys are dense numbers from 1; 0 stands for "none".

Recency is a log, not a list. Every access appends its key to a ring and notes the place in the key's record; an entry of the ring
whose key has moved on since is skipped when it is met. The least recently used entry is the first one from the tail that is still
in place, so that an access touches one record and appends to memory that is written in order, where a linked list would touch
three records far apart. Each place of the ring is passed once, so eviction costs O(1) amortised. The memory tier follows the same
accesses with a smaller budget: its entries are a part of the store's, in the same order, and it needs only a tail of its own.

The hot set is counted when a warm-up round asks for it, from the requests since the last one: a cache that is not warmed does not
pay for it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from serving.ghost_kernel import mix64

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int32]
Names = npt.NDArray[np.uint64]
Records = Any
"""Arrays of :data:`RECORD`; numba reads their fields as attributes, which numpy's types do not know."""

RECORD = np.dtype(
    {
        "names": ["written", "unit", "held", "place", "resident"],
        "formats": [np.float64, np.float64, np.int32, np.int32, np.int32],
        "itemsize": 32,
    }
)
"""What is known of a key, half a cache line: when its entry was written, where in 0..1 its TTL jitter lies, bytes held in the
store (0: not there), its place in the ring, whether it is resident in the memory tier."""

# columns of ``asked``: what the key's last request was like; whether its weight has changed since the hot set was merged
ASKED_SIZE, ASKED_INPUT, ASKED_OUTPUT, CHANGED = range(4)
# columns of ``kin``: neighbours in the list of the group's entries, newest first; the group
NEWER, OLDER, GROUP = range(3)
# ``ints``: state, then the window's counters
(
    POSITION, HEAD, TAIL, MEMORY_TAIL, STORE_BYTES, STORE_ENTRIES, MEMORY_BYTES, MEMORY_ENTRIES, HOT_KEYS, HOT_ROW,
    PENDING, UPDATE, FLUSH, BROKEN,
    MEMORY_HITS, STORE_HITS, VECTOR_HITS, MISSES, EVICTIONS, EXPIRATIONS, INPUT, OUTPUT, REFRESH_INPUT, REFRESH_OUTPUT, REFRESHES,
    HIT_BYTES, ALL_BYTES, N_INTS,
) = range(28)  # fmt: skip
FIRST_COUNTER = MEMORY_HITS
# ``floats``: state, then the window's sums
(NEXT_TICK, BUCKET, LANDMARK, STALE, MISS_SECONDS, BUSY_SECONDS, WAIT_SECONDS, N_FLOATS) = range(8)
FIRST_SUM = STALE
# ``params``
(
    BUDGET, MEMORY_BUDGET, TTL, WARMUP, JITTER, HALF_LIFE, MEMORY_LATENCY, STORE_LATENCY, VECTOR_LATENCY, TTFT, TPOT, CONTENTION,
    HOT_CAPACITY, HOT_HALF_LIFE, MIN_SCORE, PERIOD, REFRESH_AHEAD, REFRESH_RATE, BURST, PREFIX, MATCH, DOCUMENTS, N_PARAMS,
) = range(23)  # fmt: skip
# what a window comes to: :func:`measure`
SIGNALS = (
    "requests", "qps", "hit_ratio", "memory", "redis", "vector", "p50", "p99", "latency_sum", "hit_latency", "miss_latency",
    "resident_bytes", "evictions", "expirations", "stale_hits", "input_tokens", "output_tokens", "refresh_input_tokens",
    "refresh_output_tokens", "refreshes", "upstream_running", "upstream_waiting", "gpu_cache_usage", "byte_hit_ratio",
)  # fmt: skip
"""Columns of what :func:`measure` fills in; ``memory``, ``redis`` and ``vector`` are hit ratios by tier."""

_REBASE_HALF_LIVES = 512
"""As in :mod:`serving.hotset`: weights are moved to a new landmark long before they overflow."""

_TOKEN = 1.0 - 1e-9
"""Refilling in many small steps must not fall short of a whole token by rounding."""

_LN2 = math.log(2.0)


class State(NamedTuple):
    """Everything that a simulator remembers, for K keys.

    Attributes:
        records: What is known of each key, :data:`RECORD`, (K + 1,).
        names: 64-bit name of each key, (K + 1,).
        ring: Keys in the order of their accesses, a power of two of at least ``2 * K`` places.
        kin: Lists of each group's entries by key, (K + 1, 3); (1, 3) where nothing is answered by meaning.
        newest: Newest entry of each group, (groups + 1,).
        updated: When each document changed last, seconds, (documents + 1,).
        asked: Size and tokens of each key's last request that the hot set has counted, and a mark of its own, (K + 1, 4).
        weight_of: Forward-decayed frequency by key, 0 for keys not in the hot set, (K + 1,).
        hot: Keys of the hot set by (weight descending, name ascending), (2 * capacity + 1,).
        weight: Weight of each of them, (2 * capacity + 1,).
        changed: Room for the keys whose weight has changed, likewise.
        gone: Room for the places in ``hot`` that they had, likewise.
        spare: Room for a copy of ``hot``.
        spare_weight: Room for a copy of ``weight``.
        busy: When each slot of the upstream becomes free, (slots,).
        refreshing: When each refresh under way ends, (refreshes_inflight,).
        ints: Whole numbers, (N_INTS,).
        floats: Other numbers, (N_FLOATS,).
        params: Knobs and settings, (N_PARAMS,).
    """

    records: Records
    names: Names
    ring: Places
    kin: Places
    newest: Places
    updated: Floats
    asked: Places
    weight_of: Floats
    hot: Places
    weight: Floats
    changed: Places
    gone: Places
    spare: Places
    spare_weight: Floats
    busy: Floats
    refreshing: Floats
    ints: Ints
    floats: Floats
    params: Floats


class Columns(NamedTuple):
    """A trace as the kernel reads it: N requests, U updates of documents, F flushes.

    Attributes:
        time: Arrival, seconds, (N,).
        key: Dense key from 1, (N,).
        size: Bytes of the entry, (N,).
        input_tokens: Prompt tokens, (N,).
        output_tokens: Completion tokens, (N,).
        chain: Place of a block in its request, (N,), or (0,) where no row depends on another.
        group: Dense group from 1, 0 for none, (N,), or (0,) where nothing is answered by meaning.
        document: Dense document from 1, 0 for none, (N,), or (0,) where no document changes.
        update_time: When documents change, seconds, (U,).
        update_document: Which ones, dense, (U,).
        flush_time: When the cache is emptied, seconds, (F,).
    """

    time: Floats
    key: Places
    size: Places
    input_tokens: Places
    output_tokens: Places
    chain: Places
    group: Places
    document: Places
    update_time: Floats
    update_document: Places
    flush_time: Floats


@njit(cache=True)
def _leave_group(state: State, key: int) -> None:
    kin = state.kin
    newer, older = kin[key, NEWER], kin[key, OLDER]
    if newer:
        kin[newer, OLDER] = older
    else:
        state.newest[kin[key, GROUP]] = older
    if older:
        kin[older, NEWER] = newer


@njit(cache=True)
def _join_group(state: State, key: int, group: int) -> None:
    kin, front = state.kin, state.newest[group]
    kin[key, NEWER], kin[key, OLDER], kin[key, GROUP] = 0, front, group
    if front:
        kin[front, NEWER] = key
    state.newest[group] = key


@njit(cache=True)
def _drop(state: State, key: int) -> None:
    """Remove the entry from both tiers."""
    record, ints = state.records[key], state.ints
    if record.held > 0:
        ints[STORE_BYTES] -= record.held
        ints[STORE_ENTRIES] -= 1
        if record.resident:
            ints[MEMORY_BYTES] -= record.held
            ints[MEMORY_ENTRIES] -= 1
            record.resident = 0
        record.held = 0
        if state.params[MATCH] > 0.0 and state.kin[key, GROUP]:
            _leave_group(state, key)


@njit(cache=True)
def trim(state: State) -> int:
    """Evict, oldest first, what exceeds the budgets; return how many the store lost."""
    ints, params, ring, records = state.ints, state.params, state.ring, state.records
    mask = len(ring) - 1
    evicted = 0
    while ints[STORE_BYTES] > params[BUDGET]:
        place = ints[TAIL] & mask
        key = ring[place]
        ints[TAIL] += 1
        if records[key].place == place and records[key].held > 0:
            _drop(state, key)
            evicted += 1
    ints[MEMORY_TAIL] = max(ints[MEMORY_TAIL], ints[TAIL])
    while ints[MEMORY_BYTES] > params[MEMORY_BUDGET]:
        place = ints[MEMORY_TAIL] & mask
        record = records[ring[place]]
        ints[MEMORY_TAIL] += 1
        if record.place == place and record.resident:
            record.resident = 0
            ints[MEMORY_BYTES] -= record.held
            ints[MEMORY_ENTRIES] -= 1
    ints[EVICTIONS] += evicted
    return evicted


@njit(cache=True)
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


@njit(cache=True)
def _touch(state: State, key: int) -> None:
    """Make the entry the most recently used."""
    ints, ring = state.ints, state.ring
    if ints[HEAD] - ints[TAIL] == len(ring):
        compact(state, ring)
    place = ints[HEAD] & (len(ring) - 1)
    ring[place] = key
    state.records[key].place = place
    ints[HEAD] += 1


@njit(cache=True)
def _promote(state: State, key: int) -> None:
    """Put the entry of the store into the memory tier too."""
    record = state.records[key]
    if record.held <= state.params[MEMORY_BUDGET]:
        record.resident = 1
        state.ints[MEMORY_BYTES] += record.held
        state.ints[MEMORY_ENTRIES] += 1


@njit(cache=True)
def _put(state: State, key: int, size: int, group: int, now: float) -> None:
    _drop(state, key)
    record = state.records[key]
    if size <= state.params[BUDGET]:
        _touch(state, key)
        record.written = now
        record.held = size
        state.ints[STORE_BYTES] += size
        state.ints[STORE_ENTRIES] += 1
        _promote(state, key)
        if state.params[MATCH] > 0.0:
            if group:
                _join_group(state, key, group)
            else:
                state.kin[key, GROUP] = 0
    if state.ints[STORE_BYTES] > state.params[BUDGET] or state.ints[MEMORY_BYTES] > state.params[MEMORY_BUDGET]:
        trim(state)


@njit(cache=True)
def _call(state: State, starts: Floats, now: float, output_tokens: int, until: float) -> float:
    """Send one request upstream; return its latency. Calls are made in order of time, so the queue is first come first served."""
    busy = state.busy
    slot = 0
    for other in range(1, len(busy)):
        if busy[other] < busy[slot]:
            slot = other
    start = max(now, busy[slot])
    running = 0
    for other in range(len(busy)):
        running += busy[other] > start
    params = state.params
    finish = start + params[TTFT] + output_tokens * params[TPOT] * (1.0 + params[CONTENTION] * running / len(busy))
    busy[slot] = finish
    if start < until:
        state.floats[BUSY_SECONDS] += min(finish, until) - start
    else:
        starts[state.ints[PENDING]] = start
        state.ints[PENDING] += 1
    state.floats[WAIT_SECONDS] += min(start, until) - now
    latency: float = finish - now
    return latency


@njit(cache=True)
def _rank(hot: Places, weight: Floats, names: Names, count: int, heavy: float, name: np.uint64) -> int:
    """Return how many of the hot set come before a key of this weight and name."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if weight[middle] > heavy or (weight[middle] == heavy and names[hot[middle]] < name):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _rebase(state: State, now: float) -> None:
    """Move the landmark forward by whole half-lives: an exact scaling in binary, but for what becomes too small."""
    floats, hot, weight, weight_of, names = state.floats, state.hot, state.weight, state.weight_of, state.names
    whole = math.floor((now - floats[LANDMARK]) / state.params[HOT_HALF_LIFE])
    floats[LANDMARK] += whole * state.params[HOT_HALF_LIFE]
    kept = 0
    for place in range(state.ints[HOT_KEYS]):
        key, light = hot[place], math.ldexp(weight[place], -whole)
        weight_of[key] = light
        if light > 0.0:
            # Rounding may have made equal what differed: then the name decides anew.
            above = kept - 1
            while above >= 0 and weight[above] == light and names[hot[above]] > names[key]:
                hot[above + 1], weight[above + 1] = hot[above], weight[above]
                above -= 1
            hot[above + 1], weight[above + 1] = key, light
            kept += 1
    state.ints[HOT_KEYS] = kept


@njit(cache=True)
def _sort_changed(changed: Places, count: int, weight_of: Floats, names: Names) -> None:
    """Sort the first keys by (weight descending, name ascending): Shell's sort, an insertion sort where they are few."""
    gap = 1
    while gap < count // 9:
        gap = 3 * gap + 1
    while gap > 0:
        for place in range(gap, count):
            key = changed[place]
            heavy = weight_of[key]
            above = place - gap
            while above >= 0 and (
                weight_of[changed[above]] < heavy or (weight_of[changed[above]] == heavy and names[changed[above]] > names[key])
            ):
                changed[above + gap] = changed[above]
                above -= gap
            changed[above + gap] = key
        gap //= 3


@njit(cache=True)
def _copy(keys: Places, weights: Floats, first: int, last: int, hot: Places, weight: Floats, into: int) -> int:
    """Copy a stretch of keys and weights; return where the next one goes. Two plain loops: each becomes one move of memory."""
    for place in range(first, last):
        hot[into + place - first] = keys[place]
    for place in range(first, last):
        weight[into + place - first] = weights[place]
    return into + max(last - first, 0)


@njit(cache=True)
def _merge_changed(state: State, count: int, lost: int) -> int:
    """Merge ``count`` changed keys into the sorted ones, in place of the ``lost`` ones they were; return how many there are."""
    hot, weight, weight_of, names, changed, gone = (
        state.hot, state.weight, state.weight_of, state.names, state.changed, state.gone
    )  # fmt: skip
    old = state.ints[HOT_KEYS]
    _sort_changed(changed, count, weight_of, names)
    gone[:lost].sort()
    rank = np.empty(count, np.int64)
    for place in range(count):
        rank[place] = _rank(hot, weight, names, old, weight_of[changed[place]], names[changed[place]])
    # Weights only grow: nothing before the first new place changes.
    first = rank[0]
    keys, weights = state.spare, state.spare_weight
    _copy(hot, weight, first, old, keys, weights, first)
    into, cursor, hole = first, first, 0
    for place in range(count):
        while hole < lost and gone[hole] < rank[place]:
            into = _copy(keys, weights, cursor, gone[hole], hot, weight, into)
            cursor = gone[hole] + 1
            hole += 1
        into = _copy(keys, weights, cursor, rank[place], hot, weight, into)
        cursor = max(cursor, rank[place])
        hot[into], weight[into] = changed[place], weight_of[changed[place]]
        into += 1
    while hole < lost:
        into = _copy(keys, weights, cursor, gone[hole], hot, weight, into)
        cursor = gone[hole] + 1
        hole += 1
    return _copy(keys, weights, cursor, old, hot, weight, into)


@njit(cache=True)
def _settle(state: State, count: int, lost: int) -> None:
    """Merge what has changed into the hot set, and prune it to its capacity if it has outgrown twice that."""
    if count == 0:
        return
    hot, weight_of, asked, changed = state.hot, state.weight_of, state.asked, state.changed
    capacity = int(state.params[HOT_CAPACITY])
    total = _merge_changed(state, count, lost)
    for place in range(count):
        asked[changed[place], CHANGED] = 0
    if total > 2 * capacity:
        for place in range(capacity, total):
            weight_of[hot[place]] = 0.0
        total = capacity
    state.ints[HOT_KEYS] = total


@njit(cache=True)
def count_hot(state: State, columns: Columns) -> None:
    """Count in the hot set what was asked since it was counted last (forward decay: Cormode et al., ICDE 2009).

    The set is kept sorted: the keys whose weight has changed are sorted by themselves and merged into the others.
    """
    ints, floats, names, asked, records = state.ints, state.floats, state.names, state.asked, state.records
    hot, weight, weight_of, changed, gone = state.hot, state.weight, state.weight_of, state.changed, state.gone
    times, keys, sizes = columns.time, columns.key, columns.size
    input_tokens, output_tokens = columns.input_tokens, columns.output_tokens
    most, half_life = 2 * int(state.params[HOT_CAPACITY]), state.params[HOT_HALF_LIFE]
    semantic = state.params[MATCH] > 0.0
    found = lost = 0
    for row in range(ints[HOT_ROW], ints[POSITION]):
        key, now = keys[row], times[row]
        asked[key, ASKED_SIZE], asked[key, ASKED_INPUT] = sizes[row], input_tokens[row]
        asked[key, ASKED_OUTPUT] = output_tokens[row]
        if semantic and records[key].held == 0:
            # Its refresh must find the group, though the key may never have been stored.
            state.kin[key, GROUP] = columns.group[row]
        if math.isnan(floats[LANDMARK]):
            floats[LANDMARK] = now
        age = (now - floats[LANDMARK]) / half_life
        if age > _REBASE_HALF_LIVES:
            _settle(state, found, lost)
            found = lost = 0
            _rebase(state, now)
            age = (now - floats[LANDMARK]) / half_life
        light = weight_of[key]
        weight_of[key] = light + 2.0**age
        if asked[key, CHANGED] == 0:
            asked[key, CHANGED] = 1
            if light > 0.0:
                gone[lost] = _rank(hot, weight, names, ints[HOT_KEYS], light, names[key])
                lost += 1
            changed[found] = key
            found += 1
            if found > most or ints[HOT_KEYS] + found - lost > most:
                _settle(state, found, lost)
                found = lost = 0
    _settle(state, found, lost)
    ints[HOT_ROW] = ints[POSITION]


@njit(cache=True)
def _tick(state: State, starts: Floats, now: float, until: float) -> None:
    """One round of warm-up: refresh what is planned and not live, best first, while the token bucket lasts."""
    ints, floats, params, asked = state.ints, state.floats, state.params, state.asked
    floats[BUCKET] = min(params[BURST], floats[BUCKET] + params[REFRESH_RATE] * params[PERIOD])
    if floats[BUCKET] < _TOKEN or state.refreshing.min() > now:
        return
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
    due, found = np.empty(min(planned, int(floats[BUCKET] + 1.0)), np.int64), 0
    for place in range(planned):
        if found == len(due):
            break
        key = state.hot[place]
        record = state.records[key]
        life = params[TTL] * (1.0 - params[JITTER] * record.unit) * (1.0 - params[REFRESH_AHEAD])
        if record.held == 0 or now - record.written > life:
            due[found] = key
            found += 1
    for key in due[:found]:
        free = state.refreshing.argmin()
        if floats[BUCKET] < _TOKEN or state.refreshing[free] > now:
            return
        floats[BUCKET] -= 1.0
        ints[REFRESHES] += 1
        ints[REFRESH_INPUT] += asked[key, ASKED_INPUT]
        ints[REFRESH_OUTPUT] += asked[key, ASKED_OUTPUT]
        state.refreshing[free] = now + _call(state, starts, now, asked[key, ASKED_OUTPUT], until)
        group = state.kin[key, GROUP] if params[MATCH] > 0.0 else 0
        _put(state, key, asked[key, ASKED_SIZE], group, now)


@njit(cache=True)
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


@njit(cache=True)
def _serve_relative(state: State, columns: Columns, key: int, row: int, now: float) -> None:
    """Answer a request by the entry of another key."""
    ints, floats, params = state.ints, state.floats, state.params
    record = state.records[key]
    _touch(state, key)
    if not record.resident:
        _promote(state, key)
        if ints[MEMORY_BYTES] > params[MEMORY_BUDGET]:
            trim(state)
    ints[VECTOR_HITS] += 1
    ints[HIT_BYTES] += record.held
    if params[DOCUMENTS] > 0.0 and record.written < state.updated[columns.document[row]]:
        floats[STALE] += 1.0
    elif params[HALF_LIFE] < math.inf:
        floats[STALE] += 1.0 - math.exp(-_LN2 * max(now - record.written, 0.0) / params[HALF_LIFE])


@njit(cache=True)
def _serve(state: State, columns: Columns, starts: Floats, misses: Floats, missed: int, horizon: float, until: float) -> int:
    """Answer the requests that arrive before ``horizon``; return how many of the window have missed.

    Everything that most requests need is written out here: a call that takes ``state`` along costs more than the request.
    """
    records, ring, ints, floats, params = state.records, state.ring, state.ints, state.floats, state.params
    updated, busy = state.updated, state.busy
    times, keys, sizes = columns.time, columns.key, columns.size
    input_tokens, output_tokens, chain, document = columns.input_tokens, columns.output_tokens, columns.chain, columns.document
    budget, memory_budget = np.int64(params[BUDGET]), np.int64(params[MEMORY_BUDGET])
    ttl, jitter, half_life, match = params[TTL], params[JITTER], params[HALF_LIFE], params[MATCH]
    ttft, tpot, contention = params[TTFT], params[TPOT], params[CONTENTION] / len(busy)
    prefix, documents, aging = params[PREFIX] > 0.0, params[DOCUMENTS] > 0.0, half_life < math.inf
    mask, slots = len(ring) - 1, len(busy)
    row, count = ints[POSITION], len(times)
    stale = floats[STALE]
    while row < count and times[row] < horizon:
        now, key, size = times[row], keys[row], sizes[row]
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
                ints[MEMORY_HITS] += 1
            else:
                ints[STORE_HITS] += 1
        else:
            # Sent upstream, first come first served: calls are made in order of time.
            tokens = output_tokens[row]
            slot, free = 0, busy[0]
            for other in range(1, slots):
                if busy[other] < free:
                    slot, free = other, busy[other]
            start, running = max(now, free), 0
            if free > now:
                running = slots - 1
                for other in range(slots):
                    running -= other != slot and busy[other] <= start
            else:
                for other in range(slots):
                    running += busy[other] > start
            finish = start + ttft + tokens * tpot * (1.0 + contention * running)
            busy[slot] = finish
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
                    _leave_group(state, key)
            held = 0
            if size <= budget:
                record.written = now
                record.held = held = size
                ints[STORE_BYTES] += size
                ints[STORE_ENTRIES] += 1
                if match > 0.0:
                    _join_group(state, key, columns.group[row])
        ints[BROKEN] = not hit
        if held > 0:
            place = ints[HEAD] & mask
            ring[place] = key
            record.place = place
            ints[HEAD] += 1
            if not record.resident and held <= memory_budget:
                record.resident = 1
                ints[MEMORY_BYTES] += held
                ints[MEMORY_ENTRIES] += 1
            # As in :func:`trim`.
            while ints[STORE_BYTES] > budget:
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
                        _leave_group(state, other)
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
    floats[STALE] = stale
    return missed


@njit(cache=True)
def empty(state: State) -> int:
    """Remove every entry of both tiers; return how many the store had. The hot set stays."""
    ints, ring = state.ints, state.ring
    count: int = ints[STORE_ENTRIES]
    for counter in range(ints[TAIL], ints[HEAD]):
        _drop(state, ring[counter & (len(ring) - 1)])
    ints[TAIL] = ints[MEMORY_TAIL] = ints[HEAD]
    return count


@njit(cache=True)
def _skip_rounds(state: State, until: float) -> None:
    """Let the token bucket fill in the rounds before ``until`` in which nothing is refreshed."""
    floats, params = state.floats, state.params
    if floats[NEXT_TICK] < until:
        rounds = max(math.ceil((until - floats[NEXT_TICK]) / params[PERIOD]), 1)
        floats[BUCKET] = min(params[BURST], floats[BUCKET] + rounds * params[REFRESH_RATE] * params[PERIOD])
        floats[NEXT_TICK] += rounds * params[PERIOD]


@njit(cache=True)
def run(state: State, columns: Columns, starts: Floats, misses: Floats, begin: float, until: float) -> None:
    """Answer the requests that arrive before ``until``; make the warm-up rounds, updates and flushes that are due before it.

    At equal times a flush comes first, then updates, the warm-up round, and requests last.

    Args:
        state: The arm.
        columns: The trace.
        starts: Starts of the calls that wait at ``begin`` (``PENDING`` of them), with room for all that may come to wait.
        misses: Out: latency of each miss of the window in order, seconds; room for one of each request.
        begin: The window's begin, seconds.
        until: The window's end, seconds.
    """
    ints, floats, params = state.ints, state.floats, state.params
    waiting = ints[PENDING]
    ints[PENDING] = 0
    for place in range(waiting):
        floats[WAIT_SECONDS] += min(starts[place], until) - begin
        if starts[place] >= until:
            starts[ints[PENDING]] = starts[place]
            ints[PENDING] += 1
    for slot in range(len(state.busy)):
        # A slot that is busy beyond the last window is so without a gap: whatever waits for it starts when it becomes free.
        floats[BUSY_SECONDS] += max(0.0, min(state.busy[slot], until) - begin)

    missed = 0
    while True:
        flush = columns.flush_time[ints[FLUSH]] if ints[FLUSH] < len(columns.flush_time) else math.inf
        update = columns.update_time[ints[UPDATE]] if ints[UPDATE] < len(columns.update_time) else math.inf
        tick = floats[NEXT_TICK] if params[WARMUP] > 0.0 else math.inf
        horizon = min(min(flush, update), min(tick, until))
        missed = _serve(state, columns, starts, misses, missed, horizon, until)
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
            _tick(state, starts, tick, until)
            floats[NEXT_TICK] += params[PERIOD]
    ints[MISSES] = missed
    if params[WARMUP] <= 0.0:
        _skip_rounds(state, until)


@njit(cache=True)
def _select(values: Floats, count: int, rank: int) -> float:
    """Return the value of a rank (from 0) among the first ``count``, which are reordered (Hoare's quickselect)."""
    low, high = 0, count - 1
    while low < high:
        pivot = values[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if rank <= right:
            high = right
        elif rank >= left:
            low = left
        else:
            break
    found: float = values[rank]
    return found


@njit(cache=True)
def _quantile(misses: Floats, count: int, hits: Ints, latency: Floats, q: float) -> float:
    """Return a quantile (linear between ranks) of ``count`` misses and of hits that took ``latency`` each, ascending."""
    total = count + hits.sum()
    where = q * (total - 1)
    rank = int(where)
    value = np.empty(2)
    for side in range(2):
        wanted = min(rank + side, total - 1)
        for kind in range(len(hits)):
            if wanted < hits[kind]:
                value[side] = latency[kind]
                wanted = -1
                break
            wanted -= hits[kind]
        if wanted >= 0:
            value[side] = _select(misses, count, wanted)
    result: float = value[0] + (value[1] - value[0]) * (where - rank)
    return result


@njit(cache=True)
def measure(state: State, misses: Floats, duration: float, into: Floats) -> None:
    """Fill in what the window was like, in the order of :data:`SIGNALS`, and start its counters anew.

    Args:
        state: The arm.
        misses: Latency of each miss, with room for one of each request; reordered.
        duration: Length of the window, seconds.
        into: Out, (len(SIGNALS),); NaN where there is no value without requests.
    """
    ints, floats, params = state.ints, state.floats, state.params
    count = ints[MISSES]
    by_tier = np.array([ints[MEMORY_HITS], ints[STORE_HITS], ints[VECTOR_HITS]])
    hits = by_tier.sum()
    requests = hits + count
    latency = np.array([params[MEMORY_LATENCY], params[STORE_LATENCY], params[VECTOR_LATENCY]])
    into[:] = math.nan
    into[0], into[1] = requests, requests / duration
    if requests > 0:
        into[2] = hits / requests
        for tier in range(3):
            into[3 + tier] = by_tier[tier] / requests
        order = np.argsort(latency)
        kinds, seconds = by_tier[order], latency[order]
        if count and hits and misses[:count].min() < seconds.max():
            # A miss that is faster than a hit: all go into one heap.
            for kind in range(3):
                misses[count : count + kinds[kind]] = seconds[kind]
                count += kinds[kind]
            kinds[:] = 0
        into[6] = _quantile(misses, count, kinds, seconds, 0.5)
        into[7] = _quantile(misses, count, kinds, seconds, 0.99)
    hit_seconds = (by_tier * latency).sum()
    into[8] = hit_seconds + floats[MISS_SECONDS]
    if hits > 0:
        into[9] = hit_seconds / hits
    if ints[MISSES] > 0:
        into[10] = floats[MISS_SECONDS] / ints[MISSES]
    into[11] = ints[STORE_BYTES]
    into[12], into[13], into[14] = ints[EVICTIONS], ints[EXPIRATIONS], floats[STALE]
    into[15], into[16] = ints[INPUT], ints[OUTPUT]
    into[17], into[18], into[19] = ints[REFRESH_INPUT], ints[REFRESH_OUTPUT], ints[REFRESHES]
    into[20] = floats[BUSY_SECONDS] / duration
    into[21] = floats[WAIT_SECONDS] / duration
    into[22] = into[20] / len(state.busy)
    if ints[ALL_BYTES] > 0:
        into[23] = ints[HIT_BYTES] / ints[ALL_BYTES]
    # Counters start anew here, not in the next step: what is evicted by a smaller budget belongs to the next window.
    ints[FIRST_COUNTER:] = 0
    floats[FIRST_SUM:] = 0.0
