import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import stats


def zipf_requests(seed, *, keys=3000, requests=30_000, exponent=1.0, memory=1500):
    """Keys of Zipf traffic, and whether a request hits: its key was asked within the last ``memory`` requests, as in an LRU."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, keys + 1) ** exponent
    index = rng.choice(keys, size=requests, p=weights / weights.sum())
    order = np.lexsort((np.arange(requests), index))
    gap = np.full(requests, requests)
    same = index[order][1:] == index[order][:-1]
    gap[order[1:][same]] = (order[1:] - order[:-1])[same]
    return np.unique(index, return_inverse=True)[1].astype(np.int64), gap <= memory


def false_positives(sums, requests, splits, seed):
    """Shares of random A/A splits by key in which the clustered and the per-request test find a difference."""
    rng = np.random.default_rng(seed)
    clustered = naive = 0
    for _ in range(splits):
        arm = rng.random(len(requests)) < 0.5
        estimates = [stats.ratio(sums[side], requests[side]) for side in (arm, ~arm)]
        clustered += not _holds_zero(*estimates)
        variance = sum(
            one.value * (1 - one.value) / requests[side].sum() for one, side in zip(estimates, (arm, ~arm), strict=True)
        )
        naive += abs(estimates[0].value - estimates[1].value) > 1.96 * math.sqrt(variance)
    return clustered / splits, naive / splits


def _holds_zero(treatment, control):
    found = stats.interval(stats.difference(treatment, control))
    return found.low <= 0.0 <= found.high


@pytest.mark.parametrize(("exponent", "seed"), [(0.8, 1), (1.0, 2), (1.2, 3)])
def test_splitting_an_arm_from_itself_by_key_rarely_shows_a_difference_but_per_request_it_nearly_always_does(exponent, seed):
    index, hit = zipf_requests(seed, exponent=exponent)
    sums = stats.cluster_sums(index, index.max() + 1, np.stack([hit, np.ones(len(hit))], axis=1))
    clustered, naive = false_positives(sums[:, 0], sums[:, 1], 2000, seed)
    assert naive > 0.8
    assert clustered < 0.1
    assert clustered < naive / 8


def test_a_true_difference_is_found_and_its_interval_covers_it():
    rng = np.random.default_rng(5)
    covered = found = 0
    for _ in range(200):
        requests = rng.integers(1, 30, 400).astype(float)
        control = rng.binomial(requests.astype(int), 0.5)
        treatment = rng.binomial(requests.astype(int), 0.56)
        result = stats.interval(stats.difference(stats.ratio(treatment, requests), stats.ratio(control, requests)))
        covered += result.low <= 0.06 <= result.high
        found += result.low > 0
    assert covered / 200 > 0.9
    assert found / 200 > 0.9


def test_equal_single_request_clusters_give_the_textbook_standard_error():
    hits = np.array([1.0] * 30 + [0.0] * 70)
    result = stats.ratio(hits, np.ones(100))
    assert result.value == 0.3
    assert result.se == pytest.approx(math.sqrt(0.3 * 0.7 / 100) / 0.99)
    assert result.df > 90


def test_a_fixed_part_moves_the_ratio_as_if_it_were_spread_over_all_requests():
    rng = np.random.default_rng(0)
    y, m = rng.random(50), rng.integers(1, 9, 50).astype(float)
    result = stats.ratio(y, m, fixed=10.0)
    assert result.value == pytest.approx((y.sum() + 10.0) / m.sum())
    assert result.se != pytest.approx(stats.ratio(y, m).se)


def test_a_dominating_key_widens_the_interval():
    rng = np.random.default_rng(1)
    m = np.ones(200)
    hot = np.append(m, 400.0)
    y = rng.random(200)
    even, skewed = stats.ratio(y, m), stats.ratio(np.append(y, 50.0), hot)
    assert skewed.se > even.se
    assert skewed.df < even.df
    assert stats.effective_clusters(hot) < 3
    assert stats.effective_clusters(m) == 200


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_clusters_give_no_interval(count):
    result = stats.ratio(np.ones(count), np.ones(count) * 2)
    assert not stats.interval(result).known
    assert stats.interval(result).to_dict()["low"] is None
    assert not stats.interval(stats.difference(result, stats.ratio([1.0, 2.0], [3.0, 4.0]))).known


def test_an_interval_is_cut_to_what_is_possible():
    result = stats.interval(stats.Estimate(0.99, 0.5, 10.0), low=0.0, high=1.0)
    assert (result.low, result.high) == (0.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1)), min_size=2, max_size=60),
    st.floats(0.5, 1000.0),
)
def test_a_ratio_scales_with_its_numerator_and_never_fails(clusters, factor):
    m = np.array([size for size, _ in clusters], float)
    y = m * np.array([share for _, share in clusters])
    one, many = stats.ratio(y, m), stats.ratio(y * factor, m)
    assert 0.0 <= one.value <= 1.0 + 1e-12
    assert one.se >= 0
    assert 1.0 <= one.df <= max(1.0, len(m) - 1)
    assert many.value == pytest.approx(one.value * factor)
    assert many.se == pytest.approx(one.se * factor, abs=1e-9)
    assert 1.0 <= stats.effective_clusters(m) <= len(m) + 1e-9


def test_the_bootstrap_of_independent_requests_agrees_with_theory():
    rng = np.random.default_rng(3)
    values = rng.exponential(1.0, 2000)
    index = np.arange(2000, dtype=np.int64)
    totals = np.stack([values, np.ones(2000)], axis=1)
    drawn = stats.bootstrap(index, totals, values, [0.5, 0.99], replicates=600, seed=1)
    means = drawn.totals[:, 0] / drawn.totals[:, 1]
    assert means.std() == pytest.approx(values.std() / math.sqrt(2000), rel=0.12)
    median = stats.percentile_interval(stats.quantile(values, 0.5), drawn.quantiles[:, 0])
    assert median.low < math.log(2) < median.high
    assert median.high - median.low == pytest.approx(4 * math.sqrt(1 / 2000), rel=0.25)  # 1.96 x 2 x 1/(2 f sqrt n), f = 1/2
    assert np.mean(drawn.quantiles[:, 1]) == pytest.approx(stats.quantile(values, 0.99), rel=0.05)


def test_the_bootstrap_of_clusters_is_wider_than_that_of_requests():
    rng = np.random.default_rng(4)
    index = np.repeat(np.arange(40), 50)
    values = rng.normal(size=40)[index] + 0.1 * rng.normal(size=2000)
    ones = np.ones((2000, 1))
    by_key = stats.bootstrap(index, stats.cluster_sums(index, 40, ones), values, [0.5], replicates=300)
    by_request = stats.bootstrap(np.arange(2000), ones, values, [0.5], replicates=300)
    assert by_key.quantiles.std() > 3 * by_request.quantiles.std()


def test_equal_seeds_give_equal_replicates_and_other_seeds_others():
    index = np.arange(100, dtype=np.int64) // 2
    totals = stats.cluster_sums(index, 50, np.ones((100, 1)))
    drawn = [stats.bootstrap(index, totals, np.arange(100), [0.9], replicates=50, seed=seed).quantiles for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_a_bootstrap_in_small_chunks_has_the_right_shape_and_mean(monkeypatch):
    monkeypatch.setattr(stats, "_CELLS", 700)
    index = np.arange(100, dtype=np.int64)
    drawn = stats.bootstrap(index, np.ones((100, 1)), index, [0.5, 0.9], replicates=333)
    assert drawn.totals.shape == (333, 1)
    assert drawn.quantiles.shape == (333, 2)
    assert drawn.totals.mean() == pytest.approx(100, abs=2.5)


def test_a_bootstrap_of_a_single_cluster_marks_empty_draws():
    drawn = stats.bootstrap(np.zeros(5, np.int64), np.array([[5.0]]), np.arange(5.0), [0.99], replicates=200)
    empty = drawn.totals[:, 0] == 0
    assert 0.2 < empty.mean() < 0.55
    assert np.all(np.isnan(drawn.quantiles[empty]))
    assert np.all(drawn.quantiles[~empty] == 4.0)


@pytest.mark.parametrize("hot", [0.0, 0.9])
def test_weighted_quantiles_are_those_of_the_requests_written_out(hot):
    rng = np.random.default_rng(8)
    index = np.where(rng.random(3000) < hot, 0, rng.integers(1, 200, 3000)).astype(np.int64)
    values = np.round(rng.exponential(1.0, 3000) * (1 + (index == 0)), 2)  # with ties
    counts = stats.cluster_sums(index, 200, np.ones((3000, 1)))
    weights = next(stats._poisson_weights(200, 3000, 40, 5))
    drawn = stats.bootstrap(index, counts, values, [0.25, 0.99], replicates=40, seed=5)
    for row in range(40):
        written_out = np.repeat(values, weights[row][index])
        assert drawn.totals[row, 0] == len(written_out)
        assert drawn.quantiles[row].tolist() == [stats.quantile(written_out, q) for q in (0.25, 0.99)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_value_with_its_share_at_or_below(values, q):
    found = stats.quantile(values, q)
    assert np.mean(np.array(values) <= found) >= q - 1e-9
    assert np.mean(np.array(values) < found) < q + 1e-9


def test_a_split_that_is_not_as_designed_is_detected():
    shares = {"control": 0.5, "treatment": 0.5}
    assert stats.sample_ratio_mismatch({"control": 500, "treatment": 510}, shares) > 0.5
    assert stats.sample_ratio_mismatch({"control": 5000, "treatment": 5500}, shares) < 1e-5
    assert stats.sample_ratio_mismatch({"treatment": 100}, shares) < 1e-9
    assert math.isnan(stats.sample_ratio_mismatch({}, shares))


def test_columns_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"expected shape \(3, C\)"):
        stats.cluster_sums(np.zeros(3, np.int64), 1, np.ones((4, 1)))
