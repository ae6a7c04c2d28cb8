"""From single requests to an arm's figures: hit ratio, latency and cost with intervals, overall and by window."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from envs.objective import Cost, Prices, Usage, price
from experiments import stats
from experiments.records import DecisionRecord
from experiments.stats import Estimate, Interval
from experiments.timeline import KnobTimeline, SignalTotals, knob_timeline, signal_totals
from serving.knobs import Knobs, KnobSpace

HITS = ("hit", "semantic_hit")
_PER = 1000.0
_COLUMNS = ("input_tokens", "output_tokens", "latency_seconds", "stale_hits")
"""Fields of :class:`Usage` that single requests add to, in the order of the per-key totals."""


@dataclass(frozen=True, slots=True)
class Method:
    """How intervals are computed.

    Attributes:
        confidence: Their level.
        replicates: Bootstrap replicates.
        seed: Of the bootstrap.
    """

    confidence: float = 0.95
    replicates: int = 400
    seed: int = 0


@dataclass(frozen=True)
class ArmFigures:
    """One arm over one stretch of time.

    Attributes:
        arm: Its name.
        start: Seconds since the epoch.
        end: Seconds since the epoch.
        requests: Cacheable requests; all figures are of these.
        keys: Distinct keys among them: the clusters.
        effective_keys: Kish's effective number of clusters.
        errors: Requests whose upstream call failed.
        hit_ratio: Hits over requests.
        hit_ratio_by_tier: The same by the tier that answered.
        p50: Median latency, seconds.
        p99: 99th percentile of latency, seconds.
        cost: US dollars per 1,000 requests.
        terms: The same by term.
        usage: What was priced.
        evictions: Entries dropped for want of room, where the ledger knows.
        hit_estimate: ``hit_ratio`` as an estimate, for differences.
        cost_estimate: ``cost`` as an estimate, for differences.
        p99_replicates: Bootstrap replicates of P99, for differences.
        key_totals: What was used by key, to price it again, shape (keys, 6).
        replicate_totals: The same summed in each bootstrap replicate, shape (replicates, 6).
    """

    arm: str
    start: float
    end: float
    requests: int
    keys: int
    effective_keys: float
    errors: int
    hit_ratio: Interval
    hit_ratio_by_tier: Mapping[str, float]
    p50: float
    p99: Interval
    cost: Interval
    terms: Cost
    usage: Usage
    evictions: float | None
    hit_estimate: Estimate = field(repr=False)
    cost_estimate: Estimate = field(repr=False)
    p99_replicates: npt.NDArray[np.float64] = field(repr=False)
    key_totals: npt.NDArray[np.float64] = field(repr=False)
    replicate_totals: npt.NDArray[np.float64] = field(repr=False)


@dataclass(frozen=True)
class ArmSource:
    """Everything known of one arm, ready to be measured over any stretch of time.

    Attributes:
        arm: Its name.
        log: Its cacheable requests in order of time.
        bypassed: Its requests that were not cacheable.
        decisions: Its decisions in order of time.
        timeline: Its knobs over time.
        totals: Totals of ``evictions``, ``refresh_input_tokens``, ``refresh_output_tokens``.
        moves: When its knobs were moved, and by how many grid steps.
    """

    arm: str
    log: pd.DataFrame
    bypassed: int
    decisions: Sequence[DecisionRecord]
    timeline: KnobTimeline
    totals: Mapping[str, SignalTotals]
    moves: Sequence[tuple[float, float]]

    @property
    def refresh_known(self) -> bool:
        """Whether the tokens of refreshes are known: recorded, or none because nothing was ever warmed."""
        return self.totals["refresh_output_tokens"].known or (
            self.timeline.known and all(item.warmup_ratio == 0 for item in self.timeline.knobs)
        )


def arm_source(
    arm: str, log: pd.DataFrame, decisions: Sequence[DecisionRecord], *, initial: Knobs | None, space: KnobSpace
) -> ArmSource:
    """Gather one arm's requests and decisions.

    Args:
        arm: Its name.
        log: The access log (:func:`experiments.access.read_access_log`), all arms.
        decisions: The ledger's decisions, all arms.
        initial: Its knobs at the start, where known.
        space: The knob space, for the size of moves.
    """
    mine = log[(log["arm"] == arm).to_numpy()]
    cacheable = (mine["outcome"] != "bypass").to_numpy()
    own = sorted((record for record in decisions if record.arm == arm), key=lambda record: record.at)
    timeline = knob_timeline(own, initial)
    return ArmSource(
        arm=arm,
        log=mine[cacheable].sort_values("at", kind="stable", ignore_index=True),
        bypassed=int(np.sum(~cacheable)),
        decisions=own,
        timeline=timeline,
        totals={name: signal_totals(own, name) for name in ("evictions", "refresh_input_tokens", "refresh_output_tokens")},
        moves=timeline.moves(space),
    )


def figures(source: ArmSource, start: float, end: float, *, prices: Prices, method: Method, last: bool = True) -> ArmFigures:
    """Measure one arm between two times.

    Args:
        source: The arm.
        start: Seconds since the epoch.
        end: Seconds since the epoch; a request at this very time counts if ``last``.
        prices: The prices.
        method: How intervals are computed.
        last: Whether this is the last of adjoining windows.

    Returns:
        Its figures; NaN where there are no requests, cost NaN where the knobs are not known.
    """
    times = source.log["at"].to_numpy(np.float64)
    first = int(np.searchsorted(times, start, side="left"))
    stop = int(np.searchsorted(times, end, side="right" if last else "left"))
    rows = source.log.iloc[first:stop]
    outcome = rows["outcome"].to_numpy(str)
    hit = np.isin(outcome, HITS)
    miss = outcome == "miss"
    latency = rows["latency"].to_numpy(np.float64)
    columns = np.stack(
        [
            np.where(miss, rows["input_tokens"].to_numpy(np.float64), 0.0),
            np.where(miss, rows["output_tokens"].to_numpy(np.float64), 0.0),
            latency,
            np.where(hit, rows["stale"].to_numpy(np.float64), 0.0),
            hit.astype(np.float64),
            np.ones(len(rows)),
        ],
        axis=1,
    )
    keys, inverse = np.unique(rows["key"].to_numpy(np.uint64), return_inverse=True)
    index = inverse.astype(np.int64)
    totals = stats.cluster_sums(index, len(keys), columns)
    requests = totals[:, -1]
    # A seed for each arm: with one seed for both, the same draw would weigh unrelated keys of both arms alike.
    seed = zlib.crc32(f"{method.seed} {source.arm}".encode())
    drawn = stats.bootstrap(index, totals, latency, [0.99], replicates=method.replicates, seed=seed)
    p99_replicates = drawn.quantiles[:, 0]
    usage = _usage(source, totals.sum(axis=0), stats.quantile(latency, 0.99), times, start, end)
    terms = price(usage, prices)
    cost_estimate = _cost_estimate(usage, terms, totals, drawn.totals, p99_replicates, prices)
    hit_estimate = stats.ratio(totals[:, -2], requests)
    tiers = rows["tier"].to_numpy(str)[hit]
    evictions = source.totals["evictions"]
    return ArmFigures(
        arm=source.arm,
        start=start,
        end=end,
        requests=len(rows),
        keys=len(keys),
        effective_keys=stats.effective_clusters(requests),
        errors=int(np.sum(outcome == "error")),
        hit_ratio=stats.interval(hit_estimate, confidence=method.confidence, low=0.0, high=1.0),
        hit_ratio_by_tier={str(tier): float(np.sum(tiers == tier)) / len(rows) for tier in np.unique(tiers)},
        p50=stats.quantile(latency, 0.5),
        p99=_p99_interval(usage.p99, p99_replicates, len(keys), method),
        cost=stats.interval(cost_estimate, confidence=method.confidence, low=0.0),
        terms=terms,
        usage=usage,
        evictions=evictions.between(start, end) if evictions.known else None,
        hit_estimate=hit_estimate,
        cost_estimate=cost_estimate,
        p99_replicates=p99_replicates,
        key_totals=totals,
        replicate_totals=drawn.totals,
    )


def repriced(measured: ArmFigures, prices: Prices, method: Method) -> ArmFigures:
    """Return what was measured under other prices, without measuring again.

    Args:
        measured: One arm's figures.
        prices: The other prices.
        method: How intervals are computed, as it was for the figures.

    Returns:
        The figures that :func:`figures` would give with these prices.
    """
    terms = price(measured.usage, prices)
    estimate = _cost_estimate(
        measured.usage, terms, measured.key_totals, measured.replicate_totals, measured.p99_replicates, prices
    )
    return replace(
        measured,
        cost=stats.interval(estimate, confidence=method.confidence, low=0.0),
        terms=terms,
        cost_estimate=estimate,
    )


def p99_difference(treatment: ArmFigures, control: ArmFigures, method: Method) -> Interval:
    """Return P99 of the treatment minus P99 of the control, seconds. The replicates are independent, as the arms' keys are."""
    value = treatment.p99.value - control.p99.value
    if not (treatment.p99.known and control.p99.known):
        return Interval(value)
    return stats.percentile_interval(value, treatment.p99_replicates - control.p99_replicates, confidence=method.confidence)


def _p99_interval(value: float, replicates: npt.NDArray[np.float64], keys: int, method: Method) -> Interval:
    return stats.percentile_interval(value, replicates, confidence=method.confidence) if keys > 1 else Interval(value)


def _usage(
    source: ArmSource, sums: npt.NDArray[np.float64], p99: float, times: npt.NDArray[np.float64], start: float, end: float
) -> Usage:
    requests = float(sums[-1])
    return Usage(
        requests=requests,
        **{name: float(sums[column]) for column, name in enumerate(_COLUMNS)},
        p99=p99,
        budget_bytes=source.timeline.mean_budget(start, end),
        duration=max(0.0, end - start),
        refresh_input_tokens=source.totals["refresh_input_tokens"].between(start, end),
        refresh_output_tokens=source.totals["refresh_output_tokens"].between(start, end),
        change_steps=_change_steps(source, times, requests, start, end),
    )


def _change_steps(source: ArmSource, times: npt.NDArray[np.float64], requests: float, start: float, end: float) -> float:
    """Mean grid steps of change by request: a change is priced per 1,000 requests of the interval that follows it."""
    if not requests > 0:
        return 0.0
    decided = np.array([record.at for record in source.decisions])
    steps = 0.0
    for when, size in source.moves:
        later = decided[decided > when]
        until = float(later[0]) if len(later) else end
        low, high = max(start, when), min(end, until)
        if high > low:
            count = np.searchsorted(times, high, side="left") - np.searchsorted(times, low, side="left")
            steps += size * float(count)
    return steps / requests


def _cost_estimate(
    usage: Usage,
    terms: Cost,
    totals: npt.NDArray[np.float64],
    drawn: npt.NDArray[np.float64],
    p99: npt.NDArray[np.float64],
    prices: Prices,
) -> Estimate:
    """Estimate the cost by key: linearised, or by the bootstrap where that says it is less certain.

    All terms but the hinge on P99 are sums over keys plus what the arm pays whichever keys it has. Their linearised standard
    error keeps its level on skewed keys, where a bootstrap's is too small; only the bootstrap knows the hinge. The larger counts.
    """
    if not math.isfinite(terms.total):
        return Estimate(terms.total, math.nan, math.nan)
    rates = np.array([_unit_price(name, prices) for name in _COLUMNS])
    spent = totals[:, : len(_COLUMNS)] @ rates
    summed = terms.total - terms.slo - terms.change
    fixed = summed * usage.requests / _PER - float(np.sum(spent))
    linear = stats.ratio(spent, totals[:, -1], fixed=fixed)
    if not math.isfinite(linear.se):
        return Estimate(terms.total, math.nan, math.nan)
    requests = drawn[:, -1]
    tails, place = np.unique(p99, return_inverse=True)
    hinge = np.array([price(replace(usage, p99=float(tail)), prices).slo for tail in tails])[place]
    with np.errstate(divide="ignore", invalid="ignore"):
        priced = (drawn[:, : len(_COLUMNS)] @ rates + fixed) / requests * _PER + hinge + terms.change
    replicates = priced[requests > 0]
    spread = float(np.std(replicates, ddof=1)) if len(replicates) > 1 else 0.0
    return Estimate(terms.total, max(linear.se * _PER, spread), linear.df)


def _unit_price(name: str, prices: Prices) -> float:
    """US dollars of one unit of a field of :class:`Usage`, asked from the objective itself: nothing else prices anything."""
    nothing = Usage(_PER, 0.0, 0.0, 0.0, math.nan, 0.0, 0.0, 0.0)
    return price(replace(nothing, **{name: 1.0}), prices).total
