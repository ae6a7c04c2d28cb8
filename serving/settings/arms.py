"""The knobs, their bounds, the arms, and what follows the knobs: warm-up and the ghosts."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from serving.hotset import WarmupRules
from serving.knobs import MIB, Knobs, KnobSpace
from serving.settings.base import Seconds, Settings, Share


class KnobSettings(Settings):
    """One setting of the three knobs.

    Attributes:
        cache_size: Byte budget of the arm across the cluster.
        ttl: Time to live, seconds; null means never.
        warmup_ratio: Share of the hot set that is kept warm.
    """

    cache_size: Annotated[int, Field(ge=0)] = 64 * MIB
    ttl: Annotated[float, Field(gt=0.0)] | None = 3600.0
    warmup_ratio: Share = 0.0

    def knobs(self) -> Knobs:
        """Return the knobs as the cache takes them."""
        return Knobs(self.cache_size, math.inf if self.ttl is None else self.ttl, self.warmup_ratio)


class SpaceSettings(Settings):
    """Bounds and grid of the knobs; see :class:`serving.knobs.KnobSpace`."""

    min_size: Annotated[int, Field(gt=0)] = 1 * MIB
    max_size: Annotated[int, Field(gt=0)] = 1024 * MIB
    min_ttl: Seconds = 10.0
    max_ttl: Seconds = 86_400.0
    max_warmup: Share = 0.5
    size_steps: Annotated[int, Field(ge=2, le=64)] = 16
    ttl_steps: Annotated[int, Field(ge=2, le=64)] = 8
    warmup_steps: Annotated[int, Field(ge=2, le=64)] = 6

    @model_validator(mode="after")
    def _consistent(self) -> SpaceSettings:
        self.space()
        return self

    def space(self) -> KnobSpace:
        """Return the knob space."""
        return KnobSpace(**self.model_dump())


class ArmSettings(Settings):
    """One arm: its share of the keys and its knobs until the tuner writes others."""

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    knobs: KnobSettings = KnobSettings()


class WarmupSettings(Settings):
    """Background refreshing of the hot set; the share refreshed is the knob ``warmup_ratio``.

    Attributes:
        capacity: Keys remembered per arm.
        half_life: Seconds in which the weight of an access halves.
        min_score: Least decayed number of accesses for a key to be hot.
        period: Seconds between two rounds.
        refresh_ahead: Share of the TTL before its end in which an entry is refreshed already.
        refreshes_per_second: Rate of refreshes per arm.
        burst: Refreshes that may be made at once after a quiet time.
        max_inflight: Refreshes of one replica under way at the same time: what keeps them from crowding out users.
        max_bytes: Bytes of request bodies that one replica remembers per arm, to send them again; the coldest go first.
    """

    capacity: Annotated[int, Field(ge=1)] = 1024
    half_life: Seconds = 600.0
    min_score: Annotated[float, Field(gt=0.0)] = 1.5
    period: Seconds = 1.0
    refresh_ahead: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    refreshes_per_second: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 5.0
    burst: Annotated[int, Field(ge=1)] = 20
    max_inflight: Annotated[int, Field(ge=1)] = 4
    max_bytes: Annotated[int, Field(ge=1)] = 32 * MIB

    def rules(self) -> WarmupRules:
        """Return the rules of the algorithm, which the simulator shares."""
        return WarmupRules(**self.model_dump(exclude={"max_inflight", "max_bytes"}))


class GhostSettings(Settings):
    """The shadow that predicts every other setting.

    Attributes:
        enabled: Whether it is kept.
        max_keys: Keys tracked per arm; 8,000 take about 1.7 MB on the default grid.
        rate: Upper bound of the share of keys that is tracked; below it the rate follows ``max_keys``.
        salt: Of the spatial sample, so that two deployments sample different keys.
        rotate_every: Seconds after which a sample with another salt takes over; null for never. While the next one is warmed up,
            beside the one that reports, the ghost takes twice the memory and time.
        window: Seconds between two exports of its curve, entropy and drift.
    """

    enabled: bool = True
    max_keys: Annotated[int, Field(ge=16)] = 8000
    rate: Annotated[float, Field(ge=1e-6, le=1.0)] = 1.0
    salt: int = 0
    rotate_every: Seconds | None = None
    window: Seconds = 5.0
