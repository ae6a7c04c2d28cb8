"""What every reader makes of its file: batches of columns in the order of the file, and what to do with a bad line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from envs.workloads.errors import TraceError
from envs.workloads.lines import Source, split_lines
from envs.workloads.trace import MOST_BYTES

Row = TypeVar("Row")
Column = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Batch = dict[str, Column]
"""Columns of :data:`COLUMNS`, all of equal length; ``time`` on the file's own axis, in seconds."""

COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "time": (np.float64, 0),
    "line": (np.int64, 0),
    "key": (np.uint64, 0),
    "size": (np.int64, 0),
    "group": (np.int64, -1),
    "input_tokens": (np.int32, 0),
    "output_tokens": (np.int32, 0),
    "tenant": (np.int32, 0),
    "document": (np.int64, -1),
    "chain": (np.int32, 0),
    "reference": (np.int64, -1),
}
"""Type of each column and what stands in it where a format does not say. ``reference`` names a row's text to its reader."""

MOST_TOKENS = 2**31 - 1
"""A trace keeps tokens as 32-bit numbers."""

LATEST = 1e11
"""Largest time that is taken for one, seconds: the year 5138 since the epoch."""

KEPT_ERRORS = 5
"""Of the bad lines that are skipped, so many are kept to be shown."""


class Reader(Protocol):
    """One format, reading one file."""

    @property
    def note(self) -> str:
        """One sentence on what the trace is and is not."""
        ...

    @property
    def tenants(self) -> list[str]:
        """Names of the tenants by number, as far as they were met; empty where the format has none."""
        ...

    def batches(self) -> Iterator[Batch]:
        """Yield the file's requests in its own order.

        Raises:
            TraceError: At a line that is not what the format says, unless bad lines are skipped.
        """
        ...


@runtime_checkable
class Texts(Protocol):
    """A reader whose requests have texts."""

    def prompts(self, reference: npt.NDArray[np.int64]) -> tuple[Sequence[str], npt.NDArray[np.int64]]:
        """Return the texts, and for each row's ``reference`` its place among them."""
        ...


@dataclass
class Input:
    """A file that is being read, and how.

    Attributes:
        source: The file.
        skip_bad_lines: Whether a bad line is counted and left out instead of raised.
        columns: Column map of the generic formats.
        seed: Of what a format has to draw.
        rate_scale: Factor on the rates of a format that has rates instead of requests.
        skipped: Bad lines left out so far.
        first_skipped: The first few of them.
    """

    source: Source
    skip_bad_lines: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    rate_scale: float = 1.0
    skipped: int = 0
    first_skipped: list[TraceError] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.source.path

    def reject(self, error: TraceError) -> None:
        """Raise the error of a bad line, or count it where bad lines are skipped."""
        if not self.skip_bad_lines:
            raise error
        self.skipped += 1
        if len(self.first_skipped) < KEPT_ERRORS:
            self.first_skipped.append(error)

    def error(self, expected: str, line: int | None, excerpt: object = "") -> TraceError:
        """Return the error that something else was expected in a line of this file."""
        return TraceError(self.path, expected, line=None if line is None else int(line), excerpt=str(excerpt).strip())

    def rows(self, parse: Callable[[int, bytes], Row | None]) -> Iterator[list[Row]]:
        """Yield what the lines of each block of the file hold; blocks that hold nothing are left out.

        Args:
            parse: Makes a row of a line's number and bytes, None of a line without one; raises TraceError for a bad line.

        Raises:
            TraceError: For the first bad line, after the rows before it, unless bad lines are skipped.
        """
        for first, block in self.source.blocks():
            rows: list[Row] = []
            failed: TraceError | None = None
            for number, line in enumerate(split_lines(block), start=first):
                try:
                    if (row := parse(number, line)) is not None:
                        rows.append(row)
                except TraceError as error:
                    try:
                        self.reject(error)
                    except TraceError as raised:
                        failed = raised
                        break
            if rows:
                yield rows
            if failed is not None:
                raise failed


class Verdict:
    """Which rows of a batch are what the format says, with the reason of the first rule that each broke.

    Args:
        count: Rows.
    """

    def __init__(self, count: int) -> None:
        self.good = np.ones(count, np.bool_)
        self._reasons: list[tuple[Mask, Callable[[int], TraceError]]] = []

    def require(self, good: Mask, error: Callable[[int], TraceError]) -> None:
        """Let every row pass for which ``good`` is true; ``error`` makes the error of a row that is not."""
        if not good.all():
            self._reasons.append((self.good & ~good, error))
            self.good &= good

    def error(self, row: int) -> TraceError:
        """Return the error of a bad row."""
        return next(error(row) for bad, error in self._reasons if bad[row])

    def reject(self, given: Input) -> None:
        """Reject the bad rows.

        Raises:
            TraceError: For the first, unless bad lines are skipped.
        """
        bad = np.flatnonzero(~self.good)
        for row in bad[:KEPT_ERRORS]:
            given.reject(self.error(int(row)))
        given.skipped += max(0, len(bad) - KEPT_ERRORS)

    def usable(self, given: Input) -> Mask:
        """Return which rows to hand on: the good ones, and unless bad lines are skipped only those before the first bad one."""
        if given.skip_bad_lines or self.good.all():
            return self.good
        return np.arange(len(self.good)) < int(np.argmin(self.good))

    def sift(self, given: Input, batch: Batch, kept: Mask | None = None) -> Iterator[Batch]:
        """Yield the usable rows (of those that are ``kept``) and reject the bad ones.

        Raises:
            TraceError: For the first bad row, after the rows before it, unless bad lines are skipped.
        """
        rows = self.usable(given) if kept is None else self.usable(given) & kept
        yield batch if rows.all() else take(batch, rows)
        self.reject(given)


def make_batch(**columns: npt.ArrayLike) -> Batch:
    """Return a batch of the given columns; what is not given is what :data:`COLUMNS` says of it."""
    count = len(np.asarray(columns["time"]))
    return {
        name: np.ascontiguousarray(columns[name], dtype=kind) if name in columns else np.full(count, absent, kind)
        for name, (kind, absent) in COLUMNS.items()
    }


def take(batch: Batch, rows: npt.NDArray[Any] | slice) -> Batch:
    """Return the rows of a batch at ``rows``: indices, a mask or a slice."""
    return {name: column[rows] for name, column in batch.items()}


def join(batches: Sequence[Batch]) -> Batch:
    """Return batches one after the other as one; at least one."""
    if len(batches) == 1:
        return batches[0]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in COLUMNS}


def good_sizes(size: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> Mask:
    """Tell which sizes (bytes, NaN where there is none) a trace can hold; a size of 0 is good and left out later."""
    return (size >= 0) & (size <= MOST_BYTES)


SIZE_EXPECTED = "a size from 0 to below 2 GiB, in bytes"
