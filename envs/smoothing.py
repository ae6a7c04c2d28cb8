"""Moving averages of ghost curves, and their optimum under the prices: for many lanes at once, and for one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.curve_kernel import cheapest, smooth
from envs.knob_batch import Floats, Grid, put_lanes, to_array
from envs.objective import MissBatch, PriceBatch, Prices, byte_cost_batch, grid_cost_batch, miss_cost_batch
from envs.signal_batch import SignalBatch, curve_of
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs

SMOOTHING = 0.1
"""Weight of the newest window in the moving averages. On the training suite 0.06 is as good, 0.3 costs 3 % more, and 1 (no
smoothing) a fifth more."""

Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

# rows of the sums, in the order of SignalBatch.amounts
(
    _REQUESTS, _DURATION, _TOKEN_MISSES, _INPUT, _OUTPUT, _LATENCY_MISSES, _MISS_SECONDS, _LATENCY_HITS, _HIT_SECONDS, _SUMS,
) = range(10)  # fmt: skip


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


@dataclass(frozen=True)
class CurveReadings:
    """The curves of E lanes read under their prices: :class:`CurveReading`, as arrays.

    Attributes:
        valid: Whether a lane's curve and the price of its misses are known, shape (E,); elsewhere the rest means nothing.
        grid: The grids.
        hits: Smoothed hits of each setting, shape (E, S, T). The smoother goes on in the same array.
        stale_hits: Smoothed stale hits, likewise.
        requests: Smoothed requests, shape (E,).
        costs: Predicted cost of each setting, US dollars per 1,000 requests, shape (E, S, T).
        row: Row of the cheapest setting, shape (E,).
        column: Its column.
        best: That setting, ``warmup_ratio`` 0, shape (E, 3).
        best_cost: Its cost, shape (E,).
        last_valid: Whether the newest window alone could be read, shape (E,).
        last: The cheapest setting of the newest window alone, shape (E, 3).
        last_costs: Cost of each setting in the newest window alone, at the smoothed price of a miss, shape (E, S, T).
        last_best_cost: The least of them, shape (E,).
        miss_cost: What a miss costs, US dollars, shape (E,).
        byte_cost: What a reserved byte costs for each request, US dollars, shape (E,).
    """

    valid: Mask
    grid: Grid
    hits: Floats
    stale_hits: Floats
    requests: Floats
    costs: Floats
    row: Indices
    column: Indices
    best: Floats
    best_cost: Floats
    last_valid: Mask
    last: Floats
    last_costs: Floats
    last_best_cost: Floats
    miss_cost: Floats
    byte_cost: Floats

    def lane(self, lane: int) -> CurveReading | None:
        """Return one lane's reading, copied; None where there is none."""
        if not self.valid[lane]:
            return None
        last = bool(self.last_valid[lane])
        return CurveReading(
            self.curve(lane),
            self.costs[lane].copy(),
            (int(self.row[lane]), int(self.column[lane])),
            _knobs(self.best[lane]),
            float(self.best_cost[lane]),
            _knobs(self.last[lane]) if last else None,
            self.last_costs[lane].copy() if last else None,
        )

    def curve(self, lane: int) -> GhostCurve:
        """Return one lane's smoothed curve, copied."""
        return curve_of(self.grid, lane, self.hits, self.stale_hits, float(self.requests[lane]))


class CurveSmootherBatch:
    """Keeps exponentially weighted sums of curves, tokens and latencies, so that every request weighs the same within a window.

    Acting on the smoothed curve beats acting on the last one wherever shrinking and refilling costs something.

    Args:
        prices: The prices of E lanes.
        grid: Their grids; :meth:`update` follows a change, which restarts the curves that it concerns.
        weight: Weight of the newest window, (0, 1].
        patience: Windows without a usable curve after which the sums are no longer trusted.
    """

    def __init__(self, prices: PriceBatch, grid: Grid, weight: float, patience: int) -> None:
        self._prices = prices
        self._weight = weight
        self._patience = patience
        self._grid = grid
        self._hits, self._stale = np.zeros(grid.shape), np.zeros(grid.shape)
        self._started = np.zeros(grid.shape[0], bool)
        self._sums = np.zeros((_SUMS, grid.shape[0]))
        self._missing = np.zeros(grid.shape[0], np.int64)

    @property
    def grid(self) -> Grid:
        """The grids of the curves that are kept."""
        return self._grid

    def update(self, signals: SignalBatch) -> CurveReadings:
        """Take one more window of each lane in, what is missing in it leaves the sums as they are; return what is known then."""
        if signals.grid is not self._grid:
            self._follow(signals.grid)
        usable = signals.usable
        self._missing = np.where(usable, 0, self._missing + 1)
        self._started = self._started | usable
        smooth(self._hits, signals.hits, usable, self._weight)
        smooth(self._stale, signals.stale_hits, usable, self._weight)
        known, amounts = signals.amounts
        self._sums = np.where(known, (1.0 - self._weight) * self._sums + self._weight * amounts, self._sums)
        return self._read(signals)

    def put(self, lanes: Indices, other: CurveSmootherBatch) -> None:
        """Continue in ``lanes`` from the state of ``other``'s lanes."""
        self._prices = put_lanes(self._prices, lanes, other._prices)
        self._grid = self._grid.put(lanes, other._grid)
        for name in ("_hits", "_stale", "_started", "_missing"):
            getattr(self, name)[lanes] = getattr(other, name)
        self._sums[:, lanes] = other._sums

    def _follow(self, grid: Grid) -> None:
        other = np.ones(grid.shape[0], bool)
        if grid.shape == self._grid.shape:
            other = np.any(grid.sizes != self._grid.sizes, axis=1) | np.any(grid.ttls != self._grid.ttls, axis=1)
        else:
            self._hits, self._stale = np.zeros(grid.shape), np.zeros(grid.shape)
        self._grid = grid
        self._hits[other] = self._stale[other] = 0.0
        self._started[other] = False
        self._sums[:2, other] = 0.0  # requests and duration are the curve's own

    def _read(self, signals: SignalBatch) -> CurveReadings:
        priced, misses = _misses(self._sums)
        requests = self._sums[_REQUESTS]
        with np.errstate(all="ignore"):
            miss_cost = miss_cost_batch(misses, self._prices)
            byte_cost = byte_cost_batch(requests, self._sums[_DURATION], self._prices)
        costs = grid_cost_batch(
            self._hits, self._stale, self._grid.sizes, requests=requests, duration=self._sums[_DURATION],
            misses=misses, prices=self._prices,
        )  # fmt: skip
        finite, row, column, best_cost = _cheapest(costs)
        valid = self._started & (self._missing <= self._patience) & priced & finite
        last_costs = grid_cost_batch(
            signals.hits, signals.stale_hits, self._grid.sizes, requests=signals.ghost_requests, duration=signals["window"],
            misses=misses, prices=self._prices,
        )  # fmt: skip
        last_finite, last_row, last_column, last_best_cost = _cheapest(last_costs)
        return CurveReadings(
            valid=valid,
            grid=self._grid,
            hits=self._hits,
            stale_hits=self._stale,
            requests=requests,
            costs=costs,
            row=row,
            column=column,
            best=_settings(self._grid, row, column),
            best_cost=best_cost,
            last_valid=valid & signals.usable & last_finite,
            last=_settings(self._grid, last_row, last_column),
            last_costs=last_costs,
            last_best_cost=last_best_cost,
            miss_cost=miss_cost,
            byte_cost=byte_cost,
        )


class CurveSmoother:
    """:class:`CurveSmootherBatch` of one lane, which starts with whatever grid the first curve has.

    Args:
        prices: The prices.
        weight: Weight of the newest window, (0, 1].
        patience: Windows without a usable curve after which the sums are no longer trusted.
    """

    def __init__(self, prices: Prices, weight: float, patience: int) -> None:
        self._prices = PriceBatch.of([prices])
        self._weight = weight
        self._patience = patience
        self._batch: CurveSmootherBatch | None = None
        self._reading: CurveReading | None = None

    def update(self, signals: ArmSignals) -> None:
        """Take one more window in; what is missing in it leaves the sums as they are."""
        window = SignalBatch.alone(signals, self._batch.grid if self._batch is not None else None)
        if self._batch is None:
            self._batch = CurveSmootherBatch(self._prices, window.grid, self._weight, self._patience)
        self._reading = self._batch.update(window).lane(0)

    def read(self) -> CurveReading | None:
        """Return the smoothed curve under the prices; None while the curve or the price of a miss is not known."""
        return self._reading


def window_regret(signals: SignalBatch, place: Place, prices: PriceBatch) -> Floats:
    """Return the cost of the knobs over the best cost of the grid, minus 1, by each window's own curve and price of a miss.

    Args:
        signals: The windows of E lanes.
        place: Where on the grids the knobs are.
        prices: The prices.

    Returns:
        Shares >= 0, shape (E,); NaN where a curve or a price is missing.
    """
    known, amounts = signals.amounts
    priced, misses = _misses(np.where(known, amounts, 0.0))
    costs = grid_cost_batch(
        signals.hits, signals.stale_hits, signals.grid.sizes, requests=signals.ghost_requests, duration=signals["window"],
        misses=misses, prices=prices,
    )  # fmt: skip
    finite, _, _, best = _cheapest(costs)
    with np.errstate(all="ignore"):
        over = np.maximum(place.read(costs) / best - 1.0, 0.0)
    return np.where(signals.usable & priced & finite & (best > 0), over, math.nan)


@dataclass(frozen=True)
class Place:
    """Where on the grids of E lanes some knobs are: between which settings, and how near to each.

    Attributes:
        corners: Flat indices into an array of shape (E, S, T) of the settings above left, above right, below left and below
            right, shape (4, E).
        down: How far down between the rows, 0..1, shape (E,).
        across: How far across between the columns, likewise.
    """

    corners: Indices
    down: Floats
    across: Floats

    @classmethod
    def of(cls, grid: Grid, knobs: Floats) -> Place:
        """Find ``knobs``, shape (E, 3), by the logarithms of size and TTL; what is beyond the grid is at its edge."""
        lanes, rows, columns = grid.shape
        # Copies: the logarithm of a strided array may be rounded otherwise than that of a contiguous one.
        top, bottom, down = _between(grid.log_sizes, np.log(np.maximum(knobs[:, 0], 1.0)))
        left, right, across = _between(grid.log_ttls, np.log(knobs[:, 1].copy()))
        base = np.arange(lanes) * (rows * columns)
        top, bottom = base + top * columns, base + bottom * columns
        return cls(np.stack([top + left, top + right, bottom + left, bottom + right]), down, across)

    def read(self, values: Floats) -> Floats:
        """Return a grid's values there, bilinear: shape (E, S, T) in, (E,) out."""
        return self.blend(values.reshape(-1).take(self.corners))

    def blend(self, corners: Floats) -> Floats:
        """Return the bilinear mean of values at the corners, shape (4, E) in, (E,) out."""
        upper = (1.0 - self.across) * corners[0] + self.across * corners[1]
        lower = (1.0 - self.across) * corners[2] + self.across * corners[3]
        mean: Floats = (1.0 - self.down) * upper + self.down * lower
        return mean


def cost_at(values: npt.NDArray[np.float64], curve: GhostCurve, knobs: Knobs) -> float:
    """Return a grid's value at any size and TTL, bilinear in their logarithms, the edge's value beyond the grid.

    Args:
        values: One value for each setting, shape (S, T).
        curve: The curve whose grid it is.
        knobs: Where to read it.
    """
    grid = Grid.of(curve.sizes[None], curve.ttls[None])
    return float(Place.of(grid, to_array([knobs])).read(np.asarray(values, np.float64)[None])[0])


def _between(logs: Floats, at: Floats) -> tuple[Indices, Indices, Floats]:
    """Return the points around ``at``, shape (E,), in ascending ``logs``, shape (E, N), and how far between them it is."""
    last = logs.shape[1] - 1
    inside = np.minimum(np.maximum(at, logs[:, 0]), logs[:, -1])
    before = (logs <= inside[:, None]).sum(axis=1) - 1
    after = np.minimum(before + 1, last)
    lanes = np.arange(len(logs))
    low, high = logs[lanes, before], logs[lanes, after]
    return before, after, np.divide(inside - low, high - low, out=np.zeros(len(logs)), where=high > low)


def _misses(sums: Floats) -> tuple[Mask, MissBatch]:
    """Return what a hit and a miss are like by the sums, shape (sums, E), and where that is known, shape (E,)."""
    priced = (sums[_TOKEN_MISSES] > 0) & (sums[_LATENCY_MISSES] > 0)
    with np.errstate(all="ignore"):
        return priced, MissBatch(
            sums[_INPUT] / sums[_TOKEN_MISSES],
            sums[_OUTPUT] / sums[_TOKEN_MISSES],
            sums[_MISS_SECONDS] / sums[_LATENCY_MISSES],
            # No hit was ever timed: a hit is so much faster than a miss that 0 changes no choice.
            np.where(sums[_LATENCY_HITS] > 0, sums[_HIT_SECONDS] / sums[_LATENCY_HITS], 0.0),
        )


def _cheapest(costs: Floats) -> tuple[Mask, Indices, Indices, Floats]:
    """Find the cheapest setting of each lane, shape (E, S, T) in; see :func:`envs.curve_kernel.cheapest`.

    Returns:
        Whether all of a lane's costs are finite, row, column and cost, each of shape (E,).
    """
    lanes = len(costs)
    finite, row, column = np.empty(lanes, np.bool_), np.empty(lanes, np.intp), np.empty(lanes, np.intp)
    cheapest(costs, finite, row, column)
    return finite, row, column, costs[np.arange(lanes), row, column]


def _settings(grid: Grid, row: Indices, column: Indices) -> Floats:
    lanes = np.arange(len(row))
    return np.stack([grid.sizes[lanes, row], grid.ttls[lanes, column], np.zeros(len(row))], axis=1)


def _knobs(row: Floats) -> Knobs:
    return Knobs(round(float(row[0])), float(row[1]), float(row[2]))
