"""Scenarios played along given paths of knobs, many side by side: what hindsight is made of.

:class:`envs.lanes.Lanes` plays each scenario beside a reference whose cache is simulated as well, and makes an observation of
every interval of both. Here each cache is alone, what nobody will look at is not computed, and a place whose scenario has come to
its end is given to the next one. What a walk sees and pays is, to the last bit, what Lanes makes of the same knobs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from envs.action import next_knobs_batch
from envs.knob_batch import Floats, SpaceBatch, distance, put_lanes, to_array, to_knobs
from envs.objective import PriceBatch, price_batch
from envs.observation import ObservationBatch
from envs.observation_vector import DIM, mask_of
from envs.signal_batch import SIGNALS, SignalBatch
from envs.simulator import CacheSimulator
from envs.simulator.batch import SimulatorBatch
from envs.simulator.tape import tape_of
from envs.smoothing import Place, window_regret
from envs.task import FIXED, Episode, Scenario, Task

LANES = 32
"""Caches that are stepped side by side: more would save no more of what each step costs at least, but take more memory."""


@dataclass(frozen=True)
class Walk:
    """One way through a scenario.

    Attributes:
        scenario: Number of the scenario.
        path: Where the knobs should be in each interval after the first, grid steps, shape (W, 3); the last row stays in force.
        away: Added to where the walk leads in each interval, grid steps, shape (at least as many as it lasts, 3); None: nothing.
        follow: Whether the walk leads along the path; else along the optimum of the smoothed curve.
        limit: US dollars at which the walk is given up: what it would come to does not matter then.
    """

    scenario: int
    path: Floats
    away: Floats | None = None
    follow: bool = True
    limit: float = math.inf


@dataclass(frozen=True)
class Played:
    """What N walks came to.

    Attributes:
        dollars: What each cost in the intervals after the first, US dollars, shape (N,); at least its limit if it was given up.
        intervals: Decisions that each made, shape (N,).
        vectors: The observations in which there was a curve to decide by, those of one interval together, float32, shape
            (M, DIM); none unless they were asked for.
        wanted: Where the paths were then, grid steps, shape (M, 3).
        anchors: Where the curve's optimum was, likewise.
        walk: Number of each one's walk, shape (M,).
        interval: Number of each one's decision in its walk, shape (M,).
    """

    dollars: Floats
    intervals: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]
    wanted: Floats
    anchors: Floats
    walk: npt.NDArray[np.int64]
    interval: npt.NDArray[np.int64]


def play_walks(scenarios: Sequence[Scenario], walks: Sequence[Walk], task: Task, *, observed: bool = False) -> Played:
    """Play walks from the start of their scenarios to the end, from empty caches.

    Args:
        scenarios: The scenarios.
        walks: The walks, at least one.
        task: Its actions, which reach only so far, its step limits and hidden components count; nothing is randomised.
        observed: Whether to return what was seen.

    Raises:
        ValueError: If there is no walk, a trace does not last longer than one interval, or knob spaces differ in their shapes.
    """
    if not walks:
        raise ValueError("walks: expected at least one, got none")
    whole = replace(task, episode_length=1 << 30, reference="hold", randomise=FIXED, taped=True)
    rng = np.random.default_rng(0)
    episodes = [replace(whole, scenarios=lambda _, scenario=scenario: scenario).draw(rng) for scenario in scenarios]  # type: ignore[misc]
    # The longest first: so the places become empty at about the same time.
    waiting = deque(sorted(range(len(walks)), key=lambda number: -_length(scenarios[walks[number].scenario])))

    def start(count: int) -> tuple[list[int], _Caches]:
        numbers = [waiting.popleft() for _ in range(count)]
        return numbers, _Caches([episodes[walks[number].scenario] for number in numbers], task, observed=observed)

    first, caches = start(min(LANES, len(walks)))
    walk, interval = np.array(first), np.zeros(len(first), np.int64)
    alive = np.ones(len(first), bool)
    limits, follow = np.array([each.limit for each in walks]), np.array([each.follow for each in walks])
    dollars, intervals = np.zeros(len(walks)), np.zeros(len(walks), np.int64)
    seen: list[tuple[npt.NDArray[np.float32], Floats, Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    while True:
        ended = np.flatnonzero(alive & (caches.over | (dollars[walk] >= limits[walk])))
        if len(ended):
            intervals[walk[ended]] = interval[ended]
            alive[ended] = False
            if waiting:
                taken = ended[: len(waiting)]
                walk[taken], others = start(len(taken))
                caches.put(taken, others)
                interval[taken], alive[taken] = 0, True
                continue  # they might be over at once
        if not alive.any():
            return Played(dollars, intervals, *_joined(seen, mask_of(task.hidden)))
        current = [(walks[number], place) for number, place in zip(walk.tolist(), interval.tolist(), strict=True)]
        wanted = np.array([each.path[min(place, len(each.path) - 1)] for each, place in current])
        away = np.array(
            [(0.0, 0.0, 0.0) if each.away is None else each.away[min(place, len(each.away) - 1)] for each, place in current]
        )
        anchors = caches.anchor_steps
        if observed:
            known = caches.known & alive
            seen.append((caches.vectors[known], wanted[known], anchors[known], walk[known], interval[known]))
        # Through the action, which reaches only so far: the states should be those that the policy will meet.
        towards = np.where(follow[walk][:, None], wanted, anchors) + away
        caches.act(towards)
        dollars[walk[alive]] += caches.dollars[alive]
        interval += 1


def _length(scenario: Scenario) -> float:
    return scenario.trace.duration / scenario.interval


def _joined(
    seen: Sequence[tuple[npt.NDArray[np.float32], Floats, Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]],
    mask: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float32], Floats, Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if not seen:
        nowhere, none = np.zeros((0, 3)), np.zeros(0, np.int64)
        return np.zeros((0, DIM), np.float32), nowhere, nowhere, none, none
    vectors, wanted, anchors, walk, interval = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    return vectors * mask, wanted, anchors, walk, interval


class _Caches:
    """E caches, each on an episode of its own, stepped together; at first each has run one interval on its initial knobs."""

    def __init__(self, episodes: Sequence[Episode], task: Task, *, observed: bool) -> None:
        self._task = task
        self._spaces = SpaceBatch.of([episode.config.space for episode in episodes])
        self._prices = PriceBatch.of([episode.config.prices for episode in episodes])
        self._observed = observed
        self._builder = ObservationBatch(self._spaces, self._prices)
        self._hidden = np.zeros((len(SIGNALS), len(episodes)), bool)
        self._durations = np.array([episode.interval for episode in episodes])
        self._knobs = to_array([episode.initial for episode in episodes])
        self._steps = self._spaces.to_steps(self._knobs)
        self._simulators = SimulatorBatch([_simulator(episode) for episode in episodes])
        self._step(self._steps)

    @property
    def anchor_steps(self) -> Floats:
        """Where the optima of the smoothed curves are, grid steps, shape (E, 3); mean nothing where they are not known."""
        return self._spaces.to_steps(self._anchors)

    def act(self, towards: Floats) -> None:
        """Run one interval under the knobs of the actions that lead to positions on the grid, or as near as they reach."""
        spaces, actions, known = self._spaces, self._task.actions, self.known[:, None]
        around = np.where(known, self._anchors, self._knobs)
        chosen = actions.inverse(towards, self.anchor_steps, spaces.scale)
        asked = np.where(known, actions.batch(chosen, around, spaces), around)
        knobs = next_knobs_batch(asked, self._knobs, spaces, self._task.max_steps)
        for lane in np.flatnonzero((knobs != self._knobs).any(axis=1)).tolist():
            self._simulators.apply(lane, to_knobs(knobs[lane]))
        before, self._knobs, self._steps = self._steps, knobs, spaces.to_steps(knobs)
        self._step(before)

    def put(self, lanes: npt.NDArray[np.intp], other: _Caches) -> None:
        """Go on in ``lanes`` with the caches of ``other``, which must not be used any more."""
        self._spaces = self._spaces.put(lanes, other._spaces)
        self._builder.put(lanes, other._builder)
        self._prices = put_lanes(self._prices, lanes, other._prices)
        for name in ("_durations", "_knobs", "_steps", "_anchors", "known", "over", "dollars", "vectors"):
            getattr(self, name)[lanes] = getattr(other, name)
        for place, lane in enumerate(lanes.tolist()):
            self._simulators.replace(lane, other._simulators[place])

    def _step(self, before: Floats) -> None:
        """Run one interval and look at it; the knobs were at ``before`` in the last one, grid steps."""
        window, curves = self._simulators.step(self._durations), self._builder.curves
        signals = SignalBatch.of(window.columns, curves.grid, window.ghost_hits, window.ghost_stale, window.ghost_requests)
        if self._observed:
            place = Place.of(curves.grid, self._knobs)
            regret = window_regret(signals, place, self._prices)
            seen = self._builder.build(signals.shown(regret, self._hidden), self._knobs, place)
            cost, self.vectors = seen.cost, seen.vectors
            self._anchors, self.known = seen.anchors, seen.has_anchor
        else:
            # What an observation is made of, as far as the next action and the costs depend on it.
            cost = price_batch(signals.usage(self._knobs[:, 0], distance(self._steps, before)), self._prices)
            readings = curves.update(signals)
            self.vectors = np.zeros((len(self._knobs), 0), np.float32)
            self._anchors, self.known = self._spaces.clip(readings.best), readings.valid
        self.over = window.done
        self.dollars = np.where(np.isfinite(cost.total), cost.total * window.columns["requests"] / 1000.0, 0.0)


def _simulator(episode: Episode) -> CacheSimulator:
    """Return an episode's cache, which follows the ghost that is kept with the trace."""
    alone = replace(episode.config, ghost_keys=0)
    simulator = CacheSimulator(episode.trace, alone, episode.initial, start=episode.start, seed=episode.seed, clock=episode.clock)
    if episode.config.ghost_keys:
        simulator.follow(tape_of(episode.trace, episode.config, episode.interval, 0))
    return simulator
