"""What one gateway replica is made of, and what it does beside answering: follow the knobs, keep the ghosts, warm up, export.

Nothing here knows of HTTP; :mod:`serving.gateway` answers requests with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.access_log import AccessLogWriter, DetailedRecord, Outcome
from serving.arms import ArmAssignment
from serving.by_meaning import ByMeaning
from serving.cache import VECTOR, Lookup, TieredCache
from serving.config_store import AppliedState, ConfigStoreUnavailable, DesiredState
from serving.crypto import Sealer
from serving.embedding import DIMENSIONS
from serving.ending import end, report_failure
from serving.feed import AccessFeed, LocalFeed, RedisFeed
from serving.fetching import Call, Fetcher
from serving.flight_feed import FlightFeed
from serving.flights import Flights
from serving.ghost import Ghost, compile_ghost
from serving.inbound import Inbound
from serving.keys import Fingerprint, key64
from serving.meaning.acceptance_feed import AcceptanceFeed
from serving.memory import Memory, open_memory
from serving.metrics import GatewayMetrics, Sink
from serving.policy import Asked
from serving.presence import Presence
from serving.redis_config_store import RedisConfigStore
from serving.redis_url import address
from serving.roll_call import REPORT_SECONDS as PRESENCE_SECONDS
from serving.settings import GatewaySettings
from serving.tenants import Tenants
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from serving.tiers.redis import RedisTier
from serving.tiers.vector_store import VectorStore, open_store
from serving.upstream import Upstream
from serving.warmup import NoLeases, RedisLeases, Remembered, Warmer

if TYPE_CHECKING:
    from serving.neighbours.node import Neighbours

_log = logging.getLogger(__name__)

FEED_SECONDS = 1.0
"""How long a start waits for the feed of what other replicas change; without Redis there is none."""

ACCEPTANCE_SECONDS = 1.0
"""How often replicas tell each other what they learned of answers by meaning."""

MIN_FLIGHT_BYTES = 4 << 20
"""Bytes of an answer under way that are kept at least for those who join it late."""

CLIENT_LEFT = 499
"""Status of a request whose client did not wait for its answer, as nginx has it."""

ARENA_SECONDS = 30.0
"""How often a replica that was refused its node's arena tries again."""

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
        self.tenants = Tenants(settings.auth)
        self.meaning = ByMeaning(settings.rules.semantic, self.metrics)
        self.version = 0
        self.ready = False
        self.store_reachable = settings.redis_url is None
        self.memory: Memory
        self.cache: TieredCache
        self.flights: Flights
        self.fetcher: Fetcher
        self.warmers: dict[str, Warmer] = {}
        self._ghosts: dict[str, Ghost] = {}
        self._index = {arm: number for number, arm in enumerate(self.names)}
        self._feed: AccessFeed
        self._presence: Presence | None = None
        self._neighbours: Neighbours | None = None
        self._config: RedisConfigStore | None = None
        self._provisional = False  # knobs that are not known to be the cluster's
        self._access_log: AccessLogWriter | None = None
        self._flight_feed: FlightFeed | None = None
        self._acceptance_feed: AcceptanceFeed | None = None
        self._revalidating: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        self._applied_time = -math.inf
        self._next_window = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    # -- lifecycle -----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything and start the background work; returns when requests can be answered.

        An unreachable Redis or upstream does not keep it from starting, nor does an arena that cannot be opened.

        Raises:
            OSError: If the access log cannot be written.
            RuntimeError: If the package of the vector store is not installed.
        """
        settings, url, namespace = self.settings, address(self.settings), self.settings.namespace
        if settings.access_log is not None:
            self._access_log = AccessLogWriter(settings.access_log, self.replica)
        if settings.ghost.enabled:
            # Before there is anything that the event loop has to hear of: after an update it takes some ten seconds.
            await asyncio.to_thread(compile_ghost)
        await self.upstream.open()
        await self.meaning.open()
        sealer = Sealer.of(settings.storage)
        self.memory = open_memory(settings, replica=self.replica)
        if url is not None:
            self._presence = Presence(url, namespace, self.memory.name, self.replica)
            await self._presence.exchange()
        self.cache = TieredCache(
            memory=self.memory.tier,
            store=RedisTier(url, namespace, read_deadline=settings.redis_deadline, sealer=sealer) if url is not None else None,
            vectors=self._open_vectors(),
            rules=replace(settings.rules.rules(), min_ttl=settings.callers.min_ttl),
            memories=self._memories(),
            confidential=self.tenants.configured,
        )
        shared = url is not None and settings.replicas > 1
        if url is not None and shared:
            self._flight_feed = FlightFeed(url, namespace, deadline=settings.redis_deadline, sealer=sealer)
        self.flights = Flights(
            grace=settings.streams.grace,
            max_bytes=max(MIN_FLIGHT_BYTES, settings.admission.max_entry_bytes),
            feed=self._flight_feed,
            clock=time.perf_counter,
        )
        self.cache.told.outdated = self.cache.told.withdrawn = self.flights.forget
        self.cache.told.unsure = self.flights.part
        self.fetcher = Fetcher(
            settings,
            upstream=self.upstream,
            cache=self.cache,
            flights=self.flights,
            meaning=self.meaning,
            metrics=self.metrics,
            clock=lambda: self.clock(),
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
                self._provisional = isinstance(error, ConfigStoreUnavailable)
        known = desired.arms if desired is not None else {}
        await self.cache.apply(
            {arm: known.get(arm, knobs) for arm, knobs in settings.initial_knobs.items()}, provisional=self._provisional
        )
        # What left Redis while nobody listened must not answer, and what stayed should from the first request on.
        with suppress(TimeoutError):
            await asyncio.wait_for(self.cache.following(), FEED_SECONDS)
        self._feed = RedisFeed(url, namespace, self.replica) if url is not None and shared else LocalFeed()
        await self._feed.open()
        self._start_arms(shared=shared)
        if self._config is not None:
            if desired is not None:
                await self._apply(desired)
            self._background(self._follow_knobs(self._config), "follow-knobs")
            self._background(self._report_knobs(self._config), "report-knobs")
        if self._presence is not None:
            self._background(self._presence_loop(self._presence), "presence")
        self._next_window = time.monotonic() + settings.ghost.window
        self._background(self._flush_loop(), "flush")
        if self._access_log is not None:
            self._background(self._log_loop(self._access_log), "access-log")
        for warmer in self.warmers.values():
            self._background(self._warm_loop(warmer), "warm-up")
        if url is not None and self.meaning.enabled:
            self._acceptance_feed = AcceptanceFeed(self.meaning.acceptance, url, namespace, self.replica)
            self._background(self._acceptance_loop(self._acceptance_feed), "acceptance")
        # Last: what is loaded above takes the event loop for seconds, and a node that says that it is there should answer.
        await self._open_neighbours(url)
        if self.memory.refused:
            self._background(self._try_arena(url), "try-arena")
        self.ready = True

    async def stop(self) -> None:
        """Stop the background work, write what is buffered, close everything; harmless when not started."""
        self.ready = False
        await end(self._tasks)
        self._tasks.clear()
        for warmer in self.warmers.values():
            await warmer.close()
        await end(self._revalidating.values())
        if hasattr(self, "fetcher"):
            await self.flights.close()
            await self.fetcher.close()
        await self.meaning.close()
        self.metrics.flush()
        if self._access_log is not None:
            self._access_log.close()
        await self.upstream.close()
        if self._neighbours is not None:
            await self._neighbours.close()
        if hasattr(self, "cache"):
            await self.cache.close()
        if hasattr(self, "_feed"):
            await self._feed.close()
        for part in (self._flight_feed, self._acceptance_feed, self._config, self._presence):
            if part is not None:
                await part.close()

    async def _open_neighbours(self, url: str | None) -> None:
        given, arena = self.settings.neighbours, self.memory.tier
        if given.listen is None:
            return
        if not isinstance(arena, ArenaTier):
            _log.warning("neighbours: neither served nor read, since this replica has no arena")
            return
        # Imported where it is wanted alone: few have other nodes.
        from serving.neighbours.node import Neighbours

        try:
            self._neighbours = Neighbours(given, arena, namespace=self.settings.namespace, redis_url=url)
            await self._neighbours.start()
        except (OSError, ValueError) as error:
            _log.warning("neighbours: neither served nor read: %s", error)
            return
        self.cache.neighbours = self._neighbours.tier
        self.cache.told.removed = self._neighbours.outdated
        self.metrics.open_hits(self._neighbours.tier.name)

    async def _try_arena(self, url: str | None) -> None:
        """Try to open the arena again and again: those who kept this replica from it, with another Redis, may have gone."""
        while self.memory.refused:
            await asyncio.sleep(ARENA_SECONDS)
            opened = await asyncio.to_thread(open_memory, self.settings, replica=self.replica, told=self.memory.refused)
            if opened.refused:
                self.memory = replace(self.memory, refused=opened.refused)
                continue
            self.memory = opened
            if self._presence is not None:
                await self._presence.move(opened.name)
            await self.cache.move_memory(opened.tier, self._memories(), provisional=self._provisional)
            _log.info("this replica has its node's arena now: %s", opened.place)
            await self._open_neighbours(url)

    def _memories(self) -> int:
        """How many memory tiers share the memory part of the budgets."""
        if not self.memory.tier.shared:
            return self.settings.replicas
        return self._presence.memories if self._presence is not None else 1

    def _open_vectors(self) -> VectorStore | None:
        if not self.meaning.enabled:
            return None
        return open_store(self.settings.rules.semantic.vectors, dim=DIMENSIONS, namespace=self.settings.namespace)

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
        task.add_done_callback(report_failure)
        self._tasks.append(task)

    # -- answering -----------------------------------------------------------------------------------------------------------

    def arm_now(self, fp: Fingerprint) -> str | None:
        """Return a request's arm; None where its embedding has to be computed first."""
        if not fp.text or not self.meaning.assigns_arms:
            return self.arms.arm(fp.key)
        vector = self.meaning.known(fp.text)
        return None if vector is None else self._arm_of(fp, vector)

    async def arm_by_meaning(self, fp: Fingerprint) -> str:
        """Return the arm that a request's semantic bucket assigns it to; its key's where it has no embedding."""
        return self._arm_of(fp, await self.meaning.embed(fp.text))

    def _arm_of(self, fp: Fingerprint, vector: bytes) -> str:
        return self.arms.arm(self.meaning.bucket(vector) if vector else fp.key)

    def by_meaning(self, inbound: Inbound) -> bool:
        """Whether an answer to another question may be looked for."""
        # One who comes back for the rest of an answer wants that answer.
        return bool(inbound.fp.text) and inbound.asked.directives.by_meaning and not inbound.resume

    def lookup_now(self, arm: str, asked: Asked, now: float) -> Lookup | None:
        """Find an exact hit in memory, without awaiting; counts it as looked up. None also while the key is being stored."""
        if self.fetcher.storing.under_way(arm, asked.fp.key):
            return None
        found = self.cache.lookup_now(arm, asked, now=now)
        if found is not None:
            self.metrics.count("cachepilot_cacheable_lookups_total", arm)
        return found

    async def lookup(self, arm: str, inbound: Inbound, now: float) -> Lookup:
        """Find what may answer the request; counts it as looked up, unless its caller would not have that."""
        asked, by_meaning = inbound.asked, self.meaning.enabled and self.by_meaning(inbound)
        if not by_meaning and asked.fp.text and self.meaning.enabled:
            asked = replace(asked, directives=replace(asked.directives, max_error=0.0))
        if not asked.directives.no_store:
            await self.fetcher.storing.arrived(arm, asked.fp.key, asked.fp.context if by_meaning else b"")
        if not (asked.directives.no_store or asked.directives.no_cache):
            self.metrics.count("cachepilot_cacheable_lookups_total", arm)
        found = await self.cache.lookup(
            arm,
            asked,
            now=now,
            embed=self.meaning.embed if by_meaning else None,
            judge=self.meaning.judge(arm, asked) if by_meaning else None,
        )
        if found.expired:
            self.metrics.count("cachepilot_expirations_total", arm)
        if found.search_failed:
            self.metrics.count("cachepilot_vector_failures_total")
        return found

    def tier_of(self, arm: str, entry: Entry) -> str:
        """Return the name of the fastest tier that holds the entry."""
        held = self.cache.memory.get_now(arm, entry.key, touch=False)
        return self.cache.memory.name if held is not None or self.cache.store is None else self.cache.store.name

    def revalidate(self, arm: str, call: Call) -> None:
        """Refresh an entry that was served past its TTL, in the background; once for all who were served."""
        name = (arm, call.asked.fp.key)
        if name in self._revalidating or self.flights.find(*name) is not None:
            return
        task = asyncio.create_task(self.fetcher.refresh(arm, self.fetcher.for_refresh(call)), name=f"revalidate-{self.replica}")
        self._revalidating[name] = task
        task.add_done_callback(lambda _: self._revalidating.pop(name, None))

    async def _refresh(self, arm: str, request: Remembered) -> None:
        assert isinstance(request.call, Call)
        await self.fetcher.refresh(arm, request.call)

    # -- accounting ----------------------------------------------------------------------------------------------------------

    def answered(self, arm: str, entry: Entry, now: float) -> None:
        """Tell the ghost and the hot set which entry answered a cacheable request, by a hit or by becoming one."""
        self._feed.add(self._index[arm], key64(entry.key), entry.size, now)

    def hit(self, arm: str, found: Lookup) -> None:
        """Count a hit."""
        self.metrics.count("cachepilot_hits_total", arm, found.tier)
        if found.stale:
            self.metrics.count("cachepilot_expected_stale_hits_total", arm, amount=found.stale)

    def coalesced(self, arm: str, *, by_meaning: bool) -> None:
        """Count a hit on the answer that another request was just waiting for, the same or one of nearly the same meaning."""
        self.metrics.count("cachepilot_coalesced_requests_total", arm)
        self.metrics.count("cachepilot_hits_total", arm, VECTOR if by_meaning else "memory")

    def record(
        self,
        at: float,
        latency: float,
        inbound: Inbound,
        arm: str,
        outcome: Outcome,
        status: int,
        *,
        rule: str = "",
        tier: str = "",
        entry: Entry | None = None,
        age: float = 0.0,
        stale: float = 0.0,
        similarity: float = 0.0,
    ) -> None:
        """Count a request, answered or left by its client before its answer's end, and write its line of the access log."""
        if outcome == "left":  # none of the answered requests: what it would have waited nobody knows
            self.metrics.count("cachepilot_clients_left_total", arm)
        else:
            self.metrics.request(arm, outcome, latency)
            self.metrics.count("cachepilot_decisions_total", arm, rule)
        if self._access_log is not None:
            size, tokens = (entry.size, (entry.input_tokens, entry.output_tokens)) if entry is not None else (0, (0, 0))
            self._access_log.write(
                DetailedRecord(
                    at, key64(inbound.fp.key), arm, outcome, tier, latency, size, *tokens, age, stale, self.version, status,
                    rule, similarity, inbound.endpoint, inbound.tenant,
                )
            )  # fmt: skip

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
            if self._provisional:
                self._provisional = False
                desired = await config.read()
                await (self.cache.apply(self.settings.initial_knobs) if desired is None else self._apply(desired))
        except ConfigStoreUnavailable as error:
            if self.store_reachable:
                _log.warning("going on with the knobs of version %d: %s", self.version, error)
            self.store_reachable = False

    async def _presence_loop(self, presence: Presence) -> None:
        while True:
            await asyncio.sleep(PRESENCE_SECONDS)
            await presence.exchange()
            self.cache.share_memory(self._memories())

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
        await self.fetcher.storing.all_arrived()
        await self._digest()
        metrics = self.metrics
        for arm in self.names:
            metrics.knobs(arm, self.cache.knobs(arm))
            for tier, stats in (await self.cache.stats(arm)).items():
                silent = tier == self.memory.tier.name and self._presence is not None and not self._presence.speaks
                metrics.gauge("cachepilot_resident_bytes", arm, tier, value=0.0 if silent else float(stats.bytes))
                metrics.level("cachepilot_evictions_total", arm, tier, total=float(stats.evictions))
        metrics.gauge("cachepilot_memory_shared", value=float(self.memory.tier.shared))
        metrics.gauge("cachepilot_memory_refused", value=float(bool(self.memory.refused)))
        if isinstance(self.memory.tier, ArenaTier):
            metrics.level("cachepilot_memory_dropped_writes_total", total=float(self.memory.tier.dropped))
            metrics.level("cachepilot_memory_repairs_total", total=float(self.memory.tier.repairs))
        if self._neighbours is not None:
            for labels, count in self._neighbours.tier.counts.items():
                metrics.level("cachepilot_neighbour_events_total", *labels, total=float(count))
            links = Counter(self._neighbours.tier.links().values())
            for transport in ("rdma", "tcp", "none"):
                metrics.gauge("cachepilot_neighbour_links", transport, value=float(links[transport]))
        metrics.gauge("cachepilot_knobs_version", value=float(self.version))
        metrics.level("cachepilot_upstream_retries_total", total=float(self.upstream.retried))
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

    async def _acceptance_loop(self, feed: AcceptanceFeed) -> None:
        while True:
            await feed.exchange()
            await asyncio.sleep(ACCEPTANCE_SECONDS)

    async def _warm_loop(self, warmer: Warmer) -> None:
        while True:
            await asyncio.sleep(self.settings.warmup.period)
            await warmer.tick(self.clock())
