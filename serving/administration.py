"""What the admin API does to a replica: looks, removes, and tells the acceptance rule what people say of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.admin import FlushWhere, FoundEntry, Verdict
from serving.audit import Audit, FileAudit, LogAudit, RedisAudit
from serving.redis_url import address
from serving.runtime import Runtime
from serving.settings import GatewaySettings
from serving.tiers.base import Entry, EntryMeta, TierUnavailable

DELETE_STEP = 500
"""Entries removed by one call to the store."""


def open_audit(settings: GatewaySettings) -> Audit:
    """Return where operators' changes are recorded: in Redis, beside the access log, or in the gateway's own log."""
    url = address(settings)
    if not settings.auth.admin:
        return LogAudit()
    if url is not None:
        return RedisAudit(url, settings.namespace)
    return FileAudit(settings.access_log / "audit.jsonl") if settings.access_log is not None else LogAudit()


class Administration:
    """The :class:`serving.admin.AdminBackend` of one replica.

    Args:
        runtime: The replica.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def stats(self) -> Mapping[str, Any]:
        """Return what the replica counts and holds; JSON-ready."""
        runtime = self._runtime
        await runtime.fetcher.storing.all_arrived()
        arms: dict[str, Any] = {}
        for arm in runtime.names:
            tiers = await runtime.cache.stats(arm)
            arms[arm] = {
                name: {"entries": held.entries, "bytes": held.bytes, "budget": held.budget, "evictions": held.evictions}
                for name, held in tiers.items()
            }
        learned = runtime.meaning.acceptance.stats()
        return {
            "replica": runtime.replica,
            "ready": runtime.ready,
            "version": runtime.version,
            "arms": arms,
            "flights": len(runtime.flights),
            "upstream": {
                "inflight": runtime.upstream.inflight,
                "waiting": runtime.upstream.waiting,
                "refused": runtime.upstream.refused,
            },
            "semantic": {
                "enabled": runtime.meaning.enabled,
                "outcomes": learned.outcomes,
                "entries": learned.entries,
                "alarms": learned.alarms,
            },
        }

    async def knobs(self) -> Mapping[str, Any]:
        """Return the version and the knobs by arm; JSON-ready."""
        runtime = self._runtime
        return {"version": runtime.version, "arms": {arm: runtime.cache.knobs(arm).to_dict() for arm in runtime.names}}

    async def find(self, entry_id: str) -> FoundEntry | None:
        """Return the entry whose key begins with these digits, without making it recently used; None: there is none."""
        place = await self._place(entry_id)
        if place is None:
            return None
        found = await self._runtime.cache.find(*place)
        return None if found is None else FoundEntry(place[0], *found)

    async def feedback(self, entry_id: str, verdict: Verdict, similarity: float | None) -> bool | None:
        """Tell the acceptance rule what a person says of an answer; remove a bad one from every tier.

        Returns:
            Whether the entry was removed; None where there is no such entry.
        """
        place = await self._place(entry_id)
        if place is None:
            return None
        arm, key = place
        self._runtime.meaning.acceptance.feedback(key, verdict == "good", 1.0 if similarity is None else similarity)
        if verdict == "good":
            return False
        held = await self._runtime.cache.withdraw(arm, key)
        await self._runtime.cache.until_all_listen()
        return held

    async def flush(self, where: FlushWhere) -> int:
        """Remove the entries that match, from every tier of every replica; how many there were.

        Raises:
            TierUnavailable: If the store cannot be asked, for some arm: what can be removed of the others is.
        """
        await self._runtime.fetcher.storing.all_arrived()
        removed, away = 0, None
        for arm in self._runtime.names:
            if where.arm in (None, arm):
                try:
                    removed += await self._flush_arm(arm, where)
                except TierUnavailable as error:
                    away = error
        if away is not None:
            raise away
        await self._runtime.cache.until_all_listen()
        return removed

    async def _flush_arm(self, arm: str, where: FlushWhere) -> int:
        cache = self._runtime.cache
        if where.whole_arms:
            return await cache.flush(arm)
        # What is under way was asked before the flush.
        await cache.outdate(arm, {name: value for name, value in where.given().items() if name != "arm"})
        doomed: list[bytes] = []
        async for step in cache.heads(arm):
            doomed += [head.key for head in step if where.matches(arm, EntryMeta.load(head.meta))]
        removed = 0
        for first in range(0, len(doomed), DELETE_STEP):
            removed += await cache.delete_many(arm, doomed[first : first + DELETE_STEP])
        return removed

    async def _place(self, entry_id: str) -> tuple[str, bytes] | None:
        """The arm and key of an entry; the memory tier is looked through first, since it is at hand."""
        wanted = bytes.fromhex(entry_id)
        await self._runtime.fetcher.storing.all_arrived()

        def match(step: list[Entry]) -> bytes | None:
            return next((head.key for head in step if head.key.startswith(wanted)), None)

        cache = self._runtime.cache
        for tier in (cache.memory, *([cache.store] if cache.store is not None else [])):
            for arm in self._runtime.names:
                async for step in tier.scan(arm):
                    key = match(step)
                    if key is not None:
                        return arm, key
        return None
