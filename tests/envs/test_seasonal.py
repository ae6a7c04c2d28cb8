"""What is remembered by the time of day: the newest of each stretch, one visit a day, nothing without a measurement."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from envs.seasonal import BINS, DAY, WEIGHT, SeasonalMemory

STRETCH = DAY / BINS


def write(memory: SeasonalMemory, end: float, length: float, value: float) -> None:
    memory.update(np.array([end]), np.array([length]), np.array([[value]]))


def read(memory: SeasonalMemory, time: float) -> float:
    return float(memory.at(np.array([time]), np.array([0.0]))[0, 0])


def test_a_stretch_of_the_next_day_is_averaged_with_the_one_before() -> None:
    memory = SeasonalMemory(1, 1)
    write(memory, STRETCH, STRETCH, 1.0)
    assert np.isnan(read(memory, 1.5 * STRETCH))
    write(memory, DAY + STRETCH, STRETCH, 3.0)
    assert read(memory, 5 * DAY + 0.5 * STRETCH) == 1.0 + WEIGHT * 2.0


@given(st.floats(min_value=1.0, max_value=20.0), st.floats(min_value=0.0, max_value=3.0))
def test_a_window_of_a_day_or_more_is_written_to_every_stretch(days: float, past: float) -> None:
    memory = SeasonalMemory(1, 1)
    write(memory, (30.0 + past) * DAY, days * DAY, 7.0)
    assert [read(memory, (place + 0.5) * STRETCH) for place in range(BINS)] == [7.0] * BINS


def test_a_clock_that_was_set_back_by_days_begins_days_of_its_own() -> None:
    memory = SeasonalMemory(1, 1)
    write(memory, 9 * DAY + STRETCH, STRETCH, 1.0)
    write(memory, 2 * DAY + STRETCH, STRETCH, 3.0)
    assert read(memory, 0.5 * STRETCH) == 1.0 + WEIGHT * 2.0
    write(memory, 3 * DAY + STRETCH, STRETCH, 4.0)
    assert read(memory, 0.5 * STRETCH) == 2.0 + WEIGHT * 2.0


def test_a_window_without_a_measurement_does_not_take_the_place_of_the_days_first() -> None:
    memory, beside = SeasonalMemory(1, 1), SeasonalMemory(1, 1)
    for each in (memory, beside):
        write(each, STRETCH, STRETCH, 1.0)
    write(memory, DAY + 0.5 * STRETCH, 0.5 * STRETCH, np.nan)
    for each in (memory, beside):
        write(each, DAY + STRETCH, 0.5 * STRETCH, 3.0)
    assert read(memory, 0.5 * STRETCH) == read(beside, 0.5 * STRETCH) == 1.0 + WEIGHT * 2.0


def test_lanes_without_a_clock_are_left_as_they_are() -> None:
    memory = SeasonalMemory(2, 1)
    memory.update(np.array([np.nan, STRETCH]), np.array([STRETCH, STRETCH]), np.array([[1.0, 2.0]]))
    seen = memory.at(np.zeros(2), np.full(2, STRETCH))
    assert np.isnan(seen[0, 0])
    assert seen[0, 1] == 2.0
