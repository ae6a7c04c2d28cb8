"""How many memory tiers share the memory part of the budget, and which replica speaks for each, told by way of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from redis.asyncio import Redis
from redis.exceptions import RedisError

REPORT_SECONDS = 5.0
"""How often a replica says which memory it uses."""

LIVES_SECONDS = 15.0
"""Seconds after which a replica that says nothing is gone."""

_DEADLINE = 1.0
_log = logging.getLogger(__name__)

# By Redis' clock; should that go back, who is gone is forgotten in time all the same. KEYS: the sorted set.
# ARGV: milliseconds that a member lives, the member -> all members.
_REPORT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for _, late in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + ARGV[1], '+inf')) do
  redis.call('ZADD', KEYS[1], now + ARGV[1], late)
end
redis.call('PEXPIRE', KEYS[1], ARGV[1] * 4)
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""


class Presence:
    """What replicas tell each other of the memory that they use.

    All replicas of a node share one arena, and a replica without one has memory of its own: neither the number of replicas nor
    that of nodes says how many there are. Until Redis was asked it is one. While Redis is away the last answer stays.

    Args:
        url: Redis.
        namespace: Separates gateways that share it.
        memory: Name of the memory, the same for all replicas that share it.
        replica: Name of this replica, unique in the namespace.

    Attributes:
        memories: How many there are, >= 1.
        speaks: Whether this replica says for all that share its memory what that holds: one of them at a time does.
    """

    def __init__(self, url: str, namespace: str, memory: str, replica: str) -> None:
        self.memories = 1
        self.speaks = True
        self._memory = f"{memory} ".encode()
        self._member = self._memory + replica.encode()
        self._key = f"cachepilot:{{{namespace}}}:memories"
        self._redis: Redis = Redis.from_url(url)
        self._report = self._redis.register_script(_REPORT)
        self._away = False

    async def exchange(self) -> None:
        """Say which memory this replica uses, and learn of the others'; waits a second at most."""
        try:
            async with asyncio.timeout(_DEADLINE):
                members = await self._report(keys=[self._key], args=[int(LIVES_SECONDS * 1000), self._member])
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
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_DEADLINE):
                await self._redis.zrem(self._key, self._member)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()
