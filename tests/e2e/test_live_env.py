"""``CacheTuningLive-v0`` tunes the running gateway."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envs  # noqa: F401 - registers the environments
from envs.live_env import CacheTuningLiveEnv
from envs.objective import Prices
from envs.scrape_source import ScrapeSource
from envs.sources import window_for
from serving.config_store import DesiredState
from serving.knobs import Knobs
from serving.redis_config_store import RedisConfigStore
from tests.e2e.stack import Stack

pytestmark = pytest.mark.e2e

ARM = "treatment"
START = Knobs(2 << 20, 600.0)
INTERVAL = 4.0


def stored(stack: Stack) -> DesiredState:
    async def read() -> DesiredState | None:
        store = RedisConfigStore(stack.redis.url, stack.settings.namespace)
        try:
            return await store.read()
        finally:
            await store.close()

    state = asyncio.run(read())
    assert state is not None
    return state


@pytest.fixture
def env(stack: Stack) -> Iterator[gym.Env[Any, Any]]:
    questions = itertools.cycle([stack.question(ARM) for _ in range(15)])

    def wait(seconds: float) -> None:
        """Let time pass, with users who ask meanwhile."""
        end = time.monotonic() + seconds
        if seconds < INTERVAL:
            time.sleep(seconds)
            return
        with ThreadPoolExecutor(2) as users:
            while time.monotonic() < end:
                assert all(reply.status == 200 for reply in users.map(stack.ask, itertools.islice(questions, 4)))

    env = gym.make(
        "CacheTuningLive-v0",
        open_source=lambda: ScrapeSource([*stack.gateway.metrics_targets(), stack.model.metrics_url], scrape_interval=0.5),
        open_store=lambda: RedisConfigStore(stack.redis.url, stack.settings.namespace),
        arm=ARM,
        space=stack.settings.space.space(),
        prices=Prices(),
        initial=START,
        interval=INTERVAL,
        window=window_for(INTERVAL, 1.0),
        replicas=stack.settings.replicas,
        wait=wait,
    )
    yield env
    env.close()


def test_two_steps_on_the_running_gateway(stack: Stack, env: gym.Env[Any, Any]) -> None:
    live = env.unwrapped
    assert isinstance(live, CacheTuningLiveEnv)
    observation, info = env.reset(seed=0)
    assert info["fault"] == ""
    assert (info["confirmed"], info["expected"]) == (2, 2)
    assert Knobs.from_dict(info["knobs"]) == START == stored(stack).arms[ARM]
    assert live.observation.valid("hit_ratio")
    for warmup in (0.5, 1.0):
        before = live.observation
        assert before.anchor is not None, "the ghost curve and the price of a miss are known after one interval"
        observation, reward, terminated, truncated, info = env.step(np.array([0.5, -0.5, warmup], np.float32))
        assert (info["fault"], terminated, truncated) == ("", False, False)
        assert env.observation_space.contains(observation)
        applied = Knobs.from_dict(info["knobs"])
        assert applied != before.knobs
        assert stored(stack).arms[ARM] == applied
        assert stored(stack).version == info["version"]
        assert (info["confirmed"], info["expected"]) == (2, 2)
        assert info["requests"] > 0
        assert 0.0 <= info["hit_ratio"] <= 1.0
        assert info["cost"]["total"] > 0
        assert info["reference_cost"]["total"] > 0
        assert math.isfinite(reward)
