"""Logs of what was asked of a server: a web server's (as CSV, or in its own format) and the gateway's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import datetime

import numpy as np
import numpy.typing as npt
import orjson

from envs.workloads.entry import entry_bytes, prompt_tokens, text_key
from envs.workloads.readers.batch import LATEST, MOST_TOKENS, SIZE_EXPECTED, Batch, Input, Verdict, make_batch
from envs.workloads.readers.tables import CsvTable, encoding_error
from envs.workloads.trace import MOST_BYTES
from serving.access_log import AccessRecord

LOG_LINE = re.compile(
    r"[^\[]*\[(?P<minute>\d\d/[A-Za-z]{3}/\d{4}:\d\d:\d\d):(?P<second>\d\d) ?(?P<zone>[+-]\d{4})\] "
    r'"(?P<request>(?:[^"\\]|\\.)*)" (?P<status>\d{3}) (?P<bytes>\d+|-)(?: |$)'
)
"""The common log format, of which the combined format is a longer form; nginx and Apache write both."""

_FIELDS = frozenset(item.name for item in fields(AccessRecord))
_ASKED_OF_CACHE = frozenset(("hit", "semantic_hit", "miss"))


class _Paths:
    """Paths as prompts: their keys and lengths, each worked out once."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self._keys: list[int] = []
        self._tokens: list[int] = []

    def batch(self, lines: Sequence[int], times: Sequence[float], paths: Sequence[str], sizes: Sequence[int]) -> Batch:
        """Return requests for ``paths`` whose answers have ``sizes`` bytes on the wire."""
        numbers = [self._number(path) for path in paths]
        tokens = np.clip(np.array(sizes, np.int64) // 4, 16, 2048)
        return make_batch(
            time=times,
            line=lines,
            key=np.array([self._keys[number] for number in numbers], np.uint64),
            size=entry_bytes(tokens, False),
            input_tokens=[self._tokens[number] for number in numbers],
            output_tokens=tokens,
            reference=numbers,
        )

    def _number(self, path: str) -> int:
        number = self._number_of.get(path)
        if number is None:
            number = self._number_of[path] = len(self._number_of)
            self._keys.append(text_key(path))
            self._tokens.append(int(prompt_tokens([path])[0]))
        return number

    def prompts(self, reference: npt.NDArray[np.int64]) -> tuple[Sequence[str], npt.NDArray[np.int64]]:
        """Return the texts by number, and each row's number."""
        return list(self._number_of), reference


class _PathReader:
    """A reader whose prompts are paths."""

    def __init__(self, given: Input) -> None:
        self._given = given
        self._paths = _Paths()
        self.tenants: list[str] = []
        self.prompts = self._paths.prompts


class ElasticApache(_PathReader):
    """A web server's log as CSV: ``t_s, method, path, status, bytes``."""

    note = (
        "GET requests of a web server (elastic/examples): a path stands for a prompt, its bytes over 4 for the answer's "
        "tokens (16 to 2048). Real arrivals and repeats, but not of a language model."
    )

    def batches(self) -> Iterator[Batch]:
        """Yield the GET requests; :class:`envs.workloads.readers.batch.Reader`."""
        for frame in CsvTable(self._given, ["method", "path"], ["t_s", "bytes"]):
            verdict = Verdict(len(frame))
            frame.require_number(verdict, "t_s")
            frame.require_number(verdict, "bytes")
            frame.require(verdict, frame.texts["path"] != "", "path: a path", "path")
            kept = np.flatnonzero(verdict.usable(self._given) & (frame.texts["method"] == "GET"))
            sizes = frame.numbers["bytes"][kept].astype(np.int64)
            times, paths = frame.numbers["t_s"][kept], frame.texts["path"][kept]
            yield self._paths.batch(frame.line[kept].tolist(), times.tolist(), paths.tolist(), sizes.tolist())
            verdict.reject(self._given)


class WebLog(_PathReader):
    """Apache's and nginx's own logs (common and combined format): GETs that were answered (2xx, 304), by path and query.

    A 304 has no body: it counts as long as the path's last answer that had one.
    """

    note = (
        "GET requests of a web server's access log: a path with its query stands for a prompt, its bytes over 4 for the answer's "
        "tokens (16 to 2048). Real arrivals and repeats, but not of a language model."
    )

    def __init__(self, given: Input) -> None:
        super().__init__(given)
        self._minutes: dict[str, float] = {}
        self._lengths: dict[str, int] = {}

    def batches(self) -> Iterator[Batch]:
        """Yield the requests; :class:`envs.workloads.readers.batch.Reader`."""
        for rows in self._given.rows(self._request):
            yield self._paths.batch(*zip(*rows, strict=True))

    def _request(self, number: int, line: bytes) -> tuple[int, float, str, int] | None:
        """Return line, time, path and bytes of an answered GET; None for any other request."""
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise encoding_error(self._given, number, error) from error
        if not text.strip():
            return None
        found = LOG_LINE.match(text)
        if found is None:
            form = 'a line of a web server\'s log: host - user [10/Oct/2000:13:55:36 -0700] "GET /path HTTP/1.1" 200 2326'
            raise self._given.error(form, number, text)
        minute, second, zone, request, status, length = found.groups()
        parts = request.split(" ")
        if parts[0] != "GET" or len(parts) < 2 or not parts[1] or not (status.startswith("2") or status == "304"):
            return None
        size = 0 if length == "-" else int(length)
        if size > MOST_BYTES:
            raise self._given.error(SIZE_EXPECTED, number, length)
        path = parts[1]
        if status == "304":
            size = self._lengths.get(path, size)
        else:
            self._lengths[path] = size
        return number, self._moment(number, minute, zone) + int(second), path, size

    def _moment(self, number: int, minute: str, zone: str) -> float:
        known = self._minutes.get(minute + zone)
        if known is None:
            try:
                known = datetime.strptime(f"{minute} {zone}", "%d/%b/%Y:%H:%M %z").timestamp()
            except (ValueError, OverflowError) as error:
                raise self._given.error("a time like 10/Oct/2000:13:55:36 -0700", number, f"{minute} {zone}") from error
            if len(self._minutes) > 10_000:
                self._minutes.clear()
            self._minutes[minute + zone] = known
        return known


class GatewayLog:
    """The gateway's own access log (:mod:`serving.access_log`): what was asked of the cache, by the fingerprint's short name.

    Left out are requests that did not ask the cache (``bypass``), that failed, or whose answer was nothing to store. A line that
    is still being written is no bad line.
    """

    note = (
        "What the gateway was asked, by its own access log: real arrivals, repeats, sizes and tokens of the answers; the prompts "
        "are not in the log. A group is not known: no request means the same as another."
    )

    def __init__(self, given: Input) -> None:
        self._given = given
        self.tenants: list[str] = []

    def batches(self) -> Iterator[Batch]:
        """Yield the requests; :class:`envs.workloads.readers.batch.Reader`."""
        for rows in self._given.rows(self._row):
            lines, times, keys, sizes, asked, answered = zip(*rows, strict=True)
            yield make_batch(
                time=times,
                line=lines,
                key=np.array(keys, np.uint64),
                size=sizes,
                input_tokens=asked,
                output_tokens=answered,
            )

    def _row(self, number: int, line: bytes) -> tuple[int, float, int, int, int, int] | None:
        """Return line, time, key, size and both tokens of what was asked of the cache; None for any other line."""
        if line.isspace() or not line.endswith(b"\n"):
            return None
        try:
            row = orjson.loads(line)
            outcome, key = row["outcome"], row["key"]
            at, size = float(row["at"]), row["size"]
            asked, answered = row["input_tokens"], row["output_tokens"]
            whole = all(type(value) is int for value in (key, size, asked, answered))
            if not whole or not 0 <= key < 2**64 or not 0.0 <= at <= LATEST:
                raise ValueError("a value that cannot be")
            if not (0 <= size <= MOST_BYTES and 0 <= asked <= MOST_TOKENS and 0 <= answered <= MOST_TOKENS):
                raise ValueError("a size or a number of tokens that cannot be")
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            form = f"a JSON object with {', '.join(item.name for item in fields(AccessRecord))} ({type(error).__name__}: {error})"
            raise self._given.error(form, number, line.decode(errors="replace").strip()) from error
        if outcome not in _ASKED_OF_CACHE or size == 0:
            return None
        return number, at, key, size, asked, answered


def is_gateway_row(row: dict[str, object]) -> bool:
    """Tell whether a JSON object is a record of the gateway's access log."""
    return row.keys() >= _FIELDS
