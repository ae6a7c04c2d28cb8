"""What our pages share: the shell with its style, its verdict and the charts' script; tiles and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import orjson
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs


def fill_page(
    page: str,
    sections: Mapping[str, str],
    *,
    title: str,
    subtitle: str,
    note: str,
    tone: str,
    verdict: str,
    reason: str,
    basis: str,
    tiles: Iterable[str],
    warnings: Sequence[str],
    figures: Mapping[str, Mapping[str, Any]],
) -> str:
    """Lay out a page. What is text here is escaped here.

    Args:
        page: Which one: ``experiments/<page>.html`` has its sections.
        sections: What is filled into them, by name, as HTML.
        title: Its heading.
        subtitle: What it is about, in a sentence.
        note: What a reader has to know of the workload, or nothing.
        tone: ``good``, ``bad`` or ``even``: the verdict's colour.
        verdict: The verdict, in few words.
        reason: Why.
        basis: What it rests on.
        tiles: The figures on top (:func:`tile`), as HTML.
        warnings: What else a reader has to know.
        figures: The charts (:func:`plain_figure`); each is drawn in the element ``chart-<name>``.

    Returns:
        A self-contained HTML page: no request leaves it.
    """
    return _template("page").substitute(
        page=page,
        title=escape(title),
        subtitle=escape(subtitle) + (f"<br>{escape(note)}" if note else ""),
        tone=tone,
        verdict=escape(verdict),
        reason=escape(reason).replace("−", "−&#8288;"),  # no line break between a sign and its number
        basis=escape(basis),
        tiles="".join(tiles),
        warnings=_warnings(warnings),
        sections=_template(page).substitute(sections),
        plotly=_plotly(),
        figures=orjson.dumps(figures).decode().replace("<", "\\u003c"),
    )


def plain_figure(figure: go.Figure) -> dict[str, Any]:
    """Return a chart as what JSON is made of."""
    plain: dict[str, Any] = orjson.loads(figure.to_json())
    return plain


def tile(name: str, value: str, under: str, ink: str = "") -> str:
    """Return a figure on top of a page.

    Args:
        name: What it is.
        value: The figure.
        under: Its bounds, or what else belongs to it.
        ink: ``good-ink`` or ``bad-ink``, its colour; the usual one if empty.
    """
    return (
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="{f"value {ink}".strip()}">{escape(value)}</div>'
        f'<div class="range">{escape(under)}</div></div>'
    )


def table(heads: Iterable[str], rows: Iterable[str], identifier: str = "") -> str:
    """Return a table.

    Args:
        heads: What is in each cell of its head, as HTML.
        rows: Its rows, from ``<tr>`` to ``</tr>``.
        identifier: The element's id, if it needs one.
    """
    mark = f' id="{identifier}"' if identifier else ""
    cells = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table{mark}><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


@cache
def _template(name: str) -> Template:
    return Template(files("experiments").joinpath(f"{name}.html").read_text("utf-8"))


@cache
def _plotly() -> str:
    # The library's text is put between script tags as it is; a closing tag within it would end the element early.
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _warnings(items: Sequence[str]) -> str:
    if not items:
        return ""
    return '<ul class="warnings">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
