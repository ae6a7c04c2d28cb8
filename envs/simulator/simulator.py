"""One arm of the cache in virtual time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from envs.live_signals import regret
from envs.objective import Usage
from envs.signals import ArmSignals
from envs.simulator import kernel
from envs.simulator import state as k
from envs.simulator.clock import close_ranks
from envs.simulator.config import SimConfig
from envs.simulator.hot_set import count_hot
from envs.simulator.measure import measure
from envs.simulator.prepared import Numberings, PreparedTrace, number, prepare
from envs.workloads.trace import Trace
from serving.ghost import Ghost, GhostWindow
from serving.ghost_kernel import jitter_units
from serving.knobs import Knobs


@dataclass(frozen=True)
class Window:
    """What one step of the simulator gives.

    Attributes:
        signals: The arm's signals, as the tuner sees a live arm's.
        usage: What the window used, ready to be priced; ``change_steps`` is the distance of the knobs from the last window's.
        done: Whether the trace has come to its end.
        refreshes: Entries refreshed in the window.
        byte_hit_ratio: Bytes of the entries that answered over the bytes of all requests' entries; NaN without requests.
    """

    signals: ArmSignals
    usage: Usage
    done: bool
    refreshes: int = 0
    byte_hit_ratio: float = math.nan


class GhostSource(Protocol):
    """Whose ghost another simulator may follow."""

    def seen_at(self, now: float) -> GhostWindow | None:
        """Return the window that ends at a time, seconds."""
        ...


class CacheSimulator:
    """Replays a trace through one arm of the cache, window by window.

    The rules are the gateway's: byte-weighted LRU over ``cache_size``, a memory tier of ``l1_share`` of it that evicts as
    ``memory_eviction`` says (without a store, that alone), the TTL decided at read time, warm-up rounds, a flush that spares the
    hot set; ``tests/contract`` holds the two to each other. Beyond them, what a trace may say of its own:

    * ``chain``: a prefix block is answered only if the one before it in its request was; else it is made and stored anew.
    * ``group`` and ``match_probability``: a request whose own key has no live entry is answered by a live entry of its group (the
      one written last) with that probability, drawn once for each request; nothing is stored under its own key then.
    * ``update_time``: what was written before its document changed is stale with certainty; other answers by their age.
    * ``flush_time``: everything is removed at once; the hot set stays.

    An entry larger than the budget is not stored and pushes nothing out; with a budget of 0 bytes every request is a miss.
    Simplifications, all on purpose:

    * An answer is in the cache from the moment of the miss on (the gateway writes it when the upstream has answered), so a
      request that arrives meanwhile is a hit. The same holds for refreshes, which so rank by recency in the plan's order.
    * A latency belongs to the window in which the request arrived.
    * ``gpu_cache_usage`` is the mean share of busy slots; ``upstream_running``, ``upstream_waiting`` are means over the window.
    * Refreshes take slots of the upstream like misses, in the order of their start.
    * A hit by meaning is stale by the document of the request, not of the entry that answers.

    Args:
        trace: The workload. Its prepared form is kept with it, so that further simulators on it start at once.
        config: What stays fixed.
        knobs: The first setting.
        start: Number of the request at which the clock starts; earlier ones never happened.
        seed: Chooses the ghost's sample; nothing else is random.
        warm_from: If given, requests ``warm_from`` to ``start`` run first, under ``knobs``, and are not reported.
        clock: Time at which the clock starts, seconds: after the request before ``start`` and not after that itself. Default:
            the time of the first request that runs.

    Raises:
        ValueError: If ``start`` or ``warm_from`` is not a request of the trace, or ``clock`` is not where it may be.
    """

    def __init__(
        self,
        trace: Trace,
        config: SimConfig,
        knobs: Knobs,
        *,
        start: int = 0,
        seed: int = 0,
        warm_from: int | None = None,
        clock: float | None = None,
    ) -> None:
        if not 0 <= start <= len(trace) or (warm_from is not None and not 0 <= warm_from <= start):
            raise ValueError(
                f"simulator: start, warm_from: expected 0 <= warm_from <= start <= {len(trace)} requests, "
                f"got start {start!r}, warm_from {warm_from!r}"
            )
        self.trace = trace
        self.config = config
        self._prepared = prepare(trace)
        self._own: Numberings | None = None
        first = start if warm_from is None else warm_from
        self._now = self._time_of(first) if clock is None else self._checked_clock(clock, first)
        self._state = _new_state(self._prepared, config, trace, first, self._now)
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
        self._leader: GhostSource | None = None
        self._seen: GhostWindow | None = None
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
        """Number of the next request, among those that :meth:`extend` has not dropped."""
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
            Entries that the cache has lost by it.
        """
        self.set_knobs(knobs)
        return int(kernel.trim(self._state))

    def set_knobs(self, knobs: Knobs) -> None:
        """Put knobs into effect, but leave it to the next step to evict: for :class:`envs.simulator.batch.SimulatorBatch`."""
        self._knobs = knobs
        params = self._state.params
        params[k.BUDGET] = knobs.cache_size
        params[k.MEMORY_BUDGET] = int(knobs.cache_size * self.config.l1_share)
        params[k.TTL] = knobs.ttl
        params[k.WARMUP] = knobs.warmup_ratio

    def flush(self) -> int:
        """Remove every entry; the hot set stays, so that warm-up can bring back what is hot.

        Returns:
            How many there were.
        """
        if self._ghost is not None:
            self._ghost.flush()
        return int(kernel.empty(self._state))

    def follow(self, leader: GhostSource) -> None:
        """Take the ghost's windows from another simulator from now on, which is stepped first and by the same durations.

        The ghost depends on the requests alone, not on the knobs: two caches on the same requests need one, or a
        :class:`envs.simulator.tape.GhostTape`.
        """
        self._leader, self._ghost = leader, None

    def seen_at(self, now: float) -> GhostWindow | None:
        """Return the ghost's last window; None without a ghost, and before the first.

        Args:
            now: Where whoever asks has come to, seconds.

        Raises:
            ValueError: If this simulator has not come as far.
        """
        if self._now != now:
            raise ValueError(f"simulator: follow: expected a leader at {now} s, it is at {self._now} s")
        return self._seen

    def extend(self, more: Trace) -> None:
        """Append requests; those that have run are dropped, so that memory grows with the keys and not with the requests.

        Args:
            more: The next requests and events, on the same clock.

        Raises:
            ValueError: If a request or event comes before those that are already there, or the trace answers by meaning
                otherwise than the first one.
        """
        columns, state = self._prepared.columns, self._state
        last = max(self._now, float(columns.time[-1]) if len(columns.time) else -math.inf)
        for what, moments in (("time", more.time), ("update_time", more.update_time), ("flush_time", more.flush_time)):
            least = last if what == "time" else self._now
            if len(moments) and moments[0] < least:
                raise ValueError(f"simulator: extend: {what}: expected seconds >= {least:g}, got {float(moments[0])!r}")
        if more.match_probability != self.trace.match_probability:
            raise ValueError(
                f"simulator: extend: match_probability: expected {self.trace.match_probability} as before, "
                f"got {more.match_probability}"
            )
        count_hot(state, columns)
        if self._own is None:
            self._own = self._prepared.numberings.copy()
        added = number(more, self._own)
        position = self.position
        count = len(columns.time)
        parts: dict[str, Any] = {}
        for name in k.Columns._fields:
            old, new = getattr(columns, name), getattr(added.columns, name)
            if name.startswith("update"):
                parts[name] = np.concatenate([old[state.ints[k.UPDATE] :], new])
            elif name == "flush_time":
                parts[name] = np.concatenate([old[state.ints[k.FLUSH] :], new])
            elif name in ("chain", "group", "document") and (len(old) != count or len(new) != len(more)):
                # One of the two has none of it, which stands for a column of zeros.
                sides = [
                    side if len(side) == length else np.zeros(length, np.int32)
                    for side, length in ((old, count), (new, len(more)))
                ]
                parts[name] = np.concatenate([sides[0][position:], sides[1]]) if len(old) or len(new) else old
            else:
                parts[name] = np.concatenate([old[position:], new])
        self._prepared = PreparedTrace(k.Columns(**parts), np.concatenate([self._prepared.key[position:], added.key]), self._own)
        for pointer in (k.POSITION, k.HOT_ROW, k.UPDATE, k.FLUSH):
            state.ints[pointer] = 0
        self._state = _grown(state, self._prepared, self.config)

    def step(self, duration: float) -> Window:
        """Run the requests that arrive in the next ``duration`` seconds.

        A window may be empty: then what has no value without requests is NaN. Past the trace's end all windows are.

        Raises:
            ValueError: If ``duration`` is not a positive, finite number of seconds.
        """
        if not 0 < duration < math.inf:
            raise ValueError(f"simulator: duration: expected finite seconds > 0, got {duration!r}")
        first, until = self.position, self._now + duration
        self.make_room(*kernel.room(self._state, self._prepared.columns, until))
        kernel.run(self._state, self._prepared.columns, self._now, until)
        measured = np.empty(len(k.SIGNALS))
        measure(self._state, duration, measured)
        self.advance(until)
        seen = self.observe(first)
        return self._window(duration, dict(zip(k.SIGNALS, measured.tolist(), strict=True)), seen)

    def clone(self) -> CacheSimulator:
        """Return an independent copy that continues from here."""
        twin = object.__new__(CacheSimulator)
        twin.__dict__.update(self.__dict__)
        twin._state = k.State._make(array.copy() for array in self._state)
        twin._ghost = None if self._ghost is None else self._ghost.clone()
        twin._own = None if self._own is None else self._own.copy()
        return twin

    # -- the parts of a step, for SimulatorBatch ----------------------------------------------------------------------------

    @property
    def state(self) -> k.State:
        """What the kernel remembers."""
        return self._state

    @property
    def columns(self) -> k.Columns:
        """What the kernel reads."""
        return self._prepared.columns

    def make_room(self, starts: int, misses: int) -> bool:
        """See that the kernel has room for so many calls that wait, and misses; whether :attr:`state` is another now."""
        state = self._state
        if starts <= len(state.starts) and misses <= len(state.misses):
            return False
        # Half as much again, so that windows of about the same length seldom need more.
        self._state = state._replace(
            starts=_longer(state.starts, starts + starts // 2), misses=np.empty(max(len(state.misses), misses + misses // 2))
        )
        return True

    def advance(self, until: float) -> None:
        """Note that the kernel has run up to ``until``."""
        self._now = until

    def observe(self, first: int) -> GhostWindow | None:
        """Show the ghost the requests from ``first`` on that have run; return its window, or that of the one it follows.

        Raises:
            ValueError: If the simulator that is followed has not come as far.
        """
        if self._leader is not None:
            self._seen = self._leader.seen_at(self._now)
        elif self._ghost is not None:
            columns, last = self._prepared.columns, self.position
            begin = first
            # What a flush of the trace's own emptied, the ghost's caches lose at the same moment.
            flushes = columns.flush_time[: self._state.ints[k.FLUSH]]
            for moment in flushes[flushes >= (columns.time[first] if first < len(columns.time) else math.inf)]:
                end = int(np.searchsorted(columns.time[:last], moment, side="left"))
                if end >= begin:
                    self._show(begin, end)
                    self._ghost.flush()
                    begin = end
            self._show(begin, last)
            self._seen = self._ghost.take()
        return self._seen

    def _settle(self) -> float:
        """Return the distance of the knobs from those of the last window, grid steps, and take them as that window's."""
        if self._knobs is self._priced:
            return 0.0
        space = self.config.space
        steps = space.to_steps(self._knobs) - space.to_steps(self._priced)
        self._priced = self._knobs
        return float(np.linalg.norm(steps))

    def _show(self, first: int, last: int) -> None:
        columns = self._prepared.columns
        if self._ghost is not None and last > first:
            sizes = columns.size[first:last].astype(np.int64)
            self._ghost.access_many(self._prepared.key[first:last], sizes, columns.time[first:last])

    def _checked_clock(self, clock: float, first: int) -> float:
        time = self._prepared.columns.time
        low = float(time[first - 1]) if first else -math.inf
        high = float(time[first]) if first < len(time) else math.inf
        if not (low <= clock <= high and math.isfinite(clock)):
            raise ValueError(f"simulator: clock: expected finite seconds from {low:g} to {high:g}, got {clock!r}")
        return clock

    def _time_of(self, row: int) -> float:
        time = self._prepared.columns.time
        if row < len(time):
            return float(time[row]) if row else 0.0
        return float(time[-1]) if len(time) else 0.0

    def _window(self, duration: float, measured: dict[str, float], seen: GhostWindow | None) -> Window:
        tiers = {tier: measured.pop(tier) for tier in ("memory", "redis", "vector")}
        if not self._state.params[k.MATCH] > 0.0:
            del tiers["vector"]
        refreshes, byte_hit_ratio = measured.pop("refreshes"), measured.pop("byte_hit_ratio")
        known: dict[str, Any] = dict(measured)
        signals = ArmSignals(
            arm=self.config.arm,
            at=self._now,
            window=duration,
            hit_ratio_by_tier=tiers,
            entropy=seen.entropy if seen else math.nan,
            drift=seen.drift if seen else math.nan,
            ghost=seen.curve if seen else None,
            **known,
        )
        usage = signals.usage(self._knobs.cache_size, self._settle())
        self._refreshes = int(refreshes)
        if seen is not None:
            signals = replace(signals, regret=regret(signals, self._knobs, self.config.prices))
        return Window(signals, usage, self.position >= len(self.columns.time), self._refreshes, byte_hit_ratio)


def _new_state(prepared: PreparedTrace, config: SimConfig, trace: Trace, position: int, now: float) -> k.State:
    warmup = config.warmup
    columns = prepared.columns
    ints = np.zeros(k.N_INTS, np.int64)
    ints[k.POSITION] = ints[k.HOT_ROW] = position
    # Events before the start never happened; one at the start's very moment does.
    ints[k.UPDATE] = np.searchsorted(columns.update_time, now, side="left") if now > 0 else 0
    ints[k.FLUSH] = np.searchsorted(columns.flush_time, now, side="left") if now > 0 else 0
    floats = np.zeros(k.N_FLOATS)
    floats[k.NEXT_TICK] = now + warmup.period
    floats[k.BUCKET] = max(1.0, warmup.burst)
    floats[k.LANDMARK] = math.nan
    params = np.zeros(k.N_PARAMS)
    params[k.JITTER] = config.ttl_jitter
    params[k.HALF_LIFE] = config.staleness_half_life
    params[k.MEMORY_LATENCY], params[k.STORE_LATENCY] = config.memory_latency, config.store_latency
    params[k.VECTOR_LATENCY] = config.semantic_latency
    params[k.TTFT], params[k.TPOT] = config.upstream.ttft, config.upstream.tpot
    params[k.CONTENTION] = config.upstream.contention
    params[k.HOT_CAPACITY], params[k.HOT_HALF_LIFE] = warmup.capacity, warmup.half_life
    params[k.MIN_SCORE], params[k.PERIOD] = warmup.min_score, warmup.period
    params[k.REFRESH_AHEAD] = warmup.refresh_ahead
    params[k.REFRESH_RATE], params[k.BURST] = warmup.refreshes_per_second, max(1.0, warmup.burst)
    params[k.MATCH] = trace.match_probability if config.semantic else 0.0
    params[k.CLOCK], params[k.ALONE] = config.memory_eviction == "clock", not config.store
    places = 2 * warmup.capacity + 1
    state = k.State(
        records=np.zeros(1, k.RECORD),
        names=np.zeros(1, np.uint64),
        ring=np.zeros(1, np.int32),
        queue=np.zeros(1, np.int32),
        kin=np.zeros((1, 3), np.int32),
        newest=np.zeros(1, np.int32),
        updated=np.full(1, -math.inf),
        asked=np.zeros((1, 4), np.int32),
        weight_of=np.zeros(1),
        hot=np.zeros(places, np.int32),
        weight=np.zeros(places),
        changed=np.zeros(places, np.int32),
        gone=np.zeros(places, np.int32),
        rank=np.zeros(places, np.int32),
        spare=np.zeros(places, np.int32),
        spare_weight=np.zeros(places),
        starts=np.empty(0),
        misses=np.empty(0),
        busy=np.empty(config.upstream.slots),
        refreshing=np.full(config.refreshes_inflight, now),
        ints=ints,
        floats=floats,
        params=params,
    )
    return _grown(state, prepared, config)


def _grown(state: k.State, prepared: PreparedTrace, config: SimConfig) -> k.State:
    """Return a state with room for all that is numbered, and with the settings that depend on what a trace has."""
    numberings, columns, params = prepared.numberings, prepared.columns, state.params
    params[k.PREFIX] = config.prefix and len(columns.chain) > 0
    params[k.DOCUMENTS] = len(columns.document) > 0
    semantic = params[k.MATCH] > 0.0
    known, keys = len(state.names) - 1, numberings.keys.count
    arrays = state._asdict()
    if keys > known:
        if keys + 1 > len(state.records):
            # Twice the room there was, but for the first time: extending little by little must not copy each time.
            room = keys + 1 if not known else max(keys + 1, 2 * len(state.records))
            # First: it writes the new places into the records that are copied next.
            arrays["ring"] = np.zeros(1 << (2 * room).bit_length(), np.int32)
            kernel.compact(state, arrays["ring"])
            if config.memory_eviction == "clock":
                arrays["queue"] = np.zeros(len(arrays["ring"]), np.int32)
                close_ranks(state.records, state.queue, state.ints, arrays["queue"])
            for name in ("records", "weight_of", "asked") + (("kin",) if semantic else ()):
                arrays[name] = _longer(arrays[name], room)
        arrays["names"] = numberings.keys.names.copy()
        arrays["records"]["unit"][known + 1 : keys + 1] = jitter_units(numberings.keys.names[known + 1 :].copy())
    arrays["newest"] = _longer(state.newest, numberings.groups.count + 1)
    arrays["updated"] = _longer(state.updated, numberings.documents.count + 1, -math.inf)
    return k.State(**arrays)


def _longer(array: npt.NDArray[Any], length: int, fill: float = 0) -> npt.NDArray[Any]:
    if length <= len(array):
        return array
    longer = np.zeros((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    if fill:
        longer[len(array) :] = fill
    return longer
