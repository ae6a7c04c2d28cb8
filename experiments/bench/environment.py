"""How many steps a second the environment makes on one core, and what a step's time goes to."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numba
import numpy as np

import envs.lanes
from envs.cache_env import DOMAIN, CacheTuningEnv, make_task
from envs.lanes import Lanes
from envs.observation import ObservationBatch
from envs.simulator import CacheSimulator, SimConfig
from envs.simulator.batch import SimulatorBatch, use_threads
from envs.task import Task
from envs.vec_env import CacheTuningVecEnv
from experiments.bench.result import BenchResult
from experiments.bench.sim import INTERVAL, zipf_trace

GOAL = 10_000.0
"""Steps of 1,000 requests per second on one core."""

EPISODE = 64

EPISODES, REST = "new episodes", "actions, rewards, infos"
PARTS: dict[str, tuple[Any, str]] = {
    "two caches, request by request": (SimulatorBatch, "step"),
    "ghost curves": (CacheSimulator, "observe"),
    "observations, prices, anchors": (ObservationBatch, "build"),
    "regret": (envs.lanes, "window_regret"),
    EPISODES: (Lanes, "__init__"),
}
"""Which call is which part of a step; :data:`REST` is what is left."""


def run(
    *, lanes: int = 32, requests_per_step: int = 1000, steps: int = 2 * EPISODE, rounds: int = 3, seed: int = 0
) -> BenchResult:
    """Time the vector environment with random actions in one thread, and the single one beside it.

    Compilation is not timed; the best of some rounds counts, each of whole episodes, so that their starts are in it.

    Args:
        lanes: Environments side by side.
        requests_per_step: Mean requests of an interval. A step runs them twice: through our cache and the reference's.
        steps: Steps of each lane in a round.
        rounds: Rounds.
        seed: Of trace, episodes and actions.

    Returns:
        Rows with ``what``, ``steps_per_second`` (of CPU time), ``us_per_step`` and ``share``: the environments, the vector form
        less what it spends most on, then the parts of its step. Without a ratio.
    """
    length = 4 * EPISODE
    trace = zipf_trace(requests_per_step * length, duration=length * INTERVAL, seed=seed)

    # The load is what a step is measured by; everything else differs from episode to episode as in training.
    def task_with(config: SimConfig) -> Task:
        return make_task(trace, config=config, interval=INTERVAL, episode_length=EPISODE, randomise=replace(DOMAIN, load=1.0))

    task = task_with(SimConfig())
    blind = SimConfig(ghost_keys=0)
    cold = replace(blind, space=replace(blind.space, max_warmup=0.0))
    threads = numba.get_num_threads()
    use_threads(1)
    try:
        together = _vector(task, lanes, steps, rounds, seed)
        alone = _single(task, steps, rounds, seed)
        without = {
            "without the ghost": _vector(task_with(blind), lanes, steps, rounds, seed),
            "without ghost and warm-up": _vector(task_with(cold), lanes, steps, rounds, seed),
        }
        parts = _profile(task, lanes, steps, seed)
    finally:
        use_threads(threads)
    whole = sum(parts.values())
    rows: list[dict[str, Any]] = [
        {"what": f"vector environment, {lanes} lanes", "steps_per_second": 1.0 / together, "us_per_step": together * 1e6},
        {"what": "single environment", "steps_per_second": 1.0 / alone, "us_per_step": alone * 1e6},
        *(
            {"what": f"vector environment, {name}", "steps_per_second": 1.0 / each, "us_per_step": each * 1e6}
            for name, each in without.items()
        ),
        *(
            {"what": f"of a step: {part}", "us_per_step": seconds / whole * together * 1e6, "share": seconds / whole}
            for part, seconds in sorted(parts.items(), key=lambda item: -item[1])
        ),
    ]
    note = (
        f"Steps of {requests_per_step:,} requests (Zipf 0.9), each through our cache and the reference's, one ghost for both; "
        f"one thread, CPU time, best of {rounds} rounds; random actions; episodes of {EPISODE} steps, all but the load drawn "
        f"anew. Goal {GOAL:,.0f} steps/s: {'met' if 1.0 / together >= GOAL else 'missed'}. The parts are of a run with a clock "
        "around each, scaled to the step without."
    )
    return BenchResult("environment", rows, None, "cachepilot bench sim", note)


def _vector(task: Task, lanes: int, steps: int, rounds: int, seed: int) -> float:
    """Return CPU seconds per step of one lane."""
    env, actions = _started(task, lanes, steps, seed)
    best = np.inf
    for _ in range(rounds):
        began = time.process_time()
        for action in actions:
            env.step(action)
        best = min(best, time.process_time() - began)
    return float(best) / (steps * lanes)


def _single(task: Task, steps: int, rounds: int, seed: int) -> float:
    """Return CPU seconds per step."""
    env = CacheTuningEnv(
        task.scenarios(np.random.default_rng(seed)).trace,
        interval=INTERVAL,
        episode_length=task.episode_length,
        randomise=task.randomise,
    )
    env.reset(seed=seed)
    actions = np.random.default_rng(seed).uniform(-1.0, 1.0, (steps, 3)).astype(np.float32)
    best = np.inf
    for _ in range(rounds):
        began = time.process_time()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        best = min(best, time.process_time() - began)
    return float(best) / steps


def _started(task: Task, lanes: int, steps: int, seed: int) -> tuple[CacheTuningVecEnv, list[Any]]:
    env = CacheTuningVecEnv(task, lanes)
    env.seed(seed)
    env.reset()
    actions = list(np.random.default_rng(seed).uniform(-1.0, 1.0, (steps, lanes, 3)).astype(np.float32))
    env.step(actions[0])  # compiles
    return env, actions


def _profile(task: Task, lanes: int, steps: int, seed: int) -> dict[str, float]:
    """Return CPU seconds by part."""
    env, actions = _started(task, lanes, steps, seed)
    parts = _Parts()
    with contextlib.ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            stack.enter_context(parts.clocked(owner, name, part))
        parts.begin()
        for action in actions:
            env.step(action)
        parts.end()
    return dict(parts.seconds)


class _Parts:
    """Charges CPU time to the innermost part that runs; what runs while an episode is begun belongs to that."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running = [REST]
        self._at = 0.0

    def begin(self) -> None:
        self._at = time.process_time()

    def end(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._at
        self._at = now

    @contextlib.contextmanager
    def clocked(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Charge calls of ``owner``'s ``name`` to ``part`` while the context lasts."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.end()
            self._running.append(EPISODES if EPISODES in self._running else part)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()
                self._running.pop()

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, function)
