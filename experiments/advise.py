"""Which cache size and TTL a trace asks for: the curve over both, the cheapest setting, and what it would have saved.

The choice is made on the first part of the trace and judged on the rest, which it has not seen. Traces up to a budget are
simulated exactly at every setting of the grid; of longer ones a ghost curve picks the few settings that are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from agents.words import size_words
from envs.objective import Prices, grid_cost
from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import Trace
from experiments.advice import (
    BATCHES,
    CHOSEN_ON,
    FEWEST_PER_BATCH,
    GHOST_KEYS,
    Advice,
    Choice,
    Facts,
    Grid,
    Outcome,
    judge,
    remarks,
    saving_of,
    worth_it,
)
from experiments.scenarios import space_for
from experiments.sensitivity import sensitivity
from experiments.simulate import (
    PAST_THE_END,
    Load,
    Row,
    stepped,
)
from experiments.trace_source import Progress, TraceSource, joined, left_out, no_progress, watched
from experiments.units import InputError
from serving.ghost import Ghost
from serving.knobs import Knobs, KnobSpace

EXACT_REQUESTS = 2_000_000
"""Up to so many requests every setting of the grid is simulated exactly."""

FEW = 3
"""Best settings that warm-up is tried on; of a long trace, the best of the ghost curve that are simulated exactly."""

WARM = (0.1, 0.25, 0.5)
WITHOUT_LIMIT = 1 << 50
NO_CACHE = Knobs(0, math.inf)


def advise(
    source: TraceSource,
    *,
    config: SimConfig,
    sized: bool = True,
    current: Knobs | None = None,
    max_size: int | None = None,
    exact_requests: int = EXACT_REQUESTS,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Advice:
    """Find the setting that a trace asks for.

    Args:
        source: The trace; it is read once if it is short enough, else three times.
        config: The simulator's settings; its knob space is replaced by one of the trace's scale, its prices price.
        sized: Whether the model is sized for the trace's load, instead of taken from ``config``.
        current: The setting in force, to compare with.
        max_size: Largest cache to consider, bytes; None for all that the trace could use.
        exact_requests: Up to so many requests every setting is simulated exactly.
        seed: Of the simulator and of the ghost's sample.
        progress: Told as the work goes on.

    Raises:
        envs.workloads.TraceError: If the trace cannot be read, or has no request.
        InputError: If it has too few requests, or all at one time, or ``max_size`` leaves nothing to choose from.
    """
    config = replace(config, ghost_keys=0)
    facts, trace, notes = _survey(source, config, exact_requests, progress)
    if facts.requests < 2 or facts.duration <= 0:
        raise InputError(f"advise: {facts.name}: expected requests at two times at least, got {facts.requests:,} at one")
    space = _space(facts, max_size)
    config = replace(config, space=space, upstream=facts.load.model() if sized else config.upstream)
    count = max(2, min(BATCHES, facts.requests // FEWEST_PER_BATCH))
    run = _Runner(source, trace, config, facts, count, seed, progress)
    ttls = space.ttls.copy()
    ttls[-1] = math.inf
    fixed = [NO_CACHE, *([current] if current is not None else [])]
    if trace is not None:
        grid_knobs = [Knobs(int(size), float(ttl)) for size in space.sizes for ttl in ttls]
        outcomes = run([*grid_knobs, *fixed, Knobs(WITHOUT_LIMIT, math.inf)], "simulating the grid")
    else:
        curve = _ghost(source, config, ttls, facts, seed, progress)
        picked = _pick(curve, config.prices)
        best = [Knobs(int(space.sizes[row]), math.inf) for row in np.argsort(curve.cost(config.prices)[:, -1])[:FEW]]
        warm = [replace(knobs, warmup_ratio=ratio) for knobs in picked[:1] for ratio in WARM]
        outcomes = run([*picked, *best, *warm, *fixed, Knobs(WITHOUT_LIMIT, math.inf)], "simulating the few that matter")
    batches = min(len(outcome.batches) for outcome in outcomes.values())
    split = max(1, min(round(CHOSEN_ON * batches), batches - 1))
    chosen_on, held_out = slice(0, split), slice(split, None)
    unlimited = _at_what_it_held(outcomes.pop(Knobs(WITHOUT_LIMIT, math.inf)))
    if trace is not None:
        ranked = sorted(grid_knobs, key=lambda knobs: outcomes[knobs].cost(config.prices, chosen_on))

        def leader(moved: Prices) -> Knobs:
            return min(grid_knobs, key=lambda knobs: _rank(outcomes[knobs], moved, chosen_on))

        # Under a moved price too, warm-up is tried on what is best without it.
        led = [move.outcome for move in sensitivity(leader, config.prices).moved]
        warm = [replace(knobs, warmup_ratio=ratio) for knobs in dict.fromkeys([*ranked[:FEW], *led]) for ratio in WARM]
        outcomes |= run(warm, "trying warm-up")
        grid = _exact_grid(space, ttls, outcomes, config.prices)
    else:
        grid = Grid(space.sizes, ttls, curve.hit_ratio, curve.cost(config.prices, whole=True), exact=False)
    static = [outcome for knobs, outcome in outcomes.items() if _is_static(knobs) and knobs in _on_grid(space, ttls)]

    def cheapest(among: Sequence[Outcome], prices: Prices, part: slice) -> Outcome:
        return min(among, key=lambda outcome: _rank(outcome, prices, part))

    def decide(prices: Prices) -> Choice:
        best = cheapest(list(outcomes.values()), prices, chosen_on)
        against = outcomes[current] if current is not None else cheapest(static, prices, chosen_on)
        saving = saving_of(best, against, prices, chosen_on, held_out)
        return Choice(best.knobs, saving.share, current is None or (best is not against and worth_it(saving)))

    outlook = sensitivity(decide, config.prices)
    recommended = outcomes[outlook.base.knobs]
    advice = Advice(
        facts=facts,
        config=config,
        sized=sized,
        prices=config.prices,
        grid=grid,
        recommended=recommended,
        current=None if current is None else outcomes[current],
        references={
            "best without expiry": cheapest(static, config.prices, chosen_on),
            "no cache": outcomes[NO_CACHE],
            "unlimited cache": unlimited,
        },
        hindsight=cheapest(list(outcomes.values()), config.prices, slice(None)),
        chosen_on=chosen_on,
        held_out=held_out,
        outlook=outlook,
        verdict="",
        reason="",
        warnings=(),
        simulated=len(outcomes) + 1,
    )
    verdict, reason = judge(advice)
    return replace(advice, verdict=verdict, reason=reason, warnings=[*notes, *remarks(advice, outcomes)])


def _space(facts: Facts, max_size: int | None) -> KnobSpace:
    space = space_for(facts.footprint, facts.duration)
    if max_size is None or max_size >= space.max_size:
        return space
    if max_size < 1024:
        raise InputError(f"largest cache size: {size_words(max_size)}: expected at least 1 KiB to choose from")
    return replace(space, min_size=max(1, max_size >> 8), max_size=max_size)


def _survey(
    source: TraceSource, config: SimConfig, exact_requests: int, progress: Progress
) -> tuple[Facts, Trace | None, list[str]]:
    """Read the trace once; return what is known of it, the trace itself if it is short enough, and remarks."""
    reading = source.open()
    kept: list[Trace] | None = []
    unlimited: CacheSimulator | None = None
    requests = keys = footprint = inputs = outputs = changes = 0
    last = 0.0
    for part in watched(reading, "reading", progress):
        if unlimited is None:
            unlimited = CacheSimulator(part, config, Knobs(WITHOUT_LIMIT, math.inf))
        else:
            unlimited.extend(part)
        requests += len(part)
        inputs += int(part.input_tokens.sum(dtype=np.int64))
        outputs += int(part.output_tokens.sum(dtype=np.int64))
        changes += len(part.update_time) + len(part.flush_time)
        last = float(part.time[-1])
        # In several steps: a flush within the chunk hides what was held before it.
        for until in np.linspace(unlimited.now, last, 9)[1:]:
            if until > unlimited.now:
                unlimited.step(until - unlimited.now)
            held = unlimited.resident["redis"]
            keys, footprint = max(keys, held[0]), max(footprint, held[1])
        if kept is not None:
            kept.append(part)
            if requests > exact_requests:
                kept = None
    if unlimited is None:
        raise source.empty()
    load = Load(requests, requests / (last or 1.0), outputs / requests)
    facts = Facts(
        reading.name, reading.note, reading.kind, requests, last, keys, footprint, load, inputs / requests, changes
    )  # fmt: skip
    return facts, joined(kept) if kept is not None else None, left_out(reading)


class _Runner:
    """Runs settings over the trace, exactly, cut into batches of equally many requests."""

    def __init__(
        self, source: TraceSource, trace: Trace | None, config: SimConfig, facts: Facts, count: int, seed: int, progress: Progress
    ) -> None:
        self._source, self._trace, self._config, self._seed, self._progress = source, trace, config, seed, progress
        self._requests = facts.requests
        self._starts = [facts.requests * number // count for number in range(1, count)]

    def __call__(self, knobs: Sequence[Knobs], phase: str) -> dict[Knobs, Outcome]:
        wanted = list(dict.fromkeys(knobs))
        if self._trace is None:
            return self._together(wanted, iter(watched(self._source.open(), phase, self._progress)))
        found: dict[Knobs, Outcome] = {}
        for number, setting in enumerate(wanted, start=1):
            found |= self._together([setting], iter([self._trace]))
            self._progress(phase, number / len(wanted), number * self._requests)
        return found

    def _together(self, wanted: Sequence[Knobs], parts: Iterator[Trace]) -> dict[Knobs, Outcome]:
        first = next(parts)
        simulators = [CacheSimulator(first, self._config, knobs, seed=self._seed) for knobs in wanted]
        batches: list[list[list[Row]]] = [[[]] for _ in wanted]
        starts, seen = list(self._starts), 0
        last = float(first.time[-1])

        def advance(until: float) -> None:
            for simulator, own in zip(simulators, batches, strict=True):
                if until > simulator.now:
                    own[-1].append(stepped(simulator, until - simulator.now))

        for part in chain([first], parts):
            if part is not first:
                advance(last)
                for simulator in simulators:
                    simulator.extend(part)
            while starts and starts[0] < seen + len(part):
                advance(float(part.time[starts.pop(0) - seen]))
                for own in batches:
                    own.append([])
            seen += len(part)
            last = float(part.time[-1])
        advance(last + PAST_THE_END)
        return {
            knobs: Outcome(knobs, tuple(tuple(rows) for rows in own if rows))
            for knobs, own in zip(wanted, batches, strict=True)
        }  # fmt: skip


@dataclass(frozen=True)
class _Curve:
    """A ghost's curve of a long trace: hits of every setting on the part that is chosen on, and on the rest."""

    sizes: npt.NDArray[np.int64]
    ttls: npt.NDArray[np.float64]
    hits: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
    stale: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
    requests: tuple[float, float]
    facts: Facts
    config: SimConfig

    @property
    def hit_ratio(self) -> npt.NDArray[np.float64]:
        """Of the whole trace, shape (S, T)."""
        ratio: npt.NDArray[np.float64] = np.clip((self.hits[0] + self.hits[1]) / max(sum(self.requests), 1.0), 0.0, 1.0)
        return ratio

    def cost(self, prices: Prices, *, whole: bool = False) -> npt.NDArray[np.float64]:
        """Price every setting on the part that is chosen on, or on the whole, shape (S, T)."""
        both = sum(self.requests)
        requests = both if whole else self.requests[0]
        model = self.config.upstream
        busy = min(model.slots - 1, math.ceil(self.facts.load.rate * model.service_time(round(self.facts.load.output_tokens), 0)))
        return grid_cost(
            np.asarray(sum(self.hits) if whole else self.hits[0]),
            np.asarray(sum(self.stale) if whole else self.stale[0]),
            self.sizes,
            requests=requests,
            duration=self.facts.duration * requests / both,
            input_tokens_per_miss=self.facts.input_tokens,
            output_tokens_per_miss=self.facts.load.output_tokens,
            miss_latency=model.service_time(round(self.facts.load.output_tokens), busy),
            hit_latency=self.config.store_latency,
            prices=prices,
        )


def _ghost(
    source: TraceSource, config: SimConfig, ttls: npt.NDArray[np.float64], facts: Facts, seed: int, progress: Progress
) -> _Curve:
    ghost = Ghost(
        config.space.sizes,
        config.space.ttls,
        max_keys=GHOST_KEYS,
        salt=seed,
        staleness_half_life=config.staleness_half_life,
        ttl_jitter=config.ttl_jitter,
    )
    split, seen = int(facts.requests * CHOSEN_ON), 0
    early = None
    for part in watched(source.open(), "sampling", progress):
        cuts = {len(part), *np.searchsorted(part.time, part.flush_time).tolist()}
        if seen < split < seen + len(part):
            cuts.add(split - seen)
        begin = 0
        for end in sorted(cuts):
            ghost.access_many(part.key[begin:end], part.size[begin:end], part.time[begin:end])
            begin = end
            if early is None and seen + end >= split:
                early = ghost.take().curve
            if end < len(part) and end in np.searchsorted(part.time, part.flush_time):
                ghost.flush()
        seen += len(part)
    late = ghost.take().curve
    if early is None or not early.requests > 0:
        raise InputError(f"advise: {facts.name}: the ghost saw no request in the first {CHOSEN_ON:.0%} of the trace")
    return _Curve(
        config.space.sizes,
        ttls,
        (early.hits, late.hits),
        (early.stale_hits, late.stale_hits),
        (early.requests, late.requests),
        facts,
        config,
    )


def _pick(curve: _Curve, prices: Prices) -> list[Knobs]:
    """Return the settings of a ghost's curve worth simulating: its best few, and the best under each halved or doubled price."""

    def best(moved: Prices, count: int) -> list[Knobs]:
        cost = curve.cost(moved)
        rows, columns = np.unravel_index(np.argsort(cost, axis=None)[:count], cost.shape)
        return [Knobs(int(curve.sizes[row]), float(curve.ttls[column])) for row, column in zip(rows, columns, strict=True)]

    other = [move.outcome for move in sensitivity(lambda moved: best(moved, 1)[0], prices).moved]
    return list(dict.fromkeys([*best(prices, FEW), *other]))


def _exact_grid(
    space: KnobSpace, ttls: npt.NDArray[np.float64], outcomes: Mapping[Knobs, Outcome], prices: Prices
) -> Grid:  # fmt: skip
    table = [[outcomes[Knobs(int(size), float(ttl))] for ttl in ttls] for size in space.sizes]
    hit_ratio = np.array([[outcome.hit_ratio for outcome in row] for row in table])
    return Grid(space.sizes, ttls, hit_ratio, np.array([[outcome.cost(prices) for outcome in row] for row in table]), exact=True)


def _on_grid(space: KnobSpace, ttls: npt.NDArray[np.float64]) -> set[Knobs]:
    return {Knobs(int(size), float(ttl)) for size in space.sizes for ttl in ttls}


def _is_static(knobs: Knobs) -> bool:
    return math.isinf(knobs.ttl) and knobs.warmup_ratio == 0 and knobs.cache_size > 0


def _rank(outcome: Outcome, prices: Prices, part: slice) -> tuple[float, int, float, float]:
    """Order by cost; of equally dear ones the smaller, the less warmed, the longer-lived comes first."""
    knobs = outcome.knobs
    return float(f"{outcome.cost(prices, part):.9g}"), knobs.cache_size, knobs.warmup_ratio, -knobs.ttl


def _at_what_it_held(outcome: Outcome) -> Outcome:
    """Price an unlimited cache at the most that it held, not at its budget."""
    held = max(row.figures.signals.resident_bytes for row in chain.from_iterable(outcome.batches))

    def priced(row: Row) -> Row:
        return replace(row, figures=replace(row.figures, usage=replace(row.figures.usage, budget_bytes=held)))

    batches = tuple(tuple(priced(row) for row in rows) for rows in outcome.batches)
    return Outcome(Knobs(int(held), math.inf), batches)
