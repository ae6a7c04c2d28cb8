"""The formats that are known, and which of them a file has: told by its content."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from envs.workloads.errors import TraceError
from envs.workloads.readers import access_logs, blocks, cachesim, llm_csv, mapped, servegen
from envs.workloads.readers.batch import Input, Reader

KNOWN = {
    "elastic_apache": "CSV with the columns t_s, method, path, status, bytes",
    "mooncake": "JSON lines with timestamp (ms), input_length, output_length, hash_ids, as mooncake_conversation",
    "bailian": "JSON lines with chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn, hash_ids",
    "azure": "CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens",
    "burstgpt": "CSV with the columns Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type",
    "servegen": "CSV with the columns time_s, rate_total, cv_rate_weighted, rate_c<ID>...",
    "banking77": "CSV with the columns text, category, split; needs arrivals: an azure2023_conv file beside it",
    "oracle_general": "libCacheSim's binary records of 24 bytes: u32 time, u64 object, u32 size, i64 next access",
    "libcachesim_csv": "CSV with columns like time, obj_id (or lbn), size",
    "access_log": "an Apache or nginx access log, common or combined format",
    "gateway": "the gateway's own access log, JSON lines",
    "csv": "any CSV, with columns={'time': ..., 'key': ..., 'size': ...} (--column time=..., each)",
    "parquet": "any Parquet file, with columns={'time': ..., 'key': ..., 'size': ...} (--column time=..., each)",
}
"""Formats by name, with what tells them."""

_CACHESIM_NOTE = (
    "Requests to a cache (libCacheSim CSV) with their real sizes: an object stands for an answer, a quarter of its bytes for its "
    "tokens. Not of a language model."
)

_DELIMITERS = ",\t;|"


@dataclass(frozen=True)
class Found:
    """What a file is.

    Attributes:
        format: Its name in :data:`KNOWN`.
        columns: The column map that its reader needs; empty for most.
    """

    format: str
    columns: Mapping[str, str]


def check_format(format: str | None) -> None:
    """Check the name of a format.

    Raises:
        ValueError: If there is none of that name.
    """
    if format is not None and format not in KNOWN:
        raise ValueError(f"format: expected one of {', '.join(KNOWN)}, got {format!r}")


def find(given: Input, format: str | None = None) -> Found:
    """Tell the format of a file by its first lines or bytes.

    Args:
        given: The file; a column map makes it ``csv`` or ``parquet``.
        format: The format where it is known: then only what it leaves open is looked for.

    Raises:
        TraceError: If the file is empty or none of the known formats.
    """
    head = given.source.head()
    if not head:
        raise given.error("a trace, but the file is empty", 1)
    columns = dict(given.columns)
    if head.startswith(b"PAR1") if format is None else format == "parquet":
        return Found("parquet", columns or _natural(given, mapped.parquet_columns(given)))
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") and format not in ("oracle_general",):
        raise given.error("text in UTF-8, but it begins like UTF-16: convert it (iconv -f UTF-16 -t UTF-8)", 1)
    if format == "csv" or (format is None and columns):
        return Found("csv", columns or _natural(given, _names(head)[0]))
    if format == "libcachesim_csv":
        return _cachesim(given, head)
    if format is not None:
        return Found(format, columns)
    name = _by_header(head) or _by_lines(head)
    if name:
        return Found(name, {})
    if not _is_text(head) and cachesim.looks_like(head):
        return Found("oracle_general", {})
    names, delimiter = _names(head)
    for columns in (mapped.natural_map(names), mapped.cachesim_map(names)):
        if columns:
            kind = "csv" if columns.keys() > {"time", "key"} and columns["key"] == "key" else "libcachesim_csv"
            return Found(kind, {**columns, "delimiter": delimiter})
    raise _unknown(given, head)


def _natural(given: Input, names: list[str]) -> dict[str, str]:
    columns = mapped.natural_map(names)
    if not columns:
        raise given.error(
            "a map of its columns, columns={'time': ..., 'key': ..., 'size': ...} (--column time=... --column key=... "
            "--column size=...), since they are not named by what they are",
            None,
            ", ".join(names),
        )
    return columns


def _cachesim(given: Input, head: bytes) -> Found:
    names, delimiter = _names(head)
    columns = dict(given.columns) or mapped.cachesim_map(names)
    if not columns:
        # libCacheSim's default where there is no header: time, object, size.
        if len(names) < 3 or not all(name.strip().lstrip("-").isdecimal() for name in names[:3]):
            raise given.error("columns of time, obj_id and size, or at least three columns without a header", 1, ",".join(names))
        columns = {"time": "1", "key": "2", "size": "3", "header": "no"}
    return Found("libcachesim_csv", {"delimiter": delimiter, **columns})


def open_reader(given: Input, found: Found) -> Reader:
    """Return the reader of a format that reads by itself (all but ``banking77``)."""
    simple: dict[str, Callable[[Input], Reader]] = {
        "elastic_apache": access_logs.ElasticApache,
        "mooncake": blocks.mooncake,
        "bailian": blocks.bailian,
        "azure": llm_csv.Azure,
        "burstgpt": llm_csv.BurstGpt,
        "servegen": servegen.ServeGen,
        "oracle_general": cachesim.OracleGeneral,
        "access_log": access_logs.WebLog,
        "gateway": access_logs.GatewayLog,
    }
    if found.format in simple:
        return simple[found.format](given)
    mapped.check_map(found.columns)
    if found.format == "parquet":
        return mapped.ParquetTable(given, found.columns)
    return mapped.MappedTable(given, found.columns, _CACHESIM_NOTE if found.format == "libcachesim_csv" else "")


def _first_lines(head: bytes) -> list[bytes]:
    lines = head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 32)[:32]
    return [line.strip() for line in lines if line.strip()]


def _names(head: bytes) -> tuple[list[str], str]:
    """Return the fields of the first line, and the delimiter: the likeliest by count."""
    first = next(iter(_first_lines(head)), b"")[:65_536].decode(errors="replace")
    delimiter = max(_DELIMITERS, key=first.count)
    try:
        return next(csv.reader([first], delimiter=delimiter), []), delimiter
    except csv.Error:
        return first.split(delimiter), delimiter


def _by_header(head: bytes) -> str:
    names = set(_names(head)[0])
    if set(llm_csv.AZURE) <= names:
        return "azure"
    if {"t_s", "path", "bytes"} <= names:
        return "elastic_apache"
    if {"text", "category"} <= names:
        return "banking77"
    if set(llm_csv.BURSTGPT) <= names:
        return "burstgpt"
    if {"time_s", "rate_total", "cv_rate_weighted"} <= names:
        return "servegen"
    return ""


def _by_lines(head: bytes) -> str:
    """Tell formats without a header by the first line of a few that is one of theirs."""
    braces = False
    for line in _first_lines(head):
        if line.startswith(b"{"):
            braces = True
            try:
                row: Any = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if access_logs.is_gateway_row(row):
                return "gateway"
            name = blocks.looks_like(row)
            if name:
                return name
        elif access_logs.LOG_LINE.match(line.decode(errors="replace")):
            return "access_log"
    # Broken from the first line on: what is missing is said line by line.
    return "mooncake" if braces and b'"hash_ids"' in head else ""


def _is_text(head: bytes) -> bool:
    return b"\0" not in head[:65_536]


def _unknown(given: Input, head: bytes) -> TraceError:
    known = "; ".join(f"{name}: {form}" for name, form in KNOWN.items())
    first = head.split(b"\n", 1)[0][:200]
    shown = first.decode(errors="replace") if _is_text(head) else repr(first[:24])
    return given.error(f"one of the known formats ({known}), or its name as format= (--format)", 1, shown)
