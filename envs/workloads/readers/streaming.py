"""A trace in chunks: as long as it likes, in memory that does not grow with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np

from envs.workloads.errors import TraceError, require
from envs.workloads.lines import Source
from envs.workloads.readers.batch import Batch, Input, Reader, Texts, join, take
from envs.workloads.readers.known import check_format, find, open_reader
from envs.workloads.readers.mapped import check_map
from envs.workloads.readers.questions import read_questions
from envs.workloads.trace import Trace

CHUNK = 262_144
"""Requests of a chunk."""

LATENESS = 60.0
"""Seconds by which a request may stand after a later one and still be put in order."""

RATE_SCALE = 1e-3
"""Default factor on the rates of a trace of rates (ServeGen): 14 days of it are 200 thousand requests instead of 200 million."""


class TraceStream:
    """A trace that is read as it is iterated; once. Use it as a context manager, or close it, or iterate to its end.

    Its format is told by its content. Plain, gzip, zstd, bzip2 or xz. Memory holds a chunk, what comes within ``lateness``, and
    for text formats the distinct texts.

    Iterating yields a :class:`Trace` for each chunk, in order of time on one axis: seconds since the trace's first request.
    Blocks of one chain are in one chunk. Chunks have no prompts.

    Args:
        path: The file.
        format: Name of the format (:data:`envs.workloads.readers.KNOWN`) instead of telling it by the content.
        columns: What the columns of a CSV or Parquet file mean: ``time``, ``key``, ``size``, ``input_tokens``,
            ``output_tokens``, ``tenant``, ``document``, ``group`` to their names; and ``time_unit`` (s, ms, us, ns),
            ``delimiter``, ``header`` (yes, no: then the columns are named 1, 2, ...), ``size_bytes`` (of every entry).
        limit: Requests to read at most, from the start; None for all.
        skip_bad_lines: Count bad lines and leave them out instead of raising.
        chunk: Requests of a chunk.
        lateness: Seconds by which a request may stand after a later one; then it is put in order, else it is a bad line.
        seed: Of what a format has to draw (ServeGen, banking77).
        rate_scale: Factor on the rates of a format that has rates (ServeGen).

    Attributes:
        name: Where it comes from.
        kind: ``exact`` or ``semantic``.
        format: Name of the format, one of :data:`envs.workloads.readers.KNOWN`.
        total_bytes: Bytes of the file as it lies on the disk.
        requests: Requests yielded so far.
        zero_sized: Requests left out so far because their entry has no bytes.

    Raises:
        TraceError: If the file is missing, a directory, empty, damaged, or of no known format.
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        format: str | None = None,
        columns: Mapping[str, str] | None = None,
        limit: int | None = None,
        skip_bad_lines: bool = False,
        chunk: int = CHUNK,
        lateness: float = LATENESS,
        seed: int = 0,
        rate_scale: float = RATE_SCALE,
    ) -> None:
        check_format(format)
        require(
            "trace",
            ("limit", limit, "at least 1 request or None for all", limit is None or limit >= 1),
            ("chunk", chunk, "at least 1 request", chunk >= 1),
            ("lateness", lateness, "seconds >= 0", lateness >= 0),
            ("rate_scale", rate_scale, "a finite factor > 0", 0 < rate_scale < float("inf")),
        )
        if columns:
            check_map(columns)
        path = Path(path)
        source = Source(path)
        self._given = Input(source, skip_bad_lines, dict(columns or {}), seed, rate_scale)
        self._limit, self._chunk, self._lateness = limit, chunk, lateness
        self._whole: Trace | None = None
        self._reader: Reader | None = None
        try:
            found = find(self._given, format)
            if found.format == "banking77":
                self._whole = read_questions(path, limit=limit, seed=seed)
            else:
                self._reader = open_reader(self._given, found)
        except BaseException:
            source.close()
            raise
        self.name = stem(path) if self._whole is None else self._whole.name
        self.kind = "exact" if self._whole is None else self._whole.kind
        self.format = found.format
        self.total_bytes = source.total_bytes
        self.requests = 0
        self.zero_sized = 0
        self._begun = False

    @property
    def bytes_read(self) -> int:
        """Bytes of the file as it lies on the disk that were read so far."""
        return self.total_bytes if self._whole is not None else self._given.source.bytes_read

    @property
    def skipped(self) -> int:
        """Bad lines left out so far."""
        return self._given.skipped

    @property
    def first_skipped(self) -> list[TraceError]:
        """The first five bad lines that were left out."""
        return self._given.first_skipped

    @property
    def note(self) -> str:
        """One sentence on what the trace is and is not."""
        return self._reader.note if self._reader is not None else self._whole.note if self._whole is not None else ""

    @property
    def tenants(self) -> list[str]:
        """Names of the tenants by number, as far as they were met; empty where the format has none."""
        return self._reader.tenants if self._reader is not None else []

    def close(self) -> None:
        """Close the file; harmless when closed already."""
        self._given.source.close()

    def __enter__(self) -> TraceStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Trace]:
        """Yield the trace in chunks.

        Raises:
            TraceError: If a line is not what the format says or its time goes back too far (unless bad lines are skipped), the
                file is damaged, or there is no request in it.
            RuntimeError: If it was iterated before.
        """
        if self._begun:
            raise RuntimeError(f"trace {self.name}: a stream is read once: open it again")
        self._begun = True
        if self._whole is not None:
            yield from self._parts(self._whole)
            self.close()
            return
        origin: float | None = None
        try:
            for batch in self._in_order():
                if origin is None:
                    origin = float(batch["time"][0])
                self.requests += len(batch["time"])
                yield self._trace(batch, origin)
        finally:
            self.close()
        if origin is None:
            raise self._nothing()

    def _nothing(self) -> TraceError:
        skipped = f"; {self.skipped} bad lines were skipped" if self.skipped else ""
        return TraceError(self._given.path, f"at least one request (after the header, where there is one){skipped}")

    def read_all(self) -> Trace:
        """Read what is left as one trace with its prompts; for traces that fit in memory.

        Raises:
            TraceError: As iterating does.
        """
        if self._whole is not None:
            self._begun = True
            self.requests = len(self._whole)
            self.close()
            return self._whole
        if self._begun:
            raise RuntimeError(f"trace {self.name}: a stream is read once: open it again")
        self._begun = True
        try:
            batches = list(self._in_order())
        finally:
            self.close()
        if not batches:
            raise self._nothing()
        batch = join(batches)
        self.requests = len(batch["time"])
        trace = self._trace(batch, float(batch["time"][0]))
        reader: object = self._reader
        if isinstance(reader, Texts):
            prompts, place = reader.prompts(batch["reference"])
            return replace(trace, prompts=prompts, prompt_id=place)
        return trace

    def _trace(self, batch: Batch, origin: float) -> Trace:
        return Trace(
            name=self.name,
            time=batch["time"] - origin,
            key=batch["key"],
            size=batch["size"],
            group=batch["group"],
            input_tokens=batch["input_tokens"],
            output_tokens=batch["output_tokens"],
            kind=self.kind,
            note=self.note,
            tenant=batch["tenant"],
            document=batch["document"],
            chain=batch["chain"],
        )

    def _parts(self, whole: Trace) -> Iterator[Trace]:
        for start in range(0, len(whole), self._chunk):
            part = replace(whole.take(np.arange(start, min(start + self._chunk, len(whole)))), prompts=(), prompt_id=_NONE)
            self.requests += len(part)
            yield part

    def _limited(self) -> Iterator[Batch]:
        """Yield the file's requests in its order, none of them empty, up to the limit."""
        assert self._reader is not None
        left = self._limit
        for batch in self._reader.batches():
            full = batch["size"] > 0
            if not full.all():
                self.zero_sized += int(len(full) - full.sum())
                batch = take(batch, full)
            if left is not None:
                batch = take(batch, slice(0, left))
                left -= len(batch["time"])
            if len(batch["time"]):
                yield batch
            if left == 0:
                return

    def _in_order(self) -> Iterator[Batch]:
        """Yield the requests in order of time, in batches of about a chunk that split no chain."""
        waiting: list[Batch] = []
        count, enough, peak = 0, self._chunk, -np.inf
        for batch in self._limited():
            for part in self._timely(batch, peak):
                waiting.append(part)
                count += len(part["time"])
            peak = max(peak, float(batch["time"].max()))
            if count >= enough:
                ordered = _ordered(join(waiting))
                # What is still to come is not before this moment, and comes after what has the same time.
                ready = int(np.searchsorted(ordered["time"], peak - self._lateness, side="right"))
                cut, done = _pieces(ordered, ready, self._chunk, last=False)
                yield from cut
                rest = take(ordered, slice(done, None))
                waiting, count = [rest], len(rest["time"])
                enough = count + self._chunk
        if count:
            ordered = _ordered(join(waiting))
            yield from _pieces(ordered, count, self._chunk, last=True)[0]

    def _timely(self, batch: Batch, peak: float) -> Iterator[Batch]:
        """Yield the requests that come in time and reject the others."""
        time = batch["time"]
        before = np.maximum.accumulate(np.concatenate(([peak], time)))[:-1]
        late = time < before - self._lateness
        if not late.any():
            yield batch
            return
        rows = np.flatnonzero(late)
        # A chain is late as a whole, and is one line.
        _, first = np.unique(batch["line"][rows], return_index=True)
        if not self._given.skip_bad_lines:
            yield take(batch, slice(0, int(rows[0])))
        for row in rows[np.sort(first)]:
            back = before[row] - time[row]
            self._given.reject(
                TraceError(
                    self._given.path,
                    f"a time at most {self._lateness:g} s before the latest so far, but it goes back by {back:.6g} s: sort the "
                    "file by time, or allow a greater lateness",
                    line=int(batch["line"][row]),
                    excerpt=f"{time[row]:.6f}",
                    unit="record" if self.format == "oracle_general" else "line",
                )
            )
        yield take(batch, ~late)


_NONE = np.empty(0, np.int64)


def _ordered(batch: Batch) -> Batch:
    time = batch["time"]
    if np.all(time[1:] >= time[:-1]):
        return batch
    return take(batch, np.argsort(time, kind="stable"))


def _pieces(batch: Batch, ready: int, chunk: int, *, last: bool) -> tuple[list[Batch], int]:
    """Cut the first ``ready`` rows into batches of about ``chunk`` that split no chain.

    Returns:
        The batches, and how many rows are in them: all that are ready if it is the ``last`` time, else whole chunks.
    """
    pieces, start = [], 0
    starts = np.flatnonzero(batch["chain"][:ready] == 0)
    while ready - start >= (1 if last else chunk):
        stop = start + chunk
        if stop < ready:
            # Back to where the chain begins that lies over the cut; a longer chain than a chunk is taken whole.
            place = int(np.searchsorted(starts, stop, side="right")) - 1
            stop = int(starts[place])
            if stop <= start:
                stop = int(starts[place + 1]) if place + 1 < len(starts) else ready
        else:
            stop = ready
        pieces.append(take(batch, slice(start, stop)))
        start = stop
    return pieces, start


def stem(path: Path) -> str:
    """Return the name of a trace: its file's, without the endings."""
    return path.name.split(".")[0]


stream = TraceStream
"""Open a trace to be read in chunks: :class:`TraceStream` by what it does."""
