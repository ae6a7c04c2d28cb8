"""How true and how cheap the ghost curves are: against the exact curve, on every trace at hand and on made ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from envs.workloads import Trace, load
from experiments.bench.exact_curve import exact_hits
from experiments.bench.result import BenchResult
from experiments.bench.sim import zipf_trace
from serving.ghost import Ghost
from serving.knobs import KnobSpace

GOAL_ERROR = 0.01
"""Mean absolute error in hit ratio over the grid, with 8,000 keys, on every trace."""

GOAL_NANOSECONDS = 300.0
"""CPU time per request, amortised."""

GOAL_BYTES = 2_000_000

JITTER = 0.1
DEFAULT = KnobSpace()
"""The grid of a gateway that is not told otherwise."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "ghost": {},
    "without hot keys": {"hot_share": 0.0},
    "plain SHARDS": {"hot_share": 0.0, "count_adjusted": False},
}
"""The ghost as it is, and what is left without its parts."""


@dataclass(frozen=True)
class Exact:
    """The exact curves of one trace.

    Attributes:
        whole: Hit ratio over the whole trace, (S, T).
        windows: Hit ratio of each window, (W, S, T).
    """

    whole: npt.NDArray[np.float64]
    windows: npt.NDArray[np.float64]


def run(
    traces_dir: Path,
    *,
    max_keys: int = 8_000,
    windows: int = 20,
    salts: int = 3,
    requests: int = 1_000_000,
    singles: int = 50_000,
) -> BenchResult:
    """Measure error, CPU time and memory of the ghost on real and made traces, with and without its parts.

    The grid is 16 sizes x 8 TTLs fitted to each trace: sizes from 1/1024 of all its bytes to all of them, TTLs from 1/1000 of its
    duration to the whole. The exact curve is that of an LRU for each setting, by the cache's own rule
    (:mod:`experiments.bench.exact_curve`), which tests hold to the simulator, hit for hit. So the error has in it that a ghost
    knows one size for each key, and a cache the one that was written. Compilation is not timed. Everything runs in this one
    thread.

    Args:
        traces_dir: Folder of the real traces; those that are not there are left out.
        max_keys: Keys that the ghost tracks at most.
        windows: Windows of equally many requests into which each trace is cut for the errors of windows.
        salts: Samples that each variant draws; errors are means over them, but for the greatest ones.
        requests: Requests of the made traces; the one with a million keys has twice as many.
        singles: Requests for which the call of a single access is timed; 0 for none.

    Returns:
        Rows with ``trace``, ``requests``, ``keys``, ``variant``, ``rate``, ``mean_error`` and ``worst_mean_error`` (over the
        grid; mean and greatest over salts), ``max_error`` (of any setting and salt), ``window_error`` (mean over windows),
        ``ns_per_request`` (CPU, least of the salts), ``ns_per_request_gateway_grid`` (the same on the grid of a gateway that is
        not told otherwise), ``memory_bytes``; a last row times single accesses. The ratio is the mean error of plain SHARDS over
        that of the ghost, over the traces that have to be sampled.
    """
    rows: list[dict[str, Any]] = []
    trace: Trace | None = None
    for trace in _traces(traces_dir, requests):
        space = _grid(trace)
        exact = _exact(trace, space, windows)
        for variant, options in VARIANTS.items():
            rows.append(_measure(trace, space, exact, variant, options, max_keys, salts))
    if singles and trace is not None:
        rows.append(_singles(trace, max_keys, singles))
    sampled = [row for row in rows if row.get("rate", 1.0) < 1.0 and "mean_error" in row]
    means = {
        variant: float(np.mean([row["mean_error"] for row in sampled if row["variant"] == variant])) if sampled else 0.0
        for variant in VARIANTS
    }
    return BenchResult(
        "ghost",
        rows,
        means["plain SHARDS"] / means["ghost"] if means["ghost"] > 0 else None,
        "cachepilot bench ghost",
        f"16 x 8 grid fitted to each trace, {max_keys:,} keys, {salts} salts. Goals with 8,000 keys: mean absolute error at most "
        f"{GOAL_ERROR:g} on every trace, under {GOAL_NANOSECONDS:g} ns of CPU time per request, under {GOAL_BYTES:,} bytes. The "
        "ratio is the error of plain SHARDS over the ghost's, where not every key fits.",
    )


def _traces(folder: Path, requests: int) -> Iterator[Trace]:
    apache, mooncake = folder / "elastic_apache.csv.gz", folder / "mooncake_conversation.jsonl.gz"
    arrivals, questions = folder / "azure2023_conv.csv.gz", folder / "banking77.csv.gz"
    for path in (apache, mooncake):
        if path.is_file():
            yield load(path)
    if arrivals.is_file() and questions.is_file():
        yield load(arrivals, banking77=questions)
    for keys, count in ((100_000, requests), (1_000_000, 2 * requests)):
        yield zipf_trace(count, keys=keys, duration=14_400.0)


def _grid(trace: Trace) -> KnobSpace:
    _, first = np.unique(trace.key, return_index=True)
    total = int(trace.size[first].sum())
    return KnobSpace(
        min_size=max(total // 1024, 1), max_size=max(total, 2), min_ttl=trace.duration / 1000.0, max_ttl=trace.duration
    )


def _exact(trace: Trace, space: KnobSpace, windows: int) -> Exact:
    hits = exact_hits(trace, space.sizes, space.ttls, ttl_jitter=JITTER, windows=windows)
    requests = np.array([len(part) for part in np.array_split(np.arange(len(trace)), windows)], np.float64)
    with np.errstate(invalid="ignore"):
        return Exact(hits.sum(axis=0) / len(trace), hits / requests[:, None, None])


def _measure(
    trace: Trace, space: KnobSpace, exact: Exact, variant: str, options: Mapping[str, Any], max_keys: int, salts: int
) -> dict[str, Any]:
    parts = np.array_split(np.arange(len(trace)), len(exact.windows))
    errors, window_errors, seconds, gateway_seconds = [], [], [], []
    for salt in range(salts):
        ghosts = [Ghost(space.sizes, space.ttls, max_keys=max_keys, ttl_jitter=JITTER, salt=salt, **options) for _ in range(2)]
        whole, windowed = ghosts
        seconds.append(_cpu(partial(whole.access_many, trace.key, trace.size, trace.time)))
        gateway = Ghost(DEFAULT.sizes, DEFAULT.ttls, max_keys=max_keys, ttl_jitter=JITTER, salt=salt, **options)
        gateway_seconds.append(_cpu(partial(gateway.access_many, trace.key, trace.size, trace.time)))
        errors.append(np.abs(whole.take().curve.hit_ratio - exact.whole))
        ratios = []
        for part in parts:
            windowed.access_many(trace.key[part], trace.size[part], trace.time[part])
            ratios.append(windowed.take().curve.hit_ratio)
        window_errors.append(np.nanmean(np.abs(np.array(ratios) - exact.windows)))
    means = [error.mean() for error in errors]
    return {
        "trace": trace.name,
        "requests": len(trace),
        "keys": len(np.unique(trace.key)),
        "variant": variant,
        "rate": whole.rate,
        "mean_error": float(np.mean(means)),
        "worst_mean_error": float(np.max(means)),
        "max_error": float(np.max(errors)),
        "window_error": float(np.mean(window_errors)),
        "ns_per_request": min(seconds) / len(trace) * 1e9,
        "ns_per_request_gateway_grid": min(gateway_seconds) / len(trace) * 1e9,
        "memory_bytes": whole.memory_bytes,
    }


def _singles(trace: Trace, max_keys: int, count: int) -> dict[str, Any]:
    ghost = Ghost(DEFAULT.sizes, DEFAULT.ttls, max_keys=max_keys, ttl_jitter=JITTER)
    rows = list(zip(trace.key[:count].tolist(), trace.size[:count].tolist(), trace.time[:count].tolist(), strict=True))

    def calls() -> None:
        for key, size, now in rows:
            ghost.access(key, size, now)

    seconds = _cpu(calls)
    return {
        "trace": trace.name,
        "requests": len(rows),
        "variant": "ghost, one call per request",
        "rate": ghost.rate,
        "ns_per_request_gateway_grid": seconds / max(len(rows), 1) * 1e9,
        "memory_bytes": ghost.memory_bytes,
    }


def _cpu(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
