"""Backpressure: how many calls run at once, how many may wait for their turn, and what those are told that may not.

A model server that takes everything answers everybody late. A bounded queue in front of it keeps the latency of what is accepted,
and says to the rest when to come back (429 with ``Retry-After``, which OpenAI's clients heed by themselves).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LONGEST_RETRY_AFTER = 60.0
"""Seconds; a longer queue than that is a matter for the operator, not for a client to sit out."""

_NEWEST_WEIGHT = 0.2
"""Weight of the newest call in the moving average of how long a turn takes."""


class Overloaded(RuntimeError):
    """There was no turn: too many wait already, or the wait was too long.

    Attributes:
        retry_after: Whole seconds after which it may be worth trying again, at least 1.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Turns:
    """Turns, given in order of arrival.

    Args:
        most_running: Turns that are taken at the same time; None: no limit, and nobody waits.
        most_waiting: Who finds that many waiting is refused at once.
        longest_wait: Seconds after which one who waits is refused.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        most_running: int | None,
        most_waiting: int,
        longest_wait: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_running, self._most_waiting, self._longest_wait = most_running, most_waiting, longest_wait
        self._free = asyncio.Semaphore(most_running) if most_running is not None else None
        self._clock = clock
        self._turn_time = 0.0
        self.running = 0
        self.waiting = 0
        self.refused = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a turn. One who is cancelled while it waits, or in its turn, gives its place to the next.

        Raises:
            Overloaded: If there was none.
        """
        if self._free is not None:
            await self._wait(self._free)
        began = self._clock()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            taken = self._clock() - began
            self._turn_time += (taken - self._turn_time) * (_NEWEST_WEIGHT if self._turn_time else 1.0)
            if self._free is not None:
                self._free.release()

    async def _wait(self, free: asyncio.Semaphore) -> None:
        if not free.locked():
            await free.acquire()
            return
        if self.waiting >= self._most_waiting:
            raise self._refusal(f"{self.running} calls are under way and {self.waiting} wait, which is as many as may")
        self.waiting += 1
        try:
            async with asyncio.timeout(self._longest_wait):
                await free.acquire()
        except TimeoutError:
            raise self._refusal(f"no turn came within {self._longest_wait:g} s, {self.running} calls being under way") from None
        finally:
            self.waiting -= 1

    def _refusal(self, why: str) -> Overloaded:
        """Those ahead, in the time that a turn takes and as many side by side as run: when the queue will have been served."""
        self.refused += 1
        seconds = (self.waiting + 1) * self._turn_time / (self._most_running or 1)
        return Overloaded(why, math.ceil(min(max(seconds, 1.0), LONGEST_RETRY_AFTER)))
