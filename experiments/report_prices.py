"""The part of the report on prices: where each comes from, and what the verdict becomes when each is halved and doubled."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from envs.objective import Prices
from envs.price_book import PRICES, default_book
from experiments.page import table
from experiments.price_moves import Conclusion, in_words
from experiments.sensitivity import MOVED, Sensitivity
from experiments.verdict import usd

if TYPE_CHECKING:
    from experiments.analysis import Analysis

_TONES = {"treatment better": " good-ink", "control better": " bad-ink"}


def price_table(prices: Prices) -> str:
    """Return the prices that were used, with unit, plausible range and source.

    A price that is not the book's is shown as the experiment's own, with the book's beside it.

    Args:
        prices: The prices that were used.
    """
    book = default_book()
    body = []
    for name in PRICES:
        entry, value = book.entry(name), getattr(prices, name)
        if value == entry.value:
            source = escape(entry.source)
            if entry.url:
                source += f', <a href="{escape(entry.url)}">{escape(entry.url.split("/")[2])}</a>'
            source += f" ({entry.basis}, {entry.date:%Y-%m})"
        else:
            source = f"set for this experiment; the price book has {_plain(entry.value)}"
        mark = "" if entry.low <= value <= entry.high else ' class="bad-ink"'
        body.append(
            f'<tr><th class="row">{escape(MOVED[name])}</th><td{mark}>{_plain(value)}</td><td>{escape(entry.unit)}</td>'
            f"<td>{_plain(entry.low)} to {_plain(entry.high)}</td><td>{source}</td></tr>"
        )
    return table(("", "used", "unit", "somebody would pay", "source"), body)


def moves_table(moves: Sensitivity[Conclusion]) -> str:
    """Return the verdict and the saving under each moved price.

    Args:
        moves: The verdict as it is and under each move.
    """
    lines = ["<tr><th class='row'>as used</th><td></td>" + _cells(moves.base, moves.base) + "</tr>"]
    lines += [
        f"<tr><th class='row'>{escape(MOVED[row.price])}</th><td>× {row.factor:g} = {_plain(row.value)}</td>"
        f"{_cells(row.outcome, moves.base)}</tr>"
        for row in moves.moved
    ]
    heads = ("price", "moved", "verdict", "treatment saves", "difference per 1,000 requests")
    return table(heads, lines, "price-moves")


def price_section(analysis: Analysis) -> str:
    """Return the section: whether the verdict rests on a price, the moves, the sources."""
    return (
        f"<p>{escape(in_words(analysis.moves))}</p><div class='wide'>{moves_table(analysis.moves)}</div>"
        "<p class='hint'>One price is moved at a time; the requests are the same. A policy that knew the other price might have "
        "chosen other knobs: the table says what the measured runs would have cost, not what would have been done.</p>"
        f"<details><summary>The prices and where they come from</summary><div class='wide'>"
        f"{price_table(analysis.experiment.prices)}</div></details>"
    )


def _cells(conclusion: Conclusion, base: Conclusion) -> str:
    gap = conclusion.difference
    tone = _TONES.get(conclusion.verdict, "")
    verdict = escape(conclusion.verdict)
    if conclusion.verdict != base.verdict:
        verdict = f"<strong>{verdict}</strong>"
    saving = f"{100 * conclusion.saving:+.1f}%".replace("-", "−") if math.isfinite(conclusion.saving) else "–"
    shown = _signed(gap.value) if math.isfinite(gap.value) else "–"
    bounds = f' <span class="range">{_signed(gap.low)} to {_signed(gap.high)}</span>' if gap.known else ""
    return f'<td class="{tone.strip()}">{verdict}</td><td>{saving}</td><td>{shown}{bounds}</td>'


def _signed(value: float) -> str:
    return ("−" if value < 0 else "+") + usd(abs(value))


def _plain(value: float) -> str:
    """Return a price without an exponent, to four digits."""
    return np.format_float_positional(value, precision=4, fractional=False, trim="-")
