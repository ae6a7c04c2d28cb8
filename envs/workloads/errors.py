"""What is raised for a trace that cannot be read."""

from __future__ import annotations

from pathlib import Path


class TraceError(ValueError):
    """A trace cannot be read.

    Args:
        path: The file.
        expected: What was expected there, and what to do.
        line: Number of the line, from 1; None where it is about the whole file.
        excerpt: What stood there instead.
    """

    def __init__(self, path: Path | str, expected: str, *, line: int | None = None, excerpt: str = "") -> None:
        self.path = Path(path)
        self.expected = expected
        self.line = line
        self.excerpt = excerpt if len(excerpt) <= 120 else excerpt[:117] + "..."
        where = f"{path}, line {line}" if line is not None else f"{path}"
        got = f"; got {self.excerpt!r}" if self.excerpt else ""
        super().__init__(f"trace {where}: expected {expected}{got}")
