"""Many caches tuned side by side, each beside its reference: what both forms of ``CacheTuning-v0`` are made of.

Everything about E lanes is an array, ours in the first E places and the references' in the next E. A lane's results do not depend
on its company, to the last bit: :class:`envs.cache_env.CacheTuningEnv` is one lane, :class:`envs.vec_env.CacheTuningVecEnv` many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.action import next_knobs_batch
from envs.knob_batch import Floats, SpaceBatch, put_lanes, to_array, to_knobs
from envs.objective import CostBatch, PriceBatch
from envs.observation import Observation, ObservationBatch, Observations
from envs.observation_vector import mask_of
from envs.signal_batch import SIGNALS, SignalBatch
from envs.simulator import CacheSimulator, SimConfig
from envs.simulator.batch import BatchWindow, SimulatorBatch
from envs.simulator.tape import tape_of
from envs.smoothing import Place, window_regret
from envs.task import ActingReference, Episode, Task

REWARD_LIMIT = 3.0
"""Relative rewards are clipped to this many mean interval costs: one burst must not drown everything else that was learned."""

_MEMORY = 0.95
"""What an interval keeps of the weight of the one before in the reference's mean cost of an interval."""

_TIERS = ("memory", "redis", "vector")


@dataclass(frozen=True)
class Windows:
    """What one interval of E lanes gave.

    Attributes:
        vectors: Our observations, float32, shape (E, DIM).
        rewards: See :attr:`envs.task.Task.reward`, shape (E,); NaN for the interval before the first step.
        over: Whether each episode has ended, shape (E,).
        requests: Requests, shape (E,).
        knobs: The knobs that were in force, ours, then the references', shape (2E, 3).
        cost: What it cost, ours, then the references'; NaN without requests.
        dollars: The same, US dollars of the window, 0 without requests, shape (2E,).
        hit_ratio: Hits over requests, NaN without, shape (2E,).
    """

    vectors: npt.NDArray[np.float32]
    rewards: Floats
    over: npt.NDArray[np.bool_]
    requests: Floats
    knobs: Floats
    cost: CostBatch
    dollars: Floats
    hit_ratio: Floats

    def info(self, lane: int) -> dict[str, Any]:
        """Return what Gymnasium calls ``info`` for one lane; see :class:`envs.cache_env.CacheTuningEnv`."""
        values: dict[str, Any] = {"requests": float(self.requests[lane])}
        for prefix, place in (("", lane), ("reference_", lane + len(self.requests))):
            priced = math.isfinite(self.cost.total[place])
            values[f"{prefix}cost"] = self.cost.lane(place).to_dict() if priced else {}
            values[f"{prefix}dollars"] = float(self.dollars[place])
            values[f"{prefix}knobs"] = to_knobs(self.knobs[place]).to_dict()
            if not math.isnan(self.hit_ratio[place]):
                values[f"{prefix}hit_ratio"] = float(self.hit_ratio[place])
        return values


INFO_KEYS: tuple[str, ...] = (
    "requests",
    *(prefix + name for prefix in ("", "reference_") for name in ("cost", "dollars", "knobs", "hit_ratio")),
)
"""Keys of :meth:`Windows.info`; the hit ratios are absent where there were no requests."""


class Lanes:
    """Episodes under way; at first each has run one interval on its initial knobs, from empty caches.

    Args:
        task: What is to be learned.
        episodes: What each lane plays, at least one.

    Raises:
        ValueError: If the lanes' knob spaces have grids of different shapes.
    """

    def __init__(self, task: Task, episodes: Sequence[Episode]) -> None:
        self._task = task
        self._episodes = list(episodes)
        self._count = count = len(self._episodes)
        both = [*self._episodes, *self._episodes]
        self._own_spaces = SpaceBatch.of([episode.config.space for episode in self._episodes])
        self._spaces = SpaceBatch.of([episode.config.space for episode in both])
        self._prices = PriceBatch.of([episode.config.prices for episode in both])
        self._grid = self._spaces.grid()
        self._builder = ObservationBatch(
            self._spaces, self._prices, clock_origin=np.array([episode.clock_origin for episode in both])
        )
        self._hidden = np.array([[name in episode.hidden for episode in both] for name in SIGNALS])
        self._durations = np.array([episode.interval for episode in both])
        self._knobs = to_array([episode.initial for episode in both])
        self._simulators = SimulatorBatch(_simulators(self._episodes, task.taped))
        self._left = np.full(count, task.episode_length)
        self._mask = mask_of(task.hidden)
        self._unit = np.zeros((2, count))  # weighted sum of the reference's dollars per interval, and of the weights
        self._take(self._simulators.step(self._durations))
        self.windows = self._windows(np.full(count, math.nan))

    def __len__(self) -> int:
        return self._count

    @property
    def anchors(self) -> Floats:
        """Where our lanes' residuals start, shape (E, 3); means nothing without a curve."""
        return self._anchors[: self._count]

    @property
    def anchors_known(self) -> npt.NDArray[np.bool_]:
        """Whether each of our lanes has a trustworthy curve, shape (E,)."""
        return self._has_anchor[: self._count]

    def act(self, actions: npt.ArrayLike) -> Windows:
        """Run one interval under the actions' knobs; without a curve to act around a lane's knobs are held.

        Args:
            actions: Shape (E, 3), see :class:`envs.action.ActionMap`.

        Raises:
            ValueError: If an action is not three finite numbers.
        """
        return self.move(self._asked(actions, slice(self._count)))

    def move(self, wanted: Floats) -> Windows:
        """Run one interval under given knobs, shape (E, 3), limited like an action's."""
        stacked = np.concatenate([wanted, self._followed()])
        knobs = next_knobs_batch(stacked, self._knobs, self._spaces, self._task.max_steps)
        for lane in np.flatnonzero((knobs != self._knobs).any(axis=1)).tolist():
            self._simulators.apply(lane, to_knobs(knobs[lane]))
        self._knobs = knobs
        self._left -= 1
        self._take(self._simulators.step(self._durations))
        self.windows = self._windows(self._rewards())
        return self.windows

    def observation(self, lane: int, *, reference: bool = False) -> Observation:
        """Return the whole observation of a lane's cache, or of its reference's."""
        episode = self._episodes[lane]
        observations, columns, place = self._seen[lane + self._count * reference]
        semantic = episode.config.semantic and episode.trace.match_probability > 0
        tiers = {tier: float(columns[tier][place]) for tier in _TIERS if semantic or tier != "vector"}
        signals = observations.signals.lane(place, episode.config.arm, tiers)
        return observations.lane(place, episode.config.space, episode.config.prices, signals)

    def put(self, lanes: Sequence[int], other: Lanes) -> None:
        """Go on in ``lanes`` with the episodes of ``other``, which must not be used any more.

        Raises:
            ValueError: If the grids of ``other`` have another shape.
        """
        ours = np.array(lanes, np.intp)
        both = np.concatenate([ours, ours + self._count])
        self._own_spaces = self._own_spaces.put(ours, other._own_spaces)
        self._spaces = self._spaces.put(both, other._spaces)
        self._prices = put_lanes(self._prices, both, other._prices)
        self._builder.put(both, other._builder)
        self._grid = self._builder.curves.grid
        self._hidden[:, both] = other._hidden
        self._unit[:, ours] = other._unit
        self._left[ours] = other._left
        for name in ("_durations", "_knobs", "_anchors", "_has_anchor"):
            # Copies: what was handed out must not change.
            array = getattr(self, name).copy()
            array[both] = getattr(other, name)
            setattr(self, name, array)
        for place, lane in enumerate(both.tolist()):
            self._simulators.replace(lane, other._simulators[place])
            self._seen[lane] = other._seen[place]
        for place, lane in enumerate(lanes):
            self._episodes[lane] = other._episodes[place]

    def _asked(self, actions: npt.ArrayLike, part: slice) -> Floats:
        """Return what actions of our lanes, or of the references', ask for, shape (E, 3); without a curve the knobs in force."""
        known = self._has_anchor[part, None]
        around = np.where(known, self._anchors[part], self._knobs[part])
        return np.where(known, self._task.actions.batch(actions, around, self._own_spaces), around)

    def _followed(self) -> Floats:
        """Return where the references want to go, shape (E, 3)."""
        policy, count = self._task.reference, self._count
        if isinstance(policy, ActingReference):
            return self._asked(policy.act(self._observations.vectors[count:] * self._mask), slice(count, None))
        if callable(policy):
            return to_array([policy(self.observation(lane, reference=True)) for lane in range(count)])
        if policy == "curve":
            return np.where(self._has_anchor[count:, None], self._anchors[count:], self._knobs[count:])
        return self._knobs[count:]

    def _take(self, window: BatchWindow) -> None:
        """Observe a window on both sides."""
        signals = SignalBatch.of(window.columns, self._grid, window.ghost_hits, window.ghost_stale, window.ghost_requests)
        place = Place.of(self._grid, self._knobs)
        regret = window_regret(signals, place, self._prices)
        observed = self._builder.build(signals.shown(regret, self._hidden), self._knobs, place)
        self._observations = observed
        self._anchors, self._has_anchor = observed.anchors, observed.has_anchor
        self._seen: list[tuple[Observations, dict[str, Floats], int]] = [
            (observed, window.columns, place) for place in range(2 * self._count)
        ]
        self._requests = window.columns["requests"]
        self._dollars = np.where(np.isfinite(observed.cost.total), observed.cost.total * self._requests / 1000.0, 0.0)
        self._over = window.done[: self._count] | (self._left <= 0)
        self._unit = _MEMORY * self._unit + np.stack([self._dollars[self._count :], np.ones(self._count)])

    def _rewards(self) -> Floats:
        count = self._count
        if self._task.reward == "dollars":
            total = self._observations.cost.total
            return np.where(self._requests[:count] > 0, total[count:] - total[:count], 0.0)
        unit = self._unit[0] / self._unit[1]
        saved = self._dollars[count:] - self._dollars[:count]
        relative = np.divide(saved, unit, out=np.zeros(count), where=unit > 0)
        clipped: Floats = np.minimum(np.maximum(relative, -REWARD_LIMIT), REWARD_LIMIT)
        return clipped

    def _windows(self, rewards: Floats) -> Windows:
        observed = self._observations
        return Windows(
            vectors=observed.vectors[: self._count] * self._mask,
            rewards=rewards,
            over=self._over,
            requests=self._requests[: self._count],
            knobs=self._knobs,
            cost=observed.cost,
            dollars=self._dollars,
            hit_ratio=observed.signals["hit_ratio"],
        )


def _simulators(episodes: Sequence[Episode], taped: bool) -> list[CacheSimulator]:
    """Return our caches, then the references', which share our ghosts: a ghost depends on the requests alone."""
    ours = [_simulator(each, replace(each.config, ghost_keys=0) if taped else each.config) for each in episodes]
    references = [_simulator(each, replace(each.config, ghost_keys=0)) for each in episodes]
    for episode, own, reference in zip(episodes, ours, references, strict=True):
        if taped and episode.config.ghost_keys:
            own.follow(tape_of(episode.trace, episode.config, episode.interval, 0))
        reference.follow(own)
    return [*ours, *references]


def _simulator(episode: Episode, config: SimConfig) -> CacheSimulator:
    return CacheSimulator(episode.trace, config, episode.initial, start=episode.start, seed=episode.seed, clock=episode.clock)
