"""A node in a process of its own, for the checks in the guest: an arena, its server, and what it is told to do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving.neighbours import verbs_link
from serving.neighbours.server import NeighbourServer
from serving.neighbours.transport import Parameters, Served, ServerTransport
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry

ARM = "control"
SECRET = "a secret of the guest alone"
NAMESPACE = "guest"
SLOTS = 16
SLOT_BYTES = 8192
_FORK = multiprocessing.get_context("fork")


def key(number: int) -> bytes:
    """Return the key of that number."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def answer(number: int, version: int, size: int) -> Entry:
    """Return an entry of which every byte follows from the arguments, so that a wrong one is known as such."""
    name = key(number)
    body = (hashlib.sha256(name + version.to_bytes(8, "big")).digest() * (size // 32 + 1))[:size]
    return Entry(name, body, float(version))


def right(entry: Entry, number: int) -> bool:
    """Whether it is an entry that was once put under that number."""
    return entry == answer(number, int(entry.written_at), len(entry.body))


def forked(
    work: Callable[..., None], *arguments: Any, parent: bool = False
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Run the work in a process of its own, with a connection as its first argument; return the process and the other end.

    Args:
        work: What it does.
        arguments: Those behind the connection.
        parent: Whether it has processes of its own.
    """
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_run, args=(work, theirs, *arguments), daemon=not parent)
    process.start()
    theirs.close()
    return process, ours


def _run(work: Callable[..., None], *arguments: Any) -> None:
    status = 1
    try:
        work(*arguments)
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is to be cleaned up here


class Node:
    """The owner of an arena, forked.

    Args:
        path: Of the arena's file.
        size: Bytes of the file.
        rdma: Whether it offers RDMA beside TCP.
        port: To listen on; 0: a free one.
    """

    def __init__(self, path: Path, size: int, *, rdma: bool = True, port: int = 0) -> None:
        self.path, self.size = path, size
        self._process, self._connection = forked(_work, str(path), size, rdma, port)
        assert self._connection.poll(60), "the node did not start"
        self.port = int(self._connection.recv())
        self.address = f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def do(self, what: str, *arguments: Any) -> Any:
        """Have it do something; return the result."""
        self.begin(what, *arguments)
        return self.end()

    def begin(self, what: str, *arguments: Any) -> None:
        """Have it do something, without waiting for the result."""
        self._connection.send((what, arguments))

    def end(self) -> Any:
        """Wait for the result of what was begun."""
        assert self._connection.poll(60), "the node did not answer"
        return self._connection.recv()

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.signal(signal.SIGKILL)
        self._process.join()
        self._connection.close()

    def stop(self) -> None:
        """Have it close everything and end."""
        self.do("stop")
        self._process.join()
        self._connection.close()


def _work(connection: Connection, path: str, size: int, rdma: bool, port: int) -> None:
    asyncio.run(_serve(connection, path, size, rdma, port))


async def _serve(connection: Connection, path: str, size: int, rdma: bool, port: int) -> None:
    tier = ArenaTier(path, size)
    tier.resize_now(ARM, size // 2)
    served: list[Served] = []
    server = NeighbourServer(
        tier, f"127.0.0.1:{port}", secret=SECRET, namespace=NAMESPACE, inbox_slots=SLOTS, slot_bytes=SLOT_BYTES,
        offers=[lambda arena, inbox: _Remembering(verbs_link.offered()(arena, inbox), served)] if rdma else [],
    )  # fmt: skip
    await server.start()
    connection.send(server.address[1])
    told: asyncio.Queue[Any] = asyncio.Queue()

    def said() -> None:
        with contextlib.suppress(EOFError):
            told.put_nowait(connection.recv())

    asyncio.get_running_loop().add_reader(connection.fileno(), said)
    works: dict[str, Callable[..., Any]] = {
        "put": lambda numbers, version, size: [tier.put_now(ARM, answer(number, version, size)) for number in numbers],
        "get": lambda numbers: [tier.get_now(ARM, key(number), touch=False) for number in numbers],
        "resize": lambda budget: tier.resize_now(ARM, budget),
        "damage": lambda number: _damage(tier, number),
        "mute": lambda: served[-1].close(),
        "stats": lambda: (tier.stats_now(ARM), dict(server.counts)),
    }
    work: asyncio.Task[None] | None = None
    while True:
        what, arguments = await told.get()
        if what == "stop":
            await server.close()
            tier.close_now()
            connection.send(None)
            return
        if what in ("race", "busy"):
            work = asyncio.create_task(_race(tier, *arguments) if what == "race" else _busy(*arguments))
            connection.send(None)
        elif what == "rest":
            assert work is not None
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            connection.send(tier.stats_now(ARM))
        else:
            connection.send(works[what](*arguments))


class _Remembering:
    """A transport of the owner that remembers the links it has accepted, so that they can be cut without a word."""

    def __init__(self, inner: ServerTransport, served: list[Served]) -> None:
        self.name = inner.name
        self._inner, self._served = inner, served

    def accept(self, asked: Parameters, begin: int, length: int) -> Served:
        made = self._inner.accept(asked, begin, length)
        self._served.append(made)
        return made

    def close(self) -> None:
        self._inner.close()


def _damage(tier: ArenaTier, number: int) -> int:
    """Turn one bit of the stored body of an entry of 2048 bytes; return whether the body was found."""
    body = answer(number, 1, 2048).body
    memory = tier.mapping.words.data.cast("B")
    at = bytes(memory).find(body)
    if at >= 0:
        memory[at + 1000] ^= 1
    return int(at >= 0)


async def _race(tier: ArenaTier, numbers: list[int]) -> None:
    """Replace the entries of those numbers without end."""
    dice = random.Random(1)
    version = 1
    while True:
        for _ in range(5):
            version += 1
            tier.put_now(ARM, answer(dice.choice(numbers), version, dice.choice([20, 100, 2000, 2000, 6000, 12_000])))
        await asyncio.sleep(0.001)  # the readers need the machine, too


async def _busy(seconds: float) -> None:
    """Be as a gateway that works: each turn of the event loop takes so long."""
    while True:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0)
