"""Delimited text in batches of columns: pandas' C parser where a block is regular, a row at a time where it is not."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from envs.workloads.errors import TraceError
from envs.workloads.lines import split_lines
from envs.workloads.readers.batch import Column, Input, Mask, Verdict

_ROWS = 65_536


@dataclass
class Frame:
    """Some rows of a table.

    Attributes:
        given: The file they are from.
        line: Number of each row's (last) line, int64, shape (N,).
        texts: The text columns by name, shape (N,), of str.
        numbers: The number columns by name, float64, shape (N,); NaN where there stood none.
        written: How the numbers stood in the file, for messages.
    """

    given: Input
    line: npt.NDArray[np.int64]
    texts: dict[str, Column]
    numbers: dict[str, npt.NDArray[np.float64]]
    written: dict[str, Column]

    def __len__(self) -> int:
        return len(self.line)

    def require(self, verdict: Verdict, good: Mask, expected: str, name: str) -> None:
        """Let the rows pass for which ``good`` is true; ``expected`` and the field ``name`` go into the others' error."""
        stood = self.texts[name] if name in self.texts else self.written[name]
        verdict.require(good, lambda row: self.given.error(expected, self.line[row], stood[row]))

    def require_number(self, verdict: Verdict, name: str, most: float = 1e15, least: float = 0.0) -> None:
        """Let the rows pass whose number ``name`` is from ``least`` to ``most``."""
        value = self.numbers[name]
        lowest = f">= {least:g}" if least > -np.inf else "that is finite"
        self.require(verdict, ~(value > most) | np.isnan(value), f"{name}: a finite number {lowest}, at most {most:g}", name)
        self.require(verdict, (value >= least) & (value <= most), f"{name}: a finite number {lowest}", name)


class CsvTable:
    """The rows of a delimited text file by column name.

    Args:
        given: The file.
        texts: The columns that are needed as text.
        numbers: The columns that are needed as numbers.
        delimiter: Between fields.
        header: Whether the first line names the columns; else they are named ``1``, ``2``, ...
    """

    def __init__(
        self, given: Input, texts: Sequence[str], numbers: Sequence[str], *, delimiter: str = ",", header: bool = True
    ) -> None:
        self.given = given
        self._texts, self._numbers = list(texts), list(numbers)
        self._delimiter, self._named = delimiter, header
        self._place: dict[str, int] = {}
        self._width = 0

    def __iter__(self) -> Iterator[Frame]:
        """Yield the rows in frames.

        Raises:
            TraceError: If a column is missing, a row has another number of fields than the header, or the file is damaged;
                rows only if bad lines are not skipped.
        """
        blocks = self.given.source.blocks()
        for first, block in blocks:
            if not self._width:
                head, _, rest = block.partition(b"\n")
                self._read_header(first, head)
                if self._named:
                    first, block = first + 1, rest
                if not block:
                    continue
            if b'"' in block:
                # A quoted field may hold line ends, so that from here on a line need not be a row.
                yield from self._rows(_lines(first, block, blocks))
                return
            frame = self._parse(first, block)
            if frame is not None:
                yield frame
            else:
                yield from self._rows(enumerate(split_lines(block), start=first))

    def _read_header(self, line: int, head: bytes) -> None:
        try:
            names = next(csv.reader([head.decode()], delimiter=self._delimiter), [])
        except (csv.Error, UnicodeDecodeError) as error:
            raise self.given.error(f"CSV ({error})", line) from error
        if not self._named:
            names = [str(place) for place in range(1, len(names) + 1)]
        needed = [*self._texts, *self._numbers]
        missing = [name for name in needed if name not in names]
        if missing:
            raise self.given.error(
                f"the columns {', '.join(needed)}; missing: {', '.join(missing)}", line, ",".join(names) or repr(head)
            )
        self._place = {name: names.index(name) for name in needed}
        self._width = len(names)

    def _parse(self, first: int, block: bytes) -> Frame | None:
        """Return a block's rows; None where it takes more than a plain table of equally many fields."""
        if not block.endswith(b"\n"):
            block += b"\n"
        marks = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(marks == ord("\n"))
        fields = np.cumsum(marks == ord(self._delimiter))[ends]
        if np.any(np.diff(fields, prepend=0) != self._width - 1) or block.count(b"\r") > block.count(b"\r\n"):
            return None
        try:
            table = pd.read_csv(
                io.BytesIO(block),
                header=None,
                names=range(self._width),
                usecols=sorted(set(self._place.values())),
                sep=self._delimiter,
                dtype={self._place[name]: object for name in self._texts},
                keep_default_na=False,
                quoting=csv.QUOTE_NONE,
                skip_blank_lines=False,
                low_memory=False,
                encoding="utf-8",
            )
        except (pd.errors.ParserError, UnicodeDecodeError, OverflowError, ValueError):
            return None
        if len(table) != len(ends):
            return None
        line = np.arange(first, first + len(ends), dtype=np.int64)
        columns = {name: table[place].to_numpy() for name, place in self._place.items()}
        return self._frame(line, columns)

    def _frame(self, line: npt.NDArray[np.int64], columns: dict[str, Column]) -> Frame:
        numbers = {name: _numbers(columns[name]) for name in self._numbers}
        written = {name: columns[name] for name in self._numbers}
        return Frame(self.given, line, {name: columns[name] for name in self._texts}, numbers, written)

    def _rows(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[Frame]:
        """Yield frames of rows that are parsed one at a time."""
        feed = _Feed(self.given, lines)
        reader = csv.reader(feed, delimiter=self._delimiter)
        rows: list[list[str]] = []
        numbers: list[int] = []
        failed: TraceError | None = None
        while failed is None:
            try:
                row = next(reader, None)
                if row is None:
                    break
                if not row:
                    continue
                if len(row) != self._width:
                    self.given.reject(self.given.error(f"{self._width} fields", feed.line, ",".join(row)))
                    continue
                rows.append(row)
                numbers.append(feed.line)
            except csv.Error as error:
                try:
                    self.given.reject(self.given.error(f"CSV ({error})", feed.line))
                except TraceError as raised:
                    failed = raised
            except TraceError as error:
                failed = error
            if len(rows) == _ROWS:
                yield self._of_rows(rows, numbers)
                rows, numbers = [], []
        if rows:
            yield self._of_rows(rows, numbers)
        if failed is not None:
            raise failed

    def _of_rows(self, rows: list[list[str]], lines: list[int]) -> Frame:
        columns = {name: np.array([row[place] for row in rows], dtype=object) for name, place in self._place.items()}
        return self._frame(np.array(lines, np.int64), columns)


class _Feed:
    """Lines as text for csv.reader, with the number of the last one taken."""

    def __init__(self, given: Input, lines: Iterable[tuple[int, bytes]]) -> None:
        self._given = given
        self._lines = iter(lines)
        self.line = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for number, line in self._lines:
            self.line = number
            try:
                return line.decode()
            except UnicodeDecodeError as error:
                self._given.reject(encoding_error(self._given, self.line, error))
        raise StopIteration


def encoding_error(given: Input, line: int, error: UnicodeDecodeError) -> TraceError:
    """Return the error of a line that is not UTF-8."""
    return given.error("text in UTF-8", line, repr(error.object[error.start : error.start + 20]))


def _lines(first: int, block: bytes, blocks: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    yield from enumerate(split_lines(block), start=first)
    for number, more in blocks:
        yield from enumerate(split_lines(more), start=number)


def _numbers(column: Column) -> npt.NDArray[np.float64]:
    if column.dtype.kind in "iuf":
        return column.astype(np.float64)
    return np.array([_number(value) for value in column], np.float64)


def _number(value: object) -> float:
    if isinstance(value, bool | np.bool_):  # pandas read the words True and False
        return float("nan")
    try:
        return float(value)  # type: ignore[arg-type]
    except (ValueError, OverflowError, TypeError):
        return float("nan")
