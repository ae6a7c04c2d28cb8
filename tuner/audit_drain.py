"""What operators did by the gateway's admin API, on its last stretch: from the stream in Redis into the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from experiments.ledger import LedgerError
from serving.audit import AuditEvent, AuditUnavailable


class AuditStream(Protocol):
    """Where the gateways record it; :class:`serving.audit.RedisAudit` is one."""

    async def read(self, after: str = "", *, limit: int = 1000) -> list[tuple[str, AuditEvent]]:
        """Return the oldest events beyond a position, with their identifiers.

        Raises:
            AuditUnavailable: If it cannot be read now.
        """
        ...


class AuditLedger(Protocol):
    """Where it stays; the ledger is one. Both methods may block, and are called from other threads than the loop's."""

    def record_audit(self, namespace: str, events: Sequence[tuple[str, AuditEvent]]) -> int:
        """Append events, each once; how many were new."""
        ...

    def audited(self, namespace: str) -> str:
        """Return the identifier of the newest event recorded; ``""``: none."""
        ...


class AuditDrain:
    """Carries over what the ledger does not have. The ledger itself is the position, so nothing is lost or recorded twice.

    Args:
        stream: Where from.
        ledger: Where to.
        namespace: The gateway's namespace.
    """

    def __init__(self, stream: AuditStream, ledger: AuditLedger, namespace: str) -> None:
        self._stream, self._ledger, self._namespace = stream, ledger, namespace

    async def drain(self) -> tuple[int, str]:
        """Carry over all there is now.

        Returns:
            How many events were new to the ledger, and what went wrong, or ``""``; what is left is for the next time.
        """
        carried = 0
        try:
            after = await asyncio.to_thread(self._ledger.audited, self._namespace)
            while events := await self._stream.read(after):
                carried += await asyncio.to_thread(self._ledger.record_audit, self._namespace, events)
                after = events[-1][0]
        except (AuditUnavailable, LedgerError) as error:
            return carried, str(error)
        return carried, ""
