"""What a training's environments play: the task that the settings describe, and scenarios held out from it. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from envs.task import Scenario, Task
from envs.vec_env import CacheTuningVecEnv
from envs.workloads import load
from experiments import suites
from experiments.scenarios import Scale, TraceMaker, scale_to, session_trace, stretches
from experiments.train_settings import TrainSettings

_HELD_OUT = 1 << 40
"""Held-out scenarios are drawn from seeds that no training episode uses."""


def make_lanes(settings: TrainSettings, lanes: int) -> CacheTuningVecEnv:
    """Return the environments that a policy is trained on; traces are read here.

    Args:
        settings: What to train.
        lanes: Number of lanes.

    Raises:
        envs.workloads.TraceError: If a trace cannot be read.
    """
    return CacheTuningVecEnv(make_task(settings), lanes)


def make_task(settings: TrainSettings) -> Task:
    """Return what is to be learned; traces are read here.

    Raises:
        envs.workloads.TraceError: If a trace cannot be read.
    """
    scenarios: Callable[[np.random.Generator], Scenario]
    if settings.workload == "suites":
        scenarios, length = suites.training(settings.traces_folder, pool=settings.pool), settings.episode
    else:
        maker, _ = _makers(settings)
        scale, length = Scale(interval=settings.interval, intervals=settings.intervals), settings.intervals[1]
        scenarios = lambda rng: scale_to(maker(rng), rng, scale=scale)  # noqa: E731
    return Task(
        scenarios=scenarios,
        episode_length=length,
        randomise=settings.randomise,
        actions=settings.actions,
        hidden=settings.hidden,
        reward="relative",
        taped=settings.workload == "suites",
    )


def held_out_scenarios(settings: TrainSettings) -> list[Scenario]:
    """Return the scenarios that a policy trained on sessions or traces is judged on."""
    _, maker = _makers(settings)
    scale = Scale(interval=settings.interval, intervals=settings.intervals)
    scenarios = []
    for number in range(settings.held_out):
        rng = np.random.default_rng([_HELD_OUT, settings.held_out_seed, number])
        scenarios.append(scale_to(maker(rng), rng, scale=scale, static_start=1.0))
    return scenarios


def _makers(settings: TrainSettings) -> tuple[TraceMaker, TraceMaker]:
    if settings.workload == "sessions":
        return session_trace, session_trace
    traces = [load(path) for path in settings.traces]
    halves = ((0.0, settings.train_share), (settings.train_share, 1.0))
    early, late = ([stretches(trace, requests=settings.stretch, within=half) for trace in traces] for half in halves)
    return _any_of(early), _any_of(late)


def _any_of(makers: Sequence[TraceMaker]) -> TraceMaker:
    return lambda rng: makers[int(rng.integers(len(makers)))](rng)
