"""What the tuner sees of one arm in one interval, whichever way it was measured.

The simulator fills :class:`ArmSignals` from its own counters; :mod:`envs.live_signals` fills it from Prometheus or from a direct
scrape of the same endpoints. Policies and guards see only this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from envs.objective import Usage
from serving.ghost import GhostCurve

NAN = math.nan


@dataclass(frozen=True)
class ArmSignals:
    """Signals of one arm over one window. NaN (None for the curve) means missing: never 0 in its place.

    Attributes:
        arm: The arm's name.
        at: End of the window, seconds since the epoch (or the simulator's clock).
        window: Length of the window, seconds.
        requests: Requests in the window.
        qps: Requests per second.
        hit_ratio: Hits (exact and semantic) over cacheable lookups.
        hit_ratio_by_tier: The same by the tier that answered.
        p50: Median latency, seconds.
        p99: 99th percentile of latency, seconds.
        latency_sum: Sum of latencies, seconds.
        hit_latency: Mean latency of hits, seconds.
        miss_latency: Mean latency of misses, seconds.
        resident_bytes: Bytes held against the budget.
        evictions: Entries evicted in the window.
        expirations: Lookups that met an expired entry in the window.
        stale_hits: Expected stale hits in the window.
        input_tokens: Prompt tokens of misses in the window.
        output_tokens: Completion tokens of misses in the window.
        refresh_input_tokens: Prompt tokens of refreshes in the window.
        refresh_output_tokens: Completion tokens of refreshes in the window.
        upstream_running: Requests running at the model (``vllm:num_requests_running``), else in flight from the gateways.
        upstream_waiting: Requests waiting at the model (``vllm:num_requests_waiting``).
        gpu_cache_usage: Share of the model's KV cache in use, 0..1 (``vllm:gpu_cache_usage_perc``).
        entropy: Shannon entropy of the window's key distribution, bits.
        drift: Jensen-Shannon distance to the previous window, 0..1.
        regret: Cost of the applied setting over the best of the grid on the same requests, minus 1.
        ghost: The window's ghost curve.
        age: Age in seconds of the newest sample behind each group of signals, by group name.
    """

    arm: str
    at: float
    window: float
    requests: float = NAN
    qps: float = NAN
    hit_ratio: float = NAN
    hit_ratio_by_tier: Mapping[str, float] = field(default_factory=dict)
    p50: float = NAN
    p99: float = NAN
    latency_sum: float = NAN
    hit_latency: float = NAN
    miss_latency: float = NAN
    resident_bytes: float = NAN
    evictions: float = NAN
    expirations: float = NAN
    stale_hits: float = NAN
    input_tokens: float = NAN
    output_tokens: float = NAN
    refresh_input_tokens: float = NAN
    refresh_output_tokens: float = NAN
    upstream_running: float = NAN
    upstream_waiting: float = NAN
    gpu_cache_usage: float = NAN
    entropy: float = NAN
    drift: float = NAN
    regret: float = NAN
    ghost: GhostCurve | None = None
    age: Mapping[str, float] = field(default_factory=dict)

    def usage(self, budget_bytes: float, change_steps: float = 0.0) -> Usage:
        """Return what the window used, ready to be priced.

        Args:
            budget_bytes: The ``cache_size`` that was in force.
            change_steps: Grid steps by which the knobs were moved at the window's start.
        """
        return Usage(
            requests=self.requests,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            latency_seconds=self.latency_sum,
            p99=self.p99,
            stale_hits=self.stale_hits,
            budget_bytes=budget_bytes,
            duration=self.window,
            refresh_input_tokens=self.refresh_input_tokens,
            refresh_output_tokens=self.refresh_output_tokens,
            change_steps=change_steps,
        )
