"""The suites keep training and held-out apart, are the same whenever they are made, and say what is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from envs.workloads import TraceError
from envs.workloads.generators import DAY
from experiments.suites import FAMILIES, RECURRING, TRAINED, TRAINING_DAYS, Case, held_out, training
from tests.requirements import trace

TRACES = trace("servegen_m_large.csv.gz").parent


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return held_out(TRACES, each=1, days=1)


def test_there_is_a_case_of_every_family_and_the_real_traces_unchanged(cases: list[Case]) -> None:
    assert [case.family for case in cases if case.suite == "non-stationary"] == list(FAMILIES)
    assert [case.name for case in cases if case.suite == "steady"] == ["mooncake", "elastic", "banking77", "servegen"]
    assert len({case.name for case in cases}) == len(cases)
    assert [case.family for case in cases if case.period == DAY] == list(RECURRING)


def test_every_case_is_ordered_starts_at_zero_and_has_a_cache_of_its_scale(cases: list[Case]) -> None:
    for case in cases:
        scenario = case.scenario
        assert np.all(np.diff(scenario.trace.time) >= 0)
        assert scenario.trace.time[0] >= 0
        assert scenario.trace.duration > 50 * scenario.interval
        assert scenario.initial is not None
        assert scenario.config.space.contains(scenario.initial)
        assert 0 < scenario.config.prices.memory_gib_hour < 1e12


def test_held_out_arrivals_are_of_days_that_training_never_sees(cases: list[Case]) -> None:
    storm = next(case for case in cases if case.family == "update-storm").scenario.trace
    other = next(case for case in cases if case.family == "update-storm").draw(0).trace
    # The same arrivals modulo the pattern would give the same times.
    assert len(storm) != len(other)
    pool = training(TRACES, pool=20)
    for number in range(20):
        assert pool[number].trace.duration <= TRAINING_DAYS * DAY


def test_keys_of_held_out_cases_are_asked_for_in_no_training_scenario(cases: list[Case]) -> None:
    held = set(np.unique(np.concatenate([case.scenario.trace.key for case in cases if case.suite == "non-stationary"])).tolist())
    pool = training(TRACES, pool=len(FAMILIES), families=FAMILIES)
    for number in range(len(pool)):
        assert not held & set(np.unique(pool[number].trace.key).tolist())


def test_a_training_scenario_is_the_same_whenever_it_is_made() -> None:
    one, other = training(TRACES, pool=14)[9], training(TRACES, pool=280)[9]
    assert one.config == other.config
    assert np.array_equal(one.trace.key, other.trace.key)
    assert np.array_equal(one.trace.time, other.trace.time)


def test_training_draws_from_every_family_in_turn_and_from_made_sessions() -> None:
    pool = training(TRACES, pool=len(TRAINED))
    names = [pool[number].trace.name for number in range(len(pool))]
    assert [name.rsplit("-", 1)[0] for name in names] == list(TRAINED)
    assert pool[TRAINED.index("model-release")].trace.flush_time.size
    assert pool[TRAINED.index("update-storm")].trace.update_time.size


def test_a_folder_without_the_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="CACHEPILOT_TRACES"):
        held_out(tmp_path)
