"""Which node owns a key."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.neighbours.rendezvous import owner
from tests.serving.arenas import key

names = st.lists(st.text("abcdefgh0123456789.:", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)


@given(names, st.binary(min_size=32, max_size=32), st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_known_does_not_matter(nodes: list[str], name: bytes, order: random.Random) -> None:
    shuffled = list(nodes)
    order.shuffle(shuffled)
    assert owner(name, nodes) == owner(name, shuffled)


@settings(max_examples=30)
@given(names, st.text("xyz", min_size=1, max_size=5))
def test_a_node_that_comes_or_goes_moves_its_own_keys_only(nodes: list[str], other: str) -> None:
    for number in range(100):
        with_it, without = owner(key(number), [*nodes, other]), owner(key(number), nodes)
        assert with_it in (without, other)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_keys_are_shared_out_evenly(count: int) -> None:
    nodes = [f"10.0.0.{number}:7000" for number in range(count)]
    owned = Counter(owner(key(number), nodes) for number in range(4000))
    expected = 4000 / count
    # Five standard deviations of a binomial distribution.
    assert all(abs(owned[node] - expected) < 5 * (expected * (1 - 1 / count)) ** 0.5 for node in nodes)


def test_a_key_has_the_same_owner_in_every_process_and_release() -> None:
    nodes = ["a:1", "b:1", "c:1"]
    assert [owner(key(number), nodes) for number in range(8)] == ["b:1", "b:1", "c:1", "c:1", "b:1", "c:1", "c:1", "b:1"]


def test_without_nodes_there_is_no_owner() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        owner(key(1), [])
