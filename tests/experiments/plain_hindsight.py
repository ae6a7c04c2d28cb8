"""Hindsight the plain way: each walk by itself, all scenarios beside a reference. What the faster way must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from agents.hindsight import grid_settings, static_dollars
from envs.knob_batch import Floats, SpaceBatch
from envs.lanes import Lanes
from envs.task import FIXED, Scenario, Task
from experiments.demonstrations import HORIZONS, KEEP, WANDER, WARMUP_SHARES, _path, _warmed

Seen = tuple[npt.NDArray[np.float32], Floats, Floats]


def plain_paths(scenarios: Sequence[Scenario], task: Task) -> list[Floats]:
    """Return the cheapest paths: each candidate played to its end, one after the other."""
    choices = [grid_settings(scenario.config.space, warmups=(0.0,)) for scenario in scenarios]
    costs = [static_dollars(scenario, settings) for scenario, settings in zip(scenarios, choices, strict=True)]
    best = [np.empty((0, 3))] * len(scenarios)
    paid = np.full(len(scenarios), np.inf)
    for horizon in HORIZONS:
        paths = [_path(*each, horizon) for each in zip(scenarios, choices, costs, strict=True)]
        best, paid = _better(scenarios, paths, best, paid, task)
    for share in WARMUP_SHARES:
        paths = [_warmed(scenario, path, share) for scenario, path in zip(scenarios, best, strict=True)]
        best, paid = _better(scenarios, paths, best, paid, task)
    return best


def plain_hindsight(scenarios: Sequence[Scenario], task: Task, seed: int) -> Seen:
    """Return observations, wanted positions and anchors of the three walks, one after the other."""
    paths, random = plain_paths(scenarios, task), np.random.default_rng(seed)
    walks = [
        plain_walk(scenarios, paths, task, follow=follow, wander=wander, random=random)[0]
        for follow, wander in ((True, 0.0), (True, WANDER), (False, 0.0))
    ]
    vectors, wanted, anchors = (np.concatenate([walk[column] for walk in walks]) for column in range(3))
    return vectors, wanted, anchors


def plain_walk(
    scenarios: Sequence[Scenario],
    paths: Sequence[Floats],
    task: Task,
    *,
    follow: bool = True,
    wander: float = 0.0,
    random: np.random.Generator,
) -> tuple[Seen, Floats]:
    """Return what was seen along the paths, interval by interval, and what each scenario cost."""
    whole = replace(task, episode_length=1 << 30, reference="hold", randomise=FIXED, taped=True)
    rng = np.random.default_rng(0)
    lanes = Lanes(whole, [replace(whole, scenarios=lambda _, one=one: one).draw(rng) for one in scenarios])  # type: ignore[misc]
    spaces = SpaceBatch.of([scenario.config.space for scenario in scenarios])
    away, alive, dollars = np.zeros((len(scenarios), 3)), np.ones(len(scenarios), bool), np.zeros(len(scenarios))
    seen: list[Seen] = []
    while True:
        alive &= ~lanes.windows.over
        if not alive.any():
            vectors, wanted, anchors = (np.concatenate([part[column] for part in seen]) for column in range(3))
            return (vectors, wanted.astype(np.float32), anchors.astype(np.float32)), dollars
        wanted = np.array([path[min(len(seen), len(path) - 1)] for path in paths])
        anchors = spaces.to_steps(lanes.anchors)
        known = lanes.anchors_known & alive
        seen.append((lanes.windows.vectors[known].copy(), wanted[known], anchors[known]))
        away = KEEP * away + wander * random.normal(0.0, 1.0, away.shape)
        windows = lanes.act(task.actions.inverse((wanted if follow else anchors) + away, anchors, spaces.scale))
        dollars += np.where(alive, windows.dollars[: len(scenarios)], 0.0)


def _better(
    scenarios: Sequence[Scenario], paths: list[Floats], best: list[Floats], paid: Floats, task: Task
) -> tuple[list[Floats], Floats]:
    dollars = plain_walk(scenarios, paths, task, random=np.random.default_rng(0))[1]
    chosen = [path if less else other for path, other, less in zip(paths, best, dollars < paid, strict=True)]
    return chosen, np.minimum(dollars, paid)
