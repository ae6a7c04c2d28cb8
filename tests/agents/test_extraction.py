"""A network that acts otherwise than the trained policy is refused."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from agents.extraction import ParityError, check_parity, extract
from agents.network import Network
from envs.observation_vector import DIM, HIGH, LOW


class Still(gym.Env[object, object]):
    observation_space = gym.spaces.Box(LOW, HIGH, (DIM,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)


@pytest.mark.parametrize("shift", [0.01, np.nan])
def test_a_difference_from_torch_is_refused(shift: float) -> None:
    model = PPO("MlpPolicy", DummyVecEnv([Still]), device="cpu", seed=0)
    rows = np.random.default_rng(1).uniform(LOW, HIGH, (64, DIM)).astype(np.float32)
    network = extract(model)
    assert check_parity(model, network, rows) < 1e-5
    assert isinstance(network, Network)
    layers = [(weight.copy(), bias.copy()) for weight, bias in network.layers]
    layers[-1][1][0] += shift
    with pytest.raises(ParityError, match="differs from torch by"):
        check_parity(model, Network(layers), rows)
