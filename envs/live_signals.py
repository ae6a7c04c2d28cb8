"""From a signal source to :class:`~envs.signals.ArmSignals`: what one arm of a running gateway did in one window.

A metric that is missing gives NaN (None for the ghost curve), never 0.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from envs.objective import Prices
from envs.signals import NAN, ArmSignals
from envs.smoothing import CurveReading, CurveSmoother, cost_at
from envs.sources import Groups, SignalSource
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace

GRID_TOLERANCE = 1e-3
"""Relative difference up to which a label names a point of the grid: labels are rounded, neighbours differ by far more."""

_HITS = ("hit", "semantic_hit")

_AGES = {
    "requests": "cachepilot_requests_total",
    "latency": "cachepilot_latency_seconds_total",
    "hits": "cachepilot_cacheable_lookups_total",
    "memory": "cachepilot_resident_bytes",
    "tokens": "cachepilot_upstream_tokens_total",
    "ghost": "cachepilot_ghost_requests_total",
}
"""The metric whose newest sample dates each group of signals; all are exported from a gateway's start."""


def read_signals(
    source: SignalSource, arm: str, *, window: float, now: float, knobs: Knobs, space: KnobSpace, prices: Prices
) -> ArmSignals:
    """Return the signals of one arm over the last ``window`` seconds.

    The caller refreshes the source first, once for all arms. Entropy and drift are averages over the replicas that export them,
    weighted by their requests (today one replica follows an arm's whole traffic). ``resident_bytes`` is what counts against the
    budget: the shared Redis tier, of which the memory tiers hold copies, or the memory tiers where there is no Redis. Evictions
    are those of the same tier. Regret is 0 or more: both the applied setting (bilinear between the grid's points) and the best
    one are read from this window's curve.

    Args:
        source: Where the metrics are.
        arm: Name of the arm.
        window: Seconds to look back; see :func:`envs.sources.window_for`.
        now: What :attr:`ArmSignals.at` shall be, seconds since the epoch.
        knobs: The knobs that were applied, for the regret.
        space: The grid of the ghost curve.
        prices: The prices, for the regret.

    Raises:
        SourceUnavailable: If the source cannot be asked.
    """
    reader = _Reader(source, arm, window)
    outcomes = reader.grown("cachepilot_requests_total", "outcome")
    requests = _total(outcomes)
    lookups = _only(reader.grown("cachepilot_cacheable_lookups_total"))
    tiers = reader.grown("cachepilot_hits_total", "tier")
    latency = "cachepilot_request_latency_seconds"
    # Not the histogram's own _sum: depending on the exporter that is made up of the buckets' middles.
    seconds = reader.grown("cachepilot_latency_seconds_total", "outcome")
    tokens = reader.grown("cachepilot_upstream_tokens_total", "cause", "kind")
    held = reader.held_by_tier()
    evicted = reader.grown("cachepilot_evictions_total", "tier")
    budget_tier = "redis" if held.get("redis", 0.0) > 0 else "memory"
    upstream = reader.upstream()
    signals = ArmSignals(
        arm,
        now,
        window,
        requests=requests,
        qps=requests / window,
        hit_ratio=_share(sum(outcomes.get((outcome,), NAN) for outcome in _HITS), lookups),
        hit_ratio_by_tier={tier: _share(hits, lookups) for (tier,), hits in tiers.items()},
        p50=_only(source.quantile(0.5, latency, where={"arm": arm}, window=window)),
        p99=_only(source.quantile(0.99, latency, where={"arm": arm}, window=window)),
        latency_sum=_total(seconds),
        hit_latency=_mean(seconds, outcomes, _HITS),
        miss_latency=_mean(seconds, outcomes, ("miss",)),
        resident_bytes=max(held.values(), default=NAN),
        evictions=evicted.get((budget_tier,), NAN),
        expirations=_only(reader.grown("cachepilot_expirations_total")),
        stale_hits=_only(reader.grown("cachepilot_expected_stale_hits_total")),
        input_tokens=tokens.get(("miss", "input"), NAN),
        output_tokens=tokens.get(("miss", "output"), NAN),
        refresh_input_tokens=tokens.get(("refresh", "input"), NAN),
        refresh_output_tokens=tokens.get(("refresh", "output"), NAN),
        upstream_running=upstream["running"],
        upstream_waiting=upstream["waiting"],
        gpu_cache_usage=upstream["gpu"],
        entropy=reader.over_replicas("cachepilot_window_entropy_bits"),
        drift=reader.over_replicas("cachepilot_window_drift"),
        ghost=reader.ghost(space),
        age={**{group: source.age(metric, where={"arm": arm}) for group, metric in _AGES.items()}, "upstream": upstream["age"]},
    )
    return replace(signals, regret=regret(signals, knobs, prices))


def regret(signals: ArmSignals, knobs: Knobs, prices: Prices) -> float:
    """Return the cost of ``knobs`` over the best cost of the grid, minus 1, by the window's own curve; NaN without one."""
    reading = window_costs(signals, prices)
    if reading is None or not reading.best_cost > 0:
        return NAN
    return max(0.0, cost_at(reading.costs, reading.curve, knobs) / reading.best_cost - 1.0)


def window_costs(signals: ArmSignals, prices: Prices) -> CurveReading | None:
    """Return what every setting of the grid would have cost in this window alone; None where the curve or a price is missing."""
    smoother = CurveSmoother(prices, 1.0, 0)
    smoother.update(signals)
    return smoother.read()


class _Reader:
    """Asks one source about one arm in one window."""

    def __init__(self, source: SignalSource, arm: str, window: float) -> None:
        self._source = source
        self._arm = {"arm": arm}
        self._window = window

    def grown(self, metric: str, *by: str) -> Groups:
        return self._source.increase(metric, by=by, where=self._arm, window=self._window)

    def held_by_tier(self) -> dict[str, float]:
        metric = "cachepilot_resident_bytes"
        held = {tier: value for (tier,), value in self._source.latest(metric, by=("tier",), where=self._arm).items()}
        shared = self._source.latest(metric, where={**self._arm, "tier": "redis"}, aggregate="max")
        return {**held, **({"redis": shared[()]} if shared else {})}

    def over_replicas(self, metric: str) -> float:
        """Return the average over replicas, weighted by requests, plain where they are not known."""
        values = self._source.latest(metric, by=("replica",), where=self._arm, aggregate="avg")
        weights = self._source.increase("cachepilot_requests_total", by=("replica",), where=self._arm, window=self._window)
        pairs = [(value, weights.get(replica, 0.0)) for replica, value in values.items()]
        total = sum(weight for _, weight in pairs)
        if total > 0:
            return sum(value * weight for value, weight in pairs) / total
        return sum(value for value, _ in pairs) / len(pairs) if pairs else NAN

    def upstream(self) -> dict[str, float]:
        """Return the model's load by its own metrics, else what the gateways have in flight; and the age of what was used."""
        running = _only(self._source.latest("vllm:num_requests_running"))
        found = {
            "running": running,
            "waiting": _only(self._source.latest("vllm:num_requests_waiting")),
            "gpu": _only(self._source.latest("vllm:gpu_cache_usage_perc", aggregate="avg")),
        }
        if math.isnan(found["gpu"]):  # renamed in vLLM's V1 engine
            found["gpu"] = _only(self._source.latest("vllm:kv_cache_usage_perc", aggregate="avg"))
        used = "vllm:num_requests_running"
        if math.isnan(running):
            used = "cachepilot_upstream_inflight"
            found["running"] = _only(self._source.latest(used))
        return {**found, "age": self._source.age(used)}

    def ghost(self, space: KnobSpace) -> GhostCurve | None:
        """Return the curve; None if a point of the grid is missing."""
        requests = _only(self.grown("cachepilot_ghost_requests_total"))
        hits = _on_grid(self.grown("cachepilot_ghost_hits_total", "size", "ttl"), space)
        stale = _on_grid(self.grown("cachepilot_ghost_stale_hits_total", "size", "ttl"), space)
        if math.isnan(requests) or hits is None or stale is None:
            return None
        return GhostCurve(space.sizes, space.ttls, hits, stale, requests)


def _on_grid(cells: Groups, space: KnobSpace) -> npt.NDArray[np.float64] | None:
    """Put values by (size, ttl) label onto the grid, shape (sizes, ttls); None unless every point has exactly one."""
    grid = np.full((len(space.sizes), len(space.ttls)), NAN)
    for (size, ttl), value in cells.items():
        row, column = _place(size, space.sizes.astype(np.float64)), _place(ttl, space.ttls)
        if row is None or column is None:  # a point of another grid: the gateway was set up with other bounds
            continue
        if not math.isnan(grid[row, column]):
            return None
        grid[row, column] = value
    return None if np.isnan(grid).any() else grid


def _place(label: str, points: npt.NDArray[np.float64]) -> int | None:
    try:
        value = float(label)
    except ValueError:
        return None
    index = int(np.argmin(np.abs(points - value)))
    return index if abs(points[index] - value) <= GRID_TOLERANCE * points[index] else None


def _only(groups: Groups) -> float:
    return groups.get((), NAN)


def _total(groups: Groups) -> float:
    return math.fsum(groups.values()) if groups else NAN


def _share(part: float, whole: float) -> float:
    # The two counters are extrapolated each by itself, which can carry a part a little over the whole.
    return min(part / whole, 1.0) if whole > 0 and not math.isnan(part) else NAN


def _mean(seconds: Groups, counts: Groups, outcomes: tuple[str, ...]) -> float:
    count = math.fsum(counts.get((outcome,), 0.0) for outcome in outcomes)
    total = math.fsum(seconds.get((outcome,), 0.0) for outcome in outcomes)
    return total / count if count > 0 else NAN
