from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.hotset import HotSet, WarmupRules


def test_a_key_counts_by_its_decayed_accesses() -> None:
    hot: HotSet[int] = HotSet(WarmupRules(half_life=10.0))
    for now in (0.0, 10.0, 20.0):
        hot.access(7, now)
    assert hot.score(7, 20.0) == pytest.approx(1.75)
    assert hot.score(7, 30.0) == pytest.approx(0.875)
    assert hot.score(8, 20.0) == 0.0


def test_only_keys_that_score_enough_are_planned_the_hottest_first() -> None:
    hot: HotSet[bytes] = HotSet(WarmupRules(half_life=1e9, min_score=1.5))
    for name, count in ((b"once", 1), (b"thrice", 3), (b"twice", 2), (b"also twice", 2)):
        for _ in range(count):
            hot.access(name, 0.0)
    assert hot.plan(1.0, 0.0) == [b"thrice", b"also twice", b"twice"], "of equals the smaller key goes first"
    assert hot.plan(0.5, 0.0) == [b"thrice", b"also twice"], "a part of a key is a key"
    assert hot.plan(0.01, 0.0) == [b"thrice"]
    assert hot.plan(0.0, 0.0) == []


def test_a_key_that_rests_leaves_the_plan() -> None:
    hot: HotSet[int] = HotSet(WarmupRules(half_life=10.0, min_score=1.5))
    hot.access(1, 0.0)
    hot.access(1, 0.0)
    assert hot.plan(1.0, 4.0) == [1]
    assert hot.plan(1.0, 5.0) == []


def test_the_table_is_pruned_to_the_heaviest_when_it_outgrows_twice_its_capacity() -> None:
    hot: HotSet[int] = HotSet(WarmupRules(capacity=3, half_life=1e9))
    for key, count in ((5, 2), (4, 2), (3, 1), (2, 1), (1, 3), (6, 1)):
        for _ in range(count):
            hot.access(key, 0.0)
    assert len(hot) == 6
    hot.access(0, 0.0)
    assert len(hot) == 3
    assert [key for key in range(7) if hot.score(key, 0.0) > 0] == [1, 4, 5]


def test_an_empty_hot_set_plans_nothing_and_clearing_makes_it_empty() -> None:
    hot: HotSet[int] = HotSet()
    assert hot.plan(1.0, 5.0) == []
    for _ in range(3):
        hot.access(1, 5.0)
    hot.clear()
    assert hot.plan(1.0, 5.0) == []
    assert len(hot) == 0


@settings(max_examples=50)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 300.0)), min_size=1, max_size=60),
    start=st.sampled_from([0.0, 1.7e9]),
)
def test_scores_are_those_of_the_definition_however_long_it_runs(steps: list[tuple[int, float]], start: float) -> None:
    """A half-life of 1 s and hours of clock: the weights outgrow a double many times over."""
    hot: HotSet[int] = HotSet(WarmupRules(half_life=1.0))
    now = start
    accesses: list[tuple[int, float]] = []
    for key, pause in steps:
        now += pause
        hot.access(key, now)
        accesses.append((key, now))
    for key in range(6):
        expected = math.fsum(2.0 ** -(now - at) for name, at in accesses if name == key)
        assert hot.score(key, now) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capacity", 0),
        ("half_life", 0.0),
        ("half_life", math.inf),
        ("period", -1.0),
        ("refresh_ahead", 1.0),
        ("min_score", math.nan),
        ("burst", -1),
        ("refreshes_per_second", -0.5),
    ],
)
def test_rules_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"warmup {name}: expected"):
        WarmupRules(**{name: value})  # type: ignore[arg-type]
