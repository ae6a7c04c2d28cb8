"""What becomes of an experiment's verdict when each price is halved and doubled. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from envs.objective import Prices
from experiments import stats
from experiments.measure import ArmFigures, Method, repriced
from experiments.records import clean
from experiments.sensitivity import Sensitivity, sensitivity
from experiments.stats import Interval
from experiments.verdict import Differences, Outcome, judge


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the experiment shows under some prices.

    Attributes:
        verdict: One of four.
        difference: Cost of the treatment minus that of the control, US dollars per 1,000 requests.
        saving: What the treatment saves, as a share of the control's cost; negative where it costs more, NaN where unknown.
    """

    verdict: Outcome
    difference: Interval
    saving: float

    def to_dict(self) -> dict[str, Any]:
        """Return the conclusion, JSON-ready: what is unknown is None."""
        found: dict[str, Any] = clean({"verdict": self.verdict, "difference": self.difference.to_dict(), "saving": self.saving})
        return found


def move_prices(
    control: ArmFigures, treatment: ArmFigures, differences: Differences, *, prices: Prices, method: Method
) -> Sensitivity[Conclusion]:
    """Judge an experiment again under each halved and doubled price.

    Args:
        control: The control over the whole period.
        treatment: The treatment over the whole period.
        differences: Treatment minus control.
        prices: The prices as given.
        method: How intervals are computed.
    """

    def decide(moved: Prices) -> Conclusion:
        base, other = (repriced(arm, moved, method) for arm in (control, treatment))
        gap = stats.interval(stats.difference(other.cost_estimate, base.cost_estimate), confidence=method.confidence)
        verdict = judge(base, other, replace(differences, cost=gap), confidence=method.confidence, slo=moved.slo_p99)
        paid = base.cost.value
        return Conclusion(verdict.outcome, gap, -gap.value / paid if paid > 0 else math.nan)

    return sensitivity(decide, prices)


def in_words(moves: Sensitivity[Conclusion]) -> str:
    """Return a sentence on whether the verdict rests on a single price."""
    turned = moves.changed(lambda conclusion: conclusion.verdict)
    if not turned:
        return f"The verdict ({moves.base.verdict}) stays the same with each price halved and doubled, one at a time."
    return f"The verdict ({moves.base.verdict}) rests on prices: " + "; ".join(
        f"with {row.words} it is {row.outcome.verdict!r}" for row in turned
    ) + "."  # fmt: skip


def rows(moves: Sensitivity[Conclusion]) -> list[Mapping[str, Any]]:
    """Return the table for scripts; the first row is the verdict as it is."""
    return list(moves.to_rows(Conclusion.to_dict))
