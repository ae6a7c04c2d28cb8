"""Training repeats from its seed, starts at the curve's optimum, learns, resumes bit for bit; its network acts as was trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from agents.checkpoint import CheckpointError
from agents.imitation import Demonstrations, Imitator
from agents.network import Network, RecurrentNetwork
from agents.settings import PPOSettings
from agents.training import Trained, TrainingDiverged, train_ppo
from envs.observation_vector import DIM, HIGH, LOW

SMALL = PPOSettings(total_steps=256, n_envs=2, n_steps=64, batch_size=64, n_epochs=4, hidden=(16, 16))
SHORT = PPOSettings(total_steps=192, n_envs=2, n_steps=16, batch_size=16, n_epochs=2, hidden=(8,), segment=2, lstm_size=4)
"""Six rollouts in three segments."""


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


class KilledError(Exception):
    """Stands for the end of the process."""


def targets(count: int) -> DummyVecEnv:
    return DummyVecEnv([Target] * count)


def observations(count: int = 64) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).uniform(LOW, HIGH, (count, DIM)).astype(np.float32)


def actions(trained: Trained) -> npt.NDArray[np.float32]:
    state, given = trained.network.initial(), []
    for row in observations():
        action, state = trained.network.step(row, state)
        given.append(action)
    return np.stack(given)


def same_weights(one: Trained, two: Trained) -> bool:
    theirs = two.network.tensors()
    return all(np.array_equal(value, theirs[name]) for name, value in one.network.tensors().items())


def killed_after(rollouts: int) -> Callable[[Mapping[str, float | None]], None]:
    seen = []

    def observe(entry: Mapping[str, float | None]) -> None:
        seen.append(entry)
        if len(seen) == rollouts:
            raise KilledError

    return observe


def test_the_same_seed_gives_the_same_weights_and_another_gives_others() -> None:
    first, again, other = (train_ppo(targets, SMALL, seed=seed) for seed in (3, 3, 4))
    assert same_weights(first, again)
    assert not same_weights(first, other)


def test_numpy_inference_is_what_torch_computes() -> None:
    trained = train_ppo(targets, SMALL, seed=0)
    assert isinstance(trained.network, Network)
    assert [weight.shape for weight, _ in trained.network.layers] == [(16, DIM), (16, 16), (3, 16)]
    assert trained.parity < 1e-5
    assert trained.probes.shape == (32, DIM)


def test_it_starts_at_the_curves_optimum_and_learns_where_it_pays_to_go() -> None:
    still = SMALL.model_copy(update={"learning_rate": 1e-12})
    start = actions(train_ppo(targets, still, seed=0))
    assert np.abs(start).max() < 0.1
    elsewhere = actions(train_ppo(targets, still.model_copy(update={"initial_action": (0.25, -0.5, 0.0)}), seed=0))
    assert elsewhere - [0.25, -0.5, 0.0] == pytest.approx(start, abs=1e-5)
    settings = SMALL.model_copy(update={"total_steps": 4096, "learning_rate": 3e-3, "log_std_init": -1.0})
    action = actions(train_ppo(targets, settings, seed=0)).mean(axis=0)
    target = np.array([0.5, -0.5, 0.0])
    assert np.linalg.norm(action - target) < 0.5 * np.linalg.norm(start.mean(axis=0) - target)


def test_progress_is_told_once_per_rollout() -> None:
    told: list[tuple[int, float]] = []
    train_ppo(targets, SMALL, seed=0, progress=lambda steps, reward: told.append((steps, reward)))
    assert [steps for steps, _ in told] == [128, 256]
    assert all(reward < 0 for _, reward in told)


def test_the_learning_curve_has_an_entry_per_update_and_the_rate_falls_to_its_end() -> None:
    trained = train_ppo(targets, SHORT.model_copy(update={"learning_rate": 6e-3, "learning_rate_end": 3e-3}), seed=0)
    assert [entry["steps"] for entry in trained.learning_curve] == [32, 64, 96, 128, 160, 192]
    rates = [entry["learning_rate"] for entry in trained.learning_curve]
    assert rates == pytest.approx([6e-3, 5.5e-3, 5e-3, 4.5e-3, 4e-3, 3.5e-3])
    assert trained.steps == 192
    assert all(entry["kl"] is not None and entry["entropy"] is not None for entry in trained.learning_curve)


def test_the_reward_told_is_the_environments_own_not_the_one_with_values_added_at_an_episodes_end() -> None:
    given: list[float] = []

    class Recording(DummyVecEnv):
        def step_wait(self) -> Any:
            result = super().step_wait()
            given.append(float(np.mean(result[1])))
            return result

    trained = train_ppo(lambda count: Recording([Target] * count), SMALL, seed=0)
    assert [entry["reward"] for entry in trained.learning_curve] == pytest.approx([np.mean(given[:64]), np.mean(given[64:])])


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_training_that_is_killed_and_resumed_gives_the_same_bits(recurrent: bool, after: int, tmp_path: Path) -> None:
    settings = SHORT.model_copy(update={"recurrent": recurrent})
    undisturbed = train_ppo(targets, settings, seed=7)
    with pytest.raises(KilledError):
        train_ppo(targets, settings, seed=7, checkpoints=tmp_path, observe=killed_after(after))
    told: list[int] = []
    resumed = train_ppo(targets, settings, seed=7, checkpoints=tmp_path, progress=lambda steps, _: told.append(steps))
    done = after // 2 * 64
    assert told == [*([done] if done else []), *range(done + 32, 193, 32)]
    assert same_weights(undisturbed, resumed)
    assert np.array_equal(actions(undisturbed), actions(resumed))
    assert undisturbed.learning_curve == resumed.learning_curve
    assert np.array_equal(undisturbed.probes, resumed.probes)
    for name in ("mean", "std", "min", "max"):
        assert np.array_equal(getattr(undisturbed.statistics, name), getattr(resumed.statistics, name))


def test_a_finished_training_is_read_back_without_a_step(tmp_path: Path) -> None:
    first = train_ppo(targets, SHORT, seed=7, checkpoints=tmp_path)
    told: list[int] = []
    again = train_ppo(targets, SHORT, seed=7, checkpoints=tmp_path, progress=lambda steps, _: told.append(steps))
    assert told == [192]
    assert same_weights(first, again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000003"]


def test_other_settings_do_not_resume_it_and_the_difference_is_shown(tmp_path: Path) -> None:
    train_ppo(targets, SHORT, seed=7, checkpoints=tmp_path, identity={"task": {"radius": [1, 2]}})
    other = SHORT.model_copy(update={"gamma": 0.5})
    with pytest.raises(CheckpointError, match=r"ppo\.gamma was 0\.97, is 0\.5.*task\.radius was \[1, 2\], is \[3, 2\].*--fresh"):
        train_ppo(targets, other, seed=7, checkpoints=tmp_path, identity={"task": {"radius": [3, 2]}})


def test_torch_keeps_to_one_thread_whatever_the_environments_do() -> None:
    class Threaded(DummyVecEnv):
        def step_wait(self) -> Any:
            torch.set_num_threads(2)  # as numba's pool does when it starts
            return super().step_wait()

    seen: list[int] = []
    train_ppo(lambda count: Threaded([Target] * count), SMALL, seed=0, observe=lambda entry: seen.append(torch.get_num_threads()))
    assert seen == [1, 1]


def test_a_recurrent_policy_acts_in_numpy_as_in_torch() -> None:
    trained = train_ppo(targets, SHORT.model_copy(update={"recurrent": True, "learning_rate": 1e-2}), seed=1)
    assert isinstance(trained.network, RecurrentNetwork)
    assert trained.network.units == 4
    assert trained.parity < 1e-5
    assert trained.probes.shape == (16, DIM)


def test_a_warm_start_acts_as_was_shown_before_ppo_goes_on() -> None:
    seen = np.random.default_rng(2).uniform(LOW, HIGH, (512, DIM)).astype(np.float32)
    shown = np.where(seen[:, :3] > (LOW + HIGH)[:3] / 2, 0.8, -0.8).astype(np.float32)
    weights = np.ones(512, np.float32)
    shown[::7], weights[::7] = 1.0, 0.0  # what weighs nothing is not learned
    settings = SMALL.model_copy(update={"learning_rate": 1e-9, "warm_start_epochs": 300, "warm_start_learning_rate": 3e-3})
    trained = train_ppo(targets, settings, seed=0, warm_start=Demonstrations(seen, shown, weights))
    acted = np.stack([trained.network.step(row, ())[0] for row in seen])
    assert np.mean(np.sign(acted) == np.sign(np.where(seen[:, :3] > (LOW + HIGH)[:3] / 2, 1.0, -1.0))) > 0.9


@pytest.mark.parametrize("changes", [{}, {"recurrent": True}, {"hold_noise": 4}, {"learning_rate": 10.0}])
def test_a_training_that_diverges_says_at_which_update_and_what_to_do(changes: dict[str, Any]) -> None:
    settings = SHORT.model_copy(update={"learning_rate": 1e30, **changes})
    with pytest.raises(TrainingDiverged) as caught:
        train_ppo(targets, settings, seed=0)
    rate = f"{settings.learning_rate:g}"
    assert str(caught.value) == (
        "training diverged in update 1 of 6, weights or actions are no longer finite numbers: "
        f"lower ppo.learning_rate (it was {rate} in this update, {rate} in the first)"
    )


class Overflowing(Target):
    """Pays what is no number after so many steps."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def step(self, action: npt.NDArray[np.float32]) -> Any:
        self._steps += 1
        observation, reward, *rest = super().step(action)
        return observation, np.nan if self._steps > 40 else reward, *rest


def test_checkpoints_from_before_a_training_diverged_are_kept(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match=r"update 1 of 6, .*; no checkpoint had been made yet$"):
        train_ppo(targets, SHORT.model_copy(update={"learning_rate": 1e30}), seed=0, checkpoints=tmp_path / "none")
    kept = rf"the checkpoint after update 2 is kept \({tmp_path}\).*begin anew \(--fresh\)$"
    with pytest.raises(TrainingDiverged, match=rf"update 3 of 6, .*lower ppo\.learning_rate.*; {kept}"):
        train_ppo(lambda count: DummyVecEnv([Overflowing] * count), SHORT, seed=0, checkpoints=tmp_path)
    assert train_ppo(targets, SHORT, seed=0, checkpoints=tmp_path).steps == 192


def test_an_environments_own_fault_is_not_taken_for_divergence() -> None:
    class Faulty(Target):
        def step(self, action: npt.NDArray[np.float32]) -> Any:
            raise ValueError("no such trace")

    with pytest.raises(ValueError, match=r"^no such trace$"):
        train_ppo(lambda count: DummyVecEnv([Faulty] * count), SHORT, seed=0)


def test_imitation_that_diverges_is_told() -> None:
    shown = Demonstrations(observations(), np.ones((64, 3), np.float32), np.ones(64, np.float32))
    settings = SHORT.model_copy(update={"warm_start_learning_rate": 1e30})
    with pytest.raises(TrainingDiverged, match=r"imitation diverged.*lower ppo\.warm_start_learning_rate \(it was 1e\+30\)"):
        train_ppo(targets, settings, seed=0, warm_start=shown)


def test_a_recurrent_policy_has_no_warm_start() -> None:
    shown = Demonstrations(observations(), np.zeros((64, 3), np.float32), np.ones(64, np.float32))
    with pytest.raises(ValueError, match="expected none with recurrent"):
        train_ppo(targets, SHORT.model_copy(update={"recurrent": True}), seed=0, warm_start=shown)


def test_a_warm_start_is_part_of_what_a_checkpoint_belongs_to(tmp_path: Path) -> None:
    shown = Demonstrations(observations(), np.zeros((64, 3), np.float32), np.ones(64, np.float32))
    settings = SHORT.model_copy(update={"warm_start_epochs": 1})
    train_ppo(targets, settings, seed=0, checkpoints=tmp_path, warm_start=shown)
    with pytest.raises(CheckpointError, match="warm_start was"):
        train_ppo(targets, settings, seed=0, checkpoints=tmp_path)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    log, checkpoints = tmp_path / "log", tmp_path / "checkpoints"
    with pytest.raises(KilledError):
        train_ppo(targets, SHORT, seed=7, checkpoints=checkpoints, log=log, observe=killed_after(3))
    train_ppo(targets, SHORT, seed=7, checkpoints=checkpoints, log=log)
    events = EventAccumulator(str(log)).Reload()
    shown = {"rollout/reward", "train/entropy", "train/approx_kl", "train/explained_variance", "train/learning_rate"}
    assert shown | {"time/steps_per_second"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("rollout/reward")] == [32, 64, 96, 128, 160, 192]


class Beaten(DummyVecEnv):
    """Notes whom its rewards are to be counted against."""

    def __init__(self, count: int) -> None:
        super().__init__([Target] * count)
        self.references: list[Imitator] = []

    def beat(self, reference: Imitator) -> None:
        self.references.append(reference)


def shown() -> Demonstrations:
    seen = observations(256)
    return Demonstrations(seen, np.tile(np.array([[0.25, 0.75, -0.5]], np.float32), (256, 1)), np.ones(256, np.float32))


def test_ppo_can_be_told_to_beat_what_imitation_gave_also_after_a_resume(tmp_path: Path) -> None:
    settings = SHORT.model_copy(update={"beat": "imitation", "critic_rollouts": 1})
    made: list[Beaten] = []

    def environments(count: int) -> Beaten:
        made.append(Beaten(count))
        return made[-1]

    whole = train_ppo(environments, settings, seed=1, warm_start=shown())
    with pytest.raises(KilledError):
        train_ppo(environments, settings, seed=1, warm_start=shown(), checkpoints=tmp_path, observe=killed_after(3))
    resumed = train_ppo(environments, settings, seed=1, warm_start=shown(), checkpoints=tmp_path)
    assert same_weights(whole, resumed)
    seen = observations(5)
    acted = [environment.references[-1].act(seen) for environment in made]
    assert all(len(environment.references) == 1 for environment in made)
    assert np.array_equal(acted[0], acted[1])
    assert np.array_equal(acted[0], acted[2])
    # What one lane does depends on no other.
    assert np.array_equal(made[0].references[0].act(seen[2:3])[0], acted[0][2])


def test_at_first_only_the_value_function_learns_after_imitation() -> None:
    imitation = SHORT.model_copy(update={"critic_rollouts": SHORT.rollouts})
    shorter = imitation.model_copy(update={"total_steps": SHORT.rollout})
    assert same_weights(
        train_ppo(targets, imitation, seed=1, warm_start=shown()), train_ppo(targets, shorter, seed=1, warm_start=shown())
    )
    moved = train_ppo(targets, SHORT.model_copy(update={"critic_rollouts": 1}), seed=1, warm_start=shown())
    assert not same_weights(moved, train_ppo(targets, shorter, seed=1, warm_start=shown()))


def test_without_imitation_the_actor_learns_from_the_first_update() -> None:
    settings = SHORT.model_copy(update={"critic_rollouts": SHORT.rollouts})
    assert same_weights(train_ppo(targets, settings, seed=1), train_ppo(targets, SHORT, seed=1))


def test_exploration_that_is_held_repeats_from_its_seed_and_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = SHORT.model_copy(update={"hold_noise": 8, "log_std_init": -2.0})
    whole = train_ppo(targets, settings, seed=1)
    with pytest.raises(KilledError):
        train_ppo(targets, settings, seed=1, checkpoints=tmp_path, observe=killed_after(3))
    assert same_weights(whole, train_ppo(targets, settings, seed=1, checkpoints=tmp_path))
    assert not same_weights(whole, train_ppo(targets, SHORT, seed=1))
