"""The causal oracle: where the right answer is known it finds it, it looks at nothing that is still to come, and it labels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from agents.curve import CurvePolicy
from agents.hindsight import best_static
from agents.oracle import CausalOracle, action_of, build_oracle, flush_class, labels, load_class
from agents.oracle_model import decision_phases, estimate, phase_at, phase_count, plan_schedule
from agents.policy import Policy
from agents.schedules import interval_count
from envs.action import MAX_STEPS, ActionMap
from envs.knob_batch import to_array, to_knobs
from envs.lanes import Lanes
from envs.observation import ObservationBuilder
from envs.observation_vector import DIM
from envs.task import FIXED, Scenario, Task
from envs.workloads import Trace
from tests.agents.observations import KNOBS, PRICES, nothing
from tests.agents.observations import SPACE as OTHER_SPACE
from tests.agents.two_regimes import INTERVAL, PERIOD, SPACE, two_regimes

SEEDS = (11, 12, 13)


@cache
def built() -> CausalOracle:
    return build_oracle(lambda seed: two_regimes(seed, periods=4), period=PERIOD, seeds=SEEDS, rollouts=40)


def play(policy: Policy, scenario: Scenario) -> tuple[float, np.ndarray]:
    """Return what a policy costs but for the first interval, and the knobs in force, shape (W, 3)."""
    task = Task(lambda rng: scenario, episode_length=10_000, reference="hold", randomise=FIXED)
    lanes = Lanes(task, [task.draw(np.random.default_rng(0))])
    policy.reset()
    dollars, knobs, over = 0.0, [], False
    while not over:
        window = lanes.move(to_array([policy.decide(lanes.observation(0)).knobs]))
        dollars += window.dollars[0]
        knobs.append(window.knobs[0])
        over = bool(window.over[0])
    return dollars, np.array(knobs)


def test_it_beats_the_best_static_setting_and_the_curve_where_regimes_recur() -> None:
    scenario = two_regimes(0)
    cost, knobs = play(built(), scenario)
    _, static = best_static(scenario)
    assert cost < 0.92 * static.sum()
    assert cost < 0.90 * play(CurvePolicy(), scenario)[0]
    # Small while nothing is asked for twice, room for all 60 keys while they are asked for.
    half = (decision_phases(scenario, PERIOD) * 2) // 20
    assert np.median(knobs[half == 0, 0]) < 20_000
    assert np.median(knobs[half == 1, 0]) >= 60_000


def test_it_grows_before_it_is_needed_and_moves_no_further_than_it_may() -> None:
    scenario = two_regimes(1)
    _, knobs = play(built(), scenario)
    steps = np.array([SPACE.to_steps(to_knobs(row)) for row in knobs])
    assert np.all(np.abs(np.diff(steps, axis=0)) <= np.array(MAX_STEPS) + 1e-6)
    first_busy = decision_phases(scenario, PERIOD) == 10
    assert np.all(steps[first_busy, 0] > 2.0)


def _spliced(first: Scenario, second: Scenario, cut: float) -> Scenario:
    """Return the first until ``cut``, and the second from then on."""
    head, tail = first.trace, second.trace
    before, after = head.time < cut, tail.time >= cut
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(head, name)[before], getattr(tail, name)[after]])
        for name in ("time", "key", "size", "group", "input_tokens", "output_tokens")
    }
    flushes = np.concatenate([head.flush_time[head.flush_time < cut], tail.flush_time[tail.flush_time >= cut]])
    return replace(first, trace=Trace(name="spliced", flush_time=flushes, **columns))


def test_what_is_still_to_come_does_not_change_what_it_does() -> None:
    # A plan that makes use of everything that it may see.
    plan = replace(
        built().plan,
        follow=np.array([0.5, 0.25]),
        flushed=np.array([[1.0, 0.0, 1.0], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.5, 0.0, 0.0], [0.25, 0.0, 0.0]]),
        loaded=np.array([[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]),
    )
    oracle, cut = CausalOracle(plan), 2.0 * PERIOD + 70.0
    one, other = two_regimes(2, periods=4, flush=True), two_regimes(99, periods=4, busy_from=0.2)
    _, knobs = play(oracle, one)
    _, changed = play(oracle, _spliced(one, other, cut))
    decided = math.floor(cut / INTERVAL)  # the interval that begins at or before the cut is the last that knows nothing of it
    assert np.array_equal(knobs[:decided], changed[:decided])
    assert not np.array_equal(knobs[decided:], changed[decided : len(knobs)])


def test_it_is_the_same_whenever_it_is_built() -> None:
    plans = [
        build_oracle(lambda seed: two_regimes(seed, periods=2), period=PERIOD, seeds=(11, 12), rollouts=12).plan for _ in range(2)
    ]
    assert np.array_equal(plans[0].schedule, plans[1].schedule)
    assert np.array_equal(plans[0].follow, plans[1].follow)


def test_without_a_period_it_is_as_good_as_one_setting() -> None:
    oracle = build_oracle(lambda seed: two_regimes(seed, periods=3), period=None, seeds=SEEDS, rollouts=24)
    assert oracle.plan.schedule.shape == (1, 3)
    scenario = two_regimes(5, periods=3)
    assert play(oracle, scenario)[0] < 1.05 * best_static(scenario)[1].sum()


def test_the_model_alone_plans_the_right_sizes() -> None:
    scenarios = [two_regimes(seed, periods=4) for seed in SEEDS]
    model, units = estimate(scenarios, PERIOD)
    assert model.cost.shape == (20, SPACE.size_steps, SPACE.ttl_steps, SPACE.warmup_steps)
    assert np.all(units > 0)
    schedule = plan_schedule(model)
    assert schedule[3:8, 0].max() <= 1.0
    assert schedule[12:18, 0].min() >= 5.0
    assert np.all(np.abs(np.diff(schedule, axis=0)) <= np.array(MAX_STEPS))


def test_phases_follow_the_workloads_own_clock() -> None:
    scenario = two_regimes(1, periods=2)
    assert phase_count(scenario, PERIOD) == 20
    assert decision_phases(scenario, PERIOD).tolist() == [*range(1, 20), *range(20)]
    squeezed = replace(scenario.config, prices=replace(scenario.config.prices, time_scale=2.0))
    assert phase_count(replace(scenario, config=squeezed), PERIOD) == 10
    # A clock that is a sum of intervals may be a little late.
    assert phase_at(0.3 - 0.1 * 3 + PERIOD, PERIOD, 20) == 0
    assert phase_at(30.0 - 1e-9, PERIOD, 20) == 3
    with pytest.raises(ValueError, match="period"):
        phase_count(scenario, 0.0)


def test_classes_of_flush_and_load() -> None:
    assert flush_class(np.array([0, 1, 3, 5, 15, 16, 500, math.nan, math.inf])).tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert load_class(np.array([10, 100, 200, 300, math.nan]), np.full(5, 100.0)).tolist() == [0, 1, 2, 3, 1]


def test_it_is_finite_and_within_bounds_whatever_it_sees() -> None:
    oracle = CausalOracle(built().plan)
    proposal = oracle.decide(ObservationBuilder(OTHER_SPACE, PRICES).build(nothing(), KNOBS))
    assert OTHER_SPACE.contains(proposal.knobs)
    assert math.isfinite(proposal.knobs.ttl)


@pytest.mark.parametrize("actions", [ActionMap(), ActionMap("absolute"), ActionMap(radius=(2.0, 0.0, 0.0))])
def test_labels_lead_to_the_oracles_knobs_as_far_as_actions_reach(actions: ActionMap) -> None:
    scenario = two_regimes(21, periods=2)
    vectors, chosen = labels(built(), scenario, actions)
    count = interval_count(scenario) - 1
    assert vectors.shape[1] == DIM
    assert vectors.dtype == np.float32
    assert len(vectors) == len(chosen)
    assert 0.8 * count <= len(chosen) <= count
    assert np.all(np.isfinite(vectors))
    assert np.all(np.abs(chosen) <= 1.0)
    assert np.all(chosen[:, np.asarray(actions.radius) == 0.0] == 0.0)


def test_an_action_is_the_inverse_of_what_it_means() -> None:
    scenario = two_regimes(22, periods=1)
    anchor, knobs = SPACE.from_steps([3.0, 1.0, 0.0]), SPACE.from_steps([4.5, 2.0, 1.0])
    for actions in (ActionMap(), ActionMap("absolute")):
        again = actions.knobs(action_of(knobs, anchor, scenario, actions), anchor, SPACE)
        np.testing.assert_allclose(SPACE.to_steps(again), SPACE.to_steps(knobs), atol=0.13)
    assert action_of(SPACE.from_steps([7, 1, 0]), anchor, scenario, ActionMap())[0] == 1.0
    assert np.array_equal(action_of(knobs, None, scenario, ActionMap()), np.zeros(3))


def test_what_it_cannot_be_built_on_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one realisation"):
        build_oracle(two_regimes, period=PERIOD, seeds=())

    def uneven(seed: int) -> Scenario:
        scenario = two_regimes(seed, periods=1)
        return scenario if seed == 1 else replace(scenario, interval=20.0)

    with pytest.raises(ValueError, match="seed 2"):
        build_oracle(uneven, period=PERIOD, seeds=(1, 2))
