"""Reads the gateway's access log into a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd

from serving.access_log import AccessRecord

PATTERN = "access-*.jsonl"
COLUMNS = tuple(item.name for item in fields(AccessRecord))

_NUMBERS: dict[str, type[np.generic]] = {
    "at": np.float64,
    "key": np.uint64,
    "latency": np.float64,
    "size": np.int64,
    "input_tokens": np.int64,
    "output_tokens": np.int64,
    "age": np.float64,
    "stale": np.float64,
    "version": np.int64,
    "status": np.int64,
}
_TEXTS = ("arm", "outcome", "tier")


class AccessLogError(ValueError):
    """An access log that cannot be read; says which file and line."""


def read_access_log(directory: str | Path, *, since: float = -np.inf, until: float = np.inf) -> pd.DataFrame:
    """Read the access log of every replica.

    Requests whose clients went away before their answer are left out: nobody knows how long they would have taken.

    The log may be live: a last line that is not complete yet is left out and counted in ``frame.attrs["torn_lines"]``.

    Args:
        directory: Where the gateway's replicas write ``access-<replica>.jsonl``.
        since: Leave out requests that arrived before, seconds since the epoch.
        until: Leave out requests that arrived after, seconds since the epoch.

    Returns:
        One row per request in order of arrival, with the columns of :class:`serving.access_log.AccessRecord` (``key`` uint64;
        ``arm``, ``outcome`` and ``tier`` categorical). Without rows if there is no log yet.

    Raises:
        AccessLogError: If the directory is missing or a complete line is not a record.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise AccessLogError(
            f"access log: {folder} is not a directory: give the directory in which the gateway writes {PATTERN} "
            "(setting access_log of the gateway)"
        )
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    appends = [(name, columns[name].append) for name in COLUMNS]
    torn = 0
    paths = sorted(folder.glob(PATTERN))
    for path in paths:
        raw = path.read_bytes()
        lines = raw.split(b"\n")
        complete = len(lines) - 1  # what follows the last newline is being written
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = orjson.loads(line)
                values = [record[name] for name in COLUMNS]
                wanted = since <= values[0] <= until and record["outcome"] != "left"
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                if number > complete:
                    torn += 1
                    continue
                raise AccessLogError(_broken(path, number, line, error)) from error
            if wanted:
                for (_, append), value in zip(appends, values, strict=True):
                    append(value)
    frame = pd.DataFrame({name: _column(name, columns[name], paths) for name in COLUMNS})
    frame = frame.sort_values("at", kind="stable", ignore_index=True)
    frame.attrs["torn_lines"] = torn
    return frame


def _column(name: str, values: list[Any], paths: list[Path]) -> Any:
    if name in _TEXTS:
        return pd.Categorical(values)
    try:
        return np.asarray(values, dtype=_NUMBERS[name])
    except (TypeError, ValueError, OverflowError) as error:
        path, number, line = _first_unfit(name, paths)
        raise AccessLogError(_broken(path, number, line, f"{name}: expected a number")) from error


def _first_unfit(name: str, paths: list[Path]) -> tuple[Path, int, bytes]:
    for path, number, line in _lines(paths):
        try:
            np.asarray([orjson.loads(line)[name]], dtype=_NUMBERS[name])
        except (TypeError, ValueError, OverflowError, KeyError):
            return path, number, line
    return Path("?"), 0, b""


def _lines(paths: list[Path]) -> Iterator[tuple[Path, int, bytes]]:
    for path in paths:
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if line.strip():
                yield path, number, line


def _broken(path: Path, number: int, line: bytes, error: object) -> str:
    excerpt = line[:80].decode("utf-8", "replace")
    what = f"no field {error}" if isinstance(error, KeyError) else str(error)
    return (
        f"access log: {path}, line {number}: {what}: expected one JSON object with {', '.join(COLUMNS)}; got {excerpt!r}. "
        "Remove the line, or read a copy of the directory without this file."
    )
