"""Scenarios to train and evaluate on: a workload squeezed into minutes, with a cache, a model and a knob space of its scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from envs.cache_env import Scenario
from envs.objective import GIB, Prices
from envs.simulator import SimConfig
from envs.workloads import Trace, sessions
from serving.keys import mix64
from serving.knobs import Knobs, KnobSpace
from serving.latency import UpstreamModel

MEAN_SERVICE = 0.30
"""Mean seconds of one upstream call with the model at rest."""

TraceMaker = Callable[[np.random.Generator], Trace]


@dataclass(frozen=True, slots=True)
class Scale:
    """Ranges from which a scenario's scale is drawn, each uniformly (times and ratios log-uniformly).

    Attributes:
        interval: Seconds between two decisions.
        intervals: Intervals of traffic: shortest and longest.
        half_life_hours: Half-life of an answer's truth, hours of the workload's own time.
        miss_ratio: The model is sized for this share of the traffic, with 40 % headroom.
        memory_share: What holding the whole footprint costs, as a share of what the upstream tokens of all requests would cost.
        own_memory_price: Probability that memory keeps the price it has, instead of one drawn by ``memory_share``.
        static_share: Share of the static start's size in the largest size.
    """

    interval: float = 5.0
    intervals: tuple[int, int] = (24, 40)
    half_life_hours: tuple[float, float] = (6.0, 96.0)
    miss_ratio: tuple[float, float] = (0.4, 1.0)
    memory_share: tuple[float, float] = (0.01, 1.0)
    own_memory_price: float = 0.5
    static_share: float = 1.0 / 16.0


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
    largest = 1 << max(16, math.ceil(math.log2(max(int(trace.size[first].sum()), 2))))
    space = KnobSpace(min_size=largest >> 8, max_size=largest, min_ttl=seconds / 100, max_ttl=seconds * 2, max_warmup=0.5)
    rate = len(trace) / seconds
    slots = max(2, math.ceil(rate * _log_uniform(rng, *scale.miss_ratio) * MEAN_SERVICE * 1.4))
    tokens = max(1.0, float(trace.output_tokens.mean()))
    prices = replace(prices or Prices(), time_scale=compression)
    share, keep = _log_uniform(rng, *scale.memory_share), rng.random() < scale.own_memory_price
    if not keep:
        spent = 1e-6 * (int(trace.input_tokens.sum()) * prices.input_mtok + int(trace.output_tokens.sum()) * prices.output_mtok)
        prices = replace(prices, memory_gib_hour=share * spent / (largest / GIB * trace.duration / 3600.0))
    config = SimConfig(
        space=space,
        upstream=UpstreamModel(slots=slots, ttft=0.25 * MEAN_SERVICE, tpot=0.75 * MEAN_SERVICE / tokens),
        staleness_half_life=3600.0 * _log_uniform(rng, *scale.half_life_hours) / compression,
        prices=prices,
    )
    static = Knobs(max(int(largest * scale.static_share), space.min_size), space.max_ttl, 0.0)
    return Scenario(trace.compress(compression), config, scale.interval, static if rng.random() < static_start else None)


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
    rows = np.flatnonzero(chosen[inverse])
    return replace(
        trace,
        time=trace.time[rows],
        key=trace.key[rows],
        size=trace.size[rows],
        group=trace.group[rows],
        input_tokens=trace.input_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        prompt_id=trace.prompt_id[rows],
    )


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
