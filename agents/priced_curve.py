"""A policy's own smoothed ghost curve, read under the prices of the observation at hand."""

from __future__ import annotations

import math
from collections import deque

from envs.objective import Prices
from envs.observation import Observation
from envs.signals import ArmSignals
from envs.smoothing import CurveReading, CurveSmoother

PATIENCE = 5
"""Windows without a usable curve after which the smoothed one is no longer trusted; the observation's default."""

_NEGLIGIBLE = 0.01
_MOST_WINDOWS = 256


class PricedCurve:
    """Smooths the windows' curves with a weight of its own, whatever the observation was smoothed with.

    The sums that a curve is smoothed in do not depend on prices, but :class:`envs.smoothing.CurveSmoother` reads them under those
    that it was made with. So the last windows are kept, as many as still count, and read again when the prices change.

    Args:
        weight: Weight of the newest window, (0, 1]; 1 is no smoothing.
        patience: Windows without a usable curve after which the smoothed one is no longer trusted.

    Raises:
        ValueError: If ``weight`` is not in (0, 1].
    """

    def __init__(self, weight: float, patience: int = PATIENCE) -> None:
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"smoothing: expected a weight in (0, 1], got {weight!r}")
        self.weight = weight
        self._patience = patience
        # with the patience, so that a curve that is trusted now still is after the windows were read again
        count = 1 if weight == 1.0 else math.ceil(math.log(_NEGLIGIBLE) / math.log1p(-weight))
        self._windows: deque[ArmSignals] = deque(maxlen=min(count, _MOST_WINDOWS) + patience)
        self._prices: Prices | None = None
        self._smoother: CurveSmoother | None = None

    def reset(self) -> None:
        """Forget every window."""
        self._windows.clear()
        self._prices = self._smoother = None

    def read(self, observation: Observation) -> CurveReading | None:
        """Take the observation's window in; return the smoothed curve, or None while it or the price of a miss is not known."""
        self._windows.append(observation.signals)
        if self._smoother is None or observation.prices != self._prices:
            self._prices = observation.prices
            self._smoother = CurveSmoother(observation.prices, self.weight, self._patience)
            for window in self._windows:
                self._smoother.update(window)
        else:
            self._smoother.update(observation.signals)
        return self._smoother.read()
