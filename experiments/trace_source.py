"""A trace that a tool reads as often as it has to, in chunks: a file in any known format, or a made workload by its spec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from envs.workloads import Trace, TraceError, load, make, stream
from envs.workloads.catalogue import SCHEME
from experiments.units import InputError

Progress = Callable[[str, float, int], None]
"""Called with what is being done, the share that is done (0..1; NaN where it is unknown), and the requests handled so far."""


def no_progress(phase: str, share: float, requests: int) -> None:
    """Show nothing."""


class Reading(Protocol):
    """One pass over a trace; see ``envs.workloads.stream``."""

    @property
    def name(self) -> str:
        """The trace's name."""

    @property
    def note(self) -> str:
        """What the trace is and is not."""

    @property
    def kind(self) -> str:
        """``exact`` or ``semantic``."""

    @property
    def format(self) -> str:
        """The format's name."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the file."""

    @property
    def bytes_read(self) -> int:
        """Bytes of the file that are read."""

    @property
    def skipped(self) -> int:
        """Bad lines left out so far."""

    @property
    def first_skipped(self) -> Sequence[TraceError]:
        """The first few of them."""

    @property
    def zero_sized(self) -> int:
        """Requests left out so far because their entry has no bytes."""

    def __iter__(self) -> Iterator[Trace]:
        """Yield chunks in order of time, on one time axis."""


@dataclass
class MadeReading:
    """One pass over a made workload, which is there at once."""

    trace: Trace
    format: str = "made"
    total_bytes: int = 1
    bytes_read: int = 0
    skipped: int = 0
    first_skipped: Sequence[TraceError] = ()
    zero_sized: int = 0

    @property
    def name(self) -> str:
        """The trace's name."""
        return self.trace.name

    @property
    def note(self) -> str:
        """What the trace is and is not."""
        return self.trace.note

    @property
    def kind(self) -> str:
        """``exact`` or ``semantic``."""
        return self.trace.kind

    def __iter__(self) -> Iterator[Trace]:
        """Yield the whole."""
        self.bytes_read = self.total_bytes
        if len(self.trace):
            yield self.trace


@dataclass
class TraceSource:
    """Where a trace comes from and how it is read.

    Attributes:
        spec: A file, or ``made:<name>?<option>=<value>&...`` for a made workload (:func:`envs.workloads.make`).
        limit: Requests to read at most, from the start; None for all.
        format: Name of the format; None to tell it by the file's beginning.
        columns: Which column of a CSV or Parquet file is what, for instance ``{"time": "ts"}``; None to tell by the names.
        skip_bad_lines: Whether lines that cannot be read are counted and left out instead of ending the reading.
        chunk: Requests of a chunk, about.
    """

    spec: str
    limit: int | None = None
    format: str | None = None
    columns: Mapping[str, str] | None = None
    skip_bad_lines: bool = False
    chunk: int = 262_144
    _made: Trace | None = field(default=None, repr=False)
    _begun: bool = field(default=False, repr=False)

    def open(self) -> Reading:
        """Begin a pass.

        Raises:
            envs.workloads.TraceError: If the file cannot be read (here or while iterating), or there is no such made workload.
            InputError: If an option is out of its range.
        """
        try:
            if self.spec.startswith(SCHEME):
                return MadeReading(self._make())
            path = Path(self.spec)
            if self._begun and path.exists() and not path.is_file():
                what = "a file, since it is read more than once and a pipe gives its content once: write it to a file first"
                raise TraceError(self.spec, what)
            self._begun = True
            return stream(
                path,
                format=self.format,
                columns=self.columns,
                limit=self.limit,
                skip_bad_lines=self.skip_bad_lines,
                chunk=self.chunk,
            )
        except TraceError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error

    def whole(self) -> Trace:
        """Return the trace at once, with its texts where it has any.

        Raises:
            envs.workloads.TraceError: If the file cannot be read, or there is no such made workload.
            InputError: If an option is out of its range.
        """
        try:
            if self.spec.startswith(SCHEME):
                return self._make()
            return load(self.spec, limit=self.limit, format=self.format, columns=self.columns, skip_bad_lines=self.skip_bad_lines)
        except TraceError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error

    def _make(self) -> Trace:
        if self._made is None:
            trace = make(self.spec)
            self._made = trace if self.limit is None else trace.slice(0, self.limit)
        return self._made

    def empty(self) -> TraceError:
        """Return the error for a trace without requests."""
        return TraceError(self.spec, "at least one request")


def watched(reading: Reading, phase: str, progress: Progress) -> Iterator[Trace]:
    """Yield a reading's chunks, and tell the progress after each was handled."""
    seen = 0
    for part in reading:
        yield part
        seen += len(part)
        progress(phase, reading.bytes_read / reading.total_bytes if reading.total_bytes else float("nan"), seen)


def joined(parts: Sequence[Trace]) -> Trace:
    """Return chunks of one trace, in order, as one trace without texts.

    Raises:
        ValueError: If there is none.
    """
    if not parts:
        raise ValueError("joined: expected at least one chunk")
    if len(parts) == 1:
        return parts[0]
    columns = ("time", "key", "size", "group", "input_tokens", "output_tokens", "tenant", "document", "chain")
    events = ("update_time", "update_document", "flush_time")
    together = {name: np.concatenate([getattr(part, name) for part in parts]) for name in (*columns, *events)}
    changed: dict[str, Any] = {**together, "prompts": (), "prompt_id": np.empty(0, np.int64)}
    return replace(parts[0], **changed)


def left_out(reading: Reading) -> list[str]:
    """Return what a reader of the numbers has to know about what was left out of a trace."""
    found = []
    if reading.skipped:
        first = f"; the first: {reading.first_skipped[0]}" if reading.first_skipped else ""
        found.append(f"{reading.skipped:,} bad line{'s' * (reading.skipped != 1)} left out{first}")
    if reading.zero_sized:
        found.append(f"{reading.zero_sized:,} request{'s' * (reading.zero_sized != 1)} left out whose entry has no bytes")
    return found
