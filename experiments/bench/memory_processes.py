"""Processes around an arena, for the benchmark: writers that are killed, readers side by side, a writer to whom puts are handed.

They are forked from a process that has everything compiled, so that one is there in milliseconds.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving.arena.layout import H_OWNER, H_REPAIRS
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from serving.tiers.codec import pack, unpack

ARM = "a"
MIB = 1 << 20
HANG_SECONDS = 30.0
_KEYS = 500
_KILLS_OF_A_FILE = 20
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

    After every second kill the next writer has to write on, and is killed soon, so that repairs are cut off as well; and every
    twenty kills there is a new file, since what has grown does not grow again.

    Returns:
        ``kills``, ``answers_checked``, ``wrong``, ``hangs``, ``amid_a_write``, ``repairs`` and ``slowest_recovery_ms``: from the
        kill to the first write that was done after it.
    """
    dice = random.Random(seed)
    checked = wrong = hangs = amid = repairs = 0
    slowest = 0.0

    def read_all(tier: ArenaTier) -> None:
        nonlocal checked, wrong
        for name in range(_KEYS):
            entry = tier.get_now(ARM, key(name), touch=False)
            if entry is not None:
                checked += 1
                wrong += replace(entry, renewed=0.0) != answer(name, int(entry.written_at), len(entry.body))

    with tempfile.TemporaryDirectory(dir=shared_memory()) as folder, quiet():
        for number in range(times):
            if number % _KILLS_OF_A_FILE == 0:
                path = Path(folder) / f"arena-{number}"
                tier = ArenaTier(path, 16 * MIB)
                tier.resize_now(ARM, 12 * MIB)
            soon = number % 2 == 1
            before = int(tier.mapping.words[H_OWNER])
            process, connection = forked(_write_without_end, str(path), number)
            if not connection.poll(HANG_SECONDS):
                hangs += 1
            time.sleep(dice.uniform(0.0, 0.004 if soon else 0.03))
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            connection.close()
            amid += int(tier.mapping.words[H_OWNER]) not in (0, before)
            read_all(tier)
            last = number == times - 1 or (number + 1) % _KILLS_OF_A_FILE == 0
            if soon or last:
                began = time.perf_counter()
                tier.put_now(ARM, answer(0, 1, 100))
                slowest = max(slowest, time.perf_counter() - began)
                wrong += tier.get_now(ARM, key(0)) != answer(0, 1, 100)
                read_all(tier)
            if last:
                repairs += int(tier.mapping.words[H_REPAIRS])
                tier.close_now()
                path.unlink()
            if (number + 1) % 50 == 0:
                say(f"{number + 1} writers killed")
    return {
        "kills": times, "answers_checked": checked, "wrong": wrong, "hangs": hangs, "amid_a_write": amid, "repairs": repairs,
        "slowest_recovery_ms": slowest * 1e3,
    }  # fmt: skip


def kill_amid_a_write(path: Path, size: int, name: bytes) -> None:
    """Kill a process that overwrites the entry of that key without end, until it was hit while it had the right to write.

    Raises:
        RuntimeError: If that does not come about.
    """
    tier = ArenaTier(path, size)
    for _ in range(1000):
        process, connection = forked(_overwrite_without_end, str(path), size, name)
        connection.recv()
        time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        connection.close()
        if tier.mapping.words[H_OWNER]:
            tier.close_now()
            return
    raise RuntimeError("bench memory: of 1,000 writers that were killed none was hit amid a write")


def readers(paths: Sequence[Path], size: int, entries: int, seconds: float) -> tuple[float, float]:
    """Return the reads per second of as many processes as paths together, and each one's per second that it had a processor."""
    running = [forked(_read, str(path), size, entries, number, seconds) for number, path in enumerate(paths)]
    for _, connection in running:
        connection.recv()
    for _, connection in running:
        connection.send("go")
    reads = elapsed = busy = 0.0
    for process, connection in running:
        count, took, had = connection.recv()
        reads, busy, elapsed = reads + count, busy + had, max(elapsed, took)
        process.join()
        connection.close()
    return reads / elapsed, reads / busy


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


def shared_memory() -> str | None:
    """Return the folder of files in memory; None where there is none, for the usual place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what each repair has to say out of the output."""
    logger = logging.getLogger("serving.tiers.arena")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run(work: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    try:
        work(connection, *args)
    finally:
        os._exit(0)  # nothing of the parent's is to be cleaned up here


def _write_without_end(connection: Connection, path: str, seed: int) -> None:
    tier = ArenaTier(path, 16 * MIB)
    dice = random.Random(seed)
    connection.send("ready")
    version = 0
    while True:
        version += 1
        number, choice = dice.randrange(_KEYS), dice.random()
        if choice < 0.8:
            tier.put_now(ARM, answer(number, version, dice.choice([10, 60, 2000, 2000, 30_000])))
        elif choice < 0.9:
            tier.delete_now(ARM, key(number))
        elif choice < 0.95:
            tier.renew_now(ARM, key(number), version + dice.random())
        elif choice < 0.995:
            tier.resize_now(ARM, dice.choice([3, 12]) * MIB)
        else:
            tier.flush_now(ARM)


def _overwrite_without_end(connection: Connection, path: str, size: int, name: bytes) -> None:
    tier = ArenaTier(path, size)
    entry = tier.get_now(ARM, name)
    assert entry is not None
    connection.send("ready")
    while True:
        tier.put_now(ARM, entry)


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
    connection.send((count, time.perf_counter() - began, time.process_time() - busy))


def _write_what_comes(connection: Connection, path: str, size: int, address: str) -> None:
    tier = ArenaTier(path, size)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(address)
        connection.send("ready")
        while message := inbox.recv(1 << 20):
            entry = unpack(message[:32], message[32:])
            if entry is not None:
                tier.put_now(ARM, entry)
