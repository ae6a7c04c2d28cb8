"""The simulator beside the running gateway: one trace through Ray Serve, a real Redis and the simulated model, and through it.

The gateway runs first, by the wall clock. Its access log then says when each request really arrived; the simulator is given
those times, the knobs and the flush at the moments at which they took effect, and the model's latency, and has to hit and hold
the same. Windows end when every request of theirs is answered, and knobs change between two windows, once every replica has said
that it runs them: so nothing is under way when a setting changes.

A log of whole seconds, run thousands of times faster, is a row of instants with many requests each; in what order a burst of
different keys is served no two systems agree, and under a small budget LRU then evicts differently. :func:`paced` keeps the
order.

What is left between the two, and why: an answer is in the simulator's cache from its miss on, in the gateway's when the model
has answered, so recency and age differ by a latency; of requests of one key that arrive together the gateway may answer all from
Redis, the simulator only the first; the gateway's rounds of warm-up are as late as its event loop, and learn of an access by the
replica's next flush of its counters; a refresh asks for the key's first request in the gateway, for its last in the simulator,
which differ in length where a trace's sizes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import urllib.request
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from envs.simulator import CacheSimulator, SimConfig
from envs.workloads.entry import metadata_bytes
from envs.workloads.trace import Trace
from experiments.access import read_access_log
from experiments.replay import replay
from serving.app import start
from serving.keys import fingerprint, key64
from serving.knobs import Knobs
from serving.llm_sim import LlmSimProcess
from serving.redis_config_store import RedisConfigStore
from serving.redis_server import RedisServer
from serving.settings import GatewaySettings, LlmSimSettings
from serving.tiers.redis import RedisTier

ARM = "fidelity"
_DEADLINE = 30.0
"""Seconds for the replicas to take new knobs, and for the access log to be written."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Some windows under the same knobs.

    Attributes:
        windows: Number of windows.
        knobs: In force from before the first on; ``ttl`` in seconds of the run.
        flush: Whether the cache is emptied before the first.
    """

    windows: int
    knobs: Knobs
    flush: bool = False


@dataclass(frozen=True)
class _Border:
    """What took effect between two windows, and when (seconds since the epoch)."""

    at: float
    knobs: Knobs
    flushed_at: float | None


@dataclass(frozen=True)
class _Measured:
    """One window of the gateway: the rows of the trace, when it ended, bytes in the store, calls of the model."""

    rows: range
    border: _Border | None
    ended_at: float
    bytes: int
    entries: int
    calls: int


def paced(trace: Trace, seconds: float, *, even: float = 0.5) -> Trace:
    """Return the trace compressed to ``seconds``, requests of one instant sent one after another.

    Args:
        trace: The workload.
        seconds: Its new length.
        even: Share of that length which is given out in equal steps, 0..1; the rest follows the trace's own gaps.
    """
    gaps = np.diff(trace.time, prepend=0.0)
    own = gaps / gaps.sum() if gaps.sum() > 0 else np.full(len(trace), 1.0 / len(trace))
    return replace(trace, time=np.cumsum(seconds * (even / len(trace) + (1.0 - even) * own)))


def compare_live(
    trace: Trace,
    phases: Sequence[Phase],
    *,
    seconds: float,
    max_inflight: int = 256,
    replicas: int = 1,
    model: LlmSimSettings | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> pd.DataFrame:
    """Start the whole data plane, replay the trace through it and through the simulator, and set the windows side by side.

    Everything is started here on loopback, with one arm, and ended here. Windows have equal numbers of requests.

    Args:
        trace: The workload; it is :func:`paced` to ``seconds``. Its requests must not depend on each other (``chain``).
        phases: What happens, in order.
        seconds: Length of the replay.
        max_inflight: Most requests under way at once. With 1 a request waits for the answer to the one before it, and nothing is
            left to the order in which the parts of a busy machine get their turn.
        replicas: Gateway replicas. They share one memory tier, an arena.
        model: The simulated model; None: a quick one, so that answers are in the cache before they are asked for again.
        say: Told what happens.

    Returns:
        One row per window: ``window``, ``ended`` (seconds from the start), ``requests``, ``cache_size``, ``ttl``,
        ``warmup_ratio``, ``flush``, and for each of ``hit_ratio``, ``memory``, ``redis`` (hit ratios by tier),
        ``refreshes``, ``entries``, ``resident_bytes`` a pair of columns ``<name>_simulator`` and ``<name>_gateway``.

    Raises:
        ValueError: If there are fewer requests than windows, or the trace has chains or events of its own.
        RuntimeError: If a request failed, or replicas or access log did not follow in time.
    """
    windows = sum(phase.windows for phase in phases)
    if not phases or min(phase.windows for phase in phases) < 1 or windows > len(trace):
        raise ValueError(f"live fidelity: phases: expected 1 to {len(trace)} windows in all and 1 in each, got {phases}")
    if trace.chain.any() or len(trace.flush_time) or len(trace.update_time):
        raise ValueError(
            f"live fidelity: trace {trace.name}: expected requests on their own and no events: the replay sends none"
        )
    model = model or LlmSimSettings(port=0, slots=256, ttft=0.002, tpot=0.0, contention=0.0)
    trace = paced(trace, seconds)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fidelity-")))
        redis = stack.enter_context(RedisServer())
        running = stack.enter_context(LlmSimProcess(model))
        settings = _settings(redis.url, running.base_url, folder, phases[0].knobs, replicas)
        say("starting the gateway on Ray Serve")
        gateway = stack.enter_context(start(settings))
        live = _Live(trace, settings, gateway.url, running, max_inflight, say)
        measured = asyncio.run(live.run(phases))
        log = read_access_log(folder)
    return _beside(trace, settings, model, measured, log)


def _settings(redis_url: str, base_url: str, folder: Path, knobs: Knobs, replicas: int) -> GatewaySettings:
    return GatewaySettings.model_validate(
        {
            "namespace": "fidelity",
            "redis_url": redis_url,
            "redis_deadline": 10.0,  # a timeout on a busy machine would be a miss that the simulator does not know
            "arms": {ARM: {"share": 1.0, "knobs": {**knobs.to_dict(), "ttl": knobs.ttl}}},
            "upstream": {"base_url": base_url},
            "ghost": {"enabled": False},
            "memory": {"path": str(folder / "arena")},
            # The token bucket sets the pace, which is the same for both, and not how quickly this machine refreshes.
            "warmup": {"period": 0.1, "refreshes_per_second": 40.0, "burst": 8, "max_inflight": 32},
            "replicas": replicas,
            "port": 0,
            "metrics_port": 0,
            "access_log": str(folder),
            "flush_interval": 0.1,
        }
    )


class _Live:
    """The replay through the gateway."""

    def __init__(
        self,
        trace: Trace,
        settings: GatewaySettings,
        url: str,
        model: LlmSimProcess,
        max_inflight: int,
        say: Callable[[str], None],
    ) -> None:
        self._trace, self._settings, self._url, self._model, self._say = trace, settings, url, model, say
        self._max_inflight = max_inflight
        self._version = 0

    async def run(self, phases: Sequence[Phase]) -> list[_Measured]:
        url, namespace = str(self._settings.redis_url), self._settings.namespace
        config, store = RedisConfigStore(url, namespace), RedisTier(url, namespace, read_deadline=_DEADLINE)
        edges = np.linspace(0, len(self._trace), sum(phase.windows for phase in phases) + 1).astype(int).tolist()
        measured: list[_Measured] = []
        try:
            for phase in phases:
                border: _Border | None = await self._change(phase, config, store)
                for _ in range(phase.windows):
                    number = len(measured)
                    self._say(f"window {number + 1} of {len(edges) - 1}")
                    rows = range(edges[number], edges[number + 1])
                    await self._replay(rows)
                    stats = await store.stats(ARM)
                    calls = await asyncio.to_thread(self._calls)
                    measured.append(_Measured(rows, border, time.time(), stats.bytes, stats.entries, calls))
                    border = None
        finally:
            await config.close()
            await store.close()
        return measured

    async def _change(self, phase: Phase, config: RedisConfigStore, store: RedisTier) -> _Border:
        """Put a phase's settings into effect; nothing is under way."""
        flushed_at = None
        if phase.flush:
            # The store tells the replicas, whose memory tiers follow; that they did so before they took the next version, which
            # comes over the same Redis later, is what waiting for the version is good for.
            await store.flush(ARM)
            flushed_at = time.time()
        written = await config.write(
            {ARM: phase.knobs}, expected_version=self._version, author="fidelity", reason="next phase", now=time.time()
        )
        self._version = written.version

        async def applied() -> bool:
            states = await config.applied()
            return len(states) == self._settings.replicas and all(state.version == written.version for state in states)

        await _until(applied, f"{self._settings.replicas} replicas to run version {written.version} of the knobs")
        return _Border(time.time(), phase.knobs, flushed_at)

    async def _replay(self, rows: range) -> None:
        part = self._trace.slice(rows.start, rows.stop)
        result = await replay(part, self._url, model=self._model.settings.model, max_inflight=self._max_inflight)
        if result.failed or len(result.requests) < len(part):
            failed = result.requests[result.requests["status"] != 200].head(3)
            raise RuntimeError(f"live fidelity: {result.failed} of {len(part)} requests failed:\n{failed}")
        folder = self._settings.access_log
        assert folder is not None

        lines = 0

        async def logged() -> bool:
            nonlocal lines
            lines = len(await asyncio.to_thread(read_access_log, folder))
            return lines >= rows.stop

        try:
            await _until(logged, f"{rows.stop} requests in the access log at {folder}")
        except RuntimeError as error:
            raise RuntimeError(f"{error}; it has {lines}") from error

    def _calls(self) -> int:
        with urllib.request.urlopen(self._model.metrics_url, timeout=10.0) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("vllm:request_success_total{"):
                    return int(float(line.rsplit(" ", 1)[1]))
        raise RuntimeError(f"live fidelity: no vllm:request_success_total at {self._model.metrics_url}")


def _beside(
    trace: Trace, settings: GatewaySettings, model: LlmSimSettings, measured: Sequence[_Measured], log: pd.DataFrame
) -> pd.DataFrame:
    """Run the simulator on what the gateway met, and set the windows side by side."""
    rules, warmup = settings.rules, settings.warmup
    config = SimConfig(
        space=settings.space.space(),
        l1_share=rules.l1_share,
        memory_eviction="clock" if settings.memory.shared else "lru",
        ttl_jitter=rules.ttl_jitter,
        upstream=model.upstream_model(),
        warmup=warmup.rules(),
        refreshes_inflight=warmup.max_inflight,
        ghost_keys=0,
        arm=ARM,
    )
    first = measured[0].border
    assert first is not None
    origin = first.at
    arrived, keys, order = _arrivals(trace, settings.namespace, model.model, log)
    columns = {name: getattr(trace, name)[order] for name in ("size", "group", "input_tokens", "output_tokens", "prompt_id")}
    # The gateway keeps the model's name with each entry, which a trace knows nothing of.
    columns["size"] = columns["size"] + metadata_bytes(model.model)
    met = replace(trace, **columns, time=np.maximum(arrived - origin, 0.0), key=keys)
    simulator = CacheSimulator(met, config, first.knobs)
    rows, calls = [], 0
    for number, window in enumerate(measured):
        border = window.border
        if border is not None:
            if border.flushed_at is not None:
                _advance(simulator, border.flushed_at - origin)
                simulator.flush()
            _advance(simulator, border.at - origin)
            simulator.apply(border.knobs)
            knobs = border.knobs
        signals = simulator.step(window.ended_at - origin - simulator.now).signals
        refreshes = simulator.refreshes
        part = log.iloc[window.rows.start : window.rows.stop]
        hits = part["outcome"].to_numpy() == "hit"
        tiers = part["tier"].to_numpy()[hits]
        if round(signals.requests) != len(part):
            raise RuntimeError(
                f"live fidelity: window {number}: {len(part)} requests were answered, "
                f"but {signals.requests:.0f} arrived within it"
            )
        missed = int(np.sum(~hits))
        asked, calls = window.calls - calls, window.calls
        simulated = {
            "hit_ratio": signals.hit_ratio,
            "memory": signals.hit_ratio_by_tier["memory"],
            "redis": signals.hit_ratio_by_tier["redis"],
            "refreshes": float(refreshes),
            "entries": float(simulator.resident["redis"][0]),
            "resident_bytes": signals.resident_bytes,
        }
        gateway = {
            "hit_ratio": float(hits.mean()),
            "memory": float(np.sum(tiers == "memory")) / len(part),
            "redis": float(np.sum(tiers == "redis")) / len(part),
            "refreshes": float(asked - missed),
            "entries": float(window.entries),
            "resident_bytes": float(window.bytes),
        }
        row: dict[str, float | int | bool] = {
            "window": number,
            "ended": window.ended_at - origin,
            "requests": len(part),
            "cache_size": knobs.cache_size,
            "ttl": knobs.ttl,
            "warmup_ratio": knobs.warmup_ratio,
            "flush": border is not None and border.flushed_at is not None,
        }
        for name, value in simulated.items():
            row[f"{name}_simulator"], row[f"{name}_gateway"] = value, gateway[name]
        rows.append(row)
    return pd.DataFrame(rows)


def _advance(simulator: CacheSimulator, until: float) -> None:
    if until > simulator.now:
        simulator.step(until - simulator.now)


def _arrivals(
    trace: Trace, namespace: str, model: str, log: pd.DataFrame
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint64], npt.NDArray[np.intp]]:
    """Match the lines of the access log to the rows of the trace.

    Requests of one key are taken to have arrived in the order in which they were sent.

    Returns:
        When each request arrived (seconds since the epoch), its 64-bit name, and its row, all in order of arrival.
    """
    waiting: dict[int, deque[int]] = defaultdict(deque)
    names: dict[str, int] = {}
    for row in range(len(trace)):
        text = trace.prompt(row)
        if text not in names:
            body = {"model": model, "messages": [{"role": "user", "content": text}]}
            names[text] = key64(fingerprint(body, namespace=namespace).key)
        waiting[names[text]].append(row)
    order = []
    for key in log["key"].to_numpy().tolist():
        if not waiting[key]:
            raise RuntimeError(f"live fidelity: the access log has a request of key {key:016x} that was not sent")
        order.append(waiting[key].popleft())
    return log["at"].to_numpy(np.float64), log["key"].to_numpy(np.uint64), np.array(order, np.intp)


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not await condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"live fidelity: waited {_DEADLINE:g} s for {what}")
        await asyncio.sleep(0.02)


def worst(table: pd.DataFrame, live: str = "gateway") -> tuple[float, float]:
    """Return the largest difference of a window in hit ratio (0..1), and the largest in bytes, relative to the live side's.

    Args:
        table: What :func:`compare_live` or :func:`experiments.fidelity.compare` returned.
        live: What the live side's columns end with.
    """
    ratio = (table["hit_ratio_simulator"] - table[f"hit_ratio_{live}"]).abs()
    held = table[f"resident_bytes_{live}"]
    size = (table["resident_bytes_simulator"] - held).abs() / held.clip(lower=1.0)
    return float(ratio.max()), float(size.max())
