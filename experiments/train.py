"""Train policies on simulated scenarios and ship them as artifacts with honest cards.

``python -m experiments.train --config file.yaml`` or ``cachepilot train``: in this process, or, with ``--ray`` and within a Ray
job, on a Ray cluster, with the same result. A training that was killed goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agents import artifact
from agents.ppo import PPOPolicy
from experiments.train_settings import Run, TrainSettings, changed, load_train_settings, runs

Trainer = Callable[..., list[Path]]

QUIET = 30.0
"""Seconds after which a line tells how far a training is, where there is no terminal to draw bars on."""


def train(
    settings: TrainSettings,
    *,
    console: Console | None = None,
    command: str | None = None,
    fresh: bool = False,
    ray: bool | None = None,
) -> list[Path]:
    """Train every variant with every seed, evaluate on what is held out, print the tables and save.

    Args:
        settings: See :class:`experiments.train_settings.TrainSettings`.
        console: Where progress and tables go; default: standard error.
        command: The command that makes the artifacts again, for their cards.
        fresh: Begin anew, whatever was trained or begun before under the same names.
        ray: Whether to use a Ray cluster; None: where this is a Ray job.

    Returns:
        The artifacts' directories.

    Raises:
        agents.checkpoint.CheckpointError: If a training was begun with other settings, and is not to begin anew.
        envs.workloads.TraceError: If a trace cannot be read.
        agents.extraction.ParityError: If a saved policy would not act as the trained one.
    """
    # These import torch: only where it is needed.
    from envs.simulator.compiling import compiling
    from experiments.training_run import forget, is_trained

    console = console or Console(stderr=True)
    wanted = runs(settings.located() if _on_ray(ray) else settings)
    if fresh:
        for run in wanted:
            forget(run)
    command = command or "python -m experiments.train --config <the settings below as YAML>"
    with progress_bars(console) as bars:
        watch = Watch(bars, wanted)
        watch.begin([run.name for run in wanted if not is_trained(run)])
        wanted = [_imitating(run, bars, watch) for run in wanted]
        if _on_ray(ray):
            from experiments.training_job import train_on_ray

            found = train_on_ray(wanted, command=command, watch=watch)
        else:
            if (told := compiling()) is not None:
                watch.say(told)
            found = [_here(run, command, watch) for run in wanted]
    _tell(found, console)
    return found


def _imitating(run: Run, bars: Progress, watch: Watch) -> Run:
    """Return the run with a file of what it imitates first, which is made if it is not there; trainings share it."""
    from experiments.demonstrations import file_of
    from experiments.training_run import is_trained

    settings = run.settings
    if not settings.imitate or is_trained(run):
        return run
    bar = bars.add_task("hindsight", total=settings.pool, note="what would have been best on each training scenario")

    def tell(done: int, total: int) -> None:
        bars.update(bar, completed=done, total=total)
        watch.hindsight(done, total)

    path = file_of(settings, progress=tell)
    bars.remove_task(bar)
    watch.say(f"{run.name}: begins with imitation ({path.name})")
    return replace(run, settings=settings.model_copy(update={"warm_start": path}))


def _here(run: Run, command: str, watch: Watch) -> Path:
    from experiments.training_run import train_run
    from experiments.training_task import make_lanes

    return train_run(
        run,
        partial(make_lanes, run.settings),
        command=command,
        say=watch.say,
        progress=partial(watch.progress, run.name),
        evaluating=partial(watch.evaluating, run.name),
    )


def evaluate_again(directory: Path, settings: TrainSettings, *, note: str, console: Console | None = None) -> Path:
    """Evaluate a saved policy on the settings' held-out scenarios with the code as it is now, and replace that part of its card.

    Args:
        directory: The artifact.
        settings: Workload and held-out set; nothing is trained.
        note: Why, and what the reader of the card has to know of the numbers.
        console: Where progress and the table go; default: standard error.

    Raises:
        agents.artifact.ArtifactError: If the artifact cannot be used.
    """
    from experiments.training_card import evaluation, versions

    console = console or Console(stderr=True)
    policy = PPOPolicy(artifact.load(directory))
    with progress_bars(console) as bars:
        task = bars.add_task("evaluating", total=None, note="")
        found = evaluation(settings, policy, lambda done, total: bars.update(task, completed=done, total=total))
    artifact.with_evaluation(directory, {**found, "versions": versions(), "note": note})
    _tell([directory], console)
    return directory


class Watch:
    """Shows how far the runs are: a bar for each, and where there is no terminal to draw on, lines.

    A line is printed after the first rollout, by which one can tell how long all of them will take; then every tenth of the way,
    and whenever :data:`QUIET` seconds have passed since the last one.

    Args:
        bars: Where the bars are drawn.
        wanted: The runs.
        clock: Returns seconds.
    """

    def __init__(self, bars: Progress, wanted: Sequence[Run], clock: Callable[[], float] = time.monotonic) -> None:
        self._bars = bars
        self._clock = clock
        self._settings = {run.name: run.settings.ppo for run in wanted}
        self._totals = {name: ppo.rollouts * ppo.rollout for name, ppo in self._settings.items()}
        self._told: dict[str, tuple[int, float]] = {}
        self._tasks: dict[str, TaskID] = {
            name: bars.add_task(name, total=total, note="waiting") for name, total in self._totals.items()
        }

    def begin(self, names: Sequence[str]) -> None:
        """Say what is trained, and how often it is kept, where there is no terminal to draw bars on."""
        if not self._bars.console.is_terminal:
            for name in names:
                every = self._settings[name].segment * self._settings[name].rollout
                kept = f"a checkpoint after every {every:,}" if every < self._totals[name] else "no checkpoint before the last"
                self.say(f"{name}: {self._totals[name]:,} steps, {kept}")

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def progress(self, name: str, steps: int, reward: float) -> None:
        """Move a run's bar."""
        total, note = self._totals[name], f"reward {reward:+.4f}"
        self._bars.update(self._tasks[name], completed=steps, total=total, note=note)
        if self._due(name, steps, total):
            self.say(f"{name}: {steps:,} of {total:,} steps, {note}")

    def evaluating(self, name: str, done: int, total: int) -> None:
        """Turn a run's bar into that of its evaluation."""
        self._bars.update(self._tasks[name], completed=done, total=total, note="evaluating")
        if self._due(f"{name}'s evaluation", done, total):
            self.say(f"{name}: evaluated {done} of {total}, held out")

    def hindsight(self, done: int, total: int) -> None:
        """Say how far the search for what would have been best is, which comes before the runs that begin with imitation."""
        if self._due("hindsight", done, total):
            self.say(f"hindsight: {done} of {total} training scenarios")

    def _due(self, what: str, done: int, total: int) -> bool:
        """Tell whether a line is to be printed, and take it for printed."""
        if self._bars.console.is_terminal:
            return False
        before, at = self._told.get(what, (0, -math.inf))
        due = done * 10 // total > before * 10 // total or self._clock() - at >= QUIET
        if due:
            self._told[what] = done, self._clock()
        return due


def progress_bars(console: Console) -> Progress:
    """Return bars that vanish when they are done."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console, transient=True,
    )  # fmt: skip


def _on_ray(wanted: bool | None) -> bool:
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ if wanted is None else wanted


def _tell(directories: Sequence[Path], console: Console) -> None:
    from experiments.training_card import evaluation_table

    for directory in directories:
        console.print(evaluation_table(artifact.load(directory).card["evaluation"]))


def _told(path: Path) -> str:
    """Return a path as a card may tell it: as it was given, but nothing of the machine's own folders."""
    return path.name if path.is_absolute() else path.as_posix()


def main(arguments: Sequence[str] | None = None, *, run: Trainer = train) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description="Train policies on simulated scenarios.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of training settings")
    parser.add_argument("--output", type=Path, help="folder that the artifacts' folders are made in")
    parser.add_argument("--seed", type=int, action="append", help="instead of the settings' seeds; repeatable")
    parser.add_argument("--variant", action="append", help="instead of the settings' variants; repeatable")
    parser.add_argument("--fresh", action="store_true", help="begin anew instead of going on from checkpoints")
    parser.add_argument(
        "--ray", action=argparse.BooleanOptionalAction, help="train on a Ray cluster; default: where this is a Ray job"
    )
    parser.add_argument(
        "--evaluate", type=Path, metavar="DIR", help="train nothing: evaluate this artifact again, renew its card"
    )
    parser.add_argument("--note", default="", help="with --evaluate: what the card's reader has to know of the numbers")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        settings = changed(
            load_train_settings(options.config), output=options.output, seeds=options.seed, variants=options.variant
        )
        if options.evaluate is not None:
            evaluate_again(options.evaluate, settings, note=options.note, console=console)
            return 0
        command = f"python -m experiments.train --config {_told(options.config)}"
        command += "".join(f" --seed {seed}" for seed in options.seed or [])
        command += "".join(f" --variant {variant}" for variant in options.variant or [])
        found = run(settings, console=console, command=command, fresh=options.fresh, ray=options.ray)
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    sys.stdout.writelines(f"{directory}\n" for directory in found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
