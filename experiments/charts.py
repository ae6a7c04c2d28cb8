"""The report's charts, as Plotly figures. Colours of text and grid come from the page, so that light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.analysis import Analysis
from experiments.chart_style import TERMS, cost_by_term, lay_out, style_axes
from experiments.measure import ArmFigures
from experiments.records import DecisionRecord
from experiments.report_text import size_unit
from experiments.stats import Interval
from experiments.timeline import KnobTimeline
from experiments.verdict import seconds

CONTROL, TREATMENT = "#8492a6", "#2f80ed"
VERDICTS = {"apply": "#27a55f", "limit": "#e5a00d", "hold": "#e5484d", "keep": "#9aa5b1", "observe": "#c0c8d0"}


@dataclass(frozen=True, slots=True)
class Clock:
    """Maps seconds since the epoch to the charts' axis."""

    start: float
    unit: float
    name: str

    @classmethod
    def over(cls, start: float, end: float) -> Clock:
        """Choose the unit for a period."""
        length = end - start
        for unit, name, longest in ((1.0, "seconds", 300.0), (60.0, "minutes", 3 * 3600.0), (3600.0, "hours", 96 * 3600.0)):
            if length <= longest:
                return cls(start, unit, name)
        return cls(start, 86_400.0, "days")

    def __call__(self, when: float) -> float:
        """Return a time on the axis."""
        return (when - self.start) / self.unit


def charts(analysis: Analysis) -> dict[str, go.Figure]:
    """Return the figures by the name of their place in the page."""
    clock = Clock.over(analysis.start, analysis.end)
    objective = analysis.experiment.prices.slo_p99
    figures = {
        "hit-ratio": _over_time(analysis, clock, lambda arm: arm.hit_ratio, "hit ratio", percent=True),
        "p99": _over_time(analysis, clock, lambda arm: arm.p99, "P99, seconds", line=objective),
        "cost": _over_time(analysis, clock, lambda arm: arm.cost, "USD per 1,000 requests"),
        "terms": _terms(analysis),
        "knobs": _knobs(analysis, clock),
    }
    for figure in figures.values():
        style_axes(figure)
    return figures


def _colour(analysis: Analysis, arm: str) -> str:
    return CONTROL if arm == analysis.experiment.control else TREATMENT


def _rgba(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _runs(windows: Sequence[ArmFigures], pick: Callable[[ArmFigures], Interval]) -> Iterator[list[ArmFigures]]:
    """Yield stretches of adjoining windows whose intervals are known."""
    run: list[ArmFigures] = []
    for window in windows:
        if pick(window).known:
            run.append(window)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _over_time(
    analysis: Analysis,
    clock: Clock,
    pick: Callable[[ArmFigures], Interval],
    title: str,
    *,
    percent: bool = False,
    line: float | None = None,
) -> go.Figure:
    figure = go.Figure()
    top = 0.0
    for arm in analysis.experiment.arms:
        colour = _colour(analysis, arm)
        windows = analysis.series[arm]
        for run in _runs(windows, pick):
            if len(run) > 1:
                x = [clock((window.start + window.end) / 2) for window in run]
                high, low = [pick(window).high for window in run], [pick(window).low for window in run]
                figure.add_scatter(
                    x=[*x, *reversed(x)],
                    y=[*high, *reversed(low)],
                    fill="toself",
                    fillcolor=_rgba(colour, 0.16),
                    line={"width": 0},
                    hoverinfo="skip",
                    showlegend=False,
                    legendgroup=arm,
                    mode="lines",
                )
        values = [pick(window) for window in windows]
        lone = len(windows) == 1 and values[0].known
        whiskers = (
            {"array": [values[0].high - values[0].value], "arrayminus": [values[0].value - values[0].low]} if lone else None
        )
        labels = [
            f"{_range(value, percent)}, {window.requests:,} requests" for value, window in zip(values, windows, strict=True)
        ]
        figure.add_scatter(
            x=[clock((window.start + window.end) / 2) for window in windows],
            y=[value.value if math.isfinite(value.value) else None for value in values],
            error_y=whiskers,
            name=escape(arm),
            legendgroup=arm,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 9 if lone else 5, "color": colour},
            customdata=labels,
            hovertemplate="%{customdata}",
        )
        top = max([top, *(value.high for value in values if value.known), *(v.value for v in values if math.isfinite(v.value))])
    lay_out(figure, 320)
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title=f"{clock.name} since the start", range=_x_range(analysis, clock))
    figure.update_yaxes(title=title, rangemode="tozero", tickformat=".0%" if percent else None)
    if percent:
        figure.update_yaxes(range=[0, min(1.0, top * 1.08) or 1.0])
    if line is not None and line < 1.6 * top:
        figure.add_hline(
            y=line,
            line={"dash": "dot", "width": 1.5, "color": VERDICTS["hold"]},
            annotation_text=f"objective {seconds(line)}",
            annotation_position="top left",
        )
    return figure


def _range(value: Interval, percent: bool) -> str:
    def form(number: float) -> str:
        return f"{number:.1%}" if percent else f"{number:.4g}"

    if not math.isfinite(value.value):
        return "no requests"
    return form(value.value) + (f" ({form(value.low)} to {form(value.high)})" if value.known else "")


def _terms(analysis: Analysis) -> go.Figure:
    arms = [arm for arm in reversed(analysis.experiment.arms) if math.isfinite(analysis.overall[arm].terms.total)]
    costs = {escape(arm): {term: getattr(analysis.overall[arm].terms, term) for term in TERMS} for arm in arms}
    return cost_by_term(costs, height=210, title="USD per 1,000 requests")


def _steps(timeline: KnobTimeline, start: float, end: float) -> list[float]:
    return [start, *(when for when in timeline.times[1:] if start < when < end), end]


def _knobs(analysis: Analysis, clock: Clock) -> go.Figure:
    """The knobs' trajectories, and under them what the guard said of each proposal."""
    figure = make_subplots(
        rows=4,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.045,
        row_heights=[0.34, 0.28, 0.24, 0.14],
    )
    arms = [arm for arm in analysis.experiment.arms if analysis.sources[arm].timeline.known]
    sizes = [knobs.cache_size for arm in arms for knobs in analysis.sources[arm].timeline.knobs]
    unit, unit_name = size_unit(max(sizes, default=1))
    warmest = 0.0
    for arm in arms:
        timeline = analysis.sources[arm].timeline
        times = _steps(timeline, analysis.start, analysis.end)
        settings = [timeline.at(when) for when in times]
        known = [item for item in settings if item is not None]
        warmest = max([warmest, *(item.warmup_ratio for item in known)])
        rows: tuple[list[float | None], ...] = (
            [item.cache_size / unit for item in known],
            [item.ttl if math.isfinite(item.ttl) else None for item in known],
            [item.warmup_ratio for item in known],
        )
        for row, values in enumerate(rows, start=1):
            figure.add_scatter(
                x=[clock(when) for when in times],
                y=values,
                row=row,
                col=1,
                name=escape(arm),
                legendgroup=arm,
                showlegend=row == 1,
                mode="lines",
                line={"color": _colour(analysis, arm), "width": 2, "shape": "hv", "dash": "solid"},
                hovertemplate=(f"%{{y:.4g}} {unit_name}", "%{y:.4g} s", "%{y:.2f}")[row - 1],
            )
    for verdict, records in _by_verdict(analysis).items():
        figure.add_scatter(
            x=[clock(record.at) for record in records],
            y=[escape(record.arm) for record in records],
            row=4,
            col=1,
            name=f"guard: {escape(verdict)}",
            mode="markers",
            marker={"color": VERDICTS.get(verdict, "#9b6dd6"), "size": 11, "symbol": "square"},
            customdata=[_wrapped(record.reason) for record in records],
            hovertemplate="%{customdata}",
        )
    lay_out(figure, 640)
    figure.update_layout(hovermode="x unified", hoversubplots="axis", legend={"y": 1.01})
    for row, title in ((1, f"cache size, {unit_name}"), (2, "ttl, seconds")):
        shown = [value for trace in figure.data if trace.yaxis == ("y", "y2")[row - 1] for value in trace.y if value]
        figure.update_yaxes(title=title, type="log", row=row, col=1, **_log_axis(shown))
    figure.update_yaxes(title="warm-up ratio", range=[0.0, max(0.1, 1.1 * warmest)], row=3, col=1)
    figure.update_yaxes(title="guard", type="category", row=4, col=1)
    figure.update_xaxes(range=_x_range(analysis, clock))
    figure.update_xaxes(title=f"{clock.name} since the start", row=4, col=1)
    return figure


def _x_range(analysis: Analysis, clock: Clock) -> list[float]:
    return [0.0, max(clock(analysis.end), 1e-9) * 1.01]


def _log_axis(values: Sequence[float]) -> dict[str, object]:
    """Ticks at 1, 2 and 5 of each decade around the values, at most six; a little air above and below."""
    if not values:
        return {}
    low, high = math.log10(min(values)) - 0.15, math.log10(max(values)) + 0.15
    ticks = [base * 10.0**decade for decade in range(math.floor(low), math.ceil(high) + 1) for base in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    if len(ticks) > 6:
        ticks = [tick for tick in ticks if round(math.log10(tick), 6).is_integer()]
    ticks = ticks or [float(f"{max(values):.2g}")]
    return {"range": [low, high], "tickvals": ticks, "ticktext": [f"{tick:,.5g}" for tick in ticks]}


def _by_verdict(analysis: Analysis) -> Mapping[str, list[DecisionRecord]]:
    found: dict[str, list[DecisionRecord]] = {}
    for arm in analysis.experiment.arms:
        for record in analysis.sources[arm].decisions:
            if record.verdict != "observe":
                found.setdefault(record.verdict, []).append(record)
    order = {name: place for place, name in enumerate(VERDICTS)}
    return {name: found[name] for name in sorted(found, key=lambda name: (order.get(name, len(order)), name))}


def _wrapped(text: str, width: int = 70) -> str:
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) > width and line:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "<br>".join(escape(item) for item in [*lines, line])
