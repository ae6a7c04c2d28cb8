"""The vector environment is the single one many times over, to the last bit, and what stable-baselines3 expects of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from envs.cache_env import DOMAIN, FIXED, CacheTuningEnv, Scenario, make_task
from envs.lanes import INFO_KEYS
from envs.observation import Observation
from envs.observation_vector import DIM
from envs.task import Task
from envs.vec_env import CacheTuningVecEnv, LaneInfo
from serving.knobs import Knobs, KnobSpace
from tests.envs.test_cache_env import CONFIG, SPACE, TRACE

LENGTH = 5
ARGUMENTS: dict[str, Any] = {"config": CONFIG, "interval": 5.0, "episode_length": LENGTH}


def task(**changes: Any) -> Task:
    return make_task(TRACE, **{**ARGUMENTS, **changes})


def actions(steps: int, lanes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Each lane's own actions, whatever the number of lanes."""
    each = [np.random.default_rng(100 + lane).uniform(-1, 1, (steps, 3)).astype(np.float32) for lane in range(lanes)]
    return np.stack(each, axis=1)


def started(lanes: int, seed: int = 7, **changes: Any) -> tuple[CacheTuningVecEnv, np.ndarray[Any, Any]]:
    env = CacheTuningVecEnv(task(**changes), lanes)
    env.seed(seed)
    return env, env.reset()


@pytest.mark.parametrize(
    "changes",
    [{}, {"reward": "relative"}, {"reference": "hold"}, {"reference": lambda seen: seen.last_anchor or seen.knobs}],
    ids=["dollars", "relative", "hold", "function"],
)
def test_every_lane_is_the_single_environment_to_the_last_bit_over_several_episodes(changes: dict[str, Any]) -> None:
    lanes, steps = 3, 3 * LENGTH + 2
    taken = actions(steps, lanes)
    env, first = started(lanes, **changes)
    given = [env.step(each) for each in taken]
    for lane in range(lanes):
        single = CacheTuningEnv(TRACE, **{**ARGUMENTS, **changes})
        vector, info = single.reset(seed=7 + lane)
        assert first[lane].tobytes() == vector.tobytes()
        for step, (vectors, rewards, over, infos) in enumerate(given):
            vector, reward, terminated, truncated, info = single.step(taken[step, lane])
            seen = dict(infos[lane])
            assert not terminated
            assert rewards[lane] == reward
            assert over[lane] == truncated == seen.pop("TimeLimit.truncated")
            assert truncated == ((step + 1) % LENGTH == 0)
            if truncated:
                assert seen.pop("terminal_observation").tobytes() == vector.tobytes()
                vector, _ = single.reset()
            assert seen == info
            assert vectors[lane].tobytes() == vector.tobytes()


def test_episodes_that_end_at_different_times_restart_by_themselves_only() -> None:
    def draw(rng: np.random.Generator) -> Scenario:
        seconds = float(rng.uniform(12.0, 40.0))
        return Scenario(TRACE.slice(0, int(np.searchsorted(TRACE.time, seconds))), CONFIG, 5.0)

    many = CacheTuningVecEnv(make_task(scenarios=draw, episode_length=50), 4)
    many.seed(3)
    vectors = [many.reset()]
    taken = actions(14, 4)
    ends = []
    for each in taken:
        seen, _, over, _ = many.step(each)
        vectors.append(seen)
        ends.append(over)
    assert np.sum(ends, axis=0).min() > 0
    assert len({tuple(column) for column in np.array(ends).T}) == 4
    for lane in range(4):
        alone = CacheTuningVecEnv(make_task(scenarios=draw, episode_length=50), 1)
        alone.seed(3 + lane)
        assert alone.reset()[0].tobytes() == vectors[0][lane].tobytes()
        for step in range(14):
            assert alone.step(taken[step, [lane]])[0][0].tobytes() == vectors[step + 1][lane].tobytes()


def test_it_gives_what_stable_baselines_own_vector_of_single_environments_gives() -> None:
    env, first = started(2)
    dummy = DummyVecEnv([lambda: CacheTuningEnv(TRACE, **ARGUMENTS)] * 2)
    dummy.seed(7)
    np.testing.assert_array_equal(first, dummy.reset())
    assert env.reset_infos == dummy.reset_infos
    for each in actions(LENGTH + 1, 2):
        ours, theirs = env.step(each), dummy.step(each)
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1].astype(np.float32), theirs[1])
        np.testing.assert_array_equal(ours[2], theirs[2])
        for one, other in zip(ours[3], theirs[3], strict=True):
            assert one.keys() == other.keys()
            assert {**one, "terminal_observation": 0} == {**other, "terminal_observation": 0}
    assert env.observation_space == dummy.observation_space
    assert env.action_space == dummy.action_space


def test_a_seed_repeats_everything_and_without_one_the_random_numbers_go_on() -> None:
    env, first = started(2)
    second = env.reset()
    assert not np.array_equal(first, second)
    env.seed(7)
    np.testing.assert_array_equal(env.reset(), first)
    np.testing.assert_array_equal(env.reset(), second)
    assert not np.array_equal(started(2, seed=8)[1], first)


def test_what_was_handed_out_does_not_change_afterwards() -> None:
    env, first = started(2)
    kept = [first, *env.step(actions(1, 2)[0])]
    before = [first.copy(), *(np.copy(each) for each in kept[1:4])]
    observation = env.observation(1)
    assert observation.curve is not None
    hits = observation.curve.hits.copy()
    infos = [dict(info) for info in kept[4]]
    for each in actions(2 * LENGTH, 2):
        env.step(each)
    for one, other in zip(before, kept, strict=False):
        np.testing.assert_array_equal(one, other)
    assert [dict(info) for info in kept[4]] == infos
    np.testing.assert_array_equal(observation.curve.hits, hits)


def test_given_knobs_are_limited_like_an_action_and_may_differ_by_lane() -> None:
    env, _ = started(2, randomise=FIXED, initial=Knobs(1 << 20, 60.0))
    wanted = [Knobs(1 << 20, 60.0), Knobs(SPACE.max_size, SPACE.max_ttl, 0.5)]
    for _ in range(4):
        *_, infos = env.step_knobs(wanted)
    assert infos[0]["knobs"] == wanted[0].to_dict()
    assert infos[1]["knobs"]["cache_size"] > infos[0]["knobs"]["cache_size"]
    with pytest.raises(ValueError, match="expected knobs for 2 lanes, got 1"):
        env.step_knobs(wanted[:1])


def test_ppo_learns_on_it_and_its_wrappers_work() -> None:
    env = VecNormalize(VecMonitor(CacheTuningVecEnv(task(reward="relative"), 4)), norm_obs=False)
    model = PPO("MlpPolicy", env, n_steps=2 * LENGTH, batch_size=20, n_epochs=1, seed=0, device="cpu")
    model.learn(2 * 4 * 2 * LENGTH)
    assert model.num_timesteps == 80
    assert {info["l"] for info in model.ep_info_buffer or ()} == {LENGTH}


def test_training_twice_gives_the_same_weights() -> None:
    def weights() -> dict[str, Any]:
        model = PPO("MlpPolicy", CacheTuningVecEnv(task(), 2), n_steps=8, batch_size=16, n_epochs=1, seed=3, device="cpu")
        return dict(model.learn(32).policy.state_dict())

    one, other = weights(), weights()
    assert all(bool((one[name] == other[name]).all()) for name in one)


def test_info_is_made_when_it_is_read_and_behaves_like_a_dictionary() -> None:
    env, _ = started(1)
    *_, infos = env.step(actions(1, 1)[0])
    info: Any = infos[0]
    assert isinstance(info, LaneInfo)
    assert info.get("episode") is None
    assert not info._filled
    assert set(INFO_KEYS) <= set(info)
    assert info["TimeLimit.truncated"] is False
    info["episode"] = {"r": 1.0}
    assert info.get("episode") == {"r": 1.0}
    assert info.copy() == dict(info)
    del info["episode"]
    assert "episode" not in info
    assert repr(info.copy()) == repr(info)
    terms = {name: value for name, value in info["cost"].items() if name != "total"}
    assert sum(terms.values()) == pytest.approx(info["cost"]["total"])


def test_lanes_can_be_asked_and_marked() -> None:
    env, first = started(3)
    observations = env.get_attr("observation")
    assert all(isinstance(each, Observation) for each in observations)
    np.testing.assert_array_equal([each.vector for each in observations], first)
    assert env.get_attr("knobs", [1]) == [observations[1].knobs]
    assert env.get_attr("space", 2) == [observations[2].space]
    assert set(observations[0].signals.hit_ratio_by_tier) == {"memory", "redis"}
    assert observations[0].signals.ghost is not None
    env.set_attr("mark", 5, indices=[0, 2])
    assert env.get_attr("mark", [0, 2]) == [5, 5]
    assert not env.has_attr("mark")
    assert env.has_attr("render_mode")
    assert env.env_method("__repr__", indices=0)
    assert env.env_is_wrapped(Monitor) == [False] * 3
    with pytest.raises(AttributeError):
        env.env_method("reset")
    env.close()
    with pytest.raises(RuntimeError, match="expected reset"):
        env.step(actions(1, 3)[0])


def test_prices_and_bounds_differ_between_lanes_but_the_shape_of_the_grid_may_not() -> None:
    env, _ = started(4)
    spaces: list[KnobSpace] = env.get_attr("space")
    assert len({space.max_size for space in spaces}) == 4

    def draw(rng: np.random.Generator) -> Scenario:
        return Scenario(TRACE, replace(CONFIG, space=replace(SPACE, size_steps=int(rng.integers(8, 16)))), 5.0)

    with pytest.raises(ValueError, match="lanes that are stepped together need grids of one shape"):
        CacheTuningVecEnv(make_task(scenarios=draw), 8).reset()


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="num_envs: expected at least 1 lane, got 0"):
        CacheTuningVecEnv(task(), 0)
    env = CacheTuningVecEnv(task(), 2)
    with pytest.raises(RuntimeError, match="expected reset"):
        env.step(actions(1, 2)[0])
    env.reset()
    with pytest.raises(RuntimeError, match="expected step_async"):
        env.step_wait()
    with pytest.raises(ValueError, match="each of 2 lanes"):
        env.step(np.zeros((3, 3), np.float32))
    bad = np.zeros((2, 3), np.float32)
    bad[1, 0] = np.nan
    with pytest.raises(ValueError, match="lane 1: expected three finite numbers"):
        env.step(bad)


def test_an_absent_ghost_leaves_the_lane_holding() -> None:
    env, first = started(2, config=replace(CONFIG, ghost_keys=0), randomise=replace(DOMAIN, absent=0.0))
    assert first.shape == (2, DIM)
    before = env.get_attr("knobs")
    env.step(np.ones((2, 3), np.float32))
    assert env.get_attr("knobs") == before
    assert not env.observation(0).valid("anchor_size")
    assert not env.observation(0).valid("regret")


class Steady:
    """Acts in the same way whatever it sees."""

    def __init__(self, action: tuple[float, float, float]) -> None:
        self.action = np.array(action, np.float32)

    def act(self, vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.tile(self.action, (len(vectors), 1))


def test_whoever_acts_as_the_reference_does_gains_and_loses_nothing() -> None:
    same = (0.5, -0.25, 0.25)
    environment, _ = started(3, reference=Steady(same))
    moved = np.zeros(3)
    for _ in range(8):
        _, rewards, _, _ = environment.step(np.tile(np.array(same, np.float32), (3, 1)))
        assert np.all(rewards == 0.0)
    for _ in range(8):
        _, rewards, _, _ = environment.step(np.tile(np.array([-1.0, -1.0, 0.0], np.float32), (3, 1)))
        moved += np.abs(rewards)
    assert np.all(moved > 0)


def test_another_reference_counts_from_the_next_reset() -> None:
    same = (0.5, -0.25, 0.25)
    environment, _ = started(2)
    environment.beat(Steady(same))
    environment.seed(7)
    environment.reset()
    for _ in range(6):
        _, rewards, _, _ = environment.step(np.tile(np.array(same, np.float32), (2, 1)))
        assert np.all(rewards == 0.0)
