"""``CacheTuning-v0``: tune a simulated cache on a trace, against a reference policy on the same requests.

One step is one decision interval. The action is a bounded residual, in grid steps, around the optimum of the smoothed ghost curve
(see :mod:`envs.action`); what one interval may change is limited as by the guard of a live cache. The reward is what the
reference's cache cost on the very same requests less what ours cost, in units of the reference's mean cost of an interval: a
policy is paid for beating the reference and for nothing that the traffic does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from envs.action import MAX_STEPS, RADIUS, limit_step, residual
from envs.objective import Cost, Prices, price
from envs.observation import DIM, HIGH, LOW, Observation, ObservationBuilder
from envs.signals import NAN, ArmSignals
from envs.simulator import CacheSimulator, SimConfig, Window
from envs.workloads import Trace, sessions
from serving.knobs import Knobs, KnobSpace

REWARD_LIMIT = 3.0
"""Rewards are clipped to this many mean interval costs: one burst must not drown everything else that was learned."""

Reference = Literal["curve", "hold"] | Callable[[Observation], Knobs]


@dataclass(frozen=True)
class Scenario:
    """What an episode is played on.

    Attributes:
        trace: The requests of one arm.
        config: The simulated cache, its knob space and prices.
        interval: Seconds between two decisions.
        initial: Knobs of both caches at the start; None: drawn, or the grid's middle.
    """

    trace: Trace
    config: SimConfig
    interval: float
    initial: Knobs | None = None


@dataclass(frozen=True, slots=True)
class Randomisation:
    """What differs between episodes, so that a policy does not learn one trace by heart.

    Attributes:
        start: Draw where in the trace an episode starts.
        knobs: Draw the initial knobs from the whole space where the scenario gives none.
        prices: Each price is multiplied by a factor drawn log-uniformly from 1/prices to prices; 1 for none.
        clock: Draw the time of day at which the trace starts.
        absent: Probability that an episode lacks a signal that not every deployment has (model load, entropy, drift, regret).
    """

    start: bool = True
    knobs: bool = True
    prices: float = 2.0
    clock: bool = False
    absent: float = 0.0

    def __post_init__(self) -> None:
        if not 1.0 <= self.prices < math.inf:
            raise ValueError(f"randomisation: prices: expected a factor >= 1, got {self.prices!r}")
        if not 0.0 <= self.absent <= 1.0:
            raise ValueError(f"randomisation: absent: expected a probability, got {self.absent!r}")


FIXED = Randomisation(start=False, knobs=False, prices=1.0)
"""Every episode is the same: for evaluation."""

_OPTIONAL = ("upstream_running", "upstream_waiting", "gpu_cache_usage", "entropy", "drift", "regret")
_UNPRICED = ("slo_p99", "time_scale")


class CacheTuningEnv(gym.Env[npt.NDArray[np.float32], npt.NDArray[np.float32]]):
    """Tune the three knobs of a simulated cache; see the module.

    Observation: ``Box(float32, (DIM,))``, see :data:`envs.observation.COMPONENTS`. Action: ``Box(-1, 1, (3,), float32)``: size,
    TTL, warm-up ratio around the anchor; without a curve the knobs are held. An episode is never terminated but truncated, after
    ``episode_length`` steps or at the trace's end. Equal seeds give equal episodes, to the last bit.

    ``info`` holds ``cost`` and ``reference_cost`` (US dollars per 1,000 requests, by term and ``total``; empty without any
    requests), ``dollars`` and ``reference_dollars`` (of the window), ``requests``, ``knobs``, ``reference_knobs``, ``hit_ratio``
    and ``reference_hit_ratio`` (absent without requests).

    Args:
        trace: The requests of one arm; default: a generated workload, or what ``scenarios`` draws.
        config: The simulated cache; default: :class:`~envs.simulator.SimConfig`'s.
        prices: Replace those of ``config``.
        interval: Seconds between two decisions.
        episode_length: Steps of an episode, at least 1.
        reference: Whom to beat: ``curve`` (the optimum of the smoothed curve), ``hold`` (the initial knobs for ever), or a
            function of the observation of the reference's own cache.
        initial: Knobs of both caches at the start.
        scenarios: Draws the scenario of each episode from a random generator, in place of the arguments above.
        randomise: What differs between episodes.
        radius: Grid steps that an action of 1 stands for.
        max_steps: Most that one interval may move each knob, grid steps.
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
        randomise: Randomisation = Randomisation(),
        radius: tuple[float, float, float] = RADIUS,
        max_steps: tuple[float, float, float] = MAX_STEPS,
        render_mode: str | None = None,
    ) -> None:
        if scenarios is not None and (trace is not None or config is not None or prices is not None or initial is not None):
            raise ValueError("CacheTuning: expected either scenarios, or trace, config, prices and initial; got both")
        if not 0 < interval < math.inf:
            raise ValueError(f"CacheTuning: interval: expected finite seconds > 0, got {interval!r}")
        if episode_length < 1:
            raise ValueError(f"CacheTuning: episode_length: expected at least 1 step, got {episode_length!r}")
        if not callable(reference) and reference not in ("curve", "hold"):
            raise ValueError(f"CacheTuning: reference: expected curve, hold or a function, got {reference!r}")
        if render_mode is not None:
            raise ValueError(f"CacheTuning: render_mode: expected None, got {render_mode!r}")
        if scenarios is None:
            config = config or SimConfig()
            config = replace(config, prices=prices) if prices is not None else config
            fixed = Scenario(_default_trace() if trace is None else trace, config, interval, initial)
            _check(fixed, episode_length)
            self._scenarios: Callable[[np.random.Generator], Scenario] = lambda rng: fixed
        else:
            self._scenarios = scenarios
        self._length = episode_length
        self._reference_policy = reference
        self._randomise = randomise
        self._radius = radius
        self._max_steps = max_steps
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(LOW, HIGH, (DIM,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._episode: _Episode | None = None

    @property
    def observation(self) -> Observation:
        """The whole observation behind the last vector: for policies that need more than the vector.

        Raises:
            RuntimeError: Before the first ``reset``.
        """
        return self._running().observation

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Start an episode: both caches run one interval on the initial knobs, from empty."""
        super().reset(seed=seed)
        self._episode = episode = _Episode(self._scenarios, self._randomise, self._length, self.np_random)
        return episode.observation.vector.copy(), episode.info()

    def step(self, action: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one interval under the action's knobs.

        Raises:
            ValueError: If the action is not three finite numbers.
        """
        now = self._running().observation
        wanted = residual(action, now.anchor or now.knobs, now.space, self._radius)
        return self.step_knobs(wanted if now.anchor is not None else now.knobs)

    def step_knobs(self, wanted: Knobs) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one interval under given knobs, limited like an action's: how policies other than residual ones are evaluated."""
        episode = self._running()
        if episode.over:
            raise RuntimeError("CacheTuning: the episode is over: expected reset() before the next step")
        reward = episode.step(wanted, self._follow(episode.reference.observation), self._max_steps)
        return episode.observation.vector.copy(), reward, False, episode.over, episode.info()

    def _follow(self, observation: Observation) -> Knobs:
        if callable(self._reference_policy):
            return self._reference_policy(observation)
        if self._reference_policy == "curve" and observation.anchor is not None:
            return observation.anchor
        return observation.knobs

    def _running(self) -> _Episode:
        if self._episode is None:
            raise RuntimeError("CacheTuning: expected reset() before anything else")
        return self._episode


class _Side:
    """One cache with its observations: ours, or the reference's."""

    def __init__(self, simulator: CacheSimulator, builder: ObservationBuilder, hidden: frozenset[str]) -> None:
        self._simulator = simulator
        self._builder = builder
        self._hidden = hidden
        self.cost = Cost(*([NAN] * 7))
        self.dollars = 0.0
        self.requests = 0.0

    def take(self, window: Window, prices: Prices) -> None:
        """Account for a window and observe it."""
        self.cost = price(window.usage, prices)
        self.requests = window.usage.requests
        total = self.cost.total
        self.dollars = total * self.requests / 1000.0 if math.isfinite(total) else 0.0
        self.observation = self._builder.build(self._visible(window.signals), self._simulator.knobs)

    def run(self, wanted: Knobs, interval: float, max_steps: tuple[float, float, float]) -> bool:
        """Run one interval; whether the trace has ended."""
        space, prices = self._simulator.config.space, self._simulator.config.prices
        current = self._simulator.knobs
        knobs = wanted if wanted == current else limit_step(wanted, current, space, max_steps)
        self._simulator.apply(knobs)
        window = self._simulator.step(interval)
        self.take(window, prices)
        return window.done

    def _visible(self, signals: ArmSignals) -> ArmSignals:
        hidden: dict[str, Any] = dict.fromkeys(self._hidden, NAN)
        return replace(signals, **hidden) if hidden else signals

    def info(self, prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {
            f"{prefix}cost": self.cost.to_dict() if math.isfinite(self.cost.total) else {},
            f"{prefix}dollars": self.dollars,
            f"{prefix}knobs": self._simulator.knobs.to_dict(),
        }
        ratio = self.observation.signals.hit_ratio
        return values if math.isnan(ratio) else {**values, f"{prefix}hit_ratio": ratio}


class _Episode:
    """Two caches on one stretch of one trace."""

    def __init__(
        self,
        scenarios: Callable[[np.random.Generator], Scenario],
        randomise: Randomisation,
        length: int,
        rng: np.random.Generator,
    ) -> None:
        scenario = scenarios(rng)
        _check(scenario, length)
        trace, self.interval = scenario.trace, scenario.interval
        prices = _draw_prices(scenario.config.prices, randomise.prices, rng)
        config = replace(scenario.config, prices=prices)
        start = 0
        if randomise.start:
            # The last request from which a whole episode, and the interval before it, still fits.
            latest = int(np.searchsorted(trace.time, trace.duration - (length + 1) * self.interval, side="right"))
            start = int(rng.integers(0, max(latest, 1)))
        initial = scenario.initial
        if initial is None:
            initial = _draw_knobs(config.space, rng) if randomise.knobs else _middle(config.space)
        origin = -float(rng.uniform(0.0, 86_400.0)) / prices.time_scale if randomise.clock else 0.0
        hidden = frozenset(name for name in _OPTIONAL if randomise.absent and rng.random() < randomise.absent)
        simulator = CacheSimulator(trace, config, initial, start=start, seed=int(rng.integers(0, 2**31)))
        window = simulator.step(self.interval)
        twin = simulator.clone()
        self.ours, self.reference = (
            _Side(cache, ObservationBuilder(config.space, prices, clock_origin=origin), hidden) for cache in (simulator, twin)
        )
        for side in (self.ours, self.reference):
            side.take(window, prices)
        self._left = length
        self._unit = _Mean()
        self._unit.add(self.reference.dollars)
        self.over = window.done

    @property
    def observation(self) -> Observation:
        return self.ours.observation

    def step(self, wanted: Knobs, reference: Knobs, max_steps: tuple[float, float, float]) -> float:
        done = self.ours.run(wanted, self.interval, max_steps)
        self.reference.run(reference, self.interval, max_steps)
        self._left -= 1
        self.over = done or self._left <= 0
        self._unit.add(self.reference.dollars)
        unit = self._unit.value
        reward = (self.reference.dollars - self.ours.dollars) / unit if unit > 0 else 0.0
        return float(min(max(reward, -REWARD_LIMIT), REWARD_LIMIT))

    def info(self) -> dict[str, Any]:
        return {"requests": self.ours.requests, **self.ours.info(""), **self.reference.info("reference_")}


class _Mean:
    """Running mean of the reference's dollars per interval, slowly forgetting; it depends on nothing that we do."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = 0.95 * self._sum + value
        self._weight = 0.95 * self._weight + 1.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0


def _check(scenario: Scenario, length: int) -> None:
    trace = scenario.trace
    if not len(trace) or trace.duration <= scenario.interval:
        raise ValueError(
            f"CacheTuning: trace {trace.name}: expected to last longer than one interval of {scenario.interval:g} s, "
            f"got {len(trace)} requests in {trace.duration:g} s"
        )


def _draw_prices(prices: Prices, factor: float, rng: np.random.Generator) -> Prices:
    if factor == 1.0:
        return prices
    names = [item.name for item in fields(prices) if item.name not in _UNPRICED]
    drawn = np.exp(rng.uniform(-math.log(factor), math.log(factor), len(names)))
    changed = {name: float(getattr(prices, name) * by) for name, by in zip(names, drawn, strict=True)}
    return replace(prices, **changed)


def _draw_knobs(space: KnobSpace, rng: np.random.Generator) -> Knobs:
    steps = rng.uniform(0.0, 1.0, 3) * [space.size_steps - 1, space.ttl_steps - 1, space.warmup_steps - 1]
    steps[2] *= rng.random() < 0.5  # half of all caches start without warm-up
    return space.from_steps(steps)


def _middle(space: KnobSpace) -> Knobs:
    return space.from_steps([(space.size_steps - 1) / 2, (space.ttl_steps - 1) / 2, 0.0])


def _default_trace() -> Trace:
    return sessions(40_000, 4_000, duration=8 * 3600.0, hot_swaps=(4 * 3600.0,))
