"""What a policy imitates before PPO goes on from there: on each training scenario, the settings that were best in hindsight.

Hindsight is free on training traces and cannot be had on any other. A network that is taught to say, from what it sees now, which
setting will have been the best learns what the curve's optimum leaves out: what is still to be filled, long
reuse that a young curve has not seen, the queue at the model, what stale answers really cost. The labels are residual actions;
the states come from three walks over each scenario: towards the best setting, the same with wandering knobs, along the curve.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agents.hindsight import grid_settings, static_dollars
from agents.imitation import Demonstrations
from envs.knob_batch import Floats, SpaceBatch
from envs.lanes import Lanes
from envs.task import FIXED, Scenario, Task

WARMUP_SHARE = 0.8
"""Warm-up of every label, as a share of the most: refreshing what is hot ahead of its expiry rarely costs more than it saves, and
labels without it would have to be searched over a third knob."""

HORIZONS = (None, 144, 72, 36, 18)
"""Intervals after each for which the best static setting is looked for (and half as many before it); None: the whole trace."""

OVERALL = 0.05
"""Weight of the whole trace beside the horizon: of settings that cost the same now, the one that is better on the whole."""

SHIFTS = ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0))
"""Grid steps of size and TTL by which a whole path is moved, to see whether that is cheaper still."""

LANES = 16
"""Scenarios that are played side by side."""

WANDER, KEEP = 0.5, 0.9
"""Standard deviation, grid steps, of what an interval adds to the wandering, and what it keeps of the wandering before."""

Progress = Callable[[int, int], None]
"""Called with the scenarios done and all of them."""


def demonstrate(scenarios: Sequence[Scenario], task: Task, *, seed: int = 0, progress: Progress | None = None) -> Demonstrations:
    """Return observations and the actions that were best in hindsight.

    Args:
        scenarios: Training scenarios; each is played from its start to its end.
        task: What is to be learned: actions, step limits and hidden components are its; its scenarios and episode length are not
            looked at, nothing is randomised.
        seed: Of the wandering.
        progress: See :data:`Progress`.
    """
    random = np.random.default_rng(seed)
    vectors, actions = [], []
    for first in range(0, len(scenarios), LANES):
        part = scenarios[first : first + LANES]
        paths = best_paths(part, task)
        for follow, wander in ((True, 0.0), (True, WANDER), (False, 0.0)):
            walk = _walk(part, paths, task, follow=follow, wander=wander, random=random)
            vectors.append(walk.vectors)
            actions.append(walk.labels)
        if progress is not None:
            progress(first + len(part), len(scenarios))
    observations, labels = np.concatenate(vectors), np.concatenate(actions)
    return Demonstrations(observations, labels, np.ones(len(labels), np.float32))


def best_paths(scenarios: Sequence[Scenario], task: Task) -> list[Floats]:
    """Return where the knobs should have been in each interval, grid steps, of each scenario shape (W, 3).

    What static settings cost tells nothing of filling and refilling, so each candidate path is played, and the cheapest is taken:
    the best static setting of the time around each interval, over each of :data:`HORIZONS`; then the same a step aside.

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
    for shift in SHIFTS:
        aside = [path + np.array([*shift, 0.0]) for path in best]
        best, paid = _cheapest(scenarios, [aside], (best, paid), task)
    return best


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


def cached(
    folder: Path, scenarios: Callable[[], Sequence[Scenario]], task: Task, identity: object, progress: Progress | None
) -> Path:
    """Return the file of the demonstrations, made if it is not there.

    Args:
        folder: Where it is kept.
        scenarios: Makes the training scenarios; only called where there is something to make.
        task: As of :func:`demonstrate`.
        identity: What they depend on, JSON-ready.
        progress: See :data:`Progress`.
    """
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"demonstrations-{name}.safetensors"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        demonstrate(scenarios(), task, progress=progress).save(partial)
        partial.replace(path)
    return path
