"""A causal oracle: a policy that knows the regime process, but not the realisation that it is judged on.

It is built on other realisations of the same regime, which it may simulate as often as it likes: first a schedule over the phases
of the period by dynamic programming in a small model (:mod:`agents.oracle_model`), then policy improvement with rollouts of the
true simulator. Beside the clock it may use what has been seen: the smoothed curve's optimum, a flush, and the load. What it does
at a moment depends on nothing that comes later; how far a policy is from it is how much of what can be foreseen was left lying.

It is no strict bound: the schedule is the best that was found, not the best that there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from agents.oracle_model import decision_phases, estimate, phase_at, phase_count, plan_schedule
from agents.policy import Proposal
from agents.schedules import interval_count, limited_steps, replay_steps
from agents.words import knob_words
from envs.action import MAX_STEPS, ActionMap
from envs.knob_batch import Floats
from envs.lanes import Lanes
from envs.observation import Observation
from envs.task import FIXED, Scenario, Task
from serving.knobs import Knobs

Indices = npt.NDArray[np.int64]
Draw = Callable[[int], Scenario]

SINCE_FLUSH: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
"""Windows since a flush at which another correction begins; from the last on there is none."""

LOADS: tuple[float, ...] = (0.6, 1.5, 2.5)
"""Requests of the last window over those that its phase has on average: where another correction begins."""

_USUAL = 1
"""The class of load that needs no correction."""

_SPACING = 4
"""Every so many blocks of phases one is changed at the same time: in between the cache forgets the change before."""

_BLOCKS = (6, 12, 24)
"""Blocks of phases that are moved together, from coarse to fine: finer ones would follow the luck of the realisations."""

_COARSE_MOVES: Floats = np.array([(2, 0, 0), (-2, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0)], float)
_FINE_MOVES: Floats = np.array([(1, 0, 0), (-1, 0, 0), (0.5, 0, 0), (-0.5, 0, 0), (0, 0.5, 0), (0, -0.5, 0)], float)
_WARM_MOVES: Floats = np.array([(0, 0, 2), (0, 0, 1), (0, 0, -1)], float)
"""Grid steps that are tried: size and TTL first, warm-up at the end."""

_WARM_ROLLOUTS = 24
"""Runs over each realisation to find the warm-up ratios."""

_GAIN = 2e-5
"""Least gain, as a share of the cost, for which a change is kept."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What an oracle does: a schedule over P phases, corrected by what has been seen.

    Attributes:
        period: Seconds of the workload's own time after which the regime recurs; None: it does not.
        schedule: Grid position in each phase, shape (P, 3).
        centre: Mean grid position of the smoothed curve's optimum in each phase (size, TTL), shape (P, 2).
        follow: Share of the optimum's distance from the centre that size and TTL follow, 0..1, shape (2,).
        expected: Mean requests of an interval in each phase, shape (P,).
        flushed: Correction after a flush, grid steps, shape (len(SINCE_FLUSH) - 1, 3).
        loaded: Correction by load, grid steps, shape (len(LOADS) + 1, 3).
        top: Highest grid position, shape (3,).
    """

    period: float | None
    schedule: Floats
    centre: Floats
    follow: Floats
    expected: Floats
    flushed: Floats
    loaded: Floats
    top: Floats

    def wanted(self, phase: Indices, anchors: Floats, since_flush: Floats, requests: Floats) -> Floats:
        """Return where the plan wants to be, grid positions of shape (W, 3), all within the grid.

        Args:
            phase: Phase of each interval, shape (W,).
            anchors: Grid position of the smoothed curve's optimum before each (size, TTL), NaN without one, shape (W, 2).
            since_flush: Windows since the last flush, 0 where it was in the last window, NaN where unknown, shape (W,).
            requests: Requests of the last window, NaN where unknown, shape (W,).
        """
        steps = self.schedule[phase]
        away = anchors - self.centre[phase]
        steps[:, :2] += np.where(np.isfinite(away), away, 0.0) * self.follow
        steps += np.concatenate([self.flushed, np.zeros((1, 3))])[flush_class(since_flush)]
        steps += self.loaded[load_class(requests, self.expected[phase - 1])]
        inside: Floats = np.minimum(np.maximum(steps, 0.0), self.top)
        return inside


def flush_class(since: Floats) -> Indices:
    """Return which correction applies so many windows after a flush: the last, which is none, where there was no flush."""
    known = np.where(np.isfinite(since), np.maximum(since, 0.0), SINCE_FLUSH[-1])
    return np.minimum(np.searchsorted(SINCE_FLUSH, known, side="right") - 1, len(SINCE_FLUSH) - 1)


def load_class(requests: Floats, expected: Floats) -> Indices:
    """Return which correction applies under a load, given the usual one."""
    with np.errstate(all="ignore"):
        ratio = requests / expected
    return np.where(np.isfinite(ratio), np.searchsorted(LOADS, np.where(np.isfinite(ratio), ratio, 1.0), side="right"), _USUAL)


class CausalOracle:
    """The policy: its plan, at the clock's phase and by what has been seen.

    Args:
        plan: What :func:`build_oracle` found.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.reset()

    @property
    def name(self) -> str:
        """``oracle``."""
        return "oracle"

    def reset(self) -> None:
        """Forget the last clock."""
        self._phase = -1

    def decide(self, observation: Observation) -> Proposal:
        """Return what the plan wants now, at the begin of the next interval."""
        plan, space, signals = self.plan, observation.space, observation.signals
        moment = signals.at * observation.prices.time_scale
        if math.isfinite(moment):
            self._phase = int(phase_at(moment, plan.period, len(plan.schedule)))
        else:
            self._phase = (self._phase + 1) % len(plan.schedule)  # one interval later, as far as one can tell
        anchor = np.full((1, 2), math.nan) if observation.anchor is None else space.to_steps(observation.anchor)[None, :2]
        wanted = plan.wanted(
            np.array([self._phase]),
            anchor,
            np.array([observation.raw.get("since_flush", math.nan)]),
            np.array([signals.requests]),
        )[0]
        knobs = space.from_steps(wanted)
        return Proposal(knobs, f"phase {self._phase + 1} of {len(plan.schedule)}: {knob_words(knobs)}", {"phase": self._phase})


@dataclass(frozen=True)
class _Realisation:
    """One realisation of the regime, and what can be seen of it whatever the knobs are."""

    scenario: Scenario
    start: Floats  # grid position in the first interval
    phase: Indices
    anchors: Floats
    since_flush: Floats
    before: Floats  # requests of the window before
    unit: float  # dollars of the best static setting
    recur: Indices  # which time around each interval belongs to


def build_oracle(
    draw: Draw,
    *,
    period: float | None,
    seeds: Sequence[int] = (101, 102, 103, 104),
    rollouts: int = 320,
    max_steps: tuple[float, float, float] = MAX_STEPS,
) -> CausalOracle:
    """Build the oracle of a regime.

    Args:
        draw: Returns another realisation of the regime process for each seed; all with grids of one shape. Their bounds may
            differ: the plan is made in grid positions.
        period: Seconds of the workload's own time after which the regime recurs; None: it does not, then the oracle is a setting
            corrected by what has been seen.
        seeds: Realisations to build it on, at least one; never the one that it is judged on. From three on, the last is kept to
            choose which of the plans found on the way does best where it was not improved.
        rollouts: Runs over each realisation that policy improvement of size and TTL may take, beside those for the model.
        max_steps: Most that each knob may move in one interval, grid steps.

    Raises:
        ValueError: If there is no seed, grids or intervals differ, or the period is not > 0.
    """
    if not len(seeds):
        raise ValueError("oracle: seeds: expected at least one realisation to build it on, got none")
    scenarios = [draw(seed) for seed in seeds]
    shapes = [_shape(scenario) for scenario in scenarios]
    for seed, shape, scenario in zip(seeds, shapes, scenarios, strict=True):
        if shape != shapes[0] or scenario.interval != scenarios[0].interval:
            raise ValueError(
                f"oracle: draw: seed {seed}: expected a grid of {shapes[0]} steps and an interval of {scenarios[0].interval:g} s "
                f"as in the first realisation, got {shape} and {scenario.interval:g} s"
            )
    model, units = estimate(scenarios, period)
    phases = phase_count(scenarios[0], period)
    seen = _look(scenarios, period, units)
    top = np.array(shapes[0], np.float64) - 1.0
    centre = _phase_means([(each.phase, each.anchors) for each in seen], phases)
    # What was in the window before belongs to the phase before.
    expected = np.roll(_phase_means([(each.phase, each.before[:, None]) for each in seen], phases)[:, 0], -1)
    static = np.repeat(model.best[None], phases, axis=0)
    plan = Plan(
        period=period,
        schedule=static,
        centre=np.where(np.isfinite(centre), centre, model.best[:2]),
        follow=np.zeros(2),
        expected=expected,
        flushed=np.zeros((len(SINCE_FLUSH) - 1, 3)),
        loaded=np.zeros((len(LOADS) + 1, 3)),
        top=top,
    )
    kept = 1 if len(seen) > 2 else 0
    improvement = _Improvement(seen[: len(seen) - kept], max_steps, rollouts)
    found = improvement.improve(plan, plan_schedule(model, max_steps))
    if kept:
        found = [_Improvement(seen[-kept:], max_steps, len(found)).best(found)]
    return CausalOracle(found[-1])


def _shape(scenario: Scenario) -> tuple[int, int, int]:
    space = scenario.config.space
    return space.size_steps, space.ttl_steps, space.warmup_steps


class _Improvement:
    """Policy improvement by rollouts of the true simulator, all candidates on the same realisations."""

    def __init__(self, seen: Sequence[_Realisation], max_steps: tuple[float, float, float], rollouts: int) -> None:
        self._seen = seen
        self._max_steps = max_steps
        self._left = rollouts

    def improve(self, plan: Plan, planned: Floats) -> list[Plan]:
        """Return ever better plans, from a static one, and the schedule that the model planned."""
        curve = np.concatenate([plan.centre, np.zeros((len(plan.centre), 1))], axis=1)
        warm, planned = planned[:, 2], planned * [1.0, 1.0, 0.0]
        found = [plan]
        starts = [
            replace(plan, schedule=np.clip(schedule, 0.0, plan.top), follow=np.full(2, follow))
            for schedule, follow in (
                (plan.schedule, 0.0),
                (planned, 0.0),
                (planned, 0.5),
                (0.5 * (plan.schedule + planned), 0.0),
                *((curve + np.array([size, ttl, 0.0]), 1.0) for size in (0, 1, 2) for ttl in (0, 1)),
            )
        ]
        plan, least = self._best(starts, None, math.inf)
        found.append(plan)
        for _ in range(3):
            plan, least, better = self._sweep(plan, least, 1, _COARSE_MOVES)
            if not better:
                break
        found.append(plan)
        plan, least = self._react(plan, least, _COARSE_MOVES)
        found.append(plan)
        phases = len(plan.schedule)
        stages = [1] if phases == 1 else [blocks for blocks in _BLOCKS if blocks < phases] + [phases] * (phases <= _BLOCKS[-1])
        for moves in (_COARSE_MOVES, _FINE_MOVES, _FINE_MOVES):
            before = least
            for blocks in stages:
                plan, least, _ = self._sweep(plan, least, blocks, moves)
                found.append(plan)
            plan, least = self._react(plan, least, moves)
            found.append(plan)
            if least >= before or self._left <= 0:
                break
        self._left = max(self._left, 0) + _WARM_ROLLOUTS
        warmed = [replace(plan, schedule=plan.schedule + np.array([0.0, 0.0, 1.0]) * level) for level in (1.0, 3.0, plan.top[2])]
        warmed.append(replace(plan, schedule=plan.schedule + np.array([0.0, 0.0, 1.0]) * warm[:, None]))
        other, cost = self._best(warmed, plan, least)
        if other is not plan:
            plan, least = other, cost
            found.append(plan)
            if phases > 1:
                plan, least, _ = self._sweep(plan, least, min(_BLOCKS[0], phases), _WARM_MOVES)
        plan, least = self._correct(plan, least, "flushed", self._flush_classes()[:2], _WARM_MOVES[:1])
        found.append(plan)
        return [one for place, one in enumerate(found) if one not in found[:place]]

    def best(self, plans: Sequence[Plan]) -> Plan:
        """Return the cheapest of some plans."""
        return self._best(plans, None, math.inf)[0]

    def _react(self, plan: Plan, least: float, moves: Floats) -> tuple[Plan, float]:
        """Try to follow the curve more or less, and other corrections after a flush and under load."""
        tried = [
            replace(plan, follow=np.clip(plan.follow + move, 0.0, 1.0))
            for move in ((0.25, 0.0), (-0.25, 0.0), (0.0, 0.25), (0.0, -0.25), (0.25, 0.25), (-0.25, -0.25))
        ]
        plan, least = self._best(tried, plan, least)
        plan, least = self._correct(plan, least, "flushed", self._flush_classes(), moves)
        return self._correct(plan, least, "loaded", self._load_classes(plan), moves)

    def _correct(self, plan: Plan, least: float, name: str, classes: Sequence[int], moves: Floats) -> tuple[Plan, float]:
        """Try moves in each class of a table of corrections."""
        for place in classes:
            tried = []
            for move in moves:
                table: Floats = getattr(plan, name).copy()
                table[place] += move
                tried.append(replace(plan, flushed=table) if name == "flushed" else replace(plan, loaded=table))
            plan, least = self._best(tried, plan, least)
        return plan, least

    def _flush_classes(self) -> list[int]:
        flushed = any(len(seen.scenario.trace.flush_time) for seen in self._seen)
        return list(range(len(SINCE_FLUSH) - 1)) if flushed else []

    def _load_classes(self, plan: Plan) -> list[int]:
        counts = np.zeros(len(LOADS) + 1)
        for seen in self._seen:
            np.add.at(counts, load_class(seen.before, plan.expected[seen.phase - 1]), 1.0)
        # What is met in fewer windows than one of a hundred is not worth the runs.
        return [place for place in range(len(counts)) if place != _USUAL and counts[place] > 0.01 * counts.sum()]

    def _best(self, tried: Sequence[Plan], plan: Plan | None, least: float) -> tuple[Plan, float]:
        if self._left <= 0 and plan is not None:
            return plan, least
        scores = np.mean([dollars.sum(axis=1) / seen.unit for seen, dollars in self._run(tried)], axis=0)
        best = int(np.argmin(scores))
        if plan is None or scores[best] < least * (1.0 - _GAIN):
            return tried[best], float(scores[best])
        return plan, least

    def _run(self, plans: Sequence[Plan]) -> list[tuple[_Realisation, Floats]]:
        """Return what each plan costs in each interval, dollars of shape (plans, W), on each realisation."""
        self._left -= len(plans)
        runs = []
        for seen in self._seen:
            ways = [
                limited_steps(plan.wanted(seen.phase, seen.anchors, seen.since_flush, seen.before), seen.start, self._max_steps)
                for plan in plans
            ]
            runs.append((seen, replay_steps(seen.scenario, np.stack(ways)).dollars))
        return runs

    def _sweep(self, plan: Plan, least: float, blocks: int, moves: Floats) -> tuple[Plan, float, bool]:
        """Try moves in every block of phases, those far apart at the same time, and keep what proves better when put together.

        Returns:
            The plan, what it costs, and whether it is another one.
        """
        if self._left <= 0:
            return plan, least, False
        block_of = np.arange(len(plan.schedule)) * blocks // len(plan.schedule)
        spacing = min(_SPACING, blocks)
        tried = [plan]
        for turn in range(spacing):
            chosen = (block_of % spacing == turn)[:, None]
            tried += [replace(plan, schedule=np.clip(plan.schedule + chosen * move, 0.0, plan.top)) for move in moves]
        gains: list[Floats] = []
        for seen, dollars in self._run(tried):
            saved = (dollars[:1] - dollars[1:]) / seen.unit
            gains.append(_gains_by_block(saved, block_of[seen.phase], seen.recur, blocks, spacing, len(moves)))
        per_time = np.concatenate(gains)  # (times around, blocks, moves)
        total = per_time.sum(axis=0) / len(self._seen)
        noise = np.sqrt(np.maximum((per_time**2).sum(axis=0), 1e-30)) / len(self._seen)
        sure = total / noise  # how many times the gain is what luck would make of it
        best = total.argmax(axis=1)
        rows = np.arange(blocks)
        gain, sure = total[rows, best], sure[rows, best]
        worth = gain > 0
        candidates = []
        for mask in (worth, worth & (sure > 1), worth & (sure > 2), worth & (rows % 2 == 0), worth & (rows % 2 == 1)):
            if mask.any():
                shift = np.where(mask[:, None], moves[best], 0.0)[block_of]
                candidates.append(replace(plan, schedule=np.clip(plan.schedule + shift, 0.0, plan.top)))
                candidates.append(replace(plan, schedule=np.clip(plan.schedule + 0.5 * shift, 0.0, plan.top)))
        if not candidates:
            return plan, least, False
        other, cost = self._best(candidates, plan, least)
        return other, cost, other is not plan


def _gains_by_block(saved: Floats, block: Indices, recur: Indices, blocks: int, spacing: int, moves: int) -> Floats:
    """Return what each move saved in each block, by time around: shape (times, blocks, moves).

    A change counts from its block on until the next block that was changed with it: what it leaves behind is its own.

    Args:
        saved: Savings by candidate, (spacing * moves, W).
        block: Block of each interval, (W,).
        recur: Which time around each interval belongs to, (W,).
        blocks: Number of blocks.
        spacing: Blocks from one that is changed to the next.
        moves: Number of moves.
    """
    times = int(recur.max()) + 1
    gains = np.zeros((times, blocks, moves))
    for turn in range(spacing):
        own = np.flatnonzero(block % spacing == turn)
        if not len(own):
            continue
        last = np.searchsorted(own, np.arange(len(block)), side="right") - 1
        reached = last >= 0
        where = own[last[reached]]
        np.add.at(gains, (recur[where], block[where]), saved[turn * moves : (turn + 1) * moves, reached].T)
    return gains


def _look(scenarios: Sequence[Scenario], period: float | None, units: Floats) -> list[_Realisation]:
    """Return the realisations with what can be seen in them whatever the knobs are, by playing the curve policy on them."""
    counts = [interval_count(scenario) - 1 for scenario in scenarios]
    queue = iter(scenarios)
    task = Task(lambda rng: next(queue), episode_length=max(counts), reference="hold", randomise=FIXED)
    rng = np.random.default_rng(0)
    episodes = [task.draw(rng) for _ in scenarios]
    lanes = Lanes(task, episodes)
    anchors = np.full((len(scenarios), max(counts), 2), math.nan)
    requests = np.zeros((len(scenarios), max(counts)))
    for window in range(max(counts)):
        for lane, count in enumerate(counts):
            if window < count:
                seen = lanes.observation(lane)
                requests[lane, window] = seen.signals.requests
                if seen.anchor is not None:
                    anchors[lane, window] = seen.space.to_steps(seen.anchor)[:2]
        lanes.act(np.zeros((len(scenarios), 3)))
    found = []
    for lane, (scenario, count) in enumerate(zip(scenarios, counts, strict=True)):
        phase = decision_phases(scenario, period)
        found.append(
            _Realisation(
                scenario=scenario,
                start=scenario.config.space.to_steps(episodes[lane].initial),
                phase=phase,
                anchors=anchors[lane, :count],
                since_flush=_since_flush(scenario),
                before=requests[lane, :count],
                unit=float(units[lane]),
                recur=np.cumsum(np.concatenate([[0], np.diff(phase) < 0])) if period is not None else np.zeros(count, np.int64),
            )
        )
    return found


def _since_flush(scenario: Scenario) -> Floats:
    """Return the windows since the cache was last empty before each interval but the first, shape (W,); 0: in the last window.

    As :class:`envs.observation.ObservationBatch` counts: the start counts as one window before the first.
    """
    count = interval_count(scenario)
    edges = scenario.interval * np.arange(count)
    hit = np.diff(np.searchsorted(scenario.trace.flush_time, edges, side="left")) > 0
    rows = np.arange(count - 1)
    since: Floats = (rows - np.maximum.accumulate(np.where(hit, rows, -1))).astype(np.float64)
    return since


def _phase_means(parts: Sequence[tuple[Indices, Floats]], phases: int) -> Floats:
    """Return the mean of values (W, C) by phase, (P, C); the overall mean where a phase was not seen, NaN where nothing was."""
    columns = parts[0][1].shape[1]
    sums, counts = np.zeros((phases, columns)), np.zeros((phases, columns))
    for phase, values in parts:
        known = np.isfinite(values)
        np.add.at(sums, phase, np.where(known, values, 0.0))
        np.add.at(counts, phase, known)
    with np.errstate(all="ignore"):
        return np.where(counts > 0, sums / np.maximum(counts, 1.0), sums.sum(axis=0) / counts.sum(axis=0))


def labels(
    oracle: CausalOracle, scenario: Scenario, actions: ActionMap, *, length: int | None = None, seed: int = 0
) -> tuple[npt.NDArray[np.float32], Floats]:
    """Return what an imitator should do: the oracle's knobs as actions, beside the observations in which it chose them.

    The episode is played with the actions, not with the knobs: the imitator will see what its own actions lead to. Intervals
    without a trustworthy curve are left out, since no action matters there.

    Args:
        oracle: The oracle of the scenario's regime.
        scenario: A training scenario; its prices and clock are not randomised.
        actions: What an action means. Where the oracle wants to be further from the anchor than an action reaches, the label is
            the farthest action.
        length: Most intervals; None for all.
        seed: Chooses the ghost's sample.

    Returns:
        Observations, float32, shape (N, DIM), and actions within [-1, 1], shape (N, 3).
    """
    count = interval_count(scenario) - 1
    task = Task(
        lambda rng: scenario,
        episode_length=count if length is None else min(length, count),
        reference="hold",
        randomise=FIXED,
        actions=actions,
    )
    lanes = Lanes(task, [task.draw(np.random.default_rng(seed))])
    oracle.reset()
    vectors, chosen = [], []
    over = False
    while not over:
        observation = lanes.observation(0)
        knobs = oracle.decide(observation).knobs
        action = action_of(knobs, observation.anchor, scenario, actions)
        if observation.anchor is not None:
            vectors.append(observation.vector)
            chosen.append(action)
        over = bool(lanes.act(action[None]).over[0])
    return np.array(vectors, np.float32).reshape(len(vectors), -1), np.array(chosen, np.float64).reshape(-1, 3)


def action_of(knobs: Knobs, anchor: Knobs | None, scenario: Scenario, actions: ActionMap) -> Floats:
    """Return the action that asks for knobs, or the nearest that there is, shape (3,); zeros without an anchor."""
    space = scenario.config.space
    if anchor is None:
        return np.zeros(3)
    top = np.array(_shape(scenario), np.float64) - 1.0
    action: Floats = actions.inverse(space.to_steps(knobs)[None], space.to_steps(anchor)[None], top)[0]
    return action
