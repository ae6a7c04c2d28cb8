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
from serving.roll_call import DEADLINE, LIVES_SECONDS, REPORT_SECONDS, RollCall

MOST_NODES = 256

_log = logging.getLogger(__name__)


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
        refresh: float = REPORT_SECONDS,
        lives: float = LIVES_SECONDS,
    ) -> None:
        self.nodes: tuple[str, ...] = (own,)
        self._own = own
        self._serving = serving
        self._refresh = refresh
        self._redis: Redis = Redis.from_url(url)
        self._roll = RollCall(self._redis, f"cachepilot:{{{namespace}}}:neighbours", lives)
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
        try:
            async with asyncio.timeout(DEADLINE):
                found = await self._roll.call(self._own if self._serving() else None)
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
