"""The exact curve: every setting of a grid simulated by itself, as a plain LRU of what was written."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from envs.workloads import Trace
from serving.compiled import compiled
from serving.ghost_kernel import jitter_units

Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def exact_hits(trace: Trace, sizes: Places, ttls: Floats, *, ttl_jitter: float, windows: int) -> Places:
    """Return the hits of every setting of a grid, each in its own run of a byte-weighted LRU.

    An entry has the bytes that it was written with, as in the cache; an answer that changes in size changes its entry when it is
    written anew. An expired entry keeps its bytes until it is overwritten or evicted; one larger than the budget is not stored.
    Prefix blocks count one by one. O(N S T), about 20 ns for each request and setting.

    Args:
        trace: The requests, N.
        sizes: Budgets, bytes, shape (S,).
        ttls: Seconds, shape (T,).
        ttl_jitter: Spread of the per-key factor on the TTL, 0..1.
        windows: Parts of equally many requests into which the trace is cut, W.

    Returns:
        Hits, shape (W, S, T).
    """
    names, keys = np.unique(trace.key, return_inverse=True)
    factor = 1.0 - ttl_jitter * jitter_units(names.copy())
    parts = np.array([len(part) for part in np.array_split(np.arange(len(trace)), windows)], np.int64)
    hits = np.zeros((windows, len(sizes), len(ttls)), np.int64)
    columns = (keys.astype(np.int64), trace.size.astype(np.int64), trace.time.astype(np.float64))
    for row, budget in enumerate(sizes.tolist()):
        for column, ttl in enumerate(ttls.tolist()):
            hits[:, row, column] = _run(*columns, ttl * factor, budget, parts)
    return hits


@compiled()
def _run(keys: Places, sizes: Places, times: Floats, life: Floats, budget: int, parts: Places) -> Places:
    """Run one setting; return its hits by part, (W,)."""
    count = len(life)
    # A ring of entries by recency around the place ``count``: what follows it is the newest, what precedes it the oldest.
    newer, older = np.full(count + 1, count, np.int64), np.full(count + 1, count, np.int64)
    held, written = np.zeros(count, np.int64), np.zeros(count)
    hits = np.zeros(len(parts), np.int64)
    total, part, end = 0, 0, parts[0]
    for row in range(len(keys)):
        while row >= end:
            part += 1
            end += parts[part]
        key, size, now = keys[row], sizes[row], times[row]
        live = held[key] > 0 and now - written[key] <= life[key]
        if held[key] > 0:
            older[newer[key]], newer[older[key]] = older[key], newer[key]
        if live:
            hits[part] += 1
        else:
            total -= held[key]
            held[key] = size if size <= budget else 0
            written[key] = now
            total += held[key]
        if held[key] > 0:
            newest = older[count]
            older[count], newer[newest] = key, key
            older[key], newer[key] = newest, count
        while total > budget:
            oldest = newer[count]
            older[newer[oldest]] = older[oldest]
            newer[older[oldest]] = newer[oldest]
            total -= held[oldest]
            held[oldest] = 0
    return hits
