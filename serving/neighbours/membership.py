"""Which nodes there are: a list in the settings, or what nodes say of themselves in Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from serving.ending import end
from serving.neighbours.dialing import parse_address

REFRESH_SECONDS = 5.0
"""How often a node says that it is there, and asks who else is."""

LIVES_SECONDS = 15.0
"""Seconds after which a node that says nothing is gone."""

MOST_NODES = 256

_DEADLINE = 1.0
_log = logging.getLogger(__name__)

# By Redis' clock; should that go back, who is gone is forgotten in time all the same. KEYS: the sorted set.
# ARGV: milliseconds that an entry lives; a node that is there, or nothing -> the nodes.
_MEET = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] then redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[2]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for _, late in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + ARGV[1], '+inf')) do
  redis.call('ZADD', KEYS[1], now + ARGV[1], late)
end
redis.call('PEXPIRE', KEYS[1], ARGV[1] * 4)
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""


class Membership(Protocol):
    """Knows the nodes.

    Attributes:
        nodes: ``host:port`` of each, this one included, in order.
    """

    nodes: tuple[str, ...]

    async def start(self) -> None:
        """Begin to ask."""
        ...

    async def close(self) -> None:
        """Stop."""
        ...


class StaticMembership:
    """The nodes of the settings.

    Args:
        own: This node's ``host:port``.
        peers: The others'; this one may be among them.

    Raises:
        ValueError: If one is not of that form.
    """

    def __init__(self, own: str, peers: Sequence[str]) -> None:
        for address in (own, *peers):
            parse_address(address, "peers")
        self.nodes = tuple(sorted({own, *peers}))

    async def start(self) -> None:
        """Nothing to ask."""

    async def close(self) -> None:
        """Nothing to say."""


class RedisMembership:
    """The nodes that say in Redis that they are there. While Redis is away the last list stays.

    Args:
        url: Of Redis.
        namespace: The cache's.
        own: This node's ``host:port``, as others reach it.
        serving: Whether this process serves its node's arena, and so speaks for it.
        refresh: Seconds between two questions.
        lives: Seconds after which a node that says nothing is gone.

    Attributes:
        nodes: As of :class:`Membership`.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        own: str,
        *,
        serving: Callable[[], bool],
        refresh: float = REFRESH_SECONDS,
        lives: float = LIVES_SECONDS,
    ) -> None:
        self.nodes: tuple[str, ...] = (own,)
        self._own = own
        self._serving = serving
        self._refresh, self._lives = refresh, lives
        self._key = f"cachepilot:{{{namespace}}}:neighbours"
        self._redis: Redis = Redis.from_url(url)
        self._meet = self._redis.register_script(_MEET)
        self._task: asyncio.Task[None] | None = None
        self._away = False

    async def start(self) -> None:
        """Ask once, and then again and again."""
        await self.ask()
        self._task = asyncio.create_task(self._keep(), name="neighbour-membership")

    async def close(self) -> None:
        """Stop. Others believe the node to be there for a while: another process of it may speak for it next."""
        if self._task is not None:
            await end([self._task])
            self._task = None
        with suppress(RedisError, OSError):
            await self._redis.aclose()

    async def ask(self) -> None:
        """Say that this node is there, and learn of the others; waits a second at most."""
        spoken = [self._own] if self._serving() else []
        try:
            async with asyncio.timeout(_DEADLINE):
                found = await self._meet(keys=[self._key], args=[int(self._lives * 1000), *spoken])
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                _log.warning("neighbours: Redis is away, the %d nodes known stay: %s", len(self.nodes), error)
            self._away = True
            return
        self._away = False
        named = (name.decode(errors="replace") for name in found[:MOST_NODES])
        nodes = tuple(sorted({self._own, *(name for name in named if _is_address(name))}))
        if nodes != self.nodes:
            _log.info("neighbours: the nodes are %s", ", ".join(nodes))
            self.nodes = nodes

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._refresh)
            await self.ask()


def _is_address(name: str) -> bool:
    try:
        parse_address(name, "peers")
    except ValueError:
        return False
    return True
