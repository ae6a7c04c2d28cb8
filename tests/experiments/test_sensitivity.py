"""A conclusion is drawn again under each halved and doubled price, and what turns it round is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.objective import Prices
from experiments.sensitivity import MOVED, sensitivity


def cheaper(prices: Prices) -> tuple[str, float]:
    """Holding 2 GiB for an hour, or paying for a million prompt tokens."""
    hold, ask = 2 * prices.memory_gib_hour, prices.input_mtok
    return ("hold" if hold < ask else "ask", ask - hold)


def test_every_price_is_halved_and_doubled_alone() -> None:
    prices = Prices(input_mtok=1.0, memory_gib_hour=0.3)
    seen: list[Prices] = []
    found = sensitivity(lambda moved: seen.append(moved) or moved, prices)  # type: ignore[func-returns-value]
    assert found.base == prices
    assert [(row.price, row.factor) for row in found.moved] == [(name, factor) for name in MOVED for factor in (0.5, 2.0)]
    for row in found.moved:
        assert row.outcome == replace(prices, **{row.price: row.value})
        assert row.value == row.factor * getattr(prices, row.price)
    assert len(seen) == 1 + len(found.moved)


def test_the_moves_that_turn_a_conclusion_round_are_named() -> None:
    found = sensitivity(cheaper, Prices(input_mtok=1.0, memory_gib_hour=0.3))
    assert found.base[0] == "hold"
    assert [(row.price, row.factor) for row in found.changed(lambda outcome: outcome[0])] == [
        ("input_mtok", 0.5),
        ("memory_gib_hour", 2.0),
    ]
    assert found.changed(lambda outcome: outcome[0])[1].words == "memory doubled to 0.6"
    low, high = found.extremes(lambda outcome: outcome[1])
    assert (low, high) == pytest.approx((-0.2, 1.4))


def test_the_table_begins_with_the_conclusion_as_it_is() -> None:
    rows = sensitivity(cheaper, Prices(input_mtok=1.0, memory_gib_hour=0.3), (3.0,), names=["memory_gib_hour"]).to_rows(
        lambda outcome: {"do": outcome[0]}
    )
    assert rows == [
        {"price": None, "factor": 1.0, "value": None, "do": "hold"},
        {"price": "memory_gib_hour", "factor": 3.0, "value": pytest.approx(0.9), "do": "ask"},
    ]


def test_a_price_of_nothing_is_not_moved() -> None:
    found = sensitivity(cheaper, Prices(stale_answer=0.0))
    assert not [row for row in found.moved if row.price == "stale_answer"]


def test_numbers_that_nobody_knows_are_left_out_of_the_extremes() -> None:
    assert all(math.isnan(value) for value in sensitivity(cheaper, Prices()).extremes(lambda outcome: math.nan))


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0))
def test_nothing_changes_where_prices_do_not_matter(input_mtok: float, memory: float) -> None:
    found = sensitivity(lambda prices: prices.time_scale, Prices(input_mtok=input_mtok, memory_gib_hour=memory))
    assert found.changed() == ()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"factors": (0.0,)}, "factors: expected finite numbers > 0 other than 1, got 0.0"),
        ({"factors": (1.0,)}, "factors"),
        ({"factors": (math.inf,)}, "factors"),
        ({"names": ["time_scale"]}, "no price is called 'time_scale'"),
    ],
)
def test_moves_that_are_none_are_refused(how: dict[str, tuple[float, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sensitivity(cheaper, Prices(), **how)  # type: ignore[arg-type]
