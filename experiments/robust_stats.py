"""What scores over seeds and cases say: aggregates that one odd case does not decide, each with what its interval resamples.

After Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (NeurIPS'21; their library rliable):
interquartile mean, stratified bootstrap, probability of improvement, optimality gap. Scores are costs here: lower is better.

They train anew for each task, so their runs are nested in tasks. Here one training run is judged on every case: a lucky seed is
lucky everywhere, the cells of a seed are not independent, and resampling seeds case by case finds intervals that are too narrow.
:data:`CROSSED` resamples whole seeds and whole cases (Owen, "The pigeonhole bootstrap", Annals of Applied Statistics '07)
and is what claims are made with; the others are told beside it. All functions are pure and repeat from their seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from experiments.stats import Interval

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Scheme = Literal["seeds within cases", "seeds within cases, and cases", "seeds and cases"]
Statistic = Callable[[Floats], Floats]
"""Scores of shape (..., S, C) to one number for each of the leading shape."""

WITHIN: Scheme = "seeds within cases"
"""Agarwal et al.'s: cases are strata and stay; in each, seeds are drawn anew. What other seeds would give on these cases."""
NESTED: Scheme = "seeds within cases, and cases"
"""rliable's ``task_bootstrap``: the same, and the cases are drawn anew too."""
CROSSED: Scheme = "seeds and cases"
"""Whole seeds and whole cases are drawn anew: what other seeds would have given on other cases of the same kind."""

REPLICATES = 2000
CONFIDENCE = 0.95


def interquartile_mean(scores: Floats) -> Floats:
    """Return the mean of the middle half of the scores: a quarter, rounded down, is cut off at either end.

    Args:
        scores: Shape (..., S, C), S and C at least 1.

    Returns:
        Shape (...): ``scipy.stats.trim_mean(scores, 0.25, axis=None)`` of each.
    """
    flat = np.sort(np.asarray(scores, np.float64).reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    middle: Floats = flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)
    return middle


def mean(scores: Floats) -> Floats:
    """Return the mean of the scores, shape (..., S, C) in, (...) out."""
    average: Floats = np.asarray(scores, np.float64).mean(axis=(-2, -1))
    return average


def picks(seeds: int, cases: int, scheme: Scheme, *, replicates: int = REPLICATES, seed: int = 0) -> tuple[Indices, Indices]:
    """Draw the cells that each replicate of a bootstrap is made of.

    Args:
        seeds: Number of seeds S, at least 1.
        cases: Number of cases C, at least 1.
        scheme: What is drawn anew.
        replicates: Number of replicates B.
        seed: Of the draws.

    Returns:
        The seed and the case of each cell, each of shape (B, S, C).

    Raises:
        ValueError: If there is no seed, case or replicate.
    """
    if min(seeds, cases, replicates) < 1:
        raise ValueError(f"bootstrap: expected at least one seed, case and replicate, got {seeds}, {cases} and {replicates}")
    rng = np.random.default_rng(seed)
    shape = (replicates, seeds, cases)
    of_case = np.arange(cases) if scheme == WITHIN else rng.integers(0, cases, (replicates, 1, cases))
    of_seed = rng.integers(0, seeds, (replicates, seeds, 1) if scheme == CROSSED else shape)
    return np.broadcast_to(of_seed, shape), np.broadcast_to(of_case, shape)


def bootstrap(
    scores: npt.ArrayLike,
    statistic: Statistic = interquartile_mean,
    *,
    scheme: Scheme = CROSSED,
    replicates: int = REPLICATES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """Return a statistic of scores with its percentile bootstrap interval.

    Args:
        scores: One for each seed and case, shape (S, C), finite.
        statistic: What to compute.
        scheme: What is drawn anew.
        replicates: Number of replicates.
        confidence: Share of replicates within the interval.
        seed: Of the draws.

    Returns:
        The interval; without bounds where what is drawn anew is there but once, which says nothing of others.

    Raises:
        ValueError: If ``scores`` is not finite or not of that shape.
    """
    table = _table(scores)
    value = float(statistic(table))
    if not _tells(table, scheme):
        return Interval(value)
    of_seed, of_case = picks(table.shape[0], table.shape[1], scheme, replicates=replicates, seed=seed)
    return _interval(value, statistic(table[of_seed, of_case]), confidence)


def gap_closed(
    scores: npt.ArrayLike,
    bounds: npt.ArrayLike,
    *,
    scheme: Scheme = CROSSED,
    replicates: int = REPLICATES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """Return the share of the gap between the reference and a bound that is closed: ``sum(1 - score) / sum(1 - bound)``.

    A ratio of sums: a case on which there is next to nothing to gain does not decide it, as it would a mean of ratios.

    Args:
        scores: Cost over the reference's, shape (S, C).
        bounds: The bound's cost over the reference's on the same seeds and cases, shape (S, C).
        scheme: What is drawn anew; scores and bounds are drawn together.
        replicates: Number of replicates.
        confidence: Share of replicates within the interval.
        seed: Of the draws.

    Returns:
        1: all of it, 0: none; all NaN where the bound is no better than the reference, so that there is no gap. No bounds if that
        happens in a replicate, for then the ratio is not known.
    """
    ours, best = _table(scores), _table(bounds)
    if ours.shape != best.shape:
        raise ValueError(f"gap closed: expected scores and bounds of one shape, got {ours.shape} and {best.shape}")
    gap = float(np.sum(1.0 - best))
    if not gap > 0:
        return Interval(np.nan)
    value = float(np.sum(1.0 - ours)) / gap
    if not _tells(ours, scheme):
        return Interval(value)
    of_seed, of_case = picks(ours.shape[0], ours.shape[1], scheme, replicates=replicates, seed=seed)
    gaps = np.sum(1.0 - best[of_seed, of_case], axis=(-2, -1))
    if not (gaps > 0).all():
        return Interval(value)
    return _interval(value, np.sum(1.0 - ours[of_seed, of_case], axis=(-2, -1)) / gaps, confidence)


def probability_of_improvement(
    ours: npt.ArrayLike,
    theirs: npt.ArrayLike,
    *,
    scheme: Scheme = CROSSED,
    replicates: int = REPLICATES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """Return the probability that we cost less than they do on a case drawn at random, with any seeds; a tie counts half.

    The mean over cases of the Mann-Whitney statistic, as in rliable.

    Args:
        ours: Costs, shape (S, C).
        theirs: Costs, shape (S', C).
        scheme: What is drawn anew: the seeds of either side independently, the cases together.
        replicates: Number of replicates.
        confidence: Share of replicates within the interval.
        seed: Of the draws.
    """
    left, right = _table(ours), _table(theirs)
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"probability of improvement: expected the same cases, got {left.shape[1]} and {right.shape[1]}")
    wins = (left[:, None, :] < right[None, :, :]) + 0.5 * (left[:, None, :] == right[None, :, :])
    value = float(wins.mean())
    if not (_tells(left, scheme) or _tells(right, scheme)):
        return Interval(value)
    our_seed, case = picks(left.shape[0], left.shape[1], scheme, replicates=replicates, seed=seed)
    their_seed, _ = picks(right.shape[0], right.shape[1], scheme, replicates=replicates, seed=seed + 1)
    # One replicate at a time: all of them together are gigabytes where both sides have many seeds.
    drawn = zip(our_seed, their_seed, case, strict=True)
    draws = [wins[ours_drawn[:, None, :], theirs_drawn, cases[:1]].mean() for ours_drawn, theirs_drawn, cases in drawn]
    return _interval(value, np.array(draws), confidence)


def optimality_gap(
    scores: npt.ArrayLike,
    bound: npt.ArrayLike = 1.0,
    *,
    scheme: Scheme = CROSSED,
    replicates: int = REPLICATES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval:
    """Return by how much scores exceed a bound in the mean; what is better than the bound does not make up for what is worse.

    Args:
        scores: Costs, shape (S, C).
        bound: What to reach, one number or one that broadcasts to (S, C).
        scheme: What is drawn anew.
        replicates: Number of replicates.
        confidence: Share of replicates within the interval.
        seed: Of the draws.
    """
    over = np.maximum(_table(scores) - np.asarray(bound, np.float64), 0.0)
    return bootstrap(over, mean, scheme=scheme, replicates=replicates, confidence=confidence, seed=seed)


def case_intervals(scores: npt.ArrayLike, *, confidence: float = CONFIDENCE) -> list[Interval]:
    """Return the mean over seeds of each case, with Student's t interval: five seeds are too few for a bootstrap.

    Args:
        scores: Shape (S, C).
        confidence: Of each interval by itself; they are not corrected for being many.

    Returns:
        One interval for each case; without bounds where there is one seed.
    """
    table = _table(scores)
    count = len(table)
    means = table.mean(axis=0)
    if count < 2:
        return [Interval(float(value)) for value in means]
    reach = float(stdtrit(count - 1, (1.0 + confidence) / 2.0)) * table.std(axis=0, ddof=1) / np.sqrt(count)
    return [Interval(float(value), float(value - by), float(value + by)) for value, by in zip(means, reach, strict=True)]


def _table(scores: npt.ArrayLike) -> Floats:
    table = np.asarray(scores, np.float64)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise ValueError(f"scores: expected finite numbers of shape (seeds, cases), got shape {table.shape}")
    return table


def _tells(table: Floats, scheme: Scheme) -> bool:
    """Whether scores tell of what is drawn anew: one seed says nothing of other seeds, one case nothing of other cases."""
    return len(table) > 1 if scheme == WITHIN else len(table[0]) > 1


def _interval(value: float, draws: Floats, confidence: float) -> Interval:
    low, high = np.quantile(draws, ((1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0))
    return Interval(value, float(low), float(high))
