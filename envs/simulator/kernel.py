"""The compiled core of the simulator: one arm's tiers, hot set and upstream queue, request by request.

Keys are dense numbers from 1; 0 is the head of both recency lists and stands for "none". All arrays start as zeros, which cost
nothing until they are touched, so that a new simulator on a long trace is cheap.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Links = npt.NDArray[np.int32]

# columns of ``links``: neighbours in the recency lists of the store and of the memory tier
STORE_NEWER, STORE_OLDER, MEMORY_NEWER, MEMORY_OLDER = range(4)
# columns of ``entry``: bytes held (0: not there), and what the key's last request was like
STORE_SIZE, MEMORY_SIZE, LAST_SIZE, LAST_INPUT, LAST_OUTPUT = range(5)
# ``ints``: state, then the window's counters
(
    POSITION, STORE_BYTES, STORE_ENTRIES, MEMORY_BYTES, MEMORY_ENTRIES, HOT_KEYS, HOT_CHANGES, PENDING,
    MEMORY_HITS, STORE_HITS, MISSES, EVICTIONS, EXPIRATIONS, INPUT, OUTPUT, REFRESH_INPUT, REFRESH_OUTPUT, REFRESHES, N_INTS,
) = range(19)  # fmt: skip
FIRST_COUNTER = MEMORY_HITS
# ``floats``: state, then the window's sums
(NEXT_TICK, BUCKET, LANDMARK, STALE, HIT_SECONDS, MISS_SECONDS, BUSY_SECONDS, WAIT_SECONDS, N_FLOATS) = range(9)
FIRST_SUM = STALE
# ``params``
(
    BUDGET, MEMORY_BUDGET, TTL, WARMUP, JITTER, HALF_LIFE, MEMORY_LATENCY, STORE_LATENCY, TTFT, TPOT, CONTENTION,
    HOT_CAPACITY, HOT_HALF_LIFE, MIN_SCORE, PERIOD, REFRESH_AHEAD, REFRESH_RATE, BURST, N_PARAMS,
) = range(19)  # fmt: skip

_REBASE_HALF_LIVES = 512
"""As in :mod:`serving.hotset`: weights are moved to a new landmark long before they overflow."""

_FEW = 100
"""Up to so many changes to a sorted list of about a thousand, insertion sort is the faster one."""

_TOKEN = 1.0 - 1e-9
"""Refilling in many small steps must not fall short of a whole token by rounding."""


class State(NamedTuple):
    """Everything that a simulator remembers, for K keys.

    Attributes:
        links: Recency lists, (K + 1, 4). entry: Sizes and last request by key, (K + 1, 5). written: When each entry was
        written, (K + 1,). weight: Forward-decayed frequency by key, 0 for keys not in the hot set, (K + 1,). hot: Keys of the
        hot set, sorted by (weight descending, key ascending) but for ``HOT_CHANGES`` changes, (2 * capacity + 1,). busy: When
        each slot of the upstream becomes free, (slots,). ints: Whole numbers, (N_INTS,). floats: Other numbers, (N_FLOATS,).
        params: Knobs and settings, (N_PARAMS,).
    """

    links: Links
    entry: Ints
    written: Floats
    weight: Floats
    hot: Links
    busy: Floats
    refreshing: Floats
    ints: Ints
    floats: Floats
    params: Floats


class Columns(NamedTuple):
    """A trace as the kernel reads it.

    Attributes:
        time: Arrival, seconds, (N,).
        key: Dense key from 1, (N,).
        size: Bytes of the entry, (N,).
        input_tokens: Prompt tokens, (N,).
        output_tokens: Completion tokens, (N,).
        unit: Where in 0..1 each key's TTL jitter lies, (K + 1,).
    """

    time: Floats
    key: Links
    size: Ints
    input_tokens: Links
    output_tokens: Links
    unit: Floats


@njit(cache=True)
def _unlink(links: Links, key: int, newer: int) -> None:
    before, after = links[key, newer], links[key, newer + 1]
    links[before, newer + 1] = after
    links[after, newer] = before


@njit(cache=True)
def _push(links: Links, key: int, newer: int) -> None:
    # The head's "older" is the most recently used entry, its "newer" the least.
    front = links[0, newer + 1]
    links[key, newer] = 0
    links[key, newer + 1] = front
    links[front, newer] = key
    links[0, newer + 1] = key


@njit(cache=True)
def _drop_memory(state: State, key: int) -> None:
    size = state.entry[key, MEMORY_SIZE]
    if size > 0:
        _unlink(state.links, key, MEMORY_NEWER)
        state.entry[key, MEMORY_SIZE] = 0
        state.ints[MEMORY_BYTES] -= size
        state.ints[MEMORY_ENTRIES] -= 1


@njit(cache=True)
def _drop_store(state: State, key: int) -> None:
    size = state.entry[key, STORE_SIZE]
    if size > 0:
        _unlink(state.links, key, STORE_NEWER)
        state.entry[key, STORE_SIZE] = 0
        state.ints[STORE_BYTES] -= size
        state.ints[STORE_ENTRIES] -= 1


@njit(cache=True)
def trim(state: State) -> int:
    """Evict, oldest first, what exceeds the budgets; return how many the store lost."""
    evicted = 0
    while state.ints[STORE_BYTES] > state.params[BUDGET]:
        oldest = state.links[0, STORE_NEWER]
        _drop_store(state, oldest)
        _drop_memory(state, oldest)
        evicted += 1
    while state.ints[MEMORY_BYTES] > state.params[MEMORY_BUDGET]:
        _drop_memory(state, state.links[0, MEMORY_NEWER])
    state.ints[EVICTIONS] += evicted
    return evicted


@njit(cache=True)
def _promote(state: State, key: int, size: int) -> None:
    """Put the entry into the memory tier as its most recently used."""
    _drop_memory(state, key)
    if size <= state.params[MEMORY_BUDGET]:
        state.entry[key, MEMORY_SIZE] = size
        state.ints[MEMORY_BYTES] += size
        state.ints[MEMORY_ENTRIES] += 1
        _push(state.links, key, MEMORY_NEWER)


@njit(cache=True)
def _put(state: State, key: int, size: int, now: float) -> None:
    _drop_store(state, key)
    state.written[key] = now
    if size <= state.params[BUDGET]:
        state.entry[key, STORE_SIZE] = size
        state.ints[STORE_BYTES] += size
        state.ints[STORE_ENTRIES] += 1
        _push(state.links, key, STORE_NEWER)
    _promote(state, key, size)
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
        if other != slot and busy[other] > start:
            running += 1
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
def _sort_hot(state: State) -> None:
    """Sort the hot set by (weight descending, key ascending): insertion sort after a few changes, else Shell's."""
    weight, keys, count = state.weight, state.hot, state.ints[HOT_KEYS]
    gap = 1
    while state.ints[HOT_CHANGES] > _FEW and gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for place in range(gap, count):
            key = keys[place]
            heavy = weight[key]
            above = place - gap
            while above >= 0 and (weight[keys[above]] < heavy or (weight[keys[above]] == heavy and keys[above] > key)):
                keys[above + gap] = keys[above]
                above -= gap
            keys[above + gap] = key
        gap //= 3
    state.ints[HOT_CHANGES] = 0


@njit(cache=True)
def _remember(state: State, key: int, now: float) -> None:
    """Count an access in the hot set (forward decay: Cormode et al., ICDE 2009)."""
    ints, floats, params, weight = state.ints, state.floats, state.params, state.weight
    capacity = int(params[HOT_CAPACITY])
    if math.isnan(floats[LANDMARK]):
        floats[LANDMARK] = now
    age = (now - floats[LANDMARK]) / params[HOT_HALF_LIFE]
    if age > _REBASE_HALF_LIVES:
        whole = math.floor(age)
        floats[LANDMARK] += whole * params[HOT_HALF_LIFE]
        age = (now - floats[LANDMARK]) / params[HOT_HALF_LIFE]
        kept = 0
        for place in range(ints[HOT_KEYS]):
            other = state.hot[place]
            weight[other] = math.ldexp(weight[other], -whole)
            if weight[other] > 0.0:
                state.hot[kept] = other
                kept += 1
        ints[HOT_KEYS] = kept
    if weight[key] == 0.0:
        state.hot[ints[HOT_KEYS]] = key
        ints[HOT_KEYS] += 1
    weight[key] += 2.0**age
    ints[HOT_CHANGES] += 1
    if ints[HOT_KEYS] > 2 * capacity:
        _sort_hot(state)
        for place in range(capacity, ints[HOT_KEYS]):
            weight[state.hot[place]] = 0.0
        ints[HOT_KEYS] = capacity


@njit(cache=True)
def _tick(state: State, unit: Floats, starts: Floats, now: float, until: float) -> None:
    """One round of warm-up: refresh what is planned and not live, best first, while the token bucket lasts."""
    ints, floats, params, entry = state.ints, state.floats, state.params, state.entry
    floats[BUCKET] = min(params[BURST], floats[BUCKET] + params[REFRESH_RATE] * params[PERIOD])
    if floats[BUCKET] < _TOKEN or state.refreshing.min() > now:
        return
    if ints[HOT_CHANGES] > 0:
        _sort_hot(state)
    decay = 2.0 ** (-(now - floats[LANDMARK]) / params[HOT_HALF_LIFE])
    low, high = 0, ints[HOT_KEYS]
    while low < high:
        middle = (low + high) // 2
        if state.weight[state.hot[middle]] * decay >= params[MIN_SCORE]:
            low = middle + 1
        else:
            high = middle
    # What is live is asked once for the whole plan, before anything is refreshed, as the gateway does: a planned entry that a
    # refresh of this round evicts waits for the next round.
    due, found = np.empty(math.ceil(params[WARMUP] * low), np.int64), 0
    for place in range(len(due)):
        key = state.hot[place]
        life = params[TTL] * (1.0 - params[JITTER] * unit[key]) * (1.0 - params[REFRESH_AHEAD])
        if entry[key, STORE_SIZE] == 0 or now - state.written[key] > life:
            due[found] = key
            found += 1
    for key in due[:found]:
        free = state.refreshing.argmin()
        if floats[BUCKET] < _TOKEN or state.refreshing[free] > now:
            return
        floats[BUCKET] -= 1.0
        ints[REFRESHES] += 1
        ints[REFRESH_INPUT] += entry[key, LAST_INPUT]
        ints[REFRESH_OUTPUT] += entry[key, LAST_OUTPUT]
        state.refreshing[free] = now + _call(state, starts, now, entry[key, LAST_OUTPUT], until)
        _put(state, key, entry[key, LAST_SIZE], now)


@njit(cache=True)
def _request(state: State, columns: Columns, starts: Floats, row: int, until: float) -> float:
    """Answer one request; return its latency."""
    ints, floats, params, entry, links = state.ints, state.floats, state.params, state.entry, state.links
    key, now = columns.key[row], columns.time[row]
    latency: float
    entry[key, LAST_SIZE] = columns.size[row]
    entry[key, LAST_INPUT] = columns.input_tokens[row]
    entry[key, LAST_OUTPUT] = columns.output_tokens[row]
    _remember(state, key, now)
    if entry[key, STORE_SIZE] > 0:
        age = now - state.written[key]
        if age <= params[TTL] * (1.0 - params[JITTER] * columns.unit[key]):
            _unlink(links, key, STORE_NEWER)
            _push(links, key, STORE_NEWER)
            if entry[key, MEMORY_SIZE] > 0:
                _unlink(links, key, MEMORY_NEWER)
                _push(links, key, MEMORY_NEWER)
                ints[MEMORY_HITS] += 1
                latency = params[MEMORY_LATENCY]
            else:
                _promote(state, key, entry[key, STORE_SIZE])
                trim(state)
                ints[STORE_HITS] += 1
                latency = params[STORE_LATENCY]
            floats[STALE] += 1.0 - 0.5 ** (max(age, 0.0) / params[HALF_LIFE])
            floats[HIT_SECONDS] += latency
            return latency
        ints[EXPIRATIONS] += 1
    latency = _call(state, starts, now, columns.output_tokens[row], until)
    _put(state, key, columns.size[row], now)
    ints[MISSES] += 1
    ints[INPUT] += columns.input_tokens[row]
    ints[OUTPUT] += columns.output_tokens[row]
    floats[MISS_SECONDS] += latency
    return latency


@njit(cache=True)
def run(state: State, columns: Columns, starts: Floats, latency: Floats, served: Ints, begin: float, until: float) -> None:
    """Answer the requests that arrive before ``until`` and make the warm-up rounds that are due before it.

    Args:
        state: The arm.
        columns: The trace.
        starts: Starts of the calls that wait at ``begin`` (``PENDING`` of them), with room for all that may come to wait.
        latency: Out: latency of each request of the window, seconds.
        served: Out: bytes of the entry that each was answered from or became.
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

    first = ints[POSITION]
    while True:
        row = ints[POSITION]
        due = columns.time[row] if row < len(columns.time) else math.inf
        while floats[NEXT_TICK] <= due and floats[NEXT_TICK] < until:
            if params[WARMUP] > 0.0:
                _tick(state, columns.unit, starts, floats[NEXT_TICK], until)
                floats[NEXT_TICK] += params[PERIOD]
            else:
                # Nothing to refresh: skip the rounds up to the next request, but let the bucket fill.
                rounds = math.ceil((min(due, until) - floats[NEXT_TICK]) / params[PERIOD])
                rounds = max(rounds, 1)
                floats[BUCKET] = min(params[BURST], floats[BUCKET] + rounds * params[REFRESH_RATE] * params[PERIOD])
                floats[NEXT_TICK] += rounds * params[PERIOD]
        if due >= until:
            return
        latency[row - first] = _request(state, columns, starts, row, until)
        served[row - first] = max(state.entry[columns.key[row], STORE_SIZE], 0)
        if served[row - first] == 0:
            served[row - first] = columns.size[row]
        ints[POSITION] = row + 1


@njit(cache=True)
def empty(state: State) -> int:
    """Remove every entry of both tiers; return how many the store had. The hot set stays."""
    count: int = state.ints[STORE_ENTRIES]
    while state.ints[STORE_ENTRIES] > 0:
        _drop_store(state, state.links[0, STORE_NEWER])
    while state.ints[MEMORY_ENTRIES] > 0:
        _drop_memory(state, state.links[0, MEMORY_NEWER])
    return count
