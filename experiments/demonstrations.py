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
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agents.hindsight import grid_settings, static_dollars
from agents.imitation import Demonstrations
from envs.knob_batch import Floats, SpaceBatch
from envs.lanes import Lanes
from envs.simulator.batch import use_threads
from envs.task import FIXED, Scenario, Task
from experiments import suites
from experiments.train_settings import TrainSettings, code_digest

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

LANES = 16
"""Scenarios that are played side by side."""

WANDER, KEEP = 0.5, 0.9
"""Standard deviation, grid steps, of what an interval adds to the wandering, and what it keeps of the wandering before."""

Progress = Callable[[int, int], None]
"""Called with the scenarios done and all of them."""


def file_of(settings: TrainSettings, *, jobs: int | None = None, progress: Progress | None = None) -> Path:
    """Return the file of a training's demonstrations, made if it is not there; trainings of one task share it.

    Args:
        settings: The training; of workload ``suites``.
        jobs: Processes that make it side by side; None: one for each CPU. It is the same whatever their number.
        progress: See :data:`Progress`.
    """
    identity = {
        "code": code_digest(), "pool": settings.pool, "hidden": settings.hidden, "actions": settings.actions.to_dict(),
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = settings.output / ".training"
    path = folder / f"demonstrations-{name}.safetensors"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, settings.pool, LANES)
    parts: list[Demonstrations] = []
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for first, part in zip(starts, pool.map(partial(_demonstrate_some, settings), starts), strict=True):
            parts.append(part)
            if progress is not None:
                progress(min(first + LANES, settings.pool), settings.pool)
    partial_path = path.with_name(f".{path.name}.partial")
    joined(parts).save(partial_path)
    partial_path.replace(path)
    return path


def _demonstrate_some(settings: TrainSettings, first: int) -> Demonstrations:
    from experiments.training_task import make_task  # imports torch: only where it is needed

    use_threads(1)
    pool = suites.training(settings.traces_folder, pool=settings.pool)
    scenarios = [pool[number] for number in range(first, min(first + LANES, settings.pool))]
    return demonstrate(scenarios, make_task(settings), seed=first)


def joined(parts: Sequence[Demonstrations]) -> Demonstrations:
    """Return demonstrations one after the other."""
    return Demonstrations(
        np.concatenate([part.observations for part in parts]),
        np.concatenate([part.actions for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )


def demonstrate(scenarios: Sequence[Scenario], task: Task, *, seed: int = 0) -> Demonstrations:
    """Return observations and the actions that were best in hindsight, on scenarios played side by side.

    Args:
        scenarios: Training scenarios; each is played from its start to its end.
        task: What is to be learned: actions, step limits and hidden components are its; its scenarios and episode length are not
            looked at, nothing is randomised.
        seed: Of the wandering.
    """
    random = np.random.default_rng(seed)
    paths = best_paths(scenarios, task)
    walks = [
        _walk(scenarios, paths, task, follow=follow, wander=wander, random=random)
        for follow, wander in ((True, 0.0), (True, WANDER), (False, 0.0))
    ]
    labels = np.concatenate([walk.labels for walk in walks])
    return Demonstrations(np.concatenate([walk.vectors for walk in walks]), labels, np.ones(len(labels), np.float32))


def best_paths(scenarios: Sequence[Scenario], task: Task) -> list[Floats]:
    """Return where the knobs should have been in each interval, grid steps, of each scenario shape (W, 3).

    What static settings cost tells nothing of filling and refilling, so each candidate path is played, and the cheapest is taken:
    the best static setting of the time around each interval, over each of :data:`HORIZONS`; then the same with other warm-ups.

    Args:
        scenarios: The scenarios.
        task: As of :func:`demonstrate`.
    """
    replays = []
    for scenario in scenarios:
        settings = grid_settings(scenario.config.space, warmups=(0.0,))
        replays.append((settings, static_dollars(scenario, settings)))
    candidates = [
        [_path(scenario, *replay, horizon) for scenario, replay in zip(scenarios, replays, strict=True)] for horizon in HORIZONS
    ]
    best, paid = _cheapest(scenarios, candidates, None, task)
    for share in WARMUP_SHARES:
        warmed = [_warmed(scenario, path, share) for scenario, path in zip(scenarios, best, strict=True)]
        best, paid = _cheapest(scenarios, [warmed], (best, paid), task)
    return best


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
    scenarios: Sequence[Scenario], candidates: Sequence[list[Floats]], known: tuple[list[Floats], Floats] | None, task: Task
) -> tuple[list[Floats], Floats]:
    """Play candidates; return each scenario's cheapest and what it cost, US dollars, shape (E,)."""
    random = np.random.default_rng(0)
    best, paid = known if known is not None else ([], np.full(len(scenarios), np.inf))
    best = list(best) or [np.empty(0)] * len(scenarios)
    for paths in candidates:
        dollars = _walk(scenarios, paths, task, follow=True, wander=0.0, random=random).dollars
        for lane in np.flatnonzero(dollars < paid).tolist():
            best[lane] = paths[lane]
        paid = np.minimum(paid, dollars)
    return best, paid


@dataclass(frozen=True)
class _Walk:
    vectors: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    dollars: Floats


def _walk(
    scenarios: Sequence[Scenario],
    paths: Sequence[Floats],
    task: Task,
    *,
    follow: bool,
    wander: float,
    random: np.random.Generator,
) -> _Walk:
    """Play scenarios side by side, along their paths or along the curve; return observations, labels and costs."""
    whole = replace(task, episode_length=1 << 30, reference="hold", randomise=FIXED, taped=True)
    rng = np.random.default_rng(0)
    episodes = [replace(whole, scenarios=lambda _, scenario=scenario: scenario).draw(rng) for scenario in scenarios]  # type: ignore[misc]
    lanes = Lanes(whole, episodes)
    spaces = SpaceBatch.of([scenario.config.space for scenario in scenarios])
    radius = np.asarray(task.actions.radius)
    away = np.zeros((len(scenarios), 3))
    alive, dollars = np.ones(len(scenarios), bool), np.zeros(len(scenarios))
    vectors: list[npt.NDArray[np.float32]] = []
    labels: list[npt.NDArray[np.float32]] = []
    interval = 0
    while True:
        alive &= ~lanes.windows.over
        if not alive.any():
            return _Walk(np.concatenate(vectors), np.concatenate(labels), dollars)
        wanted = np.array([path[min(interval, len(path) - 1)] for path in paths])
        anchors = spaces.to_steps(lanes.anchors)
        absolute = task.actions.kind == "absolute"
        label = 2.0 * wanted / spaces.scale - 1.0 if absolute else _over(wanted - anchors, radius)
        label = np.clip(np.where(radius > 0, label, 0.0), -1.0, 1.0)
        known = lanes.anchors_known & alive
        vectors.append(lanes.windows.vectors[known].copy())
        labels.append(label[known].astype(np.float32))
        along_curve = 2.0 * anchors / spaces.scale - 1.0 if absolute else np.zeros_like(label)
        away = KEEP * away + wander * random.normal(0.0, 1.0, away.shape)
        shift = 2.0 * away / spaces.scale if absolute else _over(away, radius)
        windows = lanes.act(np.clip((label if follow else along_curve) + shift, -1.0, 1.0))
        dollars += np.where(alive, windows.dollars[: len(scenarios)], 0.0)
        interval += 1


def _over(steps: Floats, radius: Floats) -> Floats:
    return np.divide(steps, radius, out=np.zeros_like(steps), where=radius > 0)
