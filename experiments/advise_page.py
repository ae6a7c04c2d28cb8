"""The page of an advice: one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from agents.words import knob_words, size_words, ttl_words
from envs.objective import Prices
from envs.price_book import PRICES, PriceBook
from experiments.advice import BATCHES, CHOSEN_ON, CONFIDENCE, WORTH_IT, Advice, Outcome, Saving
from experiments.advise import FEW, WARM
from experiments.chart_style import cost_by_term, lay_out
from experiments.page import fill_page, plain_figure, table, tile
from experiments.sensitivity import MOVED
from experiments.verdict import seconds, usd
from serving.knobs import Knobs

_TONES = {"change": "good", "use": "good", "keep": "even", "not enough data": "even"}
_TITLES = {
    "change": "Change the setting",
    "keep": "Keep what you have",
    "use": "Use this setting",
    "not enough data": "Not enough data",
}
RECOMMENDED, CURRENT = "#e5484d", "#f5a524"
_FEWEST_DOLLARS = 0.0001


def build_page(advice: Advice, book: PriceBook, *, command: str = "") -> str:
    """Lay out an advice.

    Args:
        advice: The advice.
        book: Where prices come from: the source of each one that the advice was priced with is shown.
        command: The command that makes the page again.

    Returns:
        A self-contained HTML page: no request leaves it.
    """
    figures = {
        "heat": _heat_map(advice),
        "curve": _hit_ratio_curve(advice),
        "terms": _terms(advice),
    }
    facts = advice.facts
    return fill_page(
        "advise",
        {
            "heat_hint": escape(_heat_hint(advice)),
            "settings": _settings(advice),
            "outlook": _outlook(advice),
            "assumed": _assumed(advice),
            "prices": _prices(advice.prices, book),
            "command": escape(command or "cachepilot advise"),
        },
        title=f"Cache advice for {facts.name}",
        subtitle=_subtitle(advice),
        note=facts.note,
        tone=_TONES[advice.verdict],
        verdict=_TITLES[advice.verdict],
        reason=advice.reason[:1].upper() + advice.reason[1:],
        basis=(
            f"Chosen on the first {CHOSEN_ON:.0%} of the requests, judged on the rest, which the choice has not seen. In this "
            f"run {advice.method}."
        ),
        tiles=_tiles(advice),
        warnings=advice.warnings,
        figures={name: plain_figure(figure) for name, figure in figures.items()},
    )


def _subtitle(advice: Advice) -> str:
    facts = advice.facts
    return (
        f"{facts.requests:,} requests in {ttl_words(facts.duration)} ({facts.load.rate:,.3g} a second), {facts.keys:,} different "
        f"entries of {size_words(facts.footprint)} in all."
    )


def _against(advice: Advice) -> tuple[str, Outcome]:
    """Return the setting that savings are told against: the current one, else the best without expiry, else no cache."""
    if advice.current is not None and advice.current is not advice.recommended:
        return "current", advice.current
    static = advice.references["best without expiry"]
    if static is not advice.recommended:
        return "best without expiry", static
    return "no cache", advice.references["no cache"]


def _tiles(advice: Advice) -> tuple[str, ...]:
    name, other = _against(advice)
    saving = advice.saving(other)
    knobs = advice.recommended.knobs
    late, theirs = (item.totals(advice.prices, advice.held_out) for item in (advice.recommended, other))
    points = 100 * (late.hit_ratio - theirs.hit_ratio)
    bounds = (
        f"{_dollars(saving.held_out.low)} to {_dollars(saving.held_out.high)} per 1,000"
        if saving.held_out.known
        else "no interval"
    )
    ink = _ink(saving)
    size = size_words(knobs.cache_size) if knobs.cache_size else "no cache"
    return (
        tile("Cheapest setting", size, f"ttl {ttl_words(knobs.ttl)}, warm-up {knobs.warmup_ratio:.0%}"),
        tile(f"Saves against {name}, held out", _share(saving.share), bounds, ink),
        tile(
            "At this rate",
            f"{_dollars(saving.held_out.value * advice.per_day)} a day",
            f"saved against {name}, held out",
            ink,
        ),
        tile("Hit ratio, held out", f"{late.hit_ratio:.1%}", f"{points:+.1f} points against {name}".replace("-", "−")),
    )


def _ink(saving: Saving) -> str:
    if not saving.held_out.known:
        return ""
    return "good-ink" if saving.held_out.low > 0 else "bad-ink" if saving.held_out.high < 0 else ""


def _dollars(value: float) -> str:
    if not math.isfinite(value):
        return "unknown"
    sign, amount = "−" if value < 0 else "", abs(value)
    if 0 < amount < _FEWEST_DOLLARS:
        return f"{sign}<${_FEWEST_DOLLARS}"
    return f"{sign}${amount:,.2f}" if amount >= 1 else sign + usd(amount)


def _share(value: float) -> str:
    return f"{value:.1%}".replace("-", "−") if math.isfinite(value) else "unknown"


def _heat_hint(advice: Advice) -> str:
    how = "" if advice.grid.exact else " Estimated by a ghost curve from a sample of keys."
    if any(
        not advice.config.space.contains(replace(knobs, ttl=min(knobs.ttl, advice.config.space.max_ttl)))
        for *_, knobs in _marks(advice)
    ):
        how += " A setting beyond the map is drawn on its edge."
    return (
        "Of the whole trace, without warm-up. The choice was made on its first part, so its mark need not sit on the cheapest "
        f"cell.{how}"
    )


def _marks(advice: Advice) -> list[tuple[str, str, str, Knobs]]:
    marks = [("recommended", "star", RECOMMENDED, advice.recommended.knobs)]
    if advice.current is not None and advice.current is not advice.recommended:
        marks.append(("current", "diamond", CURRENT, advice.current.knobs))
    return [mark for mark in marks if mark[3].cache_size > 0]


def _heat_map(advice: Advice) -> go.Figure:
    """Cost and hit ratio over size and TTL, one over the other; the page shows one of them."""
    grid, space = advice.grid, advice.config.space
    labels = [
        [
            f"{size_words(int(size))}, ttl {ttl_words(float(ttl))}<br>{usd(cost)} per 1,000 requests<br>hit ratio {ratio:.1%}"
            for size, cost, ratio in zip(grid.sizes, grid.cost[:, column], grid.hit_ratio[:, column], strict=True)
        ]
        for column, ttl in enumerate(grid.ttls)
    ]
    shade = np.log10(np.maximum(grid.cost, 1e-12)).T
    ticks = np.linspace(shade.min(), shade.max(), 5)
    figure = go.Figure()
    bar = {
        "orientation": "h",
        "y": -0.2,
        "yanchor": "top",
        "thickness": 12,
        "len": 1.0,
        "outlinewidth": 0,
        "title": {"side": "bottom"},
    }
    for name, z, scale, extra in (
        (
            "USD per 1,000 requests",
            shade,
            "Viridis_r",
            {"tickvals": ticks.tolist(), "ticktext": [_short_usd(10.0**tick) for tick in ticks]},
        ),
        ("hit ratio", grid.hit_ratio.T, "Viridis", {"tickformat": ".0%"}),
    ):
        figure.add_heatmap(
            z=z.tolist(),
            colorscale=scale,
            customdata=labels,
            hovertemplate="%{customdata}<extra></extra>",
            xgap=1,
            ygap=1,
            visible=not len(figure.data),
            colorbar={**bar, **extra, "title": {"text": name, "side": "bottom", "font": {"size": 12.5}}},
        )
    for name, symbol, colour, knobs in _marks(advice):
        steps = space.to_steps(knobs)
        figure.add_scatter(
            x=[steps[0]],
            y=[steps[1]],
            mode="markers",
            name=name,
            marker={"symbol": symbol, "size": 17, "color": colour, "line": {"color": "#ffffff", "width": 2}},
            hovertemplate=f"{name}: {escape(knob_words(knobs))}<extra></extra>",
        )
    lay_out(figure, 430)
    figure.update_layout(margin={"b": 96, "t": 34}, showlegend=True)
    every = _tick_step(len(grid.sizes))
    figure.update_xaxes(
        title="cache size",
        tickvals=list(range(0, len(grid.sizes), every)),
        ticktext=[size_words(int(size)) for size in grid.sizes[::every]],
        showgrid=False,
        range=[-0.5, len(grid.sizes) - 0.5],
        tickangle=0,
    )
    figure.update_yaxes(
        title="ttl",
        tickvals=list(range(len(grid.ttls))),
        ticktext=[ttl_words(float(ttl)) for ttl in grid.ttls],
        showgrid=False,
        range=[-0.5, len(grid.ttls) - 0.5],
    )
    return figure


def _tick_step(count: int) -> int:
    """Label so few sizes that they stand side by side on a narrow page: 4 of 16, both ends among them."""
    return max(1, (count - 1) // 3)


def _short_usd(value: float) -> str:
    return f"${value:.3g}"


def _hit_ratio_curve(advice: Advice) -> go.Figure:
    grid = advice.grid
    figure = go.Figure()
    colours = sample_colorscale("Viridis", np.linspace(0.12, 0.88, len(grid.ttls)).tolist())
    for column, ttl in enumerate(grid.ttls):
        figure.add_scatter(
            x=grid.sizes.tolist(),
            y=grid.hit_ratio[:, column].tolist(),
            mode="lines+markers",
            name=f"ttl {ttl_words(float(ttl))}",
            line={"width": 2, "color": colours[column]},
            marker={"size": 4},
            customdata=[size_words(int(size)) for size in grid.sizes],
            hovertemplate=f"%{{customdata}}, ttl {ttl_words(float(ttl))}: %{{y:.1%}}<extra></extra>",
        )
    outcomes = {"recommended": advice.recommended, "current": advice.current}
    for name, symbol, colour, knobs in _marks(advice):
        outcome = outcomes[name]
        if outcome is not None:
            figure.add_scatter(
                x=[knobs.cache_size],
                y=[outcome.hit_ratio],
                mode="markers",
                name=name,
                marker={"symbol": symbol, "size": 15, "color": colour, "line": {"color": "#ffffff", "width": 1.5}},
                hovertemplate=f"{name}: {escape(knob_words(knobs))}: %{{y:.1%}}<extra></extra>",
            )
    lay_out(figure, 400)
    figure.update_layout(hovermode="closest", margin={"t": 70})
    every = _tick_step(len(grid.sizes))
    figure.update_xaxes(
        title="cache size",
        type="log",
        tickvals=[int(size) for size in grid.sizes[::every]],
        ticktext=[size_words(int(size)) for size in grid.sizes[::every]],
        tickangle=0,
    )
    figure.update_yaxes(title="hit ratio, whole trace", tickformat=".0%", rangemode="tozero")
    return figure


def _terms(advice: Advice) -> go.Figure:
    rows = dict(reversed({"recommended": advice.recommended, **advice.compared}.items()))
    costs = {_broken(name): outcome.totals(advice.prices).cost.to_dict() for name, outcome in rows.items()}
    return cost_by_term(costs, height=120 + 46 * len(rows), title="USD per 1,000 requests, whole trace")


def _broken(name: str) -> str:
    """Break a long name in two lines, so that the axis leaves room for the bars."""
    return escape(name).replace("best without expiry", "best without<br>expiry").replace("unlimited cache", "unlimited<br>cache")


def _settings(advice: Advice) -> str:
    rows: Mapping[str, Outcome] = {"recommended": advice.recommended, **advice.compared}
    heads = (
        "",
        "setting",
        "hit ratio, held out",
        "P99, held out",
        "chosen on",
        "held out",
        "whole",
        "saved, held out",
        "saved, whole",
    )
    body = []
    for name, outcome in rows.items():
        late = outcome.totals(advice.prices, advice.held_out)
        saved, whole = "", ""
        if outcome is not advice.recommended:
            saving = advice.saving(outcome)
            bounds = (
                f' <span class="range">{escape(_dollars(saving.held_out.low))} to {escape(_dollars(saving.held_out.high))}</span>'
                if saving.held_out.known
                else ""
            )
            saved = f'<span class="{_ink(saving)}">{_share(saving.share)}</span>{bounds}'
            whole = _share(saving.share_whole)
        cells = [
            escape(knob_words(outcome.knobs) if outcome.knobs.cache_size else "nothing is kept"),
            f"{late.hit_ratio:.1%}",
            escape(seconds(late.p99)),
            usd(outcome.cost(advice.prices, advice.chosen_on)),
            usd(late.cost.total),
            usd(outcome.cost(advice.prices)),
            saved,
            whole,
        ]
        body.append(f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return table(heads, body)


def _outlook(advice: Advice) -> str:
    name = "current" if advice.current is not None else "the best without expiry"
    heads = ("price", "cheapest setting", f"saves against {name}, held out", "verdict" if advice.current is not None else "")
    rows = [("as given", advice.outlook.base, False)]
    rows += [
        (move.words, move.outcome, move.outcome.knobs != advice.outlook.base.knobs) for move in advice.outlook.moved
    ]  # fmt: skip
    body = []
    for words, choice, moved in rows:
        verdict = ("change" if choice.change else "keep") if advice.current is not None else ""
        turned = choice.change != advice.outlook.base.change
        body.append(
            f"<tr{' class=moved' if moved else ''}><th>{escape(words)}</th><td>{escape(knob_words(choice.knobs))}</td>"
            f"<td>{_share(choice.saving)}</td><td{' class=turned' if turned else ''}>{verdict}</td></tr>"
        )
    return table(heads, body)


def _assumed(advice: Advice) -> str:
    config, facts = advice.config, advice.facts
    half_life = (
        "Answers never become outdated by age."
        if math.isinf(config.staleness_half_life)
        else f"Half of the answers are outdated after {ttl_words(config.staleness_half_life)}."
    )
    entries = [
        ("Trace", facts.note or "The trace says nothing of itself."),
        ("Model", advice.model[:1].upper() + advice.model[1:] + "."),
        ("Cache", f"One arm; {config.l1_share:.0%} of the budget may be resident in memory. {half_life}"),
        (
            "Prefix blocks",
            "A block is answered only if the blocks before it in its request are."
            if config.prefix
            else "Answered one by one, whatever became of those before them.",
        ),
        (
            "Grid",
            f"{len(advice.grid.sizes)} sizes by {len(advice.grid.ttls)} TTLs. Warm-up of {_ratios(WARM)} was tried on the best "
            f"{f'{FEW} and on the best under each moved price' if advice.grid.exact else 'one'}.",
        ),
        (
            "Held out",
            f"The trace is cut into batches of equally many requests (up to {BATCHES}). A setting starts empty, runs through all "
            "of them, and is chosen by the first ones alone. P99 of a part is the mean of its batches'.",
        ),
        (
            "Noise",
            f"{CONFIDENCE:.0%} interval of the difference in cost on the held-out batches, by Student's t over batches. Batches "
            "that follow each other are not quite independent. A change is recommended if the whole interval is above 0 and it "
            f"saves at least {WORTH_IT:.0%}.",
        ),
        ("Unlimited cache", "Keeps everything; priced at the most that it held. A bound, not a setting that could be chosen."),
    ]  # fmt: skip
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries)


def _ratios(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0%}" for value in values)


def _prices(prices: Prices, book: PriceBook) -> str:
    body = []
    for name in PRICES:
        value, entry = getattr(prices, name), book.entry(name)
        own = math.isclose(value, entry.value)
        link = f' <a href="{escape(entry.url, quote=True)}" rel="noreferrer">link</a>' if own and entry.url else ""
        source = (
            f"{escape(entry.source)}, {entry.date} ({escape(entry.basis)}){link}. {escape(entry.checked)}".strip()
            if own
            else "set by hand, not the price book's"
        )
        body.append(
            f"<tr><th>{escape(MOVED.get(name, name))}</th><td class=num>{value:g}</td><td>{escape(entry.unit)}</td>"
            f"<td>{source}</td></tr>"
        )
    if prices.time_scale != 1:
        body.append(
            f"<tr><th>time scale</th><td class=num>{prices.time_scale:g}</td><td>s of the workload per s</td><td></td></tr>"
        )
    return table(("price", "value", "unit", "source"), body)
