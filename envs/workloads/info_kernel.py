"""The compiled core of :mod:`envs.workloads.info`: a table of keys, windows of counts, reuse distances by a Fenwick tree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from serving.compiled import compiled
from serving.ghost_kernel import mix64

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

BINS = 128 + 56 * 64
"""Bins of a histogram of whole numbers: exact below 128, 64 to an octave above (each within 0.8 % of its middle)."""


@compiled()
def sampled(name: np.uint64, shift: int) -> bool:
    """Tell whether a key is in the sample of one in ``2 ** shift`` keys; smaller samples are parts of greater ones."""
    return shift == 0 or mix64(name ^ np.uint64(0x5EED0F1A7E57ED00)) >> np.uint64(64 - shift) == np.uint64(0)


@compiled()
def place_keys(names: Words, count: int, places: Ints) -> None:
    """Enter the first ``count`` names into an empty hash table (-1 everywhere) of a power of two of places."""
    mask = np.uint64(len(places) - 1)
    for number in range(count):
        at = np.int64(mix64(names[number]) & mask)
        while places[at] >= 0:
            at = (at + 1) & np.int64(mask)
        places[at] = number


@compiled()
def number_keys(keys: Words, names: Words, count: int, places: Ints, numbers: Ints) -> int:
    """Number keys in the order of their first appearance.

    Args:
        keys: The keys, (N,).
        names: The key of each number, with room for N more.
        count: Keys that have a number.
        places: Hash table of numbers, at most half full even with N more.
        numbers: Is filled with each key's number, (N,).

    Returns:
        Keys that have a number now.
    """
    mask = np.uint64(len(places) - 1)
    for row in range(len(keys)):
        key = keys[row]
        at = np.int64(mix64(key) & mask)
        while places[at] >= 0 and names[places[at]] != key:
            at = (at + 1) & np.int64(mask)
        if places[at] < 0:
            places[at] = count
            names[count] = key
            count += 1
        numbers[row] = places[at]
    return count


@compiled()
def bin_of(value: int | np.int64) -> int | np.int64:
    """Return the bin of a whole number >= 0."""
    if value < 128:
        return value
    octave = 0
    rest = value
    while rest >= 128:
        rest >>= 1
        octave += 1
    return 128 + (octave - 1) * 64 + (rest - 64)


@compiled()
def recall(
    numbers: Ints,
    time: Floats,
    size: Ints,
    chain: npt.NDArray[np.int32],
    counts: Ints,
    last: Floats,
    held: Ints,
    ages: Ints,
    totals: Ints,
    hit: Flags,
) -> None:
    """Follow an infinite cache over a chunk.

    Args:
        numbers: Number of each request's key, (N,).
        time: Its arrival, seconds.
        size: Its bytes.
        chain: Its place in its chain of prefix blocks.
        counts: Requests of each key so far.
        last: When each key was last asked for.
        held: Bytes of each key's entry as last asked for.
        ages: Histogram of the time since a key was last asked for, in microseconds.
        totals: Hits, bytes of hits, hits with prefix semantics, bytes of these; added to.
        hit: One element: whether the block before the first one was a hit with prefix semantics; kept from chunk to chunk.
    """
    before = hit[0]
    for row in range(len(numbers)):
        key = numbers[row]
        known = counts[key] > 0
        before = known and (chain[row] == 0 or before)
        if known:
            totals[0] += 1
            totals[1] += size[row]
            ages[bin_of(np.int64((time[row] - last[key]) * 1e6))] += 1
        if before:
            totals[2] += 1
            totals[3] += size[row]
        counts[key] += 1
        last[key] = time[row]
        held[key] = size[row]
    hit[0] = before


@compiled()
def tally(numbers: Ints, size: Ints, first: int, now: Ints, half: Ints, sizes: Ints, members: Ints, count: int) -> int:
    """Count a part of a window's requests by key, a half of them at random in ``half`` too. Return the window's keys so far.

    Args:
        numbers: Number of each request's key, (N,).
        size: Its bytes, (N,).
        first: Place of the first request within the trace, which makes the random half the same each time.
        now: Requests of each key in the window, added to.
        half: Of the half; added to.
        sizes: Bytes of each key's entry as last asked for in the window.
        members: Keys of the window, the first ``count``.
        count: How many.
    """
    for row in range(len(numbers)):
        key = numbers[row]
        if now[key] == 0:
            members[count] = key
            count += 1
        now[key] += 1
        sizes[key] = size[row]
        half[key] += np.int64(mix64(np.uint64(first + row)) & np.uint64(1))
    return count


@compiled()
def close_window(
    now: Ints,
    half: Ints,
    members: Ints,
    count: int,
    before: Ints,
    half_before: Ints,
    members_before: Ints,
    count_before: int,
    since: Ints,
    sizes: Ints,
    result: Floats,
) -> None:
    """Sum a window up, and make it the window before the next.

    Args:
        now: Requests of each key in the window; set to 0.
        half: Of a random half of the requests; set to 0.
        members: Keys of the window, the first ``count``.
        count: How many.
        before: Requests of each key in the window before; becomes this window's.
        half_before: Of the random half of that window's requests; becomes this window's.
        members_before: Keys of that window, the first ``count_before``; becomes this window's.
        count_before: How many.
        since: Requests before the window at each key's first appearance was counted: -1 for keys new in this window; set to 0.
        sizes: Bytes of each key's entry.
        result: Is filled: bytes of the working set, entropy (bits), divergence from the window before (NaN for the first),
            divergence between the random half of both windows together and the rest, requests of keys that are new in it.
    """
    total, halves, total_before, halves_before = 0, 0, 0, 0
    for place in range(count):
        total += now[members[place]]
        halves += half[members[place]]
    for place in range(count_before):
        total_before += before[members_before[place]]
        halves_before += half_before[members_before[place]]
    halves += halves_before
    others = total + total_before - halves
    space, entropy, divergence, noise, new = 0.0, 0.0, 0.0, 0.0, 0
    for place in range(count):
        key = members[place]
        share = now[key] / total
        space += sizes[key]
        entropy -= share * np.log2(share)
        if since[key] < 0:
            new += now[key]
            since[key] = 0
        if total_before:
            divergence += _part(share, before[key] / total_before)
        if halves and others:
            one = half[key] + half_before[key]
            noise += _part(one / halves, (now[key] + before[key] - one) / others)
    for place in range(count_before):
        key = members_before[place]
        if now[key] == 0:
            divergence += _part(before[key] / total_before, 0.0)
            if halves and others:
                noise += _part(half_before[key] / halves, (before[key] - half_before[key]) / others)
        before[key] = 0
        half_before[key] = 0
    for place in range(count):
        key = members[place]
        before[key] = now[key]
        half_before[key] = half[key]
        members_before[place] = key
        now[key] = 0
        half[key] = 0
    result[0] = space
    result[1] = entropy
    result[2] = divergence if total_before else np.nan
    result[3] = noise if total_before and halves and others else np.nan
    result[4] = new


@compiled()
def _part(one: float, other: float) -> float:
    """Return what one key adds to the Jensen-Shannon divergence of two distributions, bits."""
    middle = (one + other) / 2.0
    part = 0.0
    if one > 0.0:
        part += one * np.log2(one / middle) / 2.0
    if other > 0.0:
        part += other * np.log2(other / middle) / 2.0
    return part


@compiled()
def measure(
    numbers: Ints,
    size: Ints,
    start: int,
    names: Words,
    shift: int,
    positions: Ints,
    weights: Ints,
    owners: Ints,
    tree: Ints,
    state: Ints,
    keys: Ints,
    space: Ints,
) -> int:
    """Measure reuse distances from row ``start`` until the chunk ends or the positions are used up.

    Args:
        numbers: Number of each request's key, (N,).
        size: Its bytes, (N,).
        start: Row to begin with.
        names: The key of each number.
        shift: Only one key in ``2 ** shift`` is followed.
        positions: Position of each key's last request, -1 for none.
        weights: Bytes of each key's entry at that request.
        owners: Key at each position, (P,); -1 where there is none.
        tree: Fenwick trees over positions of keys and of bytes, (2, P + 1).
        state: Next position, keys that have one, their bytes, requests followed; kept.
        keys: Histogram of distinct other keys asked in between, weighted by what the sample stands for.
        space: Histogram of the bytes of these and of the entry itself.

    Returns:
        The row at which it stopped.
    """
    last = tree.shape[1] - 1
    for row in range(start, len(numbers)):
        key = numbers[row]
        if not sampled(names[key], shift):
            continue
        position = state[0]
        if position == last:
            return row
        old = positions[key]
        if old >= 0:
            # Keys and bytes at positions up to the old one; what is after it was asked for in between.
            below, bytes_below = 0, 0
            at = old + 1
            while at > 0:
                below += tree[0, at]
                bytes_below += tree[1, at]
                at -= at & -at
            others = (state[1] - below) << shift
            between = (state[2] - bytes_below) << shift
            keys[bin_of(others)] += 1 << shift
            space[bin_of(between + size[row])] += 1 << shift
            at = old + 1
            while at <= last:
                tree[0, at] -= 1
                tree[1, at] -= weights[key]
                at += at & -at
            owners[old] = -1
            state[1] -= 1
            state[2] -= weights[key]
        at = position + 1
        while at <= last:
            tree[0, at] += 1
            tree[1, at] += size[row]
            at += at & -at
        positions[key] = position
        weights[key] = size[row]
        owners[position] = key
        state[0] += 1
        state[1] += 1
        state[2] += size[row]
        state[3] += 1
    return len(numbers)


@compiled()
def compact(
    names: Words, shift: int, positions: Ints, weights: Ints, owners: Ints, new_owners: Ints, tree: Ints, state: Ints
) -> None:
    """Give the keys that are followed the first positions, in their order; the others none.

    Args:
        names: The key of each number.
        shift: Only one key in ``2 ** shift`` is followed from now on.
        positions: Position of each key, rewritten.
        weights: Bytes of each key.
        owners: Key at each position.
        new_owners: The same afterwards, -1 everywhere, with room for all.
        tree: Fenwick trees over the new positions, all 0.
        state: As of :func:`measure`, rewritten.
    """
    last = tree.shape[1] - 1
    kept, total = 0, 0
    for position in range(state[0]):
        key = owners[position]
        if key < 0:
            continue
        if not sampled(names[key], shift):
            positions[key] = -1
            continue
        positions[key] = kept
        new_owners[kept] = key
        tree[0, kept + 1] = 1
        tree[1, kept + 1] = weights[key]
        kept += 1
        total += weights[key]
    for at in range(1, last + 1):
        above = at + (at & -at)
        if above <= last:
            tree[0, above] += tree[0, at]
            tree[1, above] += tree[1, at]
    state[0] = kept
    state[1] = kept
    state[2] = total
