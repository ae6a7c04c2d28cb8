"""A trace as the kernel reads it: keys, groups and documents numbered from 1, sizes and tokens in 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.simulator.state import Columns
from envs.workloads.trace import Trace
from serving.compiled import compiled
from serving.ghost_kernel import mix64

_SLOT = "_prepared_for_simulation"
_FEWEST_CELLS = 1024
_NONE = np.zeros(0, np.int32)


@compiled()
def _number(
    keys: npt.NDArray[np.uint64],
    start: int,
    cells: npt.NDArray[np.int32],
    names: npt.NDArray[np.uint64],
    count: int,
    numbers: npt.NDArray[np.int32],
) -> tuple[int, int]:
    """Number keys from row ``start`` on until the table is half full; return the first row not done, and the count of numbers."""
    mask = np.uint64(len(cells) - 1)
    for row in range(start, len(keys)):
        key = keys[row]
        cell = mix64(key) & mask
        while cells[cell] != 0 and names[cells[cell]] != key:
            cell = (cell + np.uint64(1)) & mask
        if cells[cell] == 0:
            if 2 * (count + 1) > len(cells):
                return row, count
            count += 1
            cells[cell] = count
            names[count] = key
        numbers[row] = cells[cell]
    return len(keys), count


class Numbering:
    """Gives 64-bit names dense numbers from 1, in the order in which they are first seen; a hash table that grows.

    O(1) for each name; 12 to 32 bytes of memory for each different one.
    """

    def __init__(self) -> None:
        self._cells = np.zeros(_FEWEST_CELLS, np.int32)
        self._names = np.zeros(_FEWEST_CELLS // 2 + 1, np.uint64)
        self.count = 0

    @property
    def names(self) -> npt.NDArray[np.uint64]:
        """The name of each number, shape (count + 1,); 0 stands for none."""
        return self._names[: self.count + 1]

    def number(self, names: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Return the number of each name, same shape; new ones are added."""
        numbers = np.empty(len(names), np.int32)
        row, names = 0, np.require(names, np.uint64, ["C", "W"])
        while True:
            row, self.count = _number(names, row, self._cells, self._names, self.count, numbers)
            if row == len(names):
                return numbers
            self._grow()

    def copy(self) -> Numbering:
        """Return an independent copy."""
        twin = Numbering()
        twin._cells, twin._names, twin.count = self._cells.copy(), self._names.copy(), self.count
        return twin

    def _grow(self) -> None:
        known = self._names[1 : self.count + 1].copy()
        self._cells = np.zeros(4 * len(self._cells), np.int32)
        self._names = np.zeros(len(self._cells) // 2 + 1, np.uint64)
        _, self.count = _number(known, 0, self._cells, self._names, 0, np.empty(len(known), np.int32))


@dataclass(frozen=True)
class Numberings:
    """The numberings of keys, groups and documents."""

    keys: Numbering
    groups: Numbering
    documents: Numbering

    def copy(self) -> Numberings:
        """Return an independent copy."""
        return Numberings(self.keys.copy(), self.groups.copy(), self.documents.copy())


@dataclass(frozen=True)
class PreparedTrace:
    """A trace with dense keys.

    Attributes:
        columns: What the kernel reads.
        key: 64-bit name of each request's key, (N,).
        numberings: What the numbers stand for; shared by all who use this trace, so not to be added to.
    """

    columns: Columns
    key: npt.NDArray[np.uint64]
    numberings: Numberings


def prepare(trace: Trace) -> PreparedTrace:
    """Return the prepared form of a trace; computed at the first call and kept with the trace.

    O(N) once, about 5 ms per 100,000 requests.
    """
    known = trace.__dict__.get(_SLOT)
    if isinstance(known, PreparedTrace):
        return known
    prepared = number(trace, Numberings(Numbering(), Numbering(), Numbering()))
    trace.__dict__[_SLOT] = prepared
    return prepared


def number(trace: Trace, numberings: Numberings) -> PreparedTrace:
    """Return the prepared form of a trace by given numberings, which learn what is new to them."""
    # Copies: the kernel is compiled for writable, contiguous columns, and a trace is not to be written to.
    columns = Columns(
        time=np.array(trace.time, np.float64),
        key=numberings.keys.number(trace.key),
        size=np.array(trace.size, np.int32),
        input_tokens=np.array(trace.input_tokens, np.int32),
        output_tokens=np.array(trace.output_tokens, np.int32),
        chain=np.array(trace.chain, np.int32) if np.any(trace.chain > 0) else _NONE,
        group=_number_all(numberings.groups, trace.group) if trace.match_probability > 0.0 else _NONE,
        document=_number_all(numberings.documents, trace.document) if np.any(trace.document >= 0) else _NONE,
        update_time=np.array(trace.update_time, np.float64),
        update_document=_number_all(numberings.documents, trace.update_document),
        flush_time=np.array(trace.flush_time, np.float64),
    )
    return PreparedTrace(columns, np.array(trace.key, np.uint64), numberings)


def _number_all(numbering: Numbering, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Number those that are not negative; 0 for the others."""
    some = values >= 0
    numbers = np.zeros(len(values), np.int32)
    numbers[some] = numbering.number(values[some].astype(np.uint64))
    return numbers
