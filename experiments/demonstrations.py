"""What a policy imitates before PPO goes on from there: on each training scenario, the settings that were best in hindsight.

Hindsight is free on training traces and cannot be had on any other. A network that is taught to say, from what it sees now, which
setting will have been the best learns what the curve's optimum leaves out: what is still to be filled, long
reuse that a young curve has not seen, the queue at the model, what stale answers really cost. The labels are residual actions;
the states come from three walks over each scenario: towards the best setting, the same with wandering knobs, along the curve.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save

from agents.hindsight import grid_settings, static_dollars
from agents.imitation import Demonstrations
from agents.output_file import write_output
from envs.action import ActionMap
from envs.knob_batch import Floats, SpaceBatch
from envs.observation_vector import mask_of
from envs.simulator.batch import use_threads
from envs.task import Scenario, Task
from experiments import suites
from experiments.processes import deaths_told
from experiments.train_settings import TrainSettings, world_digest
from experiments.walks import Walk, play_walks

WARMUP_SHARE = 0.4
"""Warm-up of the first candidates, as a share of the most."""

WARMUP_SHARES = (0.0, 0.1, 0.8, None)
"""Warm-ups that are tried on the cheapest path; None: only after a flush."""

AFTER_FLUSH = 12
"""Intervals of warm-up after a flush."""

HORIZONS = (None, 144, 72, 36, 18)
"""Intervals after each for which the best static setting is looked for (and half as many before it); None: the whole trace."""

OVERALL = 0.05
"""Weight of the whole trace beside the horizon: of settings that cost the same now, the one that is better on the whole."""

RADIUS = (4.0, 4.0, 5.0)
"""How far from the curve's optimum the paths may lead, grid steps."""

LANES = 16
"""Scenarios that are played side by side."""

WANDER, KEEP = 0.5, 0.9
"""Standard deviation, grid steps, of what an interval adds to the wandering, and what it keeps of the wandering before."""

Progress = Callable[[int, int], None]
"""Called with the scenarios done and all of them."""


class DemonstrationError(ValueError):
    """Demonstrations that could not be made; says why, and what to do."""


@dataclass(frozen=True)
class Hindsight:
    """Where the knobs should have been in states that were met on training scenarios: actions of any kind can be made of it.

    Attributes:
        vectors: Whole observations, nothing hidden, float32, shape (N, DIM).
        wanted: Where the knobs should have been, grid steps, float32, shape (N, 3).
        anchors: The curve's optimum, likewise.
        scale: Grid steps between the least and the greatest knobs, float32, shape (3,).
    """

    vectors: npt.NDArray[np.float32]
    wanted: npt.NDArray[np.float32]
    anchors: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]

    def demonstrations(self, actions: ActionMap, hidden: Sequence[str]) -> Demonstrations:
        """Return what to imitate for a policy that acts like this and is not shown some components."""
        labels = actions.inverse(self.wanted.astype(np.float64), self.anchors.astype(np.float64), self.scale)
        return Demonstrations(self.vectors * mask_of(hidden), labels.astype(np.float32), np.ones(len(labels), np.float32))

    def save(self, path: Path) -> None:
        """Write a safetensors file; the file is there as a whole or not at all."""
        write_output(path, save({item.name: np.ascontiguousarray(getattr(self, item.name)) for item in fields(self)}))

    @classmethod
    def load(cls, path: Path) -> Hindsight:
        """Read what :meth:`save` wrote."""
        return cls(**load_file(path))


def file_of(settings: TrainSettings, *, jobs: int | None = None, progress: Progress | None = None) -> Path:
    """Return the file of a training's demonstrations, made if it is not there; trainings on one pool share the hindsight.

    Args:
        settings: The training; of workload ``suites``.
        jobs: Processes that make it side by side; None: as the settings say. It is the same whatever their number.
        progress: See :data:`Progress`.

    Raises:
        DemonstrationError: If one of the processes ended before it was done.
        agents.output_file.OutputError: If a file cannot be written.
    """
    folder = settings.output / ".training"
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f"hindsight-{_digest({'code': world_digest(), 'pool': settings.pool})}.safetensors"
    if not whole.is_file():
        _hindsight(settings, jobs, progress).save(whole)
    variant = _digest({"of": whole.name, "hidden": settings.hidden, "actions": settings.actions.to_dict()})
    path = folder / f"demonstrations-{variant}.safetensors"
    if not path.is_file():
        Hindsight.load(whole).demonstrations(settings.actions, settings.hidden).save(path)
    return path


def _digest(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _hindsight(settings: TrainSettings, jobs: int | None, progress: Progress | None) -> Hindsight:
    starts = range(0, settings.pool, LANES)
    parts: list[Hindsight] = []
    if progress is not None:
        progress(0, settings.pool)
    # Whole, with the widest actions: the paths that are found serve policies that see less and reach less far.
    wide = settings.model_copy(update={"hidden": (), "absolute": False, "radius": RADIUS})
    jobs = min(jobs or settings.jobs or os.cpu_count() or 1, len(starts))
    with (
        deaths_told("part of the training scenarios", jobs, "jobs in the training settings", DemonstrationError),
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        for first, part in zip(starts, pool.map(partial(_look_back_on_some, wide), starts), strict=True):
            parts.append(part)
            if progress is not None:
                progress(min(first + LANES, settings.pool), settings.pool)
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("vectors", "wanted", "anchors")}
    return Hindsight(**columns, scale=parts[0].scale)


def _look_back_on_some(settings: TrainSettings, first: int) -> Hindsight:
    from experiments.training_task import make_task  # imports torch: only where it is needed

    use_threads(1)
    pool = suites.training(settings.traces_folder, pool=settings.pool)
    scenarios = [pool[number] for number in range(first, min(first + LANES, settings.pool))]
    return look_back(scenarios, make_task(settings), seed=first)


def look_back(scenarios: Sequence[Scenario], task: Task, *, seed: int = 0) -> Hindsight:
    """Find where the knobs should have been, on scenarios played side by side.

    Args:
        scenarios: Training scenarios; each is played from its start to its end.
        task: What is to be learned: actions and step limits are its, hidden components must be none; its scenarios and episode
            length are not looked at, nothing is randomised.
        seed: Of the wandering.
    """
    paths, last = _search(scenarios, task)
    count = len(scenarios)
    away = _wandering(seed, last, count)
    walks = [Walk(number, path) for number, path in enumerate(paths)]
    walks += [Walk(number, path, away=away[:, number]) for number, path in enumerate(paths)]
    walks += [Walk(number, path, follow=False) for number, path in enumerate(paths)]
    played = play_walks(scenarios, walks, task, observed=True)
    # One walk after the other, each interval by interval.
    order = np.lexsort((played.walk % count, played.interval, played.walk // count))
    columns = {
        "vectors": played.vectors[order],
        "wanted": played.wanted[order].astype(np.float32),
        "anchors": played.anchors[order].astype(np.float32),
    }
    space = scenarios[0].config.space
    scale = np.array([space.size_steps, space.ttl_steps, space.warmup_steps], np.float32) - 1.0
    return Hindsight(**columns, scale=scale)


def best_paths(scenarios: Sequence[Scenario], task: Task) -> list[Floats]:
    """Return where the knobs should have been in each interval, grid steps, of each scenario shape (W, 3).

    What static settings cost tells nothing of filling and refilling, so each candidate path is played, and the cheapest is taken:
    the best static setting of the time around each interval, over each of :data:`HORIZONS`; then the same with other warm-ups.

    Args:
        scenarios: The scenarios.
        task: As of :func:`look_back`.
    """
    return _search(scenarios, task)[0]


def _search(scenarios: Sequence[Scenario], task: Task) -> tuple[list[Floats], int]:
    """Return the paths of :func:`best_paths`, and the most decisions that there are in a scenario."""
    candidates: list[list[Floats]] = []
    for scenario in scenarios:
        settings = grid_settings(scenario.config.space, warmups=(0.0,))
        dollars = static_dollars(scenario, settings)
        candidates.append([_path(scenario, settings, dollars, horizon) for horizon in HORIZONS])
    nothing = [np.empty(0)] * len(scenarios)
    best, paid, intervals = _cheapest(scenarios, candidates, nothing, np.full(len(scenarios), np.inf), task)
    warmed = [[_warmed(scenario, path, share) for share in WARMUP_SHARES] for scenario, path in zip(scenarios, best, strict=True)]
    best, _, _ = _cheapest(scenarios, warmed, best, paid, task)
    return best, intervals


def _wandering(seed: int, intervals: int, count: int) -> Floats:
    """Return what wandering adds in each interval of so many scenarios, grid steps, shape (intervals, count, 3)."""
    random = np.random.default_rng(seed)
    random.normal(0.0, 1.0, (intervals, count, 3))  # those of the first walk, which does not wander
    drawn = WANDER * random.normal(0.0, 1.0, (intervals, count, 3))
    away = np.zeros((count, 3))
    for interval in range(intervals):
        away = KEEP * away + drawn[interval]
        drawn[interval] = away
    return drawn


def _warmed(scenario: Scenario, path: Floats, share: float | None) -> Floats:
    """Return a path with another warm-up: a share of the most; if None, the most for a while after each flush, else none."""
    top = scenario.config.space.warmup_steps - 1.0
    warmed = path.copy()
    warmed[:, 2] = 0.0 if share is None else share * top
    if share is None:
        for moment in scenario.trace.flush_time:
            first = int(moment // scenario.interval)
            warmed[first : first + AFTER_FLUSH, 2] = top
    return warmed


def _path(scenario: Scenario, settings: Floats, dollars: Floats, horizon: int | None) -> Floats:
    """Return the grid steps of the setting that is cheapest over half a horizon before and a horizon after each interval."""
    count = dollars.shape[1]
    if horizon is None:
        chosen = np.full(count, dollars.sum(axis=1).argmin())
    else:
        summed = np.concatenate([np.zeros((len(dollars), 1)), np.cumsum(dollars, axis=1)], axis=1)
        here = np.arange(count)
        begin, end = np.maximum(here - horizon // 2, 0), np.minimum(here + horizon, count)
        mean = (summed[:, end] - summed[:, begin]) / (end - begin)
        chosen = (mean + OVERALL * dollars.mean(axis=1, keepdims=True)).argmin(axis=0)
    knobs = np.array(settings[chosen], np.float64)
    knobs[:, 2] = WARMUP_SHARE * scenario.config.space.max_warmup
    spaces = SpaceBatch.of([scenario.config.space] * count)
    return spaces.to_steps(knobs)


def _cheapest(
    scenarios: Sequence[Scenario], candidates: Sequence[Sequence[Floats]], best: Sequence[Floats], paid: Floats, task: Task
) -> tuple[list[Floats], Floats, int]:
    """Play each scenario's candidates; return its cheapest path, and what it cost, if that is less than the best so far.

    Args:
        scenarios: The scenarios.
        candidates: Paths of each; of equally cheap ones the first counts. One that is there twice is played once.
        best: The best path so far of each.
        paid: What it cost, US dollars, shape (E,); a candidate is given up when it has come to as much.
        task: As of :func:`look_back`.

    Returns:
        Paths, their costs, and the most decisions that a walk made.
    """
    walks = [
        Walk(number, path, limit=paid[number])
        for number, paths in enumerate(candidates)
        for place, path in enumerate(paths)
        if not any(np.array_equal(path, other) for other in paths[:place])
    ]
    played = play_walks(scenarios, walks, task)
    found, least = list(best), paid.copy()
    for walk, dollars in zip(walks, played.dollars.tolist(), strict=True):
        if dollars < least[walk.scenario]:
            found[walk.scenario], least[walk.scenario] = walk.path, dollars
    return found, least, int(played.intervals.max())
