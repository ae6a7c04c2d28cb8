"""Who may write: the processes of a node elect a writer for each write, by a lock that the kernel takes back from the dead.

A lease is the exclusive ``flock`` of the arena's file, and it takes about a microsecond. That was measured against one elected
process to which all others hand their writes (``cachepilot bench memory``): a hand-over by datagram alone costs more than the
whole write under a lease, and a caller would not find what it has just stored. The header also says who writes. The kernel frees
the lock of a process that dies; the header still names it, and so the next writer knows that it has to repair.

Two writers at once, by whatever mistake (a file system without locks): the second takes the first for dead and repairs; the first
finds itself deposed when it has finished, and marks the arena to be repaired once more. Readers trust neither.
"""

from __future__ import annotations

import fcntl
import os
import time

from serving.arena.layout import Words
from serving.arena.writer import claim, disclaim

PATIENCE = 0.02
"""Seconds that a write waits for another's; then it is not done, which costs a miss."""

_SPINS = 20


class Lease:
    """The right to write one arena.

    Args:
        descriptor: Of the arena's file, opened for this lease alone.
        words: The arena.
        token: Names this client, not 0.
    """

    def __init__(self, descriptor: int, words: Words, token: int) -> None:
        self._descriptor = descriptor
        self._words = words
        self._token = token
        self._process = os.getpid()
        self.deposed = 0

    def acquire(self, patience: float = PATIENCE) -> bool | None:
        """Take the lease.

        Returns:
            True: write; None: the writer before died or was deposed, so repair first; False: others were busy all the time.

        Raises:
            RuntimeError: After a fork: both processes would have the same lease.
        """
        if os.getpid() != self._process:
            raise RuntimeError("arena: it was opened before a fork; open it again in each process")
        if not self._locked() and not self._wait(patience):
            return False
        return True if claim(self._words, self._token) else None

    def release(self) -> None:
        """Give the lease back."""
        try:
            if not disclaim(self._words, self._token):
                self.deposed += 1
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the arena."""
        self._words = self._words[:0].copy()

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait(self, patience: float) -> bool:
        end = time.monotonic() + patience
        tries = 0
        while not self._locked():
            if time.monotonic() >= end:
                return False
            tries += 1
            # A write takes microseconds; one that takes longer lost its processor, or repairs.
            time.sleep(0 if tries < _SPINS else 0.0002)
        return True
