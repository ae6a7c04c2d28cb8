"""How what runs until it is told to stop is told: by signals, and between two of its turns."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signals_to(callback: Callable[[], None]) -> Iterator[None]:
    """Call ``callback`` on the running event loop at SIGINT and SIGTERM; afterwards both do what they did before."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, callback)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)  # asyncio leaves the system's: SIGTERM would end us with everything still running


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event or for so many seconds; whether the event came."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
