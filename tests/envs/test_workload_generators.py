"""Made workloads have the properties that they were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from envs.workloads import sessions, zipf_ranks


def top(trace_keys: np.ndarray, count: int = 50) -> set[int]:
    keys, counts = np.unique(trace_keys, return_counts=True)
    return set(keys[np.argsort(-counts)][:count].tolist())


def test_equal_arguments_give_equal_traces_and_seeds_differ() -> None:
    first, again, other = (sessions(2_000, 300, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.key, again.key)
    assert np.array_equal(first.time, again.time)
    assert not np.array_equal(first.key, other.key)


def test_requests_are_as_many_as_asked_and_within_the_duration() -> None:
    trace = sessions(1_234, 100, duration=500.0)
    assert len(trace) == 1_234
    assert 0 <= trace.time[0] <= trace.time[-1] < 500.0


def test_ranks_follow_zipfs_law() -> None:
    ranks = zipf_ranks(np.random.default_rng(0), 100, 1.0, 200_000)
    counts = np.bincount(ranks, minlength=100)
    expected = 1 / np.arange(1, 101)
    assert counts[:20] / 200_000 == pytest.approx((expected / expected.sum())[:20], rel=0.05)


def test_load_follows_the_hour() -> None:
    counts, _ = np.histogram(sessions(40_000, 100, duration=1_000.0, diurnal=0.8).time, 4)
    assert counts[1:3].sum() > 2 * counts[[0, 3]].sum()
    flat, _ = np.histogram(sessions(40_000, 100, duration=1_000.0, diurnal=0.0).time, 4)
    assert flat.max() < 1.1 * flat.min()


def test_drift_replaces_popular_keys() -> None:
    kept = {}
    for drift in (0.0, 3.0):
        trace = sessions(40_000, 1_000, drift=drift, duration=1_000.0, seed=4)
        kept[drift] = len(top(trace.key[:10_000]) & top(trace.key[-10_000:]))
    assert kept[0.0] > 35
    assert kept[3.0] < 10


def test_a_hot_swap_changes_what_is_popular_at_once() -> None:
    trace = sessions(40_000, 1_000, drift=0.0, duration=1_000.0, hot_swaps=[500.0], seed=4)
    before, after = trace.key[trace.time < 500], trace.key[trace.time >= 500]
    assert len(top(before) & top(after)) < 15
    assert len(top(before[: len(before) // 2]) & top(before[len(before) // 2 :])) > 30


def test_one_key_has_one_answer() -> None:
    for text in (False, True):
        trace = sessions(5_000, 300, text=text)
        _, first, inverse = np.unique(trace.key, return_index=True, return_inverse=True)
        for column in (trace.size, trace.output_tokens, trace.input_tokens, trace.group):
            assert np.array_equal(column, column[first][inverse])


def test_wordings_of_one_meaning_share_a_group() -> None:
    trace = sessions(5_000, 50, text=True)
    assert trace.kind == "semantic"
    wordings = {group: {trace.prompt(row) for row in np.flatnonzero(trace.group == group)} for group in set(trace.group.tolist())}
    assert max(len(texts) for texts in wordings.values()) > 1
    everything = [text for texts in wordings.values() for text in texts]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_requests": 0}, {"n_keys": 0}, {"alpha": -1.0}, {"drift": float("nan")}, {"duration": 0.0}, {"diurnal": 2.0},
        {"day": 0.0}, {"repeat": 1.0}, {"session_length": 0.5}, {"think_time": -1.0},
    ],
)  # fmt: skip
def test_arguments_out_of_range_are_named(wrong: dict[str, float]) -> None:
    arguments = {"n_requests": 10, "n_keys": 10, **wrong}
    with pytest.raises(ValueError, match=f"sessions: {next(iter(wrong))}: expected"):
        sessions(**arguments)  # type: ignore[arg-type]
