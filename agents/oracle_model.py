"""What a regime that recurs costs phase by phase, estimated on realisations of it, and the schedule that is best for it.

The model is small on purpose: the phase of the period, the content of the cache, and the size in force. Content is counted as
the size whose static run holds as much: a static cache of that size would be as warm. Growing the budget raises the content only
as fast as misses fill it; shrinking it lowers the content at once; after a flush all caches are equally cold, so the content
counts as full. TTL and warm-up act within an interval (the TTL is decided when an entry is read) and have no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.schedules import Replays, grid_positions, interval_count, replay_settings
from envs.action import MAX_STEPS
from envs.knob_batch import Floats, SpaceBatch
from envs.task import Scenario
from serving.compiled import compiled

Indices = npt.NDArray[np.int64]

_FINE = 4
"""Levels of content in one grid step of size."""

_CYCLES = 4
"""Periods over which values are iterated backwards: what is left of the end after so many does not change the schedule."""

_COARSE = (6, 4)
"""Sizes and TTLs of the grid that are run for the estimate; what lies between is interpolated."""

_WARMUPS = 3
"""Warm-up ratios that are run, from none to the greatest. Rounds of warm-up take the simulator longer than all requests, so they
are run at the best size and TTL alone, and what they save or cost there is added everywhere."""

_FEW = 4
"""With fewer intervals of each phase than this, costs are averaged over neighbouring phases too."""


def phase_count(scenario: Scenario, period: float | None) -> int:
    """Return the intervals of a period, at least 1; 1 without a period.

    Args:
        scenario: Its interval and time scale count.
        period: Seconds of the workload's own time after which the regime recurs, or None.

    Raises:
        ValueError: If the period is not finite seconds > 0.
    """
    if period is None:
        return 1
    if not 0 < period < math.inf:
        raise ValueError(f"oracle: period: expected finite seconds > 0 or None, got {period!r}")
    return max(1, round(period / (scenario.interval * scenario.config.prices.time_scale)))


def phase_at(moment: float | Floats, period: float | None, phases: int) -> Indices:
    """Return the phase of moments in the workload's own seconds, 0 to ``phases - 1``; 0 without a period."""
    if period is None:
        return np.zeros(np.shape(moment), np.int64)
    # Clocks are sums of intervals: a little late must not count as the phase before.
    share = np.mod(np.asarray(moment, np.float64) / period + 1e-9, 1.0)
    return np.minimum((share * phases + 1e-6).astype(np.int64), phases - 1)


def decision_phases(scenario: Scenario, period: float | None) -> Indices:
    """Return the phase at the beginning of each interval but the first, shape (W,)."""
    begin = np.arange(1, interval_count(scenario), dtype=np.float64) * (scenario.interval * scenario.config.prices.time_scale)
    return phase_at(begin, period, phase_count(scenario, period))


@dataclass(frozen=True)
class PhaseModel:
    """What an interval costs in each of P phases, in units of the best static setting's mean interval.

    Attributes:
        cost: By phase, size, TTL and warm-up ratio of the whole grid, with memory, without changes, shape (P, S, T, U).
        memory: What holding each size costs, shape (P, S).
        filled: Bytes of the answers that are made in an interval over the largest size, by phase and size, shape (P, S).
        flushed: How often a flush falls into each phase, 0..1, shape (P,).
        change: What one grid step of change costs, shape (P,).
        sizes: The sizes over the largest, shape (S,).
        best: Grid position of the best static setting, shape (3,).
    """

    cost: Floats
    memory: Floats
    filled: Floats
    flushed: Floats
    change: Floats
    sizes: Floats
    best: Floats


def estimate(scenarios: Sequence[Scenario], period: float | None) -> tuple[PhaseModel, Floats]:
    """Estimate the model by running static settings on realisations of the regime.

    Args:
        scenarios: The realisations, at least one, with grids of one shape and one interval; bounds may differ, since everything
            is counted in grid positions, and bytes in shares of the largest size.
        period: Seconds of the workload's own time after which the regime recurs, or None.

    Returns:
        The model, and the dollars of the best static setting on each realisation by itself, shape (realisations,).
    """
    space = scenarios[0].config.space
    shape = (space.size_steps, space.ttl_steps)
    axes = [np.linspace(0.0, steps - 1.0, min(few, steps)) for steps, few in zip(shape, _COARSE, strict=True)]
    warmups = np.linspace(0.0, space.warmup_steps - 1.0, min(_WARMUPS, space.warmup_steps))
    positions = grid_positions(axes[0], axes[1], [0.0])
    phases = phase_count(scenarios[0], period)
    runs = [_runs(scenario, positions) for scenario in scenarios]
    units = np.array([max(float(run.dollars.sum(axis=1).min()), 1e-300) for run in runs])
    scales = [run.dollars.shape[1] / unit for run, unit in zip(runs, units, strict=True)]
    # Each realisation weighs the same, however expensive it is.
    best = positions[int(np.argmin(sum(run.dollars.sum(axis=1) / unit for run, unit in zip(runs, units, strict=True))))]
    warm = np.repeat(best[None], len(warmups), axis=0)
    warm[:, 2] = warmups
    average = _Average([decision_phases(scenario, period) for scenario in scenarios], phases)
    coarse = tuple(len(axis) for axis in axes)

    def mean(values: Sequence[Floats]) -> Floats:
        return average([each * scale for each, scale in zip(values, scales, strict=True)])

    cost = _whole(mean([run.dollars for run in runs]).reshape(phases, *coarse), axes, shape)
    warmed = mean([_runs(scenario, warm).dollars for scenario in scenarios])
    saved = _whole(warmed - warmed[:, :1], [warmups], (space.warmup_steps,))
    filled = [run.missed / scenario.config.space.max_size for run, scenario in zip(runs, scenarios, strict=True)]
    largest = mean([run.terms["memory"][-1:] for run in runs])
    sizes = np.mean([each.config.space.sizes / each.config.space.max_size for each in scenarios], axis=0)
    changes = [
        scenario.config.prices.change_step * run.requests[None] / 1000.0 for run, scenario in zip(runs, scenarios, strict=True)
    ]
    model = PhaseModel(
        cost=cost[..., None] + saved[:, None, None, :],
        memory=largest * sizes,
        filled=_whole(average(filled).reshape(phases, *coarse), axes, shape).mean(axis=2),
        flushed=np.minimum(average([flushes(scenario)[None] for scenario in scenarios])[:, 0], 1.0),
        change=mean(changes)[:, 0],
        sizes=sizes,
        best=best,
    )
    return model, units


def _runs(scenario: Scenario, positions: Floats) -> Replays:
    return replay_settings(scenario, SpaceBatch.of([scenario.config.space]).from_steps(positions))


class _Average:
    """Means by phase over realisations; over neighbouring phases too where there is little of each."""

    def __init__(self, phase: Sequence[Indices], phases: int) -> None:
        self._phase = phase
        self._counts = np.zeros((phases, 1))
        for each in phase:
            np.add.at(self._counts, each, 1.0)
        self._wide = phases > 3 and bool(self._counts.min() < _FEW)

    def __call__(self, values: Sequence[Floats]) -> Floats:
        """Return the means of values (N, W) of each realisation: shape (P, N); the overall mean where a phase was not seen."""
        sums, counts = np.zeros((len(self._counts), len(values[0]))), self._counts
        for phase, each in zip(self._phase, values, strict=True):
            np.add.at(sums, phase, each.T)
        overall = sums.sum(axis=0) / counts.sum()
        if self._wide:
            sums, counts = _spread(sums), _spread(counts)
        means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1.0), overall)
        return means


def flushes(scenario: Scenario) -> Floats:
    """Return the flushes within each interval but the first, shape (W,)."""
    edges = scenario.interval * np.arange(1, interval_count(scenario) + 1)
    counted: Floats = np.diff(np.searchsorted(scenario.trace.flush_time, edges, side="left")).astype(np.float64)
    return counted


def plan_schedule(model: PhaseModel, max_steps: tuple[float, float, float] = MAX_STEPS) -> Floats:
    """Return the schedule that costs the least in the model: grid positions by phase, shape (P, 3).

    Dynamic programming over (phase, content, size in force) for the size, each with the TTL and warm-up ratio that suit it best;
    then over (phase, TTL, warm-up ratio) for these two, at the contents that follow from the sizes. Moves cost what they cost,
    and no interval moves further than it may.

    Args:
        model: The model.
        max_steps: Most that each knob may move in one interval, grid steps.
    """
    phases, count = model.cost.shape[:2]
    levels = _FINE * (count - 1) + 1
    fine = np.linspace(0.0, count - 1.0, levels)
    by_level = _along(model.cost - model.memory[:, :, None, None], fine)  # without memory, (P, L, T, U)
    content = np.exp(np.interp(fine, np.arange(count), np.log(model.sizes)))
    filled = _along(model.filled, fine)
    stage = by_level.min(axis=(2, 3))
    value = np.zeros((levels, count))
    chosen = np.zeros((phases, levels, count), np.int64)
    most = max(1, int(max_steps[0]))
    for _ in range(_CYCLES):
        for phase in range(phases - 1, -1, -1):
            value = _back(
                value,
                stage[phase],
                model.memory[phase],
                filled[phase],
                content,
                model.sizes,
                float(model.flushed[phase]),
                float(model.change[phase]),
                most,
                chosen[phase],
            )
    level, size = float(levels - 1), round(float(model.best[0]))
    steps = np.zeros((phases, 3))
    at = np.zeros(phases, np.int64)
    for _ in range(2):  # once around, so that the start is forgotten
        for phase in range(phases):
            size = int(chosen[phase, round(level), size])
            steps[phase, 0] = size
            level = min(level, float(_FINE * size))
            middle, level = _grown(level, float(_FINE * size), filled[phase], content, model.sizes[size])
            at[phase] = round(middle)
            if model.flushed[phase] > 0.5:
                level = float(levels - 1)
    steps[:, 1:] = _plan_rest(by_level[np.arange(phases), at], model.change, max_steps)
    return steps


def _plan_rest(cost: Floats, change: Floats, max_steps: tuple[float, float, float]) -> Floats:
    """Return the TTL and warm-up positions that cost the least, shape (P, 2), where each costs (P, T, U)."""
    phases, ttls, warmups = cost.shape
    places = grid_positions([0.0], np.arange(ttls), np.arange(warmups))[:, 1:]
    apart = np.abs(places[:, None] - places[None])
    allowed = (apart <= np.asarray(max_steps[1:]) + 1e-9).all(axis=2)
    distance = np.where(allowed, np.sqrt((apart**2).sum(axis=2)), math.inf)
    flat = cost.reshape(phases, -1)
    value, chosen = np.zeros(len(places)), np.zeros((phases, len(places)), np.int64)
    for _ in range(_CYCLES):
        for phase in range(phases - 1, -1, -1):
            total = distance * change[phase] if change[phase] > 0 else np.where(allowed, 0.0, math.inf)
            total = total + flat[phase] + value
            chosen[phase] = total.argmin(axis=1)
            value = total.min(axis=1)
        value = value - value.min()
    place = int(np.argmin(flat.mean(axis=0)))
    steps = np.zeros((phases, 2))
    for _ in range(2):
        for phase in range(phases):
            place = int(chosen[phase, place])
            steps[phase] = places[place]
    return steps


def _spread(values: Floats) -> Floats:
    """Return sums over each phase and its two neighbours around the period."""
    total: Floats = values + np.roll(values, 1, axis=0) + np.roll(values, -1, axis=0)
    return total


def _along(values: Floats, positions: Floats) -> Floats:
    """Return values at fractional positions along axis 1, linearly interpolated."""
    low = np.minimum(positions.astype(np.int64), values.shape[1] - 2)
    share = (positions - low).reshape(1, -1, *([1] * (values.ndim - 2)))
    between: Floats = values[:, low] * (1.0 - share) + values[:, low + 1] * share
    return between


def _whole(values: Floats, axes: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """Return values of a coarse grid, (P, ...), at every point of the whole one, linearly interpolated."""
    for axis, (known, steps) in enumerate(zip(axes, shape, strict=True), start=1):
        position = np.interp(np.arange(steps, dtype=np.float64), known, np.arange(len(known), dtype=np.float64))
        values = np.moveaxis(_along(np.moveaxis(values, axis, 1), position), 1, axis)
    return values


@compiled()
def _grown(level: float, most: float, filled: Floats, content: Floats, size: float) -> tuple[float, float]:
    """Return the content in the middle of an interval and at its end, in levels, where the budget is ``size`` bytes."""
    low = min(int(level), len(content) - 2)
    share = level - low
    held = content[low] * (1.0 - share) + content[low + 1] * share
    more = filled[low] * (1.0 - share) + filled[low + 1] * share
    found = np.empty(2)
    for half in range(2):
        grown = min(size, held + more * (0.5 if half == 0 else 1.0))
        place = min(max(np.searchsorted(content, grown) - 1, 0), len(content) - 2)
        part = (grown - content[place]) / (content[place + 1] - content[place])
        found[half] = min(max(place + part, level), most)
    return found[0], found[1]


@compiled()
def _back(
    value: Floats,
    stage: Floats,
    memory: Floats,
    filled: Floats,
    content: Floats,
    sizes: Floats,
    flushed: float,
    change: float,
    most: int,
    chosen: Indices,
) -> Floats:
    """Return what each (content, size in force) costs from a phase on, given the costs from the next on; note what is best."""
    levels, count = value.shape
    before = np.empty((levels, count))
    fine = (levels - 1) // (count - 1)
    # By the size that is chosen and the content that is left, whatever the size in force was.
    ahead = np.empty((levels, count))
    for size in range(count):
        for level in range(levels):
            kept = float(min(level, fine * size))
            middle, end = _grown(kept, float(fine * size), filled, content, sizes[size])
            low = min(int(middle), levels - 2)
            cost = stage[low] * (1.0 - (middle - low)) + stage[low + 1] * (middle - low) + memory[size]
            low = min(int(end), levels - 2)
            later = value[low, size] * (1.0 - (end - low)) + value[low + 1, size] * (end - low)
            ahead[level, size] = cost + flushed * value[levels - 1, size] + (1.0 - flushed) * later
    for level in range(levels):
        for now in range(count):
            best, where = math.inf, now
            for size in range(max(now - most, 0), min(now + most, count - 1) + 1):
                total = ahead[level, size] + change * abs(size - now)
                if total < best:
                    best, where = total, size
            before[level, now] = best
            chosen[level, now] = where
    least: Floats = before - before.min()
    return least
