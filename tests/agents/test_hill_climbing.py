"""Hill climbing goes where the measured cost is least, takes back what made it rise, and does not move without knowing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.baselines import HoldPolicy
from agents.hill_climbing import HillClimbingPolicy
from agents.policy import Proposal
from envs.objective import Cost
from envs.observation import Observation, ObservationBuilder
from envs.signals import ArmSignals
from envs.simulator import SimConfig
from envs.task import Scenario
from envs.workloads import sessions
from experiments.play import play_all
from serving.knobs import MIB, Knobs, KnobSpace
from tests.agents.observations import PRICES, SPACE, signals

MIDDLE = SPACE.from_steps([7.5, 3.5, 2.0])
_BUILT = ObservationBuilder(SPACE, PRICES).build(signals(), MIDDLE)


def observed(cost: float, knobs: Knobs = MIDDLE, window: ArmSignals = _BUILT.signals) -> Observation:
    """An observation whose last window cost so much."""
    return replace(_BUILT, knobs=knobs, signals=window, cost=Cost(cost, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def climb(policy: HillClimbingPolicy, cost_of: Callable[[Knobs, int], float], start: Knobs, windows: int) -> list[Knobs]:
    """The knobs of each window while the policy has its way."""
    knobs, path = start, [start]
    for window in range(windows):
        knobs = policy.decide(observed(cost_of(knobs, window), knobs)).knobs
        path.append(knobs)
    return path


def bowl(size: float, ttl: float) -> Callable[[Knobs, int], float]:
    """A convex cost, least (1) at a position on the grids."""

    def cost(knobs: Knobs, window: int) -> float:
        steps = SPACE.to_steps(knobs)
        return float(1.0 + 0.01 * (steps[0] - size) ** 2 + 0.03 * (steps[1] - ttl) ** 2)

    return cost


@settings(max_examples=40, deadline=None)
@given(size=st.floats(1.0, 14.0), ttl=st.floats(0.5, 6.5), period=st.integers(1, 4))
def test_it_finds_the_bottom_of_a_convex_cost_and_stays_near_it(size: float, ttl: float, period: int) -> None:
    cost = bowl(size, ttl)
    path = climb(HillClimbingPolicy(period=period), cost, MIDDLE, 80 * period)
    assert np.mean([cost(knobs, 0) for knobs in path[-20 * period :]]) < 1.02


def test_it_moves_one_knob_at_a_time_and_leaves_warm_up_alone() -> None:
    path = climb(HillClimbingPolicy(period=1), bowl(3.0, 6.0), MIDDLE, 60)
    moved = [SPACE.to_steps(after) != SPACE.to_steps(before) for before, after in pairwise(path)]
    assert all(each.sum() <= 1 for each in moved)
    assert {0, 1} <= {int(np.flatnonzero(each)[0]) for each in moved if each.any()}
    assert {knobs.warmup_ratio for knobs in path} == {MIDDLE.warmup_ratio}


def test_a_move_that_made_it_dearer_is_taken_back_and_the_other_knob_has_its_turn() -> None:
    policy = HillClimbingPolicy(period=1)
    first = policy.decide(observed(1.0)).knobs
    assert SPACE.to_steps(first)[0] == pytest.approx(7.5 + 0.0625 * 15, abs=1e-3)
    proposal = policy.decide(observed(1.02, first))
    assert SPACE.to_steps(proposal.knobs) == pytest.approx([7.5, 3.5, 2.0], abs=1e-3)
    assert "taken back" in proposal.reason
    other = policy.decide(observed(1.0)).knobs
    assert SPACE.to_steps(other) == pytest.approx([7.5, 3.5 + 0.0625 * 7, 2.0], abs=1e-3)
    policy.decide(observed(1.02, other))
    again = policy.decide(observed(1.0)).knobs  # the size's turn: the other way, and a little shorter
    assert SPACE.to_steps(again)[0] == pytest.approx(7.5 - 0.98 * 0.0625 * 15, abs=1e-3)


def test_the_step_shrinks_while_it_goes_well_and_starts_anew_when_the_cost_jumps() -> None:
    policy = HillClimbingPolicy(period=1, decay=0.5)
    knobs, cost, moves = MIDDLE, 1.0, []
    for factor in (1.0, 0.99, 0.99, 0.99, 0.9, 0.99):
        cost *= factor
        proposal = policy.decide(observed(cost, knobs))
        moves.append(proposal.details["move"] / 15)
        knobs = proposal.knobs
    assert moves == pytest.approx([0.0625, 0.03125, 0.015625, 0.0078125, 0.0625, 0.03125])


def test_it_rests_when_its_steps_have_become_too_small_and_wakes_when_the_cost_changes() -> None:
    policy = HillClimbingPolicy(period=1, decay=0.5)
    cost = bowl(7.5, 3.5)
    path = climb(policy, cost, MIDDLE, 40)
    assert len({*path[-5:]}) == 1
    asleep = policy.decide(observed(cost(path[-1], 0) * 1.04, path[-1]))
    assert "too small" in asleep.reason
    awake = policy.decide(observed(cost(path[-1], 0) * 1.2, path[-1]))
    assert "starts anew" in awake.reason
    assert awake.knobs != path[-1]


def test_it_turns_at_the_bounds() -> None:
    top = SPACE.from_steps([15.0, 7.0, 0.0])
    proposal = HillClimbingPolicy(period=1).decide(observed(1.0, top))
    assert SPACE.to_steps(proposal.knobs)[0] == pytest.approx(15 - 0.0625 * 15, abs=1e-3)
    assert "turned at the bound" in proposal.reason


def test_a_sample_is_some_windows_and_the_busy_ones_count_for_more() -> None:
    policy = HillClimbingPolicy(period=3)
    quiet, busy = signals(requests=10.0), signals(requests=980.0)
    proposals: list[Proposal] = []
    for cost, window in ((10.0, quiet), (1.0, busy), (10.0, quiet)):
        proposals.append(policy.decide(observed(cost, MIDDLE, window)))
    assert [proposal.knobs == MIDDLE for proposal in proposals] == [True, True, False]
    assert "window 2 of 3" in proposals[1].reason
    assert proposals[2].details["sample_cost"] == pytest.approx((100.0 + 980.0 + 100.0) / 1000.0)


@pytest.mark.parametrize("cost", [math.nan, math.inf, -1.0, 1e300])
def test_a_window_without_a_cost_is_left_out_of_its_sample(cost: float) -> None:
    policy, beside = HillClimbingPolicy(period=2), HillClimbingPolicy(period=2)
    assert policy.decide(observed(1.0)).knobs == MIDDLE
    held = policy.decide(observed(cost))
    assert (held.knobs, held.reason) == (MIDDLE, "held: what the last window cost is not known")
    beside.decide(observed(1.0))
    assert policy.decide(observed(1.1)) == beside.decide(observed(1.1))


def test_from_a_tiny_cache_it_finds_a_cheaper_one_on_simulated_traffic() -> None:
    trace = sessions(12_000, 1_500, duration=6_000.0, seed=4)
    space = KnobSpace(min_size=MIB // 16, max_size=32 * MIB, min_ttl=30.0, max_ttl=6_000.0)
    scenario = Scenario(trace, SimConfig(space=space), 100.0, Knobs(MIB // 16, 60.0, 0.0))
    climbing, hold = play_all([HillClimbingPolicy(), HoldPolicy()], scenario)
    half = len(hold.dollars) // 2
    assert climbing.dollars[half:].sum() < 0.85 * hold.dollars[half:].sum()
