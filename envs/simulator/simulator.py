"""One arm of the cache in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from envs.live_signals import regret
from envs.objective import Usage
from envs.signals import ArmSignals
from envs.simulator import kernel as k
from envs.simulator.config import SimConfig
from envs.simulator.prepared import prepare
from envs.workloads.trace import Trace
from serving.ghost import Ghost
from serving.knobs import Knobs


@dataclass(frozen=True)
class Window:
    """What one step of the simulator gives.

    Attributes:
        signals: The arm's signals, as the tuner sees a live arm's.
        usage: What the window used, ready to be priced; ``change_steps`` is the distance of the knobs from the last window's.
        done: Whether the trace has come to its end.
    """

    signals: ArmSignals
    usage: Usage
    done: bool


class CacheSimulator:
    """Replays a trace through one arm of the cache, window by window.

    The rules are the gateway's: byte-weighted LRU over ``cache_size``, a memory tier of ``l1_share`` of it over the same
    accesses, the TTL decided at read time, warm-up rounds, a flush that spares the hot set; ``tests/contract`` holds the two to
    each other. Simplifications, all on purpose:

    * An answer is in the cache from the moment of the miss on (the gateway writes it when the upstream has answered), so a
      request that arrives meanwhile is a hit. The same holds for refreshes, which so rank by recency in the plan's order.
    * A semantic trace runs on its exact keys: answers by meaning are not simulated.
    * A latency belongs to the window in which the request arrived.
    * ``gpu_cache_usage`` is the mean share of busy slots; ``upstream_running``, ``upstream_waiting`` are means over the window.
    * Refreshes take slots of the upstream like misses, in the order of their start.

    Args:
        trace: The workload. Its prepared form is kept with it, so that further simulators on it start at once.
        config: What stays fixed.
        knobs: The first setting.
        start: Number of the request at which the clock starts; earlier ones never happened.
        seed: Chooses the ghost's sample; nothing else is random.
        warm_from: If given, requests ``warm_from`` to ``start`` run first, under ``knobs``, and are not reported.

    Raises:
        ValueError: If ``start`` or ``warm_from`` is not a request of the trace.
    """

    def __init__(
        self, trace: Trace, config: SimConfig, knobs: Knobs, *, start: int = 0, seed: int = 0, warm_from: int | None = None
    ) -> None:
        if not 0 <= start <= len(trace) or (warm_from is not None and not 0 <= warm_from <= start):
            raise ValueError(
                f"simulator: start, warm_from: expected 0 <= warm_from <= start <= {len(trace)} requests, "
                f"got start {start!r}, warm_from {warm_from!r}"
            )
        self.trace = trace
        self.config = config
        self._prepared = prepare(trace)
        first = start if warm_from is None else warm_from
        self._now = self._time_of(first)
        self._state = _new_state(self._prepared.keys, config, first, self._now)
        self._waiting: npt.NDArray[np.float64] = np.empty(0)
        self._ghost = (
            Ghost(
                config.space.sizes,
                config.space.ttls,
                max_keys=config.ghost_keys,
                salt=seed,
                staleness_half_life=config.staleness_half_life,
                ttl_jitter=config.ttl_jitter,
            )
            if config.ghost_keys
            else None
        )
        self._knobs = self._priced = knobs
        self._refreshes = 0
        self.apply(knobs)
        if warm_from is not None and start > warm_from:
            self.step(self._time_of(start) - self._now)

    @property
    def now(self) -> float:
        """The trace's clock, seconds."""
        return self._now

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""
        return self._knobs

    @property
    def position(self) -> int:
        """Number of the next request."""
        return int(self._state.ints[k.POSITION])

    @property
    def resident(self) -> dict[str, tuple[int, int]]:
        """Entries and bytes by tier."""
        ints = self._state.ints
        return {
            "memory": (int(ints[k.MEMORY_ENTRIES]), int(ints[k.MEMORY_BYTES])),
            "redis": (int(ints[k.STORE_ENTRIES]), int(ints[k.STORE_BYTES])),
        }

    @property
    def refreshes(self) -> int:
        """Entries refreshed in the last window."""
        return self._refreshes

    def apply(self, knobs: Knobs) -> int:
        """Put knobs into effect; shrinking evicts at once, oldest first.

        Returns:
            Entries evicted from the store.
        """
        self._knobs = knobs
        params = self._state.params
        params[k.BUDGET] = knobs.cache_size
        params[k.MEMORY_BUDGET] = int(knobs.cache_size * self.config.l1_share)
        params[k.TTL] = knobs.ttl
        params[k.WARMUP] = knobs.warmup_ratio
        return int(k.trim(self._state))

    def flush(self) -> int:
        """Remove every entry; the hot set stays, so that warm-up can bring back what is hot.

        Returns:
            Entries removed from the store.
        """
        if self._ghost is not None:
            self._ghost.flush()
        return int(k.empty(self._state))

    def step(self, duration: float) -> Window:
        """Run the requests that arrive in the next ``duration`` seconds.

        A window may be empty: then what has no value without requests is NaN. Past the trace's end all windows are.

        Raises:
            ValueError: If ``duration`` is not a positive, finite number of seconds.
        """
        if not 0 < duration < math.inf:
            raise ValueError(f"simulator: duration: expected finite seconds > 0, got {duration!r}")
        state, columns = self._state, self._prepared.columns
        begin, until = self._now, self._now + duration
        first = self.position
        count = int(np.searchsorted(columns.time, until, side="left")) - first
        latency, served = np.empty(max(count, 0)), np.empty(max(count, 0), np.int64)
        # Room for every call that may come to wait: one per request, and as many refreshes as the token bucket allows.
        refreshes = math.ceil(state.params[k.BURST] + state.params[k.REFRESH_RATE] * (duration + state.params[k.PERIOD])) + 1
        starts = np.concatenate([self._waiting, np.empty(max(count, 0) + refreshes)])
        k.run(state, columns, starts, latency, served, begin, until)
        self._waiting = starts[: state.ints[k.PENDING]].copy()
        self._now = until
        if self._ghost is not None and count > 0:
            self._ghost.access_many(self._prepared.key[first : first + count], served, columns.time[first : first + count])
        signals = self._signals(duration, latency)
        steps = self.config.space.to_steps(self._knobs) - self.config.space.to_steps(self._priced)
        usage = signals.usage(self._knobs.cache_size, float(np.linalg.norm(steps)))
        self._priced = self._knobs
        self._refreshes = int(state.ints[k.REFRESHES])
        # Counters start anew here, not in the next step: what is evicted by a smaller budget belongs to the next window.
        state.ints[k.FIRST_COUNTER :] = 0
        state.floats[k.FIRST_SUM :] = 0.0
        return Window(signals, usage, self.position >= len(columns.time))

    def clone(self) -> CacheSimulator:
        """Return an independent copy that continues from here."""
        twin = object.__new__(CacheSimulator)
        twin.__dict__.update(self.__dict__)
        twin._state = k.State._make(array.copy() for array in self._state)
        twin._waiting = self._waiting.copy()
        twin._ghost = None if self._ghost is None else self._ghost.clone()
        return twin

    def _time_of(self, row: int) -> float:
        time = self._prepared.columns.time
        if row < len(time):
            return float(time[row]) if row else 0.0
        return float(time[-1]) if len(time) else 0.0

    def _signals(self, duration: float, latency: npt.NDArray[np.float64]) -> ArmSignals:
        ints, floats = self._state.ints, self._state.floats
        requests, hits = len(latency), int(ints[k.MEMORY_HITS] + ints[k.STORE_HITS])
        misses = int(ints[k.MISSES])
        p50, p99 = np.quantile(latency, (0.5, 0.99)) if requests else (math.nan, math.nan)
        seen = self._ghost.take() if self._ghost is not None else None
        running = float(floats[k.BUSY_SECONDS]) / duration
        signals = ArmSignals(
            arm=self.config.arm,
            at=self._now,
            window=duration,
            requests=float(requests),
            qps=requests / duration,
            hit_ratio=_ratio(hits, requests),
            hit_ratio_by_tier={
                "memory": _ratio(int(ints[k.MEMORY_HITS]), requests),
                "redis": _ratio(int(ints[k.STORE_HITS]), requests),
            },
            p50=float(p50),
            p99=float(p99),
            latency_sum=float(latency.sum()),
            hit_latency=_ratio(float(floats[k.HIT_SECONDS]), hits),
            miss_latency=_ratio(float(floats[k.MISS_SECONDS]), misses),
            resident_bytes=float(ints[k.STORE_BYTES]),
            evictions=float(ints[k.EVICTIONS]),
            expirations=float(ints[k.EXPIRATIONS]),
            stale_hits=float(floats[k.STALE]),
            input_tokens=float(ints[k.INPUT]),
            output_tokens=float(ints[k.OUTPUT]),
            refresh_input_tokens=float(ints[k.REFRESH_INPUT]),
            refresh_output_tokens=float(ints[k.REFRESH_OUTPUT]),
            upstream_running=running,
            upstream_waiting=float(floats[k.WAIT_SECONDS]) / duration,
            gpu_cache_usage=running / self.config.upstream.slots,
            entropy=seen.entropy if seen else math.nan,
            drift=seen.drift if seen else math.nan,
            ghost=seen.curve if seen else None,
        )
        return replace(signals, regret=regret(signals, self._knobs, self.config.prices))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _new_state(keys: int, config: SimConfig, position: int, now: float) -> k.State:
    warmup = config.warmup
    ints = np.zeros(k.N_INTS, np.int64)
    ints[k.POSITION] = position
    floats = np.zeros(k.N_FLOATS)
    floats[k.NEXT_TICK] = now + warmup.period
    floats[k.BUCKET] = max(1.0, warmup.burst)
    floats[k.LANDMARK] = math.nan
    params = np.zeros(k.N_PARAMS)
    params[k.JITTER] = config.ttl_jitter
    params[k.HALF_LIFE] = config.staleness_half_life
    params[k.MEMORY_LATENCY], params[k.STORE_LATENCY] = config.memory_latency, config.store_latency
    params[k.TTFT], params[k.TPOT] = config.upstream.ttft, config.upstream.tpot
    params[k.CONTENTION] = config.upstream.contention
    params[k.HOT_CAPACITY], params[k.HOT_HALF_LIFE] = warmup.capacity, warmup.half_life
    params[k.MIN_SCORE], params[k.PERIOD] = warmup.min_score, warmup.period
    params[k.REFRESH_AHEAD] = warmup.refresh_ahead
    params[k.REFRESH_RATE], params[k.BURST] = warmup.refreshes_per_second, max(1.0, warmup.burst)
    return k.State(
        links=np.zeros((keys + 1, 4), np.int32),
        entry=np.zeros((keys + 1, 5), np.int64),
        written=np.zeros(keys + 1),
        weight=np.zeros(keys + 1),
        hot=np.zeros(2 * warmup.capacity + 1, np.int32),
        busy=np.full(config.upstream.slots, now),
        refreshing=np.full(config.refreshes_inflight, now),
        ints=ints,
        floats=floats,
        params=params,
    )
