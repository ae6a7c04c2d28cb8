"""Aggregates over seeds and cases: what they are, what does not change them, and how often their intervals hold the truth."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from experiments.robust_stats import (
    CROSSED,
    NESTED,
    REPLICATES,
    WITHIN,
    Scheme,
    bootstrap,
    case_intervals,
    gap_closed,
    interquartile_mean,
    mean,
    optimality_gap,
    picks,
    probability_of_improvement,
)

Floats = npt.NDArray[np.float64]
SCHEMES: tuple[Scheme, ...] = (WITHIN, NESTED, CROSSED)
tables = st.tuples(st.integers(1, 6), st.integers(1, 9)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.floats(0.01, 100.0))
)


@given(tables)
def test_the_interquartile_mean_is_the_trimmed_mean(scores: Floats) -> None:
    assert float(interquartile_mean(scores)) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None), rel=1e-12)


@given(tables)
def test_the_interquartile_mean_of_many_tables_is_that_of_each(scores: Floats) -> None:
    both = np.stack([scores, 2.0 * scores])
    assert interquartile_mean(both) == pytest.approx([interquartile_mean(scores), interquartile_mean(2.0 * scores)])


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 8), st.floats(0.1, 10.0), st.sampled_from(SCHEMES))
def test_equal_scores_have_an_interval_without_width(seeds: int, cases: int, value: float, scheme: Scheme) -> None:
    found = bootstrap(np.full((seeds, cases), value), scheme=scheme, replicates=50)
    assert found.value == pytest.approx(value)
    if (seeds if scheme == WITHIN else cases) > 1:
        assert [found.low, found.high] == pytest.approx([value, value])
    else:
        assert not found.known


@settings(max_examples=30)
@given(tables, st.randoms(use_true_random=False))
def test_the_order_of_seeds_and_cases_does_not_matter_to_the_estimate(scores: Floats, random: object) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    rows, columns = rng.permutation(len(scores)), rng.permutation(scores.shape[1])
    mixed, other = scores[rows][:, columns], np.sqrt(scores) + 1.0
    for statistic in (interquartile_mean, mean):
        assert float(statistic(mixed)) == pytest.approx(float(statistic(scores)), rel=1e-12)
    found, again = (
        probability_of_improvement(left, right, replicates=10) for left, right in ((scores, other), (mixed, other[:, columns]))
    )
    assert again.value == pytest.approx(found.value)


@settings(max_examples=30)
@given(tables, st.floats(0.1, 10.0), st.sampled_from(SCHEMES))
def test_the_interval_scales_with_the_scores_and_holds_only_what_scores_can_give(
    scores: Floats, factor: float, scheme: Scheme
) -> None:
    found, scaled = (bootstrap(table, scheme=scheme, replicates=60) for table in (scores, factor * scores))
    assert scaled.value == pytest.approx(factor * found.value)
    if found.known:
        assert scaled.low == pytest.approx(factor * found.low)
        low, high = scores.min(), scores.max()
        assert low - 1e-9 * high <= found.low <= found.high <= high * (1 + 1e-9)


def test_one_case_says_nothing_of_other_cases_and_one_seed_nothing_of_other_seeds() -> None:
    one_case, one_seed = np.array([[0.8], [0.9], [1.0]]), np.array([[0.8, 0.9, 1.0]])
    assert [bootstrap(one_case, scheme=scheme).known for scheme in SCHEMES] == [True, False, False]
    assert [bootstrap(one_seed, scheme=scheme).known for scheme in SCHEMES] == [False, True, True]
    assert not probability_of_improvement(one_case, one_case + 0.05).known
    assert not gap_closed(one_case, one_case - 0.1).known


def test_an_odd_case_moves_the_mean_and_not_the_interquartile_mean() -> None:
    scores = np.full((5, 8), 0.95)
    scores[:, 3] = 40.0
    assert float(interquartile_mean(scores)) == pytest.approx(0.95)
    assert float(mean(scores)) > 5.0


def test_each_scheme_draws_what_it_says() -> None:
    seed, case = picks(4, 6, WITHIN, replicates=200)
    assert (case == np.arange(6)).all()
    assert (seed[:, :, 0] != seed[:, :, 1]).any()
    seed, case = picks(4, 6, NESTED, replicates=200)
    assert (case != np.arange(6)).any()
    assert (case[:, :1] == case).all()
    assert (seed[:, :, 0] != seed[:, :, 1]).any()
    seed, case = picks(4, 6, CROSSED, replicates=200)
    assert (case[:, :1] == case).all()
    assert (seed[:, :, :1] == seed).all(), "a seed is drawn with all its cases"


def test_it_repeats_from_its_seed_and_not_from_another() -> None:
    scores = np.random.default_rng(1).normal(1.0, 0.2, (5, 8))
    assert bootstrap(scores, seed=4) == bootstrap(scores, seed=4)
    assert bootstrap(scores, seed=4) != bootstrap(scores, seed=5)


def _coverage(draw: object, scheme: Scheme, truth: float, trials: int = 300) -> float:
    held = 0
    for trial in range(trials):
        found = bootstrap(draw(np.random.default_rng([9, trial])), mean, scheme=scheme, replicates=300)  # type: ignore[operator]
        held += found.low <= truth <= found.high
    return held / trials


def test_intervals_hold_the_truth_about_as_often_as_they_say_when_seeds_and_cases_are_both_a_sample() -> None:
    def crossed(rng: np.random.Generator) -> Floats:
        table: Floats = 1.0 + rng.normal(0, 0.05, (8, 1)) + rng.normal(0, 0.1, (1, 16)) + rng.normal(0, 0.02, (8, 16))
        return table

    assert 0.88 <= _coverage(crossed, CROSSED, 1.0) <= 0.99
    # What takes the cases for fixed, or a seed's cells for independent, is too sure of itself here.
    assert _coverage(crossed, WITHIN, 1.0) < 0.75


def test_intervals_of_fixed_cases_hold_the_truth_of_these_cases() -> None:
    cases = np.linspace(0.5, 1.5, 12)
    assert 0.88 <= _coverage(lambda rng: cases + rng.normal(0, 0.1, (6, 12)), WITHIN, 1.0) <= 0.99


def test_the_probability_of_improvement_counts_pairs_of_seeds_and_halves_ties() -> None:
    assert probability_of_improvement([[1.0, 2.0]], [[2.0, 1.0]]).value == 0.5
    assert probability_of_improvement([[1.0], [3.0]], [[2.0], [2.0], [0.5]]).value == pytest.approx(2 / 6)
    assert probability_of_improvement([[1.0, 1.0]], [[1.0, 2.0]]).value == 0.75
    certain = probability_of_improvement(np.full((5, 8), 0.9), np.full((3, 8), 1.0))
    assert (certain.value, certain.low, certain.high) == (1.0, 1.0, 1.0)


@settings(max_examples=30)
@given(tables, st.integers(0, 2**16))
def test_the_probability_of_improvement_agrees_with_mann_whitney_and_with_the_other_side(ours: Floats, seed: int) -> None:
    theirs = np.random.default_rng(seed).choice(ours.ravel(), (3, ours.shape[1]))
    found = probability_of_improvement(ours, theirs, replicates=40)
    pairs = len(ours) * 3
    expected = np.mean([stats.mannwhitneyu(theirs[:, case], ours[:, case]).statistic / pairs for case in range(ours.shape[1])])
    assert found.value == pytest.approx(expected)
    assert probability_of_improvement(theirs, ours, replicates=40).value == pytest.approx(1.0 - found.value)
    if found.known:
        assert 0.0 <= found.low <= found.high <= 1.0


def test_the_share_of_a_gap_that_is_closed() -> None:
    bound = np.array([[0.8, 0.9, 0.999]])
    assert gap_closed(bound, bound).value == 1.0
    assert gap_closed(np.ones((1, 3)), bound).value == 0.0
    half = gap_closed(1.0 - 0.5 * (1.0 - bound), bound)
    assert [half.value, half.low, half.high] == pytest.approx([0.5] * 3)
    # A case with next to no gap does not decide.
    assert gap_closed([[0.8, 0.9, 1.01]], bound).value == pytest.approx(0.29 / 0.301)


def test_there_is_no_share_where_there_is_no_gap() -> None:
    assert math.isnan(gap_closed([[0.9, 0.9]], [[1.0, 1.01]]).value)
    uncertain = gap_closed([[0.9, 0.95]], [[0.8, 1.05]])
    assert uncertain.value == pytest.approx(1.0)
    assert not uncertain.known


def test_what_is_better_than_the_bound_does_not_make_up_for_what_is_worse() -> None:
    assert optimality_gap([[0.5, 1.2]]).value == pytest.approx(0.1)
    assert optimality_gap([[0.5, 1.2]], [0.4, 1.2]).value == pytest.approx(0.05)


def test_intervals_of_single_cases_are_students() -> None:
    scores = np.random.default_rng(2).normal(1.0, 0.1, (5, 3))
    for case, found in enumerate(case_intervals(scores)):
        low, high = stats.t.interval(0.95, 4, scores[:, case].mean(), stats.sem(scores[:, case]))
        assert [found.low, found.high] == pytest.approx([low, high])
    assert [found.known for found in case_intervals(scores[:1])] == [False] * 3


@pytest.mark.parametrize("scores", [[1.0, 2.0], [[1.0, math.nan]], np.zeros((0, 3))])
def test_scores_that_are_no_table_of_finite_numbers_are_refused(scores: object) -> None:
    with pytest.raises(ValueError, match=r"finite numbers of shape \(seeds, cases\)"):
        bootstrap(scores)  # type: ignore[arg-type]


def test_many_seeds_on_both_sides_do_not_need_memory_for_all_replicates_at_once() -> None:
    costs = np.random.default_rng(1).random((2, 12, 20))
    tracemalloc.start()
    found = probability_of_improvement(costs[0], costs[1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.low < found.value < found.high
    assert peak < 12 * 12 * 20 * 8 * REPLICATES / 4
