"""Lanes on Ray actors play what they play in one process, however many actors there are and whichever of them die."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import ray
from ray import cloudpickle
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from agents.settings import PPOSettings
from agents.training import train_ppo
from envs.observation_vector import DIM, HIGH, LOW
from experiments.ray_rollouts import RayVecEnv

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")]
Results = list[tuple[object, ...]]


class Walk(gym.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """A random walk that actions push; what it pays depends on all of them. An episode takes five steps."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(LOW, HIGH, (DIM,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._at = np.zeros(DIM)
        self._steps = 0

    @property
    def pid(self) -> int:
        return os.getpid()

    def distance(self, scale: float) -> float:
        return float(scale * np.abs(self._at).sum())

    def _look(self) -> npt.NDArray[np.float32]:
        return np.clip(self._at, LOW, HIGH).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._at, self._steps = self.np_random.normal(size=DIM), 0
        return self._look(), {}

    def step(self, action: npt.NDArray[np.float32]) -> Any:
        self._at = 0.9 * self._at + 0.1 * self.np_random.normal(size=DIM) + 0.1 * float(np.sum(action))
        self._steps += 1
        return self._look(), -float(np.abs(self._at).sum()), False, self._steps == 5, {}


def walks(count: int) -> DummyVecEnv:
    return DummyVecEnv([Walk] * count)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    started = not ray.is_initialized()
    if started:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
    yield
    if started:
        ray.shutdown()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]


def kill(environments: VecEnv, lane: int) -> None:
    (pid,) = environments.get_attr("pid", lane)
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)


def play(environments: VecEnv, before: Callable[[int], None] = lambda step: None) -> Results:
    """Two segments of twelve steps."""
    rng, seen = np.random.default_rng(0), Results()
    for segment in range(2):
        environments.seed(100 + segment)
        before(12 * segment)
        seen.append((np.asarray(environments.reset()).tobytes(),))
        for step in range(1, 12):
            before(12 * segment + step)
            observations, rewards, dones, infos = environments.step(rng.uniform(-1, 1, (3, 3)).astype(np.float32))
            last = [info["terminal_observation"].tobytes() for info in infos if "terminal_observation" in info]
            cut = [info["TimeLimit.truncated"] for info in infos]
            seen.append((np.asarray(observations).tobytes(), rewards.tobytes(), dones.tobytes(), last, cut))
    environments.close()
    return seen


def test_how_many_actors_there_are_and_which_die_does_not_matter() -> None:
    expected = play(walks(3))
    assert play(RayVecEnv(walks, 3, actors=1)) == expected
    assert play(RayVecEnv(walks, 3, actors=5)) == expected
    lines: list[str] = []
    mortal = RayVecEnv(walks, 3, actors=2, say=lines.append)

    def killing(step: int) -> None:
        if step in (7, 20):
            kill(mortal, 0)
        elif step in (12, 21):
            kill(mortal, 2)

    assert play(mortal, killing) == expected
    assert len(lines) == 4
    assert lines[0] == "the rollout actor of lanes 0 to 1 died; another replays the 6 steps since the segment began"


def test_a_training_whose_actors_die_gives_the_weights_of_one_in_one_process() -> None:
    settings = PPOSettings(total_steps=96, n_envs=3, n_steps=8, batch_size=24, n_epochs=2, hidden=(8,), segment=2)
    expected = train_ppo(walks, settings, seed=3)
    made: list[RayVecEnv] = []

    def make(lanes: int) -> RayVecEnv:
        made.append(RayVecEnv(walks, lanes, actors=2))
        return made[0]

    killed = train_ppo(make, settings, seed=3, progress=lambda steps, _: kill(made[0], steps % 3) if steps == 48 else None)
    theirs = expected.network.tensors()
    assert all(np.array_equal(value, theirs[name]) for name, value in killed.network.tensors().items())
    assert killed.learning_curve == expected.learning_curve


def test_lanes_can_be_asked_but_not_changed_and_a_reset_needs_a_seed() -> None:
    environments = RayVecEnv(walks, 3, actors=2)
    with pytest.raises(RuntimeError, match=r"expected seed\(\) before each reset"):
        environments.reset()
    environments.seed(1)
    environments.reset()
    one, two, three = environments.env_method("distance", 1.0)
    assert environments.env_method("distance", scale=2.0, indices=[2, 0]) == [2.0 * three, 2.0 * one]
    assert len({one, two, three}) == 3
    with pytest.raises(NotImplementedError, match="would be lost with an actor"):
        environments.set_attr("x", 1)
    environments.close()


class Broken(DummyVecEnv):
    """Takes its process with it."""

    def seed(self, seed: int | None = None) -> Any:
        os._exit(1)


def test_actors_that_die_again_and_again_end_it() -> None:
    environments = RayVecEnv(lambda lanes: Broken([Walk] * lanes), 2, actors=1, deaths=2)
    environments.seed(1)
    with pytest.raises(RuntimeError, match="3 actors died since the last reset"):
        environments.reset()
    environments.close()


def test_nothing_to_play_on_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one lane and one actor, got 0 and 2"):
        RayVecEnv(walks, 0)
