"""Outputs that were asked for are looked at before the work, which may take long."""

from __future__ import annotations

from pathlib import Path

from agents.output_file import unwritable
from experiments.units import InputError


def refuse_unwritable(name: str, path: Path | None) -> None:
    """Refuse a file that cannot be written.

    Args:
        name: The option that names it.
        path: The file; None for none.

    Raises:
        InputError: If it cannot be written, as far as that can be told without writing.
    """
    if path is not None and (what := unwritable(path)):
        raise InputError(f"{name} {str(path)!r}: expected a file that can be written, but {what}: name another")
