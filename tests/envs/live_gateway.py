"""One replica in the test's own process: the real tiered cache, ghost, instruments and config store, behind a real exporter.

What it lacks of a gateway is HTTP and the time that passes: its clock is the test's. ``tests/e2e`` has the whole of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re

import numpy as np

from serving.cache import CacheRules, TieredCache
from serving.config_store import AppliedState
from serving.ghost import Ghost
from serving.keys import Fingerprint, key64
from serving.knobs import Knobs, KnobSpace
from serving.metrics import GatewayMetrics, PrometheusSink
from serving.redis_config_store import RedisConfigStore
from serving.tiers.base import Entry
from serving.tiers.memory import MemoryTier
from tests.exporter import RAY_LABELS, Exporter

MISS_LATENCY, HIT_LATENCY = 0.8, 0.002
INPUT_TOKENS, OUTPUT_TOKENS = 40, 600
BODY = b"x" * 1000


class LiveGateway:
    """One arm of one replica; :meth:`run` answers requests while its clock moves on."""

    def __init__(self, space: KnobSpace, arm: str, store: RedisConfigStore | None, *, replica: str = "r0", seed: int = 0) -> None:
        self.now = 1_000_000.0
        self.arm = arm
        self.exporter = Exporter()
        self.sink = PrometheusSink()
        self.metrics = GatewayMetrics([arm], space, self.sink)
        self.hits = self.requests = 0
        self._replica = replica
        self._store = store
        self._version = 0
        self._runner = asyncio.Runner()
        self._cache = TieredCache(memory=MemoryTier(), store=None, vectors=None, rules=CacheRules(ttl_jitter=0.0))
        self._ghost = Ghost(space.sizes, space.ttls)
        self._random = np.random.default_rng(seed)
        self.metrics.gauge("cachepilot_upstream_inflight", value=0.0)
        self.publish()

    def apply(self, knobs: Knobs) -> None:
        self._runner.run(self._cache.apply({self.arm: knobs}))

    def watch(self) -> None:
        """Apply what the config store holds, and report it."""
        assert self._store is not None
        state = self._runner.run(self._store.read())
        if state is not None:
            if state.version != self._version:
                self.apply(state.arms[self.arm])
                self._version = state.version
            self._runner.run(self._store.report(AppliedState(self._replica, self._version, self.now)))

    def run(self, seconds: float, requests: int, *, keys: int = 400) -> None:
        """Let time pass and answer Zipf-popular requests, evenly spread."""
        start = self.now
        for number, rank in enumerate(np.minimum(self._random.zipf(1.2, requests), keys).tolist()):
            self.now = start + seconds * number / requests
            self._runner.run(self._answer(hashlib.sha256(str(rank).encode()).digest()))
        self.now = start + seconds
        self.publish()

    async def _answer(self, key: bytes) -> None:
        found = await self._cache.lookup(self.arm, Fingerprint(key, b"", ""), now=self.now)
        self.requests += 1
        self.metrics.count("cachepilot_cacheable_lookups_total", self.arm)
        if found.expired:
            self.metrics.count("cachepilot_expirations_total", self.arm)
        if found.entry is not None:
            self.hits += 1
            self.metrics.request(self.arm, "hit", HIT_LATENCY)
            self.metrics.count("cachepilot_hits_total", self.arm, found.tier)
        else:
            self.metrics.request(self.arm, "miss", MISS_LATENCY)
            self.metrics.tokens(self.arm, "miss", INPUT_TOKENS, OUTPUT_TOKENS)
            entry = Entry(key, BODY, self.now, INPUT_TOKENS, OUTPUT_TOKENS)
            evicted = await self._cache.put(self.arm, entry, now=self.now)
            self.metrics.count("cachepilot_evictions_total", self.arm, "memory", amount=float(evicted))
        self._ghost.access(key64(key), len(BODY) + 32, self.now)

    def publish(self) -> None:
        """Do what a gateway does once a second."""
        held = self._runner.run(self._cache.stats(self.arm))
        self.metrics.gauge("cachepilot_resident_bytes", self.arm, "memory", value=float(held["memory"].bytes))
        self.metrics.ghost(self.arm, self._ghost.take())
        self.metrics.flush()
        self.exporter.noise = as_ray(self.sink.exposition().decode(), self._replica)

    def close(self) -> None:
        self.exporter.kill()
        if self._store is not None:
            self._runner.run(self._store.close())
        self._runner.run(self._cache.close())
        self._runner.close()


def as_ray(exposition: str, replica: str) -> str:
    """Return an exposition as Ray's agent shows it: its prefix on the names, its labels on the series."""
    labels = ",".join(f'{name}="{value}"' for name, value in {**RAY_LABELS, "replica": replica}.items())
    with_labels = re.sub(r"(?m)^([a-zA-Z_:][\w:]*)\{", rf"\1{{{labels},", exposition)
    bare = re.sub(r"(?m)^([a-zA-Z_:][\w:]*) ", rf"\1{{{labels}}} ", with_labels)
    return re.sub(r"(?m)^(?=cachepilot_)|(?<=^# HELP )|(?<=^# TYPE )", "ray_", bare)
