"""What a lookup needs of a transport: one-sided reads of a peer's arena, and writes into slots of the peer's inbox.

Everything else is built on these (:mod:`serving.neighbours.lookup`, :mod:`serving.tiers.rdma`), whatever carries the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from serving.arena.layout import Geometry

LARGEST_READ = 8 << 20
"""Bytes of the longest single read; records that are longer are not read from afar."""


class LinkLost(OSError):
    """The peer is dead, refused, broke the protocol or did not answer in time; the link is of no use any more."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a peer says of its arena and its inbox when a link to it is made.

    Attributes:
        layout: Version of the arena's layout (:data:`serving.arena.layout.VERSION`).
        geometry: Where the parts of the arena are, and its epoch.
        first_slot: Where the slots that are ours begin among all slots of the inbox.
        slots: How many slots of the inbox are ours; may be 0.
        slot_bytes: Bytes of a slot, a multiple of 64.
    """

    layout: int
    geometry: Geometry
    first_slot: int
    slots: int
    slot_bytes: int


class Link(Protocol):
    """A connection to one peer. For one event loop; reads and writes may be called concurrently.

    Attributes:
        transport: ``rdma`` or ``tcp``.
        hello: What the peer said when the link was made.
        lost: Whether the link is known to be lost; every call raises :class:`LinkLost` then.
    """

    transport: str
    hello: Hello
    lost: bool

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return bytes of the peer's arena. Bounded by the link's deadline.

        Args:
            offset: In the arena's file, a multiple of 64.
            length: A multiple of 64, at most :data:`LARGEST_READ`.

        Returns:
            Exactly so many bytes; a view is valid until the next await of the caller.

        Raises:
            LinkLost: If the peer refused, is gone, or did not answer in time. A caller that is cancelled leaves the link usable.
            ValueError: If offset or length are not as above.
        """
        ...

    async def write(self, slot: int, data: bytes) -> None:
        """Write into a slot of ours at the peer, from its first byte on; return when it is completed.

        Args:
            slot: From 0 to ``hello.slots`` - 1.
            data: At most ``hello.slot_bytes``.

        Raises:
            LinkLost: As :meth:`read`.
            ValueError: If there is no such slot, or it is shorter.
        """
        ...

    async def close(self) -> None:
        """Let go of the peer. Safe to call twice, and on a lost link."""
        ...
