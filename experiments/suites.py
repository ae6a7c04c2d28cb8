"""The workloads that policies are trained and judged on: six that change, on real arrivals, and real traces unchanged.

The *non-stationary* suite takes the arrival times and clients of a production service (ServeGen, thinned to one request in
:data:`THINNING`) and draws keys for them: who asks when is real, what is asked is made. Each family lays one pattern over it.
The first :data:`TRAINING_DAYS` days are for training, those after them are held out; keys, populations, hours and prices of
held-out cases are drawn from seeds that no training episode uses. The *steady* suite is real traces as they are, none of which is
trained on, and the held-out days of ServeGen with the keys that its reader draws.

A cached answer is text and its memory is nearly free at the price book's prices; then the largest cache is always best and there
is nothing to tune. Each case therefore draws what memory costs (:data:`MEMORY_SHARE`), as it is where entries are larger than
text: a prefix's key-value blocks take 10,000 times the bytes of its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from envs.objective import GIB, Prices
from envs.simulator import SimConfig
from envs.task import Scenario
from envs.workloads import Trace, load
from envs.workloads.entry import entry_bytes
from envs.workloads.errors import TraceError
from envs.workloads.generators import DAY, answer_tokens, question_tokens, zipf_ranks
from envs.workloads.patterns import add_documents, add_flash_crowd, add_releases, alternate, day_and_night
from experiments.scenarios import MEMORY_EVICTION, scale_to, session_trace
from serving.hotset import WarmupRules
from serving.keys import mix64, mix64_array
from serving.knobs import Knobs, KnobSpace
from serving.latency import UpstreamModel

SERVEGEN = "servegen_m_large.csv.gz"
THINNING = 392
"""One request in so many is kept: half a request per second, what one small model serves."""

TRAINING_DAYS = 10
INTERVAL = 600.0
"""Seconds between two decisions on ServeGen's arrivals: one of its slots."""

MEMORY_SHARE = (0.03, 0.5)
"""What holding everything costs, as a share of what it would cost to answer everything from the model: range."""

FAMILIES = ("diurnal", "flash-crowd", "hot-set-swap", "model-release", "update-storm", "multi-tenant")
RECURRING = ("diurnal", "hot-set-swap", "model-release", "update-storm")
"""Families whose regime comes back at the same time of day."""

TRAINED = (*FAMILIES, "sessions")
"""What training draws from: the families, and made sessions squeezed into minutes as a demo plays them."""

SuiteName = Literal["steady", "non-stationary"]

_HELD_OUT = 1 << 40
"""Held-out cases are drawn from seeds that no training episode uses."""


@dataclass(frozen=True)
class Case:
    """One workload that policies are judged on.

    Attributes:
        name: Its name, unique.
        family: The pattern laid over it, or the trace's name.
        suite: ``steady`` or ``non-stationary``.
        scenario: Trace, cache, prices, interval and initial knobs.
        period: Seconds after which its regime recurs; None if it does not.
        draw: Another realisation of the same regime process, by seed: other arrivals' days and other keys, the same parameters.
    """

    name: str
    family: str
    suite: SuiteName
    scenario: Scenario
    period: float | None
    draw: Callable[[int], Scenario]


def held_out(traces: Path, *, each: int = 2, days: int = 4) -> list[Case]:
    """Return the cases that policies are judged on.

    Args:
        traces: Folder of the real traces.
        each: Cases of each non-stationary family.
        days: Days of ServeGen after the training days, 1 to 4.

    Raises:
        TraceError: If a trace is missing or cannot be read; the text names it.
    """
    cases = []
    for family in FAMILIES:
        for number in range(each):
            process = Process.draw(family, np.random.default_rng([_HELD_OUT, FAMILIES.index(family), number]))
            scenario = process.scenario(traces, first=TRAINING_DAYS, days=days, seed=_HELD_OUT + number)
            cases.append(
                Case(
                    f"{family}-{number + 1}",
                    family,
                    "non-stationary",
                    scenario,
                    DAY if family in RECURRING else None,
                    _other(process, traces, days),
                )
            )
    return [*cases, *steady(traces, days=days)]


def _other(process: Process, traces: Path, days: int) -> Callable[[int], Scenario]:
    def draw(seed: int) -> Scenario:
        # Days of the training part: an oracle may know the process, but not the days that it is judged on.
        return process.scenario(traces, first=seed % (TRAINING_DAYS - days + 1), days=days, seed=seed)

    return draw


def steady(traces: Path, *, days: int = 4) -> list[Case]:
    """Return the real traces unchanged, each with a cache, a model and prices of its scale."""
    found: list[Case] = []
    for name, file, interval in (
        ("mooncake", "mooncake_conversation.jsonl.gz", 60.0),
        ("elastic", "elastic_apache.csv.gz", 1800.0),
        ("banking77", "banking77.csv.gz", 60.0),
    ):
        trace = _read(traces / file)
        rng = np.random.default_rng([_HELD_OUT, 100, len(found)])
        scenario = scenario_of(trace, interval, Economy.draw(rng))
        found.append(Case(name, name, "steady", scenario, None, lambda seed, scenario=scenario: scenario))  # type: ignore[misc]
    rng = np.random.default_rng([_HELD_OUT, 100, len(found)])
    scenario = scenario_of(_days(_read(traces / SERVEGEN), TRAINING_DAYS, days), INTERVAL, Economy.draw(rng))
    found.append(Case("servegen", "servegen", "steady", scenario, None, lambda seed: scenario))
    return found


def training(traces: Path, *, pool: int = 96, days: tuple[int, int] = (2, 4), families: Sequence[str] = TRAINED) -> Pool:
    """Return what training episodes are drawn from; scenarios are made when they are first drawn.

    Args:
        traces: Folder of the real traces.
        pool: Number of different scenarios.
        days: Shortest and longest, days of ServeGen's arrivals.
        families: What they are drawn from, in turn.
    """
    return Pool(traces, pool, days, tuple(families))


class Pool:
    """Draws scenarios of the training days; see :func:`training`."""

    def __init__(self, traces: Path, size: int, days: tuple[int, int], families: Sequence[str]) -> None:
        self._traces, self._size, self._days, self._families = traces, size, days, tuple(families)
        self._made: dict[int, Scenario] = {}

    def __len__(self) -> int:
        return self._size

    def __call__(self, rng: np.random.Generator) -> Scenario:
        """Draw one."""
        return self[int(rng.integers(self._size))]

    def __getitem__(self, number: int) -> Scenario:
        """Return one by its number; it is the same whenever it is asked for."""
        if number not in self._made:
            self._made[number] = self._make(self._families[number % len(self._families)], number)
        return self._made[number]

    def _make(self, family: str, number: int) -> Scenario:
        rng = np.random.default_rng([1, number])
        if family == "sessions":
            return scale_to(session_trace(rng), rng, static_start=1.0)
        process = Process.draw(family, rng)
        days = int(rng.integers(self._days[0], self._days[1] + 1))
        first = int(rng.integers(0, TRAINING_DAYS - days + 1))
        return process.scenario(self._traces, first=first, days=days, seed=number)


@dataclass(frozen=True)
class Economy:
    """What does not belong to the requests: the model, what memory costs, how long answers stay true.

    Attributes:
        memory_share: See :data:`MEMORY_SHARE`.
        half_life: Half-life of an answer's truth, seconds.
        headroom: Capacity of the model over the mean load of all requests at a hit ratio of one half.
        stale_factor: Price of a stale answer over the price book's.
    """

    memory_share: float
    half_life: float
    headroom: float
    stale_factor: float = 1.0

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Economy:
        """Draw one."""
        return cls(
            memory_share=_log_uniform(rng, *MEMORY_SHARE),
            half_life=3600.0 * _log_uniform(rng, 12.0, 168.0),
            headroom=_log_uniform(rng, 1.3, 2.5),
            stale_factor=_log_uniform(rng, 0.5, 4.0),
        )


@dataclass(frozen=True)
class Process:
    """A regime process: everything about a workload but the realisation.

    Attributes:
        family: One of :data:`FAMILIES`.
        economy: Model, memory, truth.
        keys: Keys of the largest client at any one time; the others have down to a tenth.
        alpha: Zipf exponent of popularity.
        lifetime: Days after which a key is replaced by another of the same popularity, on average.
        hour: Hour of the day at which the pattern happens.
        strength: How strong the pattern is, 0..1.
    """

    family: str
    economy: Economy
    keys: int
    alpha: float
    lifetime: float
    hour: float
    strength: float

    @classmethod
    def draw(cls, family: str, rng: np.random.Generator) -> Process:
        """Draw the parameters of one of a family."""
        return cls(
            family=family,
            economy=Economy.draw(rng),
            keys=round(_log_uniform(rng, 500.0, 5_000.0)),
            alpha=float(rng.uniform(0.7, 1.1)),
            lifetime=_log_uniform(rng, 1.0, 10.0),
            hour=float(rng.uniform(0.0, 24.0)),
            strength=float(rng.uniform(0.4, 1.0)),
        )

    def scenario(self, traces: Path, *, first: int, days: int, seed: int) -> Scenario:
        """Return a realisation.

        Args:
            traces: Folder of the real traces.
            first: Day of ServeGen at which it begins.
            days: Days that it lasts.
            seed: Of the keys and of all else that is drawn.
        """
        arrivals = _days(_read(traces / SERVEGEN), first, days)
        trace = self._requests(arrivals, seed)
        half_life = self.economy.half_life
        if self.family == "update-storm":
            half_life = math.inf  # answers become stale by their documents, not by age
        return scenario_of(trace, INTERVAL, replace(self.economy, half_life=half_life))

    def _requests(self, arrivals: Trace, seed: int) -> Trace:
        rng = np.random.default_rng([2, seed])
        if self.family == "diurnal":
            arrivals = _thinned_by_hour(arrivals, self.hour, 1.0 + 7.0 * self.strength, rng)
        trace = _asked(arrivals, self, rng, spread=self.family == "multi-tenant")
        at = [day * DAY + self.hour * 3600.0 for day in range(math.ceil(trace.duration / DAY))]
        at = [moment for moment in at if moment < trace.duration]
        own = int(rng.integers(1 << 31))
        if self.family == "diurnal":
            shifted = replace(trace, time=trace.time + (24.0 - self.hour) * 3600.0)
            made = replace(day_and_night(shifted, day=DAY, contrast=self.strength, share=0.8, seed=own), time=trace.time)
        elif self.family == "flash-crowd":
            made = trace
            for crowd in range(max(1, round(trace.duration / DAY))):
                start = float(rng.uniform(0.0, 0.95)) * trace.duration
                size = round(self.strength * len(trace) * DAY / trace.duration * 0.5)
                made = add_flash_crowd(
                    made, size, start=start, half_life=float(rng.uniform(0.5, 3.0)) * 3600.0, ramp=600.0,
                    keys=int(rng.integers(3, 200)), seed=own + crowd,
                )  # fmt: skip
        elif self.family == "hot-set-swap":
            shifted = replace(trace, time=trace.time + (24.0 - self.hour) * 3600.0)
            made = replace(alternate(shifted, period=DAY / 2, sets=2, share=self.strength, seed=own), time=trace.time)
        elif self.family == "model-release":
            made = add_releases(trace, at, seed=own)
        elif self.family == "update-storm":
            made = add_documents(
                trace, documents=200, alpha=0.5, updates=0.3, storms=at, storm_share=self.strength, storm_length=300.0, seed=own
            )
        else:
            made = trace
        note = f"Semi-synthetic ({self.family}): arrivals and clients of ServeGen, one in {THINNING}; keys and lengths are drawn."
        return replace(made, name=f"{self.family}-{seed}", note=note)


def scenario_of(trace: Trace, interval: float, economy: Economy) -> Scenario:
    """Give a trace a cache, a model and prices of its scale; it starts from the middle of the grid.

    The knob space spans 1/256 of the footprint to the whole of it, and a TTL of one interval to twice the trace. The model takes
    as long for a token as a served 7-billion-parameter model does; P99 is to stay below three times what a long answer takes.
    Warm-up keeps the trace's own time: what is hot is remembered for some dozens of intervals, and refreshing at most doubles the
    mean load.

    Args:
        trace: The requests.
        interval: Seconds between two decisions.
        economy: The rest.
    """
    _, first = np.unique(trace.key, return_index=True)
    footprint = int(trace.size[first].sum())
    largest = max(1 << 16, footprint)
    space = KnobSpace(
        min_size=max(1, largest >> 8), max_size=largest, min_ttl=interval, max_ttl=2.0 * trace.duration, max_warmup=0.5
    )
    model = UpstreamModel(slots=1, ttft=0.4, tpot=0.02, contention=0.5)
    rate = len(trace) / trace.duration
    mean = model.ttft + model.tpot * float(trace.output_tokens.mean())
    slots = max(2, math.ceil(0.5 * rate * mean * (1.0 + model.contention) * economy.headroom))
    prices = Prices()
    tokens = 1e-6 * (float(trace.input_tokens.sum()) * prices.input_mtok + float(trace.output_tokens.sum()) * prices.output_mtok)
    everything = tokens + len(trace) * mean * prices.latency_second
    long = model.ttft + model.tpot * float(np.quantile(trace.output_tokens, 0.9))
    prices = replace(
        prices,
        memory_gib_hour=economy.memory_share * everything / (largest / GIB * trace.duration / 3600.0),
        stale_answer=prices.stale_answer * economy.stale_factor,
        slo_p99=3.0 * long,
    )
    config = SimConfig(
        space=space,
        memory_eviction=MEMORY_EVICTION,
        upstream=replace(model, slots=slots),
        staleness_half_life=economy.half_life,
        prices=prices,
        semantic=False,
        warmup=WarmupRules(
            half_life=36.0 * interval,
            period=0.1 * interval,
            refreshes_per_second=rate,
            burst=max(1, round(0.1 * interval * rate)),
        ),
    )
    return Scenario(trace, config, interval, middle(space))


def middle(space: KnobSpace) -> Knobs:
    """Return the middle of the grid, without warm-up: the default of one who knows nothing of the workload."""
    return space.from_steps([(space.size_steps - 1) / 2, (space.ttl_steps - 1) / 2, 0.0])


@lru_cache(maxsize=8)
def _read(path: Path) -> Trace:
    if not path.is_file():
        raise TraceError(
            str(path), "the folder of the real traces: give it as --traces, or set CACHEPILOT_TRACES", excerpt="no such file"
        )
    return load(path, rate_scale=1.0 / THINNING) if path.name == SERVEGEN else load(path)


def _days(trace: Trace, first: int, days: int) -> Trace:
    low, high = np.searchsorted(trace.time, [first * DAY, (first + days) * DAY])
    part = trace.slice(int(low), int(high))
    return replace(part, time=trace.time[low:high] - first * DAY)


def _asked(arrivals: Trace, process: Process, rng: np.random.Generator, *, spread: bool) -> Trace:
    """Draw what each arrival asks for: Zipf ranks over its client's own keys, which are replaced one by one as time goes on."""
    count = len(arrivals)
    key = np.empty(count, np.uint64)
    factor = np.ones(count)
    salt = int(rng.integers(1 << 62))
    for tenant in np.unique(arrivals.tenant).tolist():
        rows = np.flatnonzero(arrivals.tenant == tenant)
        population = max(10, round(process.keys * 10.0 ** -rng.random()))
        alpha = process.alpha + (float(rng.uniform(-0.4, 0.3)) if spread else 0.0)
        rank = zipf_ranks(rng, population, alpha, len(rows))
        born = rng.random(population)
        renewed = np.floor(arrivals.time[rows] / (process.lifetime * DAY) + born[rank]).astype(np.uint64)
        name = (np.uint64(tenant) << np.uint64(48)) ^ (renewed << np.uint64(32)) ^ rank.astype(np.uint64)
        key[rows] = mix64_array(name ^ np.uint64(mix64(salt)))
        if spread:
            factor[rows] = 4.0 ** rng.uniform(-1.0, 1.0)
    uniform = mix64_array(key ^ np.uint64(7)) / 2.0**64
    tokens = np.clip(np.round(answer_tokens(uniform) * factor), 8, 4096).astype(np.int64)
    return replace(
        arrivals,
        key=key,
        size=entry_bytes(tokens, False),
        output_tokens=tokens.astype(np.int32),
        input_tokens=question_tokens(mix64_array(key) / 2.0**64),
    )


def _thinned_by_hour(trace: Trace, quietest: float, peak_to_trough: float, rng: np.random.Generator) -> Trace:
    """Keep a share of the requests that follows the hour: 1 at noon of the pattern's day, ``1 / peak_to_trough`` at its night."""
    hours: npt.NDArray[np.float64] = (trace.time / 3600.0 - quietest) / 24.0
    swing = 0.5 - 0.5 * np.cos(2.0 * math.pi * hours)
    keep = rng.random(len(trace)) < (1.0 + (peak_to_trough - 1.0) * swing) / peak_to_trough
    return trace.take(np.flatnonzero(keep))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))
