"""What an episode of ``CacheTuning-v0`` is played on, and what differs between episodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from envs.action import MAX_STEPS, RESIDUAL, ActionMap
from envs.objective import Prices
from envs.observation import Observation
from envs.observation_vector import mask_of
from envs.simulator import SimConfig
from envs.workloads import Trace
from serving.knobs import Knobs, KnobSpace


@runtime_checkable
class ActingReference(Protocol):
    """A policy to beat that acts as the learner does: by vectors, for many lanes at once."""

    def act(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return actions, shape (E, 3), for the references' observations, shape (E, DIM)."""
        ...


Reference = Literal["curve", "hold"] | Callable[[Observation], Knobs] | ActingReference
Reward = Literal["dollars", "relative"]


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
    """What differs between episodes (domain randomisation), so that a policy does not learn one trace by heart.

    A factor ``f`` multiplies by a number drawn log-uniformly from 1/f to f; 1 is none.

    Attributes:
        start: Draw where in the trace an episode starts.
        knobs: Draw the initial knobs from the whole space where the scenario gives none.
        prices: Factor of each price by itself (not of the objective on P99, nor of the time scale).
        clock: Draw the time of day at which the trace starts.
        absent: Probability that an episode lacks a signal that not every deployment has (model load, entropy, drift, regret).
        capacity: Factor of the bounds of ``cache_size``, and of the initial size where the scenario gives one.
        load: Factor of the requests per second: the trace's time runs faster or slower, everything else does not. One of few
            speeds, evenly spaced, since a trace is prepared anew for each; never so fast that an episode no longer fits.
        staleness: Factor of the half-life of an answer's truth.
        slots: Factor of the model's slots, rounded, at least 1.
    """

    start: bool = True
    knobs: bool = True
    prices: float = 2.0
    clock: bool = False
    absent: float = 0.0
    capacity: float = 1.0
    load: float = 1.0
    staleness: float = 1.0
    slots: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prices", "capacity", "load", "staleness", "slots"):
            factor = getattr(self, name)
            if not 1.0 <= factor < math.inf:
                raise ValueError(f"randomisation: {name}: expected a factor >= 1, got {factor!r}")
        if not 0.0 <= self.absent <= 1.0:
            raise ValueError(f"randomisation: absent: expected a probability, got {self.absent!r}")


FIXED = Randomisation(start=False, knobs=False, prices=1.0)
"""Every episode is the same: for evaluation."""

DOMAIN = Randomisation(capacity=2.0, load=2.0, staleness=4.0, slots=2.0, clock=True, absent=0.1)
"""Everything differs: what ``CacheTuning-v0`` does unless it is told otherwise."""

LOADS = 5
"""Different speeds of a trace under :attr:`Randomisation.load`."""

_OPTIONAL = ("upstream_running", "upstream_waiting", "gpu_cache_usage", "entropy", "drift", "regret")
_NAMED = ("curve", "hold")
_UNPRICED = ("slo_p99", "time_scale")
_SLOT = "_at_other_speeds"


@dataclass(frozen=True)
class Episode:
    """What was drawn for one episode.

    Attributes:
        trace: The requests.
        config: The simulated cache, its knob space and prices.
        interval: Seconds between two decisions.
        start: Number of the request at which the episode starts.
        clock: Where the trace's clock starts, seconds; None: at that request.
        initial: Knobs of both caches at the start.
        clock_origin: Clock time at which the workload's own day starts, seconds.
        hidden: Signals that the episode lacks.
        seed: Chooses the ghost's sample.
    """

    trace: Trace
    config: SimConfig
    interval: float
    start: int
    clock: float | None
    initial: Knobs
    clock_origin: float
    hidden: frozenset[str]
    seed: int


@dataclass(frozen=True)
class Task:
    """What is to be learned: the scenarios, whom to beat, what an action may do, and how the reward is counted.

    Attributes:
        scenarios: Draws the scenario of each episode from a random generator.
        episode_length: Steps of an episode, at least 1.
        reference: Whom to beat: ``curve`` (the optimum of the smoothed curve), ``hold`` (the initial knobs for ever), or a
            function of the observation of the reference's own cache, or what acts as the learner does.
        randomise: What differs between episodes.
        actions: What an action means.
        taped: Whether an episode finds a ghost that has run since the trace's start, as beside a cache that was just emptied,
            instead of one that starts with it; its windows are kept with the trace, which makes training several times faster.
            Episodes then start at multiples of the interval, and all ghosts of a trace have one sample.
        hidden: Components of the observation that are taken away, for ablation (:func:`envs.observation_vector.mask_of`).
        max_steps: Most that one interval may move each knob, grid steps.
        reward: ``dollars``: the reference's cost less ours, US dollars per 1,000 requests. ``relative``: dollars of the window
            in units of the reference's mean cost of an interval, clipped; for training.

    Raises:
        ValueError: If a value is out of its range.
    """

    scenarios: Callable[[np.random.Generator], Scenario]
    episode_length: int = 64
    reference: Reference = "curve"
    randomise: Randomisation = DOMAIN
    actions: ActionMap = RESIDUAL
    max_steps: tuple[float, float, float] = MAX_STEPS
    reward: Reward = "dollars"
    hidden: tuple[str, ...] = ()
    taped: bool = False

    def __post_init__(self) -> None:
        if self.episode_length < 1:
            raise ValueError(f"CacheTuning: episode_length: expected at least 1 step, got {self.episode_length!r}")
        if not callable(self.reference) and not isinstance(self.reference, ActingReference) and self.reference not in _NAMED:
            raise ValueError(f"CacheTuning: reference: expected curve, hold or a function, got {self.reference!r}")
        if self.reward not in ("dollars", "relative"):
            raise ValueError(f"CacheTuning: reward: expected dollars or relative, got {self.reward!r}")
        if len(self.max_steps) != 3 or not all(0 < steps < math.inf for steps in self.max_steps):
            raise ValueError(f"CacheTuning: max_steps: expected three finite numbers of grid steps > 0, got {self.max_steps!r}")
        mask_of(self.hidden)

    def draw(self, rng: np.random.Generator) -> Episode:
        """Draw an episode.

        Raises:
            ValueError: If the scenario's trace does not last longer than one interval.
        """
        scenario, randomise, length = self.scenarios(rng), self.randomise, self.episode_length
        check(scenario)
        trace, interval = scenario.trace, scenario.interval
        prices = _draw_prices(scenario.config.prices, randomise.prices, rng)
        config = replace(scenario.config, prices=prices)
        initial = scenario.initial
        if randomise.capacity != 1.0:
            config, initial = _resized(config, initial, _factor(randomise.capacity, rng))
        if randomise.load != 1.0:
            trace = _at_speed(trace, randomise.load, int(rng.integers(LOADS)), (length + 1) * interval)
        if randomise.staleness != 1.0:
            config = replace(config, staleness_half_life=config.staleness_half_life * _factor(randomise.staleness, rng))
        if randomise.slots != 1.0:
            slots = max(1, round(config.upstream.slots * _factor(randomise.slots, rng)))
            config = replace(config, upstream=replace(config.upstream, slots=slots))
        start, clock = 0, 0.0 if self.taped else None
        if randomise.start and self.taped:
            latest = math.floor((trace.duration - (length + 1) * interval) / interval)
            clock = interval * int(rng.integers(0, max(latest, 0) + 1))
            start = int(np.searchsorted(trace.time, clock, side="left"))
        elif randomise.start:
            # The last request from which a whole episode, and the interval before it, still fits.
            latest = int(np.searchsorted(trace.time, trace.duration - (length + 1) * interval, side="right"))
            start = int(rng.integers(0, max(latest, 1)))
        if initial is None:
            initial = _draw_knobs(config.space, rng) if randomise.knobs else _middle(config.space)
        origin = -float(rng.uniform(0.0, 86_400.0)) / prices.time_scale if randomise.clock else 0.0
        hidden = frozenset(name for name in _OPTIONAL if randomise.absent and rng.random() < randomise.absent)
        return Episode(trace, config, interval, start, clock, initial, origin, hidden, int(rng.integers(0, 2**31)))


def check(scenario: Scenario) -> None:
    """Refuse a scenario that holds no episode.

    Raises:
        ValueError: If its trace does not last longer than one interval.
    """
    trace = scenario.trace
    if not 0 < scenario.interval < math.inf:
        raise ValueError(f"CacheTuning: interval: expected finite seconds > 0, got {scenario.interval!r}")
    if not len(trace) or trace.duration <= scenario.interval:
        raise ValueError(
            f"CacheTuning: trace {trace.name}: expected to last longer than one interval of {scenario.interval:g} s, "
            f"got {len(trace)} requests in {trace.duration:g} s"
        )


def _factor(most: float, rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(-math.log(most), math.log(most))))


def _draw_prices(prices: Prices, factor: float, rng: np.random.Generator) -> Prices:
    if factor == 1.0:
        return prices
    names = [item.name for item in fields(prices) if item.name not in _UNPRICED]
    drawn = np.exp(rng.uniform(-math.log(factor), math.log(factor), len(names)))
    changed = {name: float(getattr(prices, name) * by) for name, by in zip(names, drawn, strict=True)}
    return replace(prices, **changed)


def _resized(config: SimConfig, initial: Knobs | None, by: float) -> tuple[SimConfig, Knobs | None]:
    space = config.space
    least = max(1, round(space.min_size * by))
    resized = replace(space, min_size=least, max_size=max(round(space.max_size * by), least + space.size_steps))
    if initial is not None:
        initial = replace(initial, cache_size=round(initial.cache_size * by))
    return replace(config, space=resized), initial


def _at_speed(trace: Trace, factor: float, step: int, needed: float) -> Trace:
    """Return the trace at one of the speeds, kept with it, so that it is prepared for the simulator once per speed.

    Args:
        trace: The trace.
        factor: The greatest speed; the least is its inverse.
        step: Which speed, 0 to ``LOADS - 1``.
        needed: Seconds that it should still last, if it does so now.
    """
    speed = factor ** (2.0 * step / (LOADS - 1) - 1.0)
    speed = min(speed, max(1.0, trace.duration / needed))
    if speed == 1.0:
        return trace
    known: dict[float, Trace] = trace.__dict__.setdefault(_SLOT, {})
    if speed not in known:
        known[speed] = trace.compress(speed)
    return known[speed]


def _draw_knobs(space: KnobSpace, rng: np.random.Generator) -> Knobs:
    steps = rng.uniform(0.0, 1.0, 3) * [space.size_steps - 1, space.ttl_steps - 1, space.warmup_steps - 1]
    steps[2] *= rng.random() < 0.5  # half of all caches start without warm-up
    return space.from_steps(steps)


def _middle(space: KnobSpace) -> Knobs:
    return space.from_steps([(space.size_steps - 1) / 2, (space.ttl_steps - 1) / 2, 0.0])
