"""The report of an experiment: one HTML page that needs nothing else, and the same figures for scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any

import pandas as pd

from envs.objective import Prices
from experiments.analysis import Analysis, analyse
from experiments.chart_style import TERM_NAMES, TERMS
from experiments.charts import CONTROL, TREATMENT, charts
from experiments.design import Experiment
from experiments.measure import ArmFigures, Method
from experiments.page import fill_page, plain_figure, table, tile
from experiments.paired import ghost_sentence
from experiments.records import DecisionRecord
from experiments.report_prices import price_section
from experiments.report_text import knobs_text, method_section
from experiments.stats import Interval
from experiments.verdict import seconds, usd

MAX_ROWS = 500
"""Decisions shown in the table; the newest."""

_TONES = {"treatment better": "good", "control better": "bad"}


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        html: The page.
        summary: Its figures, JSON-ready (:meth:`experiments.analysis.Analysis.summary`).
    """

    html: str
    summary: dict[str, Any]


def build_report(
    experiment: Experiment,
    decisions: Sequence[DecisionRecord],
    log: pd.DataFrame,
    prices: Prices | None = None,
    *,
    title: str = "",
    note: str = "",
    command: str = "",
    caveats: Sequence[str] = (),
    method: Method | None = None,
    windows: int = 24,
) -> Report:
    """Compute and lay out the report of an experiment, running or ended.

    Args:
        experiment: The design.
        decisions: The ledger's decisions.
        log: The access log (:func:`experiments.access.read_access_log`).
        prices: Price with these instead of the experiment's own.
        title: Heading; made from the experiment's name if empty.
        note: What a reader has to know of the workload; the experiment's own if empty.
        command: The command that makes the report again.
        caveats: More that a reader has to know, for instance that the load generator was late.
        method: How intervals are computed.
        windows: Number of windows over time.

    Returns:
        The page and the summary. What is missing is said to be missing.
    """
    if prices is not None:
        experiment = experiment.changed(prices=prices)
    analysis = analyse(experiment, decisions, log, method=method, windows=windows, caveats=caveats)
    summary = analysis.summary()
    page = _page(analysis, title or f"Experiment {experiment.name}", note or experiment.note, command)
    return Report(page, summary)


def _page(analysis: Analysis, title: str, note: str, command: str) -> str:
    figures = {name: plain_figure(figure) for name, figure in charts(analysis).items()}
    drawn = {name: figure for name, figure in figures.items() if _has_points(figure)}
    places = {
        f"chart_{name.replace('-', '_')}": (
            f'<div class="chart" id="chart-{name}" role="img" aria-label="{name} by arm"></div>{_hint(analysis, name)}'
            if name in drawn
            else f'<p class="empty">{_WHY_EMPTY[name]}</p>'
        )
        for name in figures
    }
    experiment = analysis.experiment
    return fill_page(
        "report",
        {
            "arms": _arms(analysis),
            "paired": _paired(analysis),
            "prices": price_section(analysis),
            "method": method_section(analysis, note),
            "decisions": _decisions(analysis),
            "command": escape(command or f"cachepilot experiment report {experiment.name}"),
            **places,
        },
        title=title,
        subtitle=_subtitle(analysis),
        note=note,
        tone=_TONES.get(analysis.verdict.outcome, "even"),
        verdict=analysis.verdict.outcome,
        reason=analysis.verdict.reason,
        basis=analysis.verdict.basis,
        tiles=_tiles(analysis),
        warnings=[*analysis.verdict.warnings, *analysis.caveats],
        figures=drawn,
    )


_WHY_EMPTY = {
    "hit-ratio": "No requests in the period: nothing to draw.",
    "p99": "No requests in the period: nothing to draw.",
    "cost": "No cost to draw: there are no requests, or the knobs of the arms are not known.",
    "terms": "No cost to draw: there are no requests, or the knobs of the arms are not known.",
    "knobs": "The knobs are not known: the ledger has no decisions, and the experiment was started without knobs.",
}


def _has_points(figure: dict[str, Any]) -> bool:
    return any(any(value is not None for value in _values(trace)) for trace in figure["data"])


def _values(trace: dict[str, Any]) -> Sequence[Any]:
    values = trace.get("x" if trace.get("type") == "bar" else "y", ())
    return values if isinstance(values, list) else [values]  # plotly may pack numbers; packed numbers are points


def _hint(analysis: Analysis, name: str) -> str:
    if name in ("hit-ratio", "p99", "cost"):
        count = len(analysis.series[analysis.experiment.control])
        windows = "the intervals of the tuner" if analysis.by_interval else f"window, {count} in all"
        text = f"By {windows}; bands are {analysis.method.confidence:.0%} intervals clustered by key."
        if name == "p99":
            text += " In a window of fewer than 100 requests P99 is its slowest request."
        return f'<p class="hint">{text}</p>'
    if name == "knobs":
        return '<p class="hint">Squares: what the guard said of each proposal; point at one for its reason.</p>'
    return ""


def _subtitle(analysis: Analysis) -> str:
    experiment = analysis.experiment
    begin, end = (datetime.fromtimestamp(when, UTC) for when in (analysis.start, analysis.end))
    length = analysis.end - analysis.start
    duration = f"{length:.0f} s" if length < 300 else f"{length / 60:.1f} min" if length < 7200 else f"{length / 3600:.1f} h"
    state = "still running" if experiment.ended_at is None else "ended"
    return (
        f"{experiment.treatment} against {experiment.control} in namespace {experiment.namespace or '(default)'}, "
        f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC ({duration}), {state}."
    )


def _tiles(analysis: Analysis) -> tuple[str, ...]:
    differences = analysis.differences
    base = analysis.control.cost.value
    cost = differences.cost
    relative = f"{100 * cost.value / base:+.1f}%" if base > 0 and math.isfinite(cost.value) else "unknown"
    hits, p99 = differences.hit_ratio, differences.p99
    return (
        _tile("Cost per 1,000 requests", relative, cost, usd, better=-1),
        _tile(
            "Hit ratio",
            f"{100 * hits.value:+.1f} points" if math.isfinite(hits.value) else "unknown",
            hits,
            lambda value: f"{100 * value:.1f}",
            better=1,
        ),
        _tile(
            "P99 latency",
            _signed(p99.value, seconds) if math.isfinite(p99.value) else "unknown",
            p99,
            seconds,
            better=-1,
        ),
    )


def _tile(name: str, value: str, change: Interval, form: Callable[[float], str], *, better: int) -> str:
    ink = ""
    if change.known and (change.low > 0 or change.high < 0):
        ink = "good-ink" if better * change.value > 0 else "bad-ink"
    bounds = f"{_signed(change.low, form)} to {_signed(change.high, form)}" if change.known else "no interval"
    return tile(f"{name}, treatment − control", value.replace("-", "−"), bounds, ink)


def _signed(value: float, form: Callable[[float], str]) -> str:
    return ("−" if value < 0 else "+") + form(abs(value))


def _cell(value: Interval, form: Callable[[float], str], unit: str = "") -> str:
    if not math.isfinite(value.value):
        return "–"
    bounds = f' <span class="range">{escape(form(value.low))} to {escape(form(value.high))}</span>' if value.known else ""
    return escape(form(value.value) + unit) + bounds


def _arms(analysis: Analysis) -> str:
    control, treatment = analysis.control, analysis.treatment

    def percent(value: float) -> str:
        return f"{value:.1%}"

    def plain(value: float) -> str:
        return f"{value:,.0f}" if math.isfinite(value) else "–"

    rows: list[tuple[str, bool, Callable[[ArmFigures], str]]] = [
        ("Requests", False, lambda arm: plain(arm.requests)),
        ("Keys (clusters)", False, lambda arm: plain(arm.keys)),
        ("Effective keys", False, lambda arm: f"{arm.effective_keys:,.1f}" if arm.keys else "–"),
        ("Hit ratio", False, lambda arm: _cell(arm.hit_ratio, percent)),
    ]
    tiers = sorted({*control.hit_ratio_by_tier, *treatment.hit_ratio_by_tier})
    rows.extend((f"from {tier}", True, partial(_tier, tier)) for tier in tiers)
    rows += [
        ("P50 latency", False, lambda arm: escape(seconds(arm.p50)) if arm.requests else "–"),
        ("P99 latency", False, lambda arm: _cell(arm.p99, seconds)),
        ("Cost per 1,000 requests", False, lambda arm: _cell(arm.cost, usd)),
    ]
    rows.extend((TERM_NAMES.get(term, term), True, partial(_term, term)) for term in TERMS)
    rows += [
        ("Evictions", False, lambda arm: "unknown" if arm.evictions is None else plain(arm.evictions)),
        ("Failed upstream", False, lambda arm: plain(arm.errors)),
        ("Knobs at the start", False, lambda arm: _knobs_cell(analysis, arm, 0)),
        ("Knobs at the end", False, lambda arm: _knobs_cell(analysis, arm, -1)),
    ]
    differences = analysis.differences
    changes = {
        "Hit ratio": _change(differences.hit_ratio, lambda value: f"{100 * value:.1f}", " points"),
        "P99 latency": _change(differences.p99, seconds),
        "Cost per 1,000 requests": _change(differences.cost, usd),
    }
    heads = [
        f'<span class="dot" style="background:{colour}"></span>{escape(arm.arm)}'
        for arm, colour in ((control, CONTROL), (treatment, TREATMENT))
    ]
    body = [
        f'<tr><th class="{"sub-row" if nested else "row"}">{escape(name)}</th>'
        f"<td>{show(control)}</td><td>{show(treatment)}</td><td>{changes.get(name, '')}</td></tr>"
        for name, nested, show in rows
    ]
    return table(["", *heads, "difference"], body)


def _change(value: Interval, form: Callable[[float], str], unit: str = "") -> str:
    return _cell(value, lambda number: _signed(number, form), unit)


def _tier(tier: str, arm: ArmFigures) -> str:
    return f"{arm.hit_ratio_by_tier.get(tier, 0.0):.1%}" if arm.requests else "–"


def _term(term: str, arm: ArmFigures) -> str:
    value = getattr(arm.terms, term)
    if not math.isfinite(value):
        return "–"
    return escape("<$0.0001" if 0 < value < 0.0001 else usd(value))


def _knobs_cell(analysis: Analysis, arm: ArmFigures, place: int) -> str:
    knobs = analysis.sources[arm.arm].timeline.knobs
    return escape(knobs_text(knobs[place])) if knobs else "unknown"


def _paired(analysis: Analysis) -> str:
    paired = analysis.paired
    if paired is None:
        return (
            '<p class="empty">The ledger has no ghost curves of the treatment with the knobs of both arms known, so this second '
            "opinion is not available.</p>"
        )
    text = escape(ghost_sentence(paired, analysis.sources[analysis.experiment.treatment].decisions))
    if paired.constant:
        text += " Both arms had the same cache size and ttl throughout, so there is nothing to compare."
    return (
        f"<p>{text}</p><p class='hint'>A model on the same keys, free of the luck of the split, beside the measurement on "
        "different keys. It does not know warm-up, and it does not decide the verdict.</p>"
    )


def _decisions(analysis: Analysis) -> str:
    arms = analysis.experiment.arms
    records = sorted((record for arm in arms for record in analysis.sources[arm].decisions), key=lambda record: record.at)
    if not records:
        return '<h2>Decisions</h2><p class="empty">The ledger has no decisions of this experiment.</p>'
    shown = records[-MAX_ROWS:]
    cut = f" (the newest {MAX_ROWS} of {len(records):,})" if len(records) > MAX_ROWS else f" ({len(records):,})"
    heads = ("After", "Arm", "Policy", "Guard", "Knobs", "Reason", "Version", "Confirmed", "Hit ratio", "Cost before")
    rows = table(heads, (_decision(record, analysis.start) for record in shown))
    return f"<details><summary>Decisions{cut}</summary><div class='wide'>{rows}</div></details>"


def _decision(record: DecisionRecord, start: float) -> str:
    changed = record.applied != record.current
    knobs = knobs_text(record.current) + (f" → {knobs_text(record.applied)}" if changed else "")
    hit_ratio, cost = record.signals.get("hit_ratio"), record.cost.get("total")
    cells = (
        f"{record.at - start:,.1f} s",
        record.arm,
        record.policy,
        record.verdict,
        knobs,
        record.reason,
        str(record.version),
        f"{record.replicas_confirmed} of {record.replicas_expected}",
        f"{hit_ratio:.1%}" if isinstance(hit_ratio, (int, float)) else "–",
        usd(cost) if cost is not None else "–",
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
