"""`cachepilot policy ...`: look at a trained policy, and take it elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from tuner.errors import CommandError

policy_app = typer.Typer(help="Trained policies: their cards, and export to other runtimes.", no_args_is_help=True)

out = Console()
err = Console(stderr=True)

PolicyArgument = Annotated[
    str, typer.Argument(metavar="DIR|NAME", help="directory of a trained policy, or a shipped one's name; ppo: the default")
]


@policy_app.command("show")
def show(
    policy: PolicyArgument = "ppo",
    as_json: Annotated[bool, typer.Option("--json", help="print card.json's content")] = False,
) -> None:
    """Check a trained policy in full and print its model card."""
    from agents.artifact import README, load
    from agents.card import readme
    from agents.ppo import artifact_directory

    directory = artifact_directory(policy)
    card = load(directory).card
    if as_json:
        sys.stdout.write(json.dumps(card, indent=1, allow_nan=False) + "\n")
        return
    text = readme(card)
    if out.is_terminal:
        out.print(Markdown(text))
    else:
        sys.stdout.write(text)
    page = directory / README
    if not page.is_file() or page.read_text(encoding="utf-8", errors="replace") != text:
        err.print(
            f"{page}: is not what the card says (missing, edited, or a save was interrupted); what is printed here counts",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


@policy_app.command("export")
def export(
    policy: PolicyArgument,
    onnx: Annotated[Path, typer.Option("--onnx", metavar="FILE", help="write the policy as an ONNX graph")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Write a trained policy for another runtime; what its action means stands in the file's metadata."""
    from agents.artifact import load
    from agents.onnx_export import OPSET, TOLERANCE, ExportError
    from agents.onnx_export import export as write
    from agents.ppo import artifact_directory

    trained = load(artifact_directory(policy))
    try:
        path = write(trained, onnx)
    except ExportError as error:
        raise CommandError(str(error)) from error
    result = {
        "policy": trained.name,
        "kind": trained.network.kind,
        "onnx": str(path),
        "bytes": path.stat().st_size if path.is_file() else None,
        "opset": OPSET,
        "tolerance": TOLERANCE,
    }
    size = "" if result["bytes"] is None else f"{result['bytes']:,} bytes, "
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, allow_nan=False) + "\n")
    else:
        out.print(
            f"{trained.name} ({trained.network.kind}) written to {path}, {size}opset {OPSET}; "
            f"its actions are ours but for {TOLERANCE:g}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
