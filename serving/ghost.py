"""Ghost curves: what every other setting would have done on the same requests.

A ghost is a spatially sampled shadow (SHARDS, Waldspurger et al., FAST'15): keys are chosen by a salted hash, so that every
access to a chosen key is seen. Of those keys it keeps the reuse distance in bytes and, for every setting of the grid, when that
setting would have written the entry. An access is a hit of a setting if its distance fits the size and the virtual write is
within the TTL. An expired entry keeps its bytes until it is read, evicted or overwritten, so recency order and distances do not
depend on the TTL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving import ghost_kernel as kernel
from serving.keys import mix64


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


@dataclass(frozen=True)
class GhostWindow:
    """What one window's requests say.

    Attributes:
        curve: Hits of every setting of the grid.
        entropy: Shannon entropy of the key distribution, bits, from the sample, Miller-Madow corrected; NaN without requests.
        drift: Jensen-Shannon distance (base 2, 0..1) to the window before over the sampled keys; NaN where either had none.
        rate: Sampling rate at the window's end, 0..1.
    """

    curve: GhostCurve
    entropy: float
    drift: float
    rate: float = 1.0


class Ghost:
    """A shadow of one arm's requests: the hits of every (``cache_size``, ``ttl``) of a grid, entropy and drift.

    Sampling starts at rate 1. When more than ``max_keys`` keys are tracked, those that no setting can hit any more (too far down
    the recency order, or too old) are dropped; where that is not enough the rate halves. A sample of keys estimates badly what
    few keys dominate, so the hottest ones (found by a count-min sketch of all accesses) are tracked whatever the rate and stand
    for themselves, and the sample speaks for the rest, scaled to the rest's true number of requests (stratified sampling with a
    ratio estimate).

    Not known to the ghost: warm-up, and entries larger than a setting's whole budget (they count in the distances of others).

    Args:
        sizes: ``cache_size`` of each row of the grid, bytes, ascending, shape (S,).
        ttls: ``ttl`` of each column, seconds, ascending, shape (T,).
        max_keys: Keys tracked at most; memory is about ``max_keys * (S * T + 30) * 8`` bytes.
        salt: Chooses which keys are sampled.
        staleness_half_life: Age at which half of the answers have become outdated, seconds; ``inf`` for never.
        ttl_jitter: Spread of the per-key factor on the TTL, 0..1, as in :func:`serving.keys.ttl_jitter`.

    Raises:
        ValueError: If a grid is empty or not ascending, or a number is out of its range.
    """

    def __init__(
        self,
        sizes: npt.NDArray[np.int64],
        ttls: npt.NDArray[np.float64],
        *,
        max_keys: int = 4096,
        salt: int = 0,
        staleness_half_life: float = math.inf,
        ttl_jitter: float = 0.0,
    ) -> None:
        for name, grid in (("sizes", sizes), ("ttls", ttls)):
            values = np.asarray(grid, dtype=np.float64)
            if values.ndim != 1 or not values.size or not values[0] >= 0 or np.any(np.diff(values) <= 0):
                raise ValueError(f"ghost: {name}: expected an ascending grid of numbers >= 0, got {grid!r}")
        if max_keys < 16:
            raise ValueError(f"ghost: max_keys: expected at least 16, got {max_keys!r}")
        if not staleness_half_life > 0:
            raise ValueError(f"ghost: staleness_half_life: expected seconds > 0 (or inf for never), got {staleness_half_life!r}")
        if not 0.0 <= ttl_jitter <= 1.0:
            raise ValueError(f"ghost: ttl_jitter: expected a share between 0 and 1, got {ttl_jitter!r}")
        self._sizes = np.array(sizes, dtype=np.int64)
        self._ttls = np.array(ttls, dtype=np.float64)
        self._sizes.setflags(write=False)
        self._ttls.setflags(write=False)
        cells = len(sizes) * len(ttls)
        table = 1 << (4 * max_keys - 1).bit_length()
        positions = 4 * max_keys
        places = np.zeros(table + positions + 1 + max_keys, np.int32)
        places[table + positions + 1 :] = np.arange(max_keys)
        ctl = np.zeros(kernel.N_CTL, np.int64)
        ctl[[kernel.N_SIZES, kernel.N_TTLS, kernel.TABLE, kernel.POSITIONS]] = len(sizes), len(ttls), table, positions
        ctl[kernel.HEAT] = table
        ctl[kernel.NEXT] = 1
        ctl[kernel.SALT] = np.array([mix64(salt & (1 << 64) - 1)], np.uint64).view(np.int64)[0]
        self._state = kernel.State(
            slots=np.zeros((max_keys, kernel.N_COLUMNS), np.int64),
            written=np.zeros((max_keys, cells + 1)),
            places=places,
            tree=np.zeros(positions + 1, np.int64),
            sums=np.zeros(4 * cells + kernel.N_TOTALS),
            ctl=ctl,
            grid=np.concatenate([self._sizes.astype(np.float64), self._ttls, [staleness_half_life, ttl_jitter]]),
            heat=np.zeros(2 * table, np.int32),
        )

    @property
    def rate(self) -> float:
        """Share of the keys that is sampled now."""
        return float(2.0 ** -int(self._state.ctl[kernel.SHIFT]))

    def access(self, key: int, size: int, now: float) -> None:
        """Account for one cacheable request.

        Args:
            key: The 64-bit name of the entry that answered, unsigned (:func:`serving.keys.key64`).
            size: The entry's bytes.
            now: Clock, seconds; not before that of the last access.
        """
        kernel.access(key, size, now, *self._state)

    def access_many(self, keys: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        """Account for many requests in order of time; columns as in :meth:`access`, shape (N,).

        Raises:
            ValueError: If the columns differ in length.
        """
        if not len(keys) == len(sizes) == len(times):
            raise ValueError(f"ghost: expected columns of equal length, got {len(keys)}, {len(sizes)} and {len(times)}")
        kernel.access_many(
            np.require(keys, np.uint64, ["C", "W"]),
            np.require(sizes, np.int64, ["C", "W"]),
            np.require(times, np.float64, ["C", "W"]),
            *self._state,
        )

    def take(self) -> GhostWindow:
        """Return what was gathered since the last call, and start a new window. What is known of reuse is kept."""
        shape = (len(self._sizes), len(self._ttls))
        cells = len(self._sizes) * len(self._ttls)
        blocks = self._state.sums[: 4 * cells].reshape(4, *shape)
        requests, sampled, certain = (float(value) for value in self._state.sums[4 * cells :])
        # What the hot keys did is known. The sample speaks for all other requests, of which the number is known too.
        others = requests - certain
        if sampled > 0:
            hits, stale = blocks[2:] + blocks[:2] * (others / sampled)
        elif certain > 0:
            hits, stale = blocks[2:] * (requests / certain)
        else:
            hits, stale, requests = np.zeros(shape), np.zeros(shape), 0.0
        hits = np.clip(hits, 0.0, requests)
        stale = np.clip(stale, 0.0, hits)
        slots = self._state.slots
        counts, before = slots[:, kernel.COUNT], slots[:, kernel.BEFORE]
        weights = np.where(slots[:, kernel.HOT] == 1, 1.0, 1.0 / self.rate)
        window = GhostWindow(
            GhostCurve(self._sizes, self._ttls, hits, stale, requests),
            _entropy(counts, weights, requests),
            _drift(counts, before, weights),
            self.rate,
        )
        before[:] = counts
        counts[:] = 0
        self._state.sums[:] = 0.0
        return window

    def flush(self) -> None:
        """Empty the virtual caches of every setting, as the real one was. The window's counts stay."""
        kernel.forget(self._state.slots, self._state.places, self._state.tree, self._state.ctl)

    def clone(self) -> Ghost:
        """Return an independent copy."""
        twin = object.__new__(Ghost)
        twin._sizes, twin._ttls = self._sizes, self._ttls
        twin._state = kernel.State._make(array.copy() for array in self._state)
        return twin


def _entropy(counts: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], requests: float) -> float:
    """Shannon entropy in bits from the counts of the tracked keys, each standing for ``weight`` keys, Miller-Madow corrected.

    ``log2 N - sum(c log2 c) / N`` holds for the whole window; the sum over the sampled keys is scaled to what they stand for.
    """
    seen = counts > 0
    if not seen.any() or not requests > 0:
        return math.nan
    count, weight = counts[seen].astype(np.float64), weights[seen]
    hot = weight == 1.0
    known = float(count[hot].sum())
    drawn = float(count[~hot].sum())
    scale = max(requests - known, 0.0) / drawn if drawn else 0.0
    bits = count * np.log2(count)
    total = float(bits[hot].sum()) + scale * float(bits[~hot].sum())
    counted = known + scale * drawn
    plugin = max(math.log2(counted) - total / counted, 0.0)
    return plugin + (float(weight.sum()) - 1.0) / (2.0 * math.log(2.0) * requests)


def _drift(counts: npt.NDArray[np.int64], before: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> float:
    """Jensen-Shannon distance between two windows' distributions, base 2; each key stands for ``weight`` keys like it."""
    now_total, before_total = float(counts @ weights), float(before @ weights)
    if not now_total or not before_total:
        return math.nan
    either = (counts > 0) | (before > 0)
    p = counts[either] / now_total
    q = before[either] / before_total
    middle = (p + q) / 2.0
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.nan_to_num(p * np.log2(p / middle)) + np.nan_to_num(q * np.log2(q / middle))
    divergence = float(each @ weights[either]) / 2.0
    return math.sqrt(min(max(divergence, 0.0), 1.0))
