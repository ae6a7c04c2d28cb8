"""The memory tier that the processes of a node share: its speed beside Redis and diskcache, whom it evicts, how it recovers."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.memory_eviction import POLICIES, compare
from experiments.bench.memory_goals import held_to
from experiments.bench.memory_processes import (
    ARM,
    HandedOver,
    answer,
    forked,
    key,
    kill_amid_a_write,
    kills,
    quiet,
    readers,
    shared_memory,
)
from experiments.bench.result import BenchResult
from serving.redis_server import RedisServer, RedisServerError
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from serving.tiers.memory import MemoryTier

OURS, OWN, HANDED = (
    "cachepilot arena, written by another process",
    "cachepilot memory tier, own process",
    "arena, put by datagram",
)
REDIS, DISKCACHE = "redis-py, unix socket", "diskcache"
COMMAND = "cachepilot bench memory"
MIB = 1 << 20
BODY = 2048
RECOVERIES = 5

Get = Callable[[int], bool]
Put = Callable[[int], None]


def run(
    traces: Path,
    *,
    entries: int = 5_000,
    size: int = 1024 * MIB,
    rounds: int = 5,
    killed: int = 200,
    seconds: float = 0.5,
    say: Callable[[str], None] = lambda text: None,
) -> list[BenchResult]:
    """Measure the arena: latency beside the peers, reads by several processes, eviction on the traces, recovery; and the goals.

    What is compared takes turns, and of the rounds the median counts, so that a load that comes and goes spoils neither.

    Args:
        traces: Folder of the real traces; without them the table of evictions is empty.
        entries: Entries of 2 KB that are stored and read.
        size: Bytes of the arena.
        rounds: How often the contestants take turns.
        killed: Writers that are killed.
        seconds: Length of each measurement of throughput.
        say: Told what happens.
    """
    before = os.getloadavg()[0]
    times = latency(entries=entries, size=size, rounds=rounds, say=say)
    reading = throughput(entries=entries, size=size, rounds=rounds, seconds=seconds, say=say)
    evicting = eviction(traces, say=say)
    recovering = recovery(size=size, killed=killed, say=say)
    by_name = {row["what"]: row for row in times.rows}
    goals = held_to(
        COMMAND,
        f"{before:.1f} before and {os.getloadavg()[0]:.1f} after, on {len(os.sched_getaffinity(0))} processors",
        size=size,
        ours=by_name[OURS],
        redis=by_name.get(REDIS),
        diskcache=by_name.get(DISKCACHE),
        readers=reading.rows,
        evictions=evicting.rows,
        recovery={row["name"]: row["value"] for row in recovering.rows},
    )
    return [times, reading, evicting, recovering, goals]


def latency(
    *, entries: int = 5_000, size: int = 1024 * MIB, rounds: int = 5, say: Callable[[str], None] = lambda text: None
) -> BenchResult:
    """Time gets and puts of 2 KB, one after another in this thread, the contestants taking turns.

    Returns:
        Rows with ``what``, ``get_p50_us``, ``get_p99_us``, ``put_p50_us``, ``put_p99_us``: medians of the rounds' quantiles; and
        ``times_ours``, the P50 of a get over ours. The ratio is redis-py's; None without a Redis.
    """
    stored = [answer(number, 1, BODY) for number in range(entries)]
    order = np.random.default_rng(0).permutation(entries).tolist()
    quantiles: dict[str, list[dict[str, float | None]]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared_memory())))
        say("filling the contestants")
        contestants = _contestants(stack, folder, stored, size)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for name, (get, put) in contestants.items():
                gets, puts = [], []
                for index in order:
                    began = time.perf_counter_ns()
                    put(index)
                    puts.append(time.perf_counter_ns() - began)
                for index in order if get is not None else ():
                    assert get is not None
                    began = time.perf_counter_ns()
                    found = get(index)
                    gets.append(time.perf_counter_ns() - began)
                    if not found:
                        raise RuntimeError(f"bench memory: {name} did not have entry {index}")
                quantiles.setdefault(name, []).append({**_quantiles("get", gets), **_quantiles("put", puts)})
    rows: list[dict[str, Any]] = [
        {"what": name, **{column: _median([each[column] for each in of_rounds]) for column in of_rounds[0]}}
        for name, of_rounds in quantiles.items()
    ]
    by_name: Mapping[str, Mapping[str, Any]] = {row["what"]: row for row in rows}
    ours = by_name[OURS]["get_p50_us"]
    for row in rows:
        row["times_ours"] = None if row["get_p50_us"] is None else row["get_p50_us"] / ours
    note = (
        f"{entries:,} entries with a body of {BODY} bytes, medians of {rounds} rounds in turn, one thread; ours gives back whole "
        "entries, Redis and diskcache the bytes alone. The arena was filled, and is read, by different processes. 'By datagram' "
        "is the time of handing an entry to a writing process, which is not stored then."
    )
    for peer in (REDIS, DISKCACHE):
        if peer not in by_name:
            note += f" {peer} is not installed."
    return BenchResult("memory", rows, by_name[REDIS]["times_ours"] if REDIS in by_name else None, COMMAND, note)


def throughput(
    *,
    entries: int = 5_000,
    size: int = 1024 * MIB,
    rounds: int = 5,
    seconds: float = 0.5,
    say: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Count the gets of 1, 2 and 4 reading processes together, once of one arena and once of an arena for each.

    Returns:
        Rows with ``readers``; of all together in medians of the rounds ``gets_per_s`` and ``times_one`` (over those of one
        reader), ``gets_per_cpu_s`` (per second that a reader had a processor) and ``cpu_times_one``; ``own_gets_per_cpu_s`` the
        same where each has an arena of its own, and ``kept``: what of that they keep with one arena for all. The ratio is
        ``kept`` of the most readers.
    """
    counts = (1, 2, 4)
    measured: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        paths = [Path(folder) / f"arena-{number}" for number in range(max(counts))]
        for path in paths:
            tier = ArenaTier(path, size)
            tier.resize_now(ARM, size // 2)
            for number in range(entries):
                tier.put_now(ARM, answer(number, 1, BODY))
            tier.close_now()
        for round_ in range(rounds):
            say(f"readers, round {round_ + 1} of {rounds}")
            for count in counts:
                for shared in (True, False):
                    of_each = paths[:1] * count if shared else paths[:count]
                    measured.setdefault((count, shared), []).append(readers(of_each, size, entries, seconds))
    rows: list[dict[str, Any]] = []
    for count in counts:
        together, busy = (_middle([round_[part] for round_ in measured[count, True]]) for part in range(2))
        own = _middle([round_[1] for round_ in measured[count, False]])
        kept = [ours[1] / theirs[1] for ours, theirs in zip(measured[count, True], measured[count, False], strict=True)]
        rows.append({"readers": count, "gets_per_s": together, "gets_per_cpu_s": busy, "own_gets_per_cpu_s": own})
        rows[-1]["times_one"] = together / rows[0]["gets_per_s"]
        rows[-1]["cpu_times_one"] = busy / rows[0]["gets_per_cpu_s"]
        rows[-1]["kept"] = _middle(kept)
    note = (
        f"{len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}; medians of {rounds} rounds of {seconds:g} s. "
        "Readers share no lock. In elapsed time they share the processors with each other and with all else that runs, and per "
        "second of processor time still its caches: so as many processes of which each reads an arena of its own are measured in "
        "turn, and 'kept' is what one arena for all leaves of their speed."
    )
    return BenchResult("memory, readers", rows, rows[-1]["kept"], COMMAND, note)


def eviction(traces: Path, *, say: Callable[[str], None] = lambda text: None) -> BenchResult:
    """Compare the policies on the traces; the ratio is the smallest, over the traces, of CLOCK's mean hit ratio over LRU's."""
    rows = compare(traces, say=say)
    ratios: dict[str, dict[str, float]] = {}
    for trace in dict.fromkeys(row["trace"] for row in rows):
        of_it = [row for row in rows if row["trace"] == trace]
        means = {name: float(np.mean([row[name] for row in of_it])) for name in POLICIES}
        ratios[trace] = {name: means[name] / means["LRU"] for name in POLICIES}
    worst = min((row["CLOCK"] - row["LRU"] for row in rows), default=0.0)
    note = (
        "Hit ratios under budgets in shares of all bytes that a trace asks for; traces in which nothing recurs are left out. "
        "Over LRU, by mean over the budgets: "
        + "; ".join(f"{trace} " + ", ".join(f"{name} {each[name]:.2f}" for name in POLICIES) for trace, each in ratios.items())
        + f". The arena's is CLOCK: at its worst budget {worst * 100:+.2f} percentage points from LRU."
    )
    least = min((each["CLOCK"] for each in ratios.values()), default=None)
    return BenchResult("memory, eviction", rows, least, COMMAND, note)


def recovery(*, size: int = 1024 * MIB, killed: int = 200, say: Callable[[str], None] = lambda text: None) -> BenchResult:
    """Make, fill, open and repair an arena, and kill writers at random moments.

    Returns:
        Rows with ``what`` (in words), ``name`` and ``value``. No ratio.
    """
    rows: list[dict[str, Any]] = []

    def found(what: str, name: str, value: float) -> None:
        rows.append({"what": what, "name": name, "value": value})

    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder:
        path = Path(folder) / "arena"
        began = time.perf_counter()
        tier = ArenaTier(path, size)
        found(f"make an arena of {size // MIB} MiB, ms", "make_ms", (time.perf_counter() - began) * 1e3)
        tier.resize_now(ARM, size)
        count = int(size * 0.8 / (BODY + 160))
        say(f"filling it with {count:,} entries")
        template = answer(0, 1, BODY)
        for number in range(count):
            tier.put_now(ARM, Entry(key(number), template.body, 1.0))
        began = time.perf_counter()
        other = ArenaTier(path, size)
        opened = (time.perf_counter() - began) * 1e3
        found(f"open it with {tier.stats_now(ARM).entries:,} entries, ms", "open_ms", opened)
        times = []
        for number in range(RECOVERIES):
            say(f"killing a writer of {count:,} entries, {number + 1} of {RECOVERIES}")
            kill_amid_a_write(path, size, key(0))
            began, busy = time.perf_counter(), time.process_time()
            with quiet():
                other.put_now(ARM, template)
            times.append(((time.perf_counter() - began) * 1e3, (time.process_time() - busy) * 1e3))
        found("first write after kill -9 amid a write, repair included, ms", "recover_ms", _middle([each for each, _ in times]))
        found("its processor time, ms", "recover_cpu_ms", _middle([each for _, each in times]))
        if other.repairs != RECOVERIES or other.stats_now(ARM).entries < count:
            raise RuntimeError(f"bench memory: expected {RECOVERIES} repairs that lose nothing, got {other.repairs}")
        other.close_now()
        tier.close_now()
    say("killing writers")
    for name, value in kills(killed, say=say).items():
        found(name.replace("_", " "), name, value)
    note = (
        "Writers are killed while they put, delete, renew, resize, flush, grow the file and repair what the one before left. "
        "'Amid a write' counts those that held the right to write, 'repairs' those that were done to the end."
    )
    return BenchResult("memory, recovery", rows, None, COMMAND, note)


def _contestants(stack: contextlib.ExitStack, folder: Path, stored: list[Entry], size: int) -> dict[str, tuple[Get | None, Put]]:
    path = folder / "arena"
    arena = ArenaTier(path, size)
    stack.callback(arena.close_now)
    arena.resize_now(ARM, size // 2)

    def fill(connection: Any) -> None:
        writer = ArenaTier(path, size)
        for entry in stored:
            writer.put_now(ARM, entry)
        connection.send(True)

    _, connection = forked(fill)
    connection.recv()
    memory = MemoryTier()
    memory.resize_now(ARM, size)
    keys = [entry.key for entry in stored]
    # Others than those that are read, which stay what the other process wrote.
    fresh = [answer(len(stored) + number, 1, BODY) for number in range(len(stored))]
    for entry in stored:
        memory.put_now(ARM, entry)
    second = ArenaTier(path, size)
    stack.callback(second.close_now)
    handed = stack.enter_context(HandedOver(path, size))
    result: dict[str, tuple[Get | None, Put]] = {
        OURS: (
            lambda index: arena.get_now(ARM, keys[index]) is not None,
            lambda index: _nothing(second.put_now(ARM, fresh[index])),
        ),
        OWN: (
            lambda index: memory.get_now(ARM, keys[index]) is not None,
            lambda index: _nothing(memory.put_now(ARM, fresh[index])),
        ),
        HANDED: (None, lambda index: handed.hand(fresh[index])),
    }
    with contextlib.suppress(RedisServerError):
        import redis

        server = stack.enter_context(RedisServer())
        client = redis.Redis.from_url(server.url)
        stack.callback(client.close)
        for entry in stored:
            client.set(entry.key, entry.body)
        result[REDIS] = (
            lambda index: client.get(keys[index]) is not None,
            lambda index: _nothing(client.set(fresh[index].key, fresh[index].body)),
        )
    with contextlib.suppress(ImportError):
        diskcache: Any = importlib.import_module("diskcache")
        disk = stack.enter_context(diskcache.Cache(str(folder / "diskcache"), eviction_policy="least-recently-stored"))
        for entry in stored:
            disk.set(entry.key, entry.body)
        result[DISKCACHE] = (
            lambda index: disk.get(keys[index]) is not None,
            lambda index: _nothing(disk.set(fresh[index].key, fresh[index].body)),
        )
    return result


def _nothing(result: object) -> None:
    """Forget the result."""


def _quantiles(name: str, nanoseconds: list[int]) -> dict[str, float | None]:
    if not nanoseconds:
        return {f"{name}_p50_us": None, f"{name}_p99_us": None}
    values = np.array(nanoseconds) / 1e3
    return {f"{name}_p50_us": float(np.quantile(values, 0.5)), f"{name}_p99_us": float(np.quantile(values, 0.99))}


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return _middle(there) if there else None


def _middle(values: Sequence[float]) -> float:
    return float(np.median(values))
