"""The book of default prices: each with its unit, its source, its date and the range of what somebody would pay.

The simulator, the tuner, ``advise`` and the reports count with the same book, so that their figures can be compared. This module
holds no price; ``envs/prices.yaml`` does.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from serving.policy import CacheRules
from serving.settings import Settings

UNITS: Mapping[str, str] = MappingProxyType(
    {
        "input_mtok": "USD per million tokens",
        "output_mtok": "USD per million tokens",
        "redis_gib_hour": "USD per GiB-hour",
        "ram_gib_hour": "USD per GiB-hour",
        "latency_second": "USD per second",
        "stale_answer": "USD per answer",
        "slo_p99": "seconds",
        "slo_second": "USD per 1,000 requests and second",
        "change_step": "USD per 1,000 requests and grid step",
    }
)
"""The entries of a book and the unit that each must state: a price in another unit would be wrong without a word."""

Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class PriceBookError(ValueError):
    """A price book that cannot be used; the text names the file, the entry and what was expected."""


class PriceEntry(Settings):
    """One price.

    Attributes:
        value: The price.
        unit: What it is in.
        low: Least that somebody would pay or accept.
        high: Most that somebody would pay or accept.
        basis: Whether it is a list price, derived from a study, or a judgement.
        source: Where it comes from.
        url: Where to look it up; None for a judgement.
        date: When the source was true.
        checked: Whether the source itself was read, or what else says the same; "" where nobody checked.
        note: What else to know.
    """

    value: Amount
    unit: str
    low: Amount
    high: Amount
    basis: Literal["list price", "study", "judgement"]
    source: Annotated[str, Field(min_length=1)]
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    date: datetime.date
    checked: str = ""
    note: str = ""

    @model_validator(mode="after")
    def _within_its_range(self) -> PriceEntry:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"expected low <= value <= high, got {self.low:g}, {self.value:g}, {self.high:g}")
        if self.url is None and self.basis != "judgement":
            raise ValueError(f"expected a url for a {self.basis}; only a judgement needs none")
        return self


class Entries(Settings):
    """The prices of a book, one entry each; see :data:`UNITS`."""

    input_mtok: PriceEntry
    output_mtok: PriceEntry
    redis_gib_hour: PriceEntry
    ram_gib_hour: PriceEntry
    latency_second: PriceEntry
    stale_answer: PriceEntry
    slo_p99: PriceEntry
    slo_second: PriceEntry
    change_step: PriceEntry

    @model_validator(mode="after")
    def _in_their_units(self) -> Entries:
        for name, unit in UNITS.items():
            given = getattr(self, name).unit
            if given != unit:
                raise ValueError(f"{name}: expected unit {unit!r}, got {given!r}")
        return self


class PriceBook(Settings):
    """A book of prices.

    Attributes:
        currency: US dollars.
        entries: The prices.
    """

    currency: Literal["USD"]
    entries: Entries

    def entry(self, price: str) -> PriceEntry:
        """Return the entry behind a field of :class:`envs.objective.Prices`.

        The price of memory is made of two entries. The store holds every byte of the budget, and the memory tier holds
        ``l1_share`` (its default) of them once more: ``redis_gib_hour + l1_share x ram_gib_hour``.

        Raises:
            KeyError: If the book has no such price (``time_scale`` is none).
        """
        if price != "memory_gib_hour":
            if price not in UNITS or price.endswith("_gib_hour"):
                raise KeyError(price)
            found: PriceEntry = getattr(self.entries, price)
            return found
        store, memory, share = self.entries.redis_gib_hour, self.entries.ram_gib_hour, CacheRules().l1_share
        return PriceEntry(
            value=store.value + share * memory.value,
            unit=store.unit,
            low=store.low + share * memory.low,
            high=store.high + share * memory.high,
            basis=store.basis,
            source=f"{store.source} ({store.value:g}), and {share:g} times {memory.source} ({memory.value:g})",
            url=store.url,
            date=min(store.date, memory.date),
            checked=" ".join(filter(None, (store.checked, memory.checked))),
            note=store.note,
        )

    def values(self) -> dict[str, float]:
        """Return the prices as :class:`envs.objective.Prices` takes them: by name, without ``time_scale``."""
        return {name: self.entry(name).value for name in PRICES}

    def unusual(self, values: Mapping[str, float]) -> tuple[str, ...]:
        """Return a sentence for each price that nobody would pay by this book.

        Args:
            values: Prices by name; names that the book does not have are left out.
        """
        found = []
        for name in PRICES:
            if name in values:
                entry, value = self.entry(name), values[name]
                if not entry.low <= value <= entry.high:
                    found.append(
                        f"{name} is {value:g} {entry.unit}, outside what somebody would pay by the price book "
                        f"({entry.low:g} to {entry.high:g}): nothing should be concluded from it."
                    )
        return tuple(found)


PRICES = tuple(name if name != "redis_gib_hour" else "memory_gib_hour" for name in UNITS if name != "ram_gib_hour")
"""The prices that a book gives, by their names in :class:`envs.objective.Prices`."""


def load_price_book(path: Path | str) -> PriceBook:
    """Read a price book.

    Args:
        path: A YAML file with the entries of ``envs/prices.yaml``.

    Raises:
        PriceBookError: If the file cannot be read, is not YAML, or an entry is missing, unknown or not as expected.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PriceBookError(f"price book {path}: {error}; expected a readable YAML file") from None
    return _parse(text, str(path))


@cache
def default_book() -> PriceBook:
    """Return the book that comes with the package."""
    place = files("envs").joinpath("prices.yaml")
    return _parse(place.read_text("utf-8"), str(place))


def _parse(text: str, where: str) -> PriceBook:
    try:
        tree: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise PriceBookError(f"price book {where}{line}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(tree, dict):
        raise PriceBookError(f"price book {where}: expected a mapping with currency and entries, got {type(tree).__name__}")
    try:
        return PriceBook.model_validate(tree)
    except ValidationError as error:
        raise PriceBookError("\n".join(f"price book {where}: {line}" for line in _explain(error))) from None


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"]) or "the book"
        if item["type"] == "extra_forbidden":
            known = (
                UNITS
                if item["loc"][:-1] == ("entries",)
                else PriceEntry.model_fields
                if len(item["loc"]) > 2
                else PriceBook.model_fields
            )
            lines.append(f"{place}: unknown; expected one of {', '.join(known)}")
        elif item["type"] == "missing":
            lines.append(
                f"{place}: missing; a book has every entry of the package's own, envs/prices.yaml: copy it and change values"
            )
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{place}: {message[0].lower() + message[1:]}")
    return lines
