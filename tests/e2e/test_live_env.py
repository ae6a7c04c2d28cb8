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
DEADLINE = 60.0


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
    known = itertools.cycle([stack.question(ARM) for _ in range(15)])
    sources: list[ScrapeSource] = []

    def open_source() -> ScrapeSource:
        targets = [*stack.gateway.metrics_targets(), stack.model.metrics_url]
        sources.append(ScrapeSource(targets, scrape_interval=0.5, timeout=DEADLINE))
        return sources[-1]

    def counted() -> dict[str, float]:
        """What the environment's own source has seen of everything without which a window has no price."""
        sources[-1].refresh()
        outcomes = sources[-1].latest("cachepilot_requests_total", by=("outcome",), where={"arm": ARM})
        ghost = sources[-1].latest("cachepilot_ghost_requests_total", where={"arm": ARM})
        return {
            **{outcome: value for (outcome,), value in outcomes.items() if outcome in ("hit", "miss")},
            **({"ghost": ghost[()]} if ghost else {}),
        }

    def wait(seconds: float) -> None:
        """Let time pass, with users who ask meanwhile, until what they did has come out of the far end of the exporters.

        Replicas gather, report and are scraped once a second each; on a loaded machine that chain is longer than the interval.
        """
        if seconds < INTERVAL:
            time.sleep(seconds)
            return
        began = time.monotonic()
        before: dict[str, float] = {}
        with ThreadPoolExecutor(2) as users:
            while True:
                asked = [*itertools.islice(known, 4), stack.question(ARM)]
                assert all(reply.status == 200 for reply in users.map(stack.ask, asked))
                waited = time.monotonic() - began
                if waited > seconds / 2 and len(before) < 3:
                    before = counted()
                elif waited > seconds:
                    now = counted()
                    if all(now.get(name, 0.0) > value for name, value in before.items()):
                        return
                assert waited < DEADLINE, f"waited {DEADLINE} s for {before} to grow"

    env = gym.make(
        "CacheTuningLive-v0",
        open_source=open_source,
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
