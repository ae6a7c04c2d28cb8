"""The parts that a trace's measures are made of, each fed chunk by chunk: keys, windows, reuse distances, bursts, popularity."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.workloads import info_kernel as kernel
from envs.workloads.info_kernel import Floats, Ints, Words

KEPT_WINDOWS = 65_536
"""Of more windows a regular sample is kept, so that memory does not grow with them."""

_SAMPLE_SHIFT = 3
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Quantiles:
    """A distribution of numbers >= 0, to within 1 %; all None where there is none.

    Attributes:
        p10: A tenth lies at or below it; and so on.
        most: The greatest.
    """

    p10: float | None
    p25: float | None
    p50: float | None
    p75: float | None
    p90: float | None
    p99: float | None
    most: float | None


@dataclass(frozen=True)
class WindowInfo:
    """One window that has requests.

    Attributes:
        start: Seconds from the trace's start.
        requests: Requests in it.
        keys: Keys asked for: the working set.
        bytes: Bytes of their entries.
        entropy: Of the distribution of requests over keys, bits.
        divergence: Jensen-Shannon distance (0..1) of that distribution from the window's before; None for the first.
        noise: The same between two random halves of both windows together: what so few requests differ by chance.
        new_share: Share of its requests that go to keys new in it.
    """

    start: float
    requests: int
    keys: int
    bytes: float
    entropy: float
    divergence: float | None
    noise: float | None
    new_share: float


@dataclass(frozen=True)
class Scale:
    """How bursty arrivals are on one scale of time.

    Attributes:
        seconds: Width of the bins.
        dispersion: Index of dispersion of counts: variance over mean of arrivals in a bin; 1 for a Poisson process.
        peak_to_mean: Most arrivals in a bin over the mean.
    """

    seconds: float
    dispersion: float | None
    peak_to_mean: float | None


_ZERO_AT_FIRST = (
    *("names", "counts", "last", "held", "weights", "sizes"),
    *("now", "half", "before", "half_before", "members", "members_before"),
)


class KeyTable:
    """Keys by number, in the order of their first appearance, and what is kept of each."""

    def __init__(self) -> None:
        self.count = 0
        self.names: Words = np.zeros(0, np.uint64)
        self.counts: Ints = np.zeros(0, np.int64)
        self.last: Floats = np.zeros(0)
        self.held: Ints = np.zeros(0, np.int64)
        self.now: Ints = np.zeros(0, np.int64)
        self.half: Ints = np.zeros(0, np.int64)
        self.sizes: Ints = np.zeros(0, np.int64)
        self.before: Ints = np.zeros(0, np.int64)
        self.half_before: Ints = np.zeros(0, np.int64)
        self.members: Ints = np.zeros(0, np.int64)
        self.members_before: Ints = np.zeros(0, np.int64)
        self.since: Ints = np.zeros(0, np.int64)
        self.positions: Ints = np.zeros(0, np.int64)
        self.weights: Ints = np.zeros(0, np.int64)
        self._places: Ints = np.full(2, -1, np.int64)

    def numbers(self, keys: Words) -> Ints:
        """Return the number of each key, shape (N,)."""
        self._make_room(self.count + len(keys))
        numbers = np.empty(len(keys), np.int64)
        self.count = kernel.number_keys(np.ascontiguousarray(keys), self.names, self.count, self._places, numbers)
        return numbers

    def _make_room(self, needed: int) -> None:
        if needed > len(self.names):
            room = max(needed, len(self.names) + len(self.names) // 2)
            for name in _ZERO_AT_FIRST:
                setattr(self, name, _longer(getattr(self, name), room, 0))
            for name in ("since", "positions"):
                setattr(self, name, _longer(getattr(self, name), room, -1))
        if 2 * needed > len(self._places):
            self._places = np.full(1 << (4 * needed - 1).bit_length(), -1, np.int64)
            kernel.place_keys(self.names, self.count, self._places)


class Windows:
    """Windows of equal width; those without requests are passed over.

    Attributes:
        width: Seconds.
        count: Windows with requests so far.
    """

    def __init__(self, width: float, keys: KeyTable) -> None:
        self.width = width
        self.count = 0
        self._stride = 1
        self._keys = keys
        self._number = 0
        self._requests = self._count = self._count_before = self._seen = 0
        self._done: list[tuple[float, ...]] = []

    def add(self, numbers: Ints, size: Ints, time: Floats) -> None:
        """Take the next requests."""
        keys = self._keys
        number = np.floor(time / self.width).astype(np.int64)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(number)) + 1, [len(number)]))
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            if number[start] != self._number:
                self._close()
                self._number = int(number[start])
            self._count = kernel.tally(
                numbers[start:stop], size[start:stop], self._seen, keys.now, keys.half, keys.sizes, keys.members, self._count
            )
            self._requests += stop - start
            self._seen += stop - start

    def _close(self) -> None:
        if not self._requests:
            return
        keys, result = self._keys, np.zeros(5)
        kernel.close_window(
            keys.now,
            keys.half,
            keys.members,
            self._count,
            keys.before,
            keys.half_before,
            keys.members_before,
            self._count_before,
            keys.since,
            keys.sizes,
            result,
        )
        if self.count % self._stride == 0:
            self._done.append((self._number * self.width, self._requests, self._count, *result.tolist()))
        self.count += 1
        if len(self._done) == KEPT_WINDOWS:
            self._done = self._done[::2]
            self._stride *= 2
        self._count_before, self._count, self._requests = self._count, 0, 0

    def finish(self, end: float) -> list[WindowInfo]:
        """Return all windows; every second, fourth, ... of more than :data:`KEPT_WINDOWS`."""
        self._close()
        return [
            WindowInfo(
                start=start,
                requests=int(requests),
                keys=int(keys),
                bytes=space,
                entropy=abs(entropy),
                divergence=_distance(divergence),
                noise=_distance(noise),
                new_share=new / requests,
            )
            for start, requests, keys, space, entropy, divergence, noise, new in self._done
        ]


class Distances:
    """Reuse distances: exact for a while, then of a sample of keys."""

    def __init__(self, keys: KeyTable, exact_requests: int) -> None:
        self._table = keys
        self._exact = exact_requests
        self.shift = 0
        self.keys = np.zeros(kernel.BINS, np.int64)
        self.space = np.zeros(kernel.BINS, np.int64)
        self._owners = np.full(1 << 16, -1, np.int64)
        self._tree = np.zeros((2, (1 << 16) + 1), np.int64)
        self._state = np.zeros(4, np.int64)

    def add(self, numbers: Ints, size: Ints) -> None:
        """Take the next requests."""
        row = 0
        while True:
            keys = self._table
            row = kernel.measure(
                numbers,
                size,
                row,
                keys.names,
                self.shift,
                keys.positions,
                keys.weights,
                self._owners,
                self._tree,
                self._state,
                self.keys,
                self.space,
            )
            if row == len(numbers):
                break
            self._compact()
        if self._state[3] >= self._exact:
            self.shift += _SAMPLE_SHIFT
            self._state[3] = 0
            self._compact()

    def result(self, reuses: int, mean_size: int) -> tuple[Quantiles, Quantiles]:
        """Return the distances in keys and in bytes.

        Args:
            reuses: All requests for known keys. What a sample stands for is off by the hottest keys, which are all in it or
                all out; the difference goes to the shortest distances (SHARDS-adj, Waldspurger et al., FAST'15).
            mean_size: Bytes of a request's entry on average.
        """
        keys, space = self.keys.copy(), self.space.copy()
        if self.shift:
            keys[0] = max(0, keys[0] + reuses - int(keys.sum()))
            nearest = int(kernel.bin_of(mean_size))
            space[nearest] = max(0, space[nearest] + reuses - int(space.sum()))
        return of_histogram(keys), of_histogram(space)

    def _compact(self) -> None:
        # Half of the positions are free afterwards, so that it is done once in as many requests as there are keys.
        room = max(1 << 16, 1 << (2 * int(self._state[1])).bit_length())
        owners, tree = np.full(room, -1, np.int64), np.zeros((2, room + 1), np.int64)
        keys = self._table
        kernel.compact(keys.names, self.shift, keys.positions, keys.weights, self._owners, owners, tree, self._state)
        self._owners, self._tree = owners, tree


class Bins:
    """Arrivals in bins of equal width."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._bin, self._in_bin = 0, 0
        self._bins = 0
        self._sum = self._most = 0
        self._squares = 0.0

    def add(self, time: Floats) -> None:
        """Take the next arrivals."""
        if not len(time):
            return
        bins = np.floor(time / self._width).astype(np.int64)
        places, counts = np.unique(bins, return_counts=True)
        if places[0] == self._bin:
            counts[0] += self._in_bin
        elif self._in_bin:
            places, counts = np.concatenate(([self._bin], places)), np.concatenate(([self._in_bin], counts))
        closed = counts[:-1]
        self._sum += int(closed.sum())
        self._squares += (
            int((closed.astype(object) ** 2).sum()) if len(closed) and closed.max() > 2**31 else int((closed**2).sum())
        )
        self._most = max(self._most, int(closed.max(initial=0)))
        self._bin, self._in_bin = int(places[-1]), int(counts[-1])
        self._bins = self._bin

    def result(self) -> Scale:
        """Sum up the bins that are over; the last one is not."""
        if self._bins < 2 or not self._sum:
            return Scale(self._width, None, None)
        mean = self._sum / self._bins
        return Scale(self._width, (self._squares / self._bins - mean**2) / mean, self._most / mean)


class Gaps:
    """Gaps between arrivals."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, time: Floats) -> None:
        """Take the next arrivals (Chan's update of mean and variance)."""
        if not len(time):
            return
        gaps = np.diff(time, prepend=time[0] if self._last is None else self._last)
        if self._last is None:
            gaps = gaps[1:]
        self._last = float(time[-1])
        if not len(gaps):
            return
        count, mean = len(gaps), float(gaps.mean())
        apart, together = mean - self._mean, self._count + count
        self._squares += float(((gaps - mean) ** 2).sum()) + apart**2 * self._count * count / together
        self._mean += apart * count / together
        self._count = together

    def variation(self) -> float | None:
        """Return the coefficient of variation; None where it is not defined."""
        if self._count < 2 or self._mean <= 0:
            return None
        return math.sqrt(self._squares / self._count) / self._mean


def zipf_exponent(counts: Ints) -> tuple[float | None, float | None]:
    """Fit requests by rank to a power law.

    Args:
        counts: Requests of each key, shape (K,).

    Returns:
        The exponent and r squared of a least-squares line through log count by log rank, at ranks that are spaced evenly in
        their logarithm, over keys with at least five requests; None where there are fewer than ten such keys.
    """
    ordered = np.sort(counts[counts >= 5])[::-1].astype(np.float64)
    if len(ordered) < 10 or ordered[0] == ordered[-1]:
        return None, None
    ranks = np.unique(np.geomspace(1, len(ordered), 64).astype(np.int64))
    across, up = np.log(ranks.astype(np.float64)), np.log(ordered[ranks - 1])
    slope, intercept = np.polyfit(across, up, 1)
    left = up - (slope * across + intercept)
    return float(-slope), float(1.0 - left.var() / up.var())


def _longer(column: npt.NDArray[Any], room: int, absent: int) -> npt.NDArray[Any]:
    longer = np.full(room, absent, column.dtype)
    longer[: len(column)] = column
    return longer


def _bin_values() -> Floats:
    """Return the middle of each bin of the kernel's histograms."""
    bins = np.arange(kernel.BINS)
    octave, step = np.divmod(bins - 128, 64)
    values = (64.0 + step + 0.5) * 2.0 ** (octave + 1) - 0.5
    return np.where(bins < 128, bins, values)


def of_histogram(histogram: Ints, unit: float = 1.0) -> Quantiles:
    """Return the quantiles of a histogram over the kernel's bins, in multiples of ``unit``."""
    cumulative = np.cumsum(histogram)
    total = int(cumulative[-1])
    if not total:
        return Quantiles(None, None, None, None, None, None, None)
    values = _bin_values() * unit
    at = [
        float(values[np.searchsorted(cumulative, math.ceil(share * total))]) for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    ]
    return Quantiles(*at)


def quantiles(values: list[float] | list[int]) -> Quantiles:
    """Return the quantiles of a few numbers."""
    if not values:
        return Quantiles(None, None, None, None, None, None, None)
    return Quantiles(*(float(value) for value in np.quantile(values, _SHARES)))


def _distance(divergence: float) -> float | None:
    """Return the distance of a Jensen-Shannon divergence in bits: its root, a metric within 0..1."""
    return None if math.isnan(divergence) else math.sqrt(min(max(divergence, 0.0), 1.0))


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def slope(across: list[float], up: list[float]) -> float | None:
    """Return the slope of a least-squares line; None for fewer than three points."""
    return float(np.polyfit(across, up, 1)[0]) if len(across) > 2 else None
