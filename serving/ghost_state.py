"""What one generation of the sampled shadow consists of: the arrays of :mod:`serving.ghost_kernel`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Records = npt.NDArray[np.void]

SLOT = np.dtype(
    [
        ("name", "u8"), ("last", "f8"), ("size", "f8"), ("position", "i4"), ("record", "i4"), ("count", "i4"), ("before", "i4"),
        ("hot", "i4"), ("next_free", "i4"), ("keep", "i4"), ("cost", "i4"),
    ],
    align=True,
)  # fmt: skip
"""One tracked key: name, time of the last access, bytes, position in the log (0: in no cache), first record (0: none), accesses
in this window and in the last one, whether it is hot; next free slot; when room is made, whether it is kept and its records."""

CONTROL = np.dtype(
    [
        ("salt", "u8"), ("limit", "u8"), ("multiple", "i8"), ("weight", "f8"),
        ("next", "i8"), ("tracked", "i8"), ("hot", "i8"), ("most_hot", "i8"), ("counted", "i8"),
        ("free_slot", "i8"), ("free_record", "i8"), ("recorded", "i8"),
        ("half_life", "f8"), ("jitter", "f8"), ("start", "f8"), ("now", "f8"),
        ("requests", "f8"), ("sampled", "f8"), ("certain", "f8"), ("seen", "i8"), ("known", "i8"),
    ],
    align=True,
)  # fmt: skip
"""Where things stand, line by line: salt, greatest hash of the sample, keys that a sampled one stands for (in 256ths, and plain);
next position of the log, tracked keys, hot keys and their limit, accesses in the sketch; first free slot and record (0: none),
records in use; staleness half-life, jitter, times of the first and the last access; requests, those of the sample (weighted),
those of hot keys, accesses of the sample and of hot keys that are still in the planes."""

UNIT = 256
"""Weights are multiples of 1/256, so that sums of weighted bytes are exact."""

HELD, BUDGET, MARKER, EVICTED, MOVED, N_LEVELS = range(6)
"""Rows of ``levels``."""

PLANES = 16
"""Bits of the counters of hits; they are emptied into ``sums`` before they overflow."""

LOG_PER_KEY = 3
RECORDS_PER_KEY = 3


class State(NamedTuple):
    """The arrays of one generation, for M keys, S sizes, T TTLs and W words of 64 settings each (bit ``ttl * S + size``).

    Attributes:
        slots: Tracked keys, ``SLOT``, (M,).
        table: Hash table of slots, each + 1, 0: none, (a power of two of at least 2 M,).
        log: Slot + 1 at each position, in order of access; 0 where the key has been accessed again; from position 1, (3 M + 1,).
        sizes: Bytes of the entry at each position, negative for hot keys; 0 where ``log`` has 0, (3 M + 1,).
        records: Settings of each record, W words, then the key's next record, then a time, from record 1, (3 M + 1, W + 2).
        written: The same memory as ``records``, read as floats: the time of each record is in the last column.
        levels: Of each size: bytes held (weighted), budget, marker, whether it has evicted, scratch, (N_LEVELS, S).
        ttls: TTLs, ascending, (T,).
        masks: Settings of each size (S rows), of the sizes from each on (S + 1 rows), of the TTLs from each on (T + 1 rows), and
            three rows of scratch, (2 S + T + 5, W).
        planes: Hits not yet in ``sums``: bit ``b`` of each setting's counter is in plane ``b``; sample, hot, (2, PLANES, W).
        sums: Hits and stale hits of the sample (weighted), the same of the hot keys, (4, S * T).
        sketch: Count-min sketch of recent accesses to all keys, (2, a power of two of at least 4 M).
        control: Where things stand, ``CONTROL``, (1,).
    """

    slots: Records
    table: Places
    log: Places
    sizes: Floats
    records: Words
    written: Floats
    levels: Floats
    ttls: Floats
    masks: Words
    planes: Words
    sums: Floats
    sketch: Bytes
    control: Records


def new_state(
    sizes: npt.NDArray[np.int64],
    ttls: Floats,
    max_keys: int,
    *,
    salt: int,
    rate: float,
    half_life: float,
    jitter: float,
    hot_share: float,
) -> State:
    """Return a generation that has seen nothing, before :func:`serving.ghost_kernel.begin`.

    Args:
        sizes: Budgets, bytes, ascending, (S,).
        ttls: TTLs, seconds, ascending, (T,).
        max_keys: Keys tracked at most.
        salt: Unsigned 64-bit word that is mixed into every hash.
        rate: Sampling rate to start with, above 0 to 1.
        half_life: Staleness half-life, seconds, or inf.
        jitter: Width of the jitter on the TTL, 0..1.
        hot_share: Share of ``max_keys`` that may be hot keys, 0..1.
    """
    count, columns = len(sizes), len(ttls)
    cells = count * columns
    words = -(-cells // 64)
    records = RECORDS_PER_KEY * max_keys
    table = 1 << (2 * max_keys - 1).bit_length()
    masks = np.zeros((2 * count + columns + 5, words), np.uint64)
    for cell in range(cells):
        column, row = divmod(cell, count)
        bit = np.uint64(1 << cell % 64)
        masks[row, cell // 64] |= bit
        masks[count : count + row + 1, cell // 64] |= bit
        masks[2 * count + 1 : 2 * count + column + 2, cell // 64] |= bit
    levels = np.zeros((N_LEVELS, count))
    levels[BUDGET] = sizes
    levels[MARKER] = 1
    chains = np.zeros((records + 1, words + 2), np.uint64)
    control = np.zeros(1, CONTROL)
    control["salt"] = salt
    control["multiple"] = max(UNIT, math.ceil(UNIT / rate))
    control["next"] = 1
    control["most_hot"] = int(hot_share * max_keys)
    control["half_life"], control["jitter"], control["start"] = half_life, jitter, math.nan
    state = State(
        slots=np.zeros(max_keys, SLOT),
        table=np.zeros(table, np.int32),
        log=np.zeros(LOG_PER_KEY * max_keys + 1, np.int32),
        sizes=np.zeros(LOG_PER_KEY * max_keys + 1),
        records=chains,
        written=chains.view(np.float64),
        levels=levels,
        ttls=np.array(ttls, np.float64),
        masks=masks,
        planes=np.zeros((2, PLANES, words), np.uint64),
        sums=np.zeros((4, cells)),
        sketch=np.zeros((2, 2 * table), np.uint8),
        control=control,
    )
    state.slots["next_free"] = np.arange(2, max_keys + 2)
    state.slots["next_free"][-1] = 0
    state.records[:-1, words] = np.arange(1, records + 1)
    state.records[[0, -1], words] = 0
    control["free_slot"] = control["free_record"] = 1
    return state
