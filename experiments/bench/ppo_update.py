"""How long one PPO update takes: 512 steps into the rollout buffer, 10 epochs over them, logging."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from agents.settings import PPOSettings
from agents.training import train_ppo
from experiments.bench.result import BenchResult
from experiments.train_settings import TrainSettings
from experiments.training_task import make_lanes

GOAL = 0.8
"""Seconds: what the article's update takes."""

STEPS = 512
LANES = 8


def run(updates: int = 12, *, seed: int = 0) -> BenchResult:
    """Train for some updates of 512 steps and 10 epochs, with both profiles, small minibatches, and an LSTM.

    The environments are those of ``workload: sessions``, in this process; events are written for TensorBoard as in any training.

    Args:
        updates: Updates for each; the first is not counted.
        seed: Of all.
    """
    common: dict[str, Any] = {"n_envs": LANES, "n_steps": STEPS // LANES, "n_epochs": 10, "total_steps": STEPS * updates}
    contestants = {
        "default": PPOSettings(**common),
        "article": PPOSettings(**common, profile="article"),
        "default, minibatches of 64": PPOSettings(**common, batch_size=64),
        "default, recurrent": PPOSettings(**common, recurrent=True),
    }
    rows = [_row(name, settings, seed) for name, settings in contestants.items()]
    return BenchResult(
        "ppo-update",
        rows,
        GOAL / max(row["update"] for row in rows[:2]),
        "cachepilot bench ppo-update",
        f"Seconds, medians. An update: {STEPS} steps handed over to the rollout buffer, advantages, 10 epochs, logging. Goal, "
        f"and the article's own figure, as it states it: {GOAL:g} s; ratio: that over the slower profile's by the clock. steps: "
        f"stepping the {LANES} simulated caches, each beside its reference and ghost. cpu: this thread's own CPU time, which "
        "other processes on the machine do not lengthen.",
    )


def _row(name: str, settings: PPOSettings, seed: int) -> dict[str, Any]:
    seen: list[Mapping[str, float | None]] = []

    def environments(lanes: int) -> VecEnv:
        return make_lanes(TrainSettings(), lanes)

    with tempfile.TemporaryDirectory() as folder:
        train_ppo(environments, settings, seed=seed, log=Path(folder), observe=seen.append)

    def median(key: str) -> float:
        return float(np.median([entry[key] or 0.0 for entry in seen[1:]]))

    return {
        "profile": name,
        "batch": min(settings.batch_size, settings.rollout),
        "update": median("update_seconds"),
        "update_cpu": median("update_cpu_seconds"),
        "steps": median("rollout_seconds"),
        "steps_cpu": median("rollout_cpu_seconds"),
        "article": GOAL,
    }
