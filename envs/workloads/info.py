"""What a trace is like, in one pass and in memory that grows with its keys only: ``cachepilot trace info``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.workloads import info_kernel as kernel
from envs.workloads.info_parts import (
    Bins,
    Distances,
    Gaps,
    KeyTable,
    Quantiles,
    Scale,
    WindowInfo,
    Windows,
    mean,
    of_histogram,
    quantiles,
    slope,
    zipf_exponent,
)
from envs.workloads.readers import TraceStream
from envs.workloads.trace import Trace

EXACT_REQUESTS = 20_000_000
"""Requests whose reuse distances are measured exactly; then only one key in eight is followed, and again after as many."""

MOST_WINDOWS = 512
"""Windows that are told one by one; of more every second, third, ... is."""

MOST_TENANTS = 32
"""Tenants that are told one by one, the busiest ones."""

PARTS_OF_TRACE = 24
"""Windows that a trace is cut into, about, where no window is given."""

_CHUNK = 262_144
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_ROUND = (
    *(scale * step for scale in (1e-3, 1e-2, 1e-1) for step in (1, 2, 5)),
    *(1, 2, 5, 10, 15, 30, *(_MINUTE * n for n in (1, 2, 5, 10, 15, 30)), *(_HOUR * n for n in (1, 2, 4, 6, 12))),
    *(_DAY * n for n in (1, 2, 7, 14, 28, 91, 365)),
)


@dataclass(frozen=True)
class TenantInfo:
    """One tenant: its number, its name where the format has one, its requests and their share."""

    tenant: int
    name: str
    requests: int
    share: float


@dataclass(frozen=True)
class TraceInfo:
    """What a trace is like. Times in seconds, sizes in bytes, shares 0..1; None where something is not defined.

    Attributes:
        name: Of the trace.
        kind: ``exact`` or ``semantic``.
        format: Of the file; "" where it is none.
        note: What the trace is and is not.
        requests: Rows.
        arrivals: Requests, where blocks of one chain count as one.
        keys: Distinct keys.
        groups: Distinct meanings; 0 for an exact trace.
        documents: Distinct documents that answers rest on.
        updates: Updates of documents.
        flushes: Moments at which everything cached becomes worthless.
        skipped: Bad lines that were left out.
        zero_sized: Requests of no bytes that were left out.
        tenants: Tenants, the busiest first.
        duration: From the first to the last request.
        rate: Requests a second.
        bytes: Of all requests' entries.
        footprint: Of all keys' entries, each as last asked for: what an infinite cache holds.
        input_tokens: Of all prompts.
        output_tokens: Of all answers.
        window: Width of the windows.
        window_count: Windows with requests.
        windows: The windows; every n-th of more than :data:`MOST_WINDOWS`.
        working_set_keys: Keys in a window.
        working_set_bytes: Bytes of their entries.
        one_hit_share: Share of keys that are asked for once.
        reuse_keys: Reuse distance of requests for known keys: distinct other keys asked for in between.
        reuse_bytes: Bytes of these and of the entry itself: the smallest LRU budget under which the request hits.
        reuse_age: Time since the key was last asked for.
        reuse_sample: Smallest share of keys whose reuse distances were followed; 1 where the distances are exact.
        scales: Burstiness of arrivals on three scales of time.
        gap_variation: Coefficient of variation of the gaps between arrivals; 1 for a Poisson process.
        divergence: Mean Jensen-Shannon distance between consecutive windows.
        noise: Mean of what windows differ by chance (see :class:`WindowInfo`); drift is what ``divergence`` has above it.
        new_share: Mean share of a window's requests that go to keys new in it (but for the first window).
        entropy_slope: Change of a window's entropy, bits an hour.
        zipf_exponent: Slope of requests by rank of a key, log-log, over keys with at least five requests.
        zipf_fit: How well it fits, r squared.
        top_share: Share of requests that go to the hundredth of keys that is asked for most.
        infinite_hit_ratio: Share of requests whose key was asked for before.
        infinite_byte_hit_ratio: The same by bytes.
        infinite_prefix_hit_ratio: Share of requests that also find every block before them in their chain.
        infinite_prefix_byte_hit_ratio: The same by bytes.
        chained: Whether there are chains of prefix blocks; if not, the last two equal the two before.
    """

    name: str
    kind: str
    format: str
    note: str
    requests: int
    arrivals: int
    keys: int
    groups: int
    documents: int
    updates: int
    flushes: int
    skipped: int
    zero_sized: int
    tenants: tuple[TenantInfo, ...]
    duration: float
    rate: float | None
    bytes: int
    footprint: int
    input_tokens: int
    output_tokens: int
    window: float
    window_count: int
    windows: tuple[WindowInfo, ...]
    working_set_keys: Quantiles
    working_set_bytes: Quantiles
    one_hit_share: float | None
    reuse_keys: Quantiles
    reuse_bytes: Quantiles
    reuse_age: Quantiles
    reuse_sample: float
    scales: tuple[Scale, ...]
    gap_variation: float | None
    divergence: float | None
    noise: float | None
    new_share: float | None
    entropy_slope: float | None
    zipf_exponent: float | None
    zipf_fit: float | None
    top_share: float | None
    infinite_hit_ratio: float | None
    infinite_byte_hit_ratio: float | None
    infinite_prefix_hit_ratio: float | None
    infinite_prefix_byte_hit_ratio: float | None
    chained: bool

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and texts, ready for JSON."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        return plain


def trace_info(
    source: TraceStream | Trace | Iterable[Trace],
    *,
    window: float | None = None,
    progress: Callable[[int, float], None] | None = None,
    exact_requests: int = EXACT_REQUESTS,
) -> TraceInfo:
    """Measure a trace in one pass.

    Args:
        source: A trace, or a stream of its chunks in order on one time axis.
        window: Seconds of a window; None for a round number that makes about :data:`PARTS_OF_TRACE` of the trace (of a stream
            as far as its first chunk lets guess).
        progress: Called after each chunk with the requests so far and the share of the file that was read (0 where unknown).
        exact_requests: Requests whose reuse distances are measured exactly, before keys are sampled.

    Raises:
        TraceError: If the stream cannot be read.
        ValueError: If the window is not positive, or there is no request.
    """
    if window is not None and not 0 < window < math.inf:
        raise ValueError(f"trace_info: window: expected finite seconds > 0, got {window!r}")
    collected: _Collected | None = None
    for chunk in _chunks(source):
        if not len(chunk):
            continue
        if collected is None:
            collected = _Collected(window if window is not None else _guess_window(source, chunk), exact_requests)
        collected.add(chunk)
        if progress is not None:
            share = source.bytes_read / source.total_bytes if isinstance(source, TraceStream) and source.total_bytes else 0.0
            progress(collected.requests, share)
    if collected is None:
        raise ValueError("trace_info: expected at least one request")
    return collected.result(source)


def _chunks(source: TraceStream | Trace | Iterable[Trace]) -> Iterator[Trace]:
    if not isinstance(source, Trace):
        yield from source
        return
    for start in range(0, max(len(source), 1), _CHUNK):
        part = source.take(np.arange(start, min(start + _CHUNK, len(source))))
        yield part if start == 0 else _without_events(part)


def _without_events(part: Trace) -> Trace:
    nothing = np.empty(0)
    return dataclasses.replace(part, update_time=nothing, update_document=np.empty(0, np.int64), flush_time=nothing)


def _guess_window(source: TraceStream | Trace | Iterable[Trace], first: Trace) -> float:
    duration = float(first.time[-1])
    if isinstance(source, Trace):
        duration = source.duration
    elif isinstance(source, TraceStream) and 0 < source.bytes_read < source.total_bytes:
        duration *= source.total_bytes / source.bytes_read
    return float(max((step for step in _ROUND if step <= duration / PARTS_OF_TRACE), default=_ROUND[0]) if duration > 0 else 1.0)


class _Collected:
    """Everything that is kept while a trace goes by."""

    def __init__(self, window: float, exact_requests: int) -> None:
        self.requests = 0
        self._keys = KeyTable()
        self._windows = Windows(window, self._keys)
        self._distances = Distances(self._keys, exact_requests)
        self._bursts = [Bins(width) for width in (window / 100.0, window / 10.0, window)]
        self._gaps = Gaps()
        self._ages = np.zeros(kernel.BINS, np.int64)
        self._totals = np.zeros(4, np.int64)
        self._hit = np.zeros(1, np.bool_)
        self._sums = {"bytes": 0, "input_tokens": 0, "output_tokens": 0, "arrivals": 0, "updates": 0, "flushes": 0}
        self._tenants = np.zeros(1, np.int64)
        self._groups: set[int] = set()
        self._documents: set[int] = set()
        self._end = 0.0
        self._about = ("", "exact")

    def add(self, chunk: Trace) -> None:
        """Take the next requests."""
        self._about = (chunk.name, chunk.kind)
        numbers = self._keys.numbers(chunk.key)
        size = chunk.size.astype(np.int64)
        keys = self._keys
        kernel.recall(
            numbers, chunk.time, size, chunk.chain, keys.counts, keys.last, keys.held, self._ages, self._totals, self._hit
        )
        self._distances.add(numbers, size)
        self._windows.add(numbers, size, chunk.time)
        arrivals = chunk.time[chunk.chain == 0]
        self._gaps.add(arrivals)
        for bins in self._bursts:
            bins.add(arrivals)
        sums = self._sums
        sums["bytes"] += int(size.sum())
        sums["input_tokens"] += int(chunk.input_tokens.sum(dtype=np.int64))
        sums["output_tokens"] += int(chunk.output_tokens.sum(dtype=np.int64))
        sums["arrivals"] += len(arrivals)
        sums["updates"] += len(chunk.update_time)
        sums["flushes"] += len(chunk.flush_time)
        tenants = np.bincount(chunk.tenant)
        if len(tenants) > len(self._tenants):
            self._tenants = np.concatenate((self._tenants, np.zeros(len(tenants) - len(self._tenants), np.int64)))
        self._tenants[: len(tenants)] += tenants
        self._groups.update(np.unique(chunk.group[chunk.group >= 0]).tolist())
        self._documents.update(np.unique(chunk.document[chunk.document >= 0]).tolist())
        self.requests += len(chunk)
        self._end = float(chunk.time[-1])

    def result(self, source: object) -> TraceInfo:
        """Sum up."""
        windows = self._windows.finish(self._end)
        keys, count = self._keys, self._keys.count
        counts = keys.counts[:count]
        hits, hit_bytes, prefix_hits, prefix_bytes = (int(total) for total in self._totals)
        exponent, fit = zipf_exponent(counts)
        popular = np.sort(counts)[::-1][: max(1, count // 100)]
        whole = [item for item in windows if item.start + self._windows.width <= self._end] or windows
        opened = source if isinstance(source, TraceStream) else None
        note = opened.note if opened is not None else source.note if isinstance(source, Trace) else ""
        total_bytes = self._sums["bytes"]
        reuse_keys, reuse_bytes = self._distances.result(hits, total_bytes // self.requests)
        return TraceInfo(
            name=self._about[0],
            kind=self._about[1],
            format=opened.format if opened is not None else "",
            note=note,
            requests=self.requests,
            arrivals=self._sums["arrivals"],
            keys=count,
            groups=len(self._groups),
            documents=len(self._documents),
            updates=self._sums["updates"],
            flushes=self._sums["flushes"],
            skipped=opened.skipped if opened is not None else 0,
            zero_sized=opened.zero_sized if opened is not None else 0,
            tenants=self._tenant_infos(opened.tenants if opened is not None else []),
            duration=self._end,
            rate=self.requests / self._end if self._end > 0 else None,
            bytes=total_bytes,
            footprint=int(keys.held[:count].sum()),
            input_tokens=self._sums["input_tokens"],
            output_tokens=self._sums["output_tokens"],
            window=self._windows.width,
            window_count=self._windows.count,
            windows=tuple(windows[:: -(-len(windows) // MOST_WINDOWS)]),
            working_set_keys=quantiles([item.keys for item in whole]),
            working_set_bytes=quantiles([item.bytes for item in whole]),
            one_hit_share=float(np.mean(counts == 1)),
            reuse_keys=reuse_keys,
            reuse_bytes=reuse_bytes,
            reuse_age=of_histogram(self._ages, 1e-6),
            reuse_sample=2.0**-self._distances.shift,
            scales=tuple(bins.result() for bins in self._bursts),
            gap_variation=self._gaps.variation(),
            divergence=mean([item.divergence for item in whole]),
            noise=mean([item.noise for item in whole]),
            new_share=mean([item.new_share for item in whole[1:]]),
            entropy_slope=slope([item.start / _HOUR for item in whole], [item.entropy for item in whole]),
            zipf_exponent=exponent,
            zipf_fit=fit,
            top_share=float(popular.sum() / self.requests),
            infinite_hit_ratio=hits / self.requests,
            infinite_byte_hit_ratio=hit_bytes / total_bytes,
            infinite_prefix_hit_ratio=prefix_hits / self.requests,
            infinite_prefix_byte_hit_ratio=prefix_bytes / total_bytes,
            chained=self._sums["arrivals"] < self.requests,
        )

    def _tenant_infos(self, names: list[str]) -> tuple[TenantInfo, ...]:
        busiest = np.argsort(-self._tenants, kind="stable")[:MOST_TENANTS]
        return tuple(
            TenantInfo(
                int(number),
                names[number] if number < len(names) else "",
                int(self._tenants[number]),
                float(self._tenants[number] / self.requests),
            )
            for number in busiest
            if self._tenants[number]
        )
