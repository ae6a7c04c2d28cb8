"""Background tasks end, whatever becomes of their first cancellation."""

from __future__ import annotations

import asyncio

from serving.ending import end


async def test_a_task_that_lost_its_cancellation_is_cancelled_again() -> None:
    heard = 0

    async def deaf() -> None:
        nonlocal heard
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                heard += 1
                if heard > 1:
                    raise

    async def broken() -> None:
        raise RuntimeError("long ago")

    tasks = [asyncio.create_task(deaf()), asyncio.create_task(broken())]
    await asyncio.sleep(0)
    await asyncio.wait_for(end(tasks), 20)
    assert heard == 2
    assert all(task.done() for task in tasks)
    await end([])
