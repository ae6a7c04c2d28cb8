"""One training from settings to artifact, wherever its environments run: here, or on the actors of a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from agents import artifact
from agents.artifact import Artifact
from agents.checkpoint import discard_checkpoints
from agents.imitation import Demonstrations
from agents.ppo import PPOPolicy
from agents.training import Progress, train_ppo
from experiments.train_settings import Run
from experiments.training_card import EvaluationProgress, evaluation, versions

CURVE_POINTS = 64
"""Most points of a learning curve on a card."""

MakeEnvironments = Callable[[int], VecEnv]


def train_run(
    run: Run,
    make_environments: MakeEnvironments,
    *,
    command: str,
    say: Callable[[str], None],
    progress: Progress | None = None,
    evaluating: EvaluationProgress | None = None,
) -> Path:
    """Train, evaluate on what was held out and save; go on from the last checkpoint where there is one.

    Args:
        run: What to train.
        make_environments: Makes so many lanes of its task.
        command: The command that makes the artifact again, for its card.
        say: Prints a line about what goes on.
        progress: See :data:`agents.training.Progress`.
        evaluating: See :data:`experiments.training_card.EvaluationProgress`.

    Returns:
        The artifact's directory.

    Raises:
        agents.checkpoint.CheckpointError: If the checkpoints are another training's.
        agents.training.TrainingDiverged: If weights or actions are no longer finite numbers.
        envs.workloads.TraceError: If a trace cannot be read.
        agents.extraction.ParityError: If the saved policy would not act as the trained one.
    """
    if is_trained(run):
        say(f"{run.name}: trained already by this code with these settings; --fresh trains it anew")
        return run.directory
    settings = run.settings
    trained = train_ppo(
        make_environments,
        settings.ppo,
        seed=run.seed,
        progress=_starting(run, say, progress),
        checkpoints=run.checkpoints,
        log=run.log,
        warm_start=Demonstrations.load(settings.warm_start) if settings.warm_start is not None else None,
        identity=run.identity,
    )
    say(f"{run.name}: trained, {trained.steps:,} steps in {trained.seconds:,.0f} s; evaluating")
    policy = PPOPolicy(Artifact(run.name, trained.network, settings.actions, settings.hidden, trained.statistics))
    found = evaluation(settings, policy, evaluating)
    directory = artifact.save(
        run.directory,
        name=run.name,
        network=trained.network,
        actions=settings.actions,
        hidden=settings.hidden,
        statistics=trained.statistics,
        probes=trained.probes,
        training={
            "command": command,
            "seed": run.seed,
            "variant": run.variant,
            "steps": trained.steps,
            "seconds": round(trained.seconds, 1),
            "parity": trained.parity,
            "run": run.digest,
            "versions": versions(),
            "settings": settings.portable(),
            "learning_curve": _thinned(trained.learning_curve),
        },
        evaluation={**found, "versions": versions()},
    )
    discard_checkpoints(run.checkpoints)
    say(f"{run.name}: {found['verdict']}")
    return directory


def is_trained(run: Run) -> bool:
    """Whether the run's artifact is there, made by this code with these settings."""
    try:
        card = json.loads((run.directory / artifact.CARD).read_bytes())
        return bool(card["training"]["run"] == run.digest)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def forget(run: Run) -> None:
    """Remove what would keep a run from being trained anew: its checkpoints, and the digest by which it counts as trained."""
    discard_checkpoints(run.checkpoints)
    (run.directory / artifact.CARD).unlink(missing_ok=True)


def _starting(run: Run, say: Callable[[str], None], progress: Progress | None) -> Progress:
    """Say at the first progress where a training that was begun before goes on from, then pass everything on."""
    begun = run.checkpoints.is_dir() and any(path.name.isdecimal() for path in run.checkpoints.iterdir())

    def tell(steps: int, reward: float) -> None:
        nonlocal begun
        if begun:
            say(f"{run.name}: goes on from its checkpoint at {steps:,} of {_total(run):,} steps")
        begun = False
        if progress is not None:
            progress(steps, reward)

    return tell


def _total(run: Run) -> int:
    return run.settings.ppo.rollouts * run.settings.ppo.rollout


def _thinned(curve: Sequence[Mapping[str, float | None]]) -> list[dict[str, Any]]:
    chosen = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), CURVE_POINTS)).astype(int))
    return [
        {key: float(f"{value:.6g}") if value is not None else None for key, value in curve[place].items()} for place in chosen
    ]
