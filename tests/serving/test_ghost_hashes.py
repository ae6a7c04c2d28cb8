"""The compiled hashes are those of serving.keys: the sample is well mixed, and the jitter is the same wherever it is asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import ghost_kernel
from serving.keys import mix64, mix64_array, ttl_jitter

words = st.integers(0, 2**64 - 1)


@given(words)
def test_compiled_mix64_equals_the_plain_one(value: int) -> None:
    assert int(ghost_kernel.mix64(value)) == mix64(value)
    assert int(mix64_array(np.array([value], np.uint64))[0]) == mix64(value)


@given(words, st.sampled_from([0.0, 0.1, 1.0]))
def test_compiled_jitter_equals_the_plain_one(key: int, spread: float) -> None:
    unit = ghost_kernel.jitter_units(np.array([key], np.uint64))[0]
    assert 1.0 - spread * unit == ttl_jitter(key, spread)


@pytest.mark.parametrize("keys", [range(1 << 14), range(0, 1 << 24, 1 << 10), range(2**64 - (1 << 14), 2**64)])
def test_a_power_of_two_share_of_regular_keys_is_sampled(keys: range) -> None:
    mixed = mix64_array(np.array(keys, np.uint64))
    for bits in (1, 3, 5):
        share = float(np.mean(mixed >> np.uint64(64 - bits) == 0))
        assert share == pytest.approx(2.0**-bits, rel=0.15)


@pytest.mark.parametrize("salt", [0, 1, 2**63])
@pytest.mark.parametrize("keys", [range(1 << 14), range(0, 1 << 26, 1 << 12), range(2**64 - (1 << 14), 2**64)])
def test_salted_hashes_of_regular_keys_are_uniform(keys: range, salt: int) -> None:
    mixed = mix64_array(np.array(keys, np.uint64) ^ np.uint64(mix64(salt)))
    for low in (0, 29, 58):
        counts = np.bincount((mixed >> np.uint64(low)).astype(np.int64) & 63, minlength=64)
        statistic = float(((counts - len(keys) / 64) ** 2 / (len(keys) / 64)).sum())
        # Chi-squared with 63 degrees of freedom: 120 is exceeded once in 50,000 times.
        assert statistic < 120.0


def test_two_salts_choose_independent_samples() -> None:
    keys = np.arange(1 << 16, dtype=np.uint64)
    first, second = (mix64_array(keys ^ np.uint64(mix64(salt))) >> np.uint64(62) == 0 for salt in (0, 1))
    assert float(np.mean(first & second)) == pytest.approx(1 / 16, rel=0.1)
