"""What one replica learns about answers by meaning, told to all, and kept across restarts.

Outcomes go over one bounded Redis stream (hashes of questions, similarities, right or wrong; no text). Now and then one replica
stores the whole state beside it, with the place in the stream up to which it counts, and a replica that starts goes on from
there. With Redis away each replica learns from its own requests. What could not be told is not told twice: an outcome that
counted twice would claim a certainty that nobody has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from serving.meaning.acceptance import Acceptance, Outcome

_log = logging.getLogger(__name__)

STREAM_MESSAGES = 2_000
"""Messages kept in the stream, each of one replica and one exchange; the stored state holds what is older."""

BATCH = 500
"""Outcomes per message."""

_READ = 200


class AcceptanceFeed:
    """Shares one :class:`serving.meaning.acceptance.Acceptance` among replicas that have a Redis in common.

    Args:
        acceptance: This replica's.
        url: Redis.
        namespace: Separates gateways that share it.
        replica: Name of this replica, unique in the namespace among those that run.
        store_every: Seconds between two stored states, of all replicas together.
        deadline: Seconds that a call may take.
        redis: A client to use instead of one made from ``url``; closed with the feed.
    """

    def __init__(
        self,
        acceptance: Acceptance,
        url: str,
        namespace: str,
        replica: str,
        *,
        store_every: float = 60.0,
        deadline: float = 0.5,
        redis: Redis | None = None,
    ) -> None:
        base = f"cachepilot:{{{namespace}}}:acceptance"
        self._acceptance = acceptance
        self._stream = f"{base}:outcomes"
        self._state = f"{base}:state"
        self._turn = f"{base}:turn"
        self._replica = replica.encode()
        self._store_every = store_every
        self._deadline = deadline
        self._redis: Redis = Redis.from_url(url, retry=Retry(NoBackoff(), 1), socket_timeout=None) if redis is None else redis
        self._last = b"0-0"
        self._opened = False
        self._away = False

    async def exchange(self) -> None:
        """Tell what was observed here, take in what others told, store the state if it is this replica's turn.

        Call it about once per second. The first call that reaches Redis takes over the stored state. Never raises for a Redis
        that is away or for what others wrote.
        """
        told = self._acceptance.drain()
        try:
            async with asyncio.timeout(self._deadline):
                if not self._opened:
                    await self._open(told)
                for start in range(0, len(told), BATCH):
                    fields: dict[Any, Any] = {b"from": self._replica, b"told": _pack(told[start : start + BATCH])}
                    await self._redis.xadd(self._stream, fields, maxlen=STREAM_MESSAGES, approximate=True)
                await self._catch_up()
                milliseconds = max(1, math.ceil(self._store_every * 1000))
                if await self._redis.set(self._turn, self._replica, nx=True, px=milliseconds):
                    await self._store()
            self._away = False
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                _log.warning("acceptance: Redis is away, this replica learns from its own requests alone: %r", error)
            self._away = True

    async def close(self) -> None:
        """Release the connection."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _open(self, own: Sequence[Outcome]) -> None:
        stored = await self._redis.get(self._state)
        if stored is not None:
            try:
                state = orjson.loads(stored)
                last, learned = str(state["last"]).encode(), state["acceptance"]
                # a replica that learned more by itself while Redis was away keeps that
                if int(learned["count"]) >= self._acceptance.stats().outcomes:
                    self._acceptance.load(learned)
                    self._acceptance.merge(own)  # observed a moment ago, and overwritten just now
                self._last = last
            except (ValueError, LookupError, TypeError) as error:
                _log.error("acceptance: ignored a stored state that cannot be read: %r", error)
        # before own outcomes are told: what stands in the stream under this name is from an earlier life
        await self._catch_up(own_too=True)
        self._opened = True

    async def _catch_up(self, *, own_too: bool = False) -> None:
        while True:
            streams: dict[Any, Any] = {self._stream: self._last}
            found: Any = await self._redis.xread(streams, count=_READ)
            messages = found[0][1] if found else []
            for place, fields in messages:
                self._last = place
                if own_too or fields.get(b"from") != self._replica:
                    self._acceptance.merge(_unpack(fields.get(b"told", b"")))
            if len(messages) < _READ:
                return

    async def _store(self) -> None:
        state = {"last": self._last.decode(), "acceptance": self._acceptance.dump()}
        await self._redis.set(self._state, orjson.dumps(state))


def _pack(outcomes: Sequence[Outcome]) -> bytes:
    rows = [[key.hex(), round(similarity, 5), right, feedback] for key, similarity, right, feedback in outcomes]
    return orjson.dumps(rows)


def _unpack(told: bytes) -> list[Outcome]:
    try:
        rows = orjson.loads(told)
        return [
            Outcome(bytes.fromhex(key), float(similarity), right is True, feedback is True)
            for key, similarity, right, feedback in rows
        ]
    except (ValueError, TypeError) as error:
        _log.error("acceptance: ignored a message that cannot be read: %s", error)
        return []
