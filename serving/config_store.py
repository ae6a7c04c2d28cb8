"""Desired and applied knobs: how the tuner tells the gateways what to do, and how they say what they did.

The desired state is one versioned document per namespace, so that both arms change in one step. Gateways watch it, apply it and
report the version that they run. A dead tuner or a dead store leaves the gateways on their last knobs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from serving.knobs import Knobs


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


class VersionConflict(RuntimeError):
    """Somebody else wrote a newer desired state first."""


class ConfigStoreUnavailable(RuntimeError):
    """The config store did not answer in time or refused; says where it was looked for."""


class ConfigStore(Protocol):
    """Where the desired and the applied knobs are kept.

    ``read``, ``write``, ``report`` and ``applied`` raise :class:`ConfigStoreUnavailable` when the store cannot be reached;
    ``watch`` never does.
    """

    async def read(self) -> DesiredState | None:
        """Return the desired state, or None before the first write."""
        ...

    async def write(
        self, arms: Mapping[str, Knobs], *, expected_version: int, author: str, reason: str, now: float
    ) -> DesiredState:
        """Replace the desired state if its version still is ``expected_version`` (0: nothing written yet).

        Raises:
            VersionConflict: If it is not; nothing was written.
        """
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
