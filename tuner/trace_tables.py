"""What `trace info`, `simulate` and `advise` found, as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agents.words import knob_words, size_words, ttl_words
from envs.workloads.info import TraceInfo
from envs.workloads.info_parts import Quantiles
from experiments.advice import Advice, Outcome
from experiments.sensitivity import MOVED
from experiments.simulate import Simulation, Totals, model_words
from experiments.verdict import seconds, usd
from serving.knobs import Knobs

MOST_ROWS = 24
"""Windows of a trace shown one by one; --json has more."""


def print_info(info: TraceInfo, out: Console) -> None:
    """Show what is in a trace."""

    def count(value: float) -> str:
        return f"{value:,.0f}"

    whole, prefix = info.infinite_hit_ratio, info.infinite_prefix_hit_ratio
    rows = [
        ("trace", f"{info.name} ({info.kind}{', ' + info.format if info.format else ''})"),
        ("note", info.note or "-"),
        ("requests", f"{info.requests:,}{f', blocks of {info.arrivals:,} chained requests' if info.chained else ''}"),
        ("length", f"{ttl_words(info.duration)}, {_known(info.rate, '{:,.3g}')} a second"),
        ("keys", f"{info.keys:,}, {size_words(info.footprint)} in all; asked for once: {_share(info.one_hit_share)}"),
        ("bytes asked for", size_words(info.bytes)),
        ("tokens", f"{info.input_tokens:,} prompt, {info.output_tokens:,} completion"),
        ("infinite cache", f"hits {_share(whole)}, of bytes {_share(info.infinite_byte_hit_ratio)}"),
    ]
    if info.chained:
        rows.append(("with prefix chains", f"hits {_share(prefix)}, of bytes {_share(info.infinite_prefix_byte_hit_ratio)}"))
    if info.groups:
        rows.append(("meanings", f"{info.groups:,}"))
    if info.documents or info.updates or info.flushes:
        rows.append(("documents", f"{info.documents:,}, updated {info.updates:,} times; {info.flushes:,} flushes"))
    if len(info.tenants) > 1:
        named = ", ".join(f"{item.name or item.tenant} {item.share:.0%}" for item in info.tenants[:8])
        rows.append(("tenants", f"{named}{', ...' if len(info.tenants) > 8 else ''}"))
    rows += [
        (
            "popularity",
            f"Zipf exponent {_known(info.zipf_exponent, '{:.2f}')} (r2 {_known(info.zipf_fit, '{:.2f}')}); the top 1% of keys "
            f"get {_share(info.top_share)}",
        ),
        (
            "burstiness",
            f"gaps vary by {_known(info.gap_variation, '{:.2f}')} (Poisson: 1); dispersion "
            + ", ".join(f"{_known(item.dispersion, '{:,.3g}')} at {ttl_words(item.seconds)}" for item in info.scales),
        ),
        (
            "change",
            f"windows of {ttl_words(info.window)} differ by {_known(info.divergence, '{:.3f}')} (chance alone: "
            f"{_known(info.noise, '{:.3f}')}); new keys get {_share(info.new_share)}",
        ),
    ]
    out.print(_facts_table(rows))
    table = Table(box=None, pad_edge=False)
    for name in ("", "10%", "50%", "90%", "99%", "most"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    sampled = "" if info.reuse_sample == 1 else "*"
    for name, values, words in (
        ("working set, keys", info.working_set_keys, count),
        ("working set, bytes", info.working_set_bytes, size_words),
        (f"reuse distance, keys{sampled}", info.reuse_keys, count),
        (f"reuse distance, bytes{sampled}", info.reuse_bytes, size_words),
        ("reuse age", info.reuse_age, ttl_words),
    ):
        table.add_row(name, *("-" if value is None else words(value) for value in _values(values)))
    out.print(table, highlight=False)
    if sampled:
        out.print(f"* of a sample of the keys, at least one in {1 / info.reuse_sample:,.0f}", highlight=False)
    out.print(_windows_table(info), highlight=False)
    _print_warnings(_left_out(info), out)


def _values(values: Quantiles) -> tuple[float | None, ...]:
    return values.p10, values.p50, values.p90, values.p99, values.most


def _windows_table(info: TraceInfo) -> Table:
    stride = -(-len(info.windows) // MOST_ROWS)
    some = "" if len(info.windows[::stride]) == info.window_count else f", some of {info.window_count:,}"
    table = Table(box=None, pad_edge=False, title=f"windows of {ttl_words(info.window)}{some}", title_justify="left")
    for name in ("start", "requests", "keys", "bytes", "entropy", "differs", "new"):
        table.add_column(name, justify="right")
    for item in info.windows[::stride]:
        table.add_row(
            ttl_words(item.start), f"{item.requests:,}", f"{item.keys:,}", size_words(item.bytes), f"{item.entropy:.2f} bit",
            _known(item.divergence, "{:.3f}"), _share(item.new_share),
        )  # fmt: skip
    return table


def _left_out(info: TraceInfo) -> list[str]:
    found = []
    if info.skipped:
        found.append(f"{info.skipped:,} bad lines left out")
    if info.zero_sized:
        found.append(f"{info.zero_sized:,} requests left out whose entry has no bytes")
    return found


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _share(value: float | None) -> str:
    return "-" if value is None else _percent(value)


def _facts_table(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def print_simulation(result: Simulation, out: Console) -> None:
    """Show what one setting did."""
    figures = result.totals
    tiers = ", ".join(f"{tier} {ratio:.1%}" for tier, ratio in figures.hit_ratio_by_tier.items())
    exactly = "" if result.quantiles is not None else " (means of the windows' by requests)"
    worst = seconds(figures.worst_p99)
    chained = "" if result.config.prefix else "; prefix blocks are answered one by one"
    rows = [
        ("trace", result.trace),
        ("note", result.note or "-"),
        ("setting", knob_words(result.knobs) + chained),
        ("requests", f"{figures.requests:,} in {ttl_words(figures.seconds)}"),
        ("hit ratio", f"{_percent(figures.hit_ratio)} ({tiers}); of bytes {_percent(figures.byte_hit_ratio)}"),
        ("latency", f"P50 {seconds(figures.p50)}, P99 {seconds(figures.p99)}{exactly}; worst window {worst}"),
        ("evictions", f"{figures.evictions:,}"),
        ("expirations", f"{figures.expirations:,}"),
        ("stale hits", f"{figures.stale_hits:,.1f} expected"),
        ("refreshes", f"{figures.refreshes:,}"),
        ("upstream", f"{figures.input_tokens:,} prompt and {figures.output_tokens:,} completion tokens"),
        ("resident", f"{size_words(figures.resident_bytes)} at the end, {size_words(figures.most_resident_bytes)} at most"),
        ("model", model_words(result.config.upstream, result.load)),
    ]  # fmt: skip
    out.print(_facts_table(rows))
    out.print(_cost_table(figures), highlight=False)
    _print_warnings(result.warnings, out)
    out.print(
        f"{len(result.rows):,} windows of {ttl_words(result.window)} (--json has each); "
        f"{figures.requests / max(result.run_seconds, 1e-9):,.0f} requests a second, reading (at first compiling) included",
        style="dim", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _cost_table(figures: Totals) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("cost")
    table.add_column("USD per 1,000 requests", justify="right")
    for term, amount in figures.cost.to_dict().items():
        table.add_row(term, usd(amount), style="bold" if term == "total" else "")
    return table


def print_advice(advice: Advice, out: Console) -> None:
    """Show what to do with the cache, and why; the verdict comes last, where it is seen."""
    facts = advice.facts
    out.print(
        _facts_table(
            [
                ("trace", facts.name),
                ("note", facts.note or "-"),
                (
                    "requests",
                    f"{facts.requests:,} in {ttl_words(facts.duration)}; {facts.keys:,} entries, {size_words(facts.footprint)}",
                ),
                ("model", advice.model),
                ("how", advice.method),
            ]
        )
    )
    out.print()
    out.print(_curve_table(advice))
    out.print(_settings_table(advice), highlight=False)
    out.print(_outlook_table(advice), highlight=False)
    _print_warnings(advice.warnings, out)
    style = {"change": "bold green", "use": "bold green", "keep": "bold"}.get(advice.verdict, "bold yellow")
    out.print(advice.verdict, style=style, end=": ")
    out.print(advice.reason, markup=False, highlight=False, soft_wrap=True)


def _curve_table(advice: Advice) -> Table:
    grid = advice.grid
    table = Table(box=None, pad_edge=False, title="hit ratio by size and TTL, whole trace", title_justify="left")
    table.add_column("")
    for ttl in grid.ttls:
        table.add_column(ttl_words(float(ttl)), justify="right")
    marks = {advice.recommended.knobs: "bold green", **({advice.current.knobs: "bold yellow"} if advice.current else {})}
    for size, row in zip(grid.sizes, grid.hit_ratio, strict=True):
        cells = []
        for ttl, ratio in zip(grid.ttls, row, strict=True):
            style = marks.get(replace(advice.recommended.knobs, cache_size=int(size), ttl=float(ttl)))
            cells.append(f"[{style}]{ratio:.1%}[/]" if style else f"{ratio:.1%}")
        table.add_row(size_words(int(size)), *cells)
    return table


def _settings_table(advice: Advice) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title="USD per 1,000 requests; hits and P99 held out; saved: by the recommendation, against each",
        title_justify="left",
    )
    for name in ("", "size, ttl", "hits", "P99", "chosen on", "held out", "whole", "saved"):
        table.add_column(name, justify="left" if name in ("", "size, ttl") else "right")
    rows: dict[str, Outcome] = {"recommended": advice.recommended, **advice.compared}
    for name, outcome in rows.items():
        late = outcome.totals(advice.prices, advice.held_out)
        saved = "" if outcome is advice.recommended else _percent(advice.saving(outcome).share)
        table.add_row(
            name,
            _short(outcome.knobs),
            _percent(late.hit_ratio),
            seconds(late.p99),
            usd(outcome.cost(advice.prices, advice.chosen_on)),
            usd(late.cost.total),
            usd(outcome.cost(advice.prices)),
            saved,
        )
    return table


def _outlook_table(advice: Advice) -> Table:
    """One row for each price: the choice and what it saves with the price halved, and doubled."""
    table = Table(box=None, pad_edge=False, title="the cheapest setting if one price were another", title_justify="left")
    for name in ("", "halved", "saves", "doubled", "saves"):
        table.add_column(name, justify="right" if name == "saves" else "left")
    rows: dict[str, list[str]] = {}
    for move in advice.outlook.moved:
        same = move.outcome.knobs == advice.recommended.knobs
        setting = "the same" if same else f"[bold]{_short(move.outcome.knobs)}[/]"
        rows.setdefault(MOVED[move.price], []).extend([setting, _percent(move.outcome.saving)])
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _short(knobs: Knobs) -> str:
    if not knobs.cache_size:
        return "no cache"
    warm = f", warm {knobs.warmup_ratio:.0%}" if knobs.warmup_ratio else ""
    return f"{size_words(knobs.cache_size)}, {ttl_words(knobs.ttl)}{warm}"


def _print_warnings(warnings: Sequence[str], out: Console) -> None:
    for text in warnings:
        out.print("note:", style="yellow", end=" ")
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def _percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "-"
