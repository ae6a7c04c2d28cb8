"""``CacheTuning-v0``: tune a simulated cache on a trace, against a reference policy on the same requests.

One step is one decision interval. The action is a bounded residual, in grid steps, around the optimum of the smoothed ghost curve
(see :mod:`envs.action`); what one interval may change is limited as by the guard of a live cache. The reward is what the
reference's cache cost on the very same requests less what ours cost: a policy is paid for beating the reference and for nothing
that the traffic does. docs/environment.md tells the whole contract; :mod:`envs.vec_env` has the same for many caches at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from envs.action import MAX_STEPS, RESIDUAL, ActionMap
from envs.knob_batch import to_array
from envs.lanes import REWARD_LIMIT, Lanes, Windows
from envs.objective import Prices
from envs.observation import Observation
from envs.observation_vector import DIM, HIGH, LOW
from envs.simulator import SimConfig
from envs.task import DOMAIN, FIXED, Randomisation, Reference, Reward, Scenario, Task, check
from envs.workloads import Trace, sessions
from serving.knobs import Knobs

__all__ = [
    "DOMAIN",
    "FIXED",
    "REWARD_LIMIT",
    "CacheTuningEnv",
    "Randomisation",
    "Reference",
    "Reward",
    "Scenario",
    "Task",
    "make_task",
]


def make_task(
    trace: Trace | None = None,
    *,
    config: SimConfig | None = None,
    prices: Prices | None = None,
    interval: float = 60.0,
    episode_length: int = 64,
    reference: Reference = "curve",
    initial: Knobs | None = None,
    scenarios: Callable[[np.random.Generator], Scenario] | None = None,
    randomise: Randomisation = DOMAIN,
    actions: ActionMap = RESIDUAL,
    max_steps: tuple[float, float, float] = MAX_STEPS,
    reward: Reward = "dollars",
) -> Task:
    """Return a task on one trace, or on what ``scenarios`` draws.

    Args:
        trace: The requests of one arm; default: a generated workload, or what ``scenarios`` draws.
        config: The simulated cache; default: :class:`~envs.simulator.SimConfig`'s.
        prices: Replace those of ``config``.
        interval: Seconds between two decisions.
        episode_length: See :class:`envs.task.Task`, as the rest.
        reference: Whom to beat.
        initial: Knobs of both caches at the start.
        scenarios: Draws the scenario of each episode from a random generator, in place of trace, config, prices, interval and
            initial.
        randomise: What differs between episodes.
        actions: What an action means.
        max_steps: Most that one interval may move each knob, grid steps.
        reward: How the reward is counted.

    Raises:
        ValueError: If an argument is out of its range, or both a trace and ``scenarios`` are given.
    """
    if scenarios is not None and (trace is not None or config is not None or prices is not None or initial is not None):
        raise ValueError("CacheTuning: expected either scenarios, or trace, config, prices and initial; got both")
    if scenarios is None:
        config = config or SimConfig()
        config = replace(config, prices=prices) if prices is not None else config
        fixed = Scenario(_default_trace() if trace is None else trace, config, interval, initial)
        check(fixed)
        scenarios = lambda rng: fixed  # noqa: E731 - the scenario is made once
    return Task(scenarios, episode_length, reference, randomise, actions, max_steps, reward)


class CacheTuningEnv(gym.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """Tune the three knobs of a simulated cache; see the module.

    Observation: ``Box(float32, (DIM,))``, see :data:`envs.observation_vector.COMPONENTS`. Action: ``Box(-1, 1, (3,), float32)``:
    size, TTL, warm-up ratio around the anchor; without a curve the knobs are held. Equal seeds give equal episodes, to the last
    bit.

    An episode is truncated after ``episode_length`` steps or at the trace's end, never terminated: a cache has no final state.
    Serving goes on beyond the last interval that is simulated, and a learner has to bootstrap its value there.

    The reward is the reference's cost of the window less ours, US dollars per 1,000 requests, 0 without requests; with
    ``reward="relative"`` the dollars of the window in units of the reference's mean cost of an interval, clipped to
    :data:`~envs.lanes.REWARD_LIMIT`.

    ``info`` holds ``cost`` and ``reference_cost`` (US dollars per 1,000 requests, by term and ``total``; empty without any
    requests), ``dollars`` and ``reference_dollars`` (of the window), ``requests``, ``knobs``, ``reference_knobs``, ``hit_ratio``
    and ``reference_hit_ratio`` (absent without requests).

    Args:
        trace: See :func:`make_task`, as the rest.
        config: The simulated cache.
        prices: Replace those of ``config``.
        interval: Seconds between two decisions.
        episode_length: Steps of an episode, at least 1.
        reference: Whom to beat: ``curve``, ``hold`` or a function of the observation of the reference's own cache.
        initial: Knobs of both caches at the start.
        scenarios: Draws the scenario of each episode, in place of trace, config, prices, interval and initial.
        randomise: What differs between episodes.
        actions: What an action means.
        max_steps: Most that one interval may move each knob, grid steps.
        reward: ``dollars`` or ``relative``.
        render_mode: None: there is nothing to render.

    Raises:
        ValueError: If an argument is out of its range, or both a trace and ``scenarios`` are given.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(
        self,
        trace: Trace | None = None,
        *,
        config: SimConfig | None = None,
        prices: Prices | None = None,
        interval: float = 60.0,
        episode_length: int = 64,
        reference: Reference = "curve",
        initial: Knobs | None = None,
        scenarios: Callable[[np.random.Generator], Scenario] | None = None,
        randomise: Randomisation = DOMAIN,
        actions: ActionMap = RESIDUAL,
        max_steps: tuple[float, float, float] = MAX_STEPS,
        reward: Reward = "dollars",
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            raise ValueError(f"CacheTuning: render_mode: expected None, got {render_mode!r}")
        self._task = make_task(
            trace,
            config=config,
            prices=prices,
            interval=interval,
            episode_length=episode_length,
            reference=reference,
            initial=initial,
            scenarios=scenarios,
            randomise=randomise,
            actions=actions,
            max_steps=max_steps,
            reward=reward,
        )
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(LOW, HIGH, (DIM,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._lanes: Lanes | None = None

    @property
    def observation(self) -> Observation:
        """The whole observation behind the last vector: for policies that need more than the vector.

        Raises:
            RuntimeError: Before the first ``reset``.
        """
        return self._running().observation(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Start an episode: both caches run one interval on the initial knobs, from empty."""
        super().reset(seed=seed)
        self._lanes = Lanes(self._task, [self._task.draw(self.np_random)])
        return self._lanes.windows.vectors[0].copy(), self._lanes.windows.info(0)

    def step(self, action: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one interval under the action's knobs.

        Raises:
            ValueError: If the action is not three finite numbers.
        """
        lanes = self._unfinished()
        values = np.asarray(action, np.float64)
        if values.shape != (3,):
            raise ValueError(f"action: expected three finite numbers in [-1, 1], got {action!r}")
        return self._told(lanes.act(values[None]))

    def step_knobs(self, wanted: Knobs) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one interval under given knobs, limited like an action's: how policies other than residual ones are evaluated."""
        return self._told(self._unfinished().move(to_array([wanted])))

    def _told(self, windows: Windows) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        return windows.vectors[0].copy(), float(windows.rewards[0]), False, bool(windows.over[0]), windows.info(0)

    def _unfinished(self) -> Lanes:
        lanes = self._running()
        if lanes.windows.over[0]:
            raise RuntimeError("CacheTuning: the episode is over: expected reset() before the next step")
        return lanes

    def _running(self) -> Lanes:
        if self._lanes is None:
            raise RuntimeError("CacheTuning: expected reset() before anything else")
        return self._lanes


def _default_trace() -> Trace:
    return sessions(40_000, 4_000, duration=8 * 3600.0, hot_swaps=(4 * 3600.0,))
