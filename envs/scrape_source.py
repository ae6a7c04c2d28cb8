"""Signals without a Prometheus server: the embedded scraper reads the same endpoints and computes the same functions."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from envs import promql
from envs.scrape_history import Labels, TargetHistory
from envs.sources import (
    MEMORY,
    NO_LABELS,
    Aggregate,
    Groups,
    SourceUnavailable,
    TargetHealth,
    check_labels,
    check_window,
    exported_name,
)

Target = str | Path
"""A URL or host:port; or a Prometheus service-discovery file as Ray writes one: a ``Path``, or text that ends in ``.json``."""

Targets = Target | Iterable[Target] | Callable[[], Iterable[Target]]
"""Targets, or a function that returns them."""

LARGEST = 64 << 20
"""Most bytes of one scrape."""

_DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # like Prometheus: the environment's proxies are not for scrapes

_AGGREGATES: dict[Aggregate, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
    "avg": lambda values: math.fsum(values) / len(values),
}


@dataclass
class _Target:
    url: str
    history: TargetHistory
    succeeded_at: float = -math.inf
    error: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    active: bool = True


class ScrapeSource:
    """A :class:`~envs.sources.SignalSource` that scrapes by itself and remembers a bounded time.

    A thread scrapes every ``scrape_interval`` seconds, so that ``increase`` finds its two samples in any window of a few scrapes
    whenever it is asked; :meth:`refresh` scrapes once more.

    Args:
        targets: What to scrape; the model server's own metrics (``vllm:...``) are a target like others. Files and functions are
            read anew at every scrape; a function that fails should raise an ``OSError`` or ``ValueError``.
        scrape_interval: Seconds between two scrapes; None: only :meth:`refresh` scrapes.
        prefix: What Ray puts before the gateway's metric names.
        keep: Prefixes of the exported names that are read at all; by default the gateway's and vLLM's.
        selector: Labels that the gateway's series must have.
        timeout: Deadline of one scrape, seconds.
        memory: Seconds for which samples are kept; windows can not be longer.
        max_series: Largest number of series of one target; a target with more counts as failed.
        clock: Returns seconds since the epoch.

    Raises:
        SourceUnavailable: If no target answers the first scrape.
        ValueError: If the scrape interval is not positive.
    """

    def __init__(
        self,
        targets: Targets,
        *,
        scrape_interval: float | None = 1.0,
        prefix: str = "ray_",
        keep: tuple[str, ...] | None = None,
        selector: Mapping[str, str] = NO_LABELS,
        timeout: float = 3.0,
        memory: float = MEMORY,
        max_series: int = 20_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if scrape_interval is not None and not scrape_interval > 0:
            raise ValueError(f"scrape_interval: expected seconds > 0 or None, got {scrape_interval!r}")
        self._where_from: list[Target] | Callable[[], Iterable[Target]]
        if isinstance(targets, (str, Path)):
            self._where_from = [targets]
        else:
            self._where_from = targets if callable(targets) else list(targets)
        self._prefix = prefix
        self._keep = keep if keep is not None else (f"{prefix}cachepilot_", "vllm:")
        self._selector = dict(selector)
        self._timeout = timeout
        self._memory = memory
        self._max_series = max_series
        self._clock = clock
        self._at = -math.inf
        self._targets: dict[str, _Target] = {}
        self._discovery_error = ""
        self._scraping = threading.Lock()  # one scrape at a time
        self._lock = threading.Lock()  # guards the histories
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="scrape")
        try:
            self.refresh()
        except SourceUnavailable:
            self.close()
            raise
        if scrape_interval is not None:
            self._thread = threading.Thread(target=self._run, args=(scrape_interval,), name="scrape-source", daemon=True)
            self._thread.start()

    def __enter__(self) -> ScrapeSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def refresh(self) -> None:
        """Scrape every target and move the time of evaluation to that scrape.

        Raises:
            SourceUnavailable: If no target answered.
        """
        self._at = self._scrape()
        with self._lock:
            targets = [target for target in self._targets.values() if target.active]
        if not any(target.succeeded_at >= self._at for target in targets):
            tried = "; ".join(f"{target.url}: {target.error}" for target in targets) or "there was no target to scrape"
            if self._discovery_error:
                tried = f"{self._discovery_error}; {tried}"
            raise SourceUnavailable(
                f"embedded scraper: no metrics from {self._describe()}: {tried}. Expected Prometheus' text format from at least "
                "one target: check that the gateway runs and that Ray was started with its dashboard, whose agent exports them."
            )

    def increase(self, metric: str, *, by: tuple[str, ...] = (), where: Mapping[str, str] = NO_LABELS, window: float) -> Groups:
        """Return the growth of a counter, by :func:`envs.promql.increase` over each series, summed."""
        return _aggregate(self._growth(exported_name(metric, self._prefix), self._all(metric, where), by, window), "sum")

    def latest(
        self,
        metric: str,
        *,
        by: tuple[str, ...] = (),
        where: Mapping[str, str] = NO_LABELS,
        aggregate: Aggregate = "sum",
    ) -> Groups:
        """Return the present values of a gauge; a series is gone after a scrape without it, or after 5 minutes."""
        wanted = _matcher(self._all(metric, where))
        name = exported_name(metric, self._prefix)
        check_labels(*by)
        with self._lock:
            found = []
            for target in self._targets.values():
                columns, labels = target.history.select(name, wanted)
                found.append((labels, target.history.at(columns, self._at, promql.STALENESS)))
        return _aggregate(_samples(found, by), aggregate)

    def quantile(
        self, q: float, metric: str, *, by: tuple[str, ...] = (), where: Mapping[str, str] = NO_LABELS, window: float
    ) -> Groups:
        """Return a quantile by :func:`envs.promql.histogram_quantile` of the buckets' growth."""
        name = exported_name(metric + "_bucket", self._prefix)
        growth = _aggregate(self._growth(name, self._all(metric, where), (*by, "le"), window), "sum")
        buckets: dict[tuple[str, ...], list[tuple[float, float]]] = {}
        for (*group, bound), count in growth.items():
            try:
                buckets.setdefault(tuple(group), []).append((float(bound), count))
            except ValueError:  # not a bucket: Prometheus leaves it out too
                continue
        return {group: promql.histogram_quantile(q, found) for group, found in buckets.items()}

    def age(self, metric: str, *, where: Mapping[str, str] = NO_LABELS) -> float:
        """Return seconds since the newest sample of a metric, alive or gone; inf if none is remembered."""
        wanted = _matcher(self._all(metric, where))
        name = exported_name(metric, self._prefix)
        with self._lock:
            histories = [target.history for target in self._targets.values()]
            seen = max((history.newest(history.select(name, wanted)[0]) for history in histories), default=-math.inf)
        return max(0.0, self._at - seen)

    def targets(self) -> list[TargetHealth]:
        """Return the targets of the last scrape and how they are."""
        with self._lock:
            return [
                TargetHealth(target.url, not target.error, max(0.0, self._at - target.succeeded_at), target.error)
                for target in self._targets.values()
                if target.active
            ]

    def close(self) -> None:
        """Stop scraping."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._pool.shutdown()

    def _run(self, interval: float) -> None:
        while not self._stop.wait(interval):
            self._scrape()

    def _growth(
        self, name: str, where: Mapping[str, str], by: tuple[str, ...], window: float
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        check_labels(*by)
        start, wanted = self._at - check_window(window), _matcher(where)
        with self._lock:
            found = []
            for target in self._targets.values():
                columns, labels = target.history.select(name, wanted)
                if columns:
                    times, values = target.history.matrix(columns, start, self._at)
                    found.append((labels, promql.increase(times, values, start, self._at)))
        return _samples(found, by)

    def _all(self, metric: str, where: Mapping[str, str]) -> dict[str, str]:
        check_labels(*where)
        return {**(self._selector if metric.startswith("cachepilot_") else {}), **where}

    def _describe(self) -> str:
        if callable(self._where_from):
            return "the targets found"
        return ", ".join(str(target) for target in self._where_from) or "an empty list of targets"

    def _scrape(self) -> float:
        """Scrape all targets side by side, so that a dead one delays nobody; return when it began."""
        with self._scraping:
            self._discover()
            began = self._clock()
            active = [target for target in self._targets.values() if target.active]
            answers = list(self._pool.map(lambda target: (target, *self._fetch(target.url)), active))
            with self._lock:
                for target, body, error in answers:
                    try:
                        if body is None:
                            raise ValueError(error)
                        target.history.append(began, body)
                    except ValueError as failed:
                        target.history.fail(began)
                        target.error = str(failed)
                    else:
                        target.error, target.succeeded_at = "", began
            return began

    def _fetch(self, url: str) -> tuple[bytes | None, str]:
        request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4"})
        # The socket's timeout is per read: a target that sends a little now and then needs a deadline for the whole.
        ends = time.monotonic() + self._timeout
        body = bytearray()
        try:
            with _DIRECT.open(request, timeout=self._timeout) as answer:
                while part := answer.read1(1 << 16):
                    body += part
                    if len(body) > LARGEST:
                        raise ValueError(f"expected at most {LARGEST} bytes")
                    if time.monotonic() > ends:
                        raise TimeoutError(f"not complete within {self._timeout:g} s")
                return bytes(body), ""
        except (OSError, ValueError, HTTPException) as error:
            return None, f"{type(error).__name__}: {error}"

    def _discover(self) -> None:
        """Bring the targets up to date. Those of an unreadable file stay; those gone are stale, but what they counted is kept."""
        try:
            wanted = dict(_read_targets(self._where_from))
            self._discovery_error = ""
        except (OSError, ValueError) as error:
            self._discovery_error = str(error)
            return
        now = self._clock()
        with self._lock:
            for url, target in list(self._targets.items()):
                if wanted.get(url) == target.labels:
                    target.active = True
                elif url in wanted or target.succeeded_at < now - self._memory:
                    del self._targets[url]
                elif target.active:
                    target.active = False
                    target.history.fail(now)
            for url, labels in wanted.items():
                if url not in self._targets:
                    history = TargetHistory(labels, self._keep, memory=self._memory, max_series=self._max_series)
                    self._targets[url] = _Target(url, history, labels=labels)


def _read_targets(where: list[Target] | Callable[[], Iterable[Target]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the URL and the labels of each target."""
    for target in where() if callable(where) else where:
        if isinstance(target, Path) or (target.endswith(".json") and "://" not in target):
            yield from _read_file(Path(target))
        else:
            yield _locate(target, {})


def _read_file(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    expected = 'a service-discovery file: [{"targets": ["host:port"], "labels": {...}}]'
    try:
        for group in json.loads(path.read_text()):
            for target in group["targets"]:
                yield _locate(target, {str(key): str(value) for key, value in (group.get("labels") or {}).items()})
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file; expected {expected}. Ray writes it when it starts with its dashboard") from error
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: expected {expected}; got {type(error).__name__}: {error}") from error


def _locate(target: str, labels: dict[str, str]) -> tuple[str, dict[str, str]]:
    url = target if "://" in target else f"http://{target}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"target: expected host:port or an http(s) URL, got {target!r}")
    if parts.path in ("", "/"):
        url = f"{parts.scheme}://{parts.netloc}{labels.get('__metrics_path__', '/metrics')}"
    shown = {name: value for name, value in labels.items() if not name.startswith("__")}
    return url, {**shown, "instance": parts.netloc}


def _matcher(where: Mapping[str, str]) -> Callable[[Labels], bool]:
    return lambda labels: all(labels.get(name, "") == value for name, value in where.items())


def _samples(
    found: Iterable[tuple[list[Labels], npt.NDArray[np.float64]]], by: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for labels, values in found:
        for own, value in zip(labels, values.tolist(), strict=True):
            if not math.isnan(value):
                yield tuple(own.get(label, "") for label in by), value


def _aggregate(samples: Iterable[tuple[tuple[str, ...], float]], how: Aggregate) -> Groups:
    groups: dict[tuple[str, ...], list[float]] = {}
    for group, value in samples:
        groups.setdefault(group, []).append(value)
    return {group: _AGGREGATES[how](values) for group, values in groups.items()}
