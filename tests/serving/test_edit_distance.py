from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.meaning.edit import MAX_CHARACTERS, edit_distance, edit_ratio, within

TEXT = st.text(alphabet="abc é汉😀", max_size=14)


def by_table(a: str, b: str) -> int:
    """Levenshtein's distance, cell by cell (Wagner and Fischer)."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        above, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (left != right)))
    return row[-1]


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT, st.integers(0, 15))
def test_the_distance_is_that_of_the_table_and_stops_at_the_bound(a: str, b: str, limit: int) -> None:
    expected = by_table(a, b)
    assert edit_distance(a, b) == edit_distance(b, a) == expected
    assert edit_distance(a, b, limit) == min(expected, limit + 1)


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT, st.floats(0, 1))
def test_a_text_is_within_a_ratio_if_its_distance_is(a: str, b: str, ratio: float) -> None:
    assert within(a, b, ratio) == (edit_ratio(a, b) <= ratio + 1e-9)
    assert within(a, a, 0.0)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("turn it on", "turn it off", 2),
        ("从北京到上海", "从上海到北京", 4),
    ],
)
def test_known_distances(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == distance


def test_texts_of_two_thousand_characters_are_compared_exactly() -> None:
    draw = random.Random(5)
    a = "".join(draw.choices("abcdefgh ", k=MAX_CHARACTERS))
    changed = list(a)
    for place in range(0, MAX_CHARACTERS, 20):
        changed[place] = "z"
    assert edit_distance(a, "".join(changed)) == 100
    assert within(a, "".join(changed), 0.05)
    assert not within(a, "".join(changed), 0.049)


def test_what_is_too_long_to_look_at_is_within_only_if_it_is_the_same() -> None:
    long = "x" * 1_000_000
    assert within(long, "x" * 1_000_000, 0.15)
    assert not within(long, long + "y", 0.15)


def test_a_ratio_of_exactly_the_bound_is_within() -> None:
    assert within("a" * 17 + "bcd", "a" * 17 + "xyz", 0.15)
    assert not within("a" * 16 + "bcde", "a" * 16 + "wxyz", 0.15)
