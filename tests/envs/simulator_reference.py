"""The simulator's rules once more in plain Python, slow and obvious: what the compiled kernel is tested against."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from envs.simulator import SimConfig
from envs.workloads import Trace
from serving.hotset import HotSet
from serving.keys import mix64, ttl_jitter
from serving.knobs import Knobs
from serving.warmup import TokenBucket


@dataclass
class Call:
    arrival: float
    start: float
    finish: float


@dataclass
class ReferenceWindow:
    latency: list[float] = field(default_factory=list)
    memory_hits: int = 0
    store_hits: int = 0
    vector_hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    evictions: int = 0
    expirations: int = 0
    refreshes: int = 0
    stale: float = 0.0
    miss_tokens: tuple[int, int] = (0, 0)
    refresh_tokens: tuple[int, int] = (0, 0)
    running: float = 0.0
    waiting: float = 0.0
    resident: int = 0


class ReferenceSimulator:
    def __init__(self, trace: Trace, config: SimConfig, knobs: Knobs) -> None:
        self.trace, self.config, self.now, self.row = trace, config, 0.0, 0
        self.store: OrderedDict[int, tuple[int, float]] = OrderedDict()  # key -> size, written at; least recently used first
        self.memory: OrderedDict[int, int] = OrderedDict()  # key -> size; who is asked first whether to go, first
        self.used: set[int] = set()  # in memory, since they came or were spared
        self.hot: HotSet[int] = HotSet(config.warmup)
        self.bucket = TokenBucket(config.warmup.refreshes_per_second, max(1.0, config.warmup.burst))
        self.bucket.available(0.0)
        self.last_row: dict[int, int] = {}
        self.refresh_ends: list[float] = []
        self.calls: list[Call] = []
        self.ticks = 0
        self.groups: dict[int, int] = {}  # group of each key
        self.newest: list[int] = []  # stored keys, the one written last at the end
        self.updated: dict[int, float] = {}
        self.updates = list(zip(trace.update_time.tolist(), trace.update_document.tolist(), strict=True))
        self.flushes = trace.flush_time.tolist()
        self.broken = False
        self.window = ReferenceWindow()
        self.apply(knobs)

    def apply(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.trim()

    def flush(self) -> None:
        self.newest.clear()
        self.store.clear()
        self.memory.clear()
        self.used.clear()

    @property
    def memory_budget(self) -> int:
        return int(self.knobs.cache_size * (self.config.l1_share if self.config.store else 1.0))

    def trim(self) -> None:
        """As when budgets change: memory first."""
        if self.config.memory_eviction == "clock":
            self.trim_memory(self.memory_budget)
        self.trim_store()
        self.trim_memory(self.memory_budget)

    def trim_store(self) -> None:
        while sum(size for size, _ in self.store.values()) > self.knobs.cache_size:
            self.lose(next(iter(self.store)))

    def trim_memory(self, most: int) -> None:
        while sum(self.memory.values()) > most:
            key, size = self.memory.popitem(last=False)
            if self.config.memory_eviction == "clock" and key in self.used:
                self.used.discard(key)
                self.memory[key] = size
            elif not self.config.store:
                self.lose(key)

    def lose(self, key: int) -> None:
        self.store.pop(key)
        self.memory.pop(key, None)
        self.newest.remove(key)
        self.window.evictions += 1

    def put(self, key: int, size: int, now: float) -> None:
        """First in the store, then in memory."""
        if self.store.pop(key, None) is not None:
            self.newest.remove(key)
        self.memory.pop(key, None)
        if size <= self.knobs.cache_size:
            if not self.config.store and self.config.memory_eviction == "clock":
                self.trim_memory(self.memory_budget - size)
            self.store[key] = (size, now)
            self.newest.append(key)
            self.trim_store()
        self.promote(key, size)

    def promote(self, key: int, size: int) -> None:
        if size <= self.memory_budget:
            if self.config.memory_eviction == "clock":
                self.trim_memory(self.memory_budget - size)
            self.memory[key] = size
            self.used.discard(key)
            self.trim_memory(self.memory_budget)

    def live(self, key: int, now: float, ahead: float = 0.0) -> bool:
        if key not in self.store:
            return False
        life = self.knobs.ttl * ttl_jitter(key, self.config.ttl_jitter) * (1.0 - ahead)
        return now - self.store[key][1] <= life

    def call(self, now: float, tokens: int) -> float:
        """First come, first served: start at the first moment at which a slot is free."""
        model = self.config.upstream
        earliest = max([now, *(call.start for call in self.calls)])
        for start in sorted({earliest, *(call.finish for call in self.calls if call.finish > earliest)}):
            running = sum(call.start <= start < call.finish for call in self.calls)
            if running < model.slots:
                self.calls.append(Call(now, start, start + model.service_time(tokens, running)))
                return self.calls[-1].finish - now
        raise AssertionError("a slot is free once all calls have ended")

    def tick(self, now: float) -> None:
        rules = self.config.warmup
        # Asked for the whole plan first: a refresh may evict a planned entry, which then waits for the next round.
        plan = self.hot.plan(self.knobs.warmup_ratio, now)
        for key in [key for key in plan if not self.live(key, now, rules.refresh_ahead)]:
            self.refresh_ends = [end for end in self.refresh_ends if end > now]
            if not self.bucket.available(now) or len(self.refresh_ends) >= self.config.refreshes_inflight:
                return
            self.bucket.take()
            row = self.last_row[key]
            asked, answered = int(self.trace.input_tokens[row]), int(self.trace.output_tokens[row])
            self.window.refreshes += 1
            self.window.refresh_tokens = (self.window.refresh_tokens[0] + asked, self.window.refresh_tokens[1] + answered)
            self.refresh_ends.append(now + self.call(now, answered))
            self.put(key, int(self.trace.size[row]), now)

    def relative(self, key: int, row: int, now: float) -> int | None:
        """The entry of the same meaning that was written last and is live, if this request is one that such an entry answers."""
        group = int(self.trace.group[row])
        drawn = mix64(key ^ int(now * 1e6)) / 2.0**64
        if group < 0 or not self.config.semantic or drawn >= self.trace.match_probability:
            return None
        return next((k for k in reversed(self.newest) if k != key and self.groups[k] == group and self.live(k, now)), None)

    def serve(self, key: int, row: int, now: float) -> bool:
        """Use an entry; whether it was resident in the memory tier."""
        size, written = self.store[key]
        self.store.move_to_end(key)
        resident = key in self.memory
        if not resident:
            self.promote(key, size)
        elif self.config.memory_eviction == "lru":
            self.memory.move_to_end(key)
        else:
            self.used.add(key)
        changed = self.updated.get(int(self.trace.document[row]), -math.inf)
        self.window.stale += 1.0 if written < changed else 1.0 - 0.5 ** ((now - written) / self.config.staleness_half_life)
        self.window.hit_bytes += size
        return resident

    def request(self, row: int) -> None:
        key, now, window = int(self.trace.key[row]), float(self.trace.time[row]), self.window
        self.last_row[key] = row
        self.groups[key] = int(self.trace.group[row])
        self.hot.access(key, now)
        broken = self.config.prefix and self.trace.chain[row] > 0 and self.broken
        self.broken = False
        if not broken:
            if self.live(key, now):
                if self.serve(key, row, now):
                    window.memory_hits += 1
                    window.latency.append(self.config.memory_latency)
                else:
                    window.store_hits += 1
                    window.latency.append(self.config.store_latency)
                return
            window.expirations += key in self.store
            other = self.relative(key, row, now)
            if other is not None:
                self.serve(other, row, now)
                window.vector_hits += 1
                window.latency.append(self.config.semantic_latency)
                return
        self.broken = True
        asked, answered = int(self.trace.input_tokens[row]), int(self.trace.output_tokens[row])
        window.misses += 1
        window.miss_tokens = (window.miss_tokens[0] + asked, window.miss_tokens[1] + answered)
        window.latency.append(self.call(now, answered))
        self.put(key, int(self.trace.size[row]), now)

    def events(self, due: float, until: float) -> None:
        """Flushes, then updates, then warm-up rounds, in order of time, up to the next request."""
        while True:
            tick = (self.ticks + 1) * self.config.warmup.period
            flush = self.flushes[0] if self.flushes else math.inf
            update = self.updates[0][0] if self.updates else math.inf
            first = min(flush, update, tick)
            if first > due or first >= until:
                return
            if flush == first:
                self.flushes.pop(0)
                self.flush()
            elif update == first:
                moment, document = self.updates.pop(0)
                self.updated[document] = moment
            else:
                self.ticks += 1
                if self.knobs.warmup_ratio > 0:
                    self.tick(tick)

    def step(self, duration: float) -> ReferenceWindow:
        begin, until = self.now, self.now + duration
        while True:
            due = float(self.trace.time[self.row]) if self.row < len(self.trace) else math.inf
            self.events(due, until)
            if due >= until:
                break
            self.request(self.row)
            self.row += 1
        window, self.window, self.now = self.window, ReferenceWindow(), until
        for call in self.calls:
            window.running += max(0.0, min(call.finish, until) - max(call.start, begin)) / duration
            window.waiting += max(0.0, min(call.start, until) - max(call.arrival, begin)) / duration
        window.resident = sum(size for size, _ in self.store.values())
        return window

    def quantile(self, window: ReferenceWindow, share: float) -> float:
        return float(np.quantile(window.latency, share)) if window.latency else math.nan
