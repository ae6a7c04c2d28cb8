"""An action is a bounded residual around the anchor, and the result is always a legal setting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.action import MAX_STEPS, RADIUS, RESIDUAL, limit_step
from envs.knob_batch import SpaceBatch, to_array, to_knobs
from serving.knobs import Knobs, KnobSpace

SPACE = KnobSpace()
_KNOBS = st.builds(Knobs, st.integers(0, 1 << 40), st.floats(1e-3, 1e9), st.floats(0.0, 1.0))
_ACTIONS = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)


def test_zero_is_the_anchor_itself() -> None:
    anchor = Knobs(int(SPACE.sizes[7]), float(SPACE.ttls[3]), 0.0)
    assert RESIDUAL.knobs([0.0, 0.0, 0.0], anchor, SPACE) == anchor
    assert RESIDUAL.knobs([0.03, -0.03, 0.03], anchor, SPACE) == anchor  # less than half of the resolution


def test_one_is_the_radius() -> None:
    anchor = Knobs(int(SPACE.sizes[7]), float(SPACE.ttls[3]), 0.0)
    steps = SPACE.to_steps(RESIDUAL.knobs([1.0, -1.0, 1.0], anchor, SPACE))
    assert steps == pytest.approx([7 + RADIUS[0], 3 - RADIUS[1], RADIUS[2]], abs=1e-4)


@given(action=_ACTIONS, anchor=_KNOBS)
def test_the_result_is_within_the_space_and_the_radius(action: list[float], anchor: Knobs) -> None:
    knobs = RESIDUAL.knobs(action, anchor, SPACE)
    assert SPACE.contains(knobs)
    assert np.all(np.abs(SPACE.to_steps(knobs) - SPACE.to_steps(anchor)) <= np.array(RADIUS) + 1e-4)


@given(wanted=_KNOBS, current=_KNOBS)
def test_one_interval_moves_at_most_the_step_limit_and_repeating_it_arrives(wanted: Knobs, current: Knobs) -> None:
    here = current
    for _ in range(20):
        there = limit_step(wanted, here, SPACE)
        assert SPACE.contains(there)
        assert np.all(np.abs(SPACE.to_steps(there) - SPACE.to_steps(here)) <= np.array(MAX_STEPS) + 1e-4)
        here = there
    assert here == SPACE.clip(wanted)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [np.nan, 0.0, 0.0], [np.inf, 0.0, 0.0], 1.0])
def test_an_action_that_is_not_three_finite_numbers_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="expected three finite numbers"):
        RESIDUAL.knobs(bad, Knobs(1 << 20, 60.0), SPACE)  # type: ignore[arg-type]


_SPACES = [SPACE, KnobSpace(1 << 10, 1 << 40, 0.1, 1e6, 1.0), KnobSpace(max_warmup=0.0)]


@given(knobs=st.lists(_KNOBS, min_size=3, max_size=3), steps=st.lists(_ACTIONS, min_size=3, max_size=3))
def test_spaces_as_arrays_mean_the_same_as_one_by_one(knobs: list[Knobs], steps: list[list[float]]) -> None:
    spaces = SpaceBatch.of(_SPACES)
    positions = spaces.to_steps(to_array(knobs))
    moved = spaces.from_steps(np.array(steps))
    for lane, space in enumerate(_SPACES):
        assert positions[lane] == pytest.approx(space.to_steps(knobs[lane]), rel=1e-12, abs=1e-12)
        assert to_knobs(spaces.clip(to_array(knobs))[lane]) == space.clip(knobs[lane])
        expected = space.from_steps(steps[lane])
        assert to_array([to_knobs(moved[lane])])[0] == pytest.approx(to_array([expected])[0], rel=1e-9)
        assert space.contains(to_knobs(moved[lane]))


def test_spaces_of_different_shape_are_refused_with_the_lane() -> None:
    with pytest.raises(ValueError, match="lane 1: expected a grid of"):
        SpaceBatch.of([SPACE, KnobSpace(size_steps=12)])
    with pytest.raises(ValueError, match="at least one lane"):
        SpaceBatch.of([])
