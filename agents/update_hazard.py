"""When answers became outdated by updates, learned from the stale hits of one setting, and what that makes of another's.

A ghost curve knows staleness by age alone: by the half-life that the operator states. Answers that rest on documents become
stale when a document changes, whatever their age; how often they are then served depends on how long entries are kept. A cache
whose entries live for hours forgets an update within hours, one whose entries never expire serves what is outdated until nobody
asks for it any more. What a short TTL is seen to serve stale says little of what a long one would serve; *when* answers were
updated is what the two have in common, and that is learned here:

- Updates come as a hazard, piecewise constant over windows: an answer written before a window is still true after it with
  probability ``exp(-hazard)``. Of a window's hits those are outdated that were written before an update. What is measured beyond
  what earlier updates explain, and beyond chance, is the newest window's own hazard.
- The ages of hits come from the ghost curve's hits (:meth:`Updates.outdated`): where only the TTL ends an entry, keys that are
  asked for again and again are hit at ages that are uniform from 0 to the TTL. Entries also end because their keys are evicted or
  no longer asked for; that shows in hits that a longer TTL does not add.
- A cache whose TTL was short a while ago has no old entries yet (:func:`oldest_age`).

Compared with real ages (LRU caches with TTL over the cases of :mod:`experiments.suites`) the mean age of hits so found is 10 %
too high in the mean, with a standard deviation of 10 % for short TTLs and 35 % for the longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from envs.signal_batch import ABSURD
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.hotset import WarmupRules
from serving.knobs import Knobs

Floats = npt.NDArray[np.float64]

CERTAIN = 2.0
"""Standard errors by which a window's stale hits must exceed what is known, to be taken for an update."""

MOST_HAZARD = 3.0
"""Most that one window adds to the hazard: 95 % of all answers outdated at once."""

MOST_UPDATES = 1024
"""Windows with updates that are remembered at most; the oldest are forgotten."""


@dataclass(frozen=True)
class Updates:
    """When answers were updated, as seen from the middle of the newest window.

    Attributes:
        ages: Seconds since each window with updates began, ascending, shape (U,).
        hazards: Minus the logarithm of the share of answers that each left true, shape (U,).
        sizes: ``cache_size`` of each row of the curve, bytes, ascending, shape (S,).
        ttls: ``ttl`` of each column, seconds, ascending, shape (T,).
        hit_shares: Hits per request of each setting, mean of the last windows, shape (S, T).
    """

    ages: Floats = field(default_factory=lambda: np.zeros(0))
    hazards: Floats = field(default_factory=lambda: np.zeros(0))
    sizes: Floats = field(default_factory=lambda: np.ones(1))
    ttls: Floats = field(default_factory=lambda: np.ones(1))
    hit_shares: Floats = field(default_factory=lambda: np.zeros((1, 1)))

    def outdated(self, knobs: Knobs, oldest: float = math.inf) -> float:
        """Return the share of hits that updates have outdated, 0..1.

        Args:
            knobs: The setting; its size is what the cache can hold.
            oldest: Age of its oldest entry, seconds (:func:`oldest_age`).
        """
        if not len(self.ages):
            return 0.0
        left = np.exp(-np.cumsum(self.hazards))  # of answers older than each update, the share that is still true
        return float(np.sum(self.older(self.ages, knobs, oldest) * -np.diff(left, prepend=1.0)))

    def older(self, ages: Floats, knobs: Knobs, oldest: float = math.inf) -> Floats:
        """Return the share of hits on entries older than some ages, shape (N,) in and out.

        Let ``n(t)`` be the hits that the longest TTL has beyond those of a TTL ``t``: what expiry at ``t`` costs. While an
        entry's key goes on being asked for, it expires once per ``t``, so ``t n(t)`` is the same for every ``t``; where it falls
        below its largest value, that share of the time was lived by entries that ended before. A life of length L has
        ``floor(L / t)`` whole TTLs, on average ``1 - t / 2L`` of it, of which the square is about ``1 - t / L``, the share of its
        hits beyond ``t``.
        """
        longest = max(min(knobs.ttl, oldest), 1e-9)
        row = np.log(min(max(float(knobs.cache_size), self.sizes[0]), self.sizes[-1]))
        hits = np.array([np.interp(row, np.log(self.sizes), column) for column in self.hit_shares.T])
        expiry = self.ttls * np.maximum(hits[-1] - hits, 0.0)
        most = np.maximum.accumulate(expiry)
        lived = np.divide(expiry, most, out=np.ones(len(expiry)), where=most > 0)
        alive = np.interp(np.log(np.maximum(ages, 1e-300)), np.log(self.ttls), lived) ** 2
        return np.clip(1.0 - ages / longest, 0.0, 1.0) * np.minimum.accumulate(alive)


class UpdateMeter:
    """Learns :class:`Updates` over windows.

    Args:
        memory: What a window keeps of the weight of the ones before in the mean hits of the settings, (0, 1].
    """

    def __init__(self, memory: float = 0.98) -> None:
        self._memory = memory
        self.reset()

    def reset(self) -> None:
        """Forget every window."""
        self.updates = Updates()
        self._found: list[tuple[float, float]] = []  # begin and hazard of each window with updates
        self._hits, self._weight = np.zeros((0, 0)), 0.0
        self._at = -math.inf

    def update(self, signals: ArmSignals, ghost: GhostCurve, knobs: Knobs, aged: float, oldest: float) -> None:
        """Take one more window in.

        Args:
            signals: The window; its hits and stale hits are shares of its requests.
            ghost: Its usable ghost curve.
            knobs: The setting in force; its size is what the cache could hold.
            aged: Stale hits per request by age alone, as the ghost has them for that setting.
            oldest: Age of the oldest entry, seconds.
        """
        at, window = signals.at, signals.window
        if not (self._at < at < ABSURD and 0 < window < ABSURD):
            return  # a clock that stands, or has been put back, dates nothing
        self._at = at
        self._smooth(ghost)
        middle, longest = at - window / 2.0, max(float(ghost.ttls[-1]), knobs.ttl)
        self._found = [each for each in self._found[-MOST_UPDATES:] if middle - each[0] < longest]
        self._read(ghost, middle)
        hits = signals.hit_ratio - aged
        count = signals.requests * hits
        if not count >= 1.0:
            return
        stale = (signals.stale_hits / signals.requests - aged) / hits
        known = self.updates.outdated(knobs, oldest)
        exposed = float(self.updates.older(np.array([window / 2.0]), knobs, oldest)[0])
        # Hits that age has outdated come and go by chance as well.
        expected = known + aged / signals.hit_ratio
        noise = math.sqrt(max(expected * (1.0 - expected), 1.0 / count) / count)
        if stale > known + CERTAIN * noise and exposed > known:
            # An update outdates the share of the hits that was written before it; of those outdated already it outdates none.
            true = max((exposed - stale) / (exposed - known), math.exp(-MOST_HAZARD))
            self._found.append((at - window, -math.log(true)))
            self._read(ghost, middle)

    def _smooth(self, ghost: GhostCurve) -> None:
        hits = np.asarray(ghost.hits / ghost.requests, np.float64)
        before = self.updates
        same = np.array_equal(before.sizes, ghost.sizes) and np.array_equal(before.ttls, ghost.ttls)
        if self._hits.shape != hits.shape or not same:
            self._hits, self._weight = np.zeros(hits.shape), 0.0
        self._hits = self._memory * self._hits + hits
        self._weight = self._memory * self._weight + 1.0

    def _read(self, ghost: GhostCurve, middle: float) -> None:
        found = np.array(self._found[::-1], np.float64).reshape(-1, 2)
        sizes, ttls = np.asarray(ghost.sizes, np.float64), np.asarray(ghost.ttls, np.float64)
        self.updates = Updates(middle - found[:, 0], found[:, 1], sizes, ttls, self._hits / self._weight)


def oldest_age(before: float, knobs: Knobs, window: float) -> float:
    """Return the age of the oldest entry that a cache can answer from at a window's end, seconds.

    A shorter TTL ends what is older at once; a longer one has to wait for entries to become so old. Warm-up replaces what is hot
    before it expires (:class:`serving.hotset.WarmupRules`; a gateway's own ``refresh_ahead`` is not known here).

    Args:
        before: The same at the end of the window before; 0 for an empty cache, or one of which nothing is known.
        knobs: The setting in force.
        window: Length of the window, seconds.
    """
    longest = knobs.ttl * (1.0 - WarmupRules().refresh_ahead) if knobs.warmup_ratio > 0 else knobs.ttl
    return min(longest, before + window) if 0 < window < ABSURD else min(longest, before)
