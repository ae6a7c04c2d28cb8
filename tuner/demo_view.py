"""How a demo run is shown: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from agents.words import size_words, ttl_words
from experiments.replay import ReplayedRequest
from serving.knobs import Knobs
from tuner.demo_plan import DemoPlan
from tuner.loop import Interval

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 10


def knobs_text(knobs: Knobs) -> str:
    """Return knobs in words: size, TTL, warm-up."""
    return f"{size_words(knobs.cache_size)} · {ttl_words(knobs.ttl)} · {knobs.warmup_ratio:.0%}"


def sparkline(values: list[float]) -> str:
    """Return values as a row of bars between their least and greatest; a dot where one is missing."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] if math.isfinite(value) else "·" for value in values)


class LiveView:
    """Redraws one screen area on a terminal.

    Args:
        console: Where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None)
        self._turn: Interval | None = None
        self._history: dict[str, dict[str, deque[float]]] = {}
        self._note = ""
        self._policy = ""
        self._requests = 0
        self._answered = 0
        self._failed = 0
        # Last: it draws at once.
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def stage(self, text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=text, total=None)

    def planned(self, planned: DemoPlan, policy: str) -> None:
        """Show the workload and begin the progress bar."""
        self._note, self._policy, self._requests = planned.note, policy, len(planned.trace)
        self._progress.reset(self._task, description="traffic", total=planned.seconds)

    def interval(self, turn: Interval) -> None:
        """Show a turn of the tuner."""
        self._turn = turn
        for arm, step in turn.arms.items():
            history = self._history.setdefault(arm, {name: deque(maxlen=_HISTORY) for name in ("hit", "p99", "cost")})
            history["hit"].append(step.signals.hit_ratio)
            history["p99"].append(step.signals.p99)
            history["cost"].append(step.cost.total)

    def answered(self, request: ReplayedRequest, seconds: float) -> None:
        """Show how far the traffic is."""
        self._answered += 1
        self._failed += not 200 <= request.status < 300
        self._progress.update(self._task, completed=seconds)

    def _draw(self) -> Group:
        parts: list[Any] = []
        if self._note:
            parts.append(Text(self._note, style="dim"))
        if self._turn is not None:
            parts.append(self._table(self._turn))
            parts.append(self._decision(self._turn))
        parts.append(self._progress)
        if self._requests:
            parts.append(Text(f"{self._answered:,} of {self._requests:,} requests answered, {self._failed} failed", style="dim"))
        return Group(*parts)

    def _table(self, turn: Interval) -> Table:
        # Two lines a cell, so that nothing is cut at 80 columns.
        table = Table(
            title=f"interval {turn.index}, knobs version {turn.state.version}",
            title_justify="left",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for heading in ("arm", "hit ratio", "P99", "cost / 1,000", "size · TTL · warm-up"):
            table.add_column(heading, no_wrap=True)
        for arm, step in turn.arms.items():
            history = self._history[arm]
            table.add_row(
                f"{arm}\n{self._policy if step.verdict is not None else 'static LRU'}",
                f"{shown(step.signals.hit_ratio, '{:.1%}')}\n{sparkline(list(history['hit']))}",
                f"{shown(step.signals.p99, '{:.2f} s')}\n{sparkline(list(history['p99']))}",
                f"{shown(step.cost.total, '${:.3f}')}\n{sparkline(list(history['cost']))}",
                knobs_text(turn.state.arms[arm]),
            )
        return table

    def _decision(self, turn: Interval) -> Text:
        lines = [step.verdict.reason for step in turn.arms.values() if step.verdict is not None]
        confirmed = f"{turn.confirmed} of {turn.expected} replicas confirm" if turn.expected else ""
        text = Text(" · ".join(filter(None, [*lines, confirmed])), style="cyan")
        if turn.fault:
            text.append(f"\n{turn.fault}", style="red")
        return text


class PlainView:
    """Prints a line per event, for logs and pipes.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return

    def stage(self, text: str) -> None:
        """Print what is being done."""
        self._say(text)

    def planned(self, planned: DemoPlan, policy: str) -> None:
        """Print the workload."""
        self._say(planned.note)
        self._say(f"static LRU: {knobs_text(planned.static)}; tuned by {policy}")

    def interval(self, turn: Interval) -> None:
        """Print a turn of the tuner."""
        arms = "; ".join(
            f"{arm} hits {shown(step.signals.hit_ratio, '{:.1%}')} P99 {shown(step.signals.p99, '{:.2f} s')} "
            f"cost {shown(step.cost.total, '${:.3f}')} [{knobs_text(turn.state.arms[arm])}]"
            for arm, step in turn.arms.items()
        )
        self._say(f"{turn.index:3d} v{turn.state.version}: {arms}{'; ' + turn.fault if turn.fault else ''}")

    def answered(self, request: ReplayedRequest, seconds: float) -> None:
        """Print nothing: the turns say enough."""

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def summary_panel(summary: Mapping[str, Any]) -> Panel:
    """Return the end of a run in a box: figures by arm, verdict, where the report is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for arm in summary["arms"]:
        table.add_column(arm, no_wrap=True)
    arms = list(summary["arms"].values())
    table.add_row("requests", *(f"{figures['requests']:,}" for figures in arms))
    for name, key, form in (
        ("hit ratio", "hit_ratio", "{:.1%}"),
        ("P99", "p99", "{:.2f} s"),
        ("cost / 1,000", "cost", "${:.3f}"),
    ):
        table.add_row(name, *(_with_interval(figures[key], form) for figures in arms))
    last = [figures["knobs_last"] for figures in arms]
    table.add_row("knobs at the end", *(knobs_text(Knobs.from_dict(knobs)) if knobs else "" for knobs in last))
    lines = [Text(f"{summary['verdict']}: {summary['reason']}", style="bold")]
    unsent = summary["replay"].get("planned", 0) - summary["replay"].get("sent", 0)
    if unsent > 0:
        why = (
            "the time was up (a busy or slow machine sends fewer: --minutes gives it longer)"
            if summary["complete"]
            else "interrupted"
        )
        lines.append(Text(f"{unsent:,} of {summary['replay']['planned']:,} requests were not sent: {why}", style="yellow"))
    if not summary.get("complete", True):
        lines.append(Text("interrupted: the report is of what was seen until then", style="yellow"))
    title = "cachepilot demo" if summary.get("complete", True) else "cachepilot demo (partial)"
    return Panel(Group(table, Text(""), *lines), title=title, title_align="left")


def shown(value: float | None, form: str) -> str:
    """Return a number in a format, ``-`` where it is missing."""
    return "-" if value is None or not math.isfinite(value) else form.format(value)


def _with_interval(figure: Mapping[str, Any], form: str) -> str:
    value, low, high = figure.get("value"), figure.get("low"), figure.get("high")
    if low is None or high is None:
        return shown(value, form)
    return f"{shown(value, form)} ({shown(low, form)} to {shown(high, form)})"
