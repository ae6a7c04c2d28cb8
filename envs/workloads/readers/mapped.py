"""Tables of any origin: CSV or Parquet with a map of what their columns mean; libCacheSim's CSV is one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from envs.workloads.entry import entry_bytes, text_key
from envs.workloads.readers.batch import (
    LATEST,
    MOST_TOKENS,
    SIZE_EXPECTED,
    Batch,
    Column,
    Input,
    Verdict,
    good_sizes,
    make_batch,
)
from envs.workloads.readers.cachesim import object_tokens
from envs.workloads.readers.llm_csv import moments
from envs.workloads.readers.tables import CsvTable, Frame
from envs.workloads.trace import MOST_BYTES
from serving.keys import mix64_array

ROLES = ("time", "key", "size", "input_tokens", "output_tokens", "tenant", "document", "group")
"""What a column can be."""

OPTIONS = ("time_unit", "delimiter", "header", "size_bytes")
"""What else a column map may say."""

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of time by name, in a second."""

_CACHESIM = {
    "time": ("time", "timestamp", "clock_time", "real_time", "ts"),
    "key": ("obj_id", "object", "obj", "object_id", "lbn", "id", "key"),
    "size": ("size", "obj_size", "object_size"),
}
"""Names of the columns of libCacheSim's CSV files, by what they are."""

_PYARROW = "Parquet needs pyarrow: pip install 'cachepilot[parquet]' (or pip install pyarrow)"


def check_map(columns: Mapping[str, str]) -> None:
    """Check a column map.

    Raises:
        ValueError: If it names what no column can be, or lacks what a trace needs.
    """
    unknown = [name for name in columns if name not in ROLES and name not in OPTIONS]
    if unknown:
        raise ValueError(f"columns: {', '.join(unknown)}: expected some of {', '.join((*ROLES, *OPTIONS))}")
    missing = [name for name in ("time", "key") if name not in columns]
    if missing:
        raise ValueError(f"columns: expected the columns of time and key, missing: {', '.join(missing)}")
    if not {"size", "output_tokens", "size_bytes"} & columns.keys():
        raise ValueError("columns: expected a column of size or of output_tokens, or size_bytes, the bytes of every entry")
    if columns.get("time_unit", "s") not in UNITS:
        raise ValueError(f"columns: time_unit: expected one of {', '.join(UNITS)}, got {columns['time_unit']!r}")
    if columns.get("header", "yes") not in ("yes", "no"):
        raise ValueError(f"columns: header: expected yes or no, got {columns['header']!r}")
    if len(columns.get("delimiter", ",")) != 1:
        raise ValueError(f"columns: delimiter: expected one character, got {columns['delimiter']!r}")
    if "size_bytes" in columns:
        given = str(columns["size_bytes"])
        if not given.isdecimal() or not 0 < int(given) <= MOST_BYTES:
            raise ValueError(f"columns: size_bytes: expected whole bytes from 1 to below 2 GiB, got {columns['size_bytes']!r}")


def natural_map(names: list[str]) -> dict[str, str]:
    """Return the map of a table whose columns are named by what they are; empty where it cannot be told."""
    found = {role: role for role in ROLES if role in names}
    return found if {"time", "key"} <= found.keys() and {"size", "output_tokens"} & found.keys() else {}


def cachesim_map(names: list[str]) -> dict[str, str]:
    """Return the column map of a libCacheSim CSV with these column names; empty where it is none."""
    lower = {name.strip().lower(): name for name in names}
    found = {role: next((lower[name] for name in known if name in lower), "") for role, known in _CACHESIM.items()}
    return found if all(found.values()) else {}


class MappedTable:
    """A table whose columns are named by a map.

    A key that is a whole number below 2**64 is that number, however it is stored; any other is a text. Sizes that the table does
    not have follow from the completion tokens, and these from the sizes. Rows of no bytes are left out.

    Args:
        given: The file.
        columns: The map, checked.
        note: What the trace is.
    """

    def __init__(self, given: Input, columns: Mapping[str, str], note: str = "") -> None:
        self._given = given
        self._map = dict(columns)
        self._number_of: dict[str, int] = {}
        self.note = note or f"Read from {given.path.name} by a column map: what it is and is not, its owner knows."

    @property
    def tenants(self) -> list[str]:
        """The tenants by number, as far as they were met."""
        return list(self._number_of)

    def frames(self) -> Iterator[Frame]:
        """Yield the table's rows in frames."""
        texts = [self._map[role] for role in ("time", "key", "tenant", "document", "group") if role in self._map]
        numbers = [self._map[role] for role in ("size", "input_tokens", "output_tokens") if role in self._map]
        return iter(
            CsvTable(
                self._given,
                texts,
                numbers,
                delimiter=self._map.get("delimiter", ","),
                header=self._map.get("header", "yes") == "yes",
            )
        )

    def batches(self) -> Iterator[Batch]:
        """Yield the requests; :class:`envs.workloads.readers.batch.Reader`."""
        for frame in self.frames():
            yield from self._convert(frame)

    def _convert(self, frame: Frame) -> Iterator[Batch]:
        verdict = Verdict(len(frame))
        name = self._map["time"]
        time = times(frame.texts[name], UNITS[self._map.get("time_unit", "s")])
        frame.require(verdict, np.abs(time) <= LATEST, f"{name}: a finite time, as a number or like 2023-11-16 18:15:46", name)
        key_column = self._map["key"]
        frame.require(verdict, frame.texts[key_column] != "", f"{key_column}: a key", key_column)
        given: dict[str, npt.NDArray[np.int64]] = {}
        for role in ("input_tokens", "output_tokens"):
            if role in self._map:
                frame.require_number(verdict, self._map[role], MOST_TOKENS)
                given[role] = _whole(frame.numbers[self._map[role]], MOST_TOKENS)
        if "size" in self._map:
            name = self._map["size"]
            frame.require(verdict, good_sizes(frame.numbers[name]), f"{name}: {SIZE_EXPECTED}", name)
            given["size"] = _whole(frame.numbers[name], MOST_BYTES)
        elif "size_bytes" in self._map:
            given["size"] = np.full(len(frame), int(self._map["size_bytes"]), np.int64)
        else:
            given["size"] = entry_bytes(given["output_tokens"], False)
        if "output_tokens" not in given:
            given["output_tokens"] = object_tokens(given["size"])
        for role in ("document", "group"):
            if role in self._map:
                given[role] = numbered(frame.texts[self._map[role]])
        if "tenant" in self._map:
            number_of = self._number_of
            given["tenant"] = np.array(
                [number_of.setdefault(str(name), len(number_of)) for name in frame.texts[self._map["tenant"]]], np.int64
            )
        keys = named(frame.texts[key_column])
        yield from verdict.sift(self._given, make_batch(time=time, line=frame.line, key=keys, **given))


class ParquetTable(MappedTable):
    """A Parquet file whose columns are named by a map.

    Raises:
        TraceError: If pyarrow is not installed, or the file is no Parquet or lacks a column.
    """

    def frames(self) -> Iterator[Frame]:
        """Yield the table's rows in frames; ``line`` is the row, from 1."""
        parquet = _parquet(self._given)
        roles = {role: name for role, name in self._map.items() if role in ROLES}
        missing = [name for name in roles.values() if name not in parquet.schema_arrow.names]
        if missing:
            raise self._given.error(
                f"the columns {', '.join(roles.values())}; missing: {', '.join(missing)}",
                None,
                ", ".join(parquet.schema_arrow.names),
            )
        first = 1
        import pyarrow  # type: ignore[import-untyped,unused-ignore]

        try:
            for batch in parquet.iter_batches(batch_size=65_536, columns=sorted(set(roles.values()))):
                line = np.arange(first, first + len(batch), dtype=np.int64)
                first += len(batch)
                texts, numbers, written = {}, {}, {}
                for role, name in roles.items():
                    column = batch.column(batch.schema.get_field_index(name))
                    if role in ("size", "input_tokens", "output_tokens"):
                        values = column.to_pandas()
                        written[name] = values.to_numpy(dtype=object)
                        numbers[name] = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
                    else:
                        texts[name] = _texts(column)
                yield Frame(self._given, line, texts, numbers, written)
        except (pyarrow.ArrowException, OSError) as error:
            raise self._given.error(f"undamaged Parquet data ({error}): copy or download it again", first) from error


def parquet_columns(given: Input) -> list[str]:
    """Return the names of a Parquet file's columns.

    Raises:
        TraceError: If pyarrow is not installed or the file is no Parquet.
    """
    return list(_parquet(given).schema_arrow.names)


def _parquet(given: Input) -> Any:
    try:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise given.error(_PYARROW, None) from error
    if given.source.compression:
        raise given.error(f"Parquet that is not packed again (here with {given.source.compression}): unpack it first", None)
    try:
        return pyarrow.parquet.ParquetFile(given.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise given.error(f"undamaged Parquet data ({error}): copy or download it again", None) from error


def _texts(column: Any) -> Column:
    """Return an arrow column as objects: times as seconds since the epoch, numbers as they are, nothing as ``""``."""
    import pyarrow.types  # type: ignore[import-untyped,unused-ignore]

    if pyarrow.types.is_timestamp(column.type):
        stamps = column.to_pandas()
        nanoseconds = stamps.dt.tz_localize(None) if stamps.dt.tz is None else stamps.dt.tz_convert("UTC").dt.tz_localize(None)
        return np.array([str(value) for value in nanoseconds.astype("datetime64[ns]").to_numpy()], dtype=object)
    values = column.to_pandas()
    return np.where(values.isna(), "", values.astype(object)).astype(object)


def times(column: Column, per_second: float) -> npt.NDArray[np.float64]:
    """Return seconds of times that are numbers (in a unit of which ``per_second`` make a second) or ISO texts; NaN for others."""
    try:
        return column.astype(np.float64) / per_second
    except (ValueError, TypeError):
        parsed = np.empty(len(column))
        texts = np.array([str(value) for value in column], dtype=object)
        iso = np.array(["-" in text[1:] and ":" in text for text in texts], np.bool_)
        parsed[iso] = moments(texts[iso])
        parsed[~iso] = [_number(text) / per_second for text in texts[~iso]]
        return parsed


def named(column: Column) -> npt.NDArray[np.uint64]:
    """Return the 64-bit keys of names: a whole number below 2**64 is mixed, a text is hashed; both the same everywhere."""
    places, names = pd.factorize(column)
    keys = np.array([_key(name) for name in names], np.uint64)
    numeric = np.array([_is_whole(name) for name in names], np.bool_)
    keys[numeric] = mix64_array(keys[numeric])
    return keys[places] if len(keys) else np.zeros(len(column), np.uint64)


def numbered(column: Column) -> npt.NDArray[np.int64]:
    """Return non-negative 63-bit names of documents or groups; -1 where there is none."""
    absent = np.array([value is None or str(value) in ("", "-1") for value in column], np.bool_)
    numbers = (named(column) >> np.uint64(1)).astype(np.int64)
    return np.where(absent, -1, numbers)


def _is_whole(name: object) -> bool:
    text = str(name)
    return text.isascii() and text.isdecimal() and (text == "0" or text[0] != "0") and int(text) < 2**64


def _key(name: object) -> int:
    return int(str(name)) if _is_whole(name) else text_key(str(name))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _whole(numbers: npt.NDArray[np.float64], most: float) -> npt.NDArray[np.int64]:
    """Return numbers as whole ones; 0 for what cannot be, which the verdict rejects."""
    return np.where((numbers >= 0) & (numbers <= most), numbers, 0).astype(np.int64)
