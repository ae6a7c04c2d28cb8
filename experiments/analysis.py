"""Everything that a report shows, computed: from an experiment, its decisions and its requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from envs.objective import Prices
from envs.price_book import default_book
from experiments import stats
from experiments.design import Experiment
from experiments.measure import ArmFigures, ArmSource, Method, arm_source, figures, p99_difference
from experiments.paired import PairedGhost, paired_ghost
from experiments.price_moves import Conclusion, in_words, move_prices, rows
from experiments.records import DecisionRecord, clean
from experiments.sensitivity import Sensitivity
from experiments.verdict import Differences, Verdict, judge


@dataclass(frozen=True)
class Analysis:
    """One experiment, computed.

    Attributes:
        experiment: Its design, with the prices that were used.
        start: Begin of the period, seconds since the epoch.
        end: End of the period (the last request or decision while it runs).
        sources: What is known of each arm.
        overall: Each arm over the whole period.
        series: Each arm by window.
        by_interval: Whether the windows are the tuner's intervals.
        differences: Treatment minus control.
        verdict: What it shows.
        moves: What it shows with each price halved and doubled.
        paired: The paired ghost, where curves were recorded.
        method: How intervals were computed.
        caveats: What a reader has to know of the data.
    """

    experiment: Experiment
    start: float
    end: float
    sources: Mapping[str, ArmSource]
    overall: Mapping[str, ArmFigures]
    series: Mapping[str, Sequence[ArmFigures]]
    by_interval: bool
    differences: Differences
    verdict: Verdict
    moves: Sensitivity[Conclusion]
    paired: PairedGhost | None
    method: Method
    caveats: tuple[str, ...]

    @property
    def control(self) -> ArmFigures:
        """The control over the whole period."""
        return self.overall[self.experiment.control]

    @property
    def treatment(self) -> ArmFigures:
        """The treatment over the whole period."""
        return self.overall[self.experiment.treatment]

    def summary(self) -> dict[str, Any]:
        """Return the figures, JSON-ready: what is unknown is None."""
        summary: dict[str, Any] = clean(
            {
                "experiment": self.experiment.name,
                "namespace": self.experiment.namespace,
                "start": self.start,
                "end": self.end,
                "running": self.experiment.ended_at is None,
                "verdict": self.verdict.outcome,
                "reason": self.verdict.reason,
                "warnings": self.verdict.warnings,
                "caveats": self.caveats,
                "method": {**asdict(self.method), "in_brief": self.verdict.basis},
                "difference": {
                    "cost": self.differences.cost.to_dict(),
                    "hit_ratio": self.differences.hit_ratio.to_dict(),
                    "p99": self.differences.p99.to_dict(),
                },
                "prices": asdict(self.experiment.prices),
                "price_sensitivity": {"in_brief": in_words(self.moves), "rows": rows(self.moves)},
                "split_p_value": self.differences.split,
                "arms": {arm: self._arm(arm) for arm in self.experiment.arms},
                "paired_ghost": None if self.paired is None else asdict(self.paired),
            }
        )
        return summary

    def _arm(self, arm: str) -> dict[str, Any]:
        overall, source = self.overall[arm], self.sources[arm]
        knobs = source.timeline.knobs
        return {
            "requests": overall.requests,
            "keys": overall.keys,
            "effective_keys": overall.effective_keys,
            "errors": overall.errors,
            "bypassed": source.bypassed,
            "decisions": len(source.decisions),
            "hit_ratio": overall.hit_ratio.to_dict(),
            "hit_ratio_by_tier": overall.hit_ratio_by_tier,
            "p50": overall.p50,
            "p99": overall.p99.to_dict(),
            "cost": overall.cost.to_dict(),
            "cost_terms": overall.terms.to_dict(),
            "evictions": overall.evictions,
            "knobs_first": knobs[0].to_dict() if knobs else None,
            "knobs_last": knobs[-1].to_dict() if knobs else None,
        }


def analyse(
    experiment: Experiment,
    decisions: Sequence[DecisionRecord],
    log: pd.DataFrame,
    *,
    method: Method | None = None,
    windows: int = 24,
    caveats: Sequence[str] = (),
) -> Analysis:
    """Compute everything that a report shows.

    Args:
        experiment: The design; its prices count.
        decisions: The ledger's decisions; those of other namespaces, arms and times are left out.
        log: The access log (:func:`experiments.access.read_access_log`); the same.
        method: How intervals are computed.
        windows: Number of windows over time, unless the tuner's intervals are about as many.
        caveats: More that a reader has to know; empty texts are left out.

    Returns:
        The analysis. Parts that are missing (an arm without requests, no decisions) are said to be missing, not refused.
    """
    method = method or Method()
    arms = experiment.arms
    start, end = _period(experiment, decisions, log)
    own = [
        item
        for item in decisions
        if item.namespace == experiment.namespace and item.arm in arms and item.at >= start and _looked_back(item) <= end
    ]
    inside = log[log["at"].between(start, end).to_numpy() & log["arm"].isin(arms).to_numpy()]
    sources = {arm: arm_source(arm, inside, own, initial=experiment.knobs.get(arm), space=experiment.space) for arm in arms}
    prices = experiment.prices
    overall = {arm: figures(sources[arm], start, end, prices=prices, method=method) for arm in arms}
    control, treatment = (overall[arm] for arm in arms)
    differences = Differences(
        cost=stats.interval(stats.difference(treatment.cost_estimate, control.cost_estimate), confidence=method.confidence),
        hit_ratio=stats.interval(stats.difference(treatment.hit_estimate, control.hit_estimate), confidence=method.confidence),
        p99=p99_difference(treatment, control, method),
        split=stats.sample_ratio_mismatch({arm: overall[arm].keys for arm in arms}, experiment.shares),
    )
    moves = move_prices(control, treatment, differences, prices=prices, method=method)
    turned = [in_words(moves)] if moves.changed(lambda conclusion: conclusion.verdict) else []
    edges, by_interval = _edges(start, end, sources[experiment.treatment].decisions, windows)
    series = {arm: _series(sources[arm], edges, prices, method) for arm in arms}
    return Analysis(
        experiment=experiment,
        start=start,
        end=end,
        sources=sources,
        overall=overall,
        series=series,
        by_interval=by_interval,
        differences=differences,
        verdict=judge(control, treatment, differences, confidence=method.confidence, slo=prices.slo_p99),
        moves=moves,
        paired=paired_ghost(
            sources[experiment.treatment], sources[experiment.control], treatment, start=start, end=end, prices=prices
        ),
        method=method,
        caveats=(*_caveats(experiment, log, sources, overall), *turned, *(text for text in caveats if text)),
    )


def _period(experiment: Experiment, decisions: Sequence[DecisionRecord], log: pd.DataFrame) -> tuple[float, float]:
    mine = log.loc[log["arm"].isin(experiment.arms).to_numpy(), "at"]
    since = mine[mine >= experiment.started_at]
    start = experiment.started_at or (float(since.min()) if len(since) else 0.0)
    if experiment.ended_at is not None:
        return start, experiment.ended_at
    seen = [record.at for record in decisions if record.namespace == experiment.namespace and record.at >= start]
    return start, max([start, *seen, *([float(since.max())] if len(since) else [])])


def _looked_back(record: DecisionRecord) -> float:
    """When the window of a decision began; the one that was made just after the end still tells of the time before."""
    window = record.signals.get("window")
    return record.at - (window if isinstance(window, (int, float)) else 0.0)


def _edges(start: float, end: float, decisions: Sequence[DecisionRecord], windows: int) -> tuple[list[float], bool]:
    """Cut the period at the tuner's decisions if these are about as many as the windows wanted, evenly otherwise."""
    if not end > start:
        return [start, end], False
    times = sorted({record.at for record in decisions if start < record.at < end})
    if not 2 <= len(times) <= 2 * windows:
        return [float(edge) for edge in np.linspace(start, end, windows + 1)], False
    least = 0.25 * float(np.median(np.diff(times)))
    edges = [start]
    for time in [*times, end]:
        if time - edges[-1] > least:
            edges.append(time)
    edges[-1] = end
    return edges, True


def _series(source: ArmSource, edges: Sequence[float], prices: Prices, method: Method) -> list[ArmFigures]:
    final = len(edges) - 2
    return [
        figures(source, low, high, prices=prices, method=method, last=window == final)
        for window, (low, high) in enumerate(pairwise(edges))
    ]


def _caveats(
    experiment: Experiment, log: pd.DataFrame, sources: Mapping[str, ArmSource], overall: Mapping[str, ArmFigures]
) -> tuple[str, ...]:
    found = []
    scale = experiment.prices.time_scale
    if scale != 1:
        found.append(
            f"One second of the run stands for {scale:,.0f} s of the workload. Memory is priced by the workload's time; "
            "latencies, queues and the tuner's interval are those of the run: to the traffic the tuner was that much slower."
        )
    for arm, source in sources.items():
        if not source.decisions:
            known = "its knobs at the start are taken to have stayed" if source.timeline.known else "its knobs are unknown"
            found.append(f"The ledger has no decision of arm {arm}: {known}.")
        if overall[arm].requests and not source.refresh_known:
            found.append(f"The tokens of arm {arm}'s refreshes are not recorded and count as 0 in its cost.")
        if source.bypassed:
            found.append(f"{source.bypassed:,} requests of arm {arm} could not be cached and are left out.")
        if overall[arm].requests and not math.isfinite(overall[arm].cost.value) and source.timeline.known:
            found.append(f"The cost of arm {arm} could not be computed.")
    found.extend(f"The price {text}" for text in default_book().unusual(asdict(experiment.prices)))
    torn = int(log.attrs.get("torn_lines", 0))
    if torn:
        found.append(f"{torn} last line{'s' if torn > 1 else ''} of the access log were still being written and are left out.")
    if experiment.ended_at is None:
        found.append("The experiment is still running, or was interrupted: this is its state so far.")
    return tuple(found)
