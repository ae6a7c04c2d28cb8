"""Processes around an arena, for the benchmark: writers that are killed, readers side by side, a writer to whom puts are handed.

They are forked from a process that has everything compiled, so that one is there in milliseconds.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from serving.tiers.codec import pack, unpack

ARM = "a"
MIB = 1 << 20
HANG_SECONDS = 30.0
_KEYS = 500
_FORK = multiprocessing.get_context("fork")


def key(number: int) -> bytes:
    """Return the key of that number."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def answer(number: int, version: int, size: int) -> Entry:
    """Return an entry of which every byte follows from the arguments, so that a wrong one is known as such."""
    name = key(number)
    body = (hashlib.sha256(name + version.to_bytes(8, "big")).digest() * (size // 32 + 1))[:size]
    return Entry(name, body, float(version))


def forked(work: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Run the work in a process of its own; return the process and what it sends."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_run, args=(work, theirs, args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def kills(times: int, *, seed: int = 0, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Kill a writer at a random moment, again and again; after each, read all, write on, and read all again.

    Returns:
        ``kills``, ``answers_checked``, ``wrong``, ``hangs``, ``repairs`` and ``slowest_recovery_ms``: from the kill to the first
        write that was done after it.
    """
    dice = random.Random(seed)
    checked = wrong = hangs = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory(dir=_shared_memory()) as folder:
        path = Path(folder) / "arena"
        tier = ArenaTier(path, 8 * MIB)
        tier.resize_now(ARM, 4 * MIB)
        for number in range(times):
            process, connection = forked(_write_without_end, str(path), number)
            hangs += not connection.poll(HANG_SECONDS)
            time.sleep(dice.uniform(0.0, 0.03))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            connection.close()
            began = time.perf_counter()
            for moment in range(2):
                for name in range(_KEYS):
                    entry = tier.get_now(ARM, key(name), touch=False)
                    if entry is not None:
                        checked += 1
                        wrong += entry != answer(name, int(entry.written_at), len(entry.body))
                if moment == 0:
                    began = time.perf_counter()
                    tier.put_now(ARM, answer(0, 1, 100))
                    slowest = max(slowest, time.perf_counter() - began)
                    wrong += tier.get_now(ARM, key(0)) != answer(0, 1, 100)
            if (number + 1) % 50 == 0:
                say(f"{number + 1} writers killed")
        repairs = tier.repairs
        tier.close_now()
    return {
        "kills": times, "answers_checked": checked, "wrong": wrong, "hangs": hangs, "repairs": repairs,
        "slowest_recovery_ms": slowest * 1e3,
    }  # fmt: skip


def readers(path: Path, size: int, count: int, entries: int, seconds: float) -> tuple[float, float]:
    """Return the reads of so many processes together per second, and per second that they had a processor."""
    running = [forked(_read, str(path), size, entries, number, seconds) for number in range(count)]
    for _, connection in running:
        connection.recv()
    for _, connection in running:
        connection.send("go")
    total = busy = 0.0
    for process, connection in running:
        per_second, per_busy_second = connection.recv()
        total += per_second
        busy += per_busy_second / count
        process.join()
    return total, busy


class HandedOver:
    """The other way to write: one process writes, and all others hand it their entries by datagrams, as a context manager."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        self._folder = tempfile.TemporaryDirectory()
        self._address = str(Path(self._folder.name) / "writer.sock")

    def __enter__(self) -> HandedOver:
        self._process, connection = forked(_write_what_comes, str(self._path), self._size, self._address)
        connection.recv()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.connect(self._address)
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.send(b"")
        self._process.join()
        self._socket.close()
        self._folder.cleanup()

    def hand(self, entry: Entry) -> None:
        """Hand an entry over, without waiting for it to be stored."""
        self._socket.send(entry.key + pack(entry))


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run(work: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    try:
        work(connection, *args)
    finally:
        os._exit(0)  # nothing of the parent's is to be cleaned up here


def _write_without_end(connection: Connection, path: str, seed: int) -> None:
    tier = ArenaTier(path, 8 * MIB)
    dice = random.Random(seed)
    connection.send("ready")
    version = 0
    while True:
        version += 1
        number, choice = dice.randrange(_KEYS), dice.random()
        if choice < 0.85:
            tier.put_now(ARM, answer(number, version, dice.choice([10, 60, 2000, 2000, 30_000])))
        elif choice < 0.95:
            tier.delete_now(ARM, key(number))
        elif choice < 0.995:
            tier.resize_now(ARM, dice.choice([2, 4]) * MIB)
        else:
            tier.flush_now(ARM)


def _read(connection: Connection, path: str, size: int, entries: int, seed: int, seconds: float) -> None:
    tier = ArenaTier(path, size)
    dice = random.Random(seed)
    keys = [key(dice.randrange(entries)) for _ in range(1000)]
    for name in keys:
        tier.get_now(ARM, name)
    connection.send("ready")
    connection.recv()
    count = 0
    began, busy = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        for name in keys:
            tier.get_now(ARM, name)
        count += len(keys)
    connection.send((count / (time.perf_counter() - began), count / (time.process_time() - busy)))


def _write_what_comes(connection: Connection, path: str, size: int, address: str) -> None:
    tier = ArenaTier(path, size)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(address)
        connection.send("ready")
        while message := inbox.recv(1 << 20):
            entry = unpack(message[:32], message[32:])
            if entry is not None:
                tier.put_now(ARM, entry)
