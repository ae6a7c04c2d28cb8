"""What one gateway replica is made of, and what it does beside answering: follow the knobs, keep the ghosts, warm up, export.

Nothing here knows of HTTP; :mod:`serving.gateway` answers requests with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from serving.access_log import AccessLogWriter, AccessRecord, Outcome
from serving.arms import ArmAssignment
from serving.cache import Lookup, TieredCache
from serving.config_store import AppliedState, ConfigStoreUnavailable, DesiredState
from serving.crypto import Sealer
from serving.embedding import DIMENSIONS, Embedder, EmbeddingUnavailable
from serving.feed import AccessFeed, LocalFeed, RedisFeed
from serving.ghost import Ghost
from serving.keys import Fingerprint, key64
from serving.metrics import GatewayMetrics, Sink
from serving.redis_config_store import RedisConfigStore
from serving.redis_url import address
from serving.settings import GatewaySettings
from serving.tiers.base import Entry
from serving.tiers.memory import MemoryTier
from serving.tiers.redis import RedisTier
from serving.tiers.vector import VectorTier
from serving.upstream import Completion, Upstream, UpstreamAnswer, completion_of, usage_of
from serving.warmup import NoLeases, RedisLeases, Remembered, Warmer

_log = logging.getLogger(__name__)

FEED_SECONDS = 1.0
"""How long a start waits for the feed of what other replicas change; without Redis there is none."""

REPORT_SECONDS = 5.0
"""How often a replica repeats which version it runs; a third of what the store takes for death."""


class Runtime:
    """One replica. Make it anywhere; :meth:`start` and :meth:`stop` it within the event loop that answers.

    Args:
        settings: The data plane's settings.
        replica: Name of this replica, unique in the namespace.
        sink: Where metrics go.
        clock: Seconds since the epoch.
    """

    def __init__(self, settings: GatewaySettings, *, replica: str, sink: Sink, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self.replica = replica
        self.clock = clock
        self.space = settings.space.space()
        self.arms = ArmAssignment(settings.salt, settings.shares)
        self.names = self.arms.arms
        self.metrics = GatewayMetrics(self.names, self.space, sink)
        self.upstream = Upstream(settings.upstream)
        self.version = 0
        self.ready = False
        self.store_reachable = settings.redis_url is None
        self.cache: TieredCache
        self.warmers: dict[str, Warmer] = {}
        self._ghosts: dict[str, Ghost] = {}
        self._index = {arm: number for number, arm in enumerate(self.names)}
        self._feed: AccessFeed
        self._embedder: Embedder | None = None
        self._config: RedisConfigStore | None = None
        self._access_log: AccessLogWriter | None = None
        self._misses: dict[tuple[str, bytes], asyncio.Task[tuple[UpstreamAnswer, Entry | None]]] = {}
        self._applied_time = -math.inf
        self._next_window = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    # -- lifecycle -----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything and start the background work; returns when requests can be answered.

        An unreachable Redis or upstream does not keep it from starting.

        Raises:
            OSError: If the access log cannot be written.
        """
        settings, url, namespace = self.settings, address(self.settings), self.settings.namespace
        if settings.access_log is not None:
            self._access_log = AccessLogWriter(settings.access_log, self.replica)
        await self.upstream.open()
        semantic = settings.rules.semantic
        if semantic.enabled:
            await self._open_embedder(semantic.deadline)
        store = None
        if url is not None:
            store = RedisTier(url, namespace, read_deadline=settings.redis_deadline, sealer=Sealer.of(settings.storage))
        self.cache = TieredCache(
            memory=MemoryTier(),
            store=store,
            vectors=VectorTier(dim=DIMENSIONS) if self._embedder is not None else None,
            rules=settings.rules.rules(),
            replicas=settings.replicas,
        )
        desired: DesiredState | None = None
        if url is not None:
            # The tuner's knobs come before the first answer, and before the initial ones are applied at all: the budget in Redis
            # is shared, and a replica that restarts must not shrink it for the others.
            self._config = RedisConfigStore(url, namespace)
            try:
                desired = await self._config.read()
                self.store_reachable = True
            except (ConfigStoreUnavailable, ValueError) as error:
                _log.warning("starting with the initial knobs: %s", error)
        known = desired.arms if desired is not None else {}
        await self.cache.apply({arm: known.get(arm, knobs) for arm, knobs in settings.initial_knobs.items()})
        # The memory tier starts anew when the feed of changes begins: better before the first answer.
        with suppress(TimeoutError):
            await asyncio.wait_for(self.cache.following(), FEED_SECONDS)
        shared = url is not None and settings.replicas > 1
        self._feed = RedisFeed(url, namespace, self.replica) if url is not None and shared else LocalFeed()
        await self._feed.open()
        self._start_arms(shared=shared)
        if self._config is not None:
            if desired is not None:
                await self._apply(desired)
            self._background(self._follow_knobs(self._config), "follow-knobs")
            self._background(self._report_knobs(self._config), "report-knobs")
        self._next_window = time.monotonic() + settings.ghost.window
        self._background(self._flush_loop(), "flush")
        if self._access_log is not None:
            self._background(self._log_loop(self._access_log), "access-log")
        for warmer in self.warmers.values():
            self._background(self._warm_loop(warmer), "warm-up")
        self.ready = True

    async def stop(self) -> None:
        """Stop the background work, write what is buffered, close everything; harmless when not started."""
        self.ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for warmer in self.warmers.values():
            await warmer.close()
        for pending in list(self._misses.values()):
            pending.cancel()
        await asyncio.gather(*self._misses.values(), return_exceptions=True)
        self.metrics.flush()
        if self._access_log is not None:
            self._access_log.close()
        await self.upstream.close()
        if hasattr(self, "cache"):
            await self.cache.close()
        if hasattr(self, "_feed"):
            await self._feed.close()
        if self._embedder is not None:
            await self._embedder.close()
        if self._config is not None:
            await self._config.close()

    async def _open_embedder(self, deadline: float) -> None:
        embedder = Embedder(deadline=deadline)
        try:
            await embedder.load()
        except EmbeddingUnavailable as error:
            _log.error("answers by meaning are off: %s", error)
            await embedder.close()
            return
        self._embedder = embedder

    def _start_arms(self, *, shared: bool) -> None:
        settings, url = self.settings, address(self.settings)
        rules, ghost = settings.warmup.rules(), settings.ghost
        leases = (
            RedisLeases(url, settings.namespace, self.replica, seconds=min(settings.upstream.timeout, 300.0))
            if url is not None and shared
            else NoLeases()
        )
        for arm in self.names:
            self.warmers[arm] = Warmer(
                arm,
                self.cache,
                rules,
                self._refresh,
                leases=leases,
                replicas=settings.replicas,
                max_inflight=settings.warmup.max_inflight,
                max_bytes=settings.warmup.max_bytes,
            )
            if ghost.enabled:
                self._ghosts[arm] = Ghost(
                    self.space.sizes,
                    self.space.ttls,
                    max_keys=ghost.max_keys,
                    salt=ghost.salt,
                    rate=ghost.rate,
                    rotate_every=math.inf if ghost.rotate_every is None else ghost.rotate_every,
                    staleness_half_life=settings.rules.half_life,
                    ttl_jitter=settings.rules.ttl_jitter,
                )

    def _background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"{name}-{self.replica}")
        task.add_done_callback(_report_failure)
        self._tasks.append(task)

    # -- answering -----------------------------------------------------------------------------------------------------------

    async def lookup(self, arm: str, fp: Fingerprint, now: float) -> Lookup:
        """Find what may answer the request; counts it as looked up."""
        self.metrics.count("cachepilot_cacheable_lookups_total", arm)
        found = self.cache.lookup_now(arm, fp, now=now)
        if found is None:
            found = await self.cache.lookup(arm, fp, now=now, embed=self._embed if self._embedder is not None else None)
        if found.expired:
            self.metrics.count("cachepilot_expirations_total", arm)
        return found

    async def fetch(
        self, arm: str, fp: Fingerprint, body: bytes, headers: Mapping[str, str], vector: bytes
    ) -> tuple[UpstreamAnswer, Entry | None, bool]:
        """Ask the upstream for a missed answer and store it if it may be; identical misses under way are asked once.

        Returns:
            The answer; the entry it became, or None where it may not be cached; and whether another request had asked for it.
        """
        flight = (arm, fp.key)
        pending = self._misses.get(flight)
        if pending is not None:
            answer, entry = await asyncio.shield(pending)
            if entry is not None:
                return answer, entry, True
            # An error may be the first client's own (its key, its limits), and an answer that is not cacheable is not shared.
            return *await self._ask(arm, fp, body, headers, vector, "miss"), False
        pending = asyncio.create_task(self._ask(arm, fp, body, headers, vector, "miss"))
        self._misses[flight] = pending
        pending.add_done_callback(lambda _: self._misses.pop(flight, None))
        # Shielded: a client that goes away must not take the answer from those who wait for it, nor from the cache.
        answer, entry = await asyncio.shield(pending)
        return answer, entry, False

    async def _ask(
        self, arm: str, fp: Fingerprint, body: bytes, headers: Mapping[str, str], vector: bytes, cause: str
    ) -> tuple[UpstreamAnswer, Entry | None]:
        answer = await self.upstream.chat(body, headers)
        if not answer.ok:
            self.metrics.count("cachepilot_upstream_errors_total", arm)
            return answer, None
        completion = completion_of(answer)
        billed = completion if completion is not None else usage_of(answer)
        self.metrics.tokens(arm, cause, billed.input_tokens, billed.output_tokens)
        if completion is None:
            return answer, None
        entry = self._entry(fp, answer, completion, vector)
        await self.cache.put(arm, entry, now=entry.written_at)
        return answer, entry

    def _entry(self, fp: Fingerprint, answer: UpstreamAnswer, completion: Completion, vector: bytes) -> Entry:
        entry = Entry(
            fp.key,
            answer.body,
            self.clock(),
            completion.input_tokens,
            completion.output_tokens,
            fp.context if vector else b"",
            vector,
        )
        return self.cache.store.charged(entry) if self.cache.store is not None else entry

    async def _embed(self, text: str) -> bytes:
        assert self._embedder is not None
        try:
            return await self._embedder.embed(text)
        except EmbeddingUnavailable:
            self.metrics.count("cachepilot_embedding_failures_total")
            return b""

    async def _refresh(self, arm: str, request: Remembered) -> None:
        fp = request.fingerprint
        vector = await self._embed(fp.text) if self._embedder is not None and fp.text else b""
        await self._ask(arm, fp, request.body, request.headers, vector, "refresh")

    # -- accounting ----------------------------------------------------------------------------------------------------------

    def answered(self, arm: str, entry: Entry, now: float) -> None:
        """Tell the ghost and the hot set which entry answered a cacheable request, by a hit or by becoming one."""
        self._feed.add(self._index[arm], key64(entry.key), entry.size, now)

    def hit(self, arm: str, found: Lookup) -> None:
        """Count a hit."""
        self.metrics.count("cachepilot_hits_total", arm, found.tier)
        if found.stale:
            self.metrics.count("cachepilot_expected_stale_hits_total", arm, amount=found.stale)

    def coalesced(self, arm: str) -> None:
        """Count a hit on the answer that an identical request was just waiting for."""
        self.metrics.count("cachepilot_coalesced_requests_total", arm)
        self.metrics.count("cachepilot_hits_total", arm, "memory")

    def record(
        self,
        at: float,
        latency: float,
        fp: Fingerprint,
        arm: str,
        outcome: Outcome,
        status: int,
        *,
        tier: str = "",
        entry: Entry | None = None,
        age: float = 0.0,
        stale: float = 0.0,
    ) -> None:
        """Count an answered request and write its line of the access log."""
        self.metrics.request(arm, outcome, latency)
        if self._access_log is not None:
            size, tokens = (entry.size, (entry.input_tokens, entry.output_tokens)) if entry is not None else (0, (0, 0))
            self._access_log.write(
                AccessRecord(at, key64(fp.key), arm, outcome, tier, latency, size, *tokens, age, stale, self.version, status)
            )

    # -- background ----------------------------------------------------------------------------------------------------------

    async def _follow_knobs(self, config: RedisConfigStore) -> None:
        async for desired in config.watch():
            self.store_reachable = True
            if desired.version != self.version:
                await self._apply(desired)
                await self._report(config)

    async def _apply(self, desired: DesiredState) -> None:
        ours = {arm: knobs for arm, knobs in desired.arms.items() if arm in self._index}
        if len(ours) < len(desired.arms):
            _log.warning(
                "desired knobs %d name arms that are not here: %s", desired.version, sorted(set(desired.arms) - set(ours))
            )
        await self.cache.apply(ours)
        self.version = desired.version

    async def _report_knobs(self, config: RedisConfigStore) -> None:
        while True:
            await self._report(config)
            await asyncio.sleep(REPORT_SECONDS)

    async def _report(self, config: RedisConfigStore) -> None:
        try:
            await config.report(AppliedState(self.replica, self.version, self.clock()))
            self.store_reachable = True
        except ConfigStoreUnavailable as error:
            if self.store_reachable:
                _log.warning("going on with the knobs of version %d: %s", self.version, error)
            self.store_reachable = False

    async def _log_loop(self, log: AccessLogWriter) -> None:
        # A loop of its own: what holds the metrics up, a Redis that does not answer, must not hold up the log.
        while True:
            await asyncio.sleep(self.settings.flush_interval)
            log.flush()

    async def _flush_loop(self) -> None:
        while True:
            try:
                await self.flush()
            except Exception:  # noqa: BLE001 - without metrics the tuner is blind: one bad flush must not be the last
                _log.exception("a flush failed; the next is in %g s", self.settings.flush_interval)
            await asyncio.sleep(self.settings.flush_interval)

    async def flush(self) -> None:
        """Apply the feed to ghosts and hot sets, export every metric."""
        await self._digest()
        metrics = self.metrics
        for arm in self.names:
            metrics.knobs(arm, self.cache.knobs(arm))
            for tier, stats in (await self.cache.stats(arm)).items():
                metrics.gauge("cachepilot_resident_bytes", arm, tier, value=float(stats.bytes))
                metrics.level("cachepilot_evictions_total", arm, tier, total=float(stats.evictions))
        metrics.gauge("cachepilot_knobs_version", value=float(self.version))
        metrics.gauge("cachepilot_upstream_inflight", value=float(self.upstream.inflight))
        for _ in metrics.flushing():
            await asyncio.sleep(0)  # requests go first

    async def _digest(self) -> None:
        """Apply the cluster's accesses since the last time."""
        accesses = await self._feed.exchange()
        # What another replica tells late is taken for just now: a ghost's clock does not go back.
        times = np.maximum(accesses["time"], self._applied_time)
        if len(times):
            self._applied_time = float(times[-1])
        for number, arm in enumerate(self.names):
            rows = accesses["arm"] == number
            if not rows.any():
                continue
            keys = np.ascontiguousarray(accesses["key"][rows])
            if arm in self._ghosts:
                self._ghosts[arm].access_many(keys, np.ascontiguousarray(accesses["size"][rows]), times[rows])
            warmer = self.warmers[arm]
            for key, at in zip(keys.tolist(), times[rows].tolist(), strict=True):
                warmer.access(key, at)
        if self._feed.leading:
            for arm in self._ghosts:
                self.metrics.open_ghost(arm)
        now = time.monotonic()
        if now < self._next_window:
            return
        self._next_window = now + self.settings.ghost.window
        for arm, ghost in self._ghosts.items():
            window = ghost.take()
            if self._feed.leading:
                self.metrics.ghost(arm, window)

    async def _warm_loop(self, warmer: Warmer) -> None:
        while True:
            await asyncio.sleep(self.settings.warmup.period)
            await warmer.tick(self.clock())


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("%s stopped", task.get_name(), exc_info=task.exception())
