"""What an evaluation says: every row against the reference, the static settings and the bounds, suite by suite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.objective import COST_TERMS
from experiments.evaluation_results import CaseRecord, Results, RowRecord
from experiments.robust_stats import (
    WITHIN,
    bootstrap,
    case_intervals,
    gap_closed,
    mean,
    optimality_gap,
    probability_of_improvement,
)
from experiments.stats import Interval

Floats = npt.NDArray[np.float64]

BASIS = (
    "Scores are costs over another row's on the same requests, the first interval left out. Intervals are 95 % percentile "
    "bootstrap: whole seeds and whole cases are drawn anew, so they say what other seeds would give on other cases of the same "
    "kind. The stratified interval (Agarwal et al., NeurIPS'21) draws seeds within each case and keeps the cases. Cases that "
    "share their arrivals are not quite independent. Intervals are not corrected for the number of rows."
)
"""What has to be said with every interval."""


@dataclass(frozen=True)
class Comparison:
    """A row's costs over another's on the same requests; lower is better.

    Attributes:
        iqm: Interquartile mean; the interval resamples whole seeds and whole cases.
        stratified: The same value; the interval resamples seeds within cases.
        mean: Mean, with the interval of ``iqm``'s kind.
        cases: Mean over seeds by case, with Student's t interval over seeds; no bounds with one seed.
    """

    iqm: Interval
    stratified: Interval
    mean: Interval
    cases: Mapping[str, Interval]

    @property
    def worst(self) -> tuple[str, float]:
        """The case with the greatest mean over seeds."""
        name = max(self.cases, key=lambda case: self.cases[case].value)
        return name, self.cases[name].value

    @property
    def best(self) -> tuple[str, float]:
        """The case with the least mean over seeds."""
        name = min(self.cases, key=lambda case: self.cases[case].value)
        return name, self.cases[name].value

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        worst, best = self.worst, self.best
        return {
            "iqm": self.iqm.to_dict(),
            "iqm_stratified": self.stratified.to_dict(),
            "mean": self.mean.to_dict(),
            "worst": {"case": worst[0], "value": worst[1]},
            "best": {"case": best[0], "value": best[1]},
            "cases": {name: interval.to_dict() for name, interval in self.cases.items()},
        }


@dataclass(frozen=True)
class RowSummary:
    """One row on one suite.

    Attributes:
        row: The row.
        cases: Cases that it was run on, by name.
        seeds: Number of its seeds; 1 for a row that depends on none.
        reference: Against the reference; None if they share no case. The rest likewise.
        best_static: Against the best static setting in hindsight.
        middle: Against the middle of the grid.
        improvement: Probability that it costs less than the reference.
        gap: Share of the gap between the reference and the causal oracle that it closes, on cases whose regime recurs.
        optimality_gap: By how much it exceeds the oracle in the mean, in the reference's cost; where there is an oracle.
        hit_ratio: Hits over requests, over all its cases and seeds.
        cost: US dollars per 1,000 requests, likewise.
        terms: The same by term.
    """

    row: RowRecord
    cases: tuple[str, ...]
    seeds: int
    reference: Comparison | None
    best_static: Comparison | None
    middle: Comparison | None
    improvement: Interval | None
    gap: Interval | None
    optimality_gap: Interval | None
    hit_ratio: float
    cost: float
    terms: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping; what there is not is None."""

        def told(value: Comparison | Interval | None) -> Any:
            return None if value is None else value.to_dict()

        return {
            "row": self.row.label,
            "group": self.row.group,
            "source": self.row.source,
            "seeds": self.row.seeds,
            "command": self.row.command,
            "training": [item.model_dump() for item in self.row.training],
            "cases": list(self.cases),
            "relative_to_reference": told(self.reference),
            "relative_to_best_static": told(self.best_static),
            "relative_to_middle": told(self.middle),
            "probability_of_improvement": told(self.improvement),
            "gap_closed": told(self.gap),
            "optimality_gap": told(self.optimality_gap),
            "hit_ratio": _finite(self.hit_ratio),
            "dollars_per_thousand": _finite(self.cost),
            "terms": {name: _finite(value) for name, value in self.terms.items()},
        }


@dataclass(frozen=True)
class SuiteSummary:
    """All rows on the cases of one suite.

    Attributes:
        name: ``steady``, ``non-stationary`` or ``all``.
        cases: Its cases.
        rows: The rows that were run on any of them.
    """

    name: str
    cases: tuple[CaseRecord, ...]
    rows: tuple[RowSummary, ...]

    def row(self, label: str) -> RowSummary | None:
        """Return a row by its label; None if it was not run here."""
        return next((row for row in self.rows if row.row.label == label), None)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return {
            "suite": self.name,
            "cases": [case.model_dump(exclude={"requests"}) | {"intervals": len(case.requests)} for case in self.cases],
            "rows": [row.to_dict() for row in self.rows],
        }


def summarise(results: Results) -> list[SuiteSummary]:
    """Work out what every row comes to on each suite, and on all cases where there is more than one suite."""
    suites = list(dict.fromkeys(case.suite for case in results.cases))
    parts = [(suite, [case for case in results.cases if case.suite == suite]) for suite in suites]
    if len(parts) > 1:
        parts.append(("all", list(results.cases)))
    summaries = []
    for name, cases in parts:
        rows = [_row(results, row, cases) for row in results.rows]
        summaries.append(SuiteSummary(name, tuple(cases), tuple(row for row in rows if row is not None)))
    return summaries


def learned_label(results: Results) -> str | None:
    """Return the row that the targets are about: the first of the settings' that was run."""
    there = {row.label for row in results.rows}
    return next((label for label in results.settings.roles.learned if label in there), None)


def _row(results: Results, row: RowRecord, cases: Sequence[CaseRecord]) -> RowSummary | None:
    roles = results.settings.roles
    ran = [case for case in cases if results.run(row.label, case.name) is not None]
    if not ran:
        return None
    names = [case.name for case in ran]
    own = results.costs(row.label, names)
    recurring = [case.name for case in ran if case.period is not None]
    gap, over = None, None
    oracle = [name for name in recurring if results.run(roles.oracle, name) is not None]
    if oracle and row.label != roles.reference:
        ours, bound = _relative_pair(results, row.label, roles.oracle, oracle)
        if ours is not None and bound is not None:
            gap = gap_closed(ours, bound, seed=results.settings.seed)
            over = optimality_gap(ours, bound, seed=results.settings.seed)
    improvement = None
    if row.label != roles.reference:
        theirs = results.costs(roles.reference, names)
        if np.isfinite(theirs).all() and np.isfinite(own).all():
            improvement = probability_of_improvement(own, theirs, seed=results.settings.seed)
    amounts = _amounts(results, row.label, ran)
    return RowSummary(
        row=row,
        cases=tuple(names),
        seeds=len(own),
        reference=_compare(results, row.label, roles.reference, names),
        best_static=_compare(results, row.label, roles.best_static, names),
        middle=_compare(results, row.label, roles.middle, names),
        improvement=improvement,
        gap=gap,
        optimality_gap=over,
        **amounts,
    )


def relative(results: Results, row: str, other: str, cases: Sequence[str]) -> Floats:
    """Return a row's costs over another's, seed by seed on the same requests and the same ghost, shape (S, C).

    A row that depends on no seed is compared with every seed of the other. NaN where one of the two was not run.
    """
    ours, theirs = results.costs(row, cases), results.costs(other, cases)
    seeds = max(len(ours), len(theirs)) if min(len(ours), len(theirs)) == 1 else min(len(ours), len(theirs))
    ours, theirs = (np.broadcast_to(table, (seeds, len(cases))) if len(table) == 1 else table[:seeds] for table in (ours, theirs))
    with np.errstate(all="ignore"):
        over: Floats = np.where(theirs > 0, ours / theirs, np.nan)
    return over


def _compare(results: Results, row: str, other: str, cases: Sequence[str]) -> Comparison | None:
    both = [name for name in cases if results.run(other, name) is not None]
    if not both:
        return None
    scores = relative(results, row, other, both)
    # A case that costs the other nothing has no ratio: it is left out, and the others are compared.
    known = np.asarray(np.isfinite(scores).all(axis=0))
    if not known.any():
        return None
    both, scores = [name for name, kept in zip(both, known.tolist(), strict=True) if kept], scores[:, known]
    seed = results.settings.seed
    return Comparison(
        iqm=bootstrap(scores, seed=seed),
        stratified=bootstrap(scores, scheme=WITHIN, seed=seed),
        mean=bootstrap(scores, mean, seed=seed),
        cases=dict(zip(both, case_intervals(scores), strict=True)),
    )


def _relative_pair(results: Results, row: str, bound: str, cases: Sequence[str]) -> tuple[Floats | None, Floats | None]:
    """Return a row's and a bound's costs over the reference's, of the seeds that both have."""
    reference = results.settings.roles.reference
    ours, best = (relative(results, label, reference, cases) for label in (row, bound))
    seeds = min(len(ours), len(best))
    ours, best = ours[:seeds], best[:seeds]
    if not (np.isfinite(ours).all() and np.isfinite(best).all()):
        return None, None
    return ours, best


def _amounts(results: Results, label: str, cases: Sequence[CaseRecord]) -> dict[str, Any]:
    names = {case.name: math.fsum(case.requests) for case in cases}
    runs = [run for run in results.runs if run.row == label and run.case in names]
    requests = math.fsum(names[run.case] for run in runs)
    scale = 1000.0 / requests if requests > 0 else math.nan
    return {
        "hit_ratio": math.fsum(run.hits for run in runs) / requests if requests > 0 else math.nan,
        "cost": math.fsum(run.total for run in runs) * scale,
        "terms": {term: math.fsum(run.terms[term] for run in runs) * scale for term in COST_TERMS},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
