"""Train a policy on simulated scenarios and ship it as an artifact with an honest card.

``python -m experiments.train --config file.yaml`` or ``cachepilot train``. The card says how the policy did on held-out scenarios
against a static setting, the last window's curve and the smoothed curve, whichever won.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from agents import artifact
from agents.artifact import Artifact
from agents.baselines import HoldPolicy, MiddlePolicy
from agents.curve import CurvePolicy, LastCurvePolicy, OffsetPolicy
from agents.policy import Policy
from agents.ppo import PPOPolicy
from agents.settings import PPOSettings
from envs.action import RADIUS, ActionMap
from envs.task import Randomisation, Scenario, Task
from envs.workloads import load
from experiments.evaluate import Standing, compare
from experiments.scenarios import Scale, TraceMaker, scale_to, session_trace, stretches

OFFSETS = ((1.0, 0.0, 0.0), (2.0, 0.0, 0.0), (2.0, 0.5, 0.0))
"""Constant offsets that are evaluated beside a trained residual, which has to be worth more than a constant."""

_HELD_OUT = 1 << 40
"""Held-out scenarios are drawn from seeds that no training episode uses."""


class TrainSettings(BaseModel):
    """What to train and how.

    With ``traces``, training draws stretches from the first ``train_share`` of each, and the held-out ones come from the rest.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="mine", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    output: Path = Field(default=Path("policies"), description="the artifact becomes a folder of this name in here")
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    workload: Literal["sessions", "traces"] = "sessions"
    traces: list[Path] = Field(default_factory=list, description="files that envs.workloads reads, for workload: traces")
    stretch: tuple[int, int] = Field(default=(4_000, 12_000), description="fewest and most requests of a stretch of a trace")
    train_share: float = Field(default=0.7, gt=0, lt=1)
    interval: float = Field(default=5.0, gt=0, description="seconds between two decisions")
    intervals: tuple[int, int] = Field(default=(24, 40), description="fewest and most intervals of an episode")
    prices_factor: float = Field(default=2.0, ge=1, description="each price is drawn within this factor")
    absent: float = Field(default=0.2, ge=0, le=1, description="probability that an episode lacks an optional signal")
    radius: tuple[float, float, float] = RADIUS
    held_out: int = Field(default=32, ge=1, le=10_000, description="scenarios to evaluate on")
    held_out_seed: int = Field(default=0, ge=0, description="draws them; a set that choices were made by is no longer held out")
    ppo: PPOSettings = PPOSettings()

    @model_validator(mode="after")
    def _consistent(self) -> TrainSettings:
        if (self.workload == "traces") != bool(self.traces):
            raise ValueError("traces: expected at least one file with workload: traces, and none without")
        for name in ("stretch", "intervals"):
            low, high = getattr(self, name)
            if not 2 <= low <= high:
                raise ValueError(f"{name}: expected 2 <= fewest <= most, got {low} and {high}")
        if not all(0 < step < 100 for step in self.radius):
            raise ValueError(f"radius: expected three numbers of grid steps > 0, got {self.radius}")
        return self


def load_train_settings(path: Path) -> TrainSettings:
    """Read the settings from a YAML file.

    Raises:
        ValueError: If it cannot be read, or a key or value is not as expected; the text names it.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"training settings {path}: expected a readable YAML file: {error}") from error
    if not isinstance(tree, dict | None):
        raise ValueError(f"training settings {path}: expected a mapping at the top, got {type(tree).__name__}")
    try:
        return TrainSettings.model_validate(tree or {})
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'settings'} = {item['input']!r}: {item['msg']}" for item in error.errors()]
        raise ValueError(f"training settings {path}: " + "; ".join(lines)) from error


def train(settings: TrainSettings, *, console: Console | None = None, command: str | None = None) -> Path:
    """Train, evaluate on held-out scenarios, print the standings and save.

    Args:
        settings: See :class:`TrainSettings`.
        console: Where progress and the table go; default: standard error.
        command: The command that reproduces the artifact, for its card.

    Returns:
        The artifact's directory, ``output/name``.

    Raises:
        envs.workloads.TraceError: If a trace cannot be read.
        agents.training.ParityError: If the saved policy would not act as the trained one.
    """
    # Both import torch: only where it is needed.
    from agents.training import check_parity, extract, train_ppo
    from envs.vec_env import CacheTuningVecEnv

    console = console or Console(stderr=True)
    training, held_out = _makers(settings)
    scale = Scale(interval=settings.interval, intervals=settings.intervals)

    task = Task(
        scenarios=lambda rng: scale_to(training(rng), rng, scale=scale),
        episode_length=settings.intervals[1],
        randomise=Randomisation(start=False, prices=settings.prices_factor, clock=True, absent=settings.absent),
        actions=ActionMap(radius=settings.radius),
        reward="relative",
    )

    started = time.monotonic()
    with _progress(console) as progress:
        bar = progress.add_task("training", total=settings.ppo.total_steps, note="")
        model = train_ppo(
            lambda lanes: CacheTuningVecEnv(task, lanes),
            settings.ppo,
            seed=settings.seed,
            progress=lambda steps, reward: _advance(progress, bar, steps, settings.ppo.total_steps, f"reward {reward:+.4f}"),
        )
    seconds = time.monotonic() - started

    network = extract(model)
    seen = np.asarray(model.rollout_buffer.observations, np.float32).reshape(-1, network.layers[0][0].shape[1])
    parity = check_parity(model, network, seen[:512])
    policy = PPOPolicy(Artifact(settings.name, network, settings.radius, {}))
    standings = evaluate(policy, _held_out_scenarios(settings, held_out, scale), settings.intervals[1], console=console)
    console.print(standings_table(standings))
    directory = settings.output / settings.name
    return artifact.save(
        directory,
        name=settings.name,
        network=network,
        radius=settings.radius,
        probe=seen[len(seen) // 2],
        training={
            "command": command or "python -m experiments.train --config <the settings below as YAML>",
            "settings": _portable(settings),
            "seed": settings.seed,
            "steps": int(model.num_timesteps),
            "seconds": round(seconds, 1),
            "parity": parity,
            "versions": _versions(),
        },
        evaluation=summary(standings),
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
    console = console or Console(stderr=True)
    trained = artifact.load(directory)
    scale = Scale(interval=settings.interval, intervals=settings.intervals)
    scenarios = _held_out_scenarios(settings, _makers(settings)[1], scale)
    standings = evaluate(PPOPolicy(trained), scenarios, settings.intervals[1], console=console)
    console.print(standings_table(standings))
    return artifact.save(
        directory,
        name=trained.name,
        network=trained.network,
        radius=trained.radius,
        probe=np.asarray(trained.card["probe"]["observation"], np.float32),
        training=trained.card["training"],
        evaluation={**summary(standings), "held_out_seed": settings.held_out_seed, "versions": _versions(), "note": note},
    )


def evaluate(policy: PPOPolicy, scenarios: Sequence[Scenario], length: int, *, console: Console | None = None) -> list[Standing]:
    """Compare a trained policy with the baselines on the same scenarios: static, mid-grid, curves."""
    policies: list[Policy] = [HoldPolicy(), MiddlePolicy(), LastCurvePolicy(), CurvePolicy(), *map(OffsetPolicy, OFFSETS), policy]
    with _progress(console or Console(stderr=True)) as progress:
        task = progress.add_task("evaluating", total=None, note="")
        return compare(
            policies, scenarios, length=length, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )


def summary(standings: Sequence[Standing]) -> dict[str, Any]:
    """Return the standings and their verdict in words, for the card."""
    last = standings[-1]
    if last.high < 1.0:
        verdict = f"beats the smoothed curve: {last.relative:.3f} of its cost, 95 % interval {last.low:.3f} to {last.high:.3f}"
    elif last.low > 1.0:
        verdict = f"is worse than the smoothed curve: {last.relative:.3f} of its cost, interval {last.low:.3f} to {last.high:.3f}"
    else:
        verdict = f"ties with the smoothed curve: {last.relative:.3f} of its cost, interval {last.low:.3f} to {last.high:.3f}"
    constants = [row for row in standings[:-1] if row.policy.startswith("curve+")]
    if constants:
        best = min(constants, key=lambda row: row.relative)
        verdict += f"; the best constant offset of the {len(constants)} tried, {best.policy}, is at {best.relative:.3f}"
        verdict += f"; scenario by scenario (geometric mean) it is {last.typical:.3f} against {best.typical:.3f}"
    rows = [{key: _rounded(value) for key, value in standing.to_dict().items()} for standing in standings]
    return {"verdict": verdict, "baseline": "curve", "held_out_scenarios": last.scenarios, "standings": rows}


def standings_table(standings: Sequence[Standing]) -> Table:
    """Return the standings as a table."""
    table = Table(title=f"held-out scenarios: {standings[0].scenarios}; cost relative to the smoothed curve")
    for column in ("policy", "$/1,000", "hits", "relative", "95 % interval", "typical", "wins"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in standings:
        table.add_row(
            row.policy,
            f"{row.cost:.4f}",
            f"{row.hit_ratio:.3f}",
            f"{row.relative:.3f}",
            f"{row.low:.3f}-{row.high:.3f}",
            f"{row.typical:.3f}",
            f"{row.wins}/{row.scenarios}",
        )
    return table


def _makers(settings: TrainSettings) -> tuple[TraceMaker, TraceMaker]:
    if settings.workload == "sessions":
        return session_trace, session_trace
    traces = [load(path) for path in settings.traces]
    halves = ((0.0, settings.train_share), (settings.train_share, 1.0))
    early, late = ([stretches(trace, requests=settings.stretch, within=half) for trace in traces] for half in halves)
    return _any_of(early), _any_of(late)


def _any_of(makers: Sequence[TraceMaker]) -> TraceMaker:
    return lambda rng: makers[int(rng.integers(len(makers)))](rng)


def _held_out_scenarios(settings: TrainSettings, maker: TraceMaker, scale: Scale) -> list[Scenario]:
    scenarios = []
    for number in range(settings.held_out):
        rng = np.random.default_rng([_HELD_OUT, settings.held_out_seed, number])
        scenarios.append(scale_to(maker(rng), rng, scale=scale, static_start=1.0))
    return scenarios


def _portable(settings: TrainSettings) -> dict[str, Any]:
    """The settings without this machine's folders."""
    values = settings.model_dump(mode="json", exclude={"output"})
    values["traces"] = [path.name for path in settings.traces]
    return values


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("cachepilot", "torch", "stable-baselines3", "gymnasium", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console, transient=True,
    )  # fmt: skip


def _advance(progress: Progress, task: TaskID, steps: int, total: int, note: str) -> None:
    """Move the bar; where there is no terminal to draw one on, say so every tenth of the way."""
    before = progress.tasks[task].completed
    progress.update(task, completed=steps, note=note)
    if not progress.console.is_terminal and steps * 10 // total > before * 10 // total:
        progress.console.print(f"training: {steps:,} of {total:,} steps, {note}")


def _told(path: Path) -> str:
    """Return a path as a card may tell it: as it was given, but nothing of the machine's own folders."""
    return path.name if path.is_absolute() else path.as_posix()


def main(arguments: Sequence[str] | None = None, *, run: Callable[..., Path] = train) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.train", description="Train a policy on simulated scenarios.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of training settings")
    parser.add_argument("--output", type=Path, help="folder that the artifact's folder is made in")
    parser.add_argument(
        "--evaluate", type=Path, metavar="DIR", help="train nothing: evaluate this artifact again, renew its card"
    )
    parser.add_argument("--note", default="", help="with --evaluate: what the card's reader has to know of the numbers")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        settings = load_train_settings(options.config)
        if options.output is not None:
            settings = settings.model_copy(update={"output": options.output})
        if options.evaluate is not None:
            evaluate_again(options.evaluate, settings, note=options.note, console=console)
            return 0
        directory = run(settings, console=console, command=f"python -m experiments.train --config {_told(options.config)}")
    except ValueError as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
