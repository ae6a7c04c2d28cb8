from __future__ import annotations

import numpy as np
import pytest

from serving.tiers.vector import VectorTier
from tests.serving.entries import CONTEXT, int8, key, tilted, unit

OTHER = b"o" * 32


def test_the_cosine_on_integers_is_that_of_the_floats() -> None:
    tier = VectorTier()
    for cosine in (1.0, 0.99, 0.9, 0.7, 0.3, 0.0):
        tier.add("a", key(round(cosine * 100)), CONTEXT, tilted(1, cosine))
    found = dict(tier.search("a", CONTEXT, int8(unit(1)), k=10))
    assert len(found) == 6
    for cosine in (1.0, 0.99, 0.9, 0.7, 0.3, 0.0):
        assert found[key(round(cosine * 100))] == pytest.approx(cosine, abs=0.01)


def test_nearest_first_and_as_brute_force_finds_it() -> None:
    tier = VectorTier()
    vectors = np.stack([unit(seed) for seed in range(1000)])
    for number, vector in enumerate(vectors):
        tier.add("a", key(number), CONTEXT, int8(vector))
    right = 0
    for number in range(100):
        query = vectors[number] + 0.3 * unit(5000 + number)
        query /= np.linalg.norm(query)
        found = tier.search("a", CONTEXT, int8(query))
        cosines = [cosine for _, cosine in found]
        assert cosines == sorted(cosines, reverse=True)
        right += found[0][0] == key(int(np.argmax(vectors @ query)))
    assert right >= 97


def test_only_the_context_asked_for_is_found() -> None:
    tier = VectorTier()
    tier.add("a", key(1), CONTEXT, int8(unit(1)))
    tier.add("a", key(2), OTHER, int8(unit(1)))
    assert [found for found, _ in tier.search("a", OTHER, int8(unit(1)))] == [key(2)]
    assert {context for _, context, _ in tier.neighbours("a", int8(unit(1)))} == {CONTEXT, OTHER}


def test_a_crowd_of_other_contexts_does_not_hide_the_one_that_fits() -> None:
    tier = VectorTier()
    for number in range(100):
        tier.add("a", key(number), number.to_bytes(32, "big"), int8(unit(1)))
    tier.add("a", key(500), CONTEXT, tilted(1, 0.95))
    assert key(500) not in [found for found, _, _ in tier.neighbours("a", int8(unit(1)))]
    assert key(500) in [found for found, _, _ in tier.near("a", CONTEXT, int8(unit(1)), floor=0.9)]
    assert len(tier.near("a", CONTEXT, int8(unit(1)), floor=0.9999999)) < 200


def test_arms_are_apart() -> None:
    tier = VectorTier()
    tier.add("a", key(1), CONTEXT, int8(unit(1)))
    assert tier.search("b", CONTEXT, int8(unit(1))) == []
    tier.add("b", key(1), CONTEXT, int8(unit(2)))
    assert tier.flush("a") == 1
    assert (tier.count("a"), tier.count("b")) == (0, 1)


def test_a_removed_vector_is_not_found_and_may_come_back() -> None:
    tier = VectorTier()
    for number in range(5):
        tier.add("a", key(number), CONTEXT, int8(unit(number)))
    assert tier.remove("a", key(3)) is True
    assert tier.remove("a", key(3)) is False
    assert tier.remove("b", key(3)) is False
    assert key(3) not in [found for found, _ in tier.search("a", CONTEXT, int8(unit(3)))]
    tier.add("a", key(3), CONTEXT, int8(unit(3)))
    assert tier.search("a", CONTEXT, int8(unit(3)))[0][0] == key(3)


def test_adding_a_key_again_replaces_its_vector() -> None:
    tier = VectorTier()
    for seed in (1, 1, 2):
        tier.add("a", key(1), CONTEXT, int8(unit(seed)))
    assert tier.count("a") == 1
    assert tier.search("a", CONTEXT, int8(unit(2)))[0][1] == pytest.approx(1.0, abs=1e-3)


def test_the_earliest_added_go_beyond_the_limit() -> None:
    tier = VectorTier(max_entries=4)
    for number in range(6):
        tier.add("a", key(number), CONTEXT, int8(unit(number)))
    assert [number for number in range(6) if tier.has("a", key(number))] == [2, 3, 4, 5]
    tier.limit("a", 2)
    tier.add("a", key(6), CONTEXT, int8(unit(6)))
    assert [number for number in range(7) if tier.has("a", key(number))] == [5, 6]
    assert tier.search("a", CONTEXT, int8(unit(6)))[0][0] == key(6)


def test_search_stays_right_under_churn() -> None:
    tier = VectorTier()
    for number in range(1500):
        tier.add("a", key(number), CONTEXT, int8(unit(number)))
        if number >= 300:
            tier.remove("a", key(number - 300))
    found = [tier.search("a", CONTEXT, int8(unit(number)), k=1) for number in range(1200, 1500)]
    assert sum(result[0][0] == key(1200 + number) for number, result in enumerate(found)) >= 297


def test_a_vector_of_another_length_is_refused_and_one_of_zeros_finds_nothing() -> None:
    tier = VectorTier()
    tier.add("a", key(1), CONTEXT, int8(unit(1)))
    with pytest.raises(ValueError, match="expected a vector of 384 int8 bytes, got 3"):
        tier.add("a", key(1), CONTEXT, b"abc")
    with pytest.raises(ValueError, match="expected a vector of 384"):
        tier.search("a", CONTEXT, b"")
    assert tier.search("a", CONTEXT, bytes(384)) == []
