"""Lines and tables of possibly compressed text files, with every failure named by file and line."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from envs.workloads.errors import TraceError

_GZIP_MAGIC = b"\x1f\x8b"


def open_text(path: Path) -> TextIO:
    """Open a plain or gzip-compressed text file (told by its first bytes, not by its name).

    Raises:
        TraceError: If it cannot be opened.
    """
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == _GZIP_MAGIC
        if compressed:
            return gzip.open(path, "rt", encoding="utf-8", newline="")
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(path, f"a readable file ({error.strerror or error})") from error


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, line ends included.

    Raises:
        TraceError: If the file cannot be opened, is damaged or cut short, or is not UTF-8.
    """
    number = 0
    with open_text(path) as file:
        try:
            for line in file:
                number += 1
                yield line
        except EOFError as error:
            raise TraceError(
                path, "a complete gzip file, but it ends early: copy or download it again", line=number + 1
            ) from error
        except (OSError, zlib.error) as error:
            raise TraceError(path, f"undamaged gzip data ({error}): copy or download it again", line=number + 1) from error
        except UnicodeDecodeError as error:
            excerpt = repr(error.object[error.start : error.start + 20])
            raise TraceError(path, "text in UTF-8", line=number + 1, excerpt=excerpt) from error


class Table:
    """The rows of a CSV file by column name.

    Args:
        path: The file; its first line names the columns.
        columns: The columns that are needed.

    Raises:
        TraceError: If the file is empty or a column is missing.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.line = 1
        self._rows = csv.reader(read_lines(path))
        try:
            header = next(self._rows, None)
        except csv.Error as error:
            raise TraceError(path, f"CSV ({error})", line=1) from error
        if not header:
            raise TraceError(path, f"a header with the columns {', '.join(columns)}, but the file is empty", line=1)
        header[0] = header[0].removeprefix("\ufeff")  # a byte order mark
        missing = [name for name in columns if name not in header]
        if missing:
            raise TraceError(
                path, f"the columns {', '.join(columns)}; missing: {', '.join(missing)}", line=1, excerpt=",".join(header)
            )
        self._places = [header.index(name) for name in columns]
        self._width = len(header)

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the needed columns of each row; ``line`` is the number of the row's last line."""
        try:
            for row in self._rows:
                self.line = self._rows.line_num
                if not row:
                    continue
                if len(row) != self._width:
                    raise self.error(f"{self._width} fields", ",".join(row))
                yield [row[place] for place in self._places]
        except csv.Error as error:
            raise TraceError(self.path, f"CSV ({error})", line=self._rows.line_num) from error

    def error(self, expected: str, excerpt: str) -> TraceError:
        """Return the error that the row just read is not what it should be."""
        return TraceError(self.path, expected, line=self.line, excerpt=excerpt)

    def number(self, text: str, what: str, most: float = 1e15) -> float:
        """Return a field as a number from 0 to ``most``.

        Raises:
            TraceError: If it is not one.
        """
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= most:
            raise self.error(f"{what}: a finite number >= 0" + (f", at most {most:g}" if value > most else ""), text)
        return value
