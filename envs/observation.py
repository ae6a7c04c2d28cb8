"""From signals to what a policy sees: one fixed, documented vector, finite always, with a validity bit for what is missing.

The vector holds :data:`COMPONENTS` in their order, then one validity bit (0 or 1) for each that is derived from a signal. Where
a signal is missing, not finite or absurd, its component is 0 and its bit is 0. Everything is relative (to the objective, the
budget, the grid, the recent past), so that a policy carries over to another scale of traffic and of memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envs.objective import Cost, Prices, price
from envs.signals import NAN, ArmSignals
from envs.smoothing import CurveSmoother, cost_at
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace

NORMALISATION_VERSION = 1
"""Grows whenever a normalisation changes its meaning; part of the schema hash of every trained policy."""

Kind = Literal["share", "centred", "ratio", "count", "offset"]

_FORMS: dict[Kind, tuple[float, float, str]] = {
    "share": (0.0, 1.0, "clip(x, 0, 1)"),
    "centred": (-1.0, 1.0, "clip(2x - 1, -1, 1)"),
    "ratio": (-1.0, 1.0, "clip(ln(x) / ln({scale:g}), -1, 1)"),
    "count": (0.0, 1.0, "clip(ln(1 + x) / ln(1 + {scale:g}), 0, 1)"),
    "offset": (-1.0, 1.0, "clip(x / {scale:g}, -1, 1)"),
}


@dataclass(frozen=True, slots=True)
class Component:
    """One component of the observation.

    Attributes:
        name: Its name, unique.
        unit: Unit of the raw value ``x`` before normalisation.
        kind: How ``x`` is normalised; see :attr:`normalisation`.
        scale: The scale of that normalisation.
        help: What ``x`` is.
        signal: Whether it is derived from signals, and so has a validity bit.
    """

    name: str
    unit: str
    kind: Kind
    scale: float
    help: str
    signal: bool = True

    @property
    def low(self) -> float:
        """Least value after normalisation."""
        return _FORMS[self.kind][0] if not self.signal else min(0.0, _FORMS[self.kind][0])

    @property
    def high(self) -> float:
        """Greatest value after normalisation."""
        return _FORMS[self.kind][1]

    @property
    def normalisation(self) -> str:
        """The formula, in words for docs and for the schema."""
        return _FORMS[self.kind][2].format(scale=self.scale)

    def normalise(self, value: float) -> float | None:
        """Return the normalised value, or None where ``value`` is missing, not finite or outside the formula's domain."""
        if not math.isfinite(value):
            return None
        if self.kind == "share":
            result = value
        elif self.kind == "centred":
            result = 2.0 * value - 1.0
        elif self.kind == "offset":
            result = value / self.scale
        elif self.kind == "ratio":
            if value <= 0:
                return None
            result = math.log(value) / math.log(self.scale)
        else:
            if value < 0:
                return None
            result = math.log1p(value) / math.log1p(self.scale)
        low, high, _ = _FORMS[self.kind]
        return min(max(result, low), high)


SIZE_NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
TTL_NEIGHBOURS = (-2, -1, 1, 2)

COMPONENTS: tuple[Component, ...] = (
    Component("qps", "1/s", "count", 1e4, "Requests per second."),
    Component("qps_trend", "ratio", "ratio", 4.0, "Requests per second over their moving average."),
    Component("hit_ratio", "share", "centred", 1.0, "Hits over cacheable lookups."),
    Component("hit_gap", "share", "offset", 0.5, "Hit ratio measured less the one the smoothed curve predicts for the knobs."),
    Component("p99", "ratio", "ratio", 4.0, "P99 of latency over its objective."),
    Component("fill", "share", "centred", 1.0, "Resident bytes over the budget."),
    Component("evictions", "per request", "share", 1.0, "Evictions per request."),
    Component("expirations", "per request", "share", 1.0, "Lookups per request that met an expired entry."),
    Component("stale", "share", "share", 1.0, "Expected stale hits over hits."),
    Component("refresh", "share", "share", 1.0, "Refresh tokens over all upstream tokens."),
    Component("upstream_running", "requests", "count", 256.0, "Requests running at the model."),
    Component("upstream_waiting", "requests", "count", 256.0, "Requests waiting at the model."),
    Component("gpu_cache", "share", "share", 1.0, "Share of the model's KV cache in use."),
    Component("entropy", "bits/16", "share", 1.0, "Entropy of the window's keys over 16 bits."),
    Component("drift", "distance", "share", 1.0, "Jensen-Shannon distance between this window's keys and the last one's."),
    Component("regret", "share", "count", 10.0, "Ten times the measured regret of the knobs on the last window."),
    Component("cost_trend", "ratio", "ratio", 2.0, "Cost of the window over its moving average."),
    Component("memory_share", "share", "share", 1.0, "Memory's share of the window's cost."),
    Component("slo_share", "share", "share", 1.0, "Share of the P99 hinge in the window's cost."),
    Component("anchor_size", "grid, 0..1", "centred", 1.0, "Size at the smoothed curve's optimum, as a position on the grid."),
    Component("anchor_ttl", "grid, 0..1", "centred", 1.0, "TTL at the smoothed curve's optimum, as a position on the grid."),
    Component("offset_size", "grid steps", "offset", 6.0, "Size now less size at the optimum."),
    Component("offset_ttl", "grid steps", "offset", 4.0, "TTL now less TTL at the optimum."),
    *(
        Component(f"cost_size{step:+d}", "share", "count", 10.0, f"Ten times the extra cost {step:+d} sizes from the optimum.")
        for step in SIZE_NEIGHBOURS
    ),
    *(
        Component(f"cost_ttl{step:+d}", "share", "count", 10.0, f"Ten times the extra cost {step:+d} TTLs from the optimum.")
        for step in TTL_NEIGHBOURS
    ),
    Component("predicted_regret", "share", "count", 10.0, "Ten times the extra cost of the knobs on the smoothed curve."),
    Component("last_size", "grid steps", "offset", 6.0, "Size at the last window's own optimum less that at the smoothed one's."),
    Component("last_ttl", "grid steps", "offset", 4.0, "TTL at the last window's own optimum less that at the smoothed one's."),
    Component("hour_sin", "", "offset", 1.0, "Sine of the workload's time of day."),
    Component("hour_cos", "", "offset", 1.0, "Cosine of the workload's time of day."),
    Component("size", "grid, 0..1", "centred", 1.0, "Applied cache_size as a position on the grid.", signal=False),
    Component("ttl", "grid, 0..1", "centred", 1.0, "Applied ttl as a position on the grid.", signal=False),
    Component("warmup", "grid, 0..1", "share", 1.0, "Applied warmup_ratio as a position on the grid.", signal=False),
    Component("since_change", "windows", "count", 32.0, "Windows since the knobs last changed.", signal=False),
)
"""The components, in the order of the vector."""

VALIDITY: tuple[str, ...] = tuple(component.name for component in COMPONENTS if component.signal)
"""Names of the components that have a validity bit, in the order of the bits."""

DIM = len(COMPONENTS) + len(VALIDITY)
"""Length of the vector."""

LOW: npt.NDArray[np.float32] = np.array([c.low for c in COMPONENTS] + [0.0] * len(VALIDITY), np.float32)
"""Least value of each component, shape (DIM,)."""
HIGH: npt.NDArray[np.float32] = np.array([c.high for c in COMPONENTS] + [1.0] * len(VALIDITY), np.float32)
"""Greatest value of each component, shape (DIM,)."""

_INDEX = {component.name: index for index, component in enumerate(COMPONENTS)}
_BIT = {name: len(COMPONENTS) + index for index, name in enumerate(VALIDITY)}
_ABSURD = 1e15
"""Signals beyond this are taken for broken: they would overwhelm every moving average for hours."""


def schema() -> dict[str, Any]:
    """Return what a trained policy depends on: version, and each component's name, normalisation and validity bit."""
    return {
        "version": NORMALISATION_VERSION,
        "components": [
            {"name": c.name, "unit": c.unit, "normalisation": c.normalisation, "validity_bit": c.signal} for c in COMPONENTS
        ],
    }


def schema_hash(value: Mapping[str, Any] | None = None) -> str:
    """Return the SHA-256 of a schema (this version's by default), 64 hex digits."""
    text = json.dumps(schema() if value is None else value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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

    def valid(self, name: str) -> bool:
        """Whether a component's signal was there.

        Raises:
            KeyError: If there is no such component.
        """
        return COMPONENTS[_INDEX[name]].name not in _BIT or bool(self.vector[_BIT[name]] > 0.5)


class ObservationBuilder:
    """Builds the observations of one arm, window by window; used unchanged by both environments and by the tuner.

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
        smoothing: float = 0.3,
        *,
        patience: int = 5,
        clock_origin: float = 0.0,
    ) -> None:
        if not 0.0 < smoothing <= 1.0:
            raise ValueError(f"observation: smoothing: expected a weight in (0, 1], got {smoothing!r}")
        if patience < 0:
            raise ValueError(f"observation: patience: expected a number of windows >= 0, got {patience!r}")
        self.space = space
        self.prices = prices
        self.smoothing = smoothing
        self.patience = patience
        self.clock_origin = clock_origin
        self.reset()

    def reset(self) -> None:
        """Forget every earlier window."""
        self._curve = CurveSmoother(self.prices, self.smoothing, self.patience)
        self._qps = _Average(self.smoothing)
        self._cost = _Average(self.smoothing)
        self._knobs: Knobs | None = None
        self._since_change = 0

    def build(self, signals: ArmSignals, knobs: Knobs) -> Observation:
        """Return the observation after one more window.

        Args:
            signals: The window's signals.
            knobs: The knobs that were applied during the window and are applied now.
        """
        steps = self.space.to_steps(knobs)
        moved = 0.0 if self._knobs is None else float(np.linalg.norm(steps - self.space.to_steps(self._knobs)))
        self._since_change = self._since_change + 1 if moved == 0.0 else 0
        self._knobs = knobs
        cost = price(signals.usage(float(knobs.cache_size), moved), self.prices)

        self._curve.update(signals)
        reading = self._curve.read()
        raw = self._from_signals(signals, knobs, cost)
        raw.update(self._from_curve(signals, knobs, steps))
        scale = np.array([self.space.size_steps - 1, self.space.ttl_steps - 1, self.space.warmup_steps - 1], np.float64)
        raw.update(zip(("size", "ttl", "warmup"), (steps / scale).tolist(), strict=True))
        raw["since_change"] = float(self._since_change)

        vector = np.zeros(DIM, np.float32)
        for index, component in enumerate(COMPONENTS):
            value = component.normalise(raw.get(component.name, NAN))
            if value is None:
                raw[component.name] = NAN
                continue
            vector[index] = value
            if component.signal:
                vector[_BIT[component.name]] = 1.0
        return Observation(
            vector=vector,
            knobs=knobs,
            space=self.space,
            signals=signals,
            curve=None if reading is None else reading.curve,
            anchor=None if reading is None else self.space.clip(reading.best),
            last_anchor=None if reading is None or reading.last is None else self.space.clip(reading.last),
            anchor_cost=NAN if reading is None else reading.best_cost,
            current_cost=NAN if reading is None else cost_at(reading.costs, reading.curve, knobs),
            cost=cost,
            raw=raw,
        )

    def _from_signals(self, signals: ArmSignals, knobs: Knobs, cost: Cost) -> dict[str, float]:
        requests = _clean(signals.requests)
        qps = _clean(signals.qps)
        hits = requests * _clean(signals.hit_ratio)
        tokens = _clean(signals.input_tokens) + _clean(signals.output_tokens)
        refresh = _clean(signals.refresh_input_tokens) + _clean(signals.refresh_output_tokens)
        total = cost.total
        at = signals.at if abs(signals.at) < _ABSURD else NAN
        hour = 2.0 * math.pi * math.fmod((at - self.clock_origin) * self.prices.time_scale, 86_400.0) / 86_400.0
        return {
            "qps": qps,
            "qps_trend": self._qps.ratio(qps),
            "hit_ratio": _clean(signals.hit_ratio),
            "p99": _over(_clean(signals.p99), self.prices.slo_p99),
            "fill": _over(_clean(signals.resident_bytes), float(knobs.cache_size)),
            "evictions": _over(_clean(signals.evictions), requests),
            "expirations": _over(_clean(signals.expirations), requests),
            "stale": _over(_clean(signals.stale_hits), hits),
            "refresh": _over(refresh, refresh + tokens),
            "upstream_running": _clean(signals.upstream_running),
            "upstream_waiting": _clean(signals.upstream_waiting),
            "gpu_cache": _clean(signals.gpu_cache_usage),
            "entropy": _clean(signals.entropy) / 16.0,
            "drift": _clean(signals.drift),
            "regret": 10.0 * _clean(signals.regret),
            "cost_trend": self._cost.ratio(total),
            "memory_share": _over(cost.memory, total),
            "slo_share": _over(cost.slo, total),
            "hour_sin": math.sin(hour),
            "hour_cos": math.cos(hour),
        }

    def _from_curve(self, signals: ArmSignals, knobs: Knobs, steps: npt.NDArray[np.float64]) -> dict[str, float]:
        reading = self._curve.read()
        if reading is None:
            return {}
        anchor = self.space.to_steps(reading.best)
        row, column = reading.index
        costs, best = reading.costs, reading.best_cost
        raw = {
            "anchor_size": float(anchor[0]) / (self.space.size_steps - 1),
            "anchor_ttl": float(anchor[1]) / (self.space.ttl_steps - 1),
            "offset_size": float(steps[0] - anchor[0]),
            "offset_ttl": float(steps[1] - anchor[1]),
            "hit_gap": _clean(signals.hit_ratio) - cost_at(reading.curve.hit_ratio, reading.curve, knobs),
            "predicted_regret": 10.0 * max(_over(cost_at(costs, reading.curve, knobs), best) - 1.0, 0.0),
        }
        for step in SIZE_NEIGHBOURS:
            if 0 <= row + step < costs.shape[0]:
                raw[f"cost_size{step:+d}"] = 10.0 * max(_over(float(costs[row + step, column]), best) - 1.0, 0.0)
        for step in TTL_NEIGHBOURS:
            if 0 <= column + step < costs.shape[1]:
                raw[f"cost_ttl{step:+d}"] = 10.0 * max(_over(float(costs[row, column + step]), best) - 1.0, 0.0)
        if reading.last is not None:
            last = self.space.to_steps(reading.last)
            raw["last_size"], raw["last_ttl"] = float(last[0] - anchor[0]), float(last[1] - anchor[1])
        return raw


class _Average:
    """A moving average that starts at the first value it is given."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._value = NAN

    def ratio(self, value: float) -> float:
        """Return ``value`` over the average so far (1 at first), then take ``value`` into it; NaN for a missing one."""
        if not (_sane(value) and value > 0):
            return NAN
        before = value if math.isnan(self._value) else self._value
        self._value = before + self._weight * (value - before)
        return value / before


def _sane(value: float) -> bool:
    return 0.0 <= value < _ABSURD  # False for NaN


def _clean(value: float) -> float:
    return float(value) if _sane(value) else NAN


def _over(value: float, total: float) -> float:
    return value / total if total > 0 and math.isfinite(value / total) else NAN
