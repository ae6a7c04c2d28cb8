"""What a window of a simulated arm came to, compiled."""

from __future__ import annotations

import math

import numpy as np

from envs.simulator.state import (
    ALL_BYTES,
    BUSY_SECONDS,
    EVICTIONS,
    EXPIRATIONS,
    FIRST_COUNTER,
    FIRST_SUM,
    HIT_BYTES,
    INPUT,
    MEMORY_HITS,
    MEMORY_LATENCY,
    MISS_SECONDS,
    MISSES,
    OUTPUT,
    REFRESH_INPUT,
    REFRESH_OUTPUT,
    REFRESHES,
    STALE,
    STORE_BYTES,
    STORE_HITS,
    STORE_LATENCY,
    VECTOR_HITS,
    VECTOR_LATENCY,
    WAIT_SECONDS,
    Floats,
    Ints,
    State,
)  # fmt: skip
from serving.compiled import compiled


@compiled()
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


@compiled()
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


@compiled()
def measure(state: State, duration: float, into: Floats) -> None:
    """Fill in what the window was like, in the order of :data:`SIGNALS`, and start its counters anew.

    Args:
        state: The arm.
        duration: Length of the window, seconds.
        into: Out, (len(SIGNALS),); NaN where there is no value without requests.
    """
    ints, floats, params = state.ints, state.floats, state.params
    count, misses = ints[MISSES], state.misses
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
