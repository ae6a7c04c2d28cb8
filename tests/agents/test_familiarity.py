"""What training saw is known component by component, and what lies outside of it is noticed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.familiarity import NAMES, STATISTICS, TOLERANCE, ObservationStatistics, RunningStatistics
from envs.observation_vector import DIM, HIGH, LOW
from tests.agents.observations import vectors


def test_every_element_of_a_vector_has_a_name() -> None:
    assert len(NAMES) == len(set(NAMES)) == DIM


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any), st.integers(0, 1 << 16))
def test_batch_by_batch_is_what_it_is_at_once(sizes: list[int], seed: int) -> None:
    whole = vectors(sum(sizes), seed)
    running = RunningStatistics()
    for part in np.split(whole, np.cumsum(sizes)[:-1]):
        running.add(part)
    found = running.statistics()
    double = whole.astype(np.float64)
    assert found.mean == pytest.approx(double.mean(axis=0), abs=1e-6)
    assert found.std == pytest.approx(double.std(axis=0), abs=1e-6)
    assert np.array_equal(found.min, whole.min(axis=0))
    assert np.array_equal(found.max, whole.max(axis=0))
    assert all(getattr(found, name).dtype == np.float32 for name in STATISTICS)


def test_rollouts_of_many_lanes_are_taken_as_they_come() -> None:
    rollout = vectors(12).reshape(4, 3, DIM)
    assert np.array_equal(ObservationStatistics.of(rollout).mean, ObservationStatistics.of(vectors(12)).mean)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 16), st.integers(0, DIM - 1), st.sampled_from([-1, 1]))
def test_only_what_lies_outside_is_outside(seed: int, element: int, side: int) -> None:
    seen = vectors(6, seed)
    statistics = ObservationStatistics.of(seen)
    assert not any(statistics.outside(row).any() for row in seen)
    edge = (statistics.max if side > 0 else statistics.min)[element]
    vector = seen[0].copy()
    vector[element] = edge + side * TOLERANCE * 0.99
    assert not statistics.outside(vector).any()
    vector[element] = edge + side * TOLERANCE * 1.01
    assert np.flatnonzero(statistics.outside(vector)).tolist() == [element]


def test_to_a_policy_that_was_not_trained_everything_is_familiar() -> None:
    statistics = ObservationStatistics.anything()
    assert not any(statistics.outside(row).any() for row in (LOW, HIGH, *vectors(5)))


@pytest.mark.parametrize("wrong", [np.zeros((2, DIM + 1)), np.full((1, DIM), np.nan), np.zeros(()), np.full((1, DIM), np.inf)])
def test_what_are_no_observations_is_refused(wrong: npt.NDArray[np.float64]) -> None:
    with pytest.raises(ValueError, match=f"expected finite observations of {DIM} elements"):
        RunningStatistics().add(wrong)


def test_statistics_of_nothing_are_refused() -> None:
    running = RunningStatistics()
    running.add(np.zeros((0, DIM)))
    with pytest.raises(ValueError, match="at least one observation"):
        running.statistics()


def test_statistics_cannot_be_written_to() -> None:
    statistics = ObservationStatistics.of(vectors(3))
    with pytest.raises(ValueError, match="read-only"):
        statistics.min[0] = 5
