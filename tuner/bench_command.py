"""`cachepilot bench`: which benchmarks there are, and how their results are shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.bench.result import BenchResult
from tuner.errors import CommandError

NAMES = (
    "http", "gateway", "sim", "ghost", "decision", "ppo-update", "fidelity", "fidelity-live", "semantic-errors",
    "semantic-lookup", "memory",
)  # fmt: skip
FIDELITY_TRACE = "mooncake_conversation.jsonl.gz"
LIVE_TRACE = "elastic_apache.csv.gz"
QUESTIONS = "banking77.csv.gz"


def run_benchmarks(which: str, *, traces: Path | None, seconds: float, say: Callable[[str], None]) -> list[BenchResult]:
    """Run one benchmark or all.

    Args:
        which: One of :data:`NAMES`, or ``all``.
        traces: Folder of the real traces; None: ``CACHEPILOT_TRACES``, else ``../shared/traces``.
        seconds: Length of each HTTP measurement.
        say: Prints a line about what goes on.

    Raises:
        CommandError: If there is no such benchmark.
    """
    if which not in (*NAMES, "all"):
        raise CommandError(f"bench: {which!r}: expected one of {', '.join(NAMES)}, all")
    results = []
    for name in NAMES if which == "all" else (which,):
        say(f"bench {name} ...")
        results += _run(name, traces or Path(os.environ.get("CACHEPILOT_TRACES", "../shared/traces")), seconds, say)
    return results


def _run(name: str, traces: Path, seconds: float, say: Callable[[str], None]) -> list[BenchResult]:
    if name == "http":
        from experiments.bench import http

        return [http.run(seconds)]
    if name == "gateway":
        from experiments.bench import gateway

        return [gateway.run(gateway.Scale(seconds=seconds), say=say)]
    if name == "sim":
        from experiments.bench import environment, sim

        return [sim.run(mooncake=traces / FIDELITY_TRACE, say=say), environment.run()]
    if name == "ghost":
        from experiments.bench import ghost

        return [ghost.run(traces)]
    if name == "decision":
        from experiments.bench import decision

        return [decision.run()]
    if name == "ppo-update":
        from experiments.bench import ppo_update

        return [ppo_update.run()]
    if name == "semantic-errors":
        from experiments.bench import semantic_errors

        return [semantic_errors.run(traces / QUESTIONS, say=say)]
    if name == "semantic-lookup":
        from experiments.bench import semantic_lookup

        return [semantic_lookup.run(traces / QUESTIONS, say=say)]
    if name == "memory":
        from experiments.bench import memory

        return memory.run(traces, say=say)
    from experiments.bench import fidelity

    if name == "fidelity":
        return [fidelity.run(traces / FIDELITY_TRACE)]
    return [fidelity.run_live(traces / LIVE_TRACE, say=say)]


def tables(results: Sequence[BenchResult]) -> Iterator[Table]:
    """Return each result as a table with its note, ratio and command beneath."""
    for result in results:
        ratio = "" if result.ratio is None else f"ratio {result.ratio:.2f}. "
        table = Table(
            title=f"bench {result.name}", title_justify="left", caption=escape(f"{ratio}{result.note}\n{result.command}")
        )
        columns = list(dict.fromkeys(column for row in result.rows for column in row))
        for column in columns:
            table.add_column(column, justify="left" if isinstance(result.rows[0].get(column), str) else "right")
        for row in result.rows:
            table.add_row(*(_shown(row.get(column)) for column in columns))
        yield table


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return escape(str(value)) if not isinstance(value, int) else f"{value:,}"
