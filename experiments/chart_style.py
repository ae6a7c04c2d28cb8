"""What the charts of our pages share: how they are laid out, and a cost drawn by its terms.

Colours of text and grid come from the page, so that light and dark both work.
"""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from experiments.verdict import usd

TERMS = {
    "tokens": "#2f80ed",
    "refresh": "#56b4e9",
    "latency": "#27a55f",
    "memory": "#9b6dd6",
    "staleness": "#e5a00d",
    "slo": "#e5484d",
    "change": "#8492a6",
}
"""The terms of a cost, and their colours."""

TERM_NAMES = {"slo": "P99 above objective", "change": "knob changes"}
"""Terms that have another name on a page."""


def lay_out(figure: go.Figure, height: int) -> None:
    """Set a chart's frame, legend, font and axes.

    Args:
        figure: The chart.
        height: Pixels.
    """
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 18, "t": 26, "b": 44},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        font={"family": "system-ui, sans-serif", "size": 12.5},
    )
    style_axes(figure)


def style_axes(figure: go.Figure) -> None:
    """Leave out the line at zero, and set the titles' size and place; a title that is set later has its own."""
    figure.update_xaxes(zeroline=False, automargin=True, title_font_size=12.5, title_standoff=8)
    figure.update_yaxes(zeroline=False, automargin=True, title_font_size=12.5, title_standoff=10)


def cost_by_term(costs: Mapping[str, Mapping[str, float]], *, height: int, title: str) -> go.Figure:
    """Draw costs as bars made of their terms; a term that none of them has is left out.

    Args:
        costs: USD per 1,000 requests by term, by the bar's name as HTML, from the lowest bar up.
        height: Pixels.
        title: The axis' title.
    """
    figure = go.Figure()
    for term, colour in TERMS.items():
        amounts = [cost[term] for cost in costs.values()]
        if any(amount > 0 for amount in amounts):
            name = TERM_NAMES.get(term, term)
            figure.add_bar(
                y=list(costs),
                x=amounts,
                name=name,
                orientation="h",
                marker={"color": colour},
                customdata=[usd(amount) for amount in amounts],
                hovertemplate=f"{name}: %{{customdata}}<extra></extra>",
            )
    lay_out(figure, height)
    figure.update_layout(barmode="stack", hovermode="closest", bargap=0.35)
    figure.update_xaxes(title=title, rangemode="tozero")
    return figure
