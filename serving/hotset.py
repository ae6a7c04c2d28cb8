"""The hot set: which keys are asked often lately, and so are worth keeping warm.

Forward decay (Cormode et al., ICDE'09): an access at time t adds ``2 ** ((t - t0) / half_life)`` to its key's weight. Weights
only ever grow, so their order does not change with time and nothing has to be updated while a key rests; the decayed score at
``now`` is the weight over ``2 ** ((now - t0) / half_life)``. The simulator implements the same algorithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bytes, int)

_REBASE_HALF_LIVES = 512
"""Weights stay below 2**513 times an access count: far from a double's end."""


@dataclass(frozen=True, slots=True)
class WarmupRules:
    """Settings of the warm-up that are not tuned at run time.

    Attributes:
        capacity: Keys remembered.
        half_life: Seconds after which an access counts half.
        min_score: Least decayed number of accesses of a key worth warming.
        period: Seconds between two walks through the plan.
        refresh_ahead: A key within this last share (0..1) of its TTL is refreshed.
        refreshes_per_second: Rate of the token bucket that limits refreshes.
        burst: Size of the token bucket.

    Raises:
        ValueError: If a value is out of its range.
    """

    capacity: int = 1024
    half_life: float = 600.0
    min_score: float = 1.5
    period: float = 1.0
    refresh_ahead: float = 0.2
    refreshes_per_second: float = 5.0
    burst: int = 20

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"warmup capacity: expected at least 1 key, got {self.capacity!r}")
        for name in ("half_life", "period"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"warmup {name}: expected seconds > 0, got {value!r}")
        if not 0.0 <= self.refresh_ahead < 1.0:
            raise ValueError(f"warmup refresh_ahead: expected a share from 0 to below 1, got {self.refresh_ahead!r}")
        for name in ("min_score", "refreshes_per_second", "burst"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"warmup {name}: expected a number >= 0, got {value!r}")


class HotSet(Generic[K]):
    """Decayed access frequencies of the most accessed keys.

    An access is O(1) amortised; a plan is O(n log n) in the keys kept. The table holds at most ``2 * capacity`` keys: one more,
    and it is pruned to the ``capacity`` heaviest (equal weights: the smaller key stays).

    Args:
        rules: Capacity, half-life and least score.
    """

    def __init__(self, rules: WarmupRules | None = None) -> None:
        self.rules = rules if rules is not None else WarmupRules()
        self._weights: dict[K, float] = {}
        self._t0: float | None = None

    def __len__(self) -> int:
        return len(self._weights)

    def access(self, key: K, now: float) -> None:
        """Count one access of ``key`` at ``now`` (seconds)."""
        if self._t0 is None:
            self._t0 = now
        exponent = (now - self._t0) / self.rules.half_life
        if exponent > _REBASE_HALF_LIVES:
            exponent = self._rebase(now)
        self._weights[key] = self._weights.get(key, 0.0) + 2.0**exponent
        if len(self._weights) > 2 * self.rules.capacity:
            self._weights = dict(self._ranked()[: self.rules.capacity])

    def score(self, key: K, now: float) -> float:
        """Return the decayed number of accesses of ``key``; 0 for one that is not remembered."""
        return self._weights.get(key, 0.0) * self._decay(now)

    def plan(self, ratio: float, now: float) -> list[K]:
        """Return the keys to keep warm, the hottest first: the top ``ceil(ratio * n)`` of the n keys that score ``min_score``.

        Args:
            ratio: ``warmup_ratio``, 0..1.
            now: The clock, seconds.
        """
        if ratio <= 0:
            return []
        decay = self._decay(now)
        hot = [key for key, weight in self._ranked() if weight * decay >= self.rules.min_score]
        return hot[: math.ceil(ratio * len(hot))]

    def clear(self) -> None:
        """Forget everything."""
        self._weights.clear()
        self._t0 = None

    def _ranked(self) -> list[tuple[K, float]]:
        return sorted(self._weights.items(), key=lambda item: (-item[1], item[0]))

    def _decay(self, now: float) -> float:
        return 2.0 ** (-(now - self._t0) / self.rules.half_life) if self._t0 is not None else 0.0

    def _rebase(self, now: float) -> float:
        """Move t0 forward by whole half-lives: an exact scaling in binary. Returns the exponent of ``now`` on the new base."""
        assert self._t0 is not None
        half_lives = math.floor((now - self._t0) / self.rules.half_life)
        self._t0 += half_lives * self.rules.half_life
        scaled = {key: math.ldexp(weight, -half_lives) for key, weight in self._weights.items()}
        self._weights = {key: weight for key, weight in scaled.items() if weight > 0.0}
        return (now - self._t0) / self.rules.half_life
