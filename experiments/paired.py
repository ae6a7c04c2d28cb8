"""The paired ghost: what the control's knobs would have done on the treatment's own requests.

Arms serve different keys, so their difference holds the luck of the split. The ghost curves that the tuner records tell, for
the very requests of the treatment, what any setting would have given. That is a model, not a measurement: a diagnostic beside the
verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.objective import Prices, grid_cost
from experiments.measure import ArmFigures, ArmSource
from experiments.records import DecisionRecord, ghost_from_dict
from serving.ghost import GhostCurve
from serving.knobs import Knobs


@dataclass(frozen=True, slots=True)
class PairedGhost:
    """Two settings on the same requests, both by the ghost.

    Attributes:
        windows: Decision intervals with a ghost curve.
        requests: Requests that the curves stand for.
        treatment_hit_ratio: By the knobs that the treatment had.
        control_hit_ratio: By the knobs that the control had at the same time.
        treatment_cost: US dollars per 1,000 requests by the treatment's knobs (tokens, latency, memory, staleness); NaN where
            hits and misses cannot be told apart in the log.
        control_cost: The same by the control's knobs.
        measured_hit_ratio: What the treatment's log says, to judge the ghost by.
        constant: Whether the two arms had the same knobs throughout: then nothing is compared.
    """

    windows: int
    requests: float
    treatment_hit_ratio: float
    control_hit_ratio: float
    treatment_cost: float
    control_cost: float
    measured_hit_ratio: float
    constant: bool


def paired_ghost(
    treatment: ArmSource, control: ArmSource, measured: ArmFigures, *, start: float, end: float, prices: Prices
) -> PairedGhost | None:
    """Evaluate both arms' knobs on the treatment's ghost curves.

    Args:
        treatment: The arm whose requests are used.
        control: The arm whose knobs are tried on them.
        measured: The treatment's figures over the same time.
        start: Seconds since the epoch.
        end: Seconds since the epoch.
        prices: The prices.

    Returns:
        The comparison, or None without curves or without knowledge of the knobs.
    """
    hits = np.zeros((2, 2))  # rows: treatment's knobs, control's; columns: hits, stale hits
    budgets = np.zeros(2)
    requests, windows, duration, constant = 0.0, 0, 0.0, True
    for record in treatment.decisions:
        curve = ghost_from_dict(record.signals)
        window = _window(record)
        middle = record.at - window / 2
        if curve is None or not curve.requests > 0 or not start <= middle <= end:
            continue
        settings = [treatment.timeline.at(middle), control.timeline.at(middle)]
        if settings[0] is None or settings[1] is None:
            continue
        constant &= settings[0].cache_size == settings[1].cache_size and settings[0].ttl == settings[1].ttl
        for row, knobs in enumerate(settings):
            assert knobs is not None
            hits[row] += [_read(curve, curve.hits, knobs), _read(curve, curve.stale_hits, knobs)]
            budgets[row] += knobs.cache_size * window
        requests += curve.requests
        duration += window
        windows += 1
    if not windows:
        return None
    ratios = np.minimum(hits[:, 0] / requests, 1.0)
    costs = [_cost(treatment, hits[row], budgets[row] / duration, requests, duration, prices) for row in (0, 1)]
    return PairedGhost(
        windows=windows,
        requests=requests,
        treatment_hit_ratio=float(ratios[0]),
        control_hit_ratio=float(ratios[1]),
        treatment_cost=costs[0],
        control_cost=costs[1],
        measured_hit_ratio=measured.hit_ratio.value,
        constant=constant,
    )


def _window(record: DecisionRecord) -> float:
    window = record.signals.get("window")
    return float(window) if isinstance(window, (int, float)) and window > 0 else 0.0


def _read(curve: GhostCurve, values: npt.NDArray[np.float64], knobs: Knobs) -> float:
    """Read a curve between its grid points, linear in the logarithms of size and ttl; beyond the grid its edge."""
    size, ttl = math.log(max(knobs.cache_size, 1)), math.log(knobs.ttl) if math.isfinite(knobs.ttl) else math.inf
    by_ttl = [np.interp(size, np.log(curve.sizes), values[:, column]) for column in range(len(curve.ttls))]
    return float(np.interp(min(ttl, 700.0), np.log(curve.ttls), by_ttl))


def _cost(
    arm: ArmSource, hits: npt.NDArray[np.float64], budget: float, requests: float, duration: float, prices: Prices
) -> float:
    outcome = arm.log["outcome"].to_numpy(str)
    latency = arm.log["latency"].to_numpy(np.float64)
    missed = outcome == "miss"
    found = np.isin(outcome, ("hit", "semantic_hit"))
    if not missed.any() or not found.any() or not duration > 0:
        return math.nan
    cost = grid_cost(
        np.array([[hits[0]]]),
        np.array([[hits[1]]]),
        np.array([round(budget)], np.int64),
        requests=requests,
        duration=duration,
        input_tokens_per_miss=float(arm.log["input_tokens"].to_numpy(np.float64)[missed].mean()),
        output_tokens_per_miss=float(arm.log["output_tokens"].to_numpy(np.float64)[missed].mean()),
        miss_latency=float(latency[missed].mean()),
        hit_latency=float(latency[found].mean()),
        prices=prices,
    )
    return float(cost[0, 0])


def ghost_sentence(paired: PairedGhost, decisions: Sequence[DecisionRecord]) -> str:
    """Say in words what the paired ghost found, and how far it can be trusted."""
    off = paired.treatment_hit_ratio - paired.measured_hit_ratio
    text = (
        f"On the treatment's own requests ({paired.windows} of {len(decisions)} intervals have a ghost curve) its knobs give "
        f"{paired.treatment_hit_ratio:.1%} hits by the ghost, the control's knobs {paired.control_hit_ratio:.1%}: "
        f"{100 * (paired.treatment_hit_ratio - paired.control_hit_ratio):+.1f} points"
    )
    if math.isfinite(paired.treatment_cost) and math.isfinite(paired.control_cost):
        text += (
            f", and ${paired.treatment_cost:.4f} against ${paired.control_cost:.4f} per 1,000 requests "
            "(without refreshes, P99 hinge and change)"
        )
    if math.isfinite(off):
        text += f". The ghost is {abs(off) * 100:.1f} points {'above' if off >= 0 else 'below'} the hit ratio that was measured"
    return text + "."
