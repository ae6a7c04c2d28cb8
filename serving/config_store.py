"""Desired and applied knobs: how the tuner tells the gateways what to do, and how they say what they did.

The desired state is one versioned document per namespace, so that both arms change in one step. Gateways watch it, apply it and
report the version that they run. A dead tuner or a dead store leaves the gateways on their last knobs.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import orjson

from serving.knobs import Knobs

_LAST_SECOND = 253402300800.0
"""The end of the year 9999, seconds since the epoch: no later time can be shown."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The knobs that every gateway replica should run.

    Attributes:
        version: Grows by one with every write; 0 means that nothing was written yet.
        arms: Knobs by arm.
        written_at: Seconds since the epoch.
        author: Who wrote it (``tuner``, ``experiment``, a person).
        reason: Why, in words.
    """

    version: int
    arms: Mapping[str, Knobs]
    written_at: float
    author: str = ""
    reason: str = ""

    def to_json(self) -> bytes:
        """Return the stored form."""
        return orjson.dumps(
            {
                "version": self.version,
                "arms": {arm: knobs.to_dict() for arm, knobs in self.arms.items()},
                "written_at": self.written_at,
                "author": self.author,
                "reason": self.reason,
            }
        )

    @classmethod
    def from_json(cls, raw: bytes | str) -> DesiredState:
        """Parse the stored form.

        Raises:
            ValueError: If it is not what :meth:`to_json` writes.
        """
        try:
            value: dict[str, Any] = orjson.loads(raw)
            version = int(value["version"])
            if not 0 <= version < 2**63:
                raise ValueError(f"desired knobs: expected a version from 0 to 2**63 - 1, got {version}")
            return cls(
                version,
                {arm: Knobs.from_dict(knobs) for arm, knobs in value["arms"].items()},
                float(value["written_at"]),
                str(value.get("author", "")),
                str(value.get("reason", "")),
            )
        except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
            raise ValueError(f"desired knobs: expected a document with version, arms, written_at; got {raw!r}") from error


@dataclass(frozen=True, slots=True)
class AppliedState:
    """What one gateway replica runs.

    Attributes:
        replica: The replica's name, unique in the cluster.
        version: The desired version that it has applied.
        reported_at: When it last said so, seconds since the epoch.
    """

    replica: str
    version: int
    reported_at: float


@dataclass(frozen=True, slots=True)
class Lease:
    """Whose an arm's knobs are to write, among those that write them again and again.

    The store keeps one per arm and judges no time: its owner renews it, and whoever found it the same for ``lasts`` seconds, by
    a clock of its own, may take it (as Kubernetes' leader election has it, so that no two clocks have to agree).

    Attributes:
        arm: The arm.
        owner: Who has it, without white space; ``""`` once it was given back.
        since: When the owner took it, seconds since the epoch by its own clock.
        lasts: Seconds without a renewal after which others may take it.
        revision: Grows by one with every change; with the owner it is what a write is fenced by.
    """

    arm: str
    owner: str
    since: float
    lasts: float
    revision: int

    def __post_init__(self) -> None:
        if any(map(str.isspace, self.owner)):
            raise ValueError(f"lease: owner: expected no white space, got {self.owner!r}")
        if not (0 < self.lasts < math.inf and 0 <= self.since < _LAST_SECOND and self.revision >= 1):
            raise ValueError(f"lease: expected a time since the epoch, a finite lasts > 0, a revision >= 1; got {self!r}")

    @property
    def stamp(self) -> str:
        """What a store compares."""
        return f"{self.revision} {self.owner}"

    def to_json(self) -> bytes:
        """Return the stored form."""
        return orjson.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: bytes | str) -> Lease:
        """Parse the stored form.

        Raises:
            ValueError: If it is not what :meth:`to_json` writes.
        """
        try:
            value: dict[str, Any] = orjson.loads(raw)
            return cls(
                str(value["arm"]), str(value["owner"]), float(value["since"]), float(value["lasts"]), int(value["revision"])
            )
        except (KeyError, TypeError, OverflowError, orjson.JSONDecodeError) as error:
            raise ValueError(f"lease: expected a document with arm, owner, since, lasts, revision; got {raw!r}") from error


class VersionConflict(RuntimeError):
    """Somebody else wrote a newer desired state first."""


class LeaseLost(RuntimeError):
    """The lease that a write was to be covered by is not the one in the store any more."""


class ConfigStoreUnavailable(RuntimeError):
    """The config store did not answer in time or refused; says where it was looked for."""


class ConfigStore(Protocol):
    """Where the desired and the applied knobs are kept.

    All but ``watch`` and ``close`` raise :class:`ConfigStoreUnavailable` when the store cannot be reached; ``watch`` never does.
    """

    async def read(self) -> DesiredState | None:
        """Return the desired state, or None before the first write."""
        ...

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
        """Replace the desired state if its version still is ``expected_version`` (0: nothing written yet).

        Args:
            arms: The knobs of all arms.
            expected_version: The version that they are to follow.
            author: Who writes.
            reason: Why.
            now: Seconds since the epoch.
            leases: Those that the store must still have as they are here, in the same instant.

        Raises:
            VersionConflict: If the version is another one; nothing was written.
            LeaseLost: If a lease is another one; nothing was written.
        """
        ...

    async def leases(self) -> Mapping[str, Lease]:
        """Return the leases by arm, those given back included.

        Raises:
            ValueError: If what is stored is not a lease.
        """
        ...

    async def put_lease(self, lease: Lease, *, found: Lease | None) -> bool:
        """Store an arm's lease if the one there still is ``found`` (None: there is none); whether it was stored."""
        ...

    def watch(self) -> AsyncIterator[DesiredState]:
        """Yield the desired state now and whenever it changes; survives a store that goes away and comes back."""
        ...

    async def report(self, applied: AppliedState) -> None:
        """Say what a replica runs. A report is forgotten when it is not renewed."""
        ...

    async def applied(self) -> list[AppliedState]:
        """Return the replicas that reported lately."""
        ...

    async def close(self) -> None:
        """Release the connection."""
        ...
