"""Trainings on a Ray cluster: each variant and seed is a task, the rollouts of each are on actors of its own.

Whatever dies, the result is the same to the last bit: a rollout actor is replaced and replays its segment, a task is retried and
goes on from its last checkpoint, and after the death of the driver the same command does the same. On more than one machine the
output folder has to be on storage that all of them share.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from experiments.ray_rollouts import RayVecEnv
from experiments.train_settings import Run
from experiments.training_run import is_trained, train_run
from experiments.training_task import make_lanes

POLL = 0.5
"""Seconds between two looks at how far the tasks are."""


class Watching(Protocol):
    """Where news of the runs go: :class:`experiments.train.Watch`, or what passes them on to it."""

    def say(self, line: str) -> None:
        """Print a line."""

    def progress(self, name: str, steps: int, reward: float) -> None:
        """Show how far a run's training is."""

    def evaluating(self, name: str, done: int, total: int) -> None:
        """Show how far a run's evaluation is."""


class Board:
    """What tasks tell and the driver reads; an actor."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._latest: dict[str, tuple[str, int, float]] = {}

    def say(self, line: str) -> None:
        """Take in a line."""
        self._lines.append(line)

    def show(self, name: str, what: str, done: int, value: float) -> None:
        """Take in how far a run is; the latest counts."""
        self._latest[name] = (what, done, value)

    def read(self) -> tuple[list[str], dict[str, tuple[str, int, float]]]:
        """Return what is new since the last time."""
        lines, latest = self._lines, self._latest
        self._lines, self._latest = [], {}
        return lines, latest


@dataclass(frozen=True)
class _Pinned:
    """Passes news on to a :class:`Board`, waiting for nothing."""

    board: Any

    def say(self, line: str) -> None:
        self.board.say.remote(line)

    def progress(self, name: str, steps: int, reward: float) -> None:
        self.board.show.remote(name, "training", steps, reward)

    def evaluating(self, name: str, done: int, total: int) -> None:
        self.board.show.remote(name, "evaluating", done, float(total))


def train_on_ray(wanted: Sequence[Run], *, command: str, watch: Watching) -> list[Path]:
    """Train runs side by side, as many as the cluster has CPUs for: this job's cluster, else one on this machine.

    Args:
        wanted: The runs, with absolute folders.
        command: The command that makes the artifacts again, for their cards.
        watch: Is told how far they are.

    Returns:
        The artifacts' directories, in their order.

    Raises:
        ValueError: If a run cannot be trained as asked; the others are finished first.
        ray.exceptions.RayError: If a task died more often than the settings allow.
    """
    with _cluster():
        _compile([run for run in wanted if not is_trained(run)])
        board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Board).remote()
        groups, tasks = {}, []
        for run in wanted:
            group, task = _launch(run, command, board, watch)
            groups[task] = group
            tasks.append(task)
        pending = list(tasks)
        while pending:
            done, pending = ray.wait(pending, timeout=POLL)
            for task in done:
                remove_placement_group(groups[task])  # room for those that wait
            _pass_on(board, watch)
        return _results(tasks)


def _launch(run: Run, command: str, board: Any, watch: Watching) -> tuple[Any, Any]:
    """Start a run as a task in a group of its own, so that no two trainings wait for each other's actors."""
    spread = run.settings.ray
    needed = spread.training_cpus + spread.actors * spread.actor_cpus
    present = float(ray.cluster_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
    if needed > present:
        watch.say(f"{run.name}: waits for {needed:g} CPUs, the cluster has {present:g}: lower ray.actors or ray.actor_cpus")
    group = placement_group([{"CPU": spread.training_cpus}, *[{"CPU": spread.actor_cpus}] * spread.actors], strategy="PACK")
    task = (
        ray.remote(_train)
        .options(
            num_cpus=spread.training_cpus,
            max_retries=spread.retries,
            name=run.name,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
            ),
        )
        .remote(run, command, board)
    )
    return group, task


def _train(run: Run, command: str, board: Any) -> Path:
    """Train a run; a task."""
    told, spread = _Pinned(board), run.settings.ray

    def environments(lanes: int) -> RayVecEnv:
        return RayVecEnv(
            partial(make_lanes, run.settings),
            lanes,
            actors=spread.actors,
            cpus=spread.actor_cpus,
            deaths=spread.retries,
            say=lambda line: told.say(f"{run.name}: {line}"),
        )

    return train_run(
        run,
        environments,
        command=command,
        say=told.say,
        progress=partial(told.progress, run.name),
        evaluating=partial(told.evaluating, run.name),
    )


def _results(tasks: Sequence[Any]) -> list[Path]:
    found, faults = [], []
    for task in tasks:
        try:
            found.append(ray.get(task))
        except (RayError, ValueError) as error:
            # Of a run that cannot be trained as asked, what it says: Ray's own error has the task's whole traceback for its text.
            cause = getattr(error, "cause", None)
            faults.append(cause if isinstance(cause, ValueError) else error)
    if faults:
        raise faults[0]
    return found


def _pass_on(board: Any, watch: Watching) -> None:
    lines, latest = ray.get(board.read.remote())
    for line in lines:
        watch.say(line)
    for name, (what, done, value) in latest.items():
        if what == "training":
            watch.progress(name, done, value)
        else:
            watch.evaluating(name, done, int(value))


def _compile(wanted: Sequence[Run]) -> None:
    """Have what is compiled be there before many processes would compile it at once."""
    for run in wanted[:1]:
        environments = make_lanes(run.settings, 1)
        environments.seed(0)
        environments.reset()
        environments.step(np.zeros((1, 3)))
        environments.close()


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    """Connect to the cluster of this job, or start one on this machine and end it on leaving."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        ray.init(address="auto", **quiet)
    else:
        ray.init(address="local", include_dashboard=False, object_store_memory=80 << 20, **quiet)
    try:
        yield
    finally:
        ray.shutdown()
