"""Scenarios to train and evaluate on: a workload squeezed into minutes, with a cache, a model and a knob space of its scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from envs.cache_env import Scenario
from envs.objective import GIB, Prices
from envs.simulator import MemoryEviction, SimConfig
from envs.workloads import Trace, sessions
from serving.keys import mix64
from serving.knobs import Knobs, KnobSpace
from serving.latency import MOST_SLOTS, UpstreamModel

MEAN_SERVICE = 0.30
TTFT_SHARE = 0.25
CONTENTION = 0.5
HEADROOM = 1.5
"""A made model takes 0.3 s for a mean request that runs alone, a quarter of it to the first token, half as much again when all
slots are busy; it is sized with 50 % headroom over the load that it is meant for."""

MEMORY_EVICTION: MemoryEviction = "lru"
"""Of the memory tier in training and evaluation: what the shipped policies were trained with, so that both can be repeated to the
bit. The gateway's is ``clock`` by default, which moves hits between two tiers and hardly anything else (docs/results.md)."""

STATIC_SHARE = 1.0 / 16.0
"""Share of the static setting's size in the largest."""

TraceMaker = Callable[[np.random.Generator], Trace]


@dataclass(frozen=True, slots=True)
class Scale:
    """Ranges from which a scenario's scale is drawn, each uniformly (times and ratios log-uniformly).

    Attributes:
        interval: Seconds between two decisions.
        intervals: Intervals of traffic: shortest and longest.
        half_life_hours: Half-life of an answer's truth, hours of the workload's own time.
        miss_ratio: The model is sized for this share of the traffic.
        memory_share: What holding the whole footprint costs, as a share of what the upstream tokens of all requests would cost.
        own_memory_price: Probability that memory keeps the price it has, instead of one drawn by ``memory_share``.
    """

    interval: float = 5.0
    intervals: tuple[int, int] = (24, 40)
    half_life_hours: tuple[float, float] = (6.0, 96.0)
    miss_ratio: tuple[float, float] = (0.25, 0.7)
    memory_share: tuple[float, float] = (0.01, 1.0)
    own_memory_price: float = 0.5


def scale_to(
    trace: Trace, rng: np.random.Generator, *, scale: Scale = Scale(), prices: Prices | None = None, static_start: float = 0.5
) -> Scenario:
    """Squeeze one arm's trace into minutes and give it a cache, a model and a knob space of its scale.

    The knob space spans 1/256 of the footprint to the whole of it (to the next power of two), and a TTL of 1/100 of the episode
    to twice its length; memory is priced by the workload's own time.

    Args:
        trace: The requests of one arm, at least two, in the workload's own time.
        rng: Draws from ``scale``.
        scale: The ranges.
        prices: What things cost; ``time_scale`` is replaced.
        static_start: Probability that the episode starts from the static setting (1/16 of the footprint, no expiry); else its
            initial knobs are left open.

    Raises:
        ValueError: If the trace has fewer than two requests or no duration.
    """
    if len(trace) < 2 or trace.duration <= 0:
        raise ValueError(f"scenario: trace {trace.name}: expected at least two requests at different times, got {len(trace)}")
    seconds = scale.interval * int(rng.integers(scale.intervals[0], scale.intervals[1] + 1))
    compression = trace.duration / seconds
    _, first = np.unique(trace.key, return_index=True)
    space = space_for(int(trace.size[first].sum()), seconds)
    misses_per_second = len(trace) / seconds * _log_uniform(rng, *scale.miss_ratio)
    prices = replace(prices or Prices(), time_scale=compression)
    share, keep = _log_uniform(rng, *scale.memory_share), rng.random() < scale.own_memory_price
    if not keep:
        spent = 1e-6 * (int(trace.input_tokens.sum()) * prices.input_mtok + int(trace.output_tokens.sum()) * prices.output_mtok)
        prices = replace(prices, memory_gib_hour=share * spent / (space.max_size / GIB * trace.duration / 3600.0))
    config = SimConfig(
        space=space,
        memory_eviction=MEMORY_EVICTION,
        upstream=model_for(misses_per_second, float(trace.output_tokens.mean())),
        staleness_half_life=3600.0 * _log_uniform(rng, *scale.half_life_hours) / compression,
        prices=prices,
    )
    start = static_knobs(space) if rng.random() < static_start else None
    return Scenario(trace.compress(compression), config, scale.interval, start)


def space_for(footprint: int, seconds: float) -> KnobSpace:
    """Return a knob space of a workload's scale: up to all its bytes (to the next power of two) and down to 1/256 of them.

    Args:
        footprint: Bytes of all distinct entries.
        seconds: Length of the run; the TTL spans 1/100 to twice of it.
    """
    largest = 1 << max(16, math.ceil(math.log2(max(footprint, 2))))
    return KnobSpace(min_size=largest >> 8, max_size=largest, min_ttl=seconds / 100, max_ttl=seconds * 2, max_warmup=0.5)


def static_knobs(space: KnobSpace) -> Knobs:
    """Return the static LRU that tuning is compared with: 1/16 of the largest size, and nothing expires within the run."""
    return Knobs(max(int(space.max_size * STATIC_SHARE), space.min_size), space.max_ttl, 0.0)


def model_for(misses_per_second: float, output_tokens: float) -> UpstreamModel:
    """Return a model that an operator would put behind so many misses per second.

    Args:
        misses_per_second: The load it is meant for.
        output_tokens: Completion tokens of a mean answer.
    """
    return UpstreamModel(
        slots=min(max(2, math.ceil(misses_per_second * MEAN_SERVICE * (1 + CONTENTION) * HEADROOM)), MOST_SLOTS),
        ttft=MEAN_SERVICE * TTFT_SHARE,
        tpot=MEAN_SERVICE * (1 - TTFT_SHARE) / max(1.0, output_tokens),
        contention=CONTENTION,
    )


def session_trace(rng: np.random.Generator) -> Trace:
    """Return one arm's share of a made workload: hours to days of sessions with drift, a daily swing and swapped hot sets."""
    duration = 3600.0 * _log_uniform(rng, 1.0, 96.0)
    swaps = rng.uniform(0.1, 0.95, int(rng.integers(0, 4))) * duration
    return sessions(
        int(rng.integers(2_000, 6_000)),
        round(_log_uniform(rng, 150.0, 4_000.0)),
        alpha=float(rng.uniform(0.6, 1.2)),
        drift=float(rng.uniform(0.0, 2.0)),
        duration=duration,
        diurnal=float(rng.uniform(0.0, 0.9)),
        day=duration / float(rng.uniform(0.5, 4.0)),
        hot_swaps=[float(swap) for swap in swaps],
        repeat=float(rng.uniform(0.0, 0.3)),
        seed=int(rng.integers(1 << 31)),
    )


def one_arm(trace: Trace, salt: int, share: float = 0.5) -> Trace:
    """Return the requests of a share of the keys, as an arm of an experiment sees them.

    Args:
        trace: All requests.
        salt: Chooses the keys.
        share: Share of the keys, 0..1.
    """
    keys, inverse = np.unique(trace.key, return_inverse=True)
    chosen = np.array([mix64(int(key) ^ mix64(salt)) < share * 2.0**64 for key in keys], bool)
    return trace.take(np.flatnonzero(chosen[inverse]))


def stretches(trace: Trace, *, requests: tuple[int, int], within: tuple[float, float]) -> TraceMaker:
    """Return a maker of stretches of a trace, each as one arm of two would see it.

    Args:
        trace: The whole trace.
        requests: Fewest and most requests of a stretch, before it is split between the arms.
        within: Part of the trace to draw from, as shares of its requests: keeps training and held-out parts apart.
    """
    low, high = (int(share * len(trace)) for share in within)

    def draw(rng: np.random.Generator) -> Trace:
        count = min(int(rng.integers(requests[0], requests[1] + 1)), high - low)
        start = int(rng.integers(low, high - count + 1))
        return one_arm(trace.slice(start, start + count), int(rng.integers(1 << 62)))

    return draw


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))
