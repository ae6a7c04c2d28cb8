"""The page of an evaluation: one HTML file that needs nothing else, with every row, whoever wins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from agents.words import size_words, ttl_words
from experiments.chart_style import cost_by_term, lay_out, style_axes
from experiments.evaluation_results import CaseRecord, Results, RowRecord
from experiments.evaluation_summary import BASIS, Comparison, RowSummary, SuiteSummary, learned_label, relative, summarise
from experiments.evaluation_targets import Verdict, judge
from experiments.page import fill_page, plain_figure, table, tile
from experiments.stats import Interval
from experiments.units import InputError

_INK = {"met": "good-ink", "missed": "bad-ink", "not measured": ""}
_TRAJECTORY_COLOURS = ("#8492a6", "#2f80ed", "#27a55f")
_FARTHEST = 0.3
"""Costs so far from the reference's have the strongest colour of the map; their number is told as it is."""


def build_page(results: Results, *, case: str | None = None, command: str = "") -> str:
    """Lay out an evaluation.

    Args:
        results: What was measured.
        case: The case whose knobs are drawn; default: the one with a causal oracle on which it gains most, else the first.
        command: The command that makes the page again.

    Returns:
        A self-contained HTML page: no request leaves it.

    Raises:
        InputError: If there is no such case.
    """
    summaries = summarise(results)
    verdicts = judge(results, summaries)
    label = learned_label(results)
    whole = summaries[-1]
    shown = _trajectory_case(results, case)
    met = [verdict for verdict in verdicts if verdict.state == "met"]
    missed = [verdict for verdict in verdicts if verdict.state == "missed"]
    figures = {
        "heat": _heat_map(results, whole),
        "terms": _terms(whole),
        "knobs": _knobs(results, shown, label),
    }
    return fill_page(
        "evaluate",
        {
            "targets_hint": escape(_targets_hint(results, label)),
            "targets": _targets(verdicts),
            "suites": "".join(_suite(results, summary, label) for summary in summaries),
            "losses_hint": escape(
                f"Every case on which {label or 'the learned policy'} costs as much as the reference or the best static setting "
                "in hindsight, or more, in the mean over its seeds; with the interval over seeds."
            ),
            "losses": _losses(whole, label),
            "heat_hint": escape(_heat_hint(results)),
            "heat_width": f"{240 + 62 * len(whole.cases)}px",
            "terms_hint": "US dollars per 1,000 requests, all cases and seeds; a row that was not run on every case is left out.",
            "trajectory_case": escape(shown.name),
            "trajectory_hint": escape(_trajectory_hint(results, shown)),
            "ablations_hint": escape(
                "What is left of the policy when a part is taken away; trained and judged like it. Cost over the reference's."
            ),
            "ablations": _ablations(summaries, label),
            "recovery_hint": escape(
                "Each steady case starts from the smallest size and the shortest TTL. Cost after "
                f"{results.settings.recover_intervals} decisions, over what the best static setting of the grid for these later "
                "intervals, which had been in force from the start, cost in them."
            ),
            "recovery": _recovery(results),
            "rows": _rows(results.rows),
            "method": _method(results),
            "command": escape(command or results.command),
        },
        title="Evaluation of cache policies",
        subtitle=_subtitle(results, summaries),
        note="; ".join(results.left_out),
        tone=_tone(verdicts),
        verdict=f"{len(met)} of {len(met) + len(missed)} measured targets met",
        reason=_reason(results, summaries, label, missed),
        basis=BASIS,
        tiles=_tiles(summaries, label),
        warnings=_warnings(results, verdicts),
        figures={name: plain_figure(figure) for name, figure in figures.items()},
    )


def _tone(verdicts: Sequence[Verdict]) -> str:
    states = [verdict.state for verdict in verdicts]
    if "missed" not in states:
        return "good" if "met" in states else "even"
    return "bad" if states.count("missed") > states.count("met") else "even"


def _subtitle(results: Results, summaries: Sequence[SuiteSummary]) -> str:
    intervals = sum(len(case.requests) for case in results.cases)
    suites = ", ".join(f"{len(each.cases)} {each.name}" for each in summaries if each.name != "all")
    return (
        f"{len(results.rows)} rows on {len(results.cases)} held-out cases ({suites}), {intervals:,} decision intervals a row and "
        f"seed. Costs are relative to {results.settings.roles.reference}: lower is better."
    )


def _reason(results: Results, summaries: Sequence[SuiteSummary], label: str | None, missed: Sequence[Verdict]) -> str:
    if label is None:
        return "no learned policy was among the rows"
    parts = []
    for summary in summaries:
        row = summary.row(label)
        if row is not None and row.reference is not None:
            parts.append(f"{_interval(row.reference.iqm)} on {summary.name}")
    words = f"{label}: {'; '.join(parts)} of what {results.settings.roles.reference} costs (interquartile mean, 95 % interval)."
    if missed:
        words += " Missed: " + "; ".join(f"{item.target.words} {_limit(item)}, is {_number(item.value.value)}" for item in missed)
    return words


def _warnings(results: Results, verdicts: Sequence[Verdict]) -> list[str]:
    words = []
    unmeasured = [verdict.target.words for verdict in verdicts if verdict.state == "not measured"]
    if unmeasured:
        words.append("Not measured in this evaluation: " + "; ".join(unmeasured) + ".")
    label = learned_label(results)
    row = next((row for row in results.rows if row.label == label), None)
    if row is not None and row.training and len(row.training) < 5:
        words.append(
            f"{label} is {len(row.training)} trained {'policy' if len(row.training) == 1 else 'policies'}: its intervals say "
            "little of what another training seed would give."
        )
    return words


def _tiles(summaries: Sequence[SuiteSummary], label: str | None) -> list[str]:
    tiles = []
    for summary in summaries:
        row = None if label is None else summary.row(label)
        if row is None or row.reference is None or label is None:
            continue
        value = row.reference.iqm
        ink = "good-ink" if value.known and value.high < 1 else "bad-ink" if value.known and value.low > 1 else ""
        tiles.append(tile(f"{label}, {summary.name}", _number(value.value), _bounds(value) or "no interval", ink))
    return tiles


# -- tables --------------------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    """Show a ratio with four digits after the point."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.4f}"


def _bounds(value: Interval) -> str:
    return f"{_number(value.low)} to {_number(value.high)}" if value.known else ""


def _interval(value: Interval) -> str:
    return _number(value.value) + (f" ({_bounds(value)})" if value.known else "")


def _cell(value: Interval | None, ink: str = "") -> str:
    if value is None:
        return '<td class="num">–</td>'
    mark = f' <span class="range">{_bounds(value)}</span>' if value.known else ""
    return f'<td class="num {ink}">{_number(value.value)}{mark}</td>'


def _limit(verdict: Verdict) -> str:
    return f"{'>=' if verdict.target.at_least else '<='} {verdict.target.limit:g}"


def _targets_hint(results: Results, label: str | None) -> str:
    return (
        f"About {label or 'no row: none was learned'}. Judged by the values as they are, not as they are shown; "
        f"the curve is {results.settings.roles.reference}."
    )


def _targets(verdicts: Sequence[Verdict]) -> str:
    body = [
        f"<tr><th>{escape(item.target.words)}</th><td class=num>{escape(_limit(item))}</td>{_cell(item.value)}"
        f'<td class="{_INK[item.state]}">{item.state}</td><td>{escape(item.detail)}</td></tr>'
        for item in verdicts
    ]
    return table(("target", "threshold", "measured", "", "of what"), body)


def _suite(results: Results, summary: SuiteSummary, label: str | None) -> str:
    heads = (
        "row", "seeds", "interquartile mean", "stratified interval", "mean", "P(better)", "worst case", "of best static",
        "of mid-grid", "gap closed", "hits", "$ per 1,000",
    )  # fmt: skip
    body = []
    for row in summary.rows:
        worst = "–" if row.reference is None else f"{_number(row.reference.worst[1])} {escape(row.reference.worst[0])}"
        partial = "" if len(row.cases) == len(summary.cases) else f' <span class="range">{len(row.cases)} cases</span>'
        reference = row.reference
        cells = [
            f"<td class=num>{len(row.row.seeds) or '–'}</td>",
            _cell(None if reference is None else reference.iqm, _ink(reference)),
            f'<td class="num range">{_bounds(reference.stratified) if reference is not None else ""}</td>',
            _cell(None if reference is None else reference.mean),
            _cell(row.improvement),
            f"<td>{worst}</td>",
            _cell(None if row.best_static is None else row.best_static.iqm),
            _cell(None if row.middle is None else row.middle.iqm),
            _cell(row.gap),
            f"<td class=num>{_share(row.hit_ratio)}</td>",
            f"<td class=num>{row.cost:.4g}</td>",
        ]
        mark = " class=moved" if row.row.label == label else ""
        body.append(f"<tr{mark}><th>{escape(row.row.label)}{partial}</th>{''.join(cells)}</tr>")
    names = ", ".join(case.name for case in summary.cases)
    return (
        f'<section class="card"><h2>Suite: {escape(summary.name)}</h2><p class="hint">Cost over that of '
        f"{escape(results.settings.roles.reference)} on the same requests. Cases: {escape(names)}.</p>"
        f'<div class="wide">{table(heads, body)}</div></section>'
    )


def _ink(comparison: Comparison | None) -> str:
    if comparison is None or not comparison.iqm.known:
        return ""
    return "good-ink" if comparison.iqm.high < 1 else "bad-ink" if comparison.iqm.low > 1 else ""


def _share(value: float) -> str:
    return f"{value:.2%}" if math.isfinite(value) else "–"


def _losses(summary: SuiteSummary, label: str | None) -> str:
    row = None if label is None else summary.row(label)
    if row is None:
        return '<p class="empty">No learned policy was run.</p>'
    body = []
    for words, comparison in (("reference", row.reference), ("best static in hindsight", row.best_static)):
        for name, value in {} if comparison is None else comparison.cases.items():
            if value.value >= 1.0:
                state = "worse" if value.known and value.low > 1 else "no difference shown" if value.known else "one seed"
                body.append((value.value, f"<tr><th>{escape(name)}</th><td>{words}</td>{_cell(value)}<td>{state}</td></tr>"))
    if not body:
        return '<p class="empty">It is cheaper on every case.</p>'
    return table(("case", "against", "cost over its", ""), [line for _, line in sorted(body, reverse=True)])


def _ablations(summaries: Sequence[SuiteSummary], label: str | None) -> str:
    rows = {row.row.label: row for summary in summaries for row in summary.rows if row.row.group == "ablation"}
    if not rows:
        return (
            '<p class="empty">No ablation was run: train the policies that the configuration names as ablations, and evaluate '
            "again.</p>"
        )
    names = [*([label] if label is not None else []), *rows]
    body = []
    for name in names:
        found = [summary.row(name) for summary in summaries]
        cells = "".join(
            _cell(
                None if row is None or row.reference is None else row.reference.iqm, _ink(None if row is None else row.reference)
            )
            for row in found
        )
        seeds = next((row.seeds for row in found if row is not None), 0)
        body.append(f"<tr><th>{escape(name)}</th><td class=num>{seeds}</td>{cells}</tr>")
    return table(("row", "seeds", *(escape(summary.name) for summary in summaries)), body)


def _recovery(results: Results) -> str:
    found = results.recoveries
    if not found:
        return '<p class="empty">No steady case that is long enough was run.</p>'
    cases = list(dict.fromkeys(item.case for item in found))
    body = []
    for row in dict.fromkeys(item.row for item in found):
        cells = []
        for case in cases:
            values = [item.relative for item in found if item.row == row and item.case == case]
            spread = f' <span class="range">{_number(min(values))} to {_number(max(values))}</span>' if len(values) > 1 else ""
            cells.append(f"<td class=num>{_number(float(np.mean(values)))}{spread}</td>" if values else "<td>–</td>")
        body.append(f"<tr><th>{escape(row)}</th>{''.join(cells)}</tr>")
    return table(("row", *(f"{escape(case)}: mean, least to most of the seeds" for case in cases)), body)


def _rows(rows: Sequence[RowRecord]) -> str:
    body = []
    for row in rows:
        trained = "".join(
            f"<br><span class=range>{escape(item.directory)}: seed {escape(item.seed)}, "
            f"{'unknown time' if item.seconds is None else f'{item.seconds:.0f} s'}: <code>{escape(item.command)}</code></span>"
            for item in row.training
        )
        seeds = ", ".join(row.seeds) or "none: it depends on none"
        body.append(
            f"<tr><th>{escape(row.label)}</th><td>{escape(row.group)}</td><td>{escape(seeds)}</td>"
            f"<td><code>{escape(row.command)}</code>{trained}</td></tr>"
        )
    return table(("row", "kind", "seeds", "command, and how it was trained"), body)


def _method(results: Results) -> str:
    settings = results.settings
    entries = [
        ("Cost", "US dollars by the objective: upstream tokens, latency, memory, staleness, P99 above its objective, changes."),
        (
            "Seeds",
            f"A policy by name is run with {settings.seeds} seeds of the ghost's sample; a group of trained policies has one "
            "training seed each, run with the ghost's seed of the same number. Rows without seeds are computed exactly.",
        ),
        ("Start", "Every run starts from empty caches; the first interval runs on the initial knobs and is left out."),
        ("P(better)", "Probability that the row costs less than the reference on a case drawn at random; a tie counts half."),
        ("Best static", "The cheapest setting of the grid on the very requests it is judged on, refined between its points."),
        (
            "Minimum of each interval",
            "For each interval the cheapest static setting of that interval alone. It looks ahead and changes at no cost: no "
            "causal policy can be held to it, and it is nearly, not strictly, a lower bound.",
        ),
        (
            "Causal oracle",
            "Knows the regime process from other realisations of it, not the requests it is judged on. Not run where there is no "
            "other realisation. The best schedule that was found, not the best there is: a policy can beat it.",
        ),
        ("Gap closed", "What is saved against the reference over all recurring cases, over what the causal oracle saves."),
        ("Optuna", f"One setting, found in {settings.optuna_trials} trials on another realisation or a trace's first half."),
        ("Intervals", BASIS),
        ("Versions", ", ".join(f"{name} {value}" for name, value in results.versions.items())),
    ]  # fmt: skip
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries)


# -- charts --------------------------------------------------------------------------------------------------------------------


def _heat_hint(results: Results) -> str:
    return (
        f"Cost over that of {results.settings.roles.reference}, mean over seeds: blue is cheaper, red dearer; the strongest "
        f"colour stands for {_FARTHEST:.0%} and more."
    )


def _heat_map(results: Results, summary: SuiteSummary) -> go.Figure:
    rows = [row for row in reversed(summary.rows) if row.reference is not None]
    cases = [case.name for case in summary.cases]
    values: list[list[float | None]] = []
    hover: list[list[str]] = []
    for row in rows:
        found: Mapping[str, Interval] = {} if row.reference is None else row.reference.cases
        values.append([found[case].value if case in found else None for case in cases])
        hover.append([_interval(found[case]) if case in found else "not run" for case in cases])
    figure = go.Figure()
    figure.add_heatmap(
        z=values,
        x=cases,
        y=[escape(row.row.label) for row in rows],
        customdata=hover,
        text=[["" if value is None else f"{value:.3f}" for value in line] for line in values],
        texttemplate="%{text}",
        textfont={"size": 11},
        hovertemplate="%{y} on %{x}: %{customdata}<extra></extra>",
        colorscale="RdBu_r",
        zmin=1 - _FARTHEST,
        zmax=1 + _FARTHEST,
        xgap=1,
        ygap=1,
        showscale=False,
    )
    lay_out(figure, 130 + 26 * max(1, len(rows)))
    figure.update_layout(margin={"l": 190, "b": 110})
    figure.update_xaxes(showgrid=False, tickangle=-40)
    figure.update_yaxes(showgrid=False)
    return figure


def _terms(summary: SuiteSummary) -> go.Figure:
    rows = [row for row in reversed(summary.rows) if len(row.cases) == len(summary.cases)]
    costs = {escape(row.row.label): dict(row.terms) for row in rows}
    return cost_by_term(costs, height=120 + 34 * max(1, len(rows)), title="USD per 1,000 requests")


def _trajectory_case(results: Results, wanted: str | None) -> CaseRecord:
    if wanted is not None:
        found = next((case for case in results.cases if case.name == wanted), None)
        if found is None:
            raise InputError(f"case {wanted!r}: expected one of {', '.join(case.name for case in results.cases)}")
        return found
    roles = results.settings.roles
    names = [case.name for case in results.cases if results.run(roles.oracle, case.name) is not None]
    if not names:
        return results.cases[0]
    gains = np.mean(relative(results, roles.oracle, roles.reference, names), axis=0)
    best = names[int(np.argmin(gains))]
    return next(case for case in results.cases if case.name == best)


def _trajectory_hint(results: Results, case: CaseRecord) -> str:
    recurs = "does not recur" if case.period is None else f"recurs every {ttl_words(case.period)}"
    length = f"{len(case.requests)} intervals of {ttl_words(case.interval)}"
    return f"First seed of each row; {length}; the regime {recurs}. {case.note}".strip()


def _knobs(results: Results, case: CaseRecord, label: str | None) -> go.Figure:
    roles = results.settings.roles
    figure = make_subplots(rows=4, cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.3, 0.28, 0.22, 0.2])
    hours = [(number + 1) * case.interval / 3600.0 for number in range(len(case.requests))]
    for colour, name in zip(_TRAJECTORY_COLOURS, dict.fromkeys((roles.reference, label, roles.oracle)), strict=False):
        run = None if name is None else results.run(name, case.name)
        if run is None or name is None:
            continue
        for place, (values, words) in enumerate(
            (
                ([size for size, _, _ in run.knobs], [size_words(round(size)) for size, _, _ in run.knobs]),
                ([ttl for _, ttl, _ in run.knobs], [ttl_words(ttl) for _, ttl, _ in run.knobs]),
                ([share for _, _, share in run.knobs], [f"{share:.0%}" for _, _, share in run.knobs]),
            )
        ):
            figure.add_scatter(
                x=hours,
                y=values,
                mode="lines",
                name=escape(name),
                legendgroup=name,
                showlegend=place == 0,
                line={"width": 1.6, "color": colour, "shape": "hv"},
                customdata=words,
                hovertemplate=f"{escape(name)}: %{{customdata}}<extra></extra>",
                row=place + 1,
                col=1,
            )
    figure.add_scatter(
        x=hours,
        y=case.requests,
        mode="lines",
        name="requests",
        line={"width": 1.2, "color": "#9b6dd6"},
        hovertemplate="%{y:,.0f} requests<extra></extra>",
        row=4,
        col=1,
    )
    lay_out(figure, 640)
    style_axes(figure)
    figure.update_yaxes(title="cache size, bytes", type="log", row=1, col=1)
    figure.update_yaxes(title="ttl, s", type="log", row=2, col=1)
    figure.update_yaxes(title="warm-up", tickformat=".0%", rangemode="tozero", row=3, col=1)
    figure.update_yaxes(title="requests", rangemode="tozero", row=4, col=1)
    figure.update_xaxes(title="hours since the start", row=4, col=1)
    return figure


def row_line(row: RowSummary) -> tuple[str, ...]:
    """Return a row's figures as text, for tables elsewhere: label, seeds, and what the page shows of it."""
    reference = row.reference
    return (
        row.row.label,
        str(len(row.row.seeds) or "-"),
        "-" if reference is None else _number(reference.iqm.value),
        "-" if reference is None or not reference.iqm.known else _bounds(reference.iqm),
        "-" if reference is None else _number(reference.mean.value),
        "-" if row.improvement is None else f"{row.improvement.value:.2f}",
        "-" if reference is None else f"{_number(reference.worst[1])} {reference.worst[0]}",
        "-" if row.best_static is None else _number(row.best_static.iqm.value),
        "-" if row.middle is None else _number(row.middle.iqm.value),
        "-" if row.gap is None else _number(row.gap.value),
        _share(row.hit_ratio),
    )
