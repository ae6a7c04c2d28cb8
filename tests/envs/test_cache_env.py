"""The simulated environment: a proper Gymnasium environment that repeats to the bit and pays for beating the reference only."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.action import MAX_STEPS
from envs.cache_env import DOMAIN, FIXED, CacheTuningEnv, Randomisation, Scenario, make_task
from envs.objective import Prices
from envs.observation_vector import DIM
from envs.simulator import SimConfig
from envs.task import LOADS
from envs.workloads.trace import Trace
from serving.knobs import Knobs, KnobSpace

SPACE = KnobSpace(min_size=1 << 17, max_size=1 << 23, min_ttl=2.0, max_ttl=300.0)
CONFIG = SimConfig(space=SPACE, prices=Prices(time_scale=500.0), staleness_half_life=200.0, ghost_keys=1024)


def zipf(seed: int = 0, seconds: float = 120.0, rate: float = 20.0, keys: int = 800) -> Trace:
    rng = np.random.default_rng(seed)
    count = int(seconds * rate)
    weights = np.arange(1, keys + 1) ** -0.9
    key = rng.choice(keys, count, p=weights / weights.sum()).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    output = (16 + key % np.uint64(300)).astype(np.int32)
    return Trace(
        "zipf", np.sort(rng.uniform(0.0, seconds, count)), key, 4 * output.astype(np.int64) + 300, np.full(count, -1),
        np.full(count, 20, np.int32), output,
    )  # fmt: skip


TRACE = zipf()


def make(**changes: Any) -> CacheTuningEnv:
    arguments: dict[str, Any] = {"trace": TRACE, "config": CONFIG, "interval": 5.0, "episode_length": 8}
    return CacheTuningEnv(**{**arguments, **changes})


def play(env: CacheTuningEnv, seed: int, actions: Any = None) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(99)
    vector, info = env.reset(seed=seed)
    steps: list[tuple[Any, ...]] = [(vector.tobytes(), info)]
    over = False
    while not over:
        action = rng.uniform(-1, 1, 3).astype(np.float32) if actions is None else np.array(actions, np.float32)
        vector, reward, terminated, over, info = env.step(action)
        assert not terminated
        steps.append((vector.tobytes(), reward, info))
    return steps


def test_gymnasium_accepts_it() -> None:
    check_env(gym.make("CacheTuning-v0", trace=TRACE, config=CONFIG, interval=5.0, episode_length=8).unwrapped)


def test_it_is_made_without_arguments_on_a_workload_of_its_own() -> None:
    env = gym.make("CacheTuning-v0")
    vector, info = env.reset(seed=0)
    assert env.observation_space.contains(vector)
    assert info["requests"] > 0
    assert math.isfinite(float(env.step(np.zeros(3, np.float32))[1]))


def test_stable_baselines_accepts_it() -> None:
    from stable_baselines3.common.env_checker import check_env as check

    check(make(), warn=True)


def test_importing_the_environments_imports_neither_torch_nor_ray_nor_numba() -> None:
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "import sys, envs, gymnasium; assert 'CacheTuning-v0' in gymnasium.registry; "
        "print([name for name in ('torch', 'ray', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"


def test_a_seed_repeats_an_episode_to_the_bit_and_another_does_not() -> None:
    first, again, other = play(make(), 5), play(make(), 5), play(make(), 6)
    assert first == again
    assert first != other


def test_a_second_episode_of_one_environment_repeats_as_well() -> None:
    env = make()
    play(env, 1)
    used = play(env, 5)
    assert used == play(make(), 5)


def test_observations_stay_in_their_space_and_rewards_are_finite() -> None:
    env = make(randomise=replace(DOMAIN, absent=0.5))
    for seed in range(4):
        for vector, *rest in play(env, seed):
            assert env.observation_space.contains(np.frombuffer(vector, np.float32))
            assert all(math.isfinite(item) for item in rest[:-1])


def test_the_anchor_itself_is_the_reference_and_earns_nothing() -> None:
    for _, reward, info in play(make(), 3, actions=[0.0, 0.0, 0.0])[1:]:
        assert reward == 0.0
        assert info["knobs"] == info["reference_knobs"]
        assert info["cost"] == info["reference_cost"]


def test_the_reward_is_what_the_reference_cost_less_what_we_cost_in_dollars_per_thousand_requests() -> None:
    rewards = []
    for _, reward, info in play(make(), 0, actions=[-1.0, -1.0, 0.0])[1:]:
        assert reward == info["reference_cost"]["total"] - info["cost"]["total"]
        assert reward == pytest.approx(1000 * (info["reference_dollars"] - info["dollars"]) / info["requests"])
        rewards.append(reward)
    assert any(rewards)


def test_the_relative_reward_is_what_was_saved_on_the_same_requests() -> None:
    steps = play(make(randomise=FIXED, reward="relative"), 0, actions=[-1.0, -1.0, 0.0])
    dollars = [info["reference_dollars"] for *_, info in steps]
    for number, (_, reward, info) in enumerate(steps[1:], start=2):
        weights = 0.95 ** np.arange(number)[::-1]
        unit = float(np.dot(weights, dollars[:number]) / weights.sum())
        assert reward == pytest.approx((info["reference_dollars"] - info["dollars"]) / unit)
        assert info["dollars"] == pytest.approx(info["cost"]["total"] * info["requests"] / 1000)
        terms = {name: value for name, value in info["cost"].items() if name != "total"}
        assert sum(terms.values()) == pytest.approx(info["cost"]["total"])
        assert set(terms) == {"tokens", "refresh", "latency", "memory", "staleness", "slo", "change"}


def test_wasting_memory_is_punished() -> None:
    dear = replace(CONFIG, prices=replace(CONFIG.prices, memory_gib_hour=100.0))
    steps = play(make(config=dear, randomise=FIXED, reward="relative"), 0, actions=[1.0, 0.0, 0.0])
    assert sum(reward for _, reward, _ in steps[1:]) < -0.5


def test_one_interval_moves_the_knobs_no_farther_than_the_guard_would_let_them() -> None:
    env = make(randomise=Randomisation())
    for seed in range(3):
        before = play(env, seed)
        knobs = [SPACE.to_steps(Knobs.from_dict(info["knobs"])) for *_, info in before]
        for one, two in itertools.pairwise(knobs):
            assert np.all(np.abs(two - one) <= np.array(MAX_STEPS) + 1e-3)


def test_holding_is_a_reference_too_and_so_is_any_function() -> None:
    start = Knobs(1 << 20, 60.0, 0.0)
    held = play(make(reference="hold", initial=start, randomise=Randomisation()), 0)
    assert {tuple(info["reference_knobs"].values()) for *_, info in held} == {(1 << 20, 60.0, 0.0)}
    full = Knobs(SPACE.max_size, SPACE.max_ttl, 0.0)
    grown = play(make(reference=lambda observation: full, initial=start, randomise=Randomisation()), 0)
    assert grown[-1][-1]["reference_knobs"] == full.to_dict()


def test_an_episode_ends_at_its_length_or_with_the_trace() -> None:
    assert len(play(make(), 0)) == 1 + 8
    assert len(play(make(episode_length=500, randomise=FIXED), 0)) == math.ceil(TRACE.duration / 5.0)
    env = make()
    play(env, 0)
    with pytest.raises(RuntimeError, match="the episode is over"):
        env.step(np.zeros(3, np.float32))


def test_a_gap_in_the_traffic_is_no_cost_and_no_crash() -> None:
    late = replace(TRACE, time=np.where(TRACE.time > 30.0, TRACE.time + 60.0, TRACE.time))
    steps = play(make(trace=late, episode_length=30, randomise=FIXED), 0)
    empty = [info for *_, info in steps if info["requests"] == 0]
    assert len(empty) >= 11
    assert all(info["cost"] == {} and info["dollars"] == 0.0 and "hit_ratio" not in info for info in empty)
    assert all(reward == 0.0 for _, reward, info in steps[1:] if info["requests"] == 0)


def test_randomisation_draws_start_knobs_and_prices_and_can_be_switched_off() -> None:
    def beginnings(randomise: Randomisation) -> set[str]:
        env = make(randomise=randomise)
        found = set()
        for seed in range(4):
            vector, _ = env.reset(seed=seed)
            # The seed of the ghost's sample differs in any case; it does not matter below its capacity.
            found.add(vector.tobytes())
        return found

    assert len(beginnings(FIXED)) == 1
    off: dict[str, Any] = {"start": False, "knobs": False, "prices": 1.0}
    changes: tuple[dict[str, Any], ...] = (
        {"start": True}, {"knobs": True}, {"prices": 2.0}, {"clock": True}, {"capacity": 4.0}, {"staleness": 4.0},
    )  # fmt: skip
    for only in changes:
        assert len(beginnings(Randomisation(**{**off, **only}))) == 4, only
    for only in ({"load": 2.0}, {"slots": 4.0}):
        assert len(beginnings(Randomisation(**off, **only))) > 1, only


def test_each_part_of_the_domain_is_drawn_within_its_factor() -> None:
    task = make_task(TRACE, config=CONFIG, interval=5.0, episode_length=8, initial=Knobs(1 << 20, 60.0))
    seen = [task.draw(np.random.default_rng(seed)) for seed in range(60)]
    for values, base, factor in (
        ([episode.config.space.max_size for episode in seen], SPACE.max_size, DOMAIN.capacity),
        ([episode.initial.cache_size for episode in seen], 1 << 20, DOMAIN.capacity),
        ([len(episode.trace) / episode.trace.duration for episode in seen], len(TRACE) / TRACE.duration, DOMAIN.load),
        ([episode.config.staleness_half_life for episode in seen], CONFIG.staleness_half_life, DOMAIN.staleness),
        ([episode.config.upstream.slots for episode in seen], CONFIG.upstream.slots, DOMAIN.slots),
        ([episode.config.prices.input_mtok for episode in seen], CONFIG.prices.input_mtok, DOMAIN.prices),
    ):
        ratios = np.array(values) / base
        assert 1 / factor - 1e-6 <= ratios.min() < 0.8
        assert 1.25 < ratios.max() <= factor + 1e-6
    # Every capacity keeps the range between the least size and the greatest, and a trace is prepared once per speed.
    assert {round(episode.config.space.max_size / episode.config.space.min_size) for episode in seen} == {64}
    assert len({id(episode.trace) for episode in seen}) == LOADS
    assert all(episode.start < len(episode.trace) for episode in seen)


def test_a_load_never_makes_a_trace_too_short_for_an_episode() -> None:
    task = make_task(TRACE, config=CONFIG, interval=5.0, episode_length=20, randomise=replace(DOMAIN, load=8.0))
    assert min(task.draw(np.random.default_rng(seed)).trace.duration for seed in range(20)) >= 21 * 5.0


def test_absent_signals_are_absent_for_the_whole_episode_on_both_sides() -> None:
    env = make(randomise=Randomisation(absent=1.0))
    env.reset(seed=0)
    for _ in range(3):
        assert not env.observation.valid("upstream_running")
        assert not env.observation.valid("drift")
        assert env.observation.valid("hit_ratio")
        env.step(np.zeros(3, np.float32))


def test_scenarios_are_drawn_for_each_episode() -> None:
    def draw(rng: np.random.Generator) -> Scenario:
        return Scenario(zipf(int(rng.integers(1 << 30))), CONFIG, interval=float(rng.choice([4.0, 6.0])))

    env = CacheTuningEnv(scenarios=draw, episode_length=4)
    assert len({repr(play(env, seed)) for seed in range(4)}) == 4
    assert play(env, 2) == play(CacheTuningEnv(scenarios=draw, episode_length=4), 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"interval": 0.0}, "interval: expected finite seconds > 0, got 0.0"),
        ({"episode_length": 0}, "episode_length: expected at least 1"),
        ({"reward": "euros"}, "reward: expected dollars or relative, got 'euros'"),
        ({"max_steps": (1.0, 0.0, 1.0)}, "max_steps: expected three finite numbers of grid steps > 0"),
        ({"reference": "best"}, "reference: expected curve, hold or a function, got 'best'"),
        ({"render_mode": "human"}, "render_mode"),
        ({"interval": 1e6}, "expected to last longer than one interval"),
        ({"scenarios": lambda rng: None}, "either scenarios, or trace"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**arguments)


def test_a_bad_action_is_refused() -> None:
    env = make()
    with pytest.raises(RuntimeError, match="expected reset"):
        env.step(np.zeros(3, np.float32))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="three finite numbers"):
        env.step(np.full(3, np.nan, np.float32))


class _Broken(gym.Wrapper[Any, Any, Any, Any]):
    """Puts NaN into an observation: what a policy may see of a broken environment."""

    def step(self, action: Any) -> Any:
        vector, *rest = super().step(action)
        return np.full_like(vector, np.nan), *rest


def test_the_passive_checker_catches_an_environment_that_gives_nan() -> None:
    env = gym.wrappers.PassiveEnvChecker(_Broken(make()))
    env.reset(seed=0)
    with pytest.warns(UserWarning, match="not within the observation space|NaN"):
        env.step(np.zeros(3, np.float32))
    assert env.observation_space.shape == (DIM,)
