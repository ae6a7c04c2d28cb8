"""Who is there: members say so in Redis again and again, and are forgotten when they have said nothing for a while."""

from __future__ import annotations

from redis.asyncio import Redis

REPORT_SECONDS = 5.0
"""How often a member says that it is there."""

LIVES_SECONDS = 15.0
"""Seconds after which a member that says nothing is gone."""

DEADLINE = 1.0
"""Seconds that a call may take."""

# By Redis' clock; should that go back, who is gone is forgotten in time all the same. KEYS: the sorted set.
# ARGV: milliseconds that a member lives; a member that is there, or nothing -> the members.
_CALL = """
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


class RollCall:
    """One roll in Redis.

    Args:
        redis: The client; stays its owner's.
        key: Of the sorted set.
        lives: Seconds after which a member that says nothing is gone.
    """

    def __init__(self, redis: Redis, key: str, lives: float = LIVES_SECONDS) -> None:
        self._script = redis.register_script(_CALL)
        self._key, self._lives = key, lives

    async def call(self, member: bytes | str | None = None) -> list[bytes]:
        """Say that a member is there, if one is given, and return all that are.

        Raises:
            RedisError: If Redis refuses.
            OSError: If it cannot be reached.
        """
        present = [] if member is None else [member]
        found: list[bytes] = await self._script(keys=[self._key], args=[int(self._lives * 1000), *present])
        return found
