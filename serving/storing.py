"""Answers on their way into the cache: the client does not wait for them to arrive there, whoever asks next does.

An answer is given as soon as it is here, and is then put into the store. Until it has arrived, requests that it may answer wait
for it, so that they find what they would have found had the first client waited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

ROUNDS = 1
"""Rounds of the event loop that an answer has before it is stored: in the first it is written, at whose end uvloop sends it."""


@dataclass(frozen=True, slots=True)
class _Put:
    arm: str
    key: bytes
    context: bytes
    task: asyncio.Task[None]


class Storing:
    """What is being stored by one replica.

    Args:
        longest: Seconds that anybody waits for one answer: a slow store keeps nobody.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._puts: dict[tuple[str, bytes], _Put] = {}  # the newest of each key
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of answers under way."""
        return len(self._tasks)

    def begin(self, arm: str, key: bytes, context: bytes, store: Callable[[], Awaitable[None]], *, rounds: int = 0) -> None:
        """Begin to store an answer, after the one before it of the same key; known as under way from now on.

        Args:
            arm: Its arm.
            key: Its key.
            context: The fingerprint of everything but its text where it may answer by meaning, else ``b""``.
            store: Stores it; raises nothing.
            rounds: Rounds of the event loop to let pass before.
        """
        before = self._puts.get((arm, key))
        work = _later(store, rounds, before.task if before is not None else None)
        task = asyncio.get_running_loop().create_task(work, name="store-answer")
        put = self._puts[arm, key] = _Put(arm, key, context, task)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._puts.get((arm, key)) is put:
                del self._puts[arm, key]

        task.add_done_callback(ended)

    def under_way(self, arm: str, key: bytes) -> bool:
        """Whether the key's answer is being stored."""
        return (arm, key) in self._puts

    async def arrived(self, arm: str, key: bytes, context: bytes = b"") -> None:
        """Wait until the key's answer is stored, and those that may answer in the context by meaning; at most ``longest``."""
        if not self._puts:
            return
        named = self._puts.get((arm, key))
        awaited = {named.task} if named is not None else set()
        if context:
            awaited |= {put.task for put in self._puts.values() if put.arm == arm and put.context == context}
        if awaited:
            await asyncio.wait(awaited, timeout=self._longest)

    async def all_arrived(self) -> None:
        """Wait until all is stored that is under way now; at most ``longest``."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._longest)

    async def close(self) -> None:
        """Wait for all that is under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _later(store: Callable[[], Awaitable[None]], rounds: int, before: asyncio.Task[None] | None) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)
    if before is not None:
        await asyncio.wait({before})  # where it comes to the store later it would take the place of the newer one
    await store()
