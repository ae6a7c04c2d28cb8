"""What an arm's decisions say about any stretch of time: its knobs, its budget, its refreshes and evictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.records import DecisionRecord
from serving.knobs import Knobs, KnobSpace


@dataclass(frozen=True)
class KnobTimeline:
    """The knobs of one arm as a step function of time.

    Attributes:
        times: When each setting began, seconds since the epoch, ascending; the first counts from the beginning of time.
        knobs: The settings, as many as times; empty where they are not known.
    """

    times: tuple[float, ...]
    knobs: tuple[Knobs, ...]

    @property
    def known(self) -> bool:
        """Whether anything is known."""
        return bool(self.knobs)

    def at(self, when: float) -> Knobs | None:
        """Return the setting in force, or None where nothing is known."""
        if not self.knobs:
            return None
        return self.knobs[max(0, int(np.searchsorted(self.times, when, side="right")) - 1)]

    def mean_budget(self, start: float, end: float) -> float:
        """Return the mean ``cache_size`` between two times, bytes; NaN where nothing is known."""
        if not self.knobs:
            return math.nan
        if not end > start:
            here = self.at(start)
            return float(here.cache_size) if here else math.nan
        edges = np.clip(np.array([-math.inf, *self.times[1:], math.inf]), start, end)
        sizes = np.array([item.cache_size for item in self.knobs], np.float64)
        return float(np.sum(np.diff(edges) * sizes) / (end - start))

    def moves(self, space: KnobSpace) -> list[tuple[float, float]]:
        """Return when the knobs were moved and by how many grid steps (root of the sum of squares)."""
        steps = [space.to_steps(item) for item in self.knobs]
        return [
            (when, float(np.sqrt(np.sum((after - before) ** 2))))
            for when, before, after in zip(self.times[1:], steps, steps[1:], strict=False)
        ]


def knob_timeline(decisions: Sequence[DecisionRecord], initial: Knobs | None) -> KnobTimeline:
    """Build the timeline of one arm.

    Args:
        decisions: The arm's decisions in order of time.
        initial: Its knobs at the start of the experiment, used where there are no decisions.
    """
    if not decisions:
        return KnobTimeline((0.0,), (initial,)) if initial is not None else KnobTimeline((), ())
    times, knobs = [0.0], [decisions[0].current]
    for record in decisions:
        # What a decision found in force is the truth; somebody else may have written since the one before.
        for when, setting in ((record.at, record.current), (record.at, record.applied)):
            if setting != knobs[-1]:
                times.append(when)
                knobs.append(setting)
    return KnobTimeline(tuple(times), tuple(knobs))


@dataclass(frozen=True)
class SignalTotals:
    """Running totals of one counter-like signal, read from an arm's decisions.

    Attributes:
        times: Seconds since the epoch, ascending.
        totals: Sum of the signal up to each time, same length.
    """

    times: npt.NDArray[np.float64]
    totals: npt.NDArray[np.float64]

    @property
    def known(self) -> bool:
        """Whether the signal was ever recorded."""
        return len(self.times) > 0

    def between(self, start: float, end: float) -> float:
        """Return the amount between two times, evenly spread within an interval; 0 where nothing was recorded."""
        if not self.known:
            return 0.0
        low, high = np.interp([start, end], self.times, self.totals)
        return float(high - low)


def signal_totals(decisions: Sequence[DecisionRecord], name: str) -> SignalTotals:
    """Sum a signal over an arm's decisions, in order of time.

    Windows that overlap (a signal window longer than the interval) count once: each adds the share of it that is new.
    """
    times: list[float] = []
    totals: list[float] = []
    for record in decisions:
        amount, window = _number(record.signals.get(name)), _number(record.signals.get("window"))
        if not (math.isfinite(amount) and window > 0):
            continue
        since = record.at - window if not times else max(times[-1], record.at - window)
        if not times:
            times, totals = [since], [0.0]
        elif since > times[-1]:  # a gap without signals adds nothing
            times.append(since)
            totals.append(totals[-1])
        fresh = max(0.0, record.at - since)
        times.append(record.at)
        totals.append(totals[-1] + amount * min(1.0, fresh / window))
    return SignalTotals(np.array(times), np.array(totals))


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
