"""What a policy imitates before PPO goes on from there: on each training scenario, the static setting that was best in hindsight.

Hindsight is free on training traces and cannot be had on any other. A network that is taught to say, from what it sees now, which
setting will have been the best for this workload learns what the curve's optimum leaves out: what is still to be filled, long
reuse that a young curve has not seen, the queue at the model, what stale answers really cost. The labels are residual actions;
the states come from three walks over each scenario: towards the best setting, the same with wandering knobs, along the curve.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
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

LANES = 16
"""Scenarios that are walked side by side."""

WANDER, KEEP = 0.5, 0.9
"""Standard deviation, grid steps, of what an interval adds to the wandering, and what it keeps of the wandering before."""

Progress = Callable[[int, int], None]
"""Called with the scenarios done and all of them."""


def demonstrate(scenarios: Sequence[Scenario], task: Task, *, seed: int = 0, progress: Progress | None = None) -> Demonstrations:
    """Return observations and the actions that lead to each scenario's best static setting.

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
        targets = []
        for number, scenario in enumerate(part):
            targets.append(best_setting(scenario))
            if progress is not None:
                progress(first + number + 1, len(scenarios))
        for follow, wander in ((1.0, 0.0), (1.0, WANDER), (0.0, 0.0)):
            seen, done = _walk(part, np.array(targets), task, follow, wander, random)
            vectors.append(seen)
            actions.append(done)
    observations, labels = np.concatenate(vectors), np.concatenate(actions)
    return Demonstrations(observations, labels, np.ones(len(labels), np.float32))


def best_setting(scenario: Scenario) -> Floats:
    """Return the best static size and TTL in hindsight on the grid, and the labels' warm-up ratio, shape (3,)."""
    settings = grid_settings(scenario.config.space, warmups=(0.0,))
    best: Floats = np.array(settings[static_dollars(scenario, settings).sum(axis=1).argmin()], np.float64)
    best[2] = WARMUP_SHARE * scenario.config.space.max_warmup
    return best


def _walk(
    scenarios: Sequence[Scenario], targets: Floats, task: Task, follow: float, wander: float, random: np.random.Generator
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Play scenarios side by side, each ``follow`` of the way to its label; return observations and labels."""
    whole = replace(task, episode_length=1 << 30, reference="hold", randomise=FIXED, taped=True)
    rng = np.random.default_rng(0)
    episodes = [replace(whole, scenarios=lambda _, scenario=scenario: scenario).draw(rng) for scenario in scenarios]  # type: ignore[misc]
    lanes = Lanes(whole, episodes)
    spaces = SpaceBatch.of([scenario.config.space for scenario in scenarios])
    radius = np.asarray(task.actions.radius)
    wanted = spaces.to_steps(targets)
    away = np.zeros_like(wanted)
    alive = np.ones(len(scenarios), bool)
    vectors: list[npt.NDArray[np.float32]] = []
    labels: list[npt.NDArray[np.float32]] = []
    while True:
        alive &= ~lanes.windows.over
        if not alive.any():
            return np.concatenate(vectors), np.concatenate(labels)
        known = lanes.anchors_known & alive
        anchors = spaces.to_steps(lanes.anchors)
        if task.actions.kind == "absolute":
            label = np.where(radius > 0, 2.0 * wanted / spaces.scale - 1.0, 0.0)
        else:
            label = np.divide(wanted - anchors, radius, out=np.zeros_like(wanted), where=radius > 0)
        label = np.clip(label, -1.0, 1.0)
        vectors.append(lanes.windows.vectors[known].copy())
        labels.append(label[known].astype(np.float32))
        away = KEEP * away + random.normal(0.0, 1.0, away.shape) * wander
        shift = np.divide(away, radius, out=np.zeros_like(away), where=radius > 0)
        neutral = label if follow else np.zeros_like(label)
        if task.actions.kind == "absolute" and not follow:
            neutral = 2.0 * anchors / spaces.scale - 1.0
        lanes.act(np.clip(neutral + shift, -1.0, 1.0))


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
