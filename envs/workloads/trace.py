"""The one form in which every workload comes: columns of equal length, ordered by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt


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

    def __post_init__(self) -> None:
        count = len(self.time)
        if not len(self.prompt_id):
            object.__setattr__(self, "prompt_id", np.full(count, -1, np.int64))
        for column in ("key", "size", "group", "input_tokens", "output_tokens", "prompt_id"):
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
        if self.kind not in ("exact", "semantic"):
            raise ValueError(f"trace {self.name}: kind: expected exact or semantic, got {self.kind!r}")

    def __len__(self) -> int:
        return len(self.time)

    @property
    def duration(self) -> float:
        """Seconds from the start to the last arrival."""
        return float(self.time[-1]) if len(self.time) else 0.0

    def slice(self, start: int, stop: int) -> Trace:
        """Return requests ``start`` to ``stop`` (as in Python), time shifted so that the first is at 0."""
        part = self.take(np.arange(len(self))[start:stop])
        return replace(part, time=part.time - (part.time[0] if len(part) else 0.0))

    def take(self, rows: npt.NDArray[np.intp]) -> Trace:
        """Return the requests at ``rows``, ascending indices or a mask of shape (N,), at their own times."""
        return replace(
            self,
            time=self.time[rows],
            key=self.key[rows],
            size=self.size[rows],
            group=self.group[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            prompt_id=self.prompt_id[rows],
        )

    def compress(self, factor: float) -> Trace:
        """Return the same requests with time running ``factor`` times faster."""
        if not factor > 0:
            raise ValueError(f"compress: expected a factor > 0, got {factor!r}")
        return replace(self, time=self.time / factor)

    def prompt(self, row: int) -> str:
        """Return the text of a request; a made name of its key where the trace has no text."""
        index = int(self.prompt_id[row])
        return self.prompts[index] if index >= 0 else f"{self.name} {int(self.key[row]):016x}"
