"""What a benchmark reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BenchResult:
    """One benchmark: what was measured, beside whom, and how to measure it again.

    Attributes:
        name: Short name.
        rows: What was measured, one row per contestant and setting; column name -> value.
        ratio: Us over the peer, in the direction in which more is better; None where no peer ran.
        command: The command that reproduces it.
        note: What the numbers are and are not; which goal they are held to.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    ratio: float | None
    command: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; numbers that are not finite become None."""
        return {
            "name": self.name,
            "rows": [{column: _finite(value) for column, value in row.items()} for row in self.rows],
            "ratio": _finite(self.ratio),
            "command": self.command,
            "note": self.note,
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
