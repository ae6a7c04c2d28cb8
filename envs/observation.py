"""From signals to what a policy sees: one fixed, documented vector (:mod:`envs.observation_vector`), built window by window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from envs.knob_batch import Floats, SpaceBatch, distance, put_lanes, to_array, to_knobs
from envs.objective import Cost, CostBatch, PriceBatch, Prices, price_batch
from envs.observation_vector import (
    AHEAD,
    BIT,
    COMPONENTS,
    FIRST_SIZE,
    FIRST_TTL,
    FROM_CURVE,
    INDEX,
    SEASONAL,
    SIZE_NEIGHBOURS,
    TTL_NEIGHBOURS,
    normalise,
)
from envs.seasonal import DAY, SeasonalMemory
from envs.signal_batch import ABSURD, SignalBatch
from envs.signals import NAN, ArmSignals
from envs.smoothing import SMOOTHING, CurveReadings, CurveSmootherBatch, Indices, Place
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace


@dataclass(frozen=True)
class Observation:
    """What a policy decides from.

    Attributes:
        vector: Normalised components, then validity bits, float32, shape (DIM,), finite, within :data:`LOW` and :data:`HIGH`.
        knobs: The knobs that are applied now.
        space: The knob space.
        signals: The window's signals as measured (may hold NaN).
        curve: The smoothed ghost curve, or None before the first trustworthy one and when none came for a while.
        anchor: Optimum of the smoothed curve under the prices, ``warmup_ratio`` 0; None without a curve. Residual policies act
            around it.
        last_anchor: Optimum of the last window's own curve; None if it had none.
        anchor_cost: Predicted cost at the anchor, US dollars per 1,000 requests; NaN without a curve.
        current_cost: Predicted cost at the current size and TTL on the smoothed curve, likewise.
        cost: The last window's measured cost, US dollars per 1,000 requests by term; NaN where it could not be priced.
        raw: Components before normalisation, by name; NaN where invalid.
        prices: What the curve is read under.
    """

    vector: npt.NDArray[np.float32]
    knobs: Knobs
    space: KnobSpace
    signals: ArmSignals
    curve: GhostCurve | None
    anchor: Knobs | None
    anchor_cost: float
    last_anchor: Knobs | None = None
    current_cost: float = NAN
    cost: Cost = field(default_factory=lambda: Cost(*([NAN] * 7)))
    raw: Mapping[str, float] = field(default_factory=dict)
    prices: Prices = field(default_factory=Prices)

    def valid(self, name: str) -> bool:
        """Whether a component's signal was there.

        Raises:
            KeyError: If there is no such component.
        """
        return COMPONENTS[INDEX[name]].name not in BIT or bool(self.vector[BIT[name]] > 0.5)


@dataclass(frozen=True)
class Observations:
    """The observations of E lanes: :class:`Observation`, as arrays.

    Attributes:
        vectors: Normalised components, then validity bits, float32, shape (E, DIM), finite, within :data:`LOW` and :data:`HIGH`.
        knobs: The knobs that are applied now, shape (E, 3).
        spaces: The knob spaces.
        signals: The windows' signals.
        readings: The smoothed curves; hold for as long as the builder takes no further window.
        has_anchor: Whether each lane has a trustworthy curve, shape (E,).
        anchors: Optimum of each smoothed curve, ``warmup_ratio`` 0, shape (E, 3); means nothing without a curve.
        current_cost: Predicted cost at the current size and TTL, US dollars per 1,000 requests, shape (E,); likewise.
        cost: The last window's measured cost.
        raw: Components before normalisation, shape (len(COMPONENTS), E).
    """

    vectors: npt.NDArray[np.float32]
    knobs: Floats
    spaces: SpaceBatch
    signals: SignalBatch
    readings: CurveReadings
    has_anchor: npt.NDArray[np.bool_]
    anchors: Floats
    current_cost: Floats
    cost: CostBatch
    raw: Floats

    def lane(self, lane: int, space: KnobSpace, prices: Prices, signals: ArmSignals, knobs: Knobs | None = None) -> Observation:
        """Return one lane's observation, copied.

        Args:
            lane: Which.
            space: Its knob space.
            prices: Its prices.
            signals: Its signals.
            knobs: Its knobs, where they are at hand; else they are read from the arrays.
        """
        known, last = bool(self.has_anchor[lane]), bool(self.readings.last_valid[lane])
        vector = self.vectors[lane].copy()
        raw = dict(zip(INDEX, self.raw[:, lane].tolist(), strict=True))
        return Observation(
            vector=vector,
            knobs=knobs or to_knobs(self.knobs[lane]),
            space=space,
            signals=signals,
            curve=self.readings.curve(lane) if known else None,
            anchor=to_knobs(self.anchors[lane]) if known else None,
            last_anchor=space.clip(to_knobs(self.readings.last[lane])) if known and last else None,
            anchor_cost=float(self.readings.best_cost[lane]) if known else NAN,
            current_cost=float(self.current_cost[lane]) if known else NAN,
            cost=self.cost.lane(lane),
            raw=raw,
            prices=prices,
        )


class ObservationBatch:
    """Builds the observations of E arms, window by window; lanes do not depend on each other, to the last bit.

    Args:
        spaces: The knob spaces.
        prices: The prices under which the curves are read.
        smoothing: Weight of the newest window in the moving averages, 0..1 (1: no smoothing).
        patience: Windows without a usable curve after which the smoothed one is no longer trusted.
        clock_origin: Clock time at which each workload's own day starts, seconds, shape (E,); matters where time is compressed.

    Raises:
        ValueError: If ``smoothing`` is not in (0, 1] or ``patience`` is negative.
    """

    def __init__(
        self,
        spaces: SpaceBatch,
        prices: PriceBatch,
        smoothing: float = SMOOTHING,
        *,
        patience: int = 5,
        clock_origin: Floats | None = None,
    ) -> None:
        if not 0.0 < smoothing <= 1.0:
            raise ValueError(f"observation: smoothing: expected a weight in (0, 1], got {smoothing!r}")
        if patience < 0:
            raise ValueError(f"observation: patience: expected a number of windows >= 0, got {patience!r}")
        self._spaces = spaces
        self._prices = prices
        self._smoothing = smoothing
        self._clock_origin = np.zeros(len(spaces)) if clock_origin is None else clock_origin
        self._curves = CurveSmootherBatch(prices, spaces.grid(), smoothing, patience)
        self._averages = np.full((3, len(spaces)), NAN)  # of requests per second, of cost, of load
        self._steps = np.full((len(spaces), 3), NAN)
        self._since_change = np.zeros(len(spaces))
        self._since_flush = np.zeros(len(spaces))
        self._age = np.zeros(len(spaces))
        self._held = np.full(len(spaces), NAN)  # bytes, at the end of the window before
        self._season = SeasonalMemory(len(spaces), len(SEASONAL))

    @property
    def curves(self) -> CurveSmootherBatch:
        """The smoothed curves."""
        return self._curves

    def put(self, lanes: Indices, other: ObservationBatch) -> None:
        """Continue in ``lanes`` from the state of ``other``'s lanes.

        Raises:
            ValueError: If the grids of ``other`` have another shape.
        """
        self._spaces = self._spaces.put(lanes, other._spaces)
        self._prices = put_lanes(self._prices, lanes, other._prices)
        self._curves.put(lanes, other._curves)
        self._averages[:, lanes] = other._averages
        self._season.put(lanes, other._season)
        for name in ("_clock_origin", "_steps", "_since_change", "_since_flush", "_age", "_held"):
            getattr(self, name)[lanes] = getattr(other, name)

    def build(self, signals: SignalBatch, knobs: Floats, place: Place | None = None) -> Observations:
        """Return the observations after one more window.

        Args:
            signals: The windows' signals.
            knobs: The knobs that were applied during the window and are applied now, shape (E, 3).
            place: Where on the signals' grids the knobs are, if it is known already.
        """
        with np.errstate(all="ignore"):
            return self._build(signals, knobs, place or Place.of(signals.grid, knobs))

    def _build(self, signals: SignalBatch, knobs: Floats, place: Place) -> Observations:
        steps = self._spaces.to_steps(knobs)
        first = np.isnan(self._steps[:, 0])
        moved = np.where(first, 0.0, distance(steps, self._steps))
        self._since_change = np.where(moved == 0.0, self._since_change + 1.0, 0.0)
        self._steps = steps
        cost = price_batch(signals.usage(knobs[:, 0], moved), self._prices)
        readings = self._curves.update(signals)

        raw = np.full((len(COMPONENTS), len(knobs)), NAN)
        now = self._own_time(signals)
        flushed = self._flushes(signals, knobs)
        self._from_signals(raw, signals, knobs, cost, now)
        current_cost = self._from_curves(raw, signals, readings, place, steps)
        self._from_days_before(raw, signals, readings, now, flushed)
        if not readings.valid.all():
            raw[np.ix_(FROM_CURVE, ~readings.valid)] = NAN
        raw[[INDEX["size"], INDEX["ttl"], INDEX["warmup"]]] = (steps / self._spaces.scale).T
        raw[INDEX["since_change"]] = self._since_change
        raw[INDEX["since_flush"]] = self._since_flush
        self._age = self._age + 1.0
        raw[INDEX["age"]] = self._age
        vectors, valid = normalise(raw)
        return Observations(
            vectors=vectors,
            knobs=knobs,
            spaces=self._spaces,
            signals=signals,
            readings=readings,
            has_anchor=readings.valid,
            anchors=self._spaces.clip(readings.best),
            current_cost=current_cost,
            cost=cost,
            raw=np.where(valid, raw, NAN),
        )

    def _from_signals(self, raw: Floats, signals: SignalBatch, knobs: Floats, cost: CostBatch, now: Floats) -> None:
        clean = signals.clean
        requests, ratio = clean["requests"], clean["hit_ratio"]
        tokens = clean["input_tokens"] + clean["output_tokens"]
        refresh = clean["refresh_input_tokens"] + clean["refresh_output_tokens"]
        hour = 2.0 * math.pi * np.fmod(now, DAY) / DAY
        week = 2.0 * math.pi * np.fmod(now, 7.0 * DAY) / (7.0 * DAY)
        load = clean["upstream_running"] + np.where(np.isfinite(clean["upstream_waiting"]), clean["upstream_waiting"], 0.0)
        trends = self._trends(np.stack([clean["qps"], cost.total, load]))
        for name, values in (
            ("qps", clean["qps"]),
            ("qps_trend", trends[0]),
            ("hit_ratio", ratio),
            ("p99", _over(clean["p99"], self._prices.slo_p99)),
            ("fill", _over(clean["resident_bytes"], knobs[:, 0])),
            ("evictions", _over(clean["evictions"], requests)),
            ("expirations", _over(clean["expirations"], requests)),
            ("stale", _over(clean["stale_hits"], requests * ratio)),
            ("refresh", _over(refresh, refresh + tokens)),
            ("upstream_running", clean["upstream_running"]),
            ("upstream_waiting", clean["upstream_waiting"]),
            ("gpu_cache", clean["gpu_cache_usage"]),
            ("entropy", clean["entropy"] / 16.0),
            ("drift", clean["drift"]),
            ("regret", 10.0 * clean["regret"]),
            ("cost_trend", trends[1]),
            ("memory_share", _over(cost.memory, cost.total)),
            ("slo_share", _over(cost.slo, cost.total)),
            ("latency_share", _over(cost.latency, cost.total)),
            ("staleness_share", _over(cost.staleness, cost.total)),
            ("window_requests", requests),
            ("load_trend", trends[2]),
            ("hour_sin", np.sin(hour)),
            ("hour_cos", np.cos(hour)),
            ("week_sin", np.sin(week)),
            ("week_cos", np.cos(week)),
        ):
            raw[INDEX[name]] = values

    def _from_curves(self, raw: Floats, signals: SignalBatch, readings: CurveReadings, place: Place, steps: Floats) -> Floats:
        """Fill in what the curves say; return the predicted cost at the current size and TTL, shape (E,)."""
        costs, best = readings.costs, readings.best_cost
        hits = readings.hits.reshape(-1).take(place.corners) / readings.requests
        predicted = place.blend(np.minimum(np.maximum(hits, 0.0), 1.0))
        stale = place.blend(readings.stale_hits.reshape(-1).take(place.corners) / readings.requests)
        current_cost = place.read(costs)
        anchor, last = self._spaces.to_steps(readings.best), self._spaces.to_steps(readings.last)
        offset, jump = (steps - anchor).T, (last - anchor).T
        position = (anchor / self._spaces.scale).T
        for name, values in (
            ("hit_gap", signals.clean["hit_ratio"] - predicted),
            ("anchor_size", position[0]),
            ("anchor_ttl", position[1]),
            ("offset_size", offset[0]),
            ("offset_ttl", offset[1]),
            ("predicted_regret", _extra(current_cost, best)),
            ("stale_gap", _over(signals.clean["stale_hits"], signals.clean["requests"]) - stale),
            ("curve_trend", np.where(readings.last_valid, _over(readings.last_best_cost, best), NAN)),
            ("memory_price", _over(self._spaces.high[:, 0] * readings.byte_cost, readings.miss_cost)),
            ("stale_price", _over(self._prices.stale_answer, readings.miss_cost)),
        ):
            raw[INDEX[name]] = values
        by_size = _neighbours(costs, readings.row, readings.column, SIZE_NEIGHBOURS, axis=1)
        by_ttl = _neighbours(costs, readings.row, readings.column, TTL_NEIGHBOURS, axis=2)
        raw[FIRST_SIZE : FIRST_SIZE + len(SIZE_NEIGHBOURS)] = _extra(by_size, best)
        raw[FIRST_TTL : FIRST_TTL + len(TTL_NEIGHBOURS)] = _extra(by_ttl, best)
        raw[INDEX["last_size"]] = np.where(readings.last_valid, jump[0], NAN)
        raw[INDEX["last_ttl"]] = np.where(readings.last_valid, jump[1], NAN)
        return current_cost

    def _own_time(self, signals: SignalBatch) -> Floats:
        """Return the workload's own time at the windows' end, seconds, shape (E,)."""
        at = np.where(np.abs(signals["at"]) < ABSURD, signals["at"], NAN)
        return (at - self._clock_origin) * self._prices.time_scale

    def _flushes(self, signals: SignalBatch, knobs: Floats) -> Floats:
        """Tell where the cache lost more than half of what it held and may still hold: 1, else 0; NaN unknown; shape (E,)."""
        held = signals.clean["resident_bytes"]
        before = np.minimum(self._held, knobs[:, 0])
        flushed = np.where(np.isfinite(held) & np.isfinite(before), (held < 0.5 * before).astype(np.float64), NAN)
        self._since_flush = np.where(flushed == 1.0, 0.0, self._since_flush + 1.0)
        self._held = np.where(np.isfinite(held), held, self._held)
        return flushed

    def _from_days_before(self, raw: Floats, signals: SignalBatch, readings: CurveReadings, now: Floats, flushed: Floats) -> None:
        """Fill in what the days before were like at the times to come, and remember this window."""
        clean = signals.clean
        last = self._spaces.to_steps(readings.last)
        seen = np.stack(
            [
                np.log(np.where(clean["qps"] > 0, clean["qps"], NAN)),
                clean["gpu_cache_usage"],
                np.log(np.where(clean["p99"] > 0, clean["p99"], NAN)),
                _over(clean["stale_hits"], clean["requests"]),
                flushed,
                np.where(readings.last_valid, last[:, 0], NAN),
                np.where(readings.last_valid, last[:, 1], NAN),
            ]
        )
        anchor = self._spaces.to_steps(readings.best)
        length = np.where(signals["window"] < ABSURD, signals["window"], NAN) * self._prices.time_scale
        for ahead in AHEAD:
            usual = self._season.at(now + (ahead - 1) * length, length)
            for row, (name, values) in enumerate(
                (
                    ("qps", np.exp(usual[0] - seen[0])),
                    ("load", usual[1] - seen[1]),
                    ("p99", np.exp(usual[2] - seen[2])),
                    ("stale", usual[3] - seen[3]),
                    ("flush", usual[4]),
                    ("size", usual[5] - anchor[:, 0]),
                    ("ttl", usual[6] - anchor[:, 1]),
                )
            ):
                assert name == SEASONAL[row][0]
                raw[INDEX[f"season_{name}+{ahead}"]] = values
        self._season.update(now, length, seen)

    def _trends(self, values: Floats) -> Floats:
        """Return values over their moving averages so far (1 at first), then take them in; NaN for what is missing."""
        good = (values > 0.0) & (values < ABSURD)
        before = np.where(np.isnan(self._averages), values, self._averages)
        self._averages = np.where(good, before + self._smoothing * (values - before), self._averages)
        return np.where(good, values / before, NAN)


class ObservationBuilder:
    """Builds the observations of one arm, window by window: :class:`ObservationBatch` of one lane, as the tuner uses it.

    Args:
        space: The knob space.
        prices: The prices under which the curve is read.
        smoothing: Weight of the newest window in the moving averages, 0..1 (1: no smoothing).
        patience: Windows without a usable curve after which the smoothed one is no longer trusted.
        clock_origin: Clock time at which the workload's own day starts, seconds; matters where time is compressed.

    Raises:
        ValueError: If ``smoothing`` is not in (0, 1] or ``patience`` is negative.
    """

    def __init__(
        self,
        space: KnobSpace,
        prices: Prices,
        smoothing: float = SMOOTHING,
        *,
        patience: int = 5,
        clock_origin: float = 0.0,
    ) -> None:
        self.space = space
        self.prices = prices
        self.smoothing = smoothing
        self.patience = patience
        self.clock_origin = clock_origin
        self.reset()

    def reset(self) -> None:
        """Forget every earlier window."""
        self._batch = ObservationBatch(
            SpaceBatch.of([self.space]),
            PriceBatch.of([self.prices]),
            self.smoothing,
            patience=self.patience,
            clock_origin=np.array([self.clock_origin], np.float64),
        )

    def build(self, signals: ArmSignals, knobs: Knobs) -> Observation:
        """Return the observation after one more window.

        Args:
            signals: The window's signals.
            knobs: The knobs that were applied during the window and are applied now.
        """
        window = SignalBatch.alone(signals, self._batch.curves.grid)
        return self._batch.build(window, to_array([knobs])).lane(0, self.space, self.prices, signals, knobs)


def _over(values: Floats, totals: Floats) -> Floats:
    """Return values over totals; not finite (which is invalid) where a total is not positive."""
    return np.where(totals > 0, values / totals, NAN)


def _extra(costs: Floats, best: Floats) -> Floats:
    """Return ten times what costs exceed the best by, as a share of it."""
    return 10.0 * np.maximum(_over(costs, best) - 1.0, 0.0)


def _neighbours(costs: Floats, row: Indices, column: Indices, offsets: tuple[int, ...], axis: int) -> Floats:
    """Return the costs ``offsets`` grid steps from a setting along an axis of (E, S, T), shape (offsets, E); beyond it NaN."""
    lanes = np.arange(len(costs))
    at = (row if axis == 1 else column) + np.array(offsets)[:, None]
    inside = (at >= 0) & (at < costs.shape[axis])
    at = np.where(inside, at, 0)
    return np.where(inside, costs[lanes, at, column] if axis == 1 else costs[lanes, row, at], NAN)
