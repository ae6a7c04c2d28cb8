"""`cachepilot evaluate`: rows of policies on held-out cases, as one table, JSON, and one page."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from agents.output_file import OutputError, write_output
from experiments.units import InputError
from tuner.errors import CommandError
from tuner.outputs import refuse_unwritable
from tuner.pipes import WIDTH, widen

TRACES = "CACHEPILOT_TRACES"

FIRST_BEAT = 5.0
"""Seconds without a word after which an evaluation says that it still works; each time after twice as many."""
LONGEST_BEAT = 60.0

_COLUMNS = (
    "row", "seeds", "IQM", "95 % interval", "mean", "P(better)", "worst case", "of best static", "of mid-grid", "gap closed",
    "hits",
)  # fmt: skip
_NARROW = ("row", "IQM", "95 % interval", "worst case", "of best static")


def evaluate(
    rows: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROWS...",
            help="rows of the configuration by label, policies by name, or label=source; 'ppo=policies/suites-seed*' is one row "
            "of several training seeds. Default: all rows of the configuration",
            show_default=False,
        ),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help=f"folder of the real traces; default: ${TRACES}", show_default=False)
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option("--suite", help="all, steady, non-stationary, a family or a case; repeatable", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="rows and suites (YAML); default: experiments/configs/evaluation.yaml")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the page to this file")] = None,
    results: Annotated[
        Path | None, typer.Option(help="write everything that was measured to this file; .gz packs it", show_default=False)
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="run nothing: show the results in this file", show_default=False)
    ] = None,
    case: Annotated[str | None, typer.Option(help="the case whose knobs the page draws", show_default=False)] = None,
    jobs: Annotated[int, typer.Option(help="processes that share the cases; the results do not depend on it", min=1)] = 1,
    seed: Annotated[int | None, typer.Option(help="of the ghosts' samples and of the intervals", min=0)] = None,
    length: Annotated[int | None, typer.Option(help="most intervals of a case; default: all", min=1, show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Judge policies on held-out cases: against the smoothed curve, static settings and bounds, whoever wins."""
    from experiments.evaluate import EvaluationError
    from experiments.evaluate_page import build_page
    from experiments.evaluation_results import load_results

    out, err = Console(), Console(stderr=True)
    for name, path in (("--output", output), ("--results", results)):
        refuse_unwritable(name, path)
    if output is not None and results is not None and output.resolve() == results.resolve():
        raise InputError(f"--output, --results: expected two files, got {str(output)!r} for both: one would overwrite the other")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if source is not None:
        if rows or traces or suite or config or seed is not None or length is not None:
            raise InputError("--from: expected no rows, --traces, --suite, --config, --seed or --length with it: nothing is run")
        found = load_results(source)
        if case is not None and case not in (names := [item.name for item in found.cases]):
            raise InputError(f"case {case!r}: expected one of {', '.join(names)}")
    else:
        try:
            found = _run(rows or [], traces, suite, config, jobs, seed, length, command, case, err)
        except EvaluationError as error:
            raise CommandError(f"evaluate: {error}") from error
    # The results before the page: should that fail, what was measured is kept, and --from makes a page of it.
    written: dict[str, Path | None] = {"page": None, "results": None}
    faults: list[OutputError] = []
    if results is not None:
        with _noted(faults):
            found.save(results)
            written["results"] = results
    if output is not None:
        with _noted(faults):
            write_output(output, build_page(found, case=case, command=command))
            written["page"] = output
    _tell(found, written, as_json, out)
    if faults:
        raise CommandError("; ".join(map(str, faults)))


@contextmanager
def _noted(faults: list[OutputError]) -> Iterator[None]:
    """Note that a file cannot be written, and go on: what took long to measure is shown all the same."""
    try:
        yield
    except OutputError as error:
        faults.append(error)


def _tell(found: Any, written: Mapping[str, Path | None], as_json: bool, out: Console) -> None:
    """Show what results say, and where the files are that were written."""
    if as_json:
        told = {name: None if path is None else str(path.resolve()) for name, path in written.items()}
        sys.stdout.write(json.dumps({**report(found), **told}, indent=2, allow_nan=False) + "\n")
        return
    widen(out)
    for table in tables(found, narrow=out.width < WIDTH):
        out.print(table)
    for words in found.left_out:
        out.print(f"left out: {words}", markup=False, highlight=False, soft_wrap=True)
    for name, path in written.items():
        if path is not None:
            out.print(f"{name}: {path}", markup=False, highlight=False, soft_wrap=True)


def report(found: Any) -> dict[str, Any]:
    """Return what results say, JSON-ready.

    Args:
        found: An :class:`experiments.evaluation_results.Results`.
    """
    from experiments.evaluation_summary import BASIS, learned_label, summarise
    from experiments.evaluation_targets import judge

    summaries = summarise(found)
    return {
        "command": found.command,
        "reference": found.settings.roles.reference,
        "learned": learned_label(found),
        "basis": BASIS,
        "left_out": found.left_out,
        "targets": [verdict.to_dict() for verdict in judge(found, summaries)],
        "suites": [summary.to_dict() for summary in summaries],
        "recoveries": [
            {**item.model_dump(exclude={"curve"}), "relative": item.relative} for item in found.recoveries if item.best_static > 0
        ],
        "decision_seconds": found.decision_seconds,
        "versions": found.versions,
    }


def tables(found: Any, *, narrow: bool = False) -> Iterator[Table]:
    """Return a table for each suite, and one of the targets.

    Args:
        found: An :class:`experiments.evaluation_results.Results`.
        narrow: Whether only the columns are shown that fit into a window of 80 columns.
    """
    from experiments.evaluate_page import row_line
    from experiments.evaluation_summary import learned_label, summarise
    from experiments.evaluation_targets import judge

    summaries, label = summarise(found), learned_label(found)
    for summary in summaries:
        table = Table(
            title=f"{summary.name}: {len(summary.cases)} cases; cost over {found.settings.roles.reference}'s on the same requests"
        )
        shown = [column in _NARROW or not narrow for column in _COLUMNS]
        for column in compress(_COLUMNS, shown):
            table.add_column(column, justify="left" if column in ("row", "worst case") else "right", overflow="fold")
        for row in summary.rows:
            table.add_row(*map(escape, compress(row_line(row), shown)), style="bold" if row.row.label == label else "")
        yield table
    table = Table(title=f"targets, about {label or 'no row: none was learned'}")
    for column in ("target", "threshold", "measured", "interval", "", "of what"):
        table.add_column(column, overflow="fold")
    inks = {"met": "green", "missed": "red", "not measured": "dim"}
    for verdict in judge(found, summaries):
        value = verdict.value
        known = verdict.state != "not measured"
        table.add_row(
            escape(verdict.target.words),
            f"{'>=' if verdict.target.at_least else '<='} {verdict.target.limit:g}",
            f"{value.value:.4f}" if known else "-",
            f"{value.low:.4f} to {value.high:.4f}" if value.known else "",
            f"[{inks[verdict.state]}]{verdict.state}[/]",
            escape(verdict.detail),
        )
    yield table


def _run(
    rows: Sequence[str],
    traces: Path | None,
    suite: Sequence[str] | None,
    config: Path | None,
    jobs: int,
    seed: int | None,
    length: int | None,
    command: str,
    case: str | None,
    err: Console,
) -> Any:
    from experiments.evaluate import evaluate as run
    from experiments.evaluation_rows import CONFIG, chosen_rows, load_evaluation_settings, resolve_rows
    from experiments.suites import held_out

    settings = chosen_rows(load_evaluation_settings(config or CONFIG), rows)
    given = {"suites": tuple(suite) if suite else None, "seed": seed, "length": length}
    settings = settings.model_copy(update={name: value for name, value in given.items() if value is not None})
    resolve_rows(settings)  # what is wrong with a row is told before the traces are read
    folder = traces or (Path(os.environ[TRACES]) if os.environ.get(TRACES) else None)
    if folder is None:
        raise InputError(f"traces: expected the folder of the real traces: give it as --traces, or set {TRACES}")
    if not folder.is_dir():
        raise InputError(f"traces {folder}: expected the folder of the real traces: give it as --traces, or set {TRACES}")
    options = "".join(
        [
            *(f" --suite {shlex.quote(name)}" for name in suite or ()),
            f" --config {shlex.quote(str(config))}" if config is not None else "",
            f" --length {length}" if length is not None else "",
        ]
    )
    with _progress(err) as (told, within):
        return run(
            settings, partial(held_out, folder), jobs=jobs, command=command, options=options, drawn=case, progress=told,
            within=within if err.is_terminal else None,
        )  # fmt: skip


@contextmanager
def _progress(console: Console) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str, float, int], None]]]:
    """Show a bar on a terminal; elsewhere a line for each case, and now and then one that says that it still works.

    A case may take minutes: the bar goes on within it. Gives what is told of each case that is done, and of the share of one
    that is not.
    """
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}/{task.total:.0f} cases"),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[case]}"), console=console, transient=True,
    )  # fmt: skip
    began, over, so_far = time.monotonic(), threading.Event(), ["none of the cases is done yet"]

    def say(text: str) -> None:
        if not console.is_terminal:
            console.print(text, markup=False, highlight=False)

    def beat() -> None:
        wait = FIRST_BEAT
        while not over.wait(wait):
            say(f"evaluating for {time.monotonic() - began:,.0f} s: {so_far[0]}")
            wait = min(2 * wait, LONGEST_BEAT)

    with bar:
        task = bar.add_task("evaluating", total=1, done=0, case="reading the traces")
        finished: set[str] = set()
        shares: dict[str, float] = {}

        def told(case: str, done: int, total: int) -> None:
            finished.add(case)
            shares.pop(case, None)
            bar.update(task, completed=done + sum(shares.values()), total=total, done=done, case=f"{case} is done")
            so_far[0] = f"{done} of {total} cases are done"
            say(f"evaluated {case}: {done} of {total} cases")

        def within(case: str, share: float, total: int) -> None:
            if case not in finished:
                shares[case] = share
                running = ", ".join(f"{name} {part:.0%}" for name, part in sorted(shares.items()))
                bar.update(task, completed=len(finished) + sum(shares.values()), total=total, case=running)

        beating = threading.Thread(target=beat, name="evaluate-progress", daemon=True)
        beating.start()
        try:
            yield told, within
        finally:
            over.set()
            beating.join()
