"""Tables in files and pipes, which have no window that they would have to fit into."""

from __future__ import annotations

from rich.console import Console

WIDTH = 150
"""Columns of text that the widest tables need."""


def widen(out: Console) -> None:
    """Give a console that is no terminal the room that tables need."""
    if not out.is_terminal:
        out.width = max(out.width, WIDTH)
