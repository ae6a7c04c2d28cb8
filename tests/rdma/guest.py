"""The run in the guest, over real RDMA: one line of output per check; without pytest, which is slow there."""

from __future__ import annotations

import asyncio
import json
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence

from serving.neighbours import verbs, verbs_link
from serving.neighbours.tcp import TcpTransport
from tests.rdma.checks import (
    cancelled,
    contract,
    corrupted,
    fallback,
    full,
    killed,
    no_leaks,
    one_sided,
    race,
    reads,
    refused,
    silent,
    warm_start,
    writes,
)
from tests.rdma.nodes import Node, forked
from tests.rdma.readers import ARENA, CHECK_SECONDS, SIZE, Reader, queue_pairs, say, until


async def compare(node: Node) -> dict[str, object]:
    """Time lookups by RDMA and TCP in turns, with an owner at rest and one that is busy."""
    readers = {"rdma": Reader(node, [verbs_link.VerbsClient()]), "tcp": Reader(node, [TcpTransport()])}
    for name, reader in readers.items():
        await reader.tier.start()
        await reader.linked(name)
    rows = []
    for owner_is, size, rounds in (("at rest", 60, 5), ("at rest", 2048, 5), ("at rest", 30_000, 3), ("busy", 2048, 2)):
        numbers = readers["rdma"].take(20)
        node.do("put", numbers, 1, size)
        times: dict[str, list[float]] = {name: [] for name in readers}
        if owner_is == "busy":
            node.do("busy", 0.005)
        for _ in range(rounds):
            for name, reader in readers.items():
                for number in numbers:
                    began = time.perf_counter()
                    entry = await reader.get(number)
                    times[name].append(time.perf_counter() - began)
                    assert entry is not None
        if owner_is == "busy":
            node.do("rest")
        row: dict[str, object] = {"owner": owner_is, "bytes": size, "lookups": len(times["rdma"])}
        for quantile, name in ((0.5, "p50"), (0.99, "p99")):
            found = {each: sorted(spent)[int(quantile * (len(spent) - 1))] * 1e6 for each, spent in times.items()}
            row |= {f"{each}_{name}_us": round(value) for each, value in found.items()}
            row[f"{name}_ratio"] = round(found["tcp"] / found["rdma"], 2)
        rows.append(row)
    for reader in readers.values():
        await reader.tier.close()
    return {
        "rows": rows,
        "load": os.getloadavg()[0],
        "note": "ratio: TCP over RDMA, lookups in turns, soft-RoCE in an emulated machine",
    }


async def main() -> int:
    """Run the checks; return how many failed."""
    missing = verbs.available(memory=SIZE)
    assert missing is None, missing
    node = Node(ARENA, SIZE)
    reader = Reader(node, [verbs_link.VerbsClient()])
    await reader.tier.start()
    await reader.linked("rdma")
    checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        *((work.__name__, lambda work=work: work(reader)) for work in (reads, writes, one_sided)),
        # Beside the others, which they do not touch: the emulated processors are slow, but several.
        ("beside", lambda: aside.begin()),
        *((work.__name__, lambda work=work: work(reader)) for work in (race, corrupted, full, refused, no_leaks, cancelled)),
        ("silent", lambda: silent(node)),
        ("killed", lambda: killed(node, reader)),
        ("warm_start", lambda: warm_start(reader)),
    ]
    aside = Aside([("fallback", fallback), ("contract", contract)])
    failed = await run_all(checks)
    failed += await aside.end()
    results = await compare(reader.node)
    say(table(results["rows"]))
    say("RESULTS " + json.dumps(results))
    await reader.tier.close()
    await until(lambda: queue_pairs(reader.node) == 0)
    reader.node.stop()
    return failed


async def run_all(checks: Sequence[tuple[str, Callable[[], Awaitable[str]]]]) -> int:
    """Run the checks one after another; return how many failed."""
    failed = 0
    for name, check in checks:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                said = await check()
        except Exception:  # noqa: BLE001
            failed += 1
            say(f"{traceback.format_exc()}FAILED {name}")
        else:
            if said:
                say(f"ok {name}: {said} [{time.perf_counter() - began:.1f} s]")
    return failed


class Aside:
    """Checks in a process of their own."""

    def __init__(self, checks: Sequence[tuple[str, Callable[[], Awaitable[str]]]]) -> None:
        self._checks = checks

    async def begin(self) -> str:
        """Start them."""
        self._process, self._connection = forked(
            lambda connection: connection.send(asyncio.run(run_all(self._checks))), parent=True
        )
        return ""

    async def end(self) -> int:
        """Wait for them; return how many failed."""
        try:
            if await asyncio.to_thread(self._connection.poll, len(self._checks) * CHECK_SECONDS):
                return int(self._connection.recv())
        except EOFError:
            pass
        self._process.kill()  # else this one would wait for it at its end
        say("FAILED: the checks beside the others did not come to an end")
        return 1


def table(rows: object) -> str:
    """Return the rows as text."""
    assert isinstance(rows, list)
    names = list(rows[0])
    lines = [[str(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in lines)) for at, name in enumerate(names)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [names, *lines])


def run() -> int:
    """Run all; return the exit status."""
    with open("/proc/uptime") as up:
        say(f"guest: up {up.read().split()[0]} s, everything imported")
    return 1 if asyncio.run(main()) else 0
