"""`cachepilot soak`: the gateway for minutes with everything around it failing, every answer checked."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def soak(
    minutes: Annotated[float, typer.Option(help="for how long clients ask", min=0.1, max=1440.0)] = 10.0,
    clients: Annotated[int, typer.Option(help="clients that ask at the same time", min=1)] = 16,
    failure_rate: Annotated[float, typer.Option(help="share of the model's calls that fail", min=0.0, max=1.0)] = 0.1,
    seed: Annotated[int, typer.Option(help="of questions and faults", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write everything to this file, as JSON", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Ask the gateway on Ray Serve for minutes while Redis is killed, the embedder hangs and the model fails; check every answer.

    Everything runs on loopback and ends with it. Exit code 1 if an answer was wrong, an error the gateway's, or something leaked.
    """
    from agents.output_file import write_output
    from experiments.soak.run import SoakOptions, run
    from tuner.outputs import refuse_unwritable

    refuse_unwritable("--output", output)
    out, err = Console(), Console(stderr=True)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    options = SoakOptions(seconds=60.0 * minutes, clients=clients, failure_rate=failure_rate, seed=seed, command=command)
    report = run(options, say=lambda text: err.print(text, markup=False, highlight=False, soft_wrap=True))
    text = json.dumps(report.to_dict(), indent=2, allow_nan=False)
    if as_json:
        sys.stdout.write(text + "\n")
    else:
        table = Table(title="soak", title_justify="left", caption=escape(command))
        for heading, justify in (("", "left"), ("seen", "right"), ("allowed", "right")):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        for row in report.rows():
            table.add_row(*(escape(cell) for cell in row))
        out.print(table)
    if output is not None:
        # Last: should it fail, the findings were shown.
        write_output(output, text + "\n")
    if not report.passed:
        raise typer.Exit(1)
