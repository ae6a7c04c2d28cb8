"""The few functions of PromQL that the signals need, as Prometheus computes them. Pure.

A matrix of samples has one row per scrape and one column per series; NaN means that the series was absent from that scrape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

STALENESS = 300.0
"""Seconds after which a series without a new sample is gone (Prometheus' default lookback)."""

_EDGE = 1.1
"""A sample within 1.1 mean sampling intervals of the window's edge is taken to be followed by another one beyond it."""


def increase(
    times: npt.NDArray[np.float64], values: npt.NDArray[np.float64], start: float, end: float
) -> npt.NDArray[np.float64]:
    """Return what each counter grew by between ``start`` and ``end``, extrapolated to these edges.

    This is Prometheus' ``increase`` (``extrapolatedRate``, with the limit at zero as corrected in Prometheus 2.52): a fall of the
    value is a restart from 0; the growth seen between the first and the last sample is stretched to the window's edges where a
    sample lies within 1.1 mean sampling intervals of them, else by half an interval, and never to before the counter was 0.

    Args:
        times: When each row was sampled, seconds, ascending, shape (N,).
        values: Samples, NaN where absent, shape (N, S).
        start: Start of the window, seconds, included.
        end: End of the window, seconds, included.

    Returns:
        Growth of each series, shape (S,); NaN for a series with fewer than two samples in the window.
    """
    inside = (times >= start) & (times <= end)
    t, v = times[inside], values[inside]
    grown = np.full(values.shape[1], math.nan)
    if len(t) < 2:
        return grown
    present = ~np.isnan(v)
    count = present.sum(axis=0)
    columns = np.flatnonzero(count >= 2)
    if not len(columns):
        return grown
    v, present, count = v[:, columns], present[:, columns], count[columns]
    rows = np.arange(len(t))[:, None]
    across = np.arange(len(columns))
    first = np.argmax(present, axis=0)
    last = len(t) - 1 - np.argmax(present[::-1], axis=0)
    filled = v[np.maximum.accumulate(np.where(present, rows, first), axis=0), across]
    lost = np.where(filled[1:] < filled[:-1], filled[:-1], 0.0).sum(axis=0)
    begin = v[first, across]
    growth = v[last, across] - begin + lost

    sampled = t[last] - t[first]
    spacing = sampled / (count - 1)
    to_start, to_end = t[first] - start, end - t[last]
    to_start = np.where(to_start >= _EDGE * spacing, spacing / 2, to_start)
    to_end = np.where(to_end >= _EDGE * spacing, spacing / 2, to_end)
    rising = growth > 0
    to_zero = np.where(rising & (begin >= 0), sampled * begin / np.where(rising, growth, 1.0), math.inf)
    grown[columns] = growth * (sampled + np.minimum(to_start, to_zero) + to_end) / sampled
    return grown


def histogram_quantile(q: float, buckets: Iterable[tuple[float, float]]) -> float:
    """Return a quantile of a histogram as Prometheus' ``histogram_quantile`` does: linear within a bucket.

    Args:
        q: Which quantile, 0..1.
        buckets: Upper bound and cumulative count (or rate) of each bucket, in any order; equal bounds are added up.

    Returns:
        The quantile in the unit of the bounds. The largest finite bound where the quantile lies beyond it; NaN without a bucket
        ``+Inf``, with no other bucket, or without observations; -inf and inf for ``q`` below 0 and above 1.
    """
    if math.isnan(q):
        return math.nan
    if q < 0 or q > 1:
        return math.copysign(math.inf, q)
    merged: dict[float, float] = {}
    for bound, count in buckets:
        merged[bound] = merged.get(bound, 0.0) + count
    bounds = sorted(merged)
    if len(bounds) < 2 or bounds[-1] != math.inf:
        return math.nan
    # Rates of the buckets are extrapolated one by one and may fall by a hair where they may not.
    counts = np.maximum.accumulate([merged[bound] for bound in bounds])
    total = float(counts[-1])
    if not total > 0:
        return math.nan
    rank = q * total
    index = min(int(np.searchsorted(counts[:-1], rank, side="left")), len(bounds) - 1)
    if index == len(bounds) - 1:
        return bounds[-2]
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    low, below = (0.0, 0.0) if index == 0 else (bounds[index - 1], float(counts[index - 1]))
    inside = float(counts[index]) - below
    if inside == 0:  # only q = 0 of a histogram whose first buckets are empty: Prometheus divides 0 by 0
        return math.nan
    return low + (bounds[index] - low) * (rank - below) / inside
