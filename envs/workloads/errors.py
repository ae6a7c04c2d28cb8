"""What is raised for a trace that cannot be read, and for arguments out of their range."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """A trace cannot be read.

    Args:
        path: The file.
        expected: What was expected there, and what to do.
        line: Number of the line (of the record in a binary file), from 1; None where it is about the whole file.
        excerpt: What stood there instead.
        unit: What ``line`` counts: ``line`` or ``record``.
    """

    def __init__(
        self, path: Path | str, expected: str, *, line: int | None = None, excerpt: str = "", unit: str = "line"
    ) -> None:
        self.path = Path(path)
        self.expected = expected
        self.line = line
        self.excerpt = excerpt if len(excerpt) <= 120 else excerpt[:117] + "..."
        self.unit = unit
        where = f"{path}, {unit} {line}" if line is not None else f"{path}"
        got = f"; got {self.excerpt!r}" if self.excerpt else ""
        super().__init__(f"trace {where}: expected {expected}{got}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the arguments: an error crosses processes with all that it says."""
        return _again, (self.path, self.expected, self.line, self.excerpt, self.unit)


def _again(path: Path, expected: str, line: int | None, excerpt: str, unit: str) -> TraceError:
    return TraceError(path, expected, line=line, excerpt=excerpt, unit=unit)


def require(what: str, *checks: tuple[str, Any, str, bool]) -> None:
    """Refuse arguments that are out of range.

    Args:
        what: What they are arguments of, for the text.
        checks: Name, value, what was expected, and whether it is so.

    Raises:
        ValueError: With the first that is not.
    """
    for name, value, expected, good in checks:
        if not good:
            raise ValueError(f"{what}: {name}: expected {expected}, got {value!r}")
