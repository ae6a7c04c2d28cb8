"""Ghost curves: what every other setting would have done on the same requests.

A ghost is a spatially sampled shadow (SHARDS, Waldspurger et al., FAST'15): keys are chosen by a salted hash, so that every
access to a chosen key is seen. Of those keys it keeps the recency order, where in it each size's cache ends, and, for every
setting of the grid, when that setting would have written the entry. An access is a hit of a setting if the size still holds the
key and the virtual write is within the TTL. An expired entry keeps its bytes until it is read, evicted or overwritten, so what a
size holds does not depend on the TTL.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from serving import ghost_kernel as kernel
from serving.ghost_state import EVICTED, UNIT, State, new_state
from serving.keys import mix64

_MASK = (1 << 64) - 1
_STRIDE = 0x9E37_79B9_7F4A_7C15
"""Between the salts of two generations."""

_LEAST_RATE = 1e-6

_ACCESS = np.dtype([("key", "=u8"), ("size", "=i8"), ("time", "=f8")])
_PACK = struct.Struct("=Qqd").pack_into
_BYTES = _ACCESS.itemsize
_BUFFER = 256 * _BYTES
"""Bytes of single accesses that wait for each other: entering compiled code costs more than an access."""


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


def compile_ghost() -> None:
    """Compile what a ghost needs, or read the cache of compiled code; the first takes some ten seconds."""
    Ghost(np.array([1, 2], np.int64), np.array([1.0, 2.0]), max_keys=16)


class Ghost:
    """A shadow of one arm's requests: the hits of every (``cache_size``, ``ttl``) of a grid, entropy and drift.

    **Sampling** starts at ``rate`` (1: fixed-size SHARDS; below: fixed-rate, until ``max_keys`` do not suffice). When more than
    ``max_keys`` keys are tracked, those that no setting can hit any more (evicted from every size, or too old) are dropped; where
    that frees less than an eighth, the rate falls in steps of an eighth. It never rises, but for a rotation.

    **Hot keys.** A sample of keys estimates badly what few keys dominate, so the hottest ones (found by a count-min sketch of all
    accesses) are tracked whatever the rate and stand for themselves; the sample speaks for the rest, scaled to the rest's true
    number of requests (the count adjustment of SHARDS, as a stratified ratio estimate).

    **The rule of every setting**, exact at rate 1: an entry has the bytes of its key's last access; one that is larger than the
    whole budget is not stored and pushes nobody out; while the bytes held exceed the budget, the least recently used entry goes;
    an entry is live while ``now - written <= ttl * ttl_jitter(key)``, decided when it is read, and keeps its bytes until it is
    overwritten or evicted. That is the rule of the cache, but for one thing: an answer that changes in size counts for all
    settings with the size that was reported. Warm-up is not known to the ghost.

    **Memory** is bounded by ``max_keys * (172 + 24 * ceil(S * T / 64)) + 64 * S * T`` bytes and some 16 KiB, and by twice as much
    with ``rotate_every``; :attr:`memory_bytes` has the true number. Settings share write times, and room is for three different
    ones per key, on average, beside that of its last access: where keys need more, the rate falls as if there were more keys.

    **Cost**: O(S) per tracked access, O(1) for others, nothing depends on ``max_keys``.

    Args:
        sizes: ``cache_size`` of each row of the grid, bytes, ascending, shape (S,).
        ttls: ``ttl`` of each column, seconds, ascending, shape (T,).
        max_keys: Keys tracked at most.
        salt: Chooses which keys are sampled.
        staleness_half_life: Age at which half of the answers have become outdated, seconds; ``inf`` for never.
        ttl_jitter: Spread of the per-key factor on the TTL, 0..1, as in :func:`serving.keys.ttl_jitter`.
        rate: Upper bound of the sampling rate, above 0, at most 1. Below 1 it is kept to the next 1/n, n in 256ths, not above.
        decay: Share of what the curve has gathered that :meth:`take` keeps for the next window, 0 to below 1. Entropy and drift
            are of the fresh window in any case.
        rotate_every: Seconds of the trace's clock after which a sample with another salt takes over; inf for never. It is warmed
            up beside the old one from half of that time on, and takes over with the first :meth:`take` at which what it has not
            seen cannot be hit any more: the longest TTL has passed, or every size has evicted what it began with. While all
            keys are sampled there is nothing to rotate.
        hot_share: Share of ``max_keys`` that may be hot keys, 0 to below 1; 0 for a plain sample.
        count_adjusted: Whether the sample is scaled to the true number of requests; False for plain SHARDS.

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
        rate: float = 1.0,
        decay: float = 0.0,
        rotate_every: float = math.inf,
        hot_share: float = 0.5,
        count_adjusted: bool = True,
    ) -> None:
        for name, grid in (("sizes", sizes), ("ttls", ttls)):
            values = np.asarray(grid, dtype=np.float64)
            if values.ndim != 1 or not values.size or not values[0] >= 0 or not np.all(np.diff(values) > 0):
                raise ValueError(f"ghost: {name}: expected an ascending grid of numbers >= 0, got {grid!r}")
        for name, value, fits, form in (
            ("max_keys", max_keys, max_keys >= 16, "at least 16"),
            ("staleness_half_life", staleness_half_life, staleness_half_life > 0, "seconds > 0 (or inf for never)"),
            ("ttl_jitter", ttl_jitter, 0.0 <= ttl_jitter <= 1.0, "a share between 0 and 1"),
            ("rate", rate, _LEAST_RATE <= rate <= 1.0, f"a share from {_LEAST_RATE:g} to 1"),
            ("decay", decay, 0.0 <= decay < 1.0, "a share from 0 to below 1"),
            ("rotate_every", rotate_every, rotate_every > 0, "seconds > 0 (or inf for never)"),
            ("hot_share", hot_share, 0.0 <= hot_share < 1.0, "a share from 0 to below 1"),
        ):
            if not fits:
                raise ValueError(f"ghost: {name}: expected {form}, got {value!r}")
        self._sizes = np.array(sizes, dtype=np.int64)
        self._ttls = np.array(ttls, dtype=np.float64)
        self._sizes.setflags(write=False)
        self._ttls.setflags(write=False)
        self._options: dict[str, Any] = {
            "rate": rate, "half_life": staleness_half_life, "jitter": ttl_jitter, "hot_share": hot_share
        }  # fmt: skip
        self._max_keys, self._salt, self._decay, self._count_adjusted = max_keys, salt, decay, count_adjusted
        self._rotate_every = rotate_every
        self._generation = self._rotations = 0
        self._state = self._new_generation()
        self._next: State | None = None
        self._due = math.inf
        self._kept: GhostCurve | None = None
        self._buffer = bytearray(_BUFFER)
        self._buffered = 0

    @property
    def rate(self) -> float:
        """Share of the keys that is sampled now."""
        self._drain()
        return float(UNIT / self._state.control["multiple"][0])

    @property
    def rotations(self) -> int:
        """How often a sample with another salt has taken over."""
        return self._rotations

    @property
    def memory_bytes(self) -> int:
        """Bytes of all arrays of the ghost now; constant but for a second generation while one is being warmed up."""
        arrays = [*self._state, *(self._next or ())]
        return len(self._buffer) + sum(int(array.nbytes) for array in arrays if array.base is None)

    def access(self, key: int, size: int, now: float) -> None:
        """Account for one cacheable request; it is put into a small buffer first, which every look at the ghost empties.

        Args:
            key: The 64-bit name of the entry that answered, unsigned (:func:`serving.keys.key64`).
            size: The entry's bytes, >= 0.
            now: Clock, seconds; not before that of the last access.
        """
        _PACK(self._buffer, self._buffered, key, size, now)
        self._buffered += _BYTES
        if self._buffered == _BUFFER:
            self._drain()

    def access_many(self, keys: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        """Account for many requests in order of time; columns as in :meth:`access`, shape (N,).

        Raises:
            ValueError: If the columns differ in length.
        """
        if not len(keys) == len(sizes) == len(times):
            raise ValueError(f"ghost: expected columns of equal length, got {len(keys)}, {len(sizes)} and {len(times)}")
        self._drain()
        self._run(
            np.require(keys, np.uint64, ["C", "W"]),
            np.require(sizes, np.int64, ["C", "W"]),
            np.require(times, np.float64, ["C", "W"]),
        )

    def take(self) -> GhostWindow:
        """Return what was gathered since the last call, and start a new window. What is known of reuse is kept."""
        self._drain()
        window = self._take(self._state)
        if self._decay > 0.0:
            if self._kept is not None:
                window = replace(window, curve=_sum(window.curve, self._kept, self._decay))
            self._kept = window.curve
        if self._next is not None:
            self._take(self._next)
            if self._is_warm(self._next):
                self._state, self._next = self._next, None
                self._rotations += 1
                self._due += self._rotate_every
        return window

    def flush(self) -> None:
        """Empty the virtual caches of every setting, as the real one was. The window's counts stay."""
        self._drain()
        kernel.forget(self._state)
        if self._next is not None:
            kernel.forget(self._next)

    def clone(self) -> Ghost:
        """Return an independent copy."""
        self._drain()
        twin = object.__new__(Ghost)
        twin.__dict__.update(self.__dict__)
        twin._buffer = bytearray(_BUFFER)
        twin._state = _copy(self._state)
        twin._next = None if self._next is None else _copy(self._next)
        return twin

    def _new_generation(self) -> State:
        salt = mix64((self._salt + self._generation * _STRIDE) & _MASK)
        self._generation += 1
        state = new_state(self._sizes, self._ttls, self._max_keys, salt=salt, **self._options)
        kernel.begin(state)
        return state

    def _drain(self) -> None:
        filled, self._buffered = self._buffered, 0
        if filled:
            rows = np.frombuffer(self._buffer, _ACCESS, filled // _BYTES)
            self._run(rows["key"].copy(), rows["size"].copy(), rows["time"].copy())

    def _run(self, keys: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        if not len(keys):
            return
        if self._rotate_every < math.inf:
            if math.isinf(self._due):
                self._due = float(times[0]) + self._rotate_every
            if self._next is None:
                first = int(np.searchsorted(times, self._due - self._rotate_every / 2.0))
                kernel.access_many(self._state, keys[:first], sizes[:first], times[:first])
                keys, sizes, times = keys[first:], sizes[first:], times[first:]
                if len(keys):
                    self._next = self._new_generation()
            if self._next is not None:
                kernel.access_many(self._next, keys, sizes, times)
        kernel.access_many(self._state, keys, sizes, times)

    def _is_warm(self, state: State) -> bool:
        """Whether a younger generation may take over: it is due, and what it has not seen cannot be hit any more."""
        control = state.control[0]
        if not control["now"] >= self._due:
            return False
        return bool(control["now"] - control["start"] > self._ttls[-1] or state.levels[EVICTED].all())

    def _take(self, state: State) -> GhostWindow:
        """Return one generation's window and start a new one."""
        kernel.settle(state)
        control = state.control[0]
        weight = float(control["weight"])
        shape = (4, len(self._ttls), len(self._sizes))
        blocks = np.moveaxis(state.sums.reshape(shape), 1, 2)
        requests, sampled, certain = (float(control[name]) for name in ("requests", "sampled", "certain"))
        # What the hot keys did is known. The sample speaks for all other requests, of which the number is known too.
        scale = (requests - certain) / sampled if self._count_adjusted and sampled > 0 else 1.0
        if sampled > 0:
            hits, stale = blocks[2:] + blocks[:2] * scale
        elif certain > 0:
            hits, stale = blocks[2:] * (requests / certain)
        else:
            hits, stale, requests = np.zeros(shape[:0:-1]), np.zeros(shape[:0:-1]), 0.0
        hits = np.clip(hits, 0.0, requests)
        stale = np.clip(stale, 0.0, hits)
        distribution = np.empty(2)
        kernel.distribution(state, distribution)
        entropy, drift = distribution.tolist()
        window = GhostWindow(GhostCurve(self._sizes, self._ttls, hits, stale, requests), entropy, drift, 1.0 / weight)
        state.sums[:] = 0.0
        for name in ("requests", "sampled", "certain"):
            control[name] = 0.0
        return window


def _sum(fresh: GhostCurve, kept: GhostCurve, decay: float) -> GhostCurve:
    """Return a window's curve together with what is left of the earlier ones."""
    return replace(
        fresh,
        hits=fresh.hits + decay * kept.hits,
        stale_hits=fresh.stale_hits + decay * kept.stale_hits,
        requests=fresh.requests + decay * kept.requests,
    )


def _copy(state: State) -> State:
    twin = State._make(array.copy() for array in state)
    return twin._replace(written=twin.records.view(np.float64))
