"""What the embedded scraper remembers of one target: samples by scrape and series, for a bounded time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

Labels = dict[str, str]


class TooManySeries(ValueError):
    """A target exports more series than may be kept."""


class TargetHistory:
    """The samples of one target. Not thread-safe: its owner holds the lock.

    Args:
        labels: Labels of the target, put on each of its series; a series' own label of that name becomes ``exported_<name>``.
        keep: Prefixes of the exported names that are kept. Other lines are dropped before anything is parsed: a Ray node exports
            some 580 KB of which a few percent are the gateway's.
        memory: Seconds for which samples are kept.
        max_series: Largest number of series kept at one time.
    """

    def __init__(self, labels: Mapping[str, str], keep: tuple[str, ...], *, memory: float, max_series: int) -> None:
        self._target_labels = dict(labels)
        self._keep = tuple(prefix.encode() for prefix in keep)
        self._memory = memory
        self._max_series = max_series
        self._rows: deque[tuple[float, npt.NDArray[np.float64]]] = deque()
        self._labels: list[Labels | None] = []  # by column; None: free
        self._seen: list[float] = []  # by column: time of the newest sample, also of a NaN
        self._free: list[int] = []
        self._by_name: dict[str, list[int]] = {}
        self._by_series: dict[tuple[str, frozenset[tuple[str, str]]], int] = {}
        self._by_text: dict[bytes, int] = {}  # the text of a series is parsed once, not once per scrape

    def append(self, at: float, exposition: bytes) -> None:
        """Take in one successful scrape.

        Args:
            at: When the scrape began, seconds. A scrape that is not later than the last is left out, as Prometheus does with
                samples out of order. Time stamps in the text are not looked at.
            exposition: The body, Prometheus' text format.

        Raises:
            ValueError: If a kept line is not in that format; nothing is taken in.
            TooManySeries: If there are too many series; nothing is taken in.
        """
        if self._rows and at <= self._rows[-1][0]:
            return
        samples: dict[bytes, float] = {}
        for line in exposition.split(b"\n"):
            if line.startswith(self._keep):
                series, value = _split(line)
                samples.setdefault(series, value)
        self._forget(at)
        fresh = [text for text in samples if text not in self._by_text]
        remembered = len(self._labels) - len(self._free) + len(fresh)
        if len(samples) > self._max_series or remembered > 4 * self._max_series:
            raise TooManySeries(
                f"{len(samples)} series, {remembered} with those lately gone: expected at most {self._max_series} and "
                f"{4 * self._max_series}; narrow the prefixes that are kept"
            )
        parsed = [(text, *_identity(text)) for text in fresh]
        for text, name, labels in parsed:
            self._by_text[text] = self._column(name, labels)
        row = np.full(len(self._labels), math.nan)
        for text, value in samples.items():
            column = self._by_text[text]
            row[column] = value
            self._seen[column] = at
        self._rows.append((at, row))

    def fail(self, at: float) -> None:
        """Take in a failed scrape: every series is stale from now on, as Prometheus marks them."""
        self._forget(at)
        self._rows.append((at, np.empty(0)))

    def matrix(self, columns: list[int], start: float, end: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return scrape times within ``[start, end]``, shape (N,), and samples of ``columns``, NaN where absent, (N, C)."""
        rows = [(at, row) for at, row in self._rows if start <= at <= end]
        values = np.full((len(rows), len(self._labels)), math.nan)
        for index, (_, row) in enumerate(rows):
            values[index, : len(row)] = row
        return np.array([at for at, _ in rows], dtype=np.float64), values[:, columns]

    def at(self, columns: list[int], time: float, staleness: float) -> npt.NDArray[np.float64]:
        """Return the present values of ``columns`` as of ``time``, NaN where absent, shape (C,)."""
        for at, row in reversed(self._rows):
            if at <= time:
                if at <= time - staleness:
                    break
                full = np.full(len(self._labels), math.nan)
                full[: len(row)] = row
                found: npt.NDArray[np.float64] = full[columns]
                return found
        return np.full(len(columns), math.nan)

    def select(self, name: str, where: Callable[[Labels], bool]) -> tuple[list[int], list[Labels]]:
        """Return the columns of a metric whose labels are wanted, and their labels."""
        found = [(column, labels) for column in self._by_name.get(name, ()) if (labels := self._known(column)) and where(labels)]
        return [column for column, _ in found], [labels for _, labels in found]

    def newest(self, columns: Iterable[int]) -> float:
        """Return when any of ``columns`` was last sampled; -inf for none."""
        return max((self._seen[column] for column in columns), default=-math.inf)

    def _known(self, column: int) -> Labels:
        labels = self._labels[column]
        assert labels is not None
        return labels

    def _column(self, name: str, own: Labels) -> int:
        labels = dict(self._target_labels)
        labels.update({f"exported_{key}" if key in self._target_labels else key: value for key, value in own.items()})
        labels["__name__"] = name
        identity = (name, frozenset(labels.items()))
        if identity not in self._by_series:
            if self._free:
                column = self._free.pop()
                self._labels[column] = labels
            else:
                column = len(self._labels)
                self._labels.append(labels)
                self._seen.append(-math.inf)
            self._by_series[identity] = column
            self._by_name.setdefault(name, []).append(column)
        return self._by_series[identity]

    def _forget(self, now: float) -> None:
        """Drop samples past the memory, and the columns of which none is left."""
        while self._rows and self._rows[0][0] < now - self._memory:
            self._rows.popleft()
        gone = {column for column, labels in enumerate(self._labels) if labels and self._seen[column] < now - self._memory}
        if not gone:
            return
        for name in {self._known(column)["__name__"] for column in gone}:
            self._by_name[name] = [column for column in self._by_name[name] if column not in gone]
        self._by_series = {key: column for key, column in self._by_series.items() if column not in gone}
        self._by_text = {text: column for text, column in self._by_text.items() if column not in gone}
        for column in gone:
            self._labels[column] = None
            self._seen[column] = -math.inf
        self._free.extend(sorted(gone))


def _split(line: bytes) -> tuple[bytes, float]:
    """Cut a sample line into the text of its series and its value."""
    cut = line.rfind(b"}") + 1 or line.find(b" ")
    rest = line[cut:].split() if cut > 0 else []
    try:
        return line[:cut].rstrip(), float(rest[0])
    except (IndexError, ValueError) as error:
        text = line[:200].decode(errors="replace")
        raise ValueError(f"expected a sample of Prometheus' text format (name{{labels}} value), got {text!r}") from error


def _identity(series: bytes) -> tuple[str, Labels]:
    """Parse the text of a series. Without its TYPE line the parser leaves the names as they are."""
    text = series.decode(errors="replace")
    try:
        (family,) = text_string_to_metric_families(f"{text} 0\n")
        (sample,) = family.samples
    except (ValueError, LookupError) as error:
        raise ValueError(f"expected a series of Prometheus' text format, got {text[:200]!r}: {error}") from error
    return sample.name, dict(sample.labels)
