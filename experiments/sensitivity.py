"""How a conclusion moves when prices do: the same decision again with each price halved and doubled. Pure.

A recommendation that turns round when one price is halved rests on that price. Whoever reads it has to know, since prices are
list prices of one day and two of them (a second of waiting, a stale answer) are judgements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from envs.objective import Prices

Outcome = TypeVar("Outcome")

HALVED_AND_DOUBLED = (0.5, 2.0)

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "input_mtok": "prompt tokens",
        "output_mtok": "completion tokens",
        "memory_gib_hour": "memory",
        "latency_second": "a second of waiting",
        "stale_answer": "a stale answer",
        "slo_p99": "the objective on P99",
        "slo_second": "a second above the objective",
        "change_step": "a step of change",
    }
)
"""The prices that are moved, with the words for them. ``time_scale`` is no price: it says how fast the run's clock went."""


@dataclass(frozen=True, slots=True)
class Moved(Generic[Outcome]):
    """The conclusion under one moved price.

    Attributes:
        price: Field of :class:`envs.objective.Prices` that was moved.
        factor: What it was multiplied by.
        value: What it then was, in the price's own unit.
        outcome: The conclusion.
    """

    price: str
    factor: float
    value: float
    outcome: Outcome

    @property
    def words(self) -> str:
        """The move in words: ``memory doubled to 0.17``."""
        how = {0.5: "halved", 2.0: "doubled"}.get(self.factor, f"times {self.factor:g}")
        return f"{MOVED.get(self.price, self.price)} {how} to {self.value:g}"


@dataclass(frozen=True, slots=True)
class Sensitivity(Generic[Outcome]):
    """A conclusion, and what becomes of it under each moved price.

    Attributes:
        base: The conclusion under the prices as given.
        moved: One row for each price and factor, in the order of ``MOVED`` and of the factors.
    """

    base: Outcome
    moved: tuple[Moved[Outcome], ...]

    def changed(self, of: Callable[[Outcome], Any] = lambda outcome: outcome) -> tuple[Moved[Outcome], ...]:
        """Return the moves under which the conclusion is another one.

        Args:
            of: The part of a conclusion that counts, compared by ``==``: the recommended knobs, the verdict.
        """
        base = of(self.base)
        return tuple(row for row in self.moved if of(row.outcome) != base)

    def extremes(self, of: Callable[[Outcome], float]) -> tuple[float, float]:
        """Return the least and the greatest of a number over all moves and the base; NaN where no finite number is known.

        Args:
            of: The number: the saving, the difference in cost.
        """
        known = [value for value in (of(self.base), *(of(row.outcome) for row in self.moved)) if math.isfinite(value)]
        return (min(known), max(known)) if known else (math.nan, math.nan)

    def to_rows(self, columns: Callable[[Outcome], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the table for scripts: the base first (``price`` None, ``factor`` 1), then a row for each move.

        Args:
            columns: What to show of a conclusion, JSON-ready.
        """
        base: dict[str, Any] = {"price": None, "factor": 1.0, "value": None, **columns(self.base)}
        return [
            base,
            *({"price": row.price, "factor": row.factor, "value": row.value, **columns(row.outcome)} for row in self.moved),
        ]


def sensitivity(
    decide: Callable[[Prices], Outcome],
    prices: Prices,
    factors: Sequence[float] = HALVED_AND_DOUBLED,
    *,
    names: Sequence[str] = tuple(MOVED),
) -> Sensitivity[Outcome]:
    """Draw a conclusion again with each price moved, one at a time.

    Args:
        decide: Draws the conclusion under given prices; called once for the base and once for each move.
        prices: The prices as given. One that is 0 is not moved: no factor moves it.
        factors: What each price is multiplied by, > 0 and not 1.
        names: The prices to move; fields of :class:`Prices` but ``time_scale``.

    Returns:
        The conclusion and its moves.

    Raises:
        ValueError: If a factor or a name is none.
    """
    for factor in factors:
        if not (math.isfinite(factor) and factor > 0 and factor != 1):
            raise ValueError(f"sensitivity: factors: expected finite numbers > 0 other than 1, got {factor!r}")
    unknown = [name for name in names if name not in MOVED]
    if unknown:
        raise ValueError(f"sensitivity: names: no price is called {unknown[0]!r}; prices are {', '.join(MOVED)}")
    moved = []
    for name in names:
        price = getattr(prices, name)
        if price > 0:
            for factor in factors:
                value = price * factor
                moved.append(Moved(name, factor, value, decide(replace(prices, **{name: value}))))
    return Sensitivity(decide(prices), tuple(moved))
