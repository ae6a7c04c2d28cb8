"""The compiled core of :mod:`serving.ghost`: a sampled shadow of reuse distance (bytes) and reuse age.

All state lives in a few flat arrays, so that one access is one call into compiled code with little to unpack; :class:`State` says
what is in them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int32]
Word = int | np.int64 | np.uint64

# columns of ``slots``
SIZE, POSITION, COUNT, BEFORE, HASH, NAME, HOT, N_COLUMNS = range(8)
# ``ctl``: lengths, then where things stand
N_SIZES, N_TTLS, TABLE, POSITIONS, HEAT, SALT, TRACKED, NEXT, SHIFT, HOT_KEYS, COUNTED, N_CTL = range(12)
# after the four blocks of ``sums``
REQUESTS, SAMPLED, CERTAIN, N_TOTALS = range(4)

_LEAST_HEAT = 8
"""Fewer recent accesses never make a key hot."""


class State(NamedTuple):
    """The arrays of one ghost, in the order in which the compiled functions take them, for M keys, S sizes and T TTLs.

    Attributes:
        slots: Per tracked key: bytes, position, counts of this and of the last window, hash and name (bit patterns), whether it
            is hot, (M, N_COLUMNS).
        written: Per tracked key and setting the time of the virtual write; last column: of the last access, (M, S * T + 1).
        places: Hash table of slots, the slot at each position, the free slots (each of them + 1, 0: none; free ones plain).
        tree: Fenwick tree over positions of the bytes that each key stands for, (positions + 1,).
        sums: Four blocks of S * T: hits and stale hits of the sample (weighted), the same of the hot keys; then N_TOTALS totals.
        ctl: Lengths and where things stand, (N_CTL,).
        grid: Sizes, TTLs, staleness half-life, jitter, (S + T + 2,).
        heat: Count-min sketch of recent accesses to all keys, two rows, (2 * HEAT,).
    """

    slots: Ints
    written: Floats
    places: Places
    tree: Ints
    sums: Floats
    ctl: Ints
    grid: Floats
    heat: Places


_STATE = "int64[:,::1], float64[:,::1], int32[::1], int64[::1], float64[::1], int64[::1], float64[::1], int32[::1]"
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
def _add(tree: Ints, position: int, amount: int | np.int64) -> None:
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
def _sampled(mixed: Word, ctl: Ints) -> np.bool_:
    """Whether a hash is within the sample."""
    inside: np.bool_ = ctl[SHIFT] == 0 or (np.uint64(mixed) >> np.uint64(64 - ctl[SHIFT])) == np.uint64(0)
    return inside


@njit(cache=True)
def _weight(slots: Ints, slot: int, ctl: Ints) -> np.int64:
    """How many keys a tracked one stands for."""
    one = np.int64(1)
    weight: np.int64 = one if slots[slot, HOT] else one << ctl[SHIFT]
    return weight


@njit(cache=True)
def _heat(mixed: Word, step: int, ctl: Ints, heat: Places) -> int:
    """Recent accesses by the sketch (never too few), after adding ``step`` (conservative update)."""
    mask = ctl[HEAT] - 1
    first = np.int64(np.uint64(mixed) >> np.uint64(4)) & mask
    second = ctl[HEAT] + (np.int64(np.uint64(mixed) >> np.uint64(22)) & mask)
    least: int = min(heat[first], heat[second]) + step
    if step:
        heat[first] = max(heat[first], least)
        heat[second] = max(heat[second], least)
    return least


@njit(cache=True)
def _least_heat(slots: Ints, ctl: Ints) -> int:
    """Accesses from which on a key is hot: at most half of the slots' number of keys can have so many."""
    least: int = max(_LEAST_HEAT, 2 * ctl[COUNTED] // len(slots))
    return least


@njit(cache=True)
def _rebuild(slots: Ints, keep: npt.NDArray[np.bool_], places: Places, tree: Ints, ctl: Ints) -> None:
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
            slot = places[table + position] - 1
            tree[position] += slots[slot, SIZE] * _weight(slots, slot, ctl)
        parent = position + (position & -position)
        if parent < len(tree):
            tree[parent] += tree[position]
    places[:table] = 0
    tracked, hot, spare = 0, 0, 0
    for slot in range(len(keep)):
        if keep[slot]:
            tracked += 1
            hot += slots[slot, HOT]
            cell = slots[slot, HASH] & (table - 1)
            while places[cell] != 0:
                cell = (cell + 1) & (table - 1)
            places[cell] = slot + 1
        else:
            slots[slot, HOT] = 0
            places[free + spare] = slot
            spare += 1
    ctl[NEXT], ctl[TRACKED], ctl[HOT_KEYS] = last + 1, tracked, hot


@njit(cache=True)
def _used(slots: Ints, places: Places, ctl: Ints) -> npt.NDArray[np.bool_]:
    """Mark the slots that are in use."""
    keep = np.zeros(len(slots), np.bool_)
    for cell in range(ctl[TABLE]):
        if places[cell] != 0:
            keep[places[cell] - 1] = True
    return keep


@njit(cache=True)
def _make_room(
    now: float, slots: Ints, written: Floats, places: Places, tree: Ints, ctl: Ints, grid: Floats, heat: Places
) -> None:
    """Drop keys that no setting can hit any more; where that frees less than a quarter, halve the sampling rate.

    Hot keys are kept whatever the rate; cooled ones are left to the sample, and hot ones of the sample taken out of it.
    """
    table, sizes, ttls = ctl[TABLE], ctl[N_SIZES], ctl[N_TTLS]
    largest, longest = grid[sizes - 1], grid[sizes + ttls - 1]
    capacity = len(slots)
    keep = _used(slots, places, ctl)
    hittable = np.zeros(capacity, np.bool_)
    above = 0
    for position in range(ctl[NEXT] - 1, 0, -1):
        slot = places[table + position] - 1
        if slot >= 0:
            size = slots[slot, SIZE]
            hittable[slot] = above + size <= largest and now - written[slot, sizes * ttls] <= longest
            above += size * _weight(slots, slot, ctl)
    tracked = 0
    for slot in range(capacity):
        # Keys of this window and of the last one are kept in any case: entropy and drift are made of them.
        keep[slot] = keep[slot] and (hittable[slot] or slots[slot, COUNT] > 0 or slots[slot, BEFORE] > 0)
        if keep[slot] and slots[slot, HOT] and 4 * _heat(slots[slot, HASH], 0, ctl, heat) < _least_heat(slots, ctl):
            slots[slot, HOT] = 0
            ctl[HOT_KEYS] -= 1
            keep[slot] = _sampled(slots[slot, HASH], ctl)
        tracked += keep[slot]
    if tracked > capacity * 3 // 4:
        for slot in range(capacity):
            if keep[slot] and not slots[slot, HOT] and 2 * ctl[HOT_KEYS] < capacity:
                slots[slot, HOT] = _heat(slots[slot, HASH], 0, ctl, heat) >= _least_heat(slots, ctl)
                ctl[HOT_KEYS] += slots[slot, HOT]
    while tracked > capacity * 3 // 4:
        ctl[SHIFT] += 1
        tracked = 0
        for slot in range(capacity):
            keep[slot] = keep[slot] and (slots[slot, HOT] == 1 or _sampled(slots[slot, HASH], ctl))
            tracked += keep[slot]
    _rebuild(slots, keep, places, tree, ctl)


@njit(cache=True)
def _age(now: float, slots: Ints, written: Floats, places: Places, tree: Ints, ctl: Ints, grid: Floats, heat: Places) -> None:
    """Halve the sketch, so that it says what is hot lately."""
    for cell in range(len(heat)):
        heat[cell] >>= 1
    ctl[COUNTED] //= 2
    if 4 * ctl[HOT_KEYS] > len(slots):
        _make_room(now, slots, written, places, tree, ctl, grid, heat)


@njit(f"void(uint64, int64, float64, {_STATE})", cache=True)
def access(
    key: int,
    size: int,
    now: float,
    slots: Ints,
    written: Floats,
    places: Places,
    tree: Ints,
    sums: Floats,
    ctl: Ints,
    grid: Floats,
    heat: Places,
) -> None:
    """Account for one access to ``key``, whose entry has ``size`` bytes, at time ``now``."""
    sizes, ttls, table = ctl[N_SIZES], ctl[N_TTLS], ctl[TABLE]
    cells = sizes * ttls
    sums[4 * cells + REQUESTS] += 1.0
    name = np.uint64(key)
    mixed = mix64(name ^ np.uint64(ctl[SALT]))
    ctl[COUNTED] += 1
    if ctl[COUNTED] >= 16 * len(slots):
        _age(now, slots, written, places, tree, ctl, grid, heat)
    accesses = _heat(mixed, 1, ctl, heat)
    sampled = _sampled(mixed, ctl)
    hot = ctl[SHIFT] > 0 and accesses >= _least_heat(slots, ctl) and 2 * ctl[HOT_KEYS] < len(slots)

    cell = np.int64(mixed) & (table - 1)
    slot = places[cell] - 1
    while slot >= 0 and slots[slot, NAME] != np.int64(name):
        cell = (cell + 1) & (table - 1)
        slot = places[cell] - 1
    if slot < 0:
        if not (sampled or hot):
            return
        if ctl[TRACKED] == len(slots):
            _make_room(now, slots, written, places, tree, ctl, grid, heat)
            sampled = _sampled(mixed, ctl)
            if not (sampled or hot):
                return
            cell = np.int64(mixed) & (table - 1)
            while places[cell] != 0:
                cell = (cell + 1) & (table - 1)
        slot = places[table + ctl[POSITIONS] + 1 + (len(slots) - ctl[TRACKED] - 1)]
        ctl[TRACKED] += 1
        places[cell] = slot + 1
        slots[slot, :] = 0
        slots[slot, HASH] = np.int64(mixed)
        slots[slot, NAME] = np.int64(name)
    if ctl[NEXT] > ctl[POSITIONS]:
        _rebuild(slots, _used(slots, places, ctl), places, tree, ctl)

    # A key that is neither hot nor in the sample is on its way to become hot: nothing is known of its past, so it counts from the
    # next access on, and this one is left to the sample.
    weight, block = 0.0, 0
    if slots[slot, HOT]:
        weight, block = 1.0, 2 * cells
        sums[4 * cells + CERTAIN] += 1.0
    elif sampled:
        weight = float(np.int64(1) << ctl[SHIFT])
        sums[4 * cells + SAMPLED] += weight
    slots[slot, COUNT] += 1
    position = slots[slot, POSITION]
    first = sizes
    if position > 0:
        distance = _sum_to(tree, ctl[NEXT] - 1) - _sum_to(tree, position) + slots[slot, SIZE]
        first = 0
        while first < sizes and distance > grid[first]:
            first += 1
        _add(tree, position, -slots[slot, SIZE] * _weight(slots, slot, ctl))
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
                    sums[block + setting] += weight
                    if half_life < math.inf:
                        if age != known_age:
                            known_age, stale = age, 1.0 - 0.5 ** (age / half_life)
                        sums[block + cells + setting] += weight * stale

    if hot and not slots[slot, HOT]:
        slots[slot, HOT] = 1
        ctl[HOT_KEYS] += 1
    position = ctl[NEXT]
    ctl[NEXT] = position + 1
    slots[slot, SIZE] = size
    slots[slot, POSITION] = position
    written[slot, cells] = now
    places[table + position] = slot + 1
    _add(tree, position, size * _weight(slots, slot, ctl))


@njit(f"void(uint64[::1], int64[::1], float64[::1], {_STATE})", cache=True)
def access_many(
    keys: npt.NDArray[np.uint64],
    entry_sizes: Ints,
    times: Floats,
    slots: Ints,
    written: Floats,
    places: Places,
    tree: Ints,
    sums: Floats,
    ctl: Ints,
    grid: Floats,
    heat: Places,
) -> None:
    """Account for many accesses in order of time."""
    for row in range(len(keys)):
        access(keys[row], entry_sizes[row], times[row], slots, written, places, tree, sums, ctl, grid, heat)


@njit("void(int64[:,::1], int32[::1], int64[::1], int64[::1])", cache=True)
def forget(slots: Ints, places: Places, tree: Ints, ctl: Ints) -> None:
    """Empty every setting's virtual cache; the windows' counts stay."""
    table = ctl[TABLE]
    for position in range(1, ctl[NEXT]):
        slot = places[table + position] - 1
        if slot >= 0:
            slots[slot, POSITION] = 0
        places[table + position] = 0
    tree[:] = 0
    ctl[NEXT] = 1
