"""How many memory tiers share the memory part of the budget, and which replica speaks for each, told by way of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from redis.asyncio import Redis
from redis.exceptions import RedisError

from serving.roll_call import DEADLINE, LIVES_SECONDS, RollCall

_log = logging.getLogger(__name__)


class Presence:
    """What replicas tell each other of the memory that they use.

    All replicas of a node share one arena, and a replica without one has memory of its own: neither the number of replicas nor
    that of nodes says how many there are. Until Redis was asked it is one. While Redis is away the last answer stays.

    Args:
        url: Redis.
        namespace: Separates gateways that share it.
        memory: Name of the memory, the same for all replicas that share it.
        replica: Name of this replica, unique in the namespace.
        lives: Seconds after which a replica that says nothing is gone.

    Attributes:
        memories: How many there are, >= 1.
        speaks: Whether this replica says for all that share its memory what that holds: one of them at a time does.
    """

    def __init__(self, url: str, namespace: str, memory: str, replica: str, *, lives: float = LIVES_SECONDS) -> None:
        self.memories = 1
        self.speaks = True
        self._replica = replica
        self._memory = f"{memory} ".encode()
        self._key = f"cachepilot:{{{namespace}}}:memories"
        self._redis: Redis = Redis.from_url(url)
        self._roll = RollCall(self._redis, self._key, lives)
        self._away = False

    @property
    def _member(self) -> bytes:
        return self._memory + self._replica.encode()

    async def move(self, memory: str) -> None:
        """Say that this replica uses another memory from now on, and learn of the others'; waits two seconds at most."""
        await self._leave()
        self._memory = f"{memory} ".encode()
        await self.exchange()

    async def exchange(self) -> None:
        """Say which memory this replica uses, and learn of the others'; waits a second at most."""
        try:
            async with asyncio.timeout(DEADLINE):
                members = await self._roll.call(self._member)
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                _log.info("budgets in memory stay divided by %d, since Redis does not answer: %s", self.memories, error)
            self._away = True
            return
        self._away = False
        self.memories = len({member.partition(b" ")[0] for member in members} | {self._memory.strip()})
        self.speaks = min(each for each in members if each.startswith(self._memory)) == self._member

    async def close(self) -> None:
        """Say that this replica is gone, and release the connection."""
        await self._leave()
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _leave(self) -> None:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(DEADLINE):
                await self._redis.zrem(self._key, self._member)
