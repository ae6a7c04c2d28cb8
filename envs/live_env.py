"""``CacheTuningLive-v0``: the environment of ``CacheTuning-v0`` over a running gateway and its metrics.

Observations, actions and limits are those of the simulated environment, so what was trained there runs here. There is no second
cache to compare with: the reference (the optimum of the smoothed ghost curve, which the action is a residual of) is priced by
the window's own ghost curve, on the very requests that our cost was measured on, with the smoothed price of a miss: a window may
have none. The curve knows no warm-up, no hinge on P99 and no cost of change, so a policy pays for these alone.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from envs.action import MAX_STEPS, RESIDUAL, ActionMap, limit_step
from envs.live_signals import read_signals
from envs.objective import Cost, Prices, price
from envs.observation import Observation, ObservationBuilder
from envs.observation_vector import DIM, HIGH, LOW
from envs.signals import ArmSignals
from envs.smoothing import CurveSmoother, cost_at
from envs.sources import SignalSource, SourceUnavailable
from serving.config_store import ConfigStore, ConfigStoreUnavailable, DesiredState, VersionConflict
from serving.knobs import Knobs, KnobSpace

REWARD_LIMIT = 3.0
"""Rewards are clipped to this many mean interval costs, as in the simulated environment."""

POLL = 0.05
"""Seconds between two looks at what the replicas report."""

ATTEMPTS = 3
"""Writes that are tried when somebody else keeps writing first."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one change.

    Attributes:
        state: The desired state that is in force.
        confirmed: Replicas that report its version.
        expected: Replicas that report at all.
        fault: Why the change is not known to be in force; empty if it is.
    """

    state: DesiredState
    confirmed: int
    expected: int
    fault: str = ""


class CacheTuningLiveEnv(gym.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """Tune the three knobs of one arm of a running gateway; see the module.

    Observation: ``Box(float32, (DIM,))``; action: ``Box(-1, 1, (3,), float32)``, a residual around the anchor; without a curve
    the knobs are held. An episode is never terminated; it is truncated after ``episode_length`` steps. The reward is what the
    reference would have cost less what was measured, in units of the reference's mean cost of an interval. It is 0, and
    ``info["fault"]`` says why, where the knobs are not known to have been in force or the window could not be priced.

    ``info`` holds ``cost``, ``reference_cost`` (US dollars per 1,000 requests; empty where unknown), ``requests``, ``hit_ratio``,
    ``knobs``, ``reference_knobs``, ``version``, ``confirmed``, ``expected`` and ``fault``.

    Args:
        open_source: Opens the source of the metrics; closed with the environment.
        open_store: Opens the store where the knobs are written; closed with the environment, which uses it in an event loop of
            its own.
        arm: The arm that is tuned. Other arms' knobs are left as they are.
        space: The knob space; the gateway's ghost must use the same grid.
        prices: The prices.
        initial: Knobs of the arm at every reset; None: those that are in force.
        interval: Seconds between two decisions.
        window: Seconds of signals per decision; None: the interval. See :func:`envs.sources.window_for`. Longer by as much as a
            wait takes longer than the interval.
        episode_length: Steps of an episode; None for no end.
        replicas: Fewest replicas that must report a version before a change counts as in force.
        confirm_timeout: Seconds that the replicas have to report it.
        actions: What an action means.
        max_steps: Most that one interval may move each knob, grid steps.
        clock: Returns seconds since the epoch.
        wait: Waits so many seconds.
        render_mode: None: there is nothing to render.

    Raises:
        SourceUnavailable: If the source cannot be read.
        ValueError: If an argument is out of its range.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(
        self,
        open_source: Callable[[], SignalSource],
        open_store: Callable[[], ConfigStore],
        arm: str,
        *,
        space: KnobSpace,
        prices: Prices,
        initial: Knobs | None = None,
        interval: float = 30.0,
        window: float | None = None,
        episode_length: int | None = None,
        replicas: int = 1,
        confirm_timeout: float = 10.0,
        actions: ActionMap = RESIDUAL,
        max_steps: tuple[float, float, float] = MAX_STEPS,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], None] = time.sleep,
        render_mode: str | None = None,
    ) -> None:
        for name, value in (("interval", interval), ("window", interval if window is None else window)):
            if not 0 < value < math.inf:
                raise ValueError(f"CacheTuningLive: {name}: expected finite seconds > 0, got {value!r}")
        if episode_length is not None and episode_length < 1:
            raise ValueError(f"CacheTuningLive: episode_length: expected at least 1 step or None, got {episode_length!r}")
        if replicas < 1:
            raise ValueError(f"CacheTuningLive: replicas: expected at least 1, got {replicas!r}")
        if initial is not None and not space.contains(initial):
            raise ValueError(f"CacheTuningLive: initial: expected knobs within {space}, got {initial}")
        if render_mode is not None:
            raise ValueError(f"CacheTuningLive: render_mode: expected None, got {render_mode!r}")
        self._arm = arm
        self._space = space
        self._prices = prices
        self._initial = initial
        self._interval = interval
        self._window = interval if window is None else window
        self._length = episode_length
        self._replicas = replicas
        self._confirm_timeout = confirm_timeout
        self._actions = actions
        self._max_steps = max_steps
        self._clock = clock
        self._wait = wait
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(LOW, HIGH, (DIM,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._builder = ObservationBuilder(space, prices)
        self._curves = CurveSmoother(prices, self._builder.smoothing, self._builder.patience)
        self._observation: Observation | None = None
        self._applied: Applied | None = None
        self._steps = 0
        self._units: list[float] = []
        self._source = open_source()
        self._loop = _LoopThread()
        self._store = open_store()

    @property
    def observation(self) -> Observation:
        """The whole observation behind the last vector: for policies that need more than the vector.

        Raises:
            RuntimeError: Before the first ``reset``.
        """
        if self._observation is None:
            raise RuntimeError("CacheTuningLive: expected reset() before anything else")
        return self._observation

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Put the initial knobs in force, if any were given, and observe one interval. The cache keeps what it holds.

        Raises:
            ConfigStoreUnavailable: If the store cannot be reached.
            RuntimeError: If nothing was ever written for the arm and no initial knobs were given, or others kept writing first.
        """
        super().reset(seed=seed)
        self._builder.reset()
        self._curves = CurveSmoother(self._prices, self._builder.smoothing, self._builder.patience)
        self._steps, self._units = 0, []
        state = self._loop.run(self._store.read())
        knobs = self._initial or (state.arms.get(self._arm) if state is not None else None)
        if knobs is None:
            raise RuntimeError(
                f"CacheTuningLive: arm {self._arm!r}: no knobs are in force and no initial ones were given; expected the "
                "gateway or `cachepilot tune` to have written some, or initial=Knobs(...)"
            )
        if state is None or state.arms.get(self._arm) != knobs:
            state = self._loop.run(self._write(knobs, "initial knobs of an episode"))
        self._applied = self._confirm(state)
        signals, fault = self._observe(knobs)
        self._observation = self._builder.build(signals, knobs)
        self._predict(signals, knobs)  # takes the window into the smoothed price of a miss
        return self._observation.vector.copy(), self._info(knobs, Cost(*([math.nan] * 7)), math.nan, self._applied.fault or fault)

    def step(self, action: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Put the action's knobs in force and observe one interval.

        Raises:
            ValueError: If the action is not three finite numbers.
        """
        before = self.observation
        wanted = self._actions.knobs(action, before.anchor or before.knobs, self._space)
        return self.step_knobs(wanted if before.anchor is not None else before.knobs)

    def step_knobs(self, wanted: Knobs) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Put given knobs in force, limited like an action's, and observe one interval."""
        before = self.observation
        reference = before.anchor or before.knobs
        current = before.knobs
        knobs = wanted if wanted == current else limit_step(wanted, current, self._space, self._max_steps)
        self._applied = self._put(knobs)
        # What the store holds is what was in force, whoever wrote it.
        knobs = self._applied.state.arms.get(self._arm, current)
        signals, fault = self._observe(knobs)
        fault = self._applied.fault or fault
        self._observation = self._builder.build(signals, knobs)
        moved = float(np.linalg.norm(self._space.to_steps(knobs) - self._space.to_steps(current)))
        cost = price(signals.usage(float(knobs.cache_size), moved), self._prices)
        predicted = self._predict(signals, reference)
        reward = 0.0
        if not (math.isfinite(cost.total) and math.isfinite(predicted)):
            fault = fault or f"the window could not be priced: {_unpriced(signals, cost)}"
        elif not fault:
            reward = self._reward(cost.total, predicted, signals.requests)
        self._steps += 1
        truncated = self._length is not None and self._steps >= self._length
        info = {**self._info(knobs, cost, predicted, fault), "reference_knobs": reference.to_dict()}
        return self._observation.vector.copy(), reward, False, truncated, info

    def close(self) -> None:
        """Close the source and the store and end the environment's own thread; the gateway stays on its last knobs."""
        if not self._loop.closed:
            self._source.close()
            self._loop.run(self._store.close())
            self._loop.close()

    def _reward(self, cost: float, predicted: float, requests: float) -> float:
        dollars = predicted * requests / 1000.0
        self._units = [*self._units[-63:], dollars]
        unit = sum(self._units) / len(self._units)
        reward = (predicted - cost) * requests / 1000.0 / unit if unit > 0 else 0.0
        return float(min(max(reward, -REWARD_LIMIT), REWARD_LIMIT))

    def _predict(self, signals: ArmSignals, reference: Knobs) -> float:
        """Return what ``reference`` would have cost on the window's requests, US dollars per 1,000; NaN where unknown."""
        self._curves.update(signals)
        reading = self._curves.read()
        return (
            math.nan if reading is None or reading.last_costs is None else cost_at(reading.last_costs, reading.curve, reference)
        )

    def _observe(self, knobs: Knobs) -> tuple[ArmSignals, str]:
        """Wait for an interval to pass and read it; without a source the signals are missing, not old."""
        began = self._clock()
        self._wait(self._interval)
        fault = ""
        try:
            self._source.refresh()
        except SourceUnavailable as error:
            fault = str(error)
        now = self._clock()
        # A wait or a scrape that took longer than it should (a loaded machine) must not push the beginning out of the window.
        window = self._window + max(0.0, now - began - self._interval)
        if not fault:
            try:
                return read_signals(
                    self._source,
                    self._arm,
                    window=window,
                    now=now,
                    knobs=knobs,
                    space=self._space,
                    prices=self._prices,
                ), ""
            except SourceUnavailable as error:
                fault = str(error)
        return ArmSignals(self._arm, now, window), fault

    def _put(self, knobs: Knobs) -> Applied:
        """Write the knobs and wait for the replicas; where that fails the gateway stays on what it has."""
        assert self._applied is not None
        try:
            return self._confirm(self._loop.run(self._write(knobs, "an action of the live environment")))
        except (ConfigStoreUnavailable, RuntimeError) as error:
            return Applied(self._applied.state, 0, 0, str(error))

    async def _write(self, knobs: Knobs, reason: str) -> DesiredState:
        for attempt in range(ATTEMPTS):
            state = await self._store.read()
            if state is not None and state.arms.get(self._arm) == knobs:
                return state
            arms = {**(state.arms if state is not None else {}), self._arm: knobs}
            version = state.version if state is not None else 0
            try:
                return await self._store.write(
                    arms, expected_version=version, author="live-env", reason=reason, now=self._clock()
                )
            except VersionConflict:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _confirm(self, state: DesiredState) -> Applied:
        deadline = self._clock() + self._confirm_timeout
        while True:
            replicas = self._loop.run(self._store.applied())
            confirmed = sum(replica.version >= state.version for replica in replicas)
            if confirmed == len(replicas) and confirmed >= self._replicas:
                return Applied(state, confirmed, len(replicas))
            if self._clock() >= deadline:
                expected = max(len(replicas), self._replicas)
                fault = (
                    f"{confirmed} of {expected} replicas report version {state.version} after {self._confirm_timeout:g} s; "
                    "expected all of them: check that the gateway runs and shares the store and the namespace"
                )
                return Applied(state, confirmed, expected, fault)
            self._wait(POLL)

    def _info(self, knobs: Knobs, cost: Cost, predicted: float, fault: str) -> dict[str, Any]:
        assert self._applied is not None
        assert self._observation is not None
        signals = self._observation.signals
        return {
            "cost": cost.to_dict() if math.isfinite(cost.total) else {},
            "reference_cost": {"total": predicted} if math.isfinite(predicted) else {},
            "requests": signals.requests,
            "hit_ratio": signals.hit_ratio,
            "knobs": knobs.to_dict(),
            "version": self._applied.state.version,
            "confirmed": self._applied.confirmed,
            "expected": self._applied.expected,
            "fault": fault,
        }


def _unpriced(signals: ArmSignals, cost: Cost) -> str:
    """Say what a window lacks for it, or its reference, to have a price."""
    if not signals.requests > 0:
        return "requests were not exported" if math.isnan(signals.requests) else f"no requests in {signals.window:g} s"
    missing = [name for name, value in cost.to_dict().items() if not math.isfinite(value) and name != "total"]
    if missing:
        return f"signals are missing for the cost of {', '.join(missing)}"
    if signals.ghost is None or not signals.ghost.requests > 0:
        return "the ghost curve is missing or had no requests; expected ghost.enabled and the same grid in the gateway"
    return "no miss was ever seen, so its price is not known"


class _LoopThread:
    """An event loop of its own: the store is asynchronous, the environment is not, and its caller may be in a loop itself."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="live-env", daemon=True)
        self._thread.start()

    def run(self, what: Coroutine[Any, Any, _T]) -> _T:
        future: Future[_T] = asyncio.run_coroutine_threadsafe(what, self._loop)
        return future.result()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
