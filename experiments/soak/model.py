"""The simulated model of the soak, with a record of how each of its calls went: what it caused is not the gateway's fault."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import orjson
import uvicorn

from serving.llm_sim import LlmSim
from serving.settings import LlmSimSettings

CallOutcome = Literal["ok", "error", "cut", "silent", "left"]
"""``error``: a status of 5xx; ``cut``: it ended before its end; ``silent``: the caller went away before it began; ``left``: the
caller went away later."""

START_SECONDS = 30.0
SLACK = 6.0
"""Seconds by which a client may hear late of what the model did: where Redis failed before a lease was given back, a call
that has ended is still followed until the lease lapses."""

_TAIL = 64


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call that reached the model.

    Attributes:
        began: When it arrived, seconds by ``time.monotonic``.
        ended: When it ended.
        outcome: How.
    """

    began: float
    ended: float
    outcome: CallOutcome


class WatchedModel:
    """The simulated model at a free loopback port, as a context manager.

    Args:
        settings: Its settings; host and port are not heeded.

    Attributes:
        base_url: As OpenAI's clients take it; valid inside the context.
    """

    def __init__(self, settings: LlmSimSettings) -> None:
        self.base_url = ""
        self._sim = LlmSim(settings)
        self._calls: defaultdict[bytes, list[ModelCall]] = defaultdict(list)
        self._counted: Counter[str] = Counter()
        self._listener = socket.socket()
        config = uvicorn.Config(
            self._watched, log_level="critical", access_log=False, lifespan="off", interface="asgi3", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._listener]), name="soak-model", daemon=True)

    def __enter__(self) -> WatchedModel:
        self._listener.bind(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"soak: the simulated model did not start within {START_SECONDS:g} s")
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    def counted(self) -> dict[str, int]:
        """Return the number of calls by outcome."""
        return dict(sorted(self._counted.items()))

    def caused(
        self,
        messages: Sequence[list[dict[str, str]]],
        outcome: CallOutcome,
        since: float,
        until: float,
        *,
        patience: float = 0.0,
    ) -> bool:
        """Whether a call with any of these messages went so, while a client waited for it.

        Args:
            messages: The messages of the request, and of those that mean the same.
            outcome: How the call went.
            since: When the client began to wait, seconds by ``time.monotonic``.
            until: When it had its answer.
            patience: Seconds that a call must have been silent before it counts as such.
        """
        return any(
            call.outcome == outcome
            and (outcome != "silent" or call.ended - call.began >= patience)
            and call.began <= until + SLACK
            and call.ended >= since - SLACK
            for each in messages
            for call in tuple(self._calls[orjson.dumps(each)])
        )

    async def _watched(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/chat/completions"):
            await self._sim(scope, receive, send)
            return
        began, asked, tail, status, over = time.monotonic(), bytearray(), b"", 0, False

        async def heard() -> Any:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def watched(message: Mapping[str, Any]) -> None:
            nonlocal status, tail, over
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                tail = (tail + message.get("body", b""))[-_TAIL:]
                over = not message.get("more_body")
            await send(message)

        try:
            await self._sim(scope, heard, watched)
        finally:
            self._record(bytes(asked), began, _outcome(status, over, tail))

    def _record(self, body: bytes, began: float, outcome: CallOutcome) -> None:
        self._counted[outcome] += 1
        try:
            messages = orjson.loads(body)["messages"]
        except (orjson.JSONDecodeError, LookupError, TypeError):
            return
        self._calls[orjson.dumps(messages)].append(ModelCall(began, time.monotonic(), outcome))


def _outcome(status: int, over: bool, tail: bytes) -> CallOutcome:
    if not status:
        return "silent"
    if status >= 500:
        return "error"
    if not over:
        return "left"
    return "ok" if tail.endswith((b"data: [DONE]\n\n", b"}")) else "cut"
