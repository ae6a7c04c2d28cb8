"""The config store on Redis: desired and applied knobs, and whose they are to write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any

import orjson
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from serving.config_store import AppliedState, ConfigStoreUnavailable, DesiredState, Lease, LeaseLost, VersionConflict
from serving.knobs import Knobs
from serving.redis_url import shown
from serving.tiers.redis import check_name

_log = logging.getLogger(__name__)

FORGOTTEN_AFTER = 20.0
"""How many times the life of a report it is kept where nobody reads it."""

# KEYS: desired, leases. ARGV: expected version, the document, its version, channel, then arm, stamp, ... of the leases needed
# -> 1; or 0, the version found if it is another one; or 2, the arm whose lease is another one.
_WRITE = """
for i = 5, #ARGV, 2 do
  local lease = redis.call('HGET', KEYS[2], ARGV[i]) or ''
  if string.match(lease, '^(%d+ %S*) ') ~= ARGV[i + 1] then return {2, ARGV[i]} end
end
local found = redis.call('HGET', KEYS[1], 'version') or '0'
if found ~= ARGV[1] then return {0, found} end
redis.call('HSET', KEYS[1], 'version', ARGV[3], 'document', ARGV[2])
redis.call('PUBLISH', ARGV[4], ARGV[3])
return {1, ARGV[3]}
"""

# KEYS: leases. ARGV: arm, the stamp that is expected or '', the lease with its stamp -> whether it was stored.
_PUT_LEASE = """
local found = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if (string.match(found, '^(%d+ %S*) ') or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

# The server's clock decides what is forgotten: the replicas' clocks may differ.
# KEYS: applied. ARGV: replica, report, seconds after which a report is forgotten.
_REPORT = """
local now = tonumber(redis.call('TIME')[1])
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local at = string.match(all[i + 1], '^(%d+) ')
  if not at or now - tonumber(at) > tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], all[i]) end
end
redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[3])))
"""

# KEYS: applied. ARGV: seconds after which a report is forgotten -> replica, report, ...
_APPLIED = """
local now = tonumber(redis.call('TIME')[1])
local all = redis.call('HGETALL', KEYS[1])
local result = {}
for i = 1, #all, 2 do
  local at, report = string.match(all[i + 1], '^(%d+) (.*)$')
  if not at or now - tonumber(at) > tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[1], all[i])
  else
    result[#result + 1] = all[i]
    result[#result + 1] = report
  end
end
return result
"""


class RedisConfigStore:
    """Keeps the desired state in one hash, the reports and the leases in two others; all of one Redis Cluster slot.

    A write is one atomic script: compare the leases and the version, set, publish. Every call is one round trip; ``report`` and
    ``applied`` are O(replicas). Reports expire when the last replica has gone; the desired state and the leases stay.
    A write whose answer was lost may have happened: read before trying again.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        namespace: Separates caches on one Redis.
        report_ttl: Seconds (whole, rounded up) after which a replica that does not report is forgotten.
        poll: Seconds between two looks of :meth:`watch`, should a publication be lost.
        deadline: Seconds that a call may take.

    Raises:
        ValueError: If the URL or the namespace is not well-formed, or a time is not > 0.
    """

    def __init__(
        self, url: str, namespace: str = "default", report_ttl: float = 15.0, *, poll: float = 1.0, deadline: float = 2.0
    ) -> None:
        if not (report_ttl > 0 and poll > 0 and deadline > 0):
            raise ValueError(f"config store: expected times > 0, got {report_ttl=}, {poll=}, {deadline=}")
        base = f"cachepilot:{{{check_name('config store: namespace', namespace)}}}"
        self.url = url
        self.namespace = namespace
        self._desired = f"{base}:desired"
        self._applied = f"{base}:applied"
        self._leases = f"{base}:leases"
        self._channel = f"{base}:changes"
        self._report_ttl = report_ttl
        self._poll = poll
        self._deadline = deadline
        # No socket_timeout: redis-py would send inside asyncio.wait_for, which before Python 3.12 may swallow a cancellation.
        self._redis = Redis.from_url(url, retry=Retry(NoBackoff(), 1), socket_timeout=None)
        self._write = self._redis.register_script(_WRITE)
        self._report = self._redis.register_script(_REPORT)
        self._list = self._redis.register_script(_APPLIED)
        self._put_lease = self._redis.register_script(_PUT_LEASE)

    async def read(self) -> DesiredState | None:
        """Return the desired state, or None before the first write.

        Raises:
            ConfigStoreUnavailable: If Redis did not answer in time or refused.
            ValueError: If what is stored is not a desired state.
        """
        document = await self._call(lambda: self._redis.hget(self._desired, "document"))
        return DesiredState.from_json(document) if document is not None else None

    async def write(
        self,
        arms: Mapping[str, Knobs],
        *,
        expected_version: int,
        author: str,
        reason: str,
        now: float,
        leases: Collection[Lease] = (),
    ) -> DesiredState:
        """Replace the desired state, if it and the leases still are these: :meth:`serving.config_store.ConfigStore.write`.

        Raises:
            VersionConflict: If the version is another one; nothing was written.
            LeaseLost: If a lease is another one; nothing was written.
            ConfigStoreUnavailable: If Redis did not answer in time or refused.
        """
        state = DesiredState(expected_version + 1, dict(arms), now, author, reason)
        args: list[bytes | int | str] = [expected_version, state.to_json(), state.version, self._channel]
        for lease in leases:
            args += [lease.arm, lease.stamp]
        done, found = await self._call(lambda: self._write(keys=[self._desired, self._leases], args=args))
        if done == 2:
            raise LeaseLost(f"lease of arm {found.decode(errors='replace')!r} of {self.namespace!r}: another one has it now")
        if not done:
            raise VersionConflict(
                f"desired knobs of {self.namespace!r}: expected version {expected_version}, "
                f"found {found.decode(errors='replace')}; somebody else wrote first: read again and decide anew"
            )
        return state

    async def watch(self) -> AsyncIterator[DesiredState]:
        """Yield the desired state now and whenever it changes.

        Never ends and never raises for a Redis that goes away: it tries again after 0.05 to 2 s, and yields what changed
        meanwhile. States that follow each other quickly may be skipped, never the last one.
        """
        last: bytes | None = None
        backoff = 0.05
        while True:
            try:
                async with self._redis.pubsub() as feed:
                    await feed.subscribe(self._channel)
                    while True:
                        document = await self._call(lambda: self._redis.hget(self._desired, "document"))
                        backoff = 0.05
                        # A Redis that lost its data knows nothing: the gateways stay on their last knobs.
                        if document is not None and document != last:
                            last = document
                            state = self._parse(document)
                            if state is not None:
                                yield state
                        await feed.get_message(timeout=self._poll)
            except (ConfigStoreUnavailable, RedisError, OSError, TimeoutError) as error:
                _log.info("config store: next try in %.2g s: %s", backoff, error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, 2.0)

    async def report(self, applied: AppliedState) -> None:
        """Say what a replica runs; forgotten ``report_ttl`` seconds after the last time.

        Raises:
            ConfigStoreUnavailable: If Redis did not answer in time or refused.
        """
        value = orjson.dumps({"version": applied.version, "reported_at": applied.reported_at})
        # The reader says when a report is too old for it. Here it is only seen to that nothing stays for ever.
        kept = FORGOTTEN_AFTER * self._report_ttl
        await self._call(lambda: self._report(keys=[self._applied], args=[applied.replica, value, kept]))

    async def applied(self) -> list[AppliedState]:
        """Return the replicas that reported lately, by name.

        Raises:
            ConfigStoreUnavailable: If Redis did not answer in time or refused.
        """
        found = await self._call(lambda: self._list(keys=[self._applied], args=[self._report_ttl]))
        states = []
        for replica, value in zip(found[::2], found[1::2], strict=True):
            try:
                report = orjson.loads(value)
                states.append(AppliedState(replica.decode(), int(report["version"]), float(report["reported_at"])))
            except (LookupError, TypeError, ValueError) as error:
                _log.error("config store: ignored a report of %r that cannot be read: %r (%s)", replica, value, error)
        return sorted(states, key=lambda state: state.replica)

    async def leases(self) -> dict[str, Lease]:
        """Return the leases by arm, those given back included.

        Raises:
            ConfigStoreUnavailable: If Redis did not answer in time or refused.
            ValueError: If what is stored is not a lease: whose it is cannot be known then.
        """
        found = await self._call(lambda: self._redis.hgetall(self._leases))
        leases = {}
        for arm, value in found.items():
            stamp, _, document = value.partition(b" {")
            try:
                lease = Lease.from_json(b"{" + document)
                if (lease.arm.encode(), lease.stamp.encode()) != (arm, stamp):
                    raise ValueError(f"lease: expected that of {arm!r} with the stamp {stamp!r}, got {lease!r}")
            except ValueError as error:
                name = arm.decode(errors="replace")
                raise ValueError(
                    f"{error}; if no other version of cachepilot wrote it, remove it: HDEL {self._leases} {name}"
                ) from error
            leases[lease.arm] = lease
        return leases

    async def put_lease(self, lease: Lease, *, found: Lease | None) -> bool:
        """Store an arm's lease if the one there still is ``found`` (None: there is none); whether it was stored.

        One whose answer was lost may have been stored: look before trying again.

        Raises:
            ConfigStoreUnavailable: If Redis did not answer in time or refused.
        """
        expected = found.stamp if found is not None else ""
        args: list[bytes | str] = [lease.arm, expected, lease.stamp.encode() + b" " + lease.to_json()]
        return bool(await self._call(lambda: self._put_lease(keys=[self._leases], args=args)))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(self._deadline):
                return await call()
        except (RedisError, OSError, TimeoutError) as error:
            raise ConfigStoreUnavailable(
                f"config store: Redis at {shown(self.url)} did not answer within {self._deadline:g} s or refused "
                f"({type(error).__name__} {error}); "
                "check that it runs and that the URL is right"
            ) from error

    def _parse(self, document: bytes) -> DesiredState | None:
        try:
            return DesiredState.from_json(document)
        except ValueError as error:
            _log.error("config store: ignored a desired state that cannot be read: %s", error)
            return None
