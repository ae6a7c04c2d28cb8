"""The hot set of a simulated arm, compiled: the same algorithm as :mod:`serving.hotset`, kept sorted."""

from __future__ import annotations

import math

import numpy as np

from envs.simulator.state import (
    ASKED_INPUT,
    ASKED_OUTPUT,
    ASKED_SIZE,
    CHANGED,
    GROUP,
    HOT_CAPACITY,
    HOT_HALF_LIFE,
    HOT_KEYS,
    HOT_ROW,
    LANDMARK,
    MATCH,
    POSITION,
    Columns,
    Floats,
    Names,
    Places,
    State,
)  # fmt: skip
from serving.compiled import compiled

_REBASE_HALF_LIVES = 512
"""As in :mod:`serving.hotset`: weights are moved to a new landmark long before they overflow."""


@compiled(allocates=False)
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


@compiled(allocates=False)
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


@compiled(allocates=False)
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


@compiled(allocates=False)
def _sort_places(places: Places, count: int) -> None:
    """Sort the first places, as :func:`_sort_changed` does."""
    gap = 1
    while gap < count // 9:
        gap = 3 * gap + 1
    while gap > 0:
        for index in range(gap, count):
            place = places[index]
            above = index - gap
            while above >= 0 and places[above] > place:
                places[above + gap] = places[above]
                above -= gap
            places[above + gap] = place
        gap //= 3


@compiled(allocates=False)
def _copy(keys: Places, weights: Floats, first: int, last: int, hot: Places, weight: Floats, into: int) -> int:
    """Copy a stretch of keys and weights; return where the next one goes."""
    count = last - first
    if count <= 0:
        return into
    # Loops from 0 over views: only then does the compiler know that no place is negative, and moves whole vectors.
    from_keys, from_weights, to_keys, to_weights = keys[first:last], weights[first:last], hot[into:], weight[into:]
    for place in range(count):
        to_keys[place] = from_keys[place]
    for place in range(count):
        to_weights[place] = from_weights[place]
    return into + count


@compiled(allocates=False)
def _merge_changed(state: State, count: int, lost: int) -> int:
    """Merge ``count`` changed keys into the sorted ones, in place of the ``lost`` ones they were; return how many there are."""
    hot, weight, weight_of, names, changed, gone = (
        state.hot, state.weight, state.weight_of, state.names, state.changed, state.gone
    )  # fmt: skip
    old = state.ints[HOT_KEYS]
    _sort_changed(changed, count, weight_of, names)
    _sort_places(gone, lost)
    rank = state.rank
    for place in range(count):
        rank[place] = _rank(hot, weight, names, old, weight_of[changed[place]], names[changed[place]])
    # Weights only grow: nothing before the first new place changes.
    first = rank[0]
    keys, weights = state.spare, state.spare_weight
    # Where no key is new, nothing behind the last one that has moved changes either.
    end = gone[lost - 1] + 1 if lost == count else old
    _copy(hot, weight, first, end, keys, weights, first)
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
    into = _copy(keys, weights, cursor, end, hot, weight, into)
    total: int = into + old - end
    return total


@compiled(allocates=False)
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


@compiled(allocates=False)
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
