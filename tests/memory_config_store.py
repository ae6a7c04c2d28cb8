"""A config store in memory, for tests of thousands of turns; `tests/contract/test_config_store_leases.py` holds it to Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping

from serving.config_store import AppliedState, ConfigStoreUnavailable, DesiredState, Lease, LeaseLost, VersionConflict
from serving.knobs import Knobs


class MemoryConfigStore:
    """One namespace. While ``away``, it cannot be reached."""

    def __init__(self) -> None:
        self.away = False
        self.state: DesiredState | None = None
        self.kept: dict[str, Lease] = {}

    def _reach(self) -> None:
        if self.away:
            raise ConfigStoreUnavailable("config store: away")

    async def read(self) -> DesiredState | None:
        self._reach()
        return self.state

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
        self._reach()
        for lease in leases:
            found = self.kept.get(lease.arm)
            if found is None or found.stamp != lease.stamp:
                raise LeaseLost(lease.arm)
        if (self.state.version if self.state else 0) != expected_version:
            raise VersionConflict(str(expected_version))
        self.state = DesiredState(expected_version + 1, dict(arms), now, author, reason)
        return self.state

    async def leases(self) -> dict[str, Lease]:
        self._reach()
        return dict(self.kept)

    async def put_lease(self, lease: Lease, *, found: Lease | None) -> bool:
        self._reach()
        here = self.kept.get(lease.arm)
        if (here.stamp if here else "") != (found.stamp if found else ""):
            return False
        self.kept[lease.arm] = lease
        return True

    async def watch(self) -> AsyncIterator[DesiredState]:
        if self.state is not None:
            yield self.state

    async def report(self, applied: AppliedState) -> None:
        self._reach()

    async def applied(self) -> list[AppliedState]:
        self._reach()
        return []

    async def close(self) -> None:
        """Nothing to release."""
