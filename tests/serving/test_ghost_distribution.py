"""Entropy and drift of the window's keys."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving.ghost import Ghost

SIZES = np.array([1_000, 1 << 30])
TTLS = np.array([10.0, 1e6])


def feed(ghost: Ghost, keys: np.ndarray) -> None:
    ghost.access_many(keys.astype(np.uint64), np.full(len(keys), 100), np.zeros(len(keys)))


def test_entropy_is_shannons_with_the_miller_madow_correction() -> None:
    ghost = Ghost(SIZES, TTLS)
    feed(ghost, np.repeat(np.arange(8), [64, 32, 16, 8, 4, 2, 1, 1]))
    shares = np.array([64, 32, 16, 8, 4, 2, 1, 1]) / 128
    assert ghost.take().entropy == pytest.approx(-np.sum(shares * np.log2(shares)) + 7 / (2 * math.log(2) * 128))


def test_entropy_of_a_single_key_is_zero() -> None:
    ghost = Ghost(SIZES, TTLS)
    feed(ghost, np.zeros(50))
    assert ghost.take().entropy == 0.0


def test_entropy_from_a_sample_is_close() -> None:
    random = np.random.default_rng(0)
    weights = np.arange(1, 20_001) ** -0.7
    keys = random.choice(20_000, 50_000, p=weights / weights.sum())
    exact, sampled = Ghost(SIZES, TTLS, max_keys=50_000), Ghost(SIZES, TTLS, max_keys=2_048)
    feed(exact, keys)
    feed(sampled, keys)
    assert sampled.rate < 0.2
    assert sampled.take().entropy == pytest.approx(exact.take().entropy, abs=0.3)


def test_drift_is_zero_between_equal_windows_and_one_between_disjoint_ones() -> None:
    ghost = Ghost(SIZES, TTLS)
    drifts = []
    for keys in ([1, 1, 2, 3], [1, 1, 2, 3], [7, 8, 9, 9]):
        feed(ghost, np.array(keys))
        drifts.append(ghost.take().drift)
    assert math.isnan(drifts[0])
    assert drifts[1:] == pytest.approx([0.0, 1.0], abs=1e-7)


def test_drift_is_the_jensen_shannon_distance() -> None:
    ghost = Ghost(SIZES, TTLS)
    feed(ghost, np.array([1, 1, 2]))
    ghost.take()
    feed(ghost, np.array([1, 3]))
    p, q = np.array([1 / 2, 0, 1 / 2]), np.array([2 / 3, 1 / 3, 0])
    middle = (p + q) / 2
    divergence = sum(0.5 * x * math.log2(x / m) for side in (p, q) for x, m in zip(side, middle, strict=True) if x > 0)
    assert ghost.take().drift == pytest.approx(math.sqrt(divergence))


def test_drift_across_an_empty_window_is_missing() -> None:
    ghost = Ghost(SIZES, TTLS)
    feed(ghost, np.array([1]))
    ghost.take()
    assert math.isnan(ghost.take().drift)
    feed(ghost, np.array([1]))
    assert math.isnan(ghost.take().drift)


def test_a_flush_keeps_the_windows_counts() -> None:
    ghost = Ghost(SIZES, TTLS)
    feed(ghost, np.array([1, 2]))
    ghost.flush()
    assert ghost.take().entropy > 1.0
