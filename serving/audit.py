"""The audit: who changed what by the admin API, on its way into the ledger.

The gateway does not know the ledger, which is the tuner's. It appends to a bounded stream in Redis, which
``cachepilot tune`` drains; a gateway without Redis, which nobody tunes, appends to a file, or to its own log. Audits tell of
changes, never of prompts or answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from serving.redis_url import shown
from serving.tiers.redis import check_name

_log = logging.getLogger(__name__)

MOST_KEPT = 10_000
"""Events that the stream keeps at least for a tuner that is not running; the oldest go first."""

MOST_WAITING = 1_000
"""Events of one replica that wait for a Redis that is away; the oldest are given up first. Each is in the log, too."""


class AuditUnavailable(RuntimeError):
    """The audit cannot be read now."""


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One change.

    Attributes:
        at: When it was made, seconds since the epoch.
        actor: Who made it: the first 8 hex digits of the token's SHA-256, as far as they tell tokens apart.
        action: What was done: ``flush``, ``feedback``, ``read``.
        detail: To what, and what came of it; JSON-ready.
    """

    at: float
    actor: str
    action: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the stored form."""
        return orjson.dumps({"at": self.at, "actor": self.actor, "action": self.action, "detail": dict(self.detail)})

    @classmethod
    def from_json(cls, raw: bytes | str) -> AuditEvent:
        """Parse the stored form.

        Raises:
            ValueError: If it is not what :meth:`to_json` writes.
        """
        try:
            value: dict[str, Any] = orjson.loads(raw)
            return cls(float(value["at"]), str(value["actor"]), str(value["action"]), dict(value["detail"]))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"audit: expected at, actor, action and detail as JSON, got {raw[:80]!r} ({error!r})") from error


class Audit(Protocol):
    """Where changes are recorded."""

    async def record(self, event: AuditEvent) -> None:
        """Record one change. Never raises and never waits long: the change is made already."""
        ...

    async def close(self) -> None:
        """Write what waits, as far as that is possible, and release what is open."""
        ...


class LogAudit:
    """Events as lines of the log, at the level of warnings, so that they are there by default."""

    async def record(self, event: AuditEvent) -> None:
        """Log one change."""
        _log.warning("audit: %s", event.to_json().decode())

    async def close(self) -> None:
        """Nothing is open."""


class FileAudit:
    """Events as lines of JSON, appended to a file and synchronised to the disk one by one.

    Args:
        path: The file; its folder is made if missing.

    Raises:
        OSError: If it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")
        self._writing = asyncio.Lock()

    async def record(self, event: AuditEvent) -> None:
        """Append one change; where the disk refuses it, it is in the log."""
        try:
            async with self._writing:
                await asyncio.to_thread(self._append, event.to_json() + b"\n")
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            _log.error("audit: %s cannot be written (%s); the change was: %s", self.path, error, event.to_json().decode())

    async def close(self) -> None:
        """Close the file."""
        async with self._writing:
            self._file.close()

    def _append(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())


class RedisAudit:
    """Events in a bounded stream that all replicas of a namespace share, in order of arrival.

    What Redis does not take is logged at once and sent later: tried again until it is there.

    Args:
        url: Redis.
        namespace: Separates gateways that share it.
        deadline: Seconds that a call may take.
        pause: Seconds between two tries to send what waits.
    """

    def __init__(self, url: str, namespace: str, *, deadline: float = 1.0, pause: float = 5.0) -> None:
        self.stream = f"cachepilot:{{{check_name('audit: namespace', namespace)}}}:audit"
        self.namespace = namespace
        self._url = shown(url)
        self._deadline, self._pause = deadline, pause
        self._redis: Redis = Redis.from_url(url, retry=Retry(NoBackoff(), 1), socket_timeout=None)
        self._waiting: deque[AuditEvent] = deque(maxlen=MOST_WAITING)
        self._sending = asyncio.Lock()
        self._again: asyncio.Task[None] | None = None

    async def record(self, event: AuditEvent) -> None:
        """Append one change, after those that wait."""
        self._waiting.append(event)
        if await self._send():
            return
        _log.error("audit: Redis is away; sent later, unless this process ends: %s", event.to_json().decode())
        if self._again is None or self._again.done():
            self._again = asyncio.create_task(self._send_later(), name="audit")

    async def read(self, after: str = "", *, limit: int = 1000) -> list[tuple[str, AuditEvent]]:
        """Return the oldest events beyond a position.

        Args:
            after: Identifier of the last event that was read; ``""`` starts with the oldest that is kept.
            limit: At most so many.

        Returns:
            Events with their identifiers, which grow. Events that cannot be read are left out and logged.

        Raises:
            AuditUnavailable: If Redis did not answer in time or refused.
        """
        events: list[tuple[str, AuditEvent]] = []
        rows: Any = True
        while rows and not events:  # a page of nothing but unreadable events is not the end
            try:
                async with asyncio.timeout(self._deadline):
                    rows = await self._redis.xrange(self.stream, min=f"({after}" if after else "-", count=limit)
            except (RedisError, OSError, TimeoutError) as error:
                raise AuditUnavailable(
                    f"audit: Redis at {self._url} did not answer within {self._deadline:g} s or refused ({error!r})"
                ) from error
            for identifier, fields in rows:
                after = identifier.decode()
                try:
                    events.append((after, AuditEvent.from_json(fields[b"event"])))
                except (KeyError, ValueError) as error:
                    _log.error("audit: ignored an event that cannot be read: %s (%s)", after, error)
        return events

    async def close(self) -> None:
        """Send what waits, as far as Redis takes it, and close the connection."""
        if self._again is not None:
            self._again.cancel()
            await asyncio.gather(self._again, return_exceptions=True)
        if self._waiting and not await self._send():
            _log.error("audit: %d events were not recorded; they are in the log above", len(self._waiting))
        await self._redis.aclose()

    async def _send_later(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._pause)
            await self._send()

    async def _send(self) -> bool:
        """Send what waits, the oldest first; whether all is sent. An event whose answer was lost may be there twice."""
        async with self._sending:
            try:
                async with asyncio.timeout(self._deadline):
                    while self._waiting:
                        fields: dict[Any, Any] = {"event": self._waiting[0].to_json()}
                        await self._redis.xadd(self.stream, fields, maxlen=MOST_KEPT, approximate=True)
                        self._waiting.popleft()
            except (RedisError, OSError, TimeoutError):
                return False
        return True
