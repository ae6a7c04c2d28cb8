"""Ghost curves: what every other setting would have done on the same requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GhostCurve:
    """What every setting of the grid would have done on one window's requests.

    Attributes:
        sizes: ``cache_size`` of each row, bytes, ascending, shape (S,).
        ttls: ``ttl`` of each column, seconds, ascending, shape (T,).
        hits: Hits of each setting, shape (S, T).
        stale_hits: Expected stale hits of each setting, shape (S, T).
        requests: Requests the curve stands for; 0 where the sample saw none.
    """

    sizes: npt.NDArray[np.int64]
    ttls: npt.NDArray[np.float64]
    hits: npt.NDArray[np.float64]
    stale_hits: npt.NDArray[np.float64]
    requests: float

    @property
    def hit_ratio(self) -> npt.NDArray[np.float64]:
        """Hit ratio of each setting, shape (S, T); NaN for a curve without requests."""
        if not self.requests > 0:
            return np.full(self.hits.shape, math.nan)
        ratio: npt.NDArray[np.float64] = np.clip(self.hits / self.requests, 0.0, 1.0)
        return ratio
