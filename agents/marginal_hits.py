"""Marginal hits: the cache grows while the next step of memory earns its cost, and shrinks while the last one does not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agents.policy import Proposal
from agents.priced_curve import PricedCurve
from agents.words import parameter_words, size_words
from envs.objective import Usage, price
from envs.observation import Observation
from envs.smoothing import CurveReading

Floats = npt.NDArray[np.float64]

AVERAGE = 0.3
"""Weight of the past in the moving average; CacheLib's ``movingAverageParam``."""
BAND = 0.1
"""Share by which earnings and cost have to differ; CacheLib's ``HitsPerSlabStrategy::Config::diffRatio``."""
STEP = 1.0
"""Grid steps of one move; the grid's step stands for CacheLib's slab."""

_DEFAULTS = {"average": AVERAGE, "band": BAND, "step": STEP}
_PRICE_WEIGHT = 0.3
_DUST = 1e-6
"""Share of the cost below which what a step saves is rounding."""


class MarginalHitsPolicy:
    """Compares what one more step of memory would save in misses with what it costs.

    **Source.** CacheLib (``MarginalHitsStrategy``, ``MarginalHitsOptimizeStrategy``, ``MarginalHitsState.h``). There, hits in
    the last slab of each LRU estimate what one more slab would bring; ranks by these hits are smoothed (average x 0.3 + new x
    0.7); in each round one slab goes from the lowest rank to the highest. A class with free memory of a slab or more receives
    nothing, one with the least number of slabs gives nothing.

    **Adapted.** There is one cache and nobody to take memory from, but memory has a price: the other side of the comparison is
    what the bytes cost. Ranks among classes so become dollars, for the size step above the current size (would it earn its
    memory?) and for the one below (does it still?); the last window's ghost curve has both, so that the tail need not stand for
    what lies beyond it. What misses cost at each size is smoothed as the ranks are, by CacheLib's parameter; a difference of a
    sum is the sum's difference, so this is the smoothing of every step's own earnings. The dead band is that of CacheLib's
    ``HitsPerSlabStrategy`` (10 %): one step from the optimum both ways earn about what they cost, and without it the size would
    go to and fro. Free memory as there: what is not full yet does not grow. ``ttl`` and ``warmup_ratio`` are left as they are:
    CacheLib's classes have neither.

    Args:
        average: Weight of the past in the moving average, [0, 1); 0 is no smoothing.
        band: Share by which earnings and cost of a step have to differ, >= 0.
        step: Grid steps of one move, > 0.

    Raises:
        ValueError: If a parameter is out of its range.
    """

    def __init__(self, average: float = AVERAGE, band: float = BAND, step: float = STEP) -> None:
        for name, value, fits, form in (
            ("average", average, 0.0 <= average < 1.0, "a weight in [0, 1)"),
            ("band", band, 0.0 <= band < 1.0, "a share in [0, 1)"),
            ("step", step, 0.0 < step <= 100.0, "grid steps in (0, 100]"),
        ):
            if not fits:
                raise ValueError(f"marginal hits: {name}: expected {form}, got {value!r}")
        self.average = average
        self.band = band
        self.step = step
        self._curve = PricedCurve(_PRICE_WEIGHT)
        self.reset()

    @property
    def name(self) -> str:
        """``marginal-hits``, with the parameters that are not their defaults: ``marginal-hits:band=0.2``."""
        return "marginal-hits" + parameter_words({"average": self.average, "band": self.band, "step": self.step}, _DEFAULTS)

    def reset(self) -> None:
        """Forget the averages."""
        self._curve.reset()
        self._sizes: npt.NDArray[np.int64] | None = None
        self._without_memory = self._memory = np.zeros(0)

    def decide(self, observation: Observation) -> Proposal:
        """Return a size one step up or down, or the current knobs where neither pays or the last window had no curve."""
        space = observation.space
        current = space.clip(observation.knobs)
        reading = self._curve.read(observation)
        if reading is None or reading.last_costs is None:
            return Proposal(current, "held: the last window had no ghost curve, or misses have no price yet")
        if not self._take_in(reading, reading.last_costs, observation):
            return Proposal(current, "held: what the last window's memory cost is not known")
        here = space.to_steps(current)
        sizes = np.array(
            [space.from_steps(here + np.array([shift, 0.0, 0.0])).cache_size for shift in (-self.step, 0.0, self.step)],
            np.float64,
        )
        earned, paid = self._at(self._without_memory, sizes), self._at(self._memory, sizes)
        below, above = earned[0] - earned[1], earned[1] - earned[2]
        cost_below, cost_above = paid[1] - paid[0], paid[2] - paid[1]
        details = {
            "earned_above": float(above), "cost_above": float(cost_above), "earned_below": float(below),
            "cost_below": float(cost_below),
        }  # fmt: skip
        if sizes[2] > sizes[1] and above > (1.0 + self.band) * cost_above + _DUST * earned[1]:
            words = f"the next {size_words(sizes[2] - sizes[1])} would save ${above:.4f} per 1,000 requests for ${cost_above:.4f}"
            if observation.signals.resident_bytes < sizes[0]:
                return Proposal(current, f"held: {words}, but a step of the memory there is stands empty", details)
            return Proposal(space.from_steps(here + np.array([self.step, 0.0, 0.0])), f"grows: {words}", details)
        if sizes[0] < sizes[1] and below < (1.0 - self.band) * cost_below:
            words = f"the last {size_words(sizes[1] - sizes[0])} save ${below:.4f} per 1,000 requests for ${cost_below:.4f}"
            return Proposal(space.from_steps(here - np.array([self.step, 0.0, 0.0])), f"shrinks: {words}", details)
        return Proposal(
            current,
            f"held: the next step would save ${above:.4f} for ${cost_above:.4f} of memory, the last saves ${below:.4f} for "
            f"${cost_below:.4f}",
            details,
        )

    def _take_in(self, reading: CurveReading, costs: Floats, observation: Observation) -> bool:
        """Take in what each size would have cost in the last window at the current TTL, memory apart; say whether it is known."""
        curve, ghost = reading.curve, observation.signals.ghost
        assert ghost is not None  # it is what the costs are of
        window = observation.signals.window
        usage = Usage(ghost.requests, 0.0, 0.0, 0.0, 0.0, 0.0, budget_bytes=1.0, duration=window)
        memory = price(usage, observation.prices).memory * curve.sizes.astype(np.float64)
        column = np.log(min(max(observation.knobs.ttl, float(curve.ttls[0])), float(curve.ttls[-1])))
        at_ttl = np.array([np.interp(column, np.log(curve.ttls), row) for row in costs])
        if not (np.all(np.isfinite(memory)) and np.all(np.isfinite(at_ttl))):
            return False
        if self._sizes is None or not np.array_equal(self._sizes, curve.sizes):
            self._sizes, self._without_memory, self._memory = curve.sizes, at_ttl - memory, memory
            return True
        self._without_memory = self.average * self._without_memory + (1.0 - self.average) * (at_ttl - memory)
        self._memory = self.average * self._memory + (1.0 - self.average) * memory
        return True

    def _at(self, values: Floats, sizes: Floats) -> Floats:
        """Read a value of each size between the sizes that it is known for, by the logarithm of the size."""
        assert self._sizes is not None
        result: Floats = np.interp(np.log(sizes), np.log(self._sizes), values)
        return result
