"""What a policy sees: the components of the one vector, how each is normalised, and the schema that a policy is bound to.

The vector holds :data:`COMPONENTS` in their order, then one validity bit (0 or 1) for each that is derived from a signal. Where
a signal is missing, not finite or absurd, its component is 0 and its bit is 0. Everything is relative (to the objective, the
budget, the grid, the recent past), so that a policy carries over to another scale of traffic and of memory.
:mod:`envs.observation` builds it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envs.knob_batch import Floats

NORMALISATION_VERSION = 2
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


AHEAD = (1, 6)
"""Windows ahead for which the days before are asked."""

SEASONAL: tuple[tuple[str, str, Kind, float, str], ...] = (
    ("qps", "ratio", "ratio", 4.0, "Requests per second over those now"),
    ("load", "share", "offset", 0.5, "Share of the model's KV cache in use less that now"),
    ("p99", "ratio", "ratio", 4.0, "P99 of latency over that now"),
    ("stale", "share", "offset", 0.2, "Stale answers per request less those now"),
    ("flush", "share", "share", 1.0, "How often the cache lost what it held"),
    ("size", "grid steps", "offset", 6.0, "Size at the window's own optimum less that at the smoothed one now"),
    ("ttl", "grid steps", "offset", 4.0, "TTL at the window's own optimum less that at the smoothed one now"),
)
"""What is remembered by the time of day (:mod:`envs.seasonal`): name, unit, kind, scale and meaning of its component."""

SIZE_NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
"""Steps of the size away from the curve's optimum whose cost is told."""

TTL_NEIGHBOURS = (-2, -1, 1, 2)
"""Steps of the TTL, likewise."""

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
    Component("curve_trend", "ratio", "ratio", 2.0, "Best cost on the last window's own curve over that on the smoothed one."),
    Component("window_requests", "requests", "count", 1e5, "Requests in the window: how much its curve can be trusted."),
    Component("memory_price", "ratio", "ratio", 64.0, "What holding the largest size costs a request over what a miss costs."),
    Component("stale_price", "ratio", "ratio", 64.0, "What a stale answer costs over what a miss costs."),
    Component("latency_share", "share", "share", 1.0, "Share of latency in the window's cost."),
    Component("staleness_share", "share", "share", 1.0, "Share of stale answers in the window's cost."),
    Component("stale_gap", "share", "offset", 0.2, "Stale answers per request less those that the smoothed curve predicts."),
    Component("load_trend", "ratio", "ratio", 4.0, "Requests running and waiting at the model over their moving average."),
    Component("since_flush", "windows", "count", 144.0, "Windows since the cache lost most of what it held.", signal=False),
    Component("hour_sin", "", "offset", 1.0, "Sine of the workload's time of day."),
    Component("hour_cos", "", "offset", 1.0, "Cosine of the workload's time of day."),
    Component("week_sin", "", "offset", 1.0, "Sine of the workload's time of week."),
    Component("week_cos", "", "offset", 1.0, "Cosine of the workload's time of week."),
    *(
        Component(
            f"season_{name}+{ahead}", unit, kind, scale, f"{what}, {ahead} window{'s' * (ahead > 1)} ahead by the days before."
        )
        for ahead in AHEAD
        for name, unit, kind, scale, what in SEASONAL
    ),
    Component("size", "grid, 0..1", "centred", 1.0, "Applied cache_size as a position on the grid.", signal=False),
    Component("ttl", "grid, 0..1", "centred", 1.0, "Applied ttl as a position on the grid.", signal=False),
    Component("warmup", "grid, 0..1", "share", 1.0, "Applied warmup_ratio as a position on the grid.", signal=False),
    Component(
        "age", "windows", "count", 576.0, "Windows since the observations began: young curves know no long reuse.", signal=False
    ),
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

INDEX = {component.name: index for index, component in enumerate(COMPONENTS)}
"""Each component's place in the vector."""

BIT = {name: len(COMPONENTS) + index for index, name in enumerate(VALIDITY)}
"""The place of each component's validity bit."""

FIRST_SIZE, FIRST_TTL = INDEX[f"cost_size{SIZE_NEIGHBOURS[0]:+d}"], INDEX[f"cost_ttl{TTL_NEIGHBOURS[0]:+d}"]
"""Places of the first neighbour's cost in size and in TTL; the others follow it."""

_ANCHORED = [INDEX[f"season_{name}+{ahead}"] for name in ("size", "ttl") for ahead in AHEAD]

FROM_CURVE = np.array(
    [
        *(INDEX[name] for name in ("hit_gap", "stale_gap", "curve_trend", "memory_price", "stale_price")),
        *range(INDEX["anchor_size"], INDEX["predicted_regret"] + 1),
        *_ANCHORED,
    ]
)
"""Places of what is unknown while there is no curve."""

_SIGNAL_ROWS = np.array([index for index, component in enumerate(COMPONENTS) if component.signal])
_ROWS: dict[Kind, npt.NDArray[np.intp]] = {
    kind: np.array([index for index, component in enumerate(COMPONENTS) if component.kind == kind]) for kind in _FORMS
}
_SCALES: dict[Kind, Floats] = {kind: np.array([COMPONENTS[row].scale for row in rows])[:, None] for kind, rows in _ROWS.items()}
_LOGARITHMS = {"ratio": np.log(_SCALES["ratio"]), "count": np.log1p(_SCALES["count"])}

GROUPS: dict[str, tuple[str, ...]] = {
    "curve": tuple(
        name
        for name in INDEX
        if name.startswith(("cost_size", "cost_ttl", "anchor_", "offset_", "last_"))
        or name in ("hit_gap", "stale_gap", "curve_trend", "predicted_regret", "regret")
        or INDEX[name] in _ANCHORED
    ),
    "foresight": tuple(name for name in INDEX if name.startswith(("hour_", "week_", "season_"))),
}
"""Names that stand for several components: all that is read off the ghost curves, all that tells what recurs."""


def mask_of(hidden: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return what to multiply a vector with so that components and their validity bits are hidden: zeros and ones, shape (DIM,).

    Args:
        hidden: Names of components, or of :data:`GROUPS`.

    Raises:
        ValueError: If there is no such component or group.
    """
    mask = np.ones(DIM, np.float32)
    for given in hidden:
        names = GROUPS.get(given, (given,))
        for name in names:
            if name not in INDEX:
                raise ValueError(f"observation: hidden: expected components or one of {', '.join(GROUPS)}, got {given!r}")
            mask[INDEX[name]] = 0.0
            if name in BIT:
                mask[BIT[name]] = 0.0
    return mask


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


def normalise(raw: Floats) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return the vectors, shape (E, DIM), and which components are valid, shape (len(COMPONENTS), E), of raw components."""
    values = np.empty_like(raw)
    valid = np.isfinite(raw)
    for kind, rows in _ROWS.items():
        part = raw[rows]
        if kind == "centred":
            part = 2.0 * part - 1.0
        elif kind == "offset":
            part = part / _SCALES[kind]
        elif kind == "ratio":
            valid[rows] &= part > 0
            part = np.log(part) / _LOGARITHMS[kind]
        elif kind == "count":
            valid[rows] &= part >= 0
            part = np.log1p(part) / _LOGARITHMS[kind]
        low, high, _ = _FORMS[kind]
        values[rows] = np.minimum(np.maximum(part, low), high)
    vectors = np.empty((raw.shape[1], DIM), np.float32)
    vectors[:, : len(COMPONENTS)] = np.where(valid, values, 0.0).T
    vectors[:, len(COMPONENTS) :] = valid[_SIGNAL_ROWS].T
    return vectors, valid
