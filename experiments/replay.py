"""The load generator: sends a trace to an OpenAI-compatible gateway, open-loop.

Open-loop means that a request is sent at its own time whether or not the earlier ones were answered, as independent users do. A
closed loop would wait, and so hide the very queues that P99 is made of. What bounds it is the number of requests under way; a
request that has to wait for room is late, and the result says how many were.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Literal

import aiohttp
import numpy as np
import pandas as pd

from envs.workloads.trace import Trace
from serving.llm_sim import OUTPUT_TOKENS_HEADER

_DRAIN = 64 * 1024

REFUSED_AT_FIRST = 20
"""After so many answers that are all 401 a replay is given up: no later one would be another."""


class ReplayError(RuntimeError):
    """The gateway cannot be replayed against: nothing answers, or it lets nobody in; names the URL and what to do."""


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request that was sent.

    Attributes:
        row: Its row in the trace.
        due: When it was due, seconds since the replay's start.
        sent: When it was sent, seconds since the replay's start.
        latency: Seconds from sending to the complete answer (or to the failure).
        status: HTTP status; 0 where there was no answer.
        cache: The answer's ``x-cache`` (``HIT``, ``SEMANTIC``, ``MISS``, ``BYPASS``), ``""`` where it had none.
        tier: The answer's ``x-cache-tier``.
        arm: The answer's ``x-cache-arm``.
        error: What went wrong where there was no answer, else ``""``.
    """

    row: int
    due: float
    sent: float
    latency: float
    status: int
    cache: str
    tier: str
    arm: str
    error: str


@dataclass(frozen=True)
class ReplayResult:
    """What a replay did.

    Attributes:
        requests: One row per request that was sent, in order of sending, with the columns of :class:`ReplayedRequest`.
        planned: Requests in the trace.
        late: Requests that were sent more than ``late_after`` seconds after their time.
        full: Requests that were due while the window of requests under way was full; most of the late ones are among them.
        worst_lateness: Seconds by which the latest request was late.
        stopped: Whether it was stopped before the trace's end.
        started_at: Seconds since the epoch.
        ended_at: Seconds since the epoch.
    """

    requests: pd.DataFrame
    planned: int
    late: int
    full: int
    worst_lateness: float
    stopped: bool
    started_at: float
    ended_at: float

    @property
    def failed(self) -> int:
        """Requests without an answer or with one that is not 2xx."""
        status = self.requests["status"].to_numpy()
        return int(np.sum((status < 200) | (status >= 300)))

    @property
    def statuses(self) -> dict[str, int]:
        """How many requests had each HTTP status, the most frequent first; ``no answer`` where there was none."""
        counted = self.requests["status"].value_counts()
        return {str(status) if status else "no answer": int(count) for status, count in counted.items()}

    def caveat(self) -> str:
        """Say what makes latencies less than they should be, or ``""``: users that come late do not wait in queues."""
        late = self.late / max(len(self.requests), 1)
        if late <= 0.01:
            return ""
        return (
            f"The load generator sent {late:.1%} of the requests late, the latest by {self.worst_lateness:.1f} s (the window of "
            f"requests under way was full for {self.full:,}): latencies are those of a lighter load than the trace's."
        )

    def summary(self) -> dict[str, float | int | bool | dict[str, int]]:
        """Return the counts, JSON-ready."""
        outcomes = self.requests["cache"].value_counts()
        return {
            "planned": self.planned,
            "sent": len(self.requests),
            "failed": self.failed,
            "statuses": self.statuses,
            "late": self.late,
            "full": self.full,
            "worst_lateness": round(self.worst_lateness, 4),
            "stopped": self.stopped,
            "seconds": round(self.ended_at - self.started_at, 3),
            "outcomes": {str(name) or "none": int(count) for name, count in outcomes.items()},
        }


async def replay(
    trace: Trace,
    base_url: str,
    *,
    model: str,
    api_key: str | None = None,
    on_start: Callable[[], None] | None = None,
    on_result: Callable[[ReplayedRequest], None] | None = None,
    stop: asyncio.Event | None = None,
    max_inflight: int = 256,
    timeout: float = 60.0,
    late_after: float = 0.05,
) -> ReplayResult:
    """Send a trace's requests at their times and record the answers.

    Args:
        trace: What to send; compress it first if time shall run faster.
        base_url: The gateway's URL, with or without ``/v1``.
        model: Name of the model to ask for.
        api_key: Sent as ``Authorization: Bearer``; None: nothing is.
        on_start: Called once it answers, before anything is sent.
        on_result: Called with every request when it is done.
        stop: When set, nothing more is sent; requests under way are given up.
        max_inflight: Most requests under way at once.
        timeout: Longest wait for one answer, seconds.
        late_after: A request sent this much after its time counts as late, seconds.

    Returns:
        What was sent and answered. Failed requests are recorded, not raised.

    Raises:
        ReplayError: If nothing answers at ``base_url`` when the replay starts, or every answer is 401.
    """
    if max_inflight < 1:
        raise ValueError(f"replay: max_inflight: expected a whole number >= 1, got {max_inflight!r}")
    stop = stop or asyncio.Event()
    root = base_url.rstrip("/").removesuffix("/v1")
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        await _check(session, root)
        if on_start is not None:
            on_start()
        run = _Run(trace, session, f"{root}/v1/chat/completions", model, on_result, stop, max_inflight, late_after)
        result = await run.go()
    if result.statuses and set(result.statuses) == {"401"}:
        raise _refused(root, len(result.requests), with_key=bool(api_key))
    return result


def _refused(root: str, count: int, *, with_key: bool) -> ReplayError:
    remedy = (
        "it does not know the key that was given: give one of its tenants' keys (gateway.auth.tenants), or one of the model's"
        if with_key
        else "give a key of one of its tenants (gateway.auth.tenants), or the model's, by --api-key or CACHEPILOT_API_KEY"
    )
    return ReplayError(f"replay: {root} answered all of {count:,} requests with 401: {remedy}")


async def _check(session: aiohttp.ClientSession, root: str) -> None:
    url = f"{root}/v1/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as answer:
            await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ReplayError(
            f"replay: nothing answers at {url} ({str(error) or type(error).__name__}): start the gateway (`cachepilot serve`), "
            "or give the URL at which it listens"
        ) from error


class _Run:
    """One replay under way."""

    def __init__(
        self,
        trace: Trace,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        on_result: Callable[[ReplayedRequest], None] | None,
        stop: asyncio.Event,
        max_inflight: int,
        late_after: float,
    ) -> None:
        self._trace = trace
        self._session = session
        self._url = url
        self._model = model
        self._on_result = on_result
        self._stop = stop
        self._late_after = late_after
        self._room = asyncio.Semaphore(max_inflight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[ReplayedRequest] = []
        self._begin = 0.0
        self._refused = 0
        self._broken: BaseException | None = None
        self._given_up = asyncio.Event()

    async def go(self) -> ReplayResult:
        started_at = time.time()
        self._begin = time.perf_counter()
        full = 0
        over = {asyncio.create_task(event.wait()) for event in (self._stop, self._given_up)}
        try:
            for row, due in enumerate(self._trace.time.tolist()):
                wait = due - self._now()
                # Even without a wait the loop gets its turn, or the requests of a burst would all be sent before any is answered.
                await asyncio.wait(over, timeout=max(wait, 0.0), return_when=asyncio.FIRST_COMPLETED)
                if self._over:
                    break
                if self._room.locked():
                    full += 1
                    if not await self._acquire(over):
                        break
                else:
                    await self._room.acquire()
                task = asyncio.create_task(self._send(row, due))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            while self._tasks and not self._over:
                await asyncio.wait({*over, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = [*over, *self._tasks]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._broken is not None:
            raise self._broken
        return self._result(started_at, full)

    @property
    def _over(self) -> bool:
        """Whether the rest is not to be sent: told so, or given up."""
        return self._stop.is_set() or self._given_up.is_set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()  # a failing on_result is the caller's error, not a failed request
            self._given_up.set()

    async def _acquire(self, over: set[asyncio.Task[Literal[True]]]) -> bool:
        """Wait for room; False if it is over first."""
        room = asyncio.create_task(self._room.acquire())
        await asyncio.wait({*over, room}, return_when=asyncio.FIRST_COMPLETED)
        if room.done():
            return not self._over
        room.cancel()
        return False

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _send(self, row: int, due: float) -> None:
        sent = self._now()
        body = {"model": self._model, "messages": [{"role": "user", "content": self._trace.prompt(row)}]}
        headers = {OUTPUT_TOKENS_HEADER: str(int(self._trace.output_tokens[row]))}
        status, cache, tier, arm, error = 0, "", "", "", ""
        try:
            async with self._session.post(self._url, json=body, headers=headers) as answer:
                async for _ in answer.content.iter_chunked(_DRAIN):
                    pass
                status = answer.status
                cache, tier, arm = (answer.headers.get(name, "") for name in ("x-cache", "x-cache-tier", "x-cache-arm"))
        except (aiohttp.ClientError, TimeoutError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}".rstrip(": ")
        finally:
            self._room.release()
        result = ReplayedRequest(row, due, sent, self._now() - sent, status, cache, tier, arm, error)
        self._done.append(result)
        self._refused += status == 401
        if self._refused == len(self._done) >= REFUSED_AT_FIRST:
            self._given_up.set()
        if self._on_result is not None:
            self._on_result(result)

    def _result(self, started_at: float, full: int) -> ReplayResult:
        done = sorted(self._done, key=lambda item: item.sent)
        columns = [item.name for item in fields(ReplayedRequest)]
        frame = pd.DataFrame([asdict(item) for item in done], columns=columns)
        lateness = frame["sent"].to_numpy(np.float64) - frame["due"].to_numpy(np.float64)
        return ReplayResult(
            requests=frame,
            planned=len(self._trace),
            late=int(np.sum(lateness > self._late_after)),
            full=full,
            worst_lateness=float(lateness.max()) if len(lateness) else 0.0,
            stopped=self._stop.is_set() and len(done) < len(self._trace),
            started_at=started_at,
            ended_at=time.time(),
        )
