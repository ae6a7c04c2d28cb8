"""How background tasks end: for certain where they are to, and not without a word where they are not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

_AGAIN_SECONDS = 0.5
_log = logging.getLogger(__name__)


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


def report_failure(task: asyncio.Task[None]) -> None:
    """Log that a task has failed that should have gone on: for :meth:`asyncio.Task.add_done_callback`."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("%s stopped", task.get_name(), exc_info=task.exception())
