"""The objective: money per 1,000 requests. The only place that prices anything.

Every term is reported on its own: upstream tokens of misses and of refreshes, the value of latency, memory, staleness, a hinge on
P99 above its objective, and the cost of change.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost, in US dollars.

    Attributes:
        input_mtok: Per million prompt tokens.
        output_mtok: Per million completion tokens.
        memory_gib_hour: Per GiB-hour of reserved budget.
        latency_second: Value of one second of one user's waiting.
        stale_answer: Penalty of one answer that is no longer true.
        slo_p99: Latency objective on P99, seconds.
        slo_second: Per 1,000 requests and second of P99 above the objective.
        change_step: Per grid step of knob change (as the root of the sum of squares), per 1,000 requests.
        time_scale: Seconds of the workload's own time per second of the clock. A replay of 83 hours in 3 minutes must still pay
            for 83 hours of memory.
    """

    input_mtok: float = 0.50
    output_mtok: float = 1.50
    memory_gib_hour: float = 0.02
    latency_second: float = 0.0002
    stale_answer: float = 0.002
    slo_p99: float = 2.0
    slo_second: float = 0.05
    change_step: float = 0.002
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"prices: {item.name}: expected a finite number >= 0, got {value!r}")
        if self.time_scale == 0:
            raise ValueError("prices: time_scale: expected a number > 0, got 0")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one arm used in one window, measured or predicted.

    Attributes:
        requests: Number of requests (> 0 to be priced).
        input_tokens: Prompt tokens sent upstream by misses.
        output_tokens: Completion tokens received by misses.
        refresh_input_tokens: Prompt tokens of background refreshes.
        refresh_output_tokens: Completion tokens of background refreshes.
        latency_seconds: Sum of all requests' latencies.
        p99: The 99th percentile of latency, seconds; NaN where unknown (then the hinge is 0).
        stale_hits: Expected number of stale answers.
        budget_bytes: Reserved bytes (``cache_size``).
        duration: Length of the window by the clock, seconds.
        change_steps: Grid steps by which the knobs were moved at the window's start.
    """

    requests: float
    input_tokens: float
    output_tokens: float
    latency_seconds: float
    p99: float
    stale_hits: float
    budget_bytes: float
    duration: float
    refresh_input_tokens: float = 0.0
    refresh_output_tokens: float = 0.0
    change_steps: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars per 1,000 requests, term by term."""

    tokens: float
    refresh: float
    latency: float
    memory: float
    staleness: float
    slo: float
    change: float

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return self.tokens + self.refresh + self.latency + self.memory + self.staleness + self.slo + self.change

    def to_dict(self) -> dict[str, float]:
        """Return the terms and ``total``."""
        return {**asdict(self), "total": self.total}


def price(usage: Usage, prices: Prices) -> Cost:
    """Price what was used.

    Returns:
        US dollars per 1,000 requests; all NaN for a window without requests, which has no such price.
    """
    if not usage.requests > 0:
        return Cost(*([math.nan] * 7))
    per_thousand = 1000.0 / usage.requests
    tokens = usage.input_tokens * prices.input_mtok + usage.output_tokens * prices.output_mtok
    refresh = usage.refresh_input_tokens * prices.input_mtok + usage.refresh_output_tokens * prices.output_mtok
    hours = usage.duration * prices.time_scale / 3600.0
    over = usage.p99 - prices.slo_p99
    return Cost(
        tokens=tokens * 1e-6 * per_thousand,
        refresh=refresh * 1e-6 * per_thousand,
        latency=usage.latency_seconds * prices.latency_second * per_thousand,
        memory=usage.budget_bytes / GIB * hours * prices.memory_gib_hour * per_thousand,
        staleness=usage.stale_hits * prices.stale_answer * per_thousand,
        slo=over * prices.slo_second if over > 0 else 0.0,
        change=usage.change_steps * prices.change_step,
    )


def grid_cost(
    hits: npt.NDArray[np.float64],
    stale_hits: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
    *,
    requests: float,
    duration: float,
    input_tokens_per_miss: float,
    output_tokens_per_miss: float,
    miss_latency: float,
    hit_latency: float,
    prices: Prices,
) -> npt.NDArray[np.float64]:
    """Price every setting of a ghost curve on the same requests.

    Warm-up, the hinge on P99 and the cost of change are not in it: the curve does not know them.

    Args:
        hits: Hits that each setting would have had in the window, shape (sizes, ttls).
        stale_hits: Expected stale hits of each setting, same shape.
        sizes: ``cache_size`` of each row, bytes, shape (sizes,).
        requests: Requests in the window, > 0.
        duration: Length of the window, seconds by the clock.
        input_tokens_per_miss: Mean prompt tokens of a miss.
        output_tokens_per_miss: Mean completion tokens of a miss.
        miss_latency: Mean latency of a miss, seconds.
        hit_latency: Mean latency of a hit, seconds.
        prices: The prices.

    Returns:
        US dollars per 1,000 requests, shape (sizes, ttls).
    """
    if not requests > 0:
        raise ValueError(f"grid_cost: requests: expected a number > 0, got {requests!r}")
    ratio = np.clip(hits / requests, 0.0, 1.0)
    per_miss = (
        (input_tokens_per_miss * prices.input_mtok + output_tokens_per_miss * prices.output_mtok) * 1e-6
        + miss_latency * prices.latency_second
    )  # fmt: skip
    per_hit = hit_latency * prices.latency_second
    hours = duration * prices.time_scale / 3600.0
    memory = sizes.astype(np.float64) / GIB * hours * prices.memory_gib_hour / requests
    stale = stale_hits / requests * prices.stale_answer
    cost: npt.NDArray[np.float64] = 1000.0 * ((1.0 - ratio) * per_miss + ratio * per_hit + memory[:, None] + stale)
    return cost
