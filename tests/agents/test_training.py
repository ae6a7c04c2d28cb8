"""Training repeats from its seed, starts at the curve's optimum, learns, and what is saved acts as what was trained."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from agents.artifact import Network
from agents.settings import PPOSettings
from agents.training import ParityError, check_parity, extract, train_ppo
from envs.observation import DIM, HIGH, LOW

SMALL = PPOSettings(total_steps=256, n_envs=2, n_steps=64, batch_size=64, n_epochs=4, hidden=(16, 16))


class Target(gym.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """Pays most for the action (0.5, -0.5, 0)."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(LOW, HIGH, (DIM,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._left = 0

    def _look(self) -> npt.NDArray[np.float32]:
        return self.np_random.uniform(LOW, HIGH).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._left = 8
        return self._look(), {}

    def step(self, action: npt.NDArray[np.float32]) -> Any:
        self._left -= 1
        return self._look(), -float(np.sum((action - np.array([0.5, -0.5, 0.0])) ** 2)), False, self._left == 0, {}


def targets(count: int) -> DummyVecEnv:
    return DummyVecEnv([Target] * count)


def observations(count: int = 64) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).uniform(LOW, HIGH, (count, DIM)).astype(np.float32)


def test_the_same_seed_gives_the_same_weights_and_another_gives_others() -> None:
    def weights(seed: int) -> list[npt.NDArray[np.float32]]:
        return [layer[0] for layer in extract(train_ppo(targets, SMALL, seed=seed)).layers]

    first, again, other = weights(3), weights(3), weights(4)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_numpy_inference_is_what_torch_computes() -> None:
    model = train_ppo(targets, SMALL, seed=0)
    network = extract(model)
    assert [weight.shape for weight, _ in network.layers] == [(16, DIM), (16, 16), (3, 16)]
    assert check_parity(model, network, observations()) < 1e-5


def test_a_difference_from_torch_is_refused() -> None:
    model = train_ppo(targets, SMALL, seed=0)
    layers = [(weight.copy(), bias.copy()) for weight, bias in extract(model).layers]
    layers[-1][1][0] += 0.01
    with pytest.raises(ParityError, match="differs from torch by"):
        check_parity(model, Network(layers), observations())


def test_it_starts_at_the_curves_optimum_and_learns_where_it_pays_to_go() -> None:
    still = extract(train_ppo(targets, SMALL.model_copy(update={"learning_rate": 1e-12}), seed=0))
    start = np.stack([still(row) for row in observations()])
    assert np.abs(start).max() < 0.1
    moved = SMALL.model_copy(update={"learning_rate": 1e-12, "initial_action": (0.25, -0.5, 0.0)})
    elsewhere = extract(train_ppo(targets, moved, seed=0))
    assert np.stack([elsewhere(row) for row in observations()]) - [0.25, -0.5, 0.0] == pytest.approx(start, abs=1e-5)
    settings = SMALL.model_copy(update={"total_steps": 4096, "learning_rate": 3e-3, "log_std_init": -1.0})
    learned = extract(train_ppo(targets, settings, seed=0))
    action = np.stack([learned(row) for row in observations()]).mean(axis=0)
    target = np.array([0.5, -0.5, 0.0])
    assert np.linalg.norm(action - target) < 0.5 * np.linalg.norm(start.mean(axis=0) - target)


def test_progress_is_told_once_per_rollout() -> None:
    told: list[tuple[int, float]] = []
    train_ppo(targets, SMALL, seed=0, progress=lambda steps, reward: told.append((steps, reward)))
    assert [steps for steps, _ in told] == [128, 256]
    assert all(reward < 0 for _, reward in told)
