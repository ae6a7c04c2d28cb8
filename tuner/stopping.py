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


class Interrupts:
    """Whether an interrupt was asked for."""

    def __init__(self) -> None:
        self._asked = False

    def ask(self, number: int, frame: object) -> None:
        """Remember it and unwind: a signal's handler.

        Raises:
            KeyboardInterrupt: Always.
        """
        self._asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Unwind if somebody on the way swallowed the interrupt.

        Raises:
            KeyboardInterrupt: If one was asked for.
        """
        if self._asked:
            raise KeyboardInterrupt


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[Interrupts]:
    """Let SIGINT and SIGTERM unwind what is being started, and remember it.

    An exception that a signal raises inside of a callback or a finaliser of a library is printed and lost: who starts what has
    many of those has to ask again between two steps.
    """
    interrupts = Interrupts()
    before = {number: signal.signal(number, interrupts.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event or for so many seconds; whether the event came."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
