"""Bounds in hindsight: static settings cost what the environment says they cost, and the best of them is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.hindsight import (
    best_of,
    best_static,
    grid_settings,
    optuna_static,
    static_dollars,
    static_replays,
    window_minimum,
)
from agents.schedules import interval_count, limited_steps, replay_steps
from envs.knob_batch import to_array, to_knobs
from envs.lanes import Lanes
from envs.task import FIXED, Scenario, Task
from tests.agents.two_regimes import INTERVAL, SPACE, two_regimes


def in_the_environment(scenario: Scenario, wanted: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return dollars and hit ratio per interval: of the initial knobs held, or of positions wanted in each interval."""
    task = Task(lambda rng: scenario, episode_length=10_000, reference="hold", randomise=FIXED)
    lanes = Lanes(task, [task.draw(np.random.default_rng(0))])
    dollars: list[float] = []
    ratios: list[float] = []
    over = False
    while not over:
        knobs = lanes.observation(0).knobs if wanted is None else SPACE.from_steps(wanted[len(dollars)])
        window = lanes.move(to_array([knobs]))
        dollars.append(window.dollars[0])
        ratios.append(window.hit_ratio[0])
        over = bool(window.over[0])
    return np.array(dollars), np.array(ratios)


def test_the_grid_holds_every_setting_once() -> None:
    grid = grid_settings(SPACE, (0.0, 1.0))
    assert grid.shape == (SPACE.size_steps * SPACE.ttl_steps * 2, 3)
    assert len(np.unique(grid, axis=0)) == len(grid)
    assert set(grid[:, 0]) == set(SPACE.sizes.astype(float))
    assert set(grid[:, 1]) == set(SPACE.ttls)
    assert set(grid[:, 2]) == {0.0, SPACE.max_warmup}


@pytest.mark.parametrize("warmups", [(), (-0.1,), (0.0, 1.5)])
def test_warm_up_ratios_outside_the_space_are_refused(warmups: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="warmups"):
        grid_settings(SPACE, warmups)


@pytest.mark.parametrize("row", [0, 17, 40, 95])
def test_a_setting_costs_what_the_environment_says_to_the_last_bit(row: int) -> None:
    scenario = two_regimes(3, periods=2, flush=True)
    setting = grid_settings(SPACE)[row]
    runs = static_replays(scenario, setting[None])
    dollars, ratios = in_the_environment(replace(scenario, initial=to_knobs(setting)))
    assert np.array_equal(runs.dollars[0], dollars)
    np.testing.assert_allclose(runs.hits[0], ratios * runs.requests)
    assert runs.dollars.shape == (1, interval_count(scenario) - 1)


def test_a_schedule_costs_what_the_environment_says_moves_and_limits_included() -> None:
    scenario = two_regimes(4, periods=2)
    assert scenario.initial is not None
    wanted = np.random.default_rng(0).uniform(0.0, [7.0, 3.0, 2.0], (interval_count(scenario) - 1, 3))
    steps = limited_steps(wanted, SPACE.to_steps(scenario.initial))
    runs = replay_steps(scenario, steps[None])
    # The environment measures a move from sizes in whole bytes, of which this cache has few.
    np.testing.assert_allclose(runs.dollars[0], in_the_environment(scenario, wanted)[0], rtol=1e-4)
    assert runs.terms["change"].sum() > 0
    np.testing.assert_allclose(sum(runs.terms.values()), runs.dollars, rtol=1e-9)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=20))
def test_no_interval_moves_a_knob_further_than_it_may(wanted: list[tuple[float, float, float]]) -> None:
    steps = limited_steps(np.array(wanted), np.zeros(3), (2.0, 1.0, 0.5))
    moved = np.diff(steps, axis=0)
    assert np.all(np.abs(moved) <= np.array([2.0, 1.0, 0.5]) + 1e-12)
    # It always moves towards what is wanted.
    assert np.all(np.abs(np.array(wanted) - steps[1:]) <= np.abs(np.array(wanted) - steps[:-1]) + 1e-12)


def test_each_setting_is_run_by_itself() -> None:
    scenario, grid = two_regimes(5, periods=2), grid_settings(SPACE)[::7]
    together = static_dollars(scenario, grid)
    for row in (0, len(grid) - 1):
        assert np.array_equal(static_dollars(scenario, grid[row : row + 1])[0], together[row])


def test_the_best_static_setting_is_the_cheapest_of_the_grid_or_cheaper() -> None:
    scenario = two_regimes(6, periods=2)
    grid = grid_settings(SPACE, (0.0,))
    dollars = static_dollars(scenario, grid)
    knobs, best = best_of(scenario, grid, dollars, refine=False)
    assert best.sum() == dollars.sum(axis=1).min()
    refined, less = best_static(scenario, warmups=(0.0,))
    assert less.sum() <= best.sum()
    assert np.array_equal(static_dollars(scenario, to_array([refined]))[0], less)
    assert SPACE.contains(knobs)
    assert SPACE.contains(refined)


def test_the_least_of_each_interval_is_below_every_static_setting() -> None:
    dollars = static_dollars(two_regimes(7, periods=2), grid_settings(SPACE, (0.0,)))
    least = window_minimum(dollars)
    assert np.all(least <= dollars)
    # Two regimes: no one setting is the cheapest in both.
    assert least.sum() < 0.95 * dollars.sum(axis=1).min()


def test_optuna_comes_near_the_best_static_setting_and_finds_the_same_again() -> None:
    scenario = two_regimes(8, periods=2)
    found = optuna_static(scenario, trials=25, seed=1)
    assert SPACE.contains(found)
    assert found == optuna_static([scenario], trials=25, seed=1)
    middle = static_dollars(scenario, to_array([SPACE.from_steps([0.0, 0.0, 0.0])])).sum()
    cost = static_dollars(scenario, to_array([found])).sum()
    assert cost < middle
    assert cost <= 1.05 * best_static(scenario, warmups=(0.0,))[1].sum()


def test_what_cannot_be_run_is_refused() -> None:
    scenario = two_regimes(9, periods=1)
    with pytest.raises(ValueError, match=r"shape \(N, 3\)"):
        static_dollars(scenario, np.zeros((0, 3)))
    with pytest.raises(ValueError, match=r"\(N, 20, 3\)"):
        replay_steps(scenario, np.zeros((1, 3, 3)))
    with pytest.raises(ValueError, match="expected to last longer"):
        static_dollars(replace(scenario, interval=100 * INTERVAL), grid_settings(SPACE))
    with pytest.raises(ValueError, match="at least one scenario"):
        optuna_static([], trials=3)
