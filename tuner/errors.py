"""Faults of commands that have no better home."""

from __future__ import annotations


class CommandError(RuntimeError):
    """A command cannot do what was asked; says why, and what to do."""
