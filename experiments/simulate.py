"""What a cache would have done on a trace: one setting, exactly, window by window, in one pass over the trace."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.words import size_words
from envs.objective import Cost, PriceBatch, Prices, UsageBatch, price_batch
from envs.simulator import CacheSimulator, SimConfig, Window
from envs.workloads import Trace
from experiments.scenarios import model_for
from experiments.trace_source import Progress, TraceSource, left_out, no_progress, watched
from experiments.units import InputError
from serving.knobs import Knobs
from serving.latency import UpstreamModel

Usages = npt.NDArray[np.float64]
_FIELDS = tuple(item.name for item in fields(UsageBatch))
_REQUESTS, _P99, _BUDGET, _DURATION = (_FIELDS.index(name) for name in ("requests", "p99", "budget_bytes", "duration"))

MOST_WINDOWS = 100_000
"""More windows than these are refused: they would take more memory than the trace's keys."""

PAST_THE_END = 1e-6
"""Seconds after the last request at which a run ends: a window does not hold the requests at its very end."""

WINDOWS = (1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0)
"""Lengths of which the default window is the shortest that makes at most 200 of the trace."""


@dataclass(frozen=True)
class Load:
    """What a model behind the cache would have to carry without the cache.

    Attributes:
        requests: Requests that it was measured on.
        rate: Mean requests per second.
        output_tokens: Mean completion tokens of an answer.
    """

    requests: int
    rate: float
    output_tokens: float

    @classmethod
    def of(cls, part: Trace) -> Load:
        """Measure a trace, or its beginning; requests that all come at once count as those of one second."""
        seconds = float(part.time[-1] - part.time[0])
        return cls(len(part), len(part) / (seconds or 1.0), float(part.output_tokens.mean()))

    def model(self) -> UpstreamModel:
        """Return a model that an operator would put behind this load (:func:`experiments.scenarios.model_for`)."""
        return model_for(self.rate, self.output_tokens)


def model_words(model: UpstreamModel, load: Load | None) -> str:
    """Return the model and where it comes from, in one sentence.

    Args:
        model: The model.
        load: What it was sized for; None if it was given.
    """
    what = f"{model.slots} slot{'s' * (model.slots != 1)}, {1000 * model.ttft:.3g} ms to the first token, "
    what += f"{1000 * model.tpot:.3g} ms per further one"
    if load is None:
        return f"{what} (as given)"
    return (
        f"{what} (sized for {load.rate:,.3g} requests a second of {load.output_tokens:,.0f} tokens: the mean load of "
        f"{load.requests:,} requests without a cache)"
    )


@dataclass(frozen=True)
class Row:
    """One window of a simulated run.

    Attributes:
        start: Its beginning, seconds from the trace's start.
        end: Its end.
        figures: What the simulator says of it.
        bytes: Bytes of the entries of all its requests.
    """

    start: float
    end: float
    figures: Window
    bytes: int


@dataclass(frozen=True)
class Totals:
    """Figures of several windows together.

    Attributes:
        requests: Requests.
        seconds: Length, seconds.
        hit_ratio: Hits over requests; NaN without requests, as are all ratios and latencies.
        hit_ratio_by_tier: The same by the tier that answered.
        byte_hit_ratio: Bytes of hits over bytes of all requests.
        p50: Median latency, seconds; of several windows the mean of theirs by requests, unless it is known of all requests.
        p99: 99th percentile of latency, seconds: as ``p50``.
        worst_p99: The greatest of the windows' P99, seconds.
        evictions: Entries evicted.
        expirations: Lookups that met an expired entry.
        stale_hits: Expected answers that were no longer true.
        refreshes: Entries refreshed in the background.
        input_tokens: Prompt tokens sent upstream, refreshes included.
        output_tokens: Completion tokens received, refreshes included.
        resident_bytes: Bytes held at the end.
        most_resident_bytes: The most bytes held at the end of any window.
        cost: US dollars per 1,000 requests.
    """

    requests: int
    seconds: float
    hit_ratio: float
    hit_ratio_by_tier: dict[str, float]
    byte_hit_ratio: float
    p50: float
    p99: float
    worst_p99: float
    evictions: int
    expirations: int
    stale_hits: float
    refreshes: int
    input_tokens: int
    output_tokens: int
    resident_bytes: int
    most_resident_bytes: int
    cost: Cost

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, JSON-ready: what is not known is None."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "cost"}
        ready: dict[str, Any] = jsonable({**values, "cost_per_1000": self.cost.to_dict()})
        return ready


@dataclass(frozen=True)
class Simulation:
    """A simulated run.

    Attributes:
        trace: Name of the trace.
        note: What the trace is and is not.
        kind: ``exact`` or ``semantic``.
        knobs: The setting.
        config: The simulator's settings.
        load: What the model was sized for; None if it was given.
        prices: What things cost.
        window: Length of a window, seconds.
        rows: The windows.
        quantiles: P50 and P99 of all requests, seconds; None for a trace of several chunks, whose windows' stand in for them.
        oversized: Requests whose entry is larger than the whole budget and so is never kept.
        warnings: What a reader of the numbers has to know.
        run_seconds: How long the run took by the clock, reading included.
    """

    trace: str
    note: str
    kind: str
    knobs: Knobs
    config: SimConfig
    load: Load | None
    prices: Prices
    window: float
    rows: Sequence[Row]
    quantiles: tuple[float, float] | None
    oversized: int
    warnings: Sequence[str]
    run_seconds: float

    @property
    def totals(self) -> Totals:
        """The whole run's figures."""
        found = totals(self.rows, self.prices)
        return found if self.quantiles is None else replace(found, p50=self.quantiles[0], p99=self.quantiles[1])

    def to_dict(self) -> dict[str, Any]:
        """Return everything, JSON-ready: what is not known, and an infinite duration, is None."""
        return {
            "trace": {"name": self.trace, "note": self.note, "kind": self.kind},
            "knobs": self.knobs.to_dict(),
            "model": {**jsonable(vars_of(self.config.upstream)), "words": model_words(self.config.upstream, self.load)},
            "l1_share": self.config.l1_share,
            "memory_eviction": self.config.memory_eviction,
            "prefix": self.config.prefix,
            "staleness_half_life": jsonable(self.config.staleness_half_life),
            "prices": vars_of(self.prices),
            "totals": self.totals.to_dict(),
            "oversized": self.oversized,
            "warnings": list(self.warnings),
            "window": self.window,
            "run_seconds": round(self.run_seconds, 3),
            "windows": [
                {"start": row.start, "end": row.end, **totals([row], self.prices).to_dict()} for row in self.rows
            ],
        }  # fmt: skip


def vars_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with slots or without."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def jsonable(value: Any) -> Any:
    """Return JSON-ready values: what is not finite becomes None."""
    if isinstance(value, dict):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value


def checked_knobs(cache_size: int, ttl: float, warmup_ratio: float) -> Knobs:
    """Return a setting that was typed.

    Args:
        cache_size: Bytes; 0 keeps nothing.
        ttl: Seconds > 0; inf for never.
        warmup_ratio: 0..1.

    Raises:
        InputError: If a value is out of its range; says what to do instead.
    """
    if ttl == 0:
        raise InputError("ttl: 0: an entry would be expired when it is written; to keep nothing, set the cache size to 0")
    try:
        return Knobs(cache_size, ttl, warmup_ratio)
    except ValueError as error:
        raise InputError(str(error)) from error


def gathered(rows: Sequence[Row]) -> Usages:
    """Return what windows used as one array, shape (windows, fields of :class:`envs.objective.UsageBatch`)."""
    return np.array([[getattr(row.figures.usage, name) for name in _FIELDS] for row in rows]).reshape(len(rows), len(_FIELDS))


def cost_of(usages: Usages, prices: Prices) -> Cost:
    """Price several windows together, US dollars per 1,000 requests.

    Every term is that of the sums but for P99, which cannot be summed: its term is the mean of the windows' by requests, so that
    the objective is one on every window. Memory of windows without requests counts.

    Args:
        usages: The windows (:func:`gathered`).
        prices: What things cost.
    """
    seconds = usages[:, _DURATION].sum()
    together = np.nansum(usages, axis=0)
    together[_P99] = math.nan
    together[_BUDGET] = usages[:, _BUDGET] @ usages[:, _DURATION] / seconds if seconds > 0 else 0.0
    lanes = np.vstack([together, usages])
    priced = price_batch(UsageBatch(*lanes.T), PriceBatch.of([prices]))
    whole, requests = priced.lane(0), usages[:, _REQUESTS]
    if not together[_REQUESTS] > 0:
        return whole
    return replace(whole, slo=float(np.where(requests > 0, priced.slo[1:] * requests, 0.0).sum() / together[_REQUESTS]))


def totals(rows: Sequence[Row], prices: Prices) -> Totals:
    """Return the figures of windows together."""
    signals = [row.figures.signals for row in rows]
    asked = [row for row in rows if row.figures.signals.requests > 0]
    requests = sum(row.figures.signals.requests for row in asked)

    def mean(values: Sequence[float]) -> float:
        """By requests."""
        if not asked:
            return math.nan
        weights = [row.figures.signals.requests for row in asked]
        return float(np.average(values, weights=weights))

    asked_bytes = sum(row.bytes for row in asked)
    tiers = list(dict.fromkeys(tier for row in asked for tier in row.figures.signals.hit_ratio_by_tier))
    return Totals(
        requests=int(requests),
        seconds=sum(row.end - row.start for row in rows),
        hit_ratio=mean([row.figures.signals.hit_ratio for row in asked]),
        hit_ratio_by_tier={tier: mean([row.figures.signals.hit_ratio_by_tier.get(tier, 0.0) for row in asked]) for tier in tiers},
        byte_hit_ratio=sum(row.figures.byte_hit_ratio * row.bytes for row in asked) / asked_bytes if asked_bytes else math.nan,
        p50=mean([row.figures.signals.p50 for row in asked]),
        p99=mean([row.figures.signals.p99 for row in asked]),
        worst_p99=max((row.figures.signals.p99 for row in asked), default=math.nan),
        evictions=int(sum(item.evictions for item in signals)),
        expirations=int(sum(item.expirations for item in signals)),
        stale_hits=float(sum(item.stale_hits for item in signals)),
        refreshes=sum(row.figures.refreshes for row in rows),
        input_tokens=int(sum(item.input_tokens + item.refresh_input_tokens for item in signals)),
        output_tokens=int(sum(item.output_tokens + item.refresh_output_tokens for item in signals)),
        resident_bytes=int(signals[-1].resident_bytes) if signals else 0,
        most_resident_bytes=int(max((item.resident_bytes for item in signals), default=0)),
        cost=cost_of(gathered(rows), prices),
    )


def simulate(
    source: TraceSource,
    knobs: Knobs,
    *,
    config: SimConfig,
    sized: bool = True,
    window: float | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Simulation:
    """Run a trace through one arm of the cache, chunk by chunk; memory grows with the trace's keys and windows only.

    Args:
        source: The trace.
        knobs: The setting.
        config: The simulator's settings; its prices price.
        sized: Whether the model is sized for the load of the trace's first chunk, instead of taken from ``config``.
        window: Length of a window, seconds; None: so that the trace has at most 200.
        seed: Of the simulator.
        progress: Told after each chunk.

    Raises:
        envs.workloads.TraceError: If the trace cannot be read, or has no request.
        InputError: If there would be more than :data:`MOST_WINDOWS` windows.
    """
    began = time.monotonic()
    reading = source.open()
    parts = watched(reading, "simulating", progress)
    first = next(parts, None)
    if first is None:
        raise source.empty()
    load = Load.of(first) if sized else None
    if load is not None:
        config = replace(config, upstream=load.model())
    if window is None:
        share = reading.bytes_read / reading.total_bytes if reading.total_bytes else 1.0
        window = default_window(first.duration / min(max(share, 1e-6), 1.0))
    simulator = CacheSimulator(first, config, knobs, seed=seed)
    rows: list[Row] = []
    oversized = 0
    last = 0.0
    quantiles: tuple[float, float] | None = None
    second = next(parts, None)
    if second is None:
        signals = CacheSimulator(first, config, knobs, seed=seed).step(first.duration + PAST_THE_END).signals
        quantiles = (signals.p50, signals.p99)
    for part in chain([first], [] if second is None else [second], parts):
        if part is not first:
            simulator.extend(part)
        oversized += int((part.size > knobs.cache_size).sum())
        last = float(part.time[-1])
        if (last - simulator.now) / window > MOST_WINDOWS - len(rows):
            raise InputError(
                f"window: {window:g} s: expected at most {MOST_WINDOWS:,} windows, but the trace reaches to {last:,.0f} s: "
                "choose a longer window"
            )
        # Requests at the very end of a chunk wait for the next one, which may begin at the same moment.
        while simulator.now + window <= last:
            rows.append(stepped(simulator, window))
    while not rows or not rows[-1].figures.done:
        # A window that the trace ends in is no longer than that: its memory is paid for to the end.
        rows.append(stepped(simulator, min(window, last - simulator.now + PAST_THE_END)))
    return Simulation(
        trace=reading.name,
        note=reading.note,
        kind=reading.kind,
        knobs=knobs,
        config=config,
        load=load,
        prices=config.prices,
        window=window,
        rows=rows,
        quantiles=quantiles,
        oversized=oversized if knobs.cache_size else 0,
        warnings=[*left_out(reading), *_remarks(knobs, oversized)],
        run_seconds=time.monotonic() - began,
    )


def stepped(simulator: CacheSimulator, seconds: float) -> Row:
    """Run the next seconds of a trace as one window."""
    start, first = simulator.now, simulator.position
    figures = simulator.step(seconds)
    return Row(start, simulator.now, figures, int(simulator.columns.size[first : simulator.position].sum(dtype=np.int64)))


def default_window(seconds: float) -> float:
    """Return the shortest usual length that makes at most 200 windows of so many seconds."""
    return next((length for length in WINDOWS if seconds / length <= 200), max(seconds / 200, WINDOWS[-1]))


def _remarks(knobs: Knobs, oversized: int) -> list[str]:
    if knobs.cache_size == 0:
        return ["cache size 0: nothing is kept, every request goes to the model"]
    if oversized:
        return [f"{oversized:,} requests have an entry larger than the whole cache ({size_words(knobs.cache_size)}): never kept"]
    return []
