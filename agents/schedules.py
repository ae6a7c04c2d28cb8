"""Many schedules of knobs run on one trace in the simulator, each from an empty cache, without ghosts: what bounds are made of.

A schedule is known beforehand for the whole run, so each cache is run through all of its intervals in one compiled call, while
its state stays in the processor's cache. What comes out is what :class:`envs.lanes.Lanes` makes of the same knobs, in less time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from numba.typed import List as TypedList

from envs.action import MAX_STEPS
from envs.knob_batch import Floats, SpaceBatch, to_knobs
from envs.objective import COST_TERMS, PriceBatch, UsageBatch, price_batch
from envs.simulator import CacheSimulator, kernel
from envs.simulator import state as k
from envs.simulator.measure import measure
from envs.task import Scenario, check
from serving.compiled import compiled

_CHUNK = 16
"""Caches that are held at the same time: few enough for the machine's memory."""

_BUDGET, _MEMORY_BUDGET, _TTL, _WARMUP = k.BUDGET, k.MEMORY_BUDGET, k.TTL, k.WARMUP
_COLUMN = {name: index for index, name in enumerate(k.SIGNALS)}


@dataclass(frozen=True)
class Replays:
    """What N schedules came to in the W intervals after the first, which is left out of every score.

    Attributes:
        dollars: US dollars, 0 without requests, shape (N, W).
        terms: The same by term of the objective, each of shape (N, W).
        requests: Requests, shape (W,).
        hits: Requests answered from the cache, shape (N, W).
        p99: The 99th percentile of latency, seconds, NaN without requests, shape (N, W).
        resident: Bytes held at the interval's end, shape (N, W).
        missed: Bytes of the answers that had to be made: what the cache was filled with, shape (N, W).
    """

    dollars: Floats
    terms: dict[str, Floats]
    requests: Floats
    hits: Floats
    p99: Floats
    resident: Floats
    missed: Floats


def interval_count(scenario: Scenario) -> int:
    """Return the intervals of a scenario, the first included, up to the one that holds its last request.

    Raises:
        ValueError: If its trace does not last longer than one interval.
    """
    check(scenario)
    # Windows are half open: a request at a boundary belongs to the later one.
    return int(scenario.trace.duration // scenario.interval) + 1


def limited_steps(wanted: Floats, start: Floats, max_steps: tuple[float, float, float] = MAX_STEPS) -> Floats:
    """Return where a cache is that is told to go to ``wanted``, interval by interval, but may only move so far in each.

    Args:
        wanted: Grid positions, shape (W, 3), of the intervals after the first.
        start: Grid position in the first interval, shape (3,).
        max_steps: Most that each knob may move in one interval, grid steps.

    Returns:
        Grid positions of all intervals, the first included, shape (1 + W, 3).
    """
    steps = np.empty((len(wanted) + 1, 3))
    steps[0] = start
    _limit(np.ascontiguousarray(wanted, np.float64), np.array(max_steps, np.float64), steps)
    return steps


def replay_steps(scenario: Scenario, steps: Floats) -> Replays:
    """Run schedules given as grid positions.

    Args:
        scenario: Trace, cache and interval.
        steps: Grid positions, shape (N, 1 + W, 3): of each schedule, and of each interval, the first included.

    Raises:
        ValueError: If the shape is another.
    """
    space = SpaceBatch.of([scenario.config.space])
    steps = np.ascontiguousarray(steps, np.float64)
    knobs = space.from_steps(steps.reshape(-1, 3)).reshape(steps.shape)
    moved = np.diff(steps, axis=1)
    moved *= moved
    return _replay(scenario, knobs, np.sqrt(moved[..., 0] + moved[..., 1] + moved[..., 2]))


def replay_settings(scenario: Scenario, settings: Floats) -> Replays:
    """Run settings that never change.

    Args:
        scenario: Trace, cache and interval.
        settings: Knobs (bytes, seconds, share), shape (N, 3); they may lie outside the knob space.

    Raises:
        ValueError: If the shape is another.
    """
    values = np.asarray(settings, np.float64)
    if values.ndim != 2 or values.shape[1] != 3 or not len(values):
        raise ValueError(f"settings: expected an array of shape (N, 3) with N >= 1, got {values.shape}")
    count = interval_count(scenario)
    return _replay(scenario, np.repeat(values[:, None, :], count, axis=1), np.zeros((len(values), count - 1)))


def _replay(scenario: Scenario, knobs: Floats, moved: Floats) -> Replays:
    """Run schedules of knobs, shape (N, 1 + W, 3), whose changes amount to ``moved`` grid steps, shape (N, W)."""
    count = interval_count(scenario)
    if knobs.ndim != 3 or knobs.shape[1:] != (count, 3) or not len(knobs):
        raise ValueError(
            f"schedules: expected an array of shape (N, {count}, 3) with N >= 1 for {scenario.trace.name}, got {knobs.shape}"
        )
    # As the environment's clock counts, sum by sum.
    edges = np.concatenate([[0.0], np.cumsum(np.full(count, scenario.interval))])
    measured = np.empty((*knobs.shape[:2], len(k.SIGNALS)))
    for first, lanes in _chunks(scenario, knobs):
        states, columns = TypedList(), TypedList()
        for lane in lanes:
            states.append(lane.state)
            columns.append(lane.columns)
        last = first + len(lanes)
        _run(states, columns, edges, knobs[first:last], scenario.config.l1_share, measured[first:last])
    return _priced(scenario, knobs[:, 1:, 0], moved, {name: measured[:, 1:, column] for name, column in _COLUMN.items()}, edges)


def _chunks(scenario: Scenario, knobs: Floats) -> Iterator[tuple[int, list[CacheSimulator]]]:
    trace, config = scenario.trace, replace(scenario.config, ghost_keys=0)
    for first in range(0, len(knobs), _CHUNK):
        lanes = []
        for row in knobs[first : first + _CHUNK, 0]:
            lane = CacheSimulator(trace, config, to_knobs(row))
            # Room for whatever may come: an interval may hold, and leave waiting, all requests that there are.
            lane.make_room(len(trace) + config.refreshes_inflight, len(trace))
            lanes.append(lane)
        yield first, lanes


def _priced(scenario: Scenario, budget: Floats, moved: Floats, seen: dict[str, Floats], edges: Floats) -> Replays:
    usage = UsageBatch(
        requests=seen["requests"],
        input_tokens=seen["input_tokens"],
        output_tokens=seen["output_tokens"],
        latency_seconds=seen["latency_sum"],
        p99=seen["p99"],
        stale_hits=seen["stale_hits"],
        budget_bytes=budget,
        duration=np.full(budget.shape, scenario.interval),
        refresh_input_tokens=seen["refresh_input_tokens"],
        refresh_output_tokens=seen["refresh_output_tokens"],
        change_steps=moved,
    )
    cost = price_batch(usage, PriceBatch.of([scenario.config.prices]))
    requests = seen["requests"]

    def dollars(per_thousand: Floats) -> Floats:
        return np.where(np.isfinite(cost.total), per_thousand * requests / 1000.0, 0.0)

    trace = scenario.trace
    places = np.searchsorted(trace.time, edges, side="left")
    asked = np.diff(np.concatenate([[0], np.cumsum(trace.size)])[places])[1:]
    return Replays(
        dollars=dollars(cost.total),
        terms={name: dollars(getattr(cost, name)) for name in COST_TERMS},
        requests=requests[0].copy(),
        hits=np.where(requests > 0, requests * seen["hit_ratio"], 0.0),
        p99=seen["p99"].copy(),
        resident=seen["resident_bytes"].copy(),
        missed=np.where(requests > 0, asked * (1.0 - seen["byte_hit_ratio"]), 0.0),
    )


@compiled()
def _limit(wanted: Floats, most: Floats, steps: Floats) -> None:
    for interval in range(len(wanted)):
        for knob in range(3):
            move = wanted[interval, knob] - steps[interval, knob]
            steps[interval + 1, knob] = steps[interval, knob] + min(max(move, -most[knob]), most[knob])


@compiled()  # on one core: whoever has many cases to run has one for each core
def _run(states, columns, edges: Floats, knobs: Floats, l1_share: float, measured: Floats) -> None:  # type: ignore[no-untyped-def]
    for lane in range(len(knobs)):
        state = states[lane]
        for interval in range(len(edges) - 1):
            size = knobs[lane, interval, 0]
            state.params[_BUDGET] = size
            state.params[_MEMORY_BUDGET] = math.floor(size * l1_share)
            state.params[_TTL] = knobs[lane, interval, 1]
            state.params[_WARMUP] = knobs[lane, interval, 2]
            kernel.trim(state)
            kernel.run(state, columns[lane], edges[interval], edges[interval + 1])
            measure(state, edges[interval + 1] - edges[interval], measured[lane, interval])


def grid_positions(sizes: npt.ArrayLike, ttls: npt.ArrayLike, warmups: npt.ArrayLike) -> Floats:
    """Return all combinations of grid positions, shape (sizes * ttls * warmups, 3), warm-up running fastest."""
    axes = np.meshgrid(*(np.asarray(axis, np.float64) for axis in (sizes, ttls, warmups)), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1)
