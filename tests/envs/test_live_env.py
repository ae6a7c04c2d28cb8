"""``CacheTuningLive-v0`` over a replica with a real cache, real metrics and a real config store; only time is the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envs  # noqa: F401 - registers the environments
from envs.action import ActionMap
from envs.live_env import CacheTuningLiveEnv
from envs.objective import Prices, grid_cost
from envs.scrape_source import ScrapeSource
from envs.smoothing import cost_at
from envs.sources import SourceUnavailable
from serving.config_store import DesiredState
from serving.knobs import Knobs, KnobSpace
from serving.redis_config_store import RedisConfigStore
from tests.envs.live_gateway import HIT_LATENCY, INPUT_TOKENS, MISS_LATENCY, OUTPUT_TOKENS, LiveGateway

SPACE = KnobSpace(min_size=8_000, max_size=512_000, min_ttl=30.0, max_ttl=3000.0, size_steps=7, ttl_steps=3)
PRICES = Prices(memory_gib_hour=20.0, time_scale=2000.0)
START = Knobs(32_000, 300.0)
INTERVAL = 20.0
SCRAPES = 10
"""Scrapes per interval: what the extrapolation to the window's edges can be off by is one part in as many."""
REPORTS_LIVE = 600.0
"""Seconds that a replica's report counts, by Redis' clock, which is not the test's: a step may take a busy machine long."""
HOLD = np.zeros(3, np.float32)


class Stage:
    """A gateway that serves while the environment waits."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url, self.namespace = url, namespace
        self.gateway = LiveGateway(SPACE, "treatment", RedisConfigStore(url, namespace, REPORTS_LIVE))
        self.requests = 300
        self.keys = 400
        self.watching = True
        self.late = 0.0
        self.source: ScrapeSource
        self.made: list[gym.Env[Any, Any]] = []

    def open_source(self) -> ScrapeSource:
        self.source = ScrapeSource([self.gateway.exporter.url], scrape_interval=None, clock=lambda: self.gateway.now)
        return self.source

    def wait(self, seconds: float) -> None:
        if self.watching:
            self.gateway.watch()
        if seconds < INTERVAL:
            self.gateway.now += seconds
            return
        for _ in range(SCRAPES):
            self.gateway.run(seconds / SCRAPES, self.requests // SCRAPES, keys=self.keys)
            with contextlib.suppress(SourceUnavailable):
                self.source.refresh()
        self.gateway.now += self.late

    def settings(self, **changes: Any) -> dict[str, Any]:
        return {
            "open_source": lambda: self.open_source(),  # not the bound method: Gymnasium copies what it is given
            "open_store": lambda: RedisConfigStore(self.url, self.namespace, REPORTS_LIVE),
            "arm": "treatment",
            "space": SPACE,
            "prices": PRICES,
            "initial": START,
            "interval": INTERVAL,
            "clock": lambda: self.gateway.now,
            "wait": lambda seconds: self.wait(seconds),
            **changes,
        }

    def make(self, **changes: Any) -> gym.Env[Any, Any]:
        env = gym.make("CacheTuningLive-v0", **self.settings(**changes))
        self.made.append(env)
        return env

    def stored(self) -> DesiredState:
        state = self.ask(lambda store: store.read())
        assert isinstance(state, DesiredState)
        return state

    def ask(self, what: Callable[[RedisConfigStore], Any]) -> Any:
        async def asked() -> Any:
            store = RedisConfigStore(self.url, self.namespace, REPORTS_LIVE)
            try:
                return await what(store)
            finally:
                await store.close()

        return asyncio.run(asked())

    def close(self) -> None:
        for env in self.made:
            env.close()
        self.gateway.close()


@pytest.fixture
def stage(redis_url: str, namespace: str) -> Iterator[Stage]:
    stage = Stage(redis_url, namespace)
    yield stage
    stage.close()


def test_it_is_a_gymnasium_environment(stage: Stage) -> None:
    env = stage.make()
    assert isinstance(env.unwrapped, CacheTuningLiveEnv)
    check_env(env.unwrapped, skip_render_check=True)


def test_a_step_puts_the_knobs_in_force_and_measures_what_they_do(stage: Stage) -> None:
    env = stage.make()
    _, info = env.reset(seed=1)
    assert info["fault"] == ""
    assert stage.gateway._cache.knobs("treatment") == START
    for _ in range(3):
        before = env.unwrapped.observation  # type: ignore[attr-defined]
        hits, requests = stage.gateway.hits, stage.gateway.requests
        observation, reward, terminated, truncated, info = env.step(np.array([0.34, 0.0, 0.0], np.float32))
        assert (terminated, truncated, info["fault"]) == (False, False, "")
        assert env.observation_space.contains(observation)
        wanted = Knobs.from_dict(info["knobs"])
        assert SPACE.contains(wanted)
        assert np.all(np.abs(SPACE.to_steps(wanted) - SPACE.to_steps(before.knobs)) <= 2.0 + 1e-6)
        assert stage.gateway._cache.knobs("treatment") == wanted == stage.stored().arms["treatment"]
        assert stage.stored().version == info["version"]
        assert (info["confirmed"], info["expected"]) == (1, 1)
        assert info["requests"] == pytest.approx(stage.gateway.requests - requests, rel=2 / SCRAPES)
        assert info["hit_ratio"] == pytest.approx(
            (stage.gateway.hits - hits) / (stage.gateway.requests - requests), abs=2 / SCRAPES
        )
        assert info["cost"]["total"] > 0
        assert math.isfinite(reward)
        assert math.copysign(1.0, reward) == math.copysign(1.0, info["reference_cost"]["total"] - info["cost"]["total"])


def test_the_reference_is_priced_on_the_windows_own_requests(stage: Stage) -> None:
    env = stage.make()
    env.reset(seed=1)
    live = env.unwrapped
    assert isinstance(live, CacheTuningLiveEnv)
    for _ in range(3):
        anchor = live.observation.anchor
        assert anchor is not None
        _, _, _, _, info = env.step(HOLD)
        assert info["reference_knobs"] == anchor.to_dict()
        ghost = live.observation.signals.ghost
        assert ghost is not None
        costs = grid_cost(
            ghost.hits,
            ghost.stale_hits,
            SPACE.sizes,
            requests=ghost.requests,
            duration=INTERVAL,
            input_tokens_per_miss=INPUT_TOKENS,
            output_tokens_per_miss=OUTPUT_TOKENS,
            miss_latency=MISS_LATENCY,
            hit_latency=HIT_LATENCY,
            prices=PRICES,
        )
        assert info["reference_cost"]["total"] == pytest.approx(cost_at(costs, ghost, anchor), rel=1 / SCRAPES)


def test_a_window_of_hits_alone_is_priced_by_the_misses_of_earlier_ones(stage: Stage) -> None:
    env = stage.make(initial=Knobs(SPACE.max_size, SPACE.max_ttl))
    env.reset(seed=1)
    stage.keys = 1
    for _ in range(3):
        _, _, _, _, info = env.step(np.array([1.0, 1.0, 0.0], np.float32))
    assert info["hit_ratio"] == 1.0
    assert info["fault"] == ""
    assert info["reference_cost"]["total"] > 0


def test_a_cache_at_the_reference_is_paid_about_nothing_and_one_far_from_it_loses(stage: Stage) -> None:
    env = stage.make(max_steps=(9.0, 9.0, 9.0), actions=ActionMap(radius=(9.0, 9.0, 9.0)))
    env.reset(seed=1)
    rewards: dict[str, list[float]] = {"at": [], "far": []}
    for _ in range(4):
        rewards["at"].append(float(env.step(HOLD)[1]))
    for _ in range(4):
        rewards["far"].append(float(env.step(np.array([1.0, 0.0, 0.0], np.float32))[1]))
    assert abs(np.mean(rewards["at"][1:])) < 0.15
    assert np.mean(rewards["far"][1:]) < np.mean(rewards["at"][1:]) - 0.1


def test_other_arms_keep_their_knobs(stage: Stage) -> None:
    control = Knobs(16_000, 60.0)
    stage.ask(lambda store: store.write({"control": control}, expected_version=0, author="test", reason="", now=0.0))
    env = stage.make()
    env.reset(seed=1)
    env.step(np.array([1.0, 0.0, 0.0], np.float32))
    assert stage.stored().arms["control"] == control


def test_without_initial_knobs_it_starts_from_those_in_force(stage: Stage) -> None:
    with pytest.raises(RuntimeError, match="initial=Knobs"):
        stage.make(initial=None).reset()
    mine = Knobs(64_000, 100.0, 0.2)
    stage.ask(lambda store: store.write({"treatment": mine}, expected_version=0, author="test", reason="", now=0.0))
    _, info = stage.make(initial=None).reset()
    assert Knobs.from_dict(info["knobs"]) == mine
    assert stage.stored().version == 1


def test_replicas_that_do_not_confirm_are_a_fault_not_a_reward(stage: Stage) -> None:
    env = stage.make(confirm_timeout=1.0)
    env.reset(seed=1)
    stage.watching = False
    _, reward, _, _, info = env.step(np.array([1.0, 0.0, 0.0], np.float32))
    assert reward == 0.0
    assert "0 of 1 replicas" in info["fault"]
    stage.watching = True
    assert env.step(HOLD)[4]["fault"] == ""


def test_a_source_that_is_gone_is_a_fault_and_a_masked_observation(stage: Stage) -> None:
    env = stage.make()
    env.reset(seed=1)
    stage.gateway.exporter.kill()
    observation, reward, _, _, info = env.step(HOLD)
    assert reward == 0.0
    assert stage.gateway.exporter.address in info["fault"]
    assert info["cost"] == info["reference_cost"] == {}
    assert np.isfinite(observation).all()
    assert not env.unwrapped.observation.valid("hit_ratio")  # type: ignore[attr-defined]


def test_a_window_without_requests_cannot_be_priced(stage: Stage) -> None:
    env = stage.make()
    env.reset(seed=1)
    stage.requests = 0
    _, reward, _, _, info = env.step(HOLD)
    assert reward == 0.0
    assert f"could not be priced: no requests in {INTERVAL:g} s" in info["fault"]


def test_a_window_without_a_curve_cannot_be_priced_and_says_so(stage: Stage) -> None:
    env = stage.make()
    env.reset(seed=1)
    another = KnobSpace(min_size=9_000, max_size=512_000, min_ttl=30.0, max_ttl=3000.0, size_steps=7, ttl_steps=3)
    env.unwrapped._space = another  # type: ignore[attr-defined]
    _, reward, _, _, info = env.step(HOLD)
    assert reward == 0.0
    assert "could not be priced: the ghost curve is missing" in info["fault"]


def test_a_wait_that_takes_longer_than_the_interval_loses_nothing_of_it(stage: Stage) -> None:
    env = stage.make()
    env.reset(seed=1)
    stage.late = INTERVAL
    _, _, _, _, info = env.step(HOLD)
    assert info["fault"] == ""
    signals = env.unwrapped.observation.signals  # type: ignore[attr-defined]
    assert signals.window == pytest.approx(2 * INTERVAL)
    # The traffic was in the first half of it; one scrape of eleven is what the extrapolation may add.
    assert info["requests"] == pytest.approx(stage.requests, rel=1.1 / SCRAPES)


def test_episodes_are_truncated_never_terminated(stage: Stage) -> None:
    env = stage.make(episode_length=2)
    env.reset(seed=1)
    assert [env.step(HOLD)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_a_config_store_that_is_gone_is_a_fault_and_the_knobs_stay(stage: Stage, tmp_path: Any) -> None:
    gone = RedisConfigStore(f"unix://{tmp_path}/no-redis.sock", "test")
    env = stage.make()
    env.reset(seed=1)
    env.unwrapped._store = gone  # type: ignore[attr-defined]
    before = env.unwrapped.observation.knobs  # type: ignore[attr-defined]
    _, reward, _, _, info = env.step(np.array([1.0, 0.0, 0.0], np.float32))
    assert reward == 0.0
    assert "no-redis" in info["fault"]
    assert Knobs.from_dict(info["knobs"]) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"interval": 0.0}, "interval"),
        ({"window": math.nan}, "window"),
        ({"episode_length": 0}, "episode_length"),
        ({"replicas": 0}, "replicas"),
        ({"initial": Knobs(1, 1.0)}, "initial"),
        ({"render_mode": "human"}, "render_mode"),
    ],
)
def test_bad_arguments_are_refused_by_name(stage: Stage, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CacheTuningLiveEnv(**stage.settings(**change))
