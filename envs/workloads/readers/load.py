"""A whole trace in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envs.workloads.errors import TraceError
from envs.workloads.lines import Source
from envs.workloads.readers.batch import Input
from envs.workloads.readers.known import KNOWN, find
from envs.workloads.readers.questions import read_questions
from envs.workloads.readers.streaming import RATE_SCALE, TraceStream
from envs.workloads.trace import Trace


def load(
    path: Path | str,
    *,
    limit: int | None = None,
    banking77: Path | str | None = None,
    seed: int = 0,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    skip_bad_lines: bool = False,
    rate_scale: float = RATE_SCALE,
) -> Trace:
    """Read a trace as a whole, with its texts, sorted by time; its format is told by its content.

    Args:
        path: The file. Plain, gzip, zstd, bzip2 or xz.
        limit: Requests to read at most, from the start; None for all.
        banking77: For arrivals of an Azure file: the questions to ask at those times. Without it every arrival is a key of
            its own (the arrivals have no text), so nothing can hit.
        seed: Of what is drawn (the questions, ServeGen's requests).
        format: As of :func:`envs.workloads.readers.streaming.stream`.
        columns: As of :func:`envs.workloads.readers.streaming.stream`.
        skip_bad_lines: Leave bad lines out instead of raising. :func:`envs.workloads.readers.streaming.stream` tells how many.
        rate_scale: As of :func:`envs.workloads.readers.streaming.stream`.

    Raises:
        TraceError: If the file is missing, empty, damaged, of an unknown format, or a line is not what the format says.
        ValueError: If an argument is out of its range.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"load: limit: expected at least 1 request or None for all, got {limit!r}")
    if banking77 is not None:
        _check_arrivals(Path(path), Path(banking77))
        return read_questions(Path(banking77), arrivals=Path(path), limit=limit, seed=seed)
    with TraceStream(
        path,
        format=format,
        columns=columns,
        limit=limit,
        skip_bad_lines=skip_bad_lines,
        lateness=float("inf"),
        seed=seed,
        rate_scale=rate_scale,
    ) as opened:
        return opened.read_all()


def _check_arrivals(path: Path, texts: Path) -> None:
    with Source(path) as source:
        given = Input(source)
        if find(given).format != "azure":
            first = source.head().split(b"\n", 1)[0].decode(errors="replace")
            raise TraceError(
                path, f"{KNOWN['azure']}, to ask the questions of {texts} at its times", line=1, excerpt=first.strip()
            )
