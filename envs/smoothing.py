"""Moving averages of ghost curves, and their optimum under the prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.objective import Prices, grid_cost
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs

_ABSURD = 1e15


@dataclass(frozen=True)
class CurveReading:
    """A curve read under the prices.

    Attributes:
        curve: The smoothed curve.
        costs: Predicted cost of each setting, US dollars per 1,000 requests, shape (S, T).
        index: Row and column of the cheapest setting.
        best: That setting, ``warmup_ratio`` 0.
        best_cost: Its cost.
        last: The cheapest setting of the newest window alone; None if that window had no curve.
        last_costs: Predicted cost of each setting in the newest window alone, at the smoothed price of a miss; likewise.
    """

    curve: GhostCurve
    costs: npt.NDArray[np.float64]
    index: tuple[int, int]
    best: Knobs
    best_cost: float
    last: Knobs | None
    last_costs: npt.NDArray[np.float64] | None = None


class CurveSmoother:
    """Keeps exponentially weighted sums of curves, tokens and latencies, so that every request weighs the same within a window.

    Acting on the smoothed curve beats acting on the last one wherever shrinking and refilling costs something.

    Args:
        prices: The prices.
        weight: Weight of the newest window, (0, 1].
        patience: Windows without a usable curve after which the sums are no longer trusted.
    """

    def __init__(self, prices: Prices, weight: float, patience: int) -> None:
        self._prices = prices
        self._weight = weight
        self._patience = patience
        self._sums: dict[str, float] = {}
        self._grid: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None = None
        self._hits: npt.NDArray[np.float64] | None = None
        self._stale: npt.NDArray[np.float64] | None = None
        self._newest: GhostCurve | None = None
        self._window = math.nan
        self._missing = 0
        self._reading: CurveReading | None = None

    def update(self, signals: ArmSignals) -> None:
        """Take one more window in; what is missing in it leaves the sums as they are."""
        ghost = signals.ghost
        self._newest = ghost if ghost is not None and _usable(ghost) and 0 < signals.window < _ABSURD else None
        self._window = signals.window
        self._missing = 0 if self._newest is not None else self._missing + 1
        if self._newest is not None:
            self._take(self._newest, signals.window)
        misses = signals.requests * (1.0 - signals.hit_ratio)
        hits = signals.requests * signals.hit_ratio
        if _sane(misses) and misses > 0 and _sane(signals.input_tokens) and _sane(signals.output_tokens):
            self._add("token_misses", misses)
            self._add("input", signals.input_tokens)
            self._add("output", signals.output_tokens)
        if _sane(misses) and misses > 0 and _sane(signals.miss_latency):
            self._add("latency_misses", misses)
            self._add("miss_seconds", misses * signals.miss_latency)
        if _sane(hits) and hits > 0 and _sane(signals.hit_latency):
            self._add("latency_hits", hits)
            self._add("hit_seconds", hits * signals.hit_latency)
        self._reading = self._read()

    def read(self) -> CurveReading | None:
        """Return the smoothed curve under the prices; None while the curve or the price of a miss is not known."""
        return self._reading

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = (1.0 - self._weight) * self._sums.get(name, 0.0) + self._weight * value

    def _take(self, ghost: GhostCurve, window: float) -> None:
        same_grid = self._grid is not None and all(map(np.array_equal, self._grid, (ghost.sizes, ghost.ttls)))
        if self._hits is None or self._stale is None or not same_grid:
            self._grid = (ghost.sizes, ghost.ttls)
            self._hits, self._stale = np.zeros_like(ghost.hits, np.float64), np.zeros_like(ghost.hits, np.float64)
            self._sums["requests"] = self._sums["duration"] = 0.0
        self._hits = (1.0 - self._weight) * self._hits + self._weight * ghost.hits
        self._stale = (1.0 - self._weight) * self._stale + self._weight * ghost.stale_hits
        self._add("requests", ghost.requests)
        self._add("duration", window)

    def _read(self) -> CurveReading | None:
        if self._grid is None or self._hits is None or self._stale is None or self._missing > self._patience:
            return None
        curve = GhostCurve(self._grid[0], self._grid[1], self._hits, self._stale, self._sums["requests"])
        costs = self._price(curve, self._sums["duration"])
        if costs is None:
            return None
        index = _cheapest(costs)
        last = newest = None
        if self._newest is not None:
            newest = self._price(self._newest, self._window)
            last = None if newest is None else _setting(self._newest, _cheapest(newest))
        return CurveReading(curve, costs, index, _setting(curve, index), float(costs[index]), last, newest)

    def _price(self, curve: GhostCurve, duration: float) -> npt.NDArray[np.float64] | None:
        sums = self._sums
        if not (sums.get("token_misses", 0.0) > 0 and sums.get("latency_misses", 0.0) > 0):
            return None
        hits = sums.get("latency_hits", 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            costs = grid_cost(
                curve.hits,
                curve.stale_hits,
                curve.sizes,
                requests=curve.requests,
                duration=duration,
                input_tokens_per_miss=sums["input"] / sums["token_misses"],
                output_tokens_per_miss=sums["output"] / sums["token_misses"],
                miss_latency=sums["miss_seconds"] / sums["latency_misses"],
                # No hit was ever timed: a hit is so much faster than a miss that 0 changes no choice.
                hit_latency=sums["hit_seconds"] / hits if hits > 0 else 0.0,
                prices=self._prices,
            )
        return costs if np.all(np.isfinite(costs)) else None


def cost_at(values: npt.NDArray[np.float64], curve: GhostCurve, knobs: Knobs) -> float:
    """Return a grid's value at any size and TTL, bilinear in their logarithms, the edge's value beyond the grid.

    Args:
        values: One value for each setting, shape (S, T).
        curve: The curve whose grid it is.
        knobs: Where to read it.
    """
    row = float(np.interp(math.log(max(knobs.cache_size, 1)), np.log(curve.sizes), np.arange(len(curve.sizes))))
    column = float(np.interp(math.log(knobs.ttl), np.log(curve.ttls), np.arange(len(curve.ttls))))
    top, left = int(row), int(column)
    bottom, right = min(top + 1, len(curve.sizes) - 1), min(left + 1, len(curve.ttls) - 1)
    down, across = row - top, column - left
    upper = (1.0 - across) * values[top, left] + across * values[top, right]
    lower = (1.0 - across) * values[bottom, left] + across * values[bottom, right]
    return float((1.0 - down) * upper + down * lower)


def _cheapest(costs: npt.NDArray[np.float64]) -> tuple[int, int]:
    """Return the cheapest setting, shape (S, T) in, (row, column) out; of equals the smallest size, then the longest TTL.

    A window cannot tell TTLs apart that are longer than anything in it was old. The longest then is the choice that loses
    nothing: it does not expire what nothing speaks against.
    """
    # The tolerance keeps rounding from deciding.
    least = costs.min()
    equals = costs <= least + 1e-9 * abs(least)
    row = int(np.argmax(equals.any(axis=1)))
    column = costs.shape[1] - 1 - int(np.argmax(equals[row, ::-1]))
    return row, column


def _setting(curve: GhostCurve, index: tuple[int, int]) -> Knobs:
    return Knobs(int(curve.sizes[index[0]]), float(curve.ttls[index[1]]), 0.0)


def _sane(value: float) -> bool:
    return 0.0 <= value < _ABSURD


def _usable(curve: GhostCurve) -> bool:
    """Whether a curve is well formed and holds only what a window can hold."""
    shape = (len(curve.sizes), len(curve.ttls))
    if min(shape) < 1 or curve.hits.shape != shape or curve.stale_hits.shape != shape or not 1e-3 < curve.requests < _ABSURD:
        return False
    if not (np.all(curve.sizes > 0) and np.all(np.diff(curve.sizes) > 0)):
        return False
    if not (np.all(curve.ttls > 0) and np.all(np.diff(curve.ttls) > 0) and np.all(np.isfinite(curve.ttls))):
        return False
    # A NaN makes the least and the greatest NaN, and every comparison with it False.
    return all(bool(cells.min() >= 0 and cells.max() < _ABSURD) for cells in (curve.hits, curve.stale_hits))
