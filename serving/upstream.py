"""The model behind the cache: an HTTP client of any OpenAI-compatible server.

Answers are passed through as they came, status and bytes. What the network does to us becomes an answer too: 502 or 504 in
OpenAI's error shape, naming the base URL, so that a client sees one kind of error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from serving.settings import UpstreamSettings

JSON = "application/json"
COMPLETE = ("stop", "tool_calls", "function_call")
"""Reasons with which a model ends an answer by itself; ``length``, ``content_filter``, ``error`` and others cut it."""

MOST_TOKENS = 2**32 - 1
"""No call bills more; a larger count is not one."""

PASSED_BACK = ("retry-after", "x-request-id", "openai-processing-ms")
"""Response headers that a client can act on; rate-limit headers (``x-ratelimit-...``) are passed back as well."""


def openai_error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """Return an error body in OpenAI's shape."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """One complete answer.

    Attributes:
        status: HTTP status; 502 or 504 where there was no answer.
        body: Its bytes, decompressed.
        content_type: Media type.
        headers: Headers worth passing back.
        reached: Whether the upstream answered at all.
    """

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    reached: bool = True

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Completion:
    """What a cacheable answer says of itself.

    Attributes:
        input_tokens: Prompt tokens billed.
        output_tokens: Completion tokens billed.
    """

    input_tokens: int
    output_tokens: int


def completion_of(answer: UpstreamAnswer) -> Completion | None:
    """Return the usage of an answer that may be cached, or None.

    Only a complete answer may: 200, a JSON object without an error, at least one choice, and every choice with a message that
    ended by itself (``finish_reason`` one of :data:`COMPLETE`).
    """
    parsed = _json_object(answer)
    if parsed is None or answer.status != 200 or parsed.get("error"):
        return None
    choices = parsed.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
            return None
        if choice.get("finish_reason") not in COMPLETE:
            return None
    return _usage(parsed)


def usage_of(answer: UpstreamAnswer) -> Completion:
    """Return the tokens billed for any answer, complete or not; zeros where it does not say."""
    parsed = _json_object(answer)
    return Completion(0, 0) if parsed is None else _usage(parsed)


def _json_object(answer: UpstreamAnswer) -> dict[str, Any] | None:
    if not answer.ok or answer.content_type.partition(";")[0].strip().lower() != JSON:
        return None
    try:
        parsed = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _usage(parsed: Mapping[str, Any]) -> Completion:
    usage = parsed.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    given = [value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else 0 for value in tokens]
    return Completion(given[0], given[1])


class Upstream:
    """A connection pool to the upstream. Open it within the event loop that uses it.

    Args:
        settings: Where it is and how long it may take.
    """

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._allowed = frozenset(name.encode("latin-1") for name in settings.forward_headers)
        self.inflight = 0

    async def open(self) -> None:
        """Open the pool; nothing is sent yet."""
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout, sock_connect=self._settings.connect_timeout)
        # limit=0: how many calls run at once is for the model's own queue to decide
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True)

    async def close(self) -> None:
        """Close the pool."""
        session, self._session = self._session, None
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

    async def chat(self, body: bytes, headers: Mapping[str, str]) -> UpstreamAnswer:
        """Ask for a completion and return the whole answer; never raises for what the network or the upstream does."""
        return await self._request("POST", "/chat/completions", headers, body)

    async def models(self, headers: Mapping[str, str]) -> UpstreamAnswer:
        """Return the upstream's list of models."""
        return await self._request("GET", "/models", headers, None)

    @asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[tuple[UpstreamAnswer, AsyncIterator[bytes]]]:
        """Ask for a streamed completion.

        Yields:
            The answer's head (its ``body`` is empty), and its bytes as they come. Where the upstream cannot be reached the head
            is the error and the bytes are the error's body.
        """
        self.inflight += 1
        try:
            try:
                # A redirect is passed on: followed, it could take the credentials to another host.
                response = await self._open_session().post(
                    self._url("/chat/completions"), data=body, headers=dict(headers), allow_redirects=False
                )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failed = self._failure(error)
                yield failed, _once(failed.body)
                return
            async with response:
                yield _head(response, b""), response.content.iter_any()
        finally:
            self.inflight -= 1

    async def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> UpstreamAnswer:
        self.inflight += 1
        try:
            async with self._open_session().request(
                method, self._url(path), data=body, headers=dict(headers), allow_redirects=False
            ) as response:
                return _head(response, await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._failure(error)
        finally:
            self.inflight -= 1

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("upstream: open() was not awaited, or it is closed")
        return self._session

    def _url(self, path: str) -> str:
        return self._settings.base_url + path

    def _failure(self, error: BaseException) -> UpstreamAnswer:
        base = self._settings.base_url
        # connecting too slowly is "unreachable", not "slow to answer"
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
            message = f"the upstream at {base} did not answer within {self._settings.timeout:g} s"
            return UpstreamAnswer(504, openai_error(message, "upstream_error", code="upstream_timeout"), reached=False)
        message = f"the upstream at {base} cannot be reached: {error or type(error).__name__}"
        return UpstreamAnswer(502, openai_error(message, "upstream_error", code="upstream_unreachable"), reached=False)


def _head(response: aiohttp.ClientResponse, body: bytes) -> UpstreamAnswer:
    kept = {
        name.lower(): _as_sent(value)
        for name, value in response.headers.items()
        if name.lower() in PASSED_BACK or name.lower().startswith("x-ratelimit-")
    }
    return UpstreamAnswer(response.status, body, _as_sent(response.headers.get("content-type", JSON)), kept)


def _as_sent(value: str) -> str:
    """Undo aiohttp's UTF-8: the header's bytes, one character each, as ASGI wants them."""
    return value.encode("utf-8", "surrogateescape").decode("latin-1")


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body
