"""Finding the addresses of names by few threads of its own, and remembering for a while what came of it.

Whoever can write to Redis can name nodes, and a name that no server knows takes a thread for seconds. In the event loop's own
executor 256 of them would leave no thread to anybody else.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from serving.neighbours.link import LinkLost

THREADS = 4
"""Names that are looked up at once; others wait for their turn."""

REMEMBERED_SECONDS = 30.0
"""Seconds for which a name is not looked up again, whether it has addresses or not."""

MOST_REMEMBERED = 1024
"""Names that are remembered."""


def look(name: str) -> Sequence[str]:
    """Return the addresses of a host, as texts, the best first. Blocks.

    Raises:
        OSError: If it has none.
        ValueError: If no host can have that name.
    """
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))


class Resolver:
    """Finds addresses of names. For one event loop.

    Args:
        look: Finds those of one; called in a thread.
        clock: A monotonic clock, seconds.
    """

    def __init__(self, look: Callable[[str], Sequence[str]] = look, clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._known: dict[str, tuple[float, Sequence[str] | str]] = {}  # until when: addresses, or why there are none
        self._looking: dict[str, asyncio.Future[Sequence[str]]] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def addresses(self, host: str) -> Sequence[str]:
        """Return the addresses of a host, at least one; an address is its own. Who gives up waiting does not end the search.

        Raises:
            LinkLost: If it has none, or had none a moment ago.
        """
        try:
            ipaddress.ip_address(host)
            return [host]
        except ValueError:
            pass
        until, known = self._known.get(host, (self._clock(), ""))
        if self._clock() >= until:
            looking = self._looking.get(host) or self._begin(host)
            await asyncio.wait({looking})
            known = self._known.get(host, (0.0, "the search was given up"))[1]
        if isinstance(known, str):
            raise LinkLost(f"{host} has no address: {known}")
        return known

    def close(self) -> None:
        """Look for no more names; those that are being looked up are not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def _begin(self, host: str) -> asyncio.Future[Sequence[str]]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "neighbour-names")
        looking = asyncio.get_running_loop().run_in_executor(self._threads, self._look, host)
        self._looking[host] = looking
        looking.add_done_callback(functools.partial(self._found, host))
        return looking

    def _found(self, host: str, looking: asyncio.Future[Sequence[str]]) -> None:
        del self._looking[host]
        self._known.pop(host, None)
        if looking.cancelled():
            return
        error = looking.exception()
        if len(self._known) >= MOST_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        found = looking.result() if error is None else str(getattr(error, "strerror", None) or error)
        self._known[host] = (self._clock() + REMEMBERED_SECONDS, found)
