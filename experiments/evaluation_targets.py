"""What was set out to be reached on held-out cases, in one list with its thresholds, and whether it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.evaluation_results import Results
from experiments.evaluation_summary import Comparison, RowSummary, SuiteSummary, learned_label
from experiments.stats import Interval

State = Literal["met", "missed", "not measured"]
Read = Callable[[Results, Sequence[SuiteSummary], str], tuple[Interval, str] | None]


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        words: What is to be reached.
        limit: The threshold.
        at_least: Whether the value must be at least that; else at most.
        read: Reads the value, and what belongs to it in words, of the learned row; None if it was not measured.
        whole_interval_below: If given, the interval's upper end must be below it too.
        suites: The suites whose every case it is about; a part of them shows a value and settles nothing.
    """

    words: str
    limit: float
    read: Read
    at_least: bool = False
    whole_interval_below: float | None = None
    suites: tuple[str, ...] = ()

    def state(self, value: Interval) -> State:
        """Whether a value meets the target, as it is and not as it is shown."""
        if not math.isfinite(value.value):
            return "not measured"
        met = value.value >= self.limit if self.at_least else value.value <= self.limit
        if self.whole_interval_below is not None:
            met = met and value.known and value.high < self.whole_interval_below
        return "met" if met else "missed"


@dataclass(frozen=True)
class Verdict:
    """A target and what became of it.

    Attributes:
        target: The target.
        value: What was measured, with its interval where there is one.
        detail: What belongs to it, in words.
        state: Met, missed, or not measured.
    """

    target: Target
    value: Interval
    detail: str
    state: State

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return {
            "target": self.target.words,
            "limit": self.target.limit,
            "direction": "at least" if self.target.at_least else "at most",
            "interval_below": self.target.whole_interval_below,
            **self.value.to_dict(),
            "detail": self.detail,
            "state": self.state,
        }


def _suite(summaries: Sequence[SuiteSummary], name: str, label: str) -> RowSummary | None:
    suite = next((each for each in summaries if each.name == name), None)
    if suite is None and name == "all" and len(summaries) == 1:
        suite = summaries[0]
    return None if suite is None else suite.row(label)


def _read(suite: str, against: Literal["reference", "best_static", "middle"], statistic: Literal["iqm", "mean", "worst"]) -> Read:
    def read(results: Results, summaries: Sequence[SuiteSummary], label: str) -> tuple[Interval, str] | None:
        row = _suite(summaries, suite, label)
        found: Comparison | None = None if row is None else getattr(row, against)
        if row is None or found is None:
            return None
        if statistic == "worst":
            name, value = found.worst
            return Interval(value), f"{name}, mean of {row.seeds} seeds; worst of {len(found.cases)} cases"
        words = "interquartile mean" if statistic == "iqm" else "mean"
        return getattr(found, statistic), f"{words} over {row.seeds} seeds and {len(found.cases)} cases"

    return read


def _gap(results: Results, summaries: Sequence[SuiteSummary], label: str) -> tuple[Interval, str] | None:
    row = _suite(summaries, "non-stationary", label)
    if row is None or row.gap is None:
        return None
    return row.gap, "of the sum of the gaps over all recurring cases"


def _recovery(results: Results, summaries: Sequence[SuiteSummary], label: str) -> tuple[Interval, str] | None:
    found = [item for item in results.recoveries if item.row == label and math.isfinite(item.relative)]
    if not found:
        return None
    names = list(dict.fromkeys(item.case for item in found))
    means = {name: float(np.mean([item.relative for item in found if item.case == name])) for name in names}
    worst = max(means, key=lambda name: means[name])
    return Interval(means[worst]), f"{worst}, worst of {len(names)} steady cases, after {found[0].after} decisions"


def _training(results: Results, summaries: Sequence[SuiteSummary], label: str) -> tuple[Interval, str] | None:
    row = next((row for row in results.rows if row.label == label), None)
    seconds = [] if row is None else [item.seconds for item in row.training if item.seconds is not None]
    if not seconds:
        return None
    return Interval(
        max(seconds)
    ), f"longest of {len(seconds)} trainings, by their cards; without the paths in hindsight, which all seeds share"


def _decision(results: Results, summaries: Sequence[SuiteSummary], label: str) -> tuple[Interval, str] | None:
    seconds = results.decision_seconds.get(label)
    return None if seconds is None else (Interval(1e6 * seconds), "median in this run, on this machine")


_STEADY, _MOVING = ("steady",), ("non-stationary",)
_BOTH = (*_STEADY, *_MOVING)

TARGETS: tuple[Target, ...] = (
    Target("cost over the mid-grid static setting's, all cases", 0.75, _read("all", "middle", "iqm"), suites=_BOTH),
    Target(
        "cost over the best static setting's, steady, on every case", 1.01, _read("steady", "best_static", "worst"),
        suites=_STEADY,
    ),
    Target(
        "cost over the best static setting's, non-stationary", 0.93, _read("non-stationary", "best_static", "iqm"), suites=_MOVING
    ),
    Target(
        "cost over the smoothed curve's, non-stationary, the interval below 1", 0.97, _read("non-stationary", "reference", "iqm"),
        whole_interval_below=1.0, suites=_MOVING,
    ),
    Target("cost over the smoothed curve's, steady, in the mean", 1.00, _read("steady", "reference", "mean"), suites=_STEADY),
    Target("cost over the smoothed curve's, steady, never above", 1.02, _read("steady", "reference", "worst"), suites=_STEADY),
    Target(
        "share of the gap between curve and causal oracle closed, recurring cases", 0.5, _gap, at_least=True, suites=_MOVING
    ),
    Target(
        "cost over the best static setting's after 10 intervals from a bad default, steady", 1.05, _recovery, suites=_STEADY
    ),
    Target("training, seconds", 600.0, _training),
    Target("a decision, microseconds", 200.0, _decision),
)  # fmt: skip
"""The targets; how long an update of PPO takes is measured by ``cachepilot bench`` and not here."""


def judge(results: Results, summaries: Sequence[SuiteSummary]) -> list[Verdict]:
    """Say what became of each target, for the row that they are about."""
    label = learned_label(results)
    verdicts = []
    for target in TARGETS:
        found = None if label is None else target.read(results, summaries, label)
        value, detail = found if found is not None else (Interval(math.nan), "not in this evaluation")
        state = target.state(value)
        if state != "not measured" and not _whole(results, target.suites):
            state, detail = "not measured", f"{detail}; not all cases were asked for"
        verdicts.append(Verdict(target, value, detail, state))
    return verdicts


def _whole(results: Results, suites: Sequence[str]) -> bool:
    """Whether all cases of these suites were asked for."""
    return "all" in results.settings.suites or set(suites) <= set(results.settings.suites)
