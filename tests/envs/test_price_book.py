"""Every default price has a source, a date and a range; another book and single values can take its place."""

from __future__ import annotations

import datetime
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from envs.objective import Prices
from envs.price_book import PRICES, UNITS, PriceBookError, default_book, load_price_book
from envs.settings import EnvsSettings

BOOK = Path(__file__).parents[2] / "envs" / "prices.yaml"


def write(tmp_path: Path, change: Any = None) -> Path:
    """A copy of the package's book, changed."""
    tree = yaml.safe_load(BOOK.read_text("utf-8"))
    if change is not None:
        change(tree)
    path = tmp_path / "prices.yaml"
    path.write_text(yaml.safe_dump(tree), "utf-8")
    return path


def test_the_defaults_of_the_objective_are_the_books() -> None:
    prices, book = Prices(), default_book()
    assert {*PRICES, "time_scale"} == {item.name for item in fields(Prices)}
    assert {name: getattr(prices, name) for name in PRICES} == book.values()
    assert prices.time_scale == 1.0


def test_memory_is_the_store_and_the_share_that_is_held_in_memory_once_more() -> None:
    entries = default_book().entries
    assert default_book().values()["memory_gib_hour"] == pytest.approx(
        entries.redis_gib_hour.value + 0.25 * entries.ram_gib_hour.value
    )


@pytest.mark.parametrize("name", UNITS)
def test_every_price_has_a_source_and_a_range_that_holds_its_half_and_its_double(name: str) -> None:
    entry = getattr(default_book().entries, name)
    assert entry.low <= entry.value / 2
    assert entry.value * 2 <= entry.high
    assert entry.unit == UNITS[name]
    assert len(entry.source) > 20
    assert datetime.date(2019, 1, 1) <= entry.date <= datetime.date(2027, 1, 1)
    assert entry.url is not None or entry.basis == "judgement"
    assert entry.checked


def test_a_source_that_was_not_read_does_not_pass_for_one_that_was() -> None:
    book = default_book()
    assert "not opened" in book.entries.input_mtok.checked
    assert book.entry("memory_gib_hour").checked == f"{book.entries.redis_gib_hour.checked} {book.entries.ram_gib_hour.checked}"


def test_a_price_that_nobody_would_pay_is_named() -> None:
    book = default_book()
    assert book.unusual(book.values()) == ()
    (sentence,) = book.unusual({**book.values(), "memory_gib_hour": 50.0, "time_scale": 1e6})
    assert sentence.startswith("memory_gib_hour is 50 USD per GiB-hour, outside what somebody would pay")


def test_a_book_that_is_named_comes_before_the_defaults_and_single_values_before_the_book(tmp_path: Path) -> None:
    def dearer(tree: dict[str, Any]) -> None:
        tree["entries"]["input_mtok"]["value"] = 3.0
        tree["entries"]["output_mtok"]["value"] = 15.0

    path = write(tmp_path, dearer)
    settings = EnvsSettings.model_validate({"prices_file": str(path), "prices": {"output_mtok": 12.0, "time_scale": 5.0}})
    prices = settings.prices.to_prices()
    assert (prices.input_mtok, prices.output_mtok, prices.time_scale) == (3.0, 12.0, 5.0)
    assert prices.latency_second == Prices().latency_second
    assert settings.to_config().prices == prices
    assert EnvsSettings.model_validate(settings.model_dump()) == settings


def test_a_copy_of_the_book_is_the_book(tmp_path: Path) -> None:
    assert load_price_book(write(tmp_path)) == default_book()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree["entries"].pop("ram_gib_hour"), "entries.ram_gib_hour: missing"),
        (lambda tree: tree["entries"].update(gpu_hour=1), "entries.gpu_hour: unknown; expected one of input_mtok"),
        (lambda tree: tree["entries"]["input_mtok"].update(price=1), "entries.input_mtok.price: unknown; expected one of value"),
        (lambda tree: tree.update(prices={}), "prices: unknown; expected one of currency, entries"),
        (lambda tree: tree["entries"]["input_mtok"].update(value=50.0), "entries.input_mtok: expected low <= value <= high"),
        (lambda tree: tree["entries"]["input_mtok"].update(value=-1), "entries.input_mtok.value: input should be greater"),
        (lambda tree: tree["entries"]["input_mtok"].update(value="cheap"), "entries.input_mtok.value: input should be a valid"),
        (lambda tree: tree["entries"]["input_mtok"].update(unit="USD per token"), "input_mtok: expected unit 'USD per million"),
        (lambda tree: tree["entries"]["input_mtok"].update(url=None), "entries.input_mtok: expected a url for a list price"),
        (lambda tree: tree["entries"]["input_mtok"].update(date="last year"), "entries.input_mtok.date"),
        (lambda tree: tree.update(currency="EUR"), "currency: input should be 'USD'"),
    ],
)
def test_a_book_with_a_fault_is_refused_with_the_place(tmp_path: Path, change: Any, words: str) -> None:
    path = write(tmp_path, change)
    with pytest.raises(PriceBookError) as caught:
        load_price_book(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "expected a readable YAML file"), ("a: [", "line 1: not YAML"), ("- 1", "expected a mapping"), ("", "got NoneType")],
)
def test_what_is_no_book_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "book.yaml"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(PriceBookError, match=words):
        load_price_book(path)


def test_a_fault_in_the_named_book_is_told_by_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"price book .*none\.yaml.*expected a readable YAML file"):
        EnvsSettings.model_validate({"prices_file": str(tmp_path / "none.yaml")})


def test_the_page_on_prices_has_the_books_values() -> None:
    rows = {
        cells[0].strip("` "): [cell.strip() for cell in cells[1:]]
        for line in (BOOK.parents[1] / "docs" / "prices.md").read_text("utf-8").splitlines()
        if line.startswith("| `") and (cells := line.strip("|").split("|"))
    }
    assert set(rows) == set(UNITS)
    for name, (value, unit, bounds, basis) in rows.items():
        entry = getattr(default_book().entries, name)
        assert (float(value), unit, basis) == (entry.value, entry.unit, entry.basis)
        assert [float(bound) for bound in bounds.split(" to ")] == [entry.low, entry.high]
    assert f"is {default_book().values()['memory_gib_hour']:.5f}" in (BOOK.parents[1] / "docs" / "prices.md").read_text("utf-8")
