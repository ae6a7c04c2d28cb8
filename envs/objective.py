"""The objective: money per 1,000 requests. The only place that prices anything.

Every term is reported on its own: upstream tokens of misses and of refreshes, the value of latency, memory, staleness, a hinge on
P99 above its objective, and the cost of change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from envs.curve_kernel import settings_cost
from envs.price_book import default_book

Floats = npt.NDArray[np.float64]

GIB = float(1 << 30)
_BOOK = default_book().values()


MOST = 1e12
"""No price is higher: sums over a trace, and prices that are doubled, have to stay finite."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost, in US dollars. Defaults are those of the price book (``envs/prices.yaml``), with their sources there.

    Attributes:
        input_mtok: Per million prompt tokens.
        output_mtok: Per million completion tokens.
        memory_gib_hour: Per GiB-hour of reserved budget: of the store, and of the share that memory holds once more.
        latency_second: Value of one second of one user's waiting.
        stale_answer: Penalty of one answer that is no longer true.
        slo_p99: Latency objective on P99, seconds.
        slo_second: Per 1,000 requests and second of P99 above the objective.
        change_step: Per grid step of knob change (as the root of the sum of squares), per 1,000 requests.
        time_scale: Seconds of the workload's own time per second of the clock. A replay of 83 hours in 3 minutes must still pay
            for 83 hours of memory.
    """

    input_mtok: float = _BOOK["input_mtok"]
    output_mtok: float = _BOOK["output_mtok"]
    memory_gib_hour: float = _BOOK["memory_gib_hour"]
    latency_second: float = _BOOK["latency_second"]
    stale_answer: float = _BOOK["stale_answer"]
    slo_p99: float = _BOOK["slo_p99"]
    slo_second: float = _BOOK["slo_second"]
    change_step: float = _BOOK["change_step"]
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value <= MOST:
                raise ValueError(f"prices: {item.name}: expected a number from 0 to {MOST:g}, got {value!r}")
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


COST_TERMS: tuple[str, ...] = tuple(item.name for item in fields(Cost))
"""Names of the terms of :class:`Cost`, in the order in which they are summed."""


@dataclass(frozen=True, slots=True)
class PriceBatch:
    """The prices of E lanes: :class:`Prices` with an array of shape (E,) in place of each number."""

    input_mtok: Floats
    output_mtok: Floats
    memory_gib_hour: Floats
    latency_second: Floats
    stale_answer: Floats
    slo_p99: Floats
    slo_second: Floats
    change_step: Floats
    time_scale: Floats

    @classmethod
    def of(cls, prices: Sequence[Prices]) -> PriceBatch:
        """Gather the prices of some lanes, at least one."""
        return cls(**{item.name: np.array([getattr(lane, item.name) for lane in prices]) for item in fields(Prices)})


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """What E lanes used in one window: :class:`Usage` with an array of shape (E,) in place of each number."""

    requests: Floats
    input_tokens: Floats
    output_tokens: Floats
    latency_seconds: Floats
    p99: Floats
    stale_hits: Floats
    budget_bytes: Floats
    duration: Floats
    refresh_input_tokens: Floats
    refresh_output_tokens: Floats
    change_steps: Floats


@dataclass(frozen=True, slots=True)
class CostBatch:
    """US dollars per 1,000 requests of E lanes, term by term: :class:`Cost` with arrays of shape (E,)."""

    tokens: Floats
    refresh: Floats
    latency: Floats
    memory: Floats
    staleness: Floats
    slo: Floats
    change: Floats
    total: Floats

    def lane(self, lane: int) -> Cost:
        """Return one lane's cost."""
        return Cost(*(float(getattr(self, name)[lane]) for name in COST_TERMS))


def price_batch(usage: UsageBatch, prices: PriceBatch) -> CostBatch:
    """Price what each lane used.

    Returns:
        US dollars per 1,000 requests; all NaN for a lane without requests, which has no such price.
    """
    with np.errstate(all="ignore"):
        per_thousand = 1000.0 / np.where(usage.requests > 0, usage.requests, math.nan)
        tokens = usage.input_tokens * prices.input_mtok + usage.output_tokens * prices.output_mtok
        refresh = usage.refresh_input_tokens * prices.input_mtok + usage.refresh_output_tokens * prices.output_mtok
        hours = usage.duration * prices.time_scale / 3600.0
        over = usage.p99 - prices.slo_p99
        # A window without requests has no price: not even that of a change.
        priced = np.where(usage.requests > 0, 0.0, math.nan)
        terms = (
            tokens * 1e-6 * per_thousand,
            refresh * 1e-6 * per_thousand,
            usage.latency_seconds * prices.latency_second * per_thousand,
            usage.budget_bytes / GIB * hours * prices.memory_gib_hour * per_thousand,
            usage.stale_hits * prices.stale_answer * per_thousand,
            np.where(over > 0, over * prices.slo_second, 0.0) + priced,
            usage.change_steps * prices.change_step + priced,
        )
        total = terms[0] + terms[1] + terms[2] + terms[3] + terms[4] + terms[5] + terms[6]
    return CostBatch(*terms, total)


def price(usage: Usage, prices: Prices) -> Cost:
    """Price what was used: :func:`price_batch` of one lane.

    Returns:
        US dollars per 1,000 requests; all NaN for a window without requests, which has no such price.
    """
    alone = UsageBatch(*(np.array([getattr(usage, item.name)], np.float64) for item in fields(UsageBatch)))
    return price_batch(alone, PriceBatch.of([prices])).lane(0)


@dataclass(frozen=True, slots=True)
class MissBatch:
    """What a hit and a miss are like in E lanes; arrays of shape (E,).

    Attributes:
        input_tokens: Mean prompt tokens of a miss.
        output_tokens: Mean completion tokens of a miss.
        miss_latency: Mean latency of a miss, seconds.
        hit_latency: Mean latency of a hit, seconds.
    """

    input_tokens: Floats
    output_tokens: Floats
    miss_latency: Floats
    hit_latency: Floats


def miss_cost_batch(misses: MissBatch, prices: PriceBatch) -> Floats:
    """Return what one miss costs in tokens and in waiting, US dollars, shape (E,)."""
    tokens = misses.input_tokens * prices.input_mtok + misses.output_tokens * prices.output_mtok
    return tokens * 1e-6 + misses.miss_latency * prices.latency_second


def byte_cost_batch(requests: Floats, duration: Floats, prices: PriceBatch) -> Floats:
    """Return what a reserved byte costs, US dollars for each request, shape (E,).

    Args:
        requests: Requests in the window, shape (E,).
        duration: Its length, seconds by the clock, shape (E,).
        prices: The prices.
    """
    hours = duration * prices.time_scale / 3600.0
    return hours * prices.memory_gib_hour / requests / GIB


def grid_cost_batch(
    hits: Floats,
    stale_hits: Floats,
    sizes: Floats,
    *,
    requests: Floats,
    duration: Floats,
    misses: MissBatch,
    prices: PriceBatch,
) -> Floats:
    """Price every setting of the ghost curves of E lanes, each on its own requests.

    Warm-up, the hinge on P99 and the cost of change are not in it: the curve does not know them.

    Args:
        hits: Hits that each setting would have had in the window, shape (E, S, T).
        stale_hits: Expected stale hits of each setting, same shape.
        sizes: ``cache_size`` of each row, bytes, shape (E, S).
        requests: Requests in the window, shape (E,); where not > 0 the lane's costs mean nothing.
        duration: Length of the window, seconds by the clock, shape (E,).
        misses: What a hit and a miss are like.
        prices: The prices.

    Returns:
        US dollars per 1,000 requests, shape (E, S, T).
    """
    with np.errstate(all="ignore"):
        per_miss = miss_cost_batch(misses, prices)
        per_hit = misses.hit_latency * prices.latency_second
        of_size = 1000.0 * (sizes * byte_cost_batch(requests, duration, prices)[:, None] + per_miss[:, None])
        per_stale = 1000.0 * prices.stale_answer / requests
    cost = np.empty(hits.shape)
    settings_cost(hits, stale_hits, requests, of_size, 1000.0 * (per_hit - per_miss), per_stale, cost)
    return cost


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
    """Price every setting of a ghost curve on the same requests: :func:`grid_cost_batch` of one lane.

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

    Raises:
        ValueError: If ``requests`` is not > 0.
    """
    if not requests > 0:
        raise ValueError(f"grid_cost: requests: expected a number > 0, got {requests!r}")
    per_request = (input_tokens_per_miss, output_tokens_per_miss, miss_latency, hit_latency)
    cost: npt.NDArray[np.float64] = grid_cost_batch(
        np.asarray(hits, np.float64)[None],
        np.asarray(stale_hits, np.float64)[None],
        np.asarray(sizes, np.float64)[None],
        requests=np.array([requests], np.float64),
        duration=np.array([duration], np.float64),
        misses=MissBatch(*(np.array([value], np.float64) for value in per_request)),
        prices=PriceBatch.of([prices]),
    )[0]
    return cost
