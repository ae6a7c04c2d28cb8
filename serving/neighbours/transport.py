"""What a transport brings beside its link: parameters to exchange, and the owner's side.

The exchange (:mod:`serving.neighbours.exchange`) authenticates both sides over TCP and carries the parameters, which are small
JSON objects. The TCP connection stays open as long as the link: its end tells either side that the other one is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from serving.arena.layout import Words
from serving.neighbours.framing import Framed
from serving.neighbours.link import Hello, Link

Parameters = Mapping[str, int | str]
"""What one side tells the other of its end: addresses, keys, numbers. At most 2 KB as JSON."""


class Dialing(Protocol):
    """One link in the making, at the side that reads.

    Attributes:
        parameters: Of this end, sent to the peer with the proof.
    """

    parameters: Parameters

    async def finish(self, answer: Parameters, hello: Hello, connection: Framed) -> Link:
        """Return the link, which owns the connection from then on: it is lost when the connection ends, and ends it when closed.

        Args:
            answer: Parameters of the peer's end.
            hello: What the peer said.
            connection: That of the exchange. Set its ``received`` and ``ended``; ``abort()`` closes it.

        Raises:
            LinkLost: If the parameters are of no use.
        """
        ...

    def abandon(self) -> None:
        """Release what was made for a link that does not come about."""
        ...


class ClientTransport(Protocol):
    """A transport at the side that reads; one for all its peers.

    Attributes:
        name: ``rdma`` or ``tcp``.
    """

    name: str

    def dial(self, deadline: float) -> Dialing:
        """Begin a link, whose calls shall take ``deadline`` seconds at most.

        Raises:
            LinkLost: If it cannot be begun; the next transport is tried.
        """
        ...

    def close(self) -> None:
        """Release the device."""
        ...


class Served(Protocol):
    """One link at the owner's side.

    Attributes:
        parameters: Of this end, sent to the reader.
    """

    parameters: Parameters

    def start(self, connection: Framed) -> None:
        """The parameters were sent: serve the connection, if the transport needs it. Sets ``connection.received``."""
        ...

    def close(self) -> None:
        """Cut the reader off: when it returns, nobody can read or write by this link any more. Safe to call twice."""
        ...


class ServerTransport(Protocol):
    """A transport at the owner's side; one for all readers. Made with the arena's and the inbox's memory.

    Attributes:
        name: ``rdma`` or ``tcp``.
    """

    name: str

    def accept(self, asked: Parameters, begin: int, length: int) -> Served:
        """Make the owner's end of a link.

        Args:
            asked: Parameters of the reader's end.
            begin: First byte of the reader's slots in the inbox.
            length: Bytes of its slots, which alone it may write; may be 0.

        Raises:
            LinkLost: If the parameters are of no use; the reader is told the message.
        """
        ...

    def close(self) -> None:
        """Release the device; keys that were given out are void from then on."""
        ...


Offer = Callable[[Words, Words], ServerTransport]
"""Makes a transport at the owner's side over the memory of the arena and of the inbox; called in a thread, since registering
memory takes long. Raises :class:`serving.neighbours.link.LinkLost` where it is not to be had; then the node serves without it."""
