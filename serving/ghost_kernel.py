"""The compiled core of :mod:`serving.ghost`: a spatially sampled shadow of reuse distance (bytes) and reuse age.

All state lives in a few flat arrays, so that one access is one call into compiled code with little to unpack:

* ``slots`` (M, 6) int64: per tracked key its size, position, counts of this and of the last window, hash and name as bit
  patterns.
* ``written`` (M, S*T + 1) float64: per tracked key and setting the time of the virtual write; last column the time of last
  access.
* ``places`` (I + P + 1 + M,) int32: hash table of slots, then the slot at each position, then the list of free slots.
* ``tree`` (P + 1,) int64: Fenwick tree of bytes over positions.
* ``sums`` (2*S*T + 3,) float64: hits and stale hits of each setting, then requests, sampled weight and hot weight.
* ``ctl`` (8,) int64: sizes of all of the above and where things stand.
* ``grid`` (S + T + 2,) float64: sizes, ttls, staleness half-life, jitter spread.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SIZE, POSITION, COUNT, BEFORE, HASH, NAME = range(6)
# ctl
N_SIZES, N_TTLS, TABLE, POSITIONS, TRACKED, NEXT, SHIFT, SALT = range(8)
# after the two blocks of ``sums``
REQUESTS, WEIGHT, HOT = range(3)


class State(NamedTuple):
    """The arrays of one ghost, in the order in which the compiled functions take them; see the module's description."""

    slots: Ints
    written: Floats
    places: npt.NDArray[np.int32]
    tree: Ints
    sums: Floats
    ctl: Ints
    grid: Floats


_STATE = "int64[:,::1], float64[:,::1], int32[::1], int64[::1], float64[::1], int64[::1], float64[::1]"
_JITTER = np.uint64(0x7474_6C00)


@njit("uint64(uint64)", cache=True)
def mix64(value: int | np.uint64) -> np.uint64:
    """:func:`serving.keys.mix64`, compiled."""
    z = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit("float64[::1](uint64[::1])", cache=True)
def jitter_units(keys: npt.NDArray[np.uint64]) -> Floats:
    """Return where in 0..1 each key's TTL jitter lies: ``ttl_jitter(key, spread) == 1 - spread * unit``."""
    units = np.empty(len(keys))
    for row in range(len(keys)):
        units[row] = mix64(keys[row] ^ _JITTER) / 2.0**64
    return units


@njit(cache=True)
def _add(tree: Ints, position: int, amount: int) -> None:
    while position < len(tree):
        tree[position] += amount
        position += position & -position


@njit(cache=True)
def _sum_to(tree: Ints, position: int) -> int:
    total = 0
    while position > 0:
        total += tree[position]
        position -= position & -position
    return total


@njit(cache=True)
def _rebuild(slots: Ints, keep: npt.NDArray[np.bool_], places: npt.NDArray[np.int32], tree: Ints, ctl: Ints) -> None:
    """Renumber positions from 1 without gaps, keep only the marked slots, rebuild the table, the tree and the free list."""
    table, positions = ctl[TABLE], ctl[POSITIONS]
    free = table + positions + 1
    last = 0
    for position in range(1, ctl[NEXT]):
        slot = places[table + position] - 1
        places[table + position] = 0
        if slot >= 0 and keep[slot]:
            last += 1
            places[table + last] = slot + 1
            slots[slot, POSITION] = last
    tree[:] = 0
    for position in range(1, len(tree)):
        # Past the last key too: sums have to reach the nodes of positions that are still free.
        if position <= last:
            tree[position] += slots[places[table + position] - 1, SIZE]
        parent = position + (position & -position)
        if parent < len(tree):
            tree[parent] += tree[position]
    places[:table] = 0
    tracked = 0
    spare = 0
    for slot in range(len(keep)):
        if keep[slot]:
            tracked += 1
            cell = slots[slot, HASH] & (table - 1)
            while places[cell] != 0:
                cell = (cell + 1) & (table - 1)
            places[cell] = slot + 1
        else:
            places[free + spare] = slot
            spare += 1
    ctl[NEXT] = last + 1
    ctl[TRACKED] = tracked


@njit(cache=True)
def _make_room(
    now: float, slots: Ints, written: Floats, places: npt.NDArray[np.int32], tree: Ints, ctl: Ints, grid: Floats
) -> None:
    """Drop keys that no setting can hit any more; where that frees less than a quarter, halve the sampling rate."""
    table, sizes, ttls = ctl[TABLE], ctl[N_SIZES], ctl[N_TTLS]
    largest, longest = grid[sizes - 1], grid[sizes + ttls - 1]
    capacity = len(slots)
    keep = np.zeros(capacity, np.bool_)
    for slot in range(capacity):
        # Keys of this window and of the last one are kept in any case: entropy and drift are made of them.
        keep[slot] = slots[slot, COUNT] > 0 or slots[slot, BEFORE] > 0
    weight = float(1 << ctl[SHIFT])
    above = 0
    for position in range(ctl[NEXT] - 1, 0, -1):
        slot = places[table + position] - 1
        if slot >= 0:
            size = slots[slot, SIZE]
            if above * weight + size <= largest and now - written[slot, sizes * ttls] <= longest:
                keep[slot] = True
            above += size
    tracked = keep.sum()
    while tracked > capacity * 3 // 4:
        ctl[SHIFT] += 1
        bits = np.uint64(64 - ctl[SHIFT])
        tracked = 0
        for slot in range(capacity):
            if keep[slot] and (np.uint64(slots[slot, HASH]) >> bits) != np.uint64(0):
                keep[slot] = False
            tracked += keep[slot]
    _rebuild(slots, keep, places, tree, ctl)


@njit(f"void(uint64, int64, float64, {_STATE})", cache=True)
def access(
    key: int,
    size: int,
    now: float,
    slots: Ints,
    written: Floats,
    places: npt.NDArray[np.int32],
    tree: Ints,
    sums: Floats,
    ctl: Ints,
    grid: Floats,
) -> None:
    """Account for one access to ``key``, whose entry has ``size`` bytes, at time ``now``."""
    sizes, ttls, table = ctl[N_SIZES], ctl[N_TTLS], ctl[TABLE]
    cells = sizes * ttls
    sums[2 * cells + REQUESTS] += 1.0
    name = np.uint64(key)
    mixed = mix64(name ^ np.uint64(ctl[SALT]))
    if ctl[SHIFT] > 0 and (mixed >> np.uint64(64 - ctl[SHIFT])) != np.uint64(0):
        return

    cell = np.int64(mixed) & (table - 1)
    slot = places[cell] - 1
    while slot >= 0 and slots[slot, NAME] != np.int64(name):
        cell = (cell + 1) & (table - 1)
        slot = places[cell] - 1
    if slot < 0:
        if ctl[TRACKED] == len(slots):
            _make_room(now, slots, written, places, tree, ctl, grid)
            if ctl[SHIFT] > 0 and (mixed >> np.uint64(64 - ctl[SHIFT])) != np.uint64(0):
                return
            cell = np.int64(mixed) & (table - 1)
            while places[cell] != 0:
                cell = (cell + 1) & (table - 1)
        slot = places[table + ctl[POSITIONS] + 1 + (len(slots) - ctl[TRACKED] - 1)]
        ctl[TRACKED] += 1
        places[cell] = slot + 1
        slots[slot, POSITION] = 0
        slots[slot, COUNT] = 0
        slots[slot, BEFORE] = 0
        slots[slot, HASH] = np.int64(mixed)
        slots[slot, NAME] = np.int64(name)
    if ctl[NEXT] > ctl[POSITIONS]:
        keep = np.zeros(len(slots), np.bool_)
        for cell in range(table):
            if places[cell] != 0:
                keep[places[cell] - 1] = True
        _rebuild(slots, keep, places, tree, ctl)

    weight = float(1 << ctl[SHIFT])
    sums[2 * cells + WEIGHT] += weight
    slots[slot, COUNT] += 1
    position = slots[slot, POSITION]
    first = sizes
    if position > 0:
        above = _sum_to(tree, ctl[NEXT] - 1) - _sum_to(tree, position)
        distance = above * weight + slots[slot, SIZE]
        first = 0
        while first < sizes and distance > grid[first]:
            first += 1
        if first == 0:
            sums[2 * cells + HOT] += weight
        _add(tree, position, -slots[slot, SIZE])
        places[table + position] = 0

    for setting in range(first * ttls):
        written[slot, setting] = now
    if first < sizes:
        half_life = grid[sizes + ttls]
        life = 1.0 - grid[sizes + ttls + 1] * (mix64(name ^ _JITTER) / 2.0**64)
        known_age, stale = -1.0, 0.0
        for row in range(first, sizes):
            for column in range(ttls):
                setting = row * ttls + column
                age = now - written[slot, setting]
                if age > grid[sizes + column] * life:
                    written[slot, setting] = now
                else:
                    sums[setting] += weight
                    if half_life < math.inf:
                        if age != known_age:
                            known_age, stale = age, 1.0 - 0.5 ** (age / half_life)
                        sums[cells + setting] += weight * stale

    position = ctl[NEXT]
    ctl[NEXT] = position + 1
    slots[slot, SIZE] = size
    slots[slot, POSITION] = position
    written[slot, cells] = now
    places[table + position] = slot + 1
    _add(tree, position, size)


@njit(f"void(uint64[::1], int64[::1], float64[::1], {_STATE})", cache=True)
def access_many(
    keys: npt.NDArray[np.uint64],
    entry_sizes: Ints,
    times: Floats,
    slots: Ints,
    written: Floats,
    places: npt.NDArray[np.int32],
    tree: Ints,
    sums: Floats,
    ctl: Ints,
    grid: Floats,
) -> None:
    """Account for many accesses in order of time."""
    for row in range(len(keys)):
        access(keys[row], entry_sizes[row], times[row], slots, written, places, tree, sums, ctl, grid)


@njit("void(int64[:,::1], int32[::1], int64[::1], int64[::1])", cache=True)
def forget(slots: Ints, places: npt.NDArray[np.int32], tree: Ints, ctl: Ints) -> None:
    """Empty every setting's virtual cache; the windows' counts stay."""
    table = ctl[TABLE]
    for position in range(1, ctl[NEXT]):
        slot = places[table + position] - 1
        if slot >= 0:
            slots[slot, POSITION] = 0
        places[table + position] = 0
    tree[:] = 0
    ctl[NEXT] = 1
