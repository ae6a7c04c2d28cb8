"""What stays fixed while a simulated cache is tuned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from envs.objective import Prices
from serving.hotset import WarmupRules
from serving.knobs import KnobSpace
from serving.latency import UpstreamModel

MemoryEviction = Literal["lru", "clock"]


@dataclass(frozen=True)
class SimConfig:
    """Settings of a simulated arm.

    Attributes:
        space: Bounds of the knobs and grid of the ghost curve.
        l1_share: Share of ``cache_size`` that may be resident in the memory tier, 0..1.
        memory_eviction: Who goes from the memory tier: ``clock`` as in the arena that a node's replicas share
            (:mod:`serving.arena.eviction`), ``lru`` as in a replica's own (:class:`serving.tiers.memory.MemoryTier`).
        store: Whether there is a store behind the memory tier. Without one the memory tier is the whole cache, all of
            ``cache_size`` whatever ``l1_share`` says, and ``memory_eviction`` decides what is in it.
        ttl_jitter: Width of the per-key jitter on the TTL, 0 to below 1.
        staleness_half_life: Age at which an answer is outdated with probability 1/2, seconds; inf for never.
        upstream: Latency of the model.
        memory_latency: Latency of a hit in the memory tier, seconds.
        store_latency: Latency of a hit in the store (Redis), seconds.
        semantic_latency: Latency of a hit by meaning (embedding, search, store), seconds.
        prefix: Whether a prefix block is answered only if the block before it in its request was (``Trace.chain``).
        semantic: Whether requests may be answered by meaning (``Trace.group``, ``Trace.match_probability``).
        warmup: Rules of the background refreshing.
        refreshes_inflight: Refreshes under way at the same time (:class:`serving.warmup.Warmer`'s ``max_inflight``).
        ghost_keys: Keys that the ghost tracks at most; 0 for no ghost (then curve, entropy, drift and regret are missing).
        prices: What the regret is priced with.
        arm: Name of the arm in the signals.

    Raises:
        ValueError: If a value is out of its range.
    """

    space: KnobSpace = field(default_factory=KnobSpace)
    l1_share: float = 0.25
    memory_eviction: MemoryEviction = "clock"
    store: bool = True
    ttl_jitter: float = 0.1
    staleness_half_life: float = math.inf
    upstream: UpstreamModel = field(default_factory=UpstreamModel)
    memory_latency: float = 0.001
    store_latency: float = 0.002
    semantic_latency: float = 0.012
    prefix: bool = True
    semantic: bool = True
    warmup: WarmupRules = field(default_factory=WarmupRules)
    refreshes_inflight: int = 4
    ghost_keys: int = 4096
    prices: Prices = field(default_factory=Prices)
    arm: str = "simulated"

    def __post_init__(self) -> None:
        if not 0.0 <= self.l1_share <= 1.0:
            raise ValueError(f"simulator: l1_share: expected a share between 0 and 1, got {self.l1_share!r}")
        if self.memory_eviction not in get_args(MemoryEviction):
            expected = " or ".join(map(repr, get_args(MemoryEviction)))
            raise ValueError(f"simulator: memory_eviction: expected {expected}, got {self.memory_eviction!r}")
        if not 0.0 <= self.ttl_jitter < 1.0:
            raise ValueError(f"simulator: ttl_jitter: expected a width from 0 to below 1, got {self.ttl_jitter!r}")
        if not self.staleness_half_life > 0:
            raise ValueError(f"simulator: staleness_half_life: expected seconds > 0 (or inf), got {self.staleness_half_life!r}")
        for name in ("memory_latency", "store_latency", "semantic_latency"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"simulator: {name}: expected finite seconds >= 0, got {value!r}")
        if self.refreshes_inflight < 1:
            raise ValueError(f"simulator: refreshes_inflight: expected at least 1, got {self.refreshes_inflight!r}")
        if self.ghost_keys != 0 and self.ghost_keys < 16:
            raise ValueError(f"simulator: ghost_keys: expected 0 (no ghost) or at least 16, got {self.ghost_keys!r}")
