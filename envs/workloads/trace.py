"""The one form in which every workload comes: columns of equal length, ordered by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

MOST_BYTES = 2**31 - 1
"""Largest entry of a trace: the simulator keeps sizes as 32-bit numbers."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of time.

    Attributes:
        name: Where it comes from, for titles and ledgers.
        time: Arrival, seconds from the trace's start, ascending, float64, shape (N,).
        key: Identity of the request, uint64, shape (N,). Equal keys may share an exact answer.
        size: Bytes of the entry that an answer becomes (key, body, vector), int64, shape (N,), > 0.
        group: Identity of the meaning, int64, shape (N,); -1 where a request has no semantic neighbours.
        input_tokens: Prompt tokens, int32, shape (N,).
        output_tokens: Completion tokens, int32, shape (N,).
        prompts: Text by ``prompt_id``; empty where the trace has no text (replay then names the key).
        prompt_id: Index into ``prompts``, int64, shape (N,); all -1 where there is no text.
        tenant: Who asks, int32, shape (N,), >= 0; all 0 where the trace does not say.
        document: The document that the answer rests on, int64, shape (N,); -1 for none. Its update makes the answer stale.
        chain: Place of a prefix block within its request, int32, shape (N,): a row with a place > 0 comes right after the block
            before it in its request, at the same time, and can only be answered if that was; 0 for rows that need no other.
        update_time: When documents changed, seconds, ascending, float64, shape (U,).
        update_document: Which one, int64, shape (U,).
        flush_time: When everything cached became worthless (a new release of the model), seconds, ascending, float64, shape (F,).
        match_probability: Probability that a live entry of the same ``group`` answers a request whose own key has none, 0..1.
        kind: ``exact`` (no request means the same as another unless its key is equal) or ``semantic``.
        note: One sentence on what the trace is and is not, shown wherever its numbers are.

    Raises:
        ValueError: If columns differ in length, time goes backwards, or a size is not positive.
    """

    name: str
    time: npt.NDArray[np.float64]
    key: npt.NDArray[np.uint64]
    size: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    prompts: Sequence[str] = field(default=(), repr=False)
    prompt_id: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    kind: str = "exact"
    note: str = ""
    tenant: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)
    document: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    chain: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)
    update_time: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64), repr=False)
    update_document: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    flush_time: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64), repr=False)
    match_probability: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.time)
        for column, absent in (("prompt_id", -1), ("tenant", 0), ("document", -1), ("chain", 0)):
            given = getattr(self, column)
            if not len(given):
                object.__setattr__(self, column, np.full(count, absent, given.dtype))
        for column in ("key", "size", "group", "input_tokens", "output_tokens", "prompt_id", "tenant", "document", "chain"):
            if len(getattr(self, column)) != count:
                raise ValueError(
                    f"trace {self.name}: column {column}: expected {count} rows as in time, got {len(getattr(self, column))}"
                )
        if count and np.any(np.diff(self.time) < 0):
            row = int(np.argmax(np.diff(self.time) < 0)) + 1
            raise ValueError(f"trace {self.name}: row {row}: time goes backwards ({self.time[row - 1]} to {self.time[row]})")
        if count and self.size.min() <= 0:
            row = int(np.argmin(self.size))
            raise ValueError(f"trace {self.name}: row {row}: expected a size > 0, got {self.size[row]}")
        if count and self.size.max() > MOST_BYTES:
            row = int(np.argmax(self.size))
            raise ValueError(f"trace {self.name}: row {row}: expected a size below 2 GiB, got {self.size[row]}")
        if len(self.update_time) != len(self.update_document):
            raise ValueError(
                f"trace {self.name}: update_document: expected {len(self.update_time)} rows as in update_time, "
                f"got {len(self.update_document)}"
            )
        for column in ("update_time", "flush_time"):
            moments = getattr(self, column)
            if not np.all(np.isfinite(moments)) or np.any(np.diff(moments) < 0):
                raise ValueError(f"trace {self.name}: {column}: expected finite seconds in ascending order")
        if not 0.0 <= self.match_probability <= 1.0:
            raise ValueError(f"trace {self.name}: match_probability: expected 0..1, got {self.match_probability!r}")
        if self.kind not in ("exact", "semantic"):
            raise ValueError(f"trace {self.name}: kind: expected exact or semantic, got {self.kind!r}")

    def __len__(self) -> int:
        return len(self.time)

    @property
    def duration(self) -> float:
        """Seconds from the start to the last arrival."""
        return float(self.time[-1]) if len(self.time) else 0.0

    def slice(self, start: int, stop: int) -> Trace:
        """Return requests ``start`` to ``stop`` (as in Python) and the events between them, time shifted: the first is at 0."""
        part = self.take(np.arange(len(self))[start:stop])
        if not len(part):
            return part
        origin, end = part.time[0], part.time[-1]
        # An update before the slice tells nothing: no entry is older than the slice.
        updated = (part.update_time >= origin) & (part.update_time <= end)
        flushed = (part.flush_time >= origin) & (part.flush_time <= end)
        return replace(
            part,
            time=part.time - origin,
            update_time=part.update_time[updated] - origin,
            update_document=part.update_document[updated],
            flush_time=part.flush_time[flushed] - origin,
        )

    def take(self, rows: npt.NDArray[np.intp]) -> Trace:
        """Return the requests at ``rows``, ascending indices or a mask of shape (N,), at their own times; events stay.

        Rows of a chain of prefix blocks should be taken whole: a part of a chain means less than its rows do.
        """
        return replace(
            self,
            time=self.time[rows],
            key=self.key[rows],
            size=self.size[rows],
            group=self.group[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prompt_id=self.prompt_id[rows],
            tenant=self.tenant[rows],
            document=self.document[rows],
            chain=self.chain[rows],
        )

    def compress(self, factor: float) -> Trace:
        """Return the same requests with time running ``factor`` times faster."""
        if not factor > 0:
            raise ValueError(f"compress: expected a factor > 0, got {factor!r}")
        return replace(self, time=self.time / factor, update_time=self.update_time / factor, flush_time=self.flush_time / factor)

    def prompt(self, row: int) -> str:
        """Return the text of a request; a made name of its key where the trace has no text."""
        index = int(self.prompt_id[row])
        return self.prompts[index] if index >= 0 else f"{self.name} {int(self.key[row]):016x}"
