"""Arenas, processes that use them, and answers that tell by themselves whether they are the right ones."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry

ARM = "a"
MIB = 1 << 20


def key(number: int) -> bytes:
    """A fingerprint's bytes."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def answer(number: int, version: int, size: int) -> Entry:
    """An entry of which every byte follows from its key and its version, and whose body begins with the version."""
    name = key(number)
    seed = hashlib.sha256(name + version.to_bytes(8, "big")).digest()
    body = version.to_bytes(8, "big") + (seed * (size // 32 + 1))[:size]
    return Entry(name, body, float(version), number, version)


def check(number: int, entry: Entry) -> int:
    """Return the version of the answer, having made sure that it is that of the number and whole."""
    version = int.from_bytes(entry.body[:8], "big")
    assert entry == answer(number, version, len(entry.body) - 8), f"a wrong answer for {number}"
    return version


class Worker:
    """A process with a client of its own, made by a fork so that it starts at once; ends with the test.

    Args:
        work: What it does with its connection.
    """

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(work, theirs, args), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *message: Any) -> Any:
        """Send a message and return what comes back, within a minute."""
        self.connection.send(message)
        return self.answer()

    def answer(self) -> Any:
        """Return what comes, within a minute."""
        assert self.connection.poll(60), "the other process hangs"
        return self.connection.recv()

    def kill(self) -> None:
        """Kill it at whatever instruction it is."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def kill_amid(self, amid: Callable[[], bool], dice: random.Random) -> None:
        """Kill it at whatever instruction it is while a condition holds: it is stopped to look; within a minute."""
        assert self.process.pid is not None
        end = time.monotonic() + 60.0
        while True:
            os.kill(self.process.pid, signal.SIGSTOP)
            os.waitpid(self.process.pid, os.WUNTRACED)
            if amid():
                break
            assert time.monotonic() < end, "it was never met in the middle of what it does"
            os.kill(self.process.pid, signal.SIGCONT)
            until = time.monotonic() + dice.uniform(0.0, 0.002)
            while time.monotonic() < until:
                pass
        self.kill()

    def close(self) -> None:
        """End it."""
        if self.process.is_alive():
            self.kill()
        self.connection.close()


def own_mounts() -> bool:
    """Let this process, which no other may depend on, mount what it likes where nobody else sees it; whether it may."""
    new_mounts, new_user, private = 0x00020000, 0x10000000, 0x44000
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(new_mounts) != 0:
        if _libc.unshare(new_mounts | new_user) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return bool(_libc.mount(b"none", b"/", None, private, None) == 0)


def mount(kind: str, directory: Path, options: str, *, again: bool = False) -> None:
    """Mount a file system of that kind, or change the options of the one that is there."""
    remount = 32
    name = str(directory).encode()
    if _libc.mount(kind.encode(), name, kind.encode(), remount if again else 0, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{kind} cannot be mounted: {os.strerror(number)} ({errno.errorcode[number]})")


_libc = ctypes.CDLL(None, use_errno=True)


def _run(work: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    try:
        work(connection, *args)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)  # nothing of the parent's is to be cleaned up here


def serve(connection: Connection) -> None:
    """Do what is asked, with a client of its own.

    ``("open", path, size)`` opens an arena, ``("hold",)`` and ``("release",)`` take the right to write and give it back,
    ``(method, args, keywords)`` calls that method of the client; the answer is its result and the keys that were evicted.
    """
    tier: ArenaTier | None = None
    gone: list[bytes] = []
    while True:
        name, *args = connection.recv()
        if name == "open":
            if tier is not None:
                tier.close_now()
            tier = ArenaTier(Path(args[0]), args[1])
            tier.on_evict = lambda arm, keys: gone.extend(keys)
            connection.send(True)
            continue
        assert tier is not None
        if name == "hold":
            connection.send(tier._lease(10.0))
            continue
        if name == "release":
            tier.lease.release()
            connection.send(True)
            continue
        result = getattr(tier, name)(*args[0], **args[1])
        connection.send((result, list(gone)))
        gone.clear()
