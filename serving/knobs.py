"""The three knobs of the cache and the space they are chosen from.

``cache_size`` (bytes), ``ttl`` (seconds) and ``warmup_ratio`` (0..1) mean the same in the gateway and in the simulator:

* **cache_size** is the byte budget of one arm across the cluster; every entry's bytes count (key, body, vector).
  A share of it (``l1_share``) may be resident in the memory tier. Shrinking evicts at once, oldest first; growing never drops.
* **ttl**: an entry is expired when ``now - written_at > ttl * jitter(key)``, decided at read time, so a change acts on entries
  that are already stored.
* **warmup_ratio** is the share of the remembered hot set that is refreshed in the background when it is not live.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Knobs:
    """One setting of the cache.

    Attributes:
        cache_size: Byte budget of one arm across the cluster, >= 0.
        ttl: Time to live in seconds, > 0; ``math.inf`` means entries never expire.
        warmup_ratio: Share of the hot set kept warm, 0..1.

    Raises:
        ValueError: If a value is not finite (but for ``ttl``) or out of its range.
    """

    cache_size: int
    ttl: float
    warmup_ratio: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.cache_size, bool) or not isinstance(self.cache_size, (int, np.integer)) or self.cache_size < 0:
            raise ValueError(f"cache_size: expected a whole number of bytes >= 0, got {self.cache_size!r}")
        if not self.ttl > 0:
            raise ValueError(f"ttl: expected seconds > 0 (or inf for never), got {self.ttl!r}")
        if not 0.0 <= self.warmup_ratio <= 1.0:
            raise ValueError(f"warmup_ratio: expected a share between 0 and 1, got {self.warmup_ratio!r}")
        object.__setattr__(self, "cache_size", int(self.cache_size))
        object.__setattr__(self, "ttl", float(self.ttl))
        object.__setattr__(self, "warmup_ratio", float(self.warmup_ratio))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping; an infinite ``ttl`` becomes ``None``."""
        values = asdict(self)
        if math.isinf(self.ttl):
            values["ttl"] = None
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Knobs:
        """Build from :meth:`to_dict`'s form.

        Raises:
            ValueError: If a key is missing or unknown, or a value is out of range.
        """
        unknown = set(values) - {"cache_size", "ttl", "warmup_ratio"}
        missing = {"cache_size", "ttl"} - set(values)
        if unknown or missing:
            raise ValueError(
                f"knobs: expected the keys cache_size, ttl, warmup_ratio; unknown {sorted(unknown)}, missing {sorted(missing)}"
            )
        ttl = math.inf if values["ttl"] is None else float(values["ttl"])
        return cls(int(values["cache_size"]), ttl, float(values.get("warmup_ratio", 0.0)))


@dataclass(frozen=True)
class KnobSpace:
    """The bounds of the knobs, and the grid on which the ghost curves are kept.

    ``cache_size`` and ``ttl`` live on a logarithmic grid (``size_steps`` and ``ttl_steps`` points between their bounds, both
    included), ``warmup_ratio`` on a linear one.

    Raises:
        ValueError: If a bound is not positive, the lower is not below the upper, or a grid has fewer than 2 points.
    """

    min_size: int = 1 * MIB
    max_size: int = 1024 * MIB
    min_ttl: float = 10.0
    max_ttl: float = 86_400.0
    max_warmup: float = 0.5
    size_steps: int = 16
    ttl_steps: int = 8
    warmup_steps: int = 6
    sizes: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)
    ttls: npt.NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for low, high, what in ((self.min_size, self.max_size, "size"), (self.min_ttl, self.max_ttl, "ttl")):
            if not 0 < low < high or math.isinf(high):
                raise ValueError(f"knob space: expected 0 < min_{what} < max_{what} < inf, got {low!r} and {high!r}")
        if not 0 <= self.max_warmup <= 1:
            raise ValueError(f"knob space: max_warmup: expected 0..1, got {self.max_warmup!r}")
        if min(self.size_steps, self.ttl_steps, self.warmup_steps) < 2:
            raise ValueError("knob space: expected at least 2 grid points for each knob")
        sizes = np.rint(np.geomspace(self.min_size, self.max_size, self.size_steps)).astype(np.int64)
        ttls = np.geomspace(self.min_ttl, self.max_ttl, self.ttl_steps)
        sizes[0], sizes[-1] = self.min_size, self.max_size
        ttls[0], ttls[-1] = self.min_ttl, self.max_ttl
        sizes.setflags(write=False)
        ttls.setflags(write=False)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "ttls", ttls)

    def clip(self, knobs: Knobs) -> Knobs:
        """Return ``knobs`` moved to the nearest point within the bounds."""
        return Knobs(
            int(min(max(knobs.cache_size, self.min_size), self.max_size)),
            float(min(max(knobs.ttl, self.min_ttl), self.max_ttl)),
            float(min(max(knobs.warmup_ratio, 0.0), self.max_warmup)),
        )

    def contains(self, knobs: Knobs) -> bool:
        """Whether every knob lies within its bounds."""
        return self.clip(knobs) == knobs

    def to_steps(self, knobs: Knobs) -> npt.NDArray[np.float64]:
        """Return the position of ``knobs`` on the three grids, in fractional grid steps, shape (3,).

        Out-of-bounds knobs are clipped first.
        """
        inside = self.clip(knobs)
        return np.array(
            [
                (self.size_steps - 1) * math.log(inside.cache_size / self.min_size) / math.log(self.max_size / self.min_size),
                (self.ttl_steps - 1) * math.log(inside.ttl / self.min_ttl) / math.log(self.max_ttl / self.min_ttl),
                (self.warmup_steps - 1) * (inside.warmup_ratio / self.max_warmup if self.max_warmup else 0.0),
            ]
        )

    def from_steps(self, steps: npt.ArrayLike) -> Knobs:
        """Return the knobs at fractional grid position ``steps``, shape (3,), clipped to the bounds.

        Raises:
            ValueError: If ``steps`` is not three finite numbers.
        """
        position = np.asarray(steps, dtype=np.float64)
        if position.shape != (3,) or not np.all(np.isfinite(position)):
            raise ValueError(f"knob space: expected three finite grid positions, got {steps!r}")
        size, ttl, warm = position / np.array([self.size_steps - 1, self.ttl_steps - 1, self.warmup_steps - 1])
        size, ttl, warm = min(max(size, 0.0), 1.0), min(max(ttl, 0.0), 1.0), min(max(warm, 0.0), 1.0)
        return self.clip(
            Knobs(
                round(self.min_size * (self.max_size / self.min_size) ** size),
                self.min_ttl * (self.max_ttl / self.min_ttl) ** ttl,
                self.max_warmup * warm,
            )
        )
