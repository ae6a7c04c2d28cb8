"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

_AGAIN_SECONDS = 0.5


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended; what they raised is dropped.

    They are cancelled again and again: between Python 3.11 and redis-py a cancellation may get lost, and who waits for a loop
    that did not hear of it waits for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()
