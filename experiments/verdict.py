"""From intervals to one of four verdicts, with its reason in words. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from experiments.measure import ArmFigures
from experiments.stats import Interval

Outcome = Literal["treatment better", "control better", "no difference shown", "not enough data"]

FEWEST_KEYS = 10
"""With fewer keys in an arm there is no verdict."""
FEW_KEYS = 50
FEW_EFFECTIVE_KEYS = 10.0
BROKEN_SPLIT = 0.001
"""A p-value of the split below this means that keys were not assigned as designed."""


BASIS = (
    "Intervals are clustered by key. The arms are compared on different keys: keys, not requests, were assigned at random. "
    "Looking repeatedly is not corrected for: the intervals hold for one look at a time fixed beforehand."
)
"""What has to be said with every verdict."""


@dataclass(frozen=True)
class Differences:
    """Treatment minus control.

    Attributes:
        cost: US dollars per 1,000 requests; decides.
        hit_ratio: As a share of requests.
        p99: Seconds.
        split: p-value of the sample-ratio check on keys; NaN without keys.
    """

    cost: Interval
    hit_ratio: Interval
    p99: Interval
    split: float


@dataclass(frozen=True)
class Verdict:
    """What the experiment shows.

    Attributes:
        outcome: One of four.
        reason: Why, with the numbers.
        warnings: What makes the verdict weaker than it looks.
        basis: What the intervals stand on.
    """

    outcome: Outcome
    reason: str
    warnings: tuple[str, ...]
    basis: str = BASIS


def judge(control: ArmFigures, treatment: ArmFigures, differences: Differences, *, confidence: float, slo: float) -> Verdict:
    """Judge an experiment by its cost.

    Args:
        control: The control's figures.
        treatment: The treatment's figures.
        differences: Treatment minus control.
        confidence: Level of the intervals.
        slo: Objective on P99, seconds.
    """
    warnings = _warnings(control, treatment, differences, slo)
    missing = _not_enough(control, treatment, differences)
    if missing:
        return Verdict("not enough data", missing, warnings)
    cost = differences.cost
    level = f"{confidence:.0%} interval"
    numbers = (
        f"{treatment.arm} costs {usd(treatment.cost.value)} per 1,000 requests, {control.arm} {usd(control.cost.value)}: "
        f"a difference of {_signed_usd(cost.value)}{_relative(cost.value, control.cost.value)}, {level} "
        f"{_signed_usd(cost.low)} to {_signed_usd(cost.high)}"
    )
    beside = (
        f" Hit ratio {treatment.hit_ratio.value:.1%} against {control.hit_ratio.value:.1%} "
        f"({_points(differences.hit_ratio, level)}). "
        f"P99 {seconds(treatment.p99.value)} against {seconds(control.p99.value)} ({_seconds_change(differences.p99, level)})."
    )
    if cost.high < 0:
        return Verdict("treatment better", f"{numbers}, wholly below 0.{beside}", warnings)
    if cost.low > 0:
        return Verdict("control better", f"{numbers}, wholly above 0.{beside}", warnings)
    return Verdict("no difference shown", f"{numbers}, which holds 0.{beside}", warnings)


def _not_enough(control: ArmFigures, treatment: ArmFigures, differences: Differences) -> str:
    for arm in (control, treatment):
        if not arm.requests:
            return f"Arm {arm.arm} served no request in the period of the experiment, so there is nothing to compare with."
    if differences.split < BROKEN_SPLIT:
        return (
            f"Keys were not split as designed: {control.keys:,} in {control.arm} and {treatment.keys:,} in {treatment.arm} "
            f"(chi-square p = {differences.split:.1g}). Until it is known why, no comparison of the arms means anything."
        )
    for arm in (control, treatment):
        if arm.keys < FEWEST_KEYS:
            return f"Arm {arm.arm} saw {arm.keys} different keys; below {FEWEST_KEYS} no interval by key can be trusted."
        if not math.isfinite(arm.cost.value):
            return (
                f"The cost of arm {arm.arm} is not known, since its knobs are not: the ledger has no decision of it, and the "
                "experiment was started without its knobs."
            )
    if not differences.cost.known:
        return "The interval of the cost difference could not be computed."
    return ""


def _warnings(control: ArmFigures, treatment: ArmFigures, differences: Differences, slo: float) -> tuple[str, ...]:
    found = []
    for arm in (control, treatment):
        if 0 < arm.keys < FEW_KEYS:
            found.append(f"Arm {arm.arm} saw only {arm.keys} keys: intervals by key need about {FEW_KEYS} to keep their level.")
        elif arm.requests and arm.effective_keys < FEW_EFFECTIVE_KEYS:
            found.append(
                f"In arm {arm.arm} a few hot keys dominate ({arm.keys:,} keys count like {arm.effective_keys:.1f} equal ones): "
                "which arm the hottest keys fell to decides much of the difference, and another salt may give another result."
            )
        if arm.errors:
            found.append(f"Arm {arm.arm}: {arm.errors:,} of {arm.requests:,} requests failed upstream; they count as not hit.")
        if arm.p99.value > slo:
            found.append(f"Arm {arm.arm}: P99 {seconds(arm.p99.value)} is above its objective of {seconds(slo)}.")
    if BROKEN_SPLIT <= differences.split < 0.05:
        found.append(f"The split of keys is a little uneven (chi-square p = {differences.split:.2g}); one in 20 is by chance.")
    return tuple(found)


def usd(value: float) -> str:
    """Return an amount per 1,000 requests in readable length."""
    if not math.isfinite(value):
        return "unknown"
    return f"${value:.2f}" if abs(value) >= 100 else f"${value:.4f}"


def seconds(value: float) -> str:
    """Return a latency in readable units."""
    if not math.isfinite(value):
        return "unknown"
    return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.2f} s"


def _signed_usd(value: float) -> str:
    return ("−" if value < 0 else "+") + usd(abs(value))


def _relative(change: float, base: float) -> str:
    return f" ({100 * change / base:+.1f}%)".replace("-", "−") if base > 0 else ""


def _points(change: Interval, level: str) -> str:
    text = f"{100 * change.value:+.1f} points"
    if change.known:
        text += f", {level} {100 * change.low:+.1f} to {100 * change.high:+.1f}"
    return text.replace("-", "−")


def _seconds_change(change: Interval, level: str) -> str:
    def signed(value: float) -> str:
        return ("−" if value < 0 else "+") + seconds(abs(value))

    text = signed(change.value)
    if change.known:
        text += f", {level} {signed(change.low)} to {signed(change.high)}"
    return text
