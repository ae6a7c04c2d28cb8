"""What a simulated arm remembers and reads: flat arrays for compiled code. Keys are dense numbers from 1; 0 stands for "none"."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int32]
Names = npt.NDArray[np.uint64]
Records = Any
"""Arrays of :data:`RECORD`; numba reads their fields as attributes, which numpy's types do not know."""

RECORD = np.dtype(
    {
        "names": ["written", "unit", "held", "place", "resident", "queued"],
        "formats": [np.float64, np.float64, np.int32, np.int32, np.int32, np.int32],
        "itemsize": 32,
    }
)
"""What is known of a key, half a cache line: when its entry was written, where in 0..1 its TTL jitter lies, bytes held in the
store (0: not there), its place in the ring, whether it is resident in the memory tier (0: not; 1; :data:`USED`), its place in the
memory tier's queue."""

USED = 2
"""Of an entry resident in the memory tier: it was used since it came or was spared."""

# columns of ``asked``: what the key's last request was like; whether its weight has changed since the hot set was merged
ASKED_SIZE, ASKED_INPUT, ASKED_OUTPUT, CHANGED = range(4)
# columns of ``kin``: neighbours in the list of the group's entries, newest first; the group
NEWER, OLDER, GROUP = range(3)
# ``ints``: state, then the window's counters
(
    POSITION, HEAD, TAIL, MEMORY_TAIL, QUEUE_HEAD, QUEUE_TAIL, STORE_BYTES, STORE_ENTRIES, MEMORY_BYTES, MEMORY_ENTRIES, HOT_KEYS,
    HOT_ROW, PENDING, UPDATE, FLUSH, BROKEN, EARLY, IN_FLIGHT,
    MEMORY_HITS, STORE_HITS, VECTOR_HITS, MISSES, EVICTIONS, EXPIRATIONS, INPUT, OUTPUT, REFRESH_INPUT, REFRESH_OUTPUT, REFRESHES,
    HIT_BYTES, ALL_BYTES, N_INTS,
) = range(32)  # fmt: skip
FIRST_COUNTER = MEMORY_HITS
# ``floats``: state, then the window's sums
(NEXT_TICK, BUCKET, LANDMARK, STALE, MISS_SECONDS, BUSY_SECONDS, WAIT_SECONDS, N_FLOATS) = range(8)
FIRST_SUM = STALE
# ``params``
(
    BUDGET, MEMORY_BUDGET, TTL, WARMUP, JITTER, HALF_LIFE, MEMORY_LATENCY, STORE_LATENCY, VECTOR_LATENCY, TTFT, TPOT, CONTENTION,
    HOT_CAPACITY, HOT_HALF_LIFE, MIN_SCORE, PERIOD, REFRESH_AHEAD, REFRESH_RATE, BURST, PREFIX, MATCH, DOCUMENTS, CLOCK, ALONE,
    N_PARAMS,
) = range(25)  # fmt: skip
# what a window comes to: :func:`measure`
SIGNALS = (
    "requests", "qps", "hit_ratio", "memory", "redis", "vector", "p50", "p99", "latency_sum", "hit_latency", "miss_latency",
    "resident_bytes", "evictions", "expirations", "stale_hits", "input_tokens", "output_tokens", "refresh_input_tokens",
    "refresh_output_tokens", "refreshes", "upstream_running", "upstream_waiting", "gpu_cache_usage", "byte_hit_ratio",
)  # fmt: skip
"""Columns of what :func:`measure` fills in; ``memory``, ``redis`` and ``vector`` are hit ratios by tier."""


class State(NamedTuple):
    """Everything that a simulator remembers, for K keys.

    Attributes:
        records: What is known of each key, :data:`RECORD`, (K + 1,).
        names: 64-bit name of each key, (K + 1,).
        ring: Keys in the order of their accesses, a power of two of at least ``2 * K`` places.
        queue: Keys in the order in which they came into the memory tier or were spared there, likewise; (1,) where that is LRU.
        kin: Lists of each group's entries by key, (K + 1, 3); (1, 3) where nothing is answered by meaning.
        newest: Newest entry of each group, (groups + 1,).
        updated: When each document changed last, seconds, (documents + 1,).
        asked: Size and tokens of each key's last request that the hot set has counted, and a mark of its own, (K + 1, 4).
        weight_of: Forward-decayed frequency by key, 0 for keys not in the hot set, (K + 1,).
        hot: Keys of the hot set by (weight descending, name ascending), (2 * capacity + 1,).
        weight: Weight of each of them, (2 * capacity + 1,).
        changed: Room for the keys whose weight has changed, likewise.
        gone: Room for the places in ``hot`` that they had, likewise.
        rank: Room for the places that they come to, likewise.
        spare: Room for a copy of ``hot``.
        spare_weight: Room for a copy of ``weight``.
        busy: Heap of when each of the ``IN_FLIGHT`` slots in use becomes free, seconds, (slots,).
        refreshing: When each refresh under way ends, (refreshes_inflight,).
        starts: When each call that waits at the window's end starts, seconds: ``PENDING`` of them, with room for all that may
            come to wait in the next window.
        misses: Latency of each miss of the window, seconds; room for one of each request.
        ints: Whole numbers, (N_INTS,).
        floats: Other numbers, (N_FLOATS,).
        params: Knobs and settings, (N_PARAMS,).
    """

    records: Records
    names: Names
    ring: Places
    queue: Places
    kin: Places
    newest: Places
    updated: Floats
    asked: Places
    weight_of: Floats
    hot: Places
    weight: Floats
    changed: Places
    gone: Places
    rank: Places
    spare: Places
    spare_weight: Floats
    busy: Floats
    refreshing: Floats
    starts: Floats
    misses: Floats
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
