"""`cachepilot trace info`, `simulate` and `advise`: what was typed becomes numbers, and figures become tables."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from agents.output_file import OutputError, write_output
from envs.objective import Prices
from envs.price_book import PriceBook, default_book, load_price_book
from envs.simulator import MemoryEviction, SimConfig
from envs.simulator.compiling import compiling
from envs.workloads.info import trace_info
from experiments.advise import advise
from experiments.advise_page import build_page
from experiments.simulate import checked_knobs, jsonable, simulate, vars_of
from experiments.trace_source import MadeReading, TraceSource
from experiments.trace_source import Progress as Told
from experiments.units import InputError, parse_duration, parse_size
from serving.knobs import Knobs
from serving.latency import UpstreamModel
from tuner.config import Settings
from tuner.outputs import refuse_unwritable
from tuner.trace_tables import print_advice, print_info, print_simulation

PATIENCE = 2.0
"""Seconds that may pass before a progress bar is shown."""

SAID_EVERY = 10.0
"""Seconds between two lines of progress where there is no terminal to draw a bar on."""


@dataclass(frozen=True)
class TraceOptions:
    """How a trace was asked for on the command line.

    Attributes:
        spec: File, or ``made:...``.
        limit: Requests at most.
        format: Name of the format; None to tell it.
        columns: ``name=column`` each.
        skip_bad_lines: Whether bad lines are counted and left out.
    """

    spec: str
    limit: int | None = None
    format: str | None = None
    columns: Sequence[str] = ()
    skip_bad_lines: bool = False

    def source(self) -> TraceSource:
        """Return where the trace is read from.

        Raises:
            InputError: If a column is not ``name=column``.
        """
        return TraceSource(self.spec, self.limit, self.format, self.mapped(), self.skip_bad_lines)

    def mapped(self) -> dict[str, str] | None:
        """Return the columns by name; None if none was given."""
        pairs = {}
        for text in self.columns:
            name, equals, column = text.partition("=")
            if not (name.strip() and equals and column.strip()):
                raise InputError(f"--column {text!r}: expected name=column, for example time=ts")
            pairs[name.strip()] = column.strip()
        return pairs or None


@dataclass(frozen=True)
class CacheOptions:
    """What a simulated cache stands on, as typed; None takes the settings' value.

    Attributes:
        l1_share: Share of the budget that may be resident in memory.
        half_life: Age at which half of the answers are outdated, a duration.
        slots: Requests that the model runs at a time.
        ttft: Time to the first token, a duration.
        tpot: Time per output token, a duration.
        independent: Whether prefix blocks are answered one by one, whatever became of those before them.
        prices: A price book.
        memory_eviction: Who goes from memory: ``lru`` or ``clock``.
    """

    l1_share: float | None = None
    half_life: str | None = None
    slots: int | None = None
    ttft: str | None = None
    tpot: str | None = None
    independent: bool = False
    prices: Path | None = None
    memory_eviction: str | None = None

    def config(self, settings: Settings) -> tuple[SimConfig, bool, PriceBook]:
        """Return the simulator's settings, whether the model is still to be sized for the trace, and the price book.

        Raises:
            InputError: If a value cannot be read or is out of its range.
            envs.price_book.PriceBookError: If the book cannot be used.
        """
        book = default_book() if self.prices is None else load_price_book(self.prices)
        prices = settings.prices if self.prices is None else Prices(**book.values(), time_scale=settings.prices.time_scale)
        given = {
            "slots": self.slots,
            "ttft": None if self.ttft is None else _finite(self.ttft, "--ttft"),
            "tpot": None if self.tpot is None else _finite(self.tpot, "--tpot"),
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        config = replace(settings.envs.simulator.to_config(prices), ghost_keys=0, prefix=not self.independent)
        sized = not chosen and "upstream" not in settings.envs.simulator.model_fields_set
        try:
            if chosen:
                config = replace(config, upstream=UpstreamModel(**{**vars_of(config.upstream), **chosen}))
            if self.l1_share is not None:
                config = replace(config, l1_share=self.l1_share)
            if self.memory_eviction is not None:
                # Any text, for the configuration to say what it expects.
                config = replace(config, memory_eviction=cast(MemoryEviction, self.memory_eviction.lower()))
            if self.half_life is not None:
                config = replace(config, staleness_half_life=parse_duration(self.half_life, "--half-life"))
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error
        return config, sized, book


def show_simulation(
    trace: TraceOptions,
    cache: CacheOptions,
    settings: Settings,
    *,
    cache_size: str,
    ttl: str,
    warmup_ratio: float,
    window: str | None,
    seed: int,
    as_json: bool,
    out: Console,
    err: Console,
) -> None:
    """Simulate one setting and show what it did.

    Raises:
        InputError: If something typed cannot be used.
        envs.workloads.TraceError: If the trace cannot be read.
    """
    knobs = checked_knobs(parse_size(cache_size, "--cache-size"), parse_duration(ttl, "--ttl"), warmup_ratio)
    config, sized, _ = cache.config(settings)
    length = None if window is None else _positive(window, "--window")
    _say_compiling(err)
    with progress_on(err) as told:
        result = simulate(trace.source(), knobs, config=config, sized=sized, window=length, seed=seed, progress=told)
    if as_json:
        write_json(result.to_dict())
    else:
        print_simulation(result, out)


def show_advice(
    trace: TraceOptions,
    cache: CacheOptions,
    settings: Settings,
    *,
    current_cache_size: str | None,
    current_ttl: str | None,
    current_warmup_ratio: float,
    max_cache_size: str | None,
    exact_requests: int,
    seed: int,
    html: Path | None,
    command: str,
    as_json: bool,
    out: Console,
    err: Console,
) -> None:
    """Advise on a trace, show why, and write the page if one was asked for.

    Raises:
        InputError: If something typed cannot be used.
        envs.workloads.TraceError: If the trace cannot be read.
        OutputError: If the page cannot be written; the advice was shown before.
    """
    current = _current(current_cache_size, current_ttl, current_warmup_ratio)
    config, sized, book = cache.config(settings)
    refuse_unwritable("--html", html)
    largest = None if max_cache_size is None else parse_size(max_cache_size, "--max-cache-size")
    _say_compiling(err)
    with progress_on(err) as told:
        found = advise(
            trace.source(),
            config=config,
            sized=sized,
            current=current,
            max_size=largest,
            exact_requests=exact_requests,
            seed=seed,
            progress=told,
        )
    unusual = book.unusual({name: getattr(found.prices, name) for name in found.prices.__dataclass_fields__})
    found = replace(found, warnings=[*found.warnings, *unusual])
    fault = None
    if html is not None:
        try:
            write_output(html, build_page(found, book, command=command))
        except OutputError as error:
            fault = error  # and the advice, which may have taken long, is shown all the same
    page = None if fault is not None else html
    if as_json:
        write_json({**found.to_dict(), "page": None if page is None else str(page.resolve())})
    else:
        print_advice(found, out)
        if page is not None:
            out.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
    if fault is not None:
        raise fault


def show_info(trace: TraceOptions, *, window: str | None, as_json: bool, out: Console, err: Console) -> None:
    """Measure a trace and show what is in it.

    Raises:
        InputError: If something typed cannot be used.
        envs.workloads.TraceError: If the trace cannot be read.
    """
    length = None if window is None else _positive(window, "--window")
    reading = trace.source().open()
    with progress_on(err) as told:
        info = trace_info(
            reading.trace if isinstance(reading, MadeReading) else reading,
            window=length,
            progress=lambda requests, share: told("measuring", share, requests),
        )
    if as_json:
        write_json({**jsonable(info.to_dict()), "first_skipped": [str(error) for error in reading.first_skipped]})
    else:
        print_info(info, out)
        for error in reading.first_skipped[:1]:
            out.print(f"the first: {error}", markup=False, highlight=False, soft_wrap=True)


def write_json(value: Any) -> None:
    """Write JSON, and nothing else, to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def _say_compiling(console: Console) -> None:
    if (told := compiling()) is not None:
        console.print(told, markup=False, highlight=False)


@contextmanager
def progress_on(console: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Told]:
    """Give a function that shows progress: after two seconds, a bar on a terminal and now and then a line elsewhere.

    Args:
        console: Where to; standard error, so that standard output stays what was asked for.
        clock: Seconds.
    """
    began = clock()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    starts: dict[str, float] = {}
    said = last = began

    def told(phase: str, share: float, requests: int) -> None:
        nonlocal said, last
        now = clock()
        # A phase begins where the one before it was heard of last.
        first = starts.setdefault(phase, last)
        last = now
        rate = f"{requests:,} requests, {requests / max(now - first, 1e-9):,.0f} a second"
        if now - began < PATIENCE:
            return
        if console.is_terminal:
            bar.start()
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=1.0, rate="")
            bar.update(tasks[phase], completed=0.0 if math.isnan(share) else share, rate=rate)
        elif now - said >= SAID_EVERY:
            said = now
            done = "" if math.isnan(share) else f"{share:.0%}, "
            console.print(f"{phase}: {done}{rate}", markup=False, highlight=False)

    try:
        yield told
    finally:
        if tasks:
            bar.stop()


def _finite(text: str, name: str) -> float:
    value = parse_duration(text, name)
    if math.isinf(value):
        raise InputError(f"{name}: {text!r}: expected a finite duration")
    return value


def _positive(text: str, name: str) -> float:
    value = _finite(text, name)
    if value == 0:
        raise InputError(f"{name}: {text!r}: expected a duration > 0")
    return value


def _current(size: str | None, ttl: str | None, warmup_ratio: float) -> Knobs | None:
    if size is None:
        if ttl is not None or warmup_ratio:
            raise InputError("--current-ttl, --current-warmup-ratio: expected --current-cache-size with them")
        return None
    lifetime = math.inf if ttl is None else parse_duration(ttl, "--current-ttl")
    return checked_knobs(parse_size(size, "--current-cache-size"), lifetime, warmup_ratio)
