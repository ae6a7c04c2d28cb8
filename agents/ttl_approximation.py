"""Stochastic approximation of the cheapest TTL; the size follows what the TTL keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.policy import Proposal
from agents.priced_curve import PricedCurve
from agents.words import knob_words, parameter_words
from envs.observation import Observation
from envs.smoothing import CurveReading
from serving.knobs import Knobs

Floats = npt.NDArray[np.float64]

GAIN = 2.0
"""Grid steps that the TTL moves for a cost that changes by all of itself over one grid step."""
COVERAGE = 0.999
"""Share of the hits that the TTL allows which the size has to keep."""
SMOOTHING = 0.1
"""Weight of the newest window in the curve that the size is read off."""
LONGEST_MOVE = 1.0
"""Most that the TTL moves at once, grid steps."""

_DEFAULTS = {"gain": GAIN, "coverage": COVERAGE, "smoothing": SMOOTHING}


class TTLApproximationPolicy:
    """Follows the slope of the cost along the TTL, window by window.

    **Source.** Carra, Neglia, Michiardi: Elastic Provisioning of Cloud Caches: a Cost-aware TTL Approach (arXiv 1802.04696;
    IEEE/ACM ToN 28(3), 2020). There, a TTL cache without a bound on its size costs ``C(T)``: per content, misses x miss cost +
    time stored x storage cost. At every miss of a content with rate ``r``, miss cost ``m`` and storage cost ``c`` per second the
    TTL moves by ``step x (r m - c)``, whose mean is the negative slope of ``C``: an unbiased, noisy gradient, without a model of
    the traffic. The bytes that the TTL holds then set how many cache servers are rented.

    **Adapted.** Once per window instead of at every miss: the window's ghost curve, at the size that the TTL fills, has the
    misses (and the stale hits, which have a price here) for TTLs beside the current one, so the slope is a difference of
    measured costs on the same requests, as unbiased as the window is a sample of the traffic. What a TTL keeps is not counted
    but read off the curve: the smallest size with 99.9 % of the hits that the largest size has under that TTL (entries here
    expire by the age of the answer, and keep their bytes until they are evicted, so the size has to do what the timer does
    there). The TTL moves by its logarithm, and the slope is relative to the cost: one gain so fits workloads of seconds and of
    days. The gain is constant, as one that falls would stop following traffic that changes; it was chosen on training workloads,
    as were coverage and smoothing. A move is at most one grid step, and both knobs stay within the space. ``warmup_ratio`` is
    left as it is.

    Args:
        gain: Grid steps that the TTL moves for a cost that changes by all of itself over one grid step, > 0.
        coverage: Share of the hits which the TTL allows that the size has to keep, (0, 1].
        smoothing: Weight of the newest window in the curve that the size is read off, (0, 1].

    Raises:
        ValueError: If a parameter is out of its range.
    """

    def __init__(self, gain: float = GAIN, coverage: float = COVERAGE, smoothing: float = SMOOTHING) -> None:
        for name, value, fits, form in (
            ("gain", gain, 0.0 < gain < math.inf, "a finite number > 0"),
            ("coverage", coverage, 0.0 < coverage <= 1.0, "a share in (0, 1]"),
            ("smoothing", smoothing, 0.0 < smoothing <= 1.0, "a weight in (0, 1]"),
        ):
            if not fits:
                raise ValueError(f"ttl approximation: {name}: expected {form}, got {value!r}")
        self.gain = gain
        self.coverage = coverage
        self.smoothing = smoothing
        self._curve = PricedCurve(smoothing)

    @property
    def name(self) -> str:
        """``ttl-approximation``, with the parameters that are not their defaults: ``ttl-approximation:gain=10``."""
        given = {"gain": self.gain, "coverage": self.coverage, "smoothing": self.smoothing}
        return "ttl-approximation" + parameter_words(given, _DEFAULTS)

    def reset(self) -> None:
        """Forget the curve; the TTL goes on from the one in force."""
        self._curve.reset()

    def decide(self, observation: Observation) -> Proposal:
        """Return the next TTL and the size that covers it, or the current knobs where the last window had no curve."""
        space = observation.space
        current = space.clip(observation.knobs)
        reading = self._curve.read(observation)
        if reading is None or reading.last_costs is None:
            return Proposal(current, "held: the last window had no ghost curve, or misses have no price yet")
        ridge = Ridge.of(reading, reading.last_costs, self.coverage)
        here = space.to_steps(current)
        step = math.log(space.max_ttl / space.min_ttl) / (space.ttl_steps - 1)
        log_ttl = math.log(current.ttl)
        slope = ridge.slope(log_ttl, step)
        move = -min(max(self.gain * slope, -LONGEST_MOVE), LONGEST_MOVE)
        if not math.isfinite(move):
            return Proposal(current, "held: the slope of the cost along the ttl is not known")
        ttl = space.from_steps(here + np.array([0.0, move, 0.0])).ttl
        knobs = space.clip(Knobs(round(ridge.size(math.log(ttl))), ttl, current.warmup_ratio))
        words = "rises" if slope > 0 else "falls"
        return Proposal(
            knobs,
            f"cost {words} by {abs(slope):.1%} per ttl step; ttl moves {move:+.2f} steps, the size covers what it keeps: "
            f"{knob_words(knobs)}",
            {"slope": slope, "move": move, "covering_size": float(knobs.cache_size)},
        )


@dataclass(frozen=True)
class Ridge:
    """The settings in which the size is what the TTL fills, one for each TTL of a curve.

    Attributes:
        log_ttls: Logarithms of the TTLs, seconds, ascending, shape (T,).
        log_sizes: Logarithm of the size that covers each TTL, bytes, shape (T,).
        costs: What the setting would have cost in the newest window, US dollars per 1,000 requests, shape (T,).
    """

    log_ttls: Floats
    log_sizes: Floats
    costs: Floats

    @classmethod
    def of(cls, reading: CurveReading, costs: Floats, coverage: float) -> Ridge:
        """Find it on a smoothed curve.

        Args:
            reading: The curve.
            costs: Costs of all settings in the newest window, shape (S, T).
            coverage: Share of the largest size's hits under a TTL that the covering size keeps, (0, 1].
        """
        curve = reading.curve
        log_sizes = np.log(np.maximum(curve.sizes.astype(np.float64), 1.0))
        # A sampled curve may lose hits with more memory; what was covered by less is covered.
        hits = np.maximum.accumulate(curve.hits, axis=0)
        covering = np.array([_first(column, coverage * column[-1], log_sizes) for column in hits.T])
        at = np.array([np.interp(size, log_sizes, column) for size, column in zip(covering, costs.T, strict=True)])
        return cls(np.log(curve.ttls), covering, at)

    def size(self, log_ttl: float) -> float:
        """Return the size that covers a TTL, bytes."""
        return math.exp(float(np.interp(log_ttl, self.log_ttls, self.log_sizes)))

    def slope(self, log_ttl: float, step: float) -> float:
        """Return by which share of the cost it changes over a step of the TTL's logarithm, by a difference to both sides.

        NaN where there is no cost, or no second TTL.
        """
        low, high = max(log_ttl - step, float(self.log_ttls[0])), min(log_ttl + step, float(self.log_ttls[-1]))
        before, here, after = np.interp([low, log_ttl, high], self.log_ttls, self.costs)
        if not (high > low and here > 0):
            return math.nan
        return float((after - before) / here * step / (high - low))


def _first(values: Floats, least: float, places: Floats) -> float:
    """Return the first place at which rising ``values`` reach ``least``, linear between them."""
    row = int(np.searchsorted(values, least))
    if row == 0:
        return float(places[0])
    row = min(row, len(values) - 1)
    low, high = values[row - 1], values[row]
    share = (least - low) / (high - low) if high > low else 1.0
    return float(places[row - 1] + min(max(share, 0.0), 1.0) * (places[row] - places[row - 1]))
