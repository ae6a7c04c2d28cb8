"""What another setting would have cost on a window's own requests: an estimate from the window's ghost curve.

A live cache has no second cache beside it. The window's ghost curve says what every setting would have hit on the very same
requests, but it knows neither fills nor warm-up nor the model's queue. The measured window knows them all, for one setting. The
estimate takes the measured window and moves it by what the ghost says differs between the two settings (a control variate): what
the ghost gets wrong for both alike cancels, and the estimate for the setting that was in force is the measured cost itself,
without any error.

========== =============================================================================================================
term       estimate for the other setting
========== =============================================================================================================
tokens     measured, plus the difference in misses times the mean tokens of a miss
latency    likewise, by the mean latency of a miss less that of a hit; misses wait longer or shorter as the load on the model
           changes (:class:`Service`)
memory     exact
staleness  the ghost's own at the other setting (by age), what updates would have outdated there
           (:mod:`agents.update_hazard`), and what was measured beyond both, in proportion to the hits
slo        the measured P99, moved with the load on the model
refresh    in proportion to the warm-up ratios: none without warm-up
change     exact
========== =============================================================================================================

With warm-up, hits are measured that the ghost cannot know of. What they exceed the ghost's by on average, beyond what the ghost
is wrong by without warm-up, is credited to warm-up (:attr:`Service.warmed_hits`), as far as windows of both kinds were seen.

A ghost's caches have always had their size; a real one that has just grown is still to be filled. By LRU's inclusion property it
holds what a cache of the bytes that it held before growing, plus those inserted since, would hold: the ghost is therefore read at
that size (:func:`refilled`), for both settings.

Where a smaller cache would overload the model, the measured windows, which had less load, tell too little of it; that favours the
other setting. Nobody should be judged by the estimate without a margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from agents.update_hazard import UpdateMeter, Updates
from envs.objective import Cost, Prices, Usage, price
from envs.signal_batch import ABSURD
from envs.signals import ArmSignals
from envs.smoothing import cost_at
from serving.ghost import GhostCurve
from serving.knobs import Knobs

MOST_FACTOR = 4.0
"""The load on the model is never taken to change a latency by more than this factor: nobody has seen what lies beyond."""

FEWEST_WINDOWS = 8.0
"""Weight of windows below which nothing is said of how latency answers to load."""


_LEAST_STALE = 1e-4
"""Stale hits per request that are added before the logarithm is taken."""


@dataclass(frozen=True, slots=True)
class Service:
    """What hits and misses have been like lately: moving averages over windows.

    Attributes:
        input_tokens: Mean prompt tokens of a miss; NaN before the first, like the next three.
        output_tokens: Mean completion tokens of a miss.
        miss_latency: Mean latency of a miss, seconds.
        hit_latency: Mean latency of a hit, seconds.
        warmed_hits: Hits per request that warm-up adds, >= 0.
        warmed_stale: Expected stale hits per request that it adds, <= 0: what it refreshes is younger.
        entry_bytes: Bytes that an insertion adds; NaN while unknown.
        miss_response: Growth of the log of the latency of misses per completion token per second at the model.
        p99_response: The same of P99.
        updates: When answers became outdated otherwise than by age.
    """

    input_tokens: float = math.nan
    output_tokens: float = math.nan
    miss_latency: float = math.nan
    hit_latency: float = math.nan
    warmed_hits: float = 0.0
    warmed_stale: float = 0.0
    entry_bytes: float = math.nan
    miss_response: float = 0.0
    p99_response: float = 0.0
    updates: Updates = field(default_factory=Updates, compare=False)

    @property
    def known(self) -> bool:
        """Whether a miss has ever been seen and timed."""
        return not math.isnan(self.input_tokens + self.output_tokens + self.miss_latency)


class _Average:
    """A moving average of two numbers, and how far it is to be trusted: 0 to 1, from little seen to much."""

    def __init__(self) -> None:
        self._sum, self._weight = np.zeros(2), 0.0

    def add(self, values: tuple[float, float], kept: float) -> None:
        self._sum = kept * self._sum + np.array(values)
        self._weight = kept * self._weight + 1.0

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        return self._sum / max(self._weight, 1.0)

    @property
    def trust(self) -> float:
        return self._weight / (self._weight + FEWEST_WINDOWS)


class ServiceMeter:
    """Keeps :class:`Service` over windows.

    Args:
        weight: Weight of the newest window in the averages, (0, 1].
        memory: What a window keeps of the weight of the ones before where much is needed to see anything: the effect of
            warm-up and of load, (0, 1].
    """

    def __init__(self, weight: float = 0.3, memory: float = 0.98) -> None:
        self._weight = weight
        self._memory = memory
        self._updates = UpdateMeter(memory)
        self.reset()

    def reset(self) -> None:
        """Forget every window."""
        self.service = Service()
        self._updates.reset()
        self._moments = np.zeros((2, 6))  # for log latency of misses and log P99: weight, x, y, xx, xy, yy
        self._inserted = np.zeros(2)  # products of entries and bytes by which the cache grew, squares of the entries
        self._held = math.nan
        self._surplus = (_Average(), _Average())  # without warm-up, with it

    def update(self, signals: ArmSignals, knobs: Knobs, filled: float | None = None, oldest: float = math.inf) -> None:
        """Take one more window in; what is missing in it leaves the averages as they are.

        Args:
            signals: The window.
            knobs: The knobs that were in force.
            filled: Bytes that the cache could hold by then, where it grew lately; default: its size.
            oldest: Seconds that its oldest entry is old (:func:`agents.update_hazard.oldest_age`); default: its TTL.
        """
        service = self.service
        misses = signals.requests * (1.0 - signals.hit_ratio)
        if _sane(misses) and misses >= 1.0 and _sane(signals.input_tokens, signals.output_tokens, signals.miss_latency):
            service = replace(
                service,
                input_tokens=self._mean(service.input_tokens, signals.input_tokens / misses),
                output_tokens=self._mean(service.output_tokens, signals.output_tokens / misses),
                miss_latency=self._mean(service.miss_latency, signals.miss_latency),
            )
        if _sane(signals.hit_latency):
            service = replace(service, hit_latency=self._mean(service.hit_latency, signals.hit_latency))
        ghost = signals.ghost
        if ghost is not None and usable(ghost) and _shares(signals):
            held = _read_at(knobs, filled)
            self._updates.update(signals, ghost, held, ghost_shares(ghost, held)[1], oldest)
            service = replace(service, updates=self._updates.updates)
            surplus = _surplus(signals, ghost, held, service.updates.outdated(held, oldest))
            self._surplus[int(knobs.warmup_ratio > 0)].add(surplus, self._memory)
            cold, warm = self._surplus
            hits, stale = (warm.mean - cold.mean) * cold.trust * warm.trust
            service = replace(service, warmed_hits=max(float(hits), 0.0), warmed_stale=min(float(stale), 0.0))
        service = replace(service, entry_bytes=self._entry_bytes(signals))
        load = _load(signals)
        for row, latency in enumerate((signals.miss_latency, signals.p99)):
            if _sane(load, latency) and latency > 0:
                y = math.log(latency)
                self._moments[row] = self._memory * self._moments[row] + np.array([1.0, load, y, load * load, load * y, y * y])
        self.service = replace(service, miss_response=_slope(self._moments[0]), p99_response=_slope(self._moments[1]))

    def _entry_bytes(self, signals: ArmSignals) -> float:
        """Take in by how much the cache grew and by how many entries; return the bytes of one."""
        held, before = signals.resident_bytes, self._held
        entries = insertions(signals) - signals.evictions
        if _sane(held, before, abs(entries)) and held >= 0.5 * before:  # else it was flushed, or shrank by far
            self._inserted = self._memory * self._inserted + np.array([entries * (held - before), entries * entries])
        self._held = held
        products, squares = self._inserted
        return float(products / squares) if squares > 0 and products > 0 else math.nan

    def _mean(self, before: float, value: float) -> float:
        return value if math.isnan(before) else before + self._weight * (value - before)


def counterfactual(
    signals: ArmSignals,
    applied: Knobs,
    other: Knobs,
    service: Service,
    prices: Prices,
    *,
    change_steps: float = 0.0,
    filled: tuple[float, float] | None = None,
    oldest: tuple[float, float] = (math.inf, math.inf),
) -> Cost | None:
    """Estimate what other knobs would have cost on a window's own requests.

    Args:
        signals: The window as measured.
        applied: The knobs that were in force.
        other: The knobs to price.
        service: What hits and misses are like.
        prices: The prices.
        change_steps: Grid steps by which the other knobs would have moved at the window's start.
        filled: Bytes that the two caches could hold in the window, ours and the other (:func:`refilled`); default: their sizes.
        oldest: Ages of their oldest entries, seconds (:func:`agents.update_hazard.oldest_age`); default: as old as their TTLs let
            them be.

    Returns:
        US dollars per 1,000 requests by term, equal to the measured cost (but for the change) where ``other`` is ``applied``;
        None where the window cannot tell.
    """
    ghost = signals.ghost
    if ghost is None or not usable(ghost) or not service.known:
        return None
    needed = (
        signals.requests, signals.hit_ratio, signals.latency_sum, signals.input_tokens, signals.output_tokens, signals.stale_hits,
        signals.refresh_input_tokens, signals.refresh_output_tokens, signals.window,
    )  # fmt: skip
    if not _sane(*needed) or not _shares(signals) or not signals.window > 0:
        return None
    if not (math.isnan(signals.p99) or _sane(signals.p99)):  # without P99 its hinge is 0; a broken one has no price
        return None
    # What warm-up did in our window and would have done in the other: in proportion to the ratios.
    kept = min(1.0, other.warmup_ratio / applied.warmup_ratio) if applied.warmup_ratio > 0 else 1.0
    ours, theirs = filled if filled is not None else (None, None)
    here, there = _read_at(applied, ours), _read_at(other, theirs)
    surplus, beyond = _surplus(signals, ghost, here, service.updates.outdated(here, oldest[0]))
    surplus -= (1.0 - kept) * service.warmed_hits
    beyond -= (1.0 - kept) * service.warmed_stale
    ghost_hits, aged = ghost_shares(ghost, there)
    hit_ratio = min(max(ghost_hits + surplus, 0.0), 1.0)
    more = signals.requests * (signals.hit_ratio - hit_ratio)  # misses that the other setting would have had beyond ours
    misses = signals.requests * (1.0 - hit_ratio)
    refresh_in, refresh_out = kept * signals.refresh_input_tokens, kept * signals.refresh_output_tokens
    input_tokens = max(0.0, signals.input_tokens + more * service.input_tokens)
    output_tokens = max(0.0, signals.output_tokens + more * service.output_tokens)
    heavier = (output_tokens + refresh_out - signals.output_tokens - signals.refresh_output_tokens) / signals.window
    miss_latency = signals.miss_latency if _sane(signals.miss_latency) else service.miss_latency
    slower = miss_latency * (_factor(service.miss_response, heavier) - 1.0)
    hit_latency = 0.0 if math.isnan(service.hit_latency) else service.hit_latency
    latency = signals.latency_sum + more * (miss_latency - hit_latency) + misses * slower
    stale = _stale(hit_ratio, aged, service.updates.outdated(there, oldest[1]))
    stale += beyond * (min(hit_ratio / signals.hit_ratio, 1.0) if signals.hit_ratio > 0 else 1.0)
    cost = price(
        Usage(
            requests=signals.requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            latency_seconds=max(0.0, latency),
            p99=signals.p99 * _factor(service.p99_response, heavier),
            stale_hits=max(0.0, stale) * signals.requests,
            budget_bytes=other.cache_size,
            duration=signals.window,
            refresh_input_tokens=refresh_in,
            refresh_output_tokens=refresh_out,
            change_steps=change_steps,
        ),
        prices,
    )
    return cost if math.isfinite(cost.total) else None


def refilled(held: float, size: float, signals: ArmSignals, service: Service) -> tuple[float, float]:
    """Return what a cache can hold during a window and at its end, bytes, from what it held before.

    Args:
        held: Bytes that it could hold at the end of the window before.
        size: Its size in this window, bytes.
        signals: The window; its insertions are taken for those of any setting.
        service: What an insertion adds.
    """
    start, added = min(held, size), insertions(signals) * service.entry_bytes
    if start >= size or not _sane(added):
        return size, size
    end = min(size, start + added)
    return (start + end) / 2.0, end


def insertions(signals: ArmSignals) -> float:
    """Return the entries that a window's misses added to the cache: all but those that replaced an expired one."""
    return max(signals.requests * (1.0 - signals.hit_ratio) - signals.expirations, 0.0)


def _read_at(knobs: Knobs, filled: float | None) -> Knobs:
    return knobs if filled is None or filled >= knobs.cache_size else replace(knobs, cache_size=max(1, round(filled)))


def ghost_shares(curve: GhostCurve, knobs: Knobs) -> tuple[float, float]:
    """Return hits and expected stale hits per request by a usable curve, at any size and TTL.

    Between the points of the grid hits are interpolated; stale hits are so in their logarithm, since they grow with a power of
    the TTL and a chord would lie far above them.
    """
    hits = cost_at(curve.hits / curve.requests, curve, knobs)
    stale = cost_at(np.log(curve.stale_hits / curve.requests + _LEAST_STALE), curve, knobs)
    return hits, math.exp(stale) - _LEAST_STALE


def _stale(hits: float, aged: float, outdated: float) -> float:
    """Return stale hits per request: those outdated by age, and of the other hits the share that updates have outdated."""
    return aged + max(hits - aged, 0.0) * outdated


def _surplus(signals: ArmSignals, ghost: GhostCurve, knobs: Knobs, outdated: float) -> tuple[float, float]:
    """Return the hits and the stale hits, each per request, beyond what the ghost and updates explain at the same setting."""
    hits, aged = ghost_shares(ghost, knobs)
    return signals.hit_ratio - hits, signals.stale_hits / signals.requests - _stale(signals.hit_ratio, aged, outdated)


def usable(curve: GhostCurve) -> bool:
    """Whether a curve holds only what a window can hold."""
    shape = (len(curve.sizes), len(curve.ttls))
    if not (math.isfinite(curve.requests) and 1e-3 < curve.requests < ABSURD) or min(shape) < 1:
        return False
    if curve.hits.shape != shape or curve.stale_hits.shape != shape:
        return False
    if not (_ascending(np.asarray(curve.sizes, np.float64)) and _ascending(np.asarray(curve.ttls, np.float64))):
        return False
    cells = np.stack([curve.hits, curve.stale_hits])
    return bool(np.all((cells >= 0) & (cells < ABSURD)))


def _ascending(points: npt.NDArray[np.float64]) -> bool:
    return bool(np.all((points > 0) & np.isfinite(points)) and np.all(np.diff(points) > 0))


def _sane(*values: float) -> bool:
    return all(0.0 <= value < ABSURD for value in values)


def _shares(signals: ArmSignals) -> bool:
    """Whether hits and stale hits are shares of the requests; signals that contradict each other must not stay in an average."""
    requests = signals.requests
    return (
        _sane(requests, signals.hit_ratio, signals.stale_hits) and signals.hit_ratio <= 1.0 and 0 < requests >= signals.stale_hits
    )


def _load(signals: ArmSignals) -> float:
    """Completion tokens per second at the model."""
    if not signals.window > 0:
        return math.nan
    return (signals.output_tokens + signals.refresh_output_tokens) / signals.window


def _slope(moments: npt.NDArray[np.float64]) -> float:
    """Return the slope of a weighted regression, shrunk by its own uncertainty; 0 where it is not positive or unknown."""
    weight, x, y, xx, xy, yy = moments
    if weight < FEWEST_WINDOWS:
        return 0.0
    var, cov, spread = xx / weight - (x / weight) ** 2, xy / weight - x * y / weight**2, yy / weight - (y / weight) ** 2
    if not (var > 1e-9 * (x / weight) ** 2 and cov > 0 and spread > 0):
        return 0.0
    slope = cov / var
    unexplained = max(spread - slope * cov, 0.0)
    error = unexplained / (var * weight)
    return float(slope * slope**2 / (slope**2 + error))


def _factor(response: float, heavier: float) -> float:
    bound = math.log(MOST_FACTOR)
    return math.exp(min(max(response * heavier, -bound), bound))
