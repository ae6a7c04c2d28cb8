import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.timeline import knob_timeline, signal_totals
from serving.knobs import MIB, Knobs
from tests.experiments.samples import SPACE, START, STATIC, decision

BIG = Knobs(64 * MIB, 360.0, 0.0)


def test_knobs_hold_from_the_decision_that_applied_them():
    timeline = knob_timeline([decision(10.0, applied=BIG), decision(20.0, current=BIG, verdict="keep")], None)
    assert timeline.at(START) == STATIC
    assert timeline.at(START + 9.9) == STATIC
    assert timeline.at(START + 10.0) == BIG
    assert timeline.mean_budget(START, START + 40.0) == pytest.approx((10 * 16 + 30 * 64) / 40 * MIB)
    assert timeline.mean_budget(START + 15, START + 15) == 64 * MIB
    assert len(timeline.moves(SPACE)) == 1
    when, steps = timeline.moves(SPACE)[0]
    assert when == START + 10.0
    assert steps == pytest.approx(15 * math.log(4) / math.log(256))


def test_knobs_that_somebody_else_wrote_are_seen_at_the_next_decision():
    timeline = knob_timeline([decision(10.0), decision(20.0, current=BIG, verdict="keep")], None)
    assert timeline.at(START + 15) == STATIC
    assert timeline.at(START + 20) == BIG


def test_without_decisions_the_initial_knobs_hold_or_nothing_is_known():
    assert knob_timeline([], STATIC).mean_budget(0.0, 10.0) == STATIC.cache_size
    unknown = knob_timeline([], None)
    assert not unknown.known
    assert unknown.at(5.0) is None
    assert math.isnan(unknown.mean_budget(0.0, 1.0))
    assert unknown.moves(SPACE) == []


def test_overlapping_signal_windows_count_once():
    totals = signal_totals([decision(at, evictions=20.0, window=20.0) for at in (20.0, 30.0, 40.0)], "evictions")
    assert totals.between(START, START + 100.0) == pytest.approx(20.0 + 10.0 + 10.0)
    assert totals.between(START + 20.0, START + 30.0) == pytest.approx(10.0)


def test_a_gap_without_signals_adds_nothing():
    totals = signal_totals([decision(10.0, evictions=5.0, window=10.0), decision(100.0, evictions=5.0, window=10.0)], "evictions")
    assert totals.between(START + 10.0, START + 90.0) == 0.0
    assert totals.between(START, START + 100.0) == pytest.approx(10.0)


def test_a_signal_that_was_never_recorded_is_unknown():
    totals = signal_totals([decision(10.0)], "evictions")
    assert not totals.known
    assert totals.between(START, START + 10.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0, 100), st.floats(0.1, 80)), min_size=1, max_size=12), st.floats(0, 400))
def test_totals_of_adjoining_stretches_add_up(steps, cut):
    at, records = 0.0, []
    for gap, amount, window in steps:
        at += gap
        records.append(decision(at, evictions=amount, window=window))
    totals = signal_totals(records, "evictions")
    whole = totals.between(START - 100, START + 700)
    assert totals.between(START - 100, START + cut) + totals.between(START + cut, START + 700) == pytest.approx(whole, abs=1e-6)
    assert whole <= sum(amount for _, amount, _ in steps) + 1e-6
