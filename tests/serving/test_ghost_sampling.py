"""Which keys stand for the others: rates, count adjustment, memory, decay, rotation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving.ghost import Ghost
from serving.knobs import KnobSpace

SIZES = np.array([20_000, 80_000, 400_000, 1 << 30])
TTLS = np.array([5.0, 50.0, 1e6])
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def zipf(requests: int, keys: int, seed: int, rate: float = 100.0) -> Columns:
    random = np.random.default_rng(seed)
    weights = np.arange(1, keys + 1) ** -0.9
    key = random.choice(keys, requests, p=weights / weights.sum()).astype(np.uint64)
    return key, (100 + (key * 37) % 400).astype(np.int64), np.arange(requests) / rate


def part(columns: Columns, start: int, stop: int) -> Columns:
    return tuple(column[start:stop] for column in columns)  # type: ignore[return-value]


@pytest.mark.parametrize("rate", [1.0, 0.7, 0.3, 0.01, 1e-4])
def test_a_given_rate_is_kept_and_never_exceeded(rate: float) -> None:
    ghost = Ghost(SIZES, TTLS, rate=rate, max_keys=8192)
    ghost.access_many(*zipf(20_000, 5_000, 0))
    assert rate * 0.99 < ghost.rate <= rate
    assert ghost.take().rate == ghost.rate


def test_a_given_rate_falls_where_the_keys_do_not_fit() -> None:
    ghost = Ghost(SIZES, TTLS, rate=0.5, max_keys=64)
    ghost.access_many(*zipf(20_000, 5_000, 0))
    assert ghost.rate < 0.05


def test_a_fixed_rate_samples_its_share_of_the_keys() -> None:
    keys = np.arange(40_000, dtype=np.uint64)
    ghost = Ghost(SIZES, TTLS, rate=0.1, max_keys=8192, hot_share=0.0, count_adjusted=False)
    for _ in range(2):
        ghost.access_many(keys, np.full(len(keys), 100), np.zeros(len(keys)))
    # Every sampled key hits once in the largest size and stands for ten.
    assert ghost.take().curve.hits[-1, -1] / len(keys) == pytest.approx(1.0, abs=0.06)


def test_key_zero_is_sampled_as_often_as_any_other() -> None:
    for key in (0, 1, 2**64 - 1):
        sampled = 0
        for salt in range(800):
            ghost = Ghost(SIZES, TTLS, max_keys=16, rate=1 / 8, salt=salt, hot_share=0.0, count_adjusted=False)
            ghost.access_many(np.full(2, key, np.uint64), np.full(2, 100), np.zeros(2))
            sampled += bool(ghost.take().curve.hits[-1, -1] > 0)
        # Binomial with n = 800 and p = 1/8: four standard deviations are 37.
        assert abs(sampled - 100) < 38


def test_the_count_adjustment_takes_out_what_the_sample_drew_too_much_or_too_little() -> None:
    columns = zipf(40_000, 4_000, 1)
    exact = Ghost(SIZES, TTLS, max_keys=1 << 13)
    exact.access_many(*columns)
    truth = exact.take().curve.hit_ratio
    errors: dict[bool, list[float]] = {True: [], False: []}
    for adjusted, found in errors.items():
        for salt in range(12):
            ghost = Ghost(SIZES, TTLS, max_keys=1 << 13, rate=0.05, salt=salt, hot_share=0.0, count_adjusted=adjusted)
            ghost.access_many(*columns)
            curve = ghost.take().curve
            assert curve.requests == 40_000
            found.append(float(np.abs(curve.hit_ratio - truth).mean()))
    assert np.mean(errors[True]) < 0.7 * np.mean(errors[False])


def test_hot_keys_make_a_skewed_trace_accurate() -> None:
    columns = zipf(60_000, 20_000, 2)
    exact = Ghost(SIZES, TTLS, max_keys=1 << 15)
    exact.access_many(*columns)
    truth = exact.take().curve.hit_ratio
    error = {}
    for share in (0.0, 0.5):
        ghosts = [Ghost(SIZES, TTLS, max_keys=1_024, salt=salt, hot_share=share) for salt in range(6)]
        for ghost in ghosts:
            ghost.access_many(*columns)
        error[share] = np.mean([np.abs(ghost.take().curve.hit_ratio - truth).mean() for ghost in ghosts])
    assert error[0.5] <= 0.01
    assert error[0.5] < error[0.0] / 2


def test_memory_is_bounded_and_below_two_megabytes_for_8000_keys() -> None:
    space = KnobSpace()
    assert (len(space.sizes), len(space.ttls)) == (16, 8)
    ghost = Ghost(space.sizes, space.ttls, max_keys=8_000)
    before = ghost.memory_bytes
    ghost.access_many(*zipf(100_000, 50_000, 3))
    assert ghost.memory_bytes == before < 2_000_000


@pytest.mark.parametrize(("max_keys", "sizes", "ttls"), [(16, 1, 1), (1_000, 5, 4), (4_097, 16, 8), (3_000, 20, 13)])
def test_memory_keeps_to_the_stated_formula(max_keys: int, sizes: int, ttls: int) -> None:
    grid = np.arange(1, sizes + 1) * 1_000, np.arange(1.0, ttls + 1.0)
    bound = max_keys * (172 + 24 * math.ceil(sizes * ttls / 64)) + 64 * sizes * ttls + (1 << 14)
    assert Ghost(*grid, max_keys=max_keys).memory_bytes <= bound
    rotating = Ghost(*grid, max_keys=max_keys, rate=0.5, rotate_every=1.0)
    rotating.access_many(*zipf(1_000, 500, 4))
    assert rotating.memory_bytes <= 2 * bound


def test_keys_with_more_write_times_than_there_is_room_for_cost_the_rate_not_the_bound() -> None:
    random = np.random.default_rng(5)
    sizes, ttls = np.arange(1, 17) * 400, np.geomspace(0.05, 50.0, 8)
    keys = random.integers(0, 60, 30_000).astype(np.uint64)
    columns = keys, np.full(len(keys), 100), np.cumsum(random.exponential(0.02, len(keys)))
    exact, small = Ghost(sizes, ttls, max_keys=4_096), Ghost(sizes, ttls, max_keys=64)
    for ghost in (exact, small):
        ghost.access_many(*columns)
    found, truth = small.take().curve, exact.take().curve
    assert exact.rate == 1.0
    assert small.rate < 1.0
    assert np.all((found.stale_hits >= 0) & (found.hits <= len(keys)))
    assert np.abs(found.hit_ratio - truth.hit_ratio).mean() <= 0.05


def test_decay_keeps_a_share_of_what_was_gathered() -> None:
    columns = zipf(3_000, 300, 6)
    fresh, decayed = Ghost(SIZES, TTLS), Ghost(SIZES, TTLS, decay=0.25)
    hits, stale, requests = np.zeros((4, 3)), np.zeros((4, 3)), 0.0
    for start in (0, 1_000, 2_000):
        for ghost in (fresh, decayed):
            ghost.access_many(*part(columns, start, start + 1_000))
        window, kept = fresh.take(), decayed.take()
        hits, stale = hits * 0.25 + window.curve.hits, stale * 0.25 + window.curve.stale_hits
        requests = requests * 0.25 + window.curve.requests
        assert kept.curve.hits == pytest.approx(hits)
        assert kept.curve.stale_hits == pytest.approx(stale)
        assert kept.curve.requests == requests
        assert kept.entropy == window.entropy
        assert kept.drift == pytest.approx(window.drift, nan_ok=True)


def test_a_new_salt_takes_over_warm() -> None:
    columns = zipf(100_000, 6_000, 7)
    exact, cold = Ghost(SIZES, TTLS[:2], max_keys=1 << 14), Ghost(SIZES, TTLS[:2], max_keys=1 << 14)
    plain = Ghost(SIZES, TTLS[:2], max_keys=1_500, rate=0.25, salt=2)
    rotating = Ghost(SIZES, TTLS[:2], max_keys=1_500, rate=0.25, salt=2, rotate_every=150.0)
    usual, after = [], []
    for start in range(0, 100_000, 1_000):
        window = part(columns, start, start + 1_000)
        for ghost in (exact, plain, rotating):
            ghost.access_many(*window)
        truth, before = exact.take().curve.hit_ratio, rotating.rotations
        usual.append(np.abs(plain.take().curve.hit_ratio - truth)[-1, -1])
        error = np.abs(rotating.take().curve.hit_ratio - truth)[-1, -1]
        if before:
            after.append(error)
    assert rotating.rotations >= 5
    assert max(after) <= 1.5 * max(usual[1:]) <= 0.1
    # What it would be like to begin with nothing in the last window.
    cold.access_many(*window)
    assert np.abs(cold.take().curve.hit_ratio - truth)[-1, -1] > 0.2


def test_a_new_salt_waits_until_what_it_has_not_seen_cannot_be_hit() -> None:
    # The largest size never fills and the longest TTL never passes: a new sample would never know what the old one knows.
    ghost = Ghost(SIZES, TTLS, rate=0.25, rotate_every=10.0)
    columns = zipf(20_000, 2_000, 8)
    for start in range(0, 20_000, 2_000):
        ghost.access_many(*part(columns, start, start + 2_000))
        ghost.take()
    assert ghost.rotations == 0
    # After a flush there is nothing that it has not seen.
    ghost.flush()
    ghost.take()
    assert ghost.rotations == 1


def test_rotation_does_not_depend_on_how_the_requests_are_batched() -> None:
    columns = zipf(8_000, 1_000, 9)
    one, many = (Ghost(SIZES[:3], TTLS[:2], rate=0.25, max_keys=64, rotate_every=20.0) for _ in range(2))
    for start in range(0, 8_000, 2_000):
        many.access_many(*part(columns, start, start + 2_000))
        for key, size, now in zip(*(column.tolist() for column in part(columns, start, start + 2_000)), strict=True):
            one.access(key, size, now)
        assert np.array_equal(one.take().curve.hits, many.take().curve.hits)
    assert one.rotations == many.rotations >= 1
