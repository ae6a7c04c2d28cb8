"""Which of several tuners writes an arm's knobs: the one that has the arm's lease; the others look on and take over when it ends.

As Kubernetes' leader election has it: the lease lies in the config store, its owner renews it every interval, and who finds it
unchanged for as long as it lasts, by a clock of its own, takes it. Clocks of two machines are never compared. That alone would
not keep a tuner that was stopped for a while from writing late: the store compares the lease within the write.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from serving.config_store import ConfigStore, ConfigStoreUnavailable, Lease

LASTS_INTERVALS = 3.0
"""Intervals, each with the time that the replicas have to confirm, without a renewal after which others may take a lease."""


def lasts_for(interval: float, confirm_timeout: float) -> float:
    """Return how long the lease of a tuner with such intervals lasts, seconds."""
    return LASTS_INTERVALS * (interval + confirm_timeout)


def owner_name() -> str:
    """Return a name for this tuner that people find the process by and that no other tuner has, not one started again either."""
    host = re.sub(r"\s+", "-", socket.gethostname()) or "unknown"
    return f"{host}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A lease as it was found last, and since when it has been found so.

    Attributes:
        lease: The lease.
        since: Seconds by the clock of who looks.
    """

    lease: Lease
    since: float


def sight(before: Sighting | None, found: Lease, now: float) -> Sighting:
    """Return the sighting after another look; a clock that was set back begins anew."""
    same = before is not None and before.lease == found and before.since <= now
    return before if before is not None and same else Sighting(found, now)


def claim(arm: str, seen: Sighting | None, *, owner: str, lasts: float, now: float) -> Lease | None:
    """Decide whether a tuner may have an arm's lease now.

    Args:
        arm: The arm.
        seen: What was found in the store; None: nothing.
        owner: The tuner that asks.
        lasts: How long its lease is to last, seconds.
        now: Seconds by its clock.

    Returns:
        The lease to store in place of what was found, a renewal or a new one; None while it is another's.
    """
    if seen is None:
        return Lease(arm, owner, now, lasts, 1)
    found = seen.lease
    if found.owner == owner:
        return replace(found, lasts=lasts, revision=found.revision + 1)
    if found.owner and now - seen.since < found.lasts:
        return None
    return Lease(arm, owner, now, lasts, found.revision + 1)


class LeaseKeeper:
    """Takes, renews and gives back the leases of a tuner's arms.

    Args:
        store: The config store.
        arms: The arms.
        owner: This tuner's name; see :func:`owner_name`.
        lasts: How long its leases last without a renewal, seconds.
        clock: Seconds.

    Attributes:
        held: The leases that this tuner has, by arm, as the store has them.
        others: The leases that other tuners have, by arm.
    """

    def __init__(self, store: ConfigStore, arms: Iterable[str], *, owner: str, lasts: float, clock: Callable[[], float]) -> None:
        self.held: Mapping[str, Lease] = {}
        self.others: Mapping[str, Lease] = {}
        self._store, self._arms = store, tuple(arms)
        self._owner, self._lasts, self._clock = owner, lasts, clock
        self._seen: dict[str, Sighting] = {}
        self._owners: dict[str, str] = {}  # as people were told
        self._news: list[str] = []

    async def renew(self) -> None:
        """Renew the leases that this tuner has, and take those that nobody has.

        Raises:
            ConfigStoreUnavailable: If the store did not answer: none is held then, as far as is known.
            ValueError: If what is stored cannot be read; likewise.
        """
        self.held = self.others = {}
        try:
            found = await self._store.leases()
            now = self._clock()
            self._seen = {arm: sight(self._seen.get(arm), lease, now) for arm, lease in found.items() if arm in self._arms}
            held, others = {}, {}
            for arm in self._arms:
                seen = self._seen.get(arm)
                wanted = claim(arm, seen, owner=self._owner, lasts=self._lasts, now=now)
                if wanted is not None and await self._store.put_lease(wanted, found=seen.lease if seen else None):
                    held[arm] = wanted
                    self._seen[arm] = Sighting(wanted, now)
                    continue
                # Somebody was quicker, if it was to be had at all.
                lease = found.get(arm) if wanted is None else (await self._store.leases()).get(arm)
                if lease is not None and lease.owner != self._owner:
                    others[arm] = lease
        except (ConfigStoreUnavailable, ValueError):
            # An owner could not renew meanwhile either: it has its whole time once the store is back.
            self._seen = {}
            raise
        self.held, self.others = held, others
        for arm in self._arms:
            self._tell(arm)

    async def give_back(self) -> None:
        """Let another tuner take the leases at once; where the store is away they lapse."""
        held, self.held = self.held, {}
        for lease in held.values():
            try:
                await self._store.put_lease(replace(lease, owner="", revision=lease.revision + 1), found=lease)
            except ConfigStoreUnavailable:
                return

    def told(self) -> str:
        """Return what people were not told yet, or ``""``."""
        news, self._news = self._news, []
        return "; ".join(news)

    def _tell(self, arm: str) -> None:
        before = self._owners.get(arm, "")
        if arm in self.held:
            if before not in ("", self._owner):
                self._news.append(f"this tuner has the lease of arm {arm!r} now, which {before} had: it tunes from here on")
            self._owners[arm] = self._owner
        elif arm in self.others:
            other = self.others[arm]
            if before != other.owner:
                lost = "this tuner lost the lease: " if before == self._owner else ""
                self._news.append(
                    f"{lost}arm {arm!r} is tuned by another tuner, {other.owner} (host:process:random), which has its lease "
                    f"since {datetime.fromtimestamp(other.since, UTC):%Y-%m-%d %H:%M:%S} UTC. This one looks on, records, and "
                    f"changes nothing; it takes over when that one ends, or {other.lasts:g} s after that one was last seen. "
                    "Keep it as a standby, or end one of the two"
                )
            self._owners[arm] = other.owner
