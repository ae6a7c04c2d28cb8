"""The memory tier that the processes of a node share: its speed beside Redis and diskcache, whom it evicts, how it recovers."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.memory_eviction import POLICIES, compare
from experiments.bench.memory_processes import ARM, HandedOver, answer, forked, key, kills, readers
from experiments.bench.result import BenchResult
from serving.arena.layout import H_OWNER
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

Get = Callable[[int], bool]
Put = Callable[[int], None]


def run(
    traces: Path,
    *,
    entries: int = 5_000,
    size: int = 1024 * MIB,
    rounds: int = 3,
    killed: int = 200,
    seconds: float = 2.0,
    say: Callable[[str], None] = lambda text: None,
) -> list[BenchResult]:
    """Measure the arena: latency beside the peers, reads by several processes, eviction on the traces, recovery.

    Args:
        traces: Folder of the real traces; without them the table of evictions is empty.
        entries: Entries of 2 KB that are stored and read.
        size: Bytes of the arena.
        rounds: How often the contestants take turns.
        killed: Writers that are killed.
        seconds: Length of each measurement of throughput.
        say: Told what happens.
    """
    results = [latency(entries=entries, size=size, rounds=rounds, say=say)]
    results.append(throughput(entries=entries, size=size, seconds=seconds, say=say))
    results.append(eviction(traces, say=say))
    results.append(recovery(size=size, killed=killed, say=say))
    return results


def latency(
    *, entries: int = 5_000, size: int = 1024 * MIB, rounds: int = 3, say: Callable[[str], None] = lambda text: None
) -> BenchResult:
    """Time gets and puts of 2 KB, one after another in this thread, the contestants taking turns.

    Returns:
        Rows with ``what``, ``get_p50_us``, ``get_p99_us``, ``put_p50_us``, ``put_p99_us``: over all rounds. The ratio is the
        P50 of a get of redis-py over ours; None without a Redis.
    """
    stored = [answer(number, 1, BODY) for number in range(entries)]
    order = np.random.default_rng(0).permutation(entries).tolist()
    times: dict[str, tuple[list[int], list[int]]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)))
        say("filling the contestants")
        contestants = _contestants(stack, folder, stored, size)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for name, (get, put) in contestants.items():
                gets, puts = times.setdefault(name, ([], []))
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
    rows: list[dict[str, Any]] = [
        {"what": name, **_quantiles("get", gets), **_quantiles("put", puts)} for name, (gets, puts) in times.items()
    ]
    by_name: Mapping[str, Mapping[str, Any]] = {row["what"]: row for row in rows}
    ours = by_name[OURS]
    ratios = {peer: by_name[peer]["get_p50_us"] / ours["get_p50_us"] for peer in (REDIS, DISKCACHE) if peer in by_name}
    note = (
        f"{entries:,} entries with a body of {BODY} bytes, {rounds} rounds in turn, one thread; ours gives back whole entries, "
        "Redis and diskcache the bytes alone. The arena was filled, and is read, by different processes. Goals: get P50 below 5 "
        f"us ({_verdict(ours['get_p50_us'] < 5)}) and P99 below 25 us ({_verdict(ours['get_p99_us'] < 25)}), put P50 below 10 us "
        f"({_verdict(ours['put_p50_us'] < 10)})"
    )
    for peer, goal in ((REDIS, 10), (DISKCACHE, 2)):
        if peer in ratios:
            note += f"; {goal} times as fast as {peer}: {ratios[peer]:.1f} ({_verdict(ratios[peer] >= goal)})"
        else:
            note += f"; {peer} is not installed"
    note += ". 'By datagram' is the time of handing an entry to a writing process, which is not stored then."
    return BenchResult("memory", rows, ratios.get(REDIS), COMMAND, note)


def throughput(
    *, entries: int = 5_000, size: int = 1024 * MIB, seconds: float = 2.0, say: Callable[[str], None] = lambda text: None
) -> BenchResult:
    """Count the gets of 1, 2 and 4 reading processes together.

    Returns:
        Rows with ``readers``, ``gets_per_s`` (of all together) and ``gets_per_cpu_s`` (of each, in the time that it had a
        processor). The ratio is the latter's of the most readers over one's.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        tier = ArenaTier(Path(folder) / "arena", size)
        tier.resize_now(ARM, size // 2)
        for number in range(entries):
            tier.put_now(ARM, answer(number, 1, BODY))
        for count in (1, 2, 4):
            say(f"{count} reading processes")
            together, busy = readers(Path(folder) / "arena", size, count, entries, seconds)
            rows.append({"readers": count, "gets_per_s": together, "gets_per_cpu_s": busy})
        tier.close_now()
    processors = len(os.sched_getaffinity(0))
    note = (
        f"{processors} processors. Readers share no lock; the ratio says how much of its speed a reader keeps beside others: at "
        "1 gets per second grow with the processors."
    )
    return BenchResult("memory, readers", rows, rows[-1]["gets_per_cpu_s"] / rows[0]["gets_per_cpu_s"], COMMAND, note)


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
        Rows with ``what`` and ``value``. No ratio.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        path = Path(folder) / "arena"
        began = time.perf_counter()
        tier = ArenaTier(path, size)
        rows.append({"what": f"make an arena of {size // MIB} MiB, ms", "value": (time.perf_counter() - began) * 1e3})
        tier.resize_now(ARM, size)
        count = int(size * 0.8 / (BODY + 160))
        say(f"filling it with {count:,} entries")
        template = answer(0, 1, BODY)
        for number in range(count):
            tier.put_now(ARM, Entry(key(number), template.body, 1.0))
        began = time.perf_counter()
        other = ArenaTier(path, size)
        opened = (time.perf_counter() - began) * 1e3
        rows.append({"what": f"open it with {tier.stats_now(ARM).entries:,} entries, ms", "value": opened})
        other.mapping.words[H_OWNER] = 1  # as a writer leaves it that is killed
        began, busy = time.perf_counter(), time.process_time()
        other.put_now(ARM, template)
        repaired = (time.perf_counter() - began) * 1e3
        rows.append({"what": "its processor time, ms", "value": (time.process_time() - busy) * 1e3})
        rows.append({"what": "first write after a kill, repair included, ms", "value": repaired})
        if other.repairs != 1 or other.stats_now(ARM).entries < count:
            raise RuntimeError(f"bench memory: expected one repair that loses nothing, got {other.repairs}")
        other.close_now()
        tier.close_now()
    say("killing writers")
    summary = kills(killed, say=say)
    rows += [{"what": name.replace("_", " "), "value": value} for name, value in summary.items()]
    passed = summary["wrong"] == 0 and summary["hangs"] == 0
    note = (
        f"Goals: open below 100 ms ({_verdict(opened < 100)}), recovered below 1 s ({_verdict(repaired < 1000)}), no wrong "
        f"answer and no hang after {killed} kills ({_verdict(passed)}). 'Repairs' counts kills amid a write."
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


def _verdict(met: bool) -> str:
    return "met" if met else "missed"
