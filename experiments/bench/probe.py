"""Questions over HTTP, timed: one after the other on one connection, or many at once."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

import aiohttp

_TIMEOUT = 60.0
_HEADERS = {"content-type": "application/json", "accept": "*/*"}


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        status: HTTP status.
        headers: Its headers, lower-case names.
        body: Its bytes.
        first: Seconds from sending the question to the first bytes of the body.
        total: Seconds to the last.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    first: float
    total: float


class Connection:
    """A connection that is kept, and opened anew where the other side closed it. Use as a context manager.

    Blocking, on the standard library: an event loop of the client's own would be in every time that it measures.

    Args:
        url: Where questions are posted.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._path = parts.path
        self._http = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=_TIMEOUT)

    def ask(self, body: bytes) -> Reply:
        """Ask, and read the answer to its end.

        Args:
            body: The question, JSON.

        Raises:
            OSError: If nobody answers.
            http.client.HTTPException: If the answer breaks off.
        """
        try:
            return self._ask(body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self._http.close()  # it had been idle for longer than the server keeps it
            return self._ask(body)

    def _ask(self, body: bytes) -> Reply:
        if self._http.sock is None:
            self._http.connect()
        sent = time.perf_counter()
        self._http.request("POST", self._path, body, _HEADERS)
        response = self._http.getresponse()
        pieces = [response.read1()]
        first = time.perf_counter() - sent
        while pieces[-1]:
            pieces.append(response.read1())
        total = time.perf_counter() - sent
        response.close()  # read to its end, the connection is free for the next
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, b"".join(pieces), first, total)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()


def burst(url: str, body: bytes, count: int) -> list[tuple[int, bytes]]:
    """Ask the same at once on connections of their own; returns each answer's status and body.

    Args:
        url: Where to.
        body: The question, JSON.
        count: How many ask.
    """
    return asyncio.run(_burst(url, body, count))


async def _burst(url: str, body: bytes, count: int) -> list[tuple[int, bytes]]:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one() -> tuple[int, bytes]:
            async with session.post(url, data=body, headers=_HEADERS) as answer:
                return answer.status, await answer.read()

        return await asyncio.gather(*(one() for _ in range(count)))
