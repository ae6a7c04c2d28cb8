"""The model behind the cache: an HTTP client of any OpenAI-compatible server.

Answers are passed through as they came, status and bytes. What the network does to us becomes an answer too: 502 or 504 in
OpenAI's error shape, naming the base URL, so that a client sees one kind of error. What is tried again, and what is not, is a
matter of :mod:`serving.retries`; how many calls run at once, of :mod:`serving.turns`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace

import aiohttp
import orjson

from serving.openai_error import JSON, openai_error
from serving.retries import RETRIED, RetryRules, retry_after
from serving.settings import UpstreamSettings
from serving.turns import Overloaded, Turns

IDLE_SECONDS = 4.0
"""How long an idle connection is kept: shorter than the servers of models keep it (uvicorn, and so vLLM: 5 s), since a call that
is sent as the server closes the connection is lost, and its second try may meet another such connection."""
MOST_TOKENS = 2**32 - 1
"""No call bills more; a larger count is not one."""

PASSED_BACK = ("retry-after", "x-request-id", "openai-processing-ms")
"""Response headers that a client can act on; rate-limit headers (``x-ratelimit-...``) are passed back as well."""


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """One complete answer.

    Attributes:
        status: HTTP status; 502 or 504 where there was no answer, or only a part of one.
        body: Its bytes, decompressed.
        content_type: Media type.
        headers: Headers worth passing back.
        reached: Whether the upstream answered at all.
        no_store: Whether it would not have the answer stored (``Cache-Control``; RFC 9111, 5.2.2.5).
    """

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    reached: bool = True
    no_store: bool = False

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


class Interrupted(RuntimeError):
    """The upstream broke off an answer of which a part has arrived: the connection was lost, or it paused for too long.

    Attributes:
        answer: The error as an answer (502 or 504), for callers who have passed on nothing yet.
    """

    def __init__(self, answer: UpstreamAnswer, message: str) -> None:
        super().__init__(message)
        self.answer = answer


class Upstream:
    """A connection pool to the upstream. Open it within the event loop that uses it.

    Args:
        settings: Where it is, how long it may take, how often it is tried and how many calls it gets at once.
        draw: Uniform random numbers from 0 to 1, for the jitter between two tries.
    """

    def __init__(self, settings: UpstreamSettings, *, draw: Callable[[], float] = random.random) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._again: aiohttp.ClientSession | None = None
        self._allowed = frozenset(name.encode("latin-1") for name in settings.forward_headers)
        self._turns = Turns(settings.max_inflight, settings.max_waiting, settings.max_wait)
        self._retry = RetryRules(settings.retries, settings.backoff, settings.max_backoff)
        self._draw = draw
        self.retried = 0

    @property
    def inflight(self) -> int:
        """Calls under way."""
        return self._turns.running

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return self._turns.waiting

    @property
    def refused(self) -> int:
        """Calls that got no turn, since the start."""
        return self._turns.refused

    async def open(self) -> None:
        """Open the pool; nothing is sent yet."""
        # The other deadlines are ours: aiohttp's do not know a first byte. limit=0: the turns decide how many calls run at once.
        timeout = aiohttp.ClientTimeout(total=None, connect=self._settings.connect_timeout)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        # What the model's server would have one client send again is not for the calls of the others.
        cookies = aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True, cookie_jar=cookies)
        # A server that closes one idle connection closes the others as well: a second try gets a connection of its own.
        fresh = aiohttp.TCPConnector(limit=0, force_close=True)
        self._again = aiohttp.ClientSession(connector=fresh, timeout=timeout, auto_decompress=True, cookie_jar=cookies)

    async def close(self) -> None:
        """Close the pool."""
        sessions, self._session, self._again = (self._session, self._again), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    def forwarded(self, headers: Iterable[tuple[bytes, bytes]], *, credentials: bool = True) -> dict[str, str]:
        """Return the headers to send upstream for a client's request.

        Args:
            headers: The client's headers, lower-case names, as ASGI gives them.
            credentials: Whether the client's ``Authorization`` may be used where no API key is configured.
        """
        kept = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in self._allowed or (credentials and name == b"authorization")
        }
        if self._settings.api_key is not None:
            kept["authorization"] = f"Bearer {self._settings.api_key.get_secret_value()}"
        kept["content-type"] = JSON
        return kept

    async def call(self, path: str, body: bytes | None, headers: Mapping[str, str], *, method: str = "POST") -> UpstreamAnswer:
        """Make one call and return the whole answer; never raises for what the network or the upstream does.

        Cancelled, it closes the upstream's connection at once.

        Args:
            path: Below the base URL, with its slash: ``/chat/completions``.
            body: The request's body; None for none.
            headers: As :meth:`forwarded` returns them.
            method: What is not a POST asks nothing of the model, and so needs no turn.

        Raises:
            Overloaded: If there was no turn for it; nothing was sent.
        """
        try:
            async with self._answer(method, path, body, headers) as (head, chunks):
                return replace(head, body=b"".join([chunk async for chunk in chunks]))
        except Interrupted as error:
            return error.answer

    def stream(
        self, path: str, body: bytes | None, headers: Mapping[str, str], *, method: str = "POST"
    ) -> AbstractAsyncContextManager[tuple[UpstreamAnswer, AsyncIterator[bytes]]]:
        """Make one call whose answer is passed on as it comes.

        Leaving the context before the answer's end closes the upstream's connection at once, whatever the reason.

        Args:
            path: Below the base URL, with its slash: ``/chat/completions``.
            body: The request's body; None for none.
            headers: As :meth:`forwarded` returns them.
            method: As for :meth:`call`.

        Returns:
            A context that yields the answer's head (its ``body`` is empty) once the first byte is here, and an iterator of its
            bytes as they come. Where the upstream cannot be reached the head is the error and the bytes are the error's body. The
            iterator raises :class:`Interrupted` if the upstream breaks off; entering the context raises :class:`Overloaded` if
            there is no turn.
        """
        return self._answer(method, path, body, headers)

    async def models(self, headers: Mapping[str, str]) -> UpstreamAnswer:
        """Return the upstream's list of models."""
        return await self.call("/models", None, headers, method="GET")

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[UpstreamAnswer, AsyncIterator[bytes]]]:
        async with self._turns.turn() if method == "POST" else nullcontext():
            deadline = time.monotonic() + self._settings.timeout
            begun = await self._begin(method, path, body, headers, deadline)
            if isinstance(begun, UpstreamAnswer):
                yield replace(begun, body=b""), _once(begun.body)
                return
            response, first = begun
            try:
                yield _head(response), self._chunks(response, first, deadline)
            finally:
                response.close()  # after its end this is nothing: the connection is back in the pool

    async def _begin(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], deadline: float
    ) -> tuple[aiohttp.ClientResponse, bytes] | UpstreamAnswer:
        """Try until there is a first byte, or an error to live with."""
        tried = 0
        while True:
            tried += 1
            try:
                response, first = await self._try(method, path, body, headers, deadline, again=tried > 1)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failed = self._failure(error, self._settings.first_byte_timeout)
                wait = self._retry.wait(tried, self._draw()) if failed.status != 504 else None
                if wait is None or time.monotonic() + wait >= deadline:
                    return failed
            else:
                if response.status not in RETRIED:
                    return response, first
                asked = retry_after(response.headers.get("retry-after"), now=time.time())
                wait = self._retry.wait(tried, self._draw(), asked=asked)
                if wait is None or time.monotonic() + wait >= deadline:
                    return response, first
                response.close()
            self.retried += 1
            await asyncio.sleep(wait)

    async def _try(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], deadline: float, *, again: bool
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        async with asyncio.timeout(_within(self._settings.first_byte_timeout, deadline)):
            # A redirect is passed on: followed, it could take the credentials to another host.
            response = await self._open_session(again).request(
                method, self._settings.base_url + path, data=body, headers=dict(headers), allow_redirects=False
            )
            try:
                return response, await response.content.readany()
            except BaseException:
                response.close()
                raise

    async def _chunks(self, response: aiohttp.ClientResponse, first: bytes, deadline: float) -> AsyncIterator[bytes]:
        chunk = first
        while chunk:
            yield chunk
            try:
                async with asyncio.timeout(_within(self._settings.idle_timeout, deadline)):
                    chunk = await response.content.readany()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failed = self._failure(error, self._settings.idle_timeout, begun=True)
                raise Interrupted(failed, orjson.loads(failed.body)["error"]["message"]) from error

    def _open_session(self, again: bool = False) -> aiohttp.ClientSession:
        session = self._again if again else self._session
        if session is None:
            raise RuntimeError("upstream: open() was not awaited, or it is closed")
        return session

    def _failure(self, error: BaseException, limit: float | None, *, begun: bool = False) -> UpstreamAnswer:
        base = self._settings.base_url
        # connecting too slowly is "unreachable", not "slow to answer"
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
            seconds = min(self._settings.timeout, math.inf if limit is None else limit)
            what = "did not go on with its answer" if begun else "did not answer"
            message = f"the upstream at {base} {what} within {seconds:g} s"
            return UpstreamAnswer(504, openai_error(message, "upstream_error", code="upstream_timeout"), reached=begun)
        what = "broke off its answer" if begun else "cannot be reached"
        message = f"the upstream at {base} {what}: {error or type(error).__name__}"
        code = "upstream_interrupted" if begun else "upstream_unreachable"
        return UpstreamAnswer(502, openai_error(message, "upstream_error", code=code), reached=begun)


def overloaded(error: Overloaded) -> UpstreamAnswer:
    """Return the answer for those who get no turn: 429 with ``Retry-After``, which OpenAI's clients heed by themselves."""
    message = f"the gateway takes no more calls to the upstream now: {error}; try again in {error.retry_after} s"
    body = openai_error(message, "rate_limit_error", code="overloaded")
    return UpstreamAnswer(429, body, headers={"retry-after": str(error.retry_after)}, reached=False)


def _within(limit: float | None, deadline: float) -> float:
    remaining = deadline - time.monotonic()
    return remaining if limit is None else min(limit, remaining)


def _head(response: aiohttp.ClientResponse) -> UpstreamAnswer:
    kept = {
        name.lower(): _as_sent(value)
        for name, value in response.headers.items()
        if name.lower() in PASSED_BACK or name.lower().startswith("x-ratelimit-")
    }
    directives = ",".join(response.headers.getall("cache-control", ())).lower().split(",")
    no_store = any(directive.strip() == "no-store" for directive in directives)
    content_type = _as_sent(response.headers.get("content-type", JSON))
    return UpstreamAnswer(response.status, b"", content_type, kept, no_store=no_store)


def _as_sent(value: str) -> str:
    """Undo aiohttp's UTF-8: the header's bytes, one character each, as ASGI wants them."""
    return value.encode("utf-8", "surrogateescape").decode("latin-1")


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body
