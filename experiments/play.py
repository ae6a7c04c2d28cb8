"""Many policies side by side on the same requests: each tunes a cache of its own, all read one ghost.

The ghost depends on the requests and not on the knobs, so it is kept once, by the first policy's cache; the others follow it
(:meth:`envs.simulator.CacheSimulator.follow`). What a policy sees and gets is, to the last bit, what
:class:`envs.cache_env.CacheTuningEnv` gives it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from gymnasium.utils.seeding import np_random

from agents.policy import Policy
from envs.action import MAX_STEPS, next_knobs_batch
from envs.knob_batch import Floats, SpaceBatch, to_array, to_knobs
from envs.objective import COST_TERMS, PriceBatch
from envs.observation import Observation, ObservationBatch
from envs.signal_batch import SIGNALS, SignalBatch
from envs.simulator import CacheSimulator
from envs.simulator.batch import SimulatorBatch
from envs.smoothing import Place, window_regret
from envs.task import FIXED, Episode, Scenario, Task

_TIERS = ("memory", "redis", "vector")


@dataclass(frozen=True)
class Run:
    """One policy on one scenario, interval by interval; the first one, which runs on the initial knobs, is left out.

    Attributes:
        policy: The policy's name.
        dollars: What each interval cost, US dollars, 0 without requests, shape (W,).
        requests: Requests, shape (W,).
        hits: Requests answered from the cache, shape (W,).
        terms: Dollars by term of the objective (:data:`envs.objective.COST_TERMS`), each of shape (W,).
        p99: 99th percentile of latency, seconds, NaN without requests, shape (W,).
        knobs: The knobs in force: bytes, seconds, share, shape (W, 3).
    """

    policy: str
    dollars: Floats
    requests: Floats
    hits: Floats
    terms: Mapping[str, Floats]
    p99: Floats
    knobs: Floats


def play_all(
    policies: Sequence[Policy],
    scenario: Scenario,
    *,
    length: int | None = None,
    seed: int = 0,
    max_steps: tuple[float, float, float] = MAX_STEPS,
    progress: Callable[[float], None] | None = None,
) -> list[Run]:
    """Run every policy through a scenario from its first request, from empty caches.

    Args:
        policies: The policies, each an object of its own; they are reset first.
        scenario: Trace, cache and interval.
        length: Most intervals to run after the first; default: all of the trace.
        seed: Chooses the ghost's sample.
        max_steps: Most that one interval may move each knob, grid steps.
        progress: Called after each interval with the share of the run that is done, above 0, at most 1.

    Returns:
        One run for each policy, in their order.

    Raises:
        ValueError: If there is no policy, one is there twice, or the trace does not last longer than one interval.
    """
    if not policies or len({id(policy) for policy in policies}) != len(policies):
        raise ValueError(f"play: expected at least one policy, each an object of its own, got {[each.name for each in policies]}")
    if length is None:
        length = max(1, math.ceil(scenario.trace.duration / scenario.interval) + 1)
    task = Task(lambda rng: scenario, length, reference="hold", randomise=FIXED, max_steps=max_steps)
    caches = _Caches(task.draw(np_random(seed)[0]), len(policies), max_steps)
    for policy in policies:
        policy.reset()
    caches.step()
    windows: list[_Window] = []
    while not caches.done and len(windows) < length:
        wanted = [policy.decide(caches.observation(lane)).knobs for lane, policy in enumerate(policies)]
        caches.move(to_array(wanted))
        windows.append(caches.step())
        if progress is not None:
            progress(len(windows) / length)
    return [_run(policy.name, lane, windows) for lane, policy in enumerate(policies)]


@dataclass(frozen=True)
class _Window:
    """One interval of E lanes: arrays of shape (E,), terms of shape (E, terms), knobs of shape (E, 3)."""

    dollars: Floats
    requests: Floats
    hits: Floats
    terms: Floats
    p99: Floats
    knobs: Floats


class _Caches:
    """E caches on one episode, stepped together."""

    def __init__(self, episode: Episode, count: int, max_steps: tuple[float, float, float]) -> None:
        self._episode = episode
        self._max_steps = max_steps
        space = episode.config.space
        self._spaces = SpaceBatch.of([space] * count)
        self._prices = PriceBatch.of([episode.config.prices] * count)
        self._builder = ObservationBatch(self._spaces, self._prices, clock_origin=np.full(count, episode.clock_origin))
        self._grid = self._builder.curves.grid
        self._hidden = np.repeat(np.array([[name in episode.hidden] for name in SIGNALS]), count, axis=1)
        self._durations = np.full(count, episode.interval)
        self._knobs = to_array([episode.initial] * count)
        leader, follower = episode.config, replace(episode.config, ghost_keys=0)
        simulators = [
            CacheSimulator(episode.trace, config, episode.initial, start=episode.start, seed=episode.seed)
            for config in (leader, *[follower] * (count - 1))
        ]
        for simulator in simulators[1:]:
            simulator.follow(simulators[0])
        self._simulators = SimulatorBatch(simulators)
        self.done = False

    def move(self, wanted: Floats) -> None:
        """Put knobs into effect, shape (E, 3), limited as the environment limits them."""
        knobs = next_knobs_batch(wanted, self._knobs, self._spaces, self._max_steps)
        for lane in np.flatnonzero((knobs != self._knobs).any(axis=1)).tolist():
            self._simulators.apply(lane, to_knobs(knobs[lane]))
        self._knobs = knobs

    def step(self) -> _Window:
        """Run one interval and observe it."""
        window = self._simulators.step(self._durations)
        self.done = bool(window.done.any())
        signals = SignalBatch.of(window.columns, self._grid, window.ghost_hits, window.ghost_stale, window.ghost_requests)
        place = Place.of(self._grid, self._knobs)
        regret = window_regret(signals, place, self._prices)
        self._columns = window.columns
        self._observed = observed = self._builder.build(signals.shown(regret, self._hidden), self._knobs, place)
        requests, cost = window.columns["requests"], observed.cost
        priced = np.isfinite(cost.total)
        terms = np.stack([getattr(cost, name) for name in COST_TERMS], axis=1)
        ratio = observed.signals["hit_ratio"]
        return _Window(
            dollars=np.where(priced, cost.total * requests / 1000.0, 0.0),
            requests=requests,
            hits=np.where(np.isnan(ratio), 0.0, requests * ratio),
            terms=np.where(priced[:, None], terms * requests[:, None] / 1000.0, 0.0),
            p99=observed.signals["p99"],
            knobs=self._knobs,
        )

    def observation(self, lane: int) -> Observation:
        """Return what the policy of a lane decides from."""
        config = self._episode.config
        semantic = config.semantic and self._episode.trace.match_probability > 0
        tiers = {tier: float(self._columns[tier][lane]) for tier in _TIERS if semantic or tier != "vector"}
        signals = self._observed.signals.lane(lane, config.arm, tiers)
        return self._observed.lane(lane, config.space, config.prices, signals)


def _run(name: str, lane: int, windows: Sequence[_Window]) -> Run:
    def column(attribute: str) -> Floats:
        return np.array([getattr(window, attribute)[lane] for window in windows], np.float64)

    terms = column("terms").reshape(-1, len(COST_TERMS))
    return Run(
        policy=name,
        dollars=column("dollars"),
        requests=column("requests"),
        hits=column("hits"),
        terms={term: terms[:, index].copy() for index, term in enumerate(COST_TERMS)},
        p99=column("p99"),
        knobs=column("knobs").reshape(-1, 3),
    )
