"""Estimates for requests that are not independent: everything is clustered by key.

Whether a request hits depends on the earlier requests of the same key, and arms are assigned by key. So keys are the sample, not
requests: a test that counts requests finds a difference in almost every comparison of an arm with itself. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc, stdtrit

Floats = npt.NDArray[np.float64]

_CELLS = 4_000_000
"""Cells of the largest array that a bootstrap holds at once."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and how well it is known.

    Attributes:
        value: The estimate.
        se: Its standard error; NaN where it cannot be known (fewer than 2 clusters).
        df: Degrees of freedom of the standard error, >= 1 (NaN with ``se``).
    """

    value: float
    se: float
    df: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A number with the interval around it; the bounds are NaN where there is too little to tell.

    Attributes:
        value: The estimate.
        low: Lower bound.
        high: Upper bound.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def known(self) -> bool:
        """Whether both bounds are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def to_dict(self) -> dict[str, float | None]:
        """Return ``value``, ``low`` and ``high``, JSON-ready: what is not finite is None."""
        return {name: number if math.isfinite(number) else None for name, number in zip(
            ("value", "low", "high"), (self.value, self.low, self.high), strict=True)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replicates:
    """What a bootstrap drew.

    Attributes:
        totals: Weighted column totals, shape (B, columns).
        quantiles: Weighted quantiles, shape (B, quantiles); NaN where a replicate drew no cluster.
    """

    totals: Floats
    quantiles: Floats


def effective_clusters(sizes: npt.ArrayLike) -> float:
    """Return Kish's effective number of clusters, ``(sum m)^2 / sum m^2``: how many equal clusters would tell as much.

    Args:
        sizes: Requests of each cluster, shape (K,).

    Returns:
        Between 1 and K; 0 without requests.
    """
    m = np.asarray(sizes, np.float64)
    square = float(np.sum(m * m))
    return float(np.sum(m)) ** 2 / square if square > 0 else 0.0


def ratio(numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, fixed: float = 0.0) -> Estimate:
    """Estimate a ratio of sums, ``(sum y + fixed) / sum m``, over clusters that are the sample.

    The standard error is the delta method's, from the linearised residuals ``e_k = y_k - R m_k``. Each is divided by
    ``1 - m_k / sum m``, since a hot key pulls the ratio towards itself and thereby hides its own residual (Bell & McCaffrey '02).
    A few hot keys also make the standard error itself uncertain: its degrees of freedom are Satterthwaite's,
    ``2 (sum e^2)^2 / sum e^4``.

    Args:
        numerators: Sum of each cluster, shape (K,).
        denominators: Requests of each cluster, shape (K,), > 0.
        fixed: What the whole arm adds to the numerator whichever keys it has (its memory).

    Returns:
        The estimate; all NaN without clusters.
    """
    y, m = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    total = float(np.sum(m))
    if not total > 0:
        return Estimate(math.nan, math.nan, math.nan)
    value = (float(np.sum(y)) + fixed) / total
    if len(m) < 2:
        return Estimate(value, math.nan, math.nan)
    squares = ((y - value * m) / (1.0 - m / total)) ** 2
    variance = float(np.sum(squares))
    fourth = float(np.sum(squares**2))
    df = max(1.0, min(2.0 * variance**2 / fourth, len(m) - 1.0)) if fourth > 0 else len(m) - 1.0
    return Estimate(value, math.sqrt(variance) / total, df)


def difference(treatment: Estimate, control: Estimate) -> Estimate:
    """Return treatment minus control for arms with disjoint keys (Welch's degrees of freedom)."""
    parts = (treatment.se**2, control.se**2)
    variance = sum(parts)
    spread = parts[0] ** 2 / treatment.df + parts[1] ** 2 / control.df
    df = variance**2 / spread if spread > 0 else min(treatment.df, control.df)
    return Estimate(treatment.value - control.value, math.sqrt(variance), max(1.0, df) if math.isfinite(df) else df)


def interval(estimate: Estimate, *, confidence: float = 0.95, low: float = -math.inf, high: float = math.inf) -> Interval:
    """Return the interval of an estimate by Student's t, cut to what is possible.

    Args:
        estimate: The estimate.
        confidence: Level, 0..1.
        low: Least possible value.
        high: Greatest possible value.
    """
    if not (math.isfinite(estimate.se) and math.isfinite(estimate.df)):
        return Interval(estimate.value)
    half = float(stdtrit(estimate.df, 0.5 + confidence / 2)) * estimate.se
    return Interval(estimate.value, max(low, estimate.value - half), min(high, estimate.value + half))


def percentile_interval(value: float, replicates: npt.ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Return the interval between the outer percentiles of bootstrap replicates, shape (B,); NaN replicates are left out."""
    drawn = np.asarray(replicates, np.float64)
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < 2:
        return Interval(value)
    low, high = np.quantile(drawn, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(value, float(low), float(high))


def cluster_sums(index: npt.NDArray[np.int64], clusters: int, columns: npt.ArrayLike) -> Floats:
    """Return the sum of each column by cluster.

    Args:
        index: Cluster of each request, 0..K-1, shape (N,).
        clusters: K.
        columns: Values by request, shape (N, C).

    Returns:
        Shape (K, C).
    """
    values = np.asarray(columns, np.float64)
    if values.ndim != 2 or len(values) != len(index):
        raise ValueError(f"cluster_sums: columns: expected shape ({len(index)}, C), got {values.shape}")
    return np.stack([np.bincount(index, weights=column, minlength=clusters) for column in values.T], axis=1)


def bootstrap(
    index: npt.NDArray[np.int64],
    totals: Floats,
    values: npt.ArrayLike,
    quantiles: Sequence[float],
    *,
    replicates: int = 400,
    seed: int = 0,
) -> Replicates:
    """Draw whole clusters again and again, each with a Poisson(1) weight, and recompute totals and quantiles.

    Args:
        index: Cluster of each request, 0..K-1, shape (N,).
        totals: Column totals by cluster, shape (K, C).
        values: What the quantiles are of, by request, shape (N,).
        quantiles: Each within 0..1.
        replicates: How many times, B.
        seed: Equal seeds give equal replicates.

    Returns:
        The replicates.
    """
    sample = np.asarray(values, np.float64)
    order = np.argsort(sample, kind="stable")
    ranked, owners = sample[order], index[order]
    counts = np.bincount(index, minlength=len(totals))
    tails = [min(len(sample), math.ceil(4 * (1.0 - q) * len(sample)) + 64) for q in quantiles]
    sums: list[Floats] = []
    found: list[Floats] = []
    for weights in _poisson_weights(len(totals), max(len(totals), *tails, 1), replicates, seed):
        sums.append(weights.astype(np.float64) @ totals)
        drawn = weights.astype(np.int64) @ counts
        found.append(
            np.stack(
                [_quantile(ranked, owners, weights, drawn, q, tail) for q, tail in zip(quantiles, tails, strict=True)], axis=1
            )
        )
    return Replicates(np.concatenate(sums), np.concatenate(found))


def quantile(values: npt.ArrayLike, q: float) -> float:
    """Return the smallest value with at least the share ``q`` at or below it; NaN without values."""
    sample = np.asarray(values, np.float64)
    return float(np.quantile(sample, q, method="inverted_cdf")) if len(sample) else math.nan


def _quantile(
    ranked: Floats,
    owners: npt.NDArray[np.int64],
    weights: npt.NDArray[np.uint8],
    drawn: npt.NDArray[np.int64],
    q: float,
    tail: int,
) -> Floats:
    """Return the weighted quantile of each replicate, looked for among the ``tail`` largest values first, shape (b,).

    It is the smallest value with at most the share ``1 - q`` of the weight above it. High quantiles lie near the top, so nearly
    all replicates are done with a few percent of the values.
    """
    if not len(ranked):
        return np.full(len(weights), math.nan)
    taken = weights[:, owners[len(owners) - tail :]]
    above = np.cumsum(taken[:, ::-1], axis=1, dtype=np.int64)[:, ::-1] - taken
    enough = above <= ((1.0 - q) * drawn + 1e-9)[:, None]
    first = np.argmax(enough, axis=1)
    result = np.where(drawn > 0, ranked[len(ranked) - tail + first], math.nan)
    # Values below the first one drawn have as much above them: step up to the one that was drawn.
    rows = np.arange(len(weights))
    for row in rows[(taken[rows, first] == 0) & (drawn > 0)]:
        result[row] = ranked[len(ranked) - tail + first[row] + int(np.argmax(taken[row, first[row] :] > 0))]
    unsure = (first == 0) & (drawn > 0)
    if tail < len(ranked) and unsure.any():
        result[unsure] = _quantile(ranked, owners, weights[unsure], drawn[unsure], q, len(ranked))
    return result


def _poisson_weights(clusters: int, width: int, replicates: int, seed: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield weights, shape (b, K), in chunks that keep (b, width) arrays small."""
    # By a table over 16 random bits: ten times faster than drawing Poisson numbers, exact to 2^-16.
    steps = np.cumsum([math.exp(-1.0) / math.factorial(k) for k in range(9)])
    table = np.searchsorted(steps, (np.arange(1 << 16) + 0.5) / (1 << 16)).astype(np.uint8)
    rng = np.random.default_rng(seed)
    chunk = max(1, min(replicates, _CELLS // max(width, 1)))
    for start in range(0, replicates, chunk):
        rows = min(chunk, replicates - start)
        yield table[rng.integers(0, 1 << 16, (rows, clusters), dtype=np.uint16)]


def sample_ratio_mismatch(keys: Mapping[str, int], shares: Mapping[str, float]) -> float:
    """Return how likely a split at least this uneven is if keys were assigned as designed (chi-square test on keys).

    Args:
        keys: Number of distinct keys seen, by arm.
        shares: Designed share of the keys by arm, sum 1.

    Returns:
        The p-value; NaN without keys. Below 0.001 the assignment is broken and no comparison of the arms means anything.
    """
    total = sum(keys.get(arm, 0) for arm in shares)
    if not total or len(shares) < 2:
        return math.nan
    statistic = sum((keys.get(arm, 0) - share * total) ** 2 / (share * total) for arm, share in shares.items())
    return float(chdtrc(len(shares) - 1, statistic))
