"""A node among its neighbours, from its settings: it serves its arena to them, and reads theirs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from serving.neighbours.membership import Membership, RedisMembership, StaticMembership
from serving.neighbours.server import NeighbourServer
from serving.neighbours.tcp import TcpTransport
from serving.neighbours.transport import ClientTransport, Offer
from serving.settings import NeighbourSettings
from serving.tiers.arena import ArenaTier
from serving.tiers.rdma import NeighbourTier

_log = logging.getLogger(__name__)


class Neighbours:
    """What one process of a node has of neighbours. Close it before the arena's tier.

    Args:
        settings: With ``listen`` and ``secret``.
        arena: The node's arena.
        namespace: The cache's.
        redis_url: By which the nodes find each other, where the settings do not list them; with certificates if it needs some.

    Attributes:
        server: Serves the arena, if no other process of the node does.
        tier: Reads and feeds the other nodes' arenas.

    Raises:
        ValueError: If the settings say nothing of neighbours, or not how they find each other.
    """

    def __init__(self, settings: NeighbourSettings, arena: ArenaTier, *, namespace: str, redis_url: str | None) -> None:
        if settings.listen is None or settings.secret is None:
            raise ValueError("neighbours: expected listen and secret in the settings")
        own = settings.advertise or settings.listen
        secret = settings.secret.get_secret_value()
        clients, offers = choose(settings.transport, settings.device)
        self.server = NeighbourServer(
            arena,
            settings.listen,
            secret=secret,
            namespace=namespace,
            inbox_slots=settings.inbox_slots,
            slot_bytes=settings.slot_bytes,
            offers=offers,
            tcp=settings.transport != "rdma",
        )
        membership: Membership
        if settings.peers:
            membership = StaticMembership(own, settings.peers)
        elif redis_url is not None:
            membership = RedisMembership(redis_url, namespace, own, serving=lambda: self.server.serving)
        else:
            raise ValueError("neighbours: expected peers in the settings, or a Redis by which the nodes find each other")
        self.tier = NeighbourTier(
            own,
            membership,
            clients,
            secret=secret,
            namespace=namespace,
            deadline=settings.deadline,
            own_epoch=arena.mapping.geometry.epoch,
        )

    async def start(self) -> None:
        """Serve and read; waits for no other node."""
        await self.server.start()
        await self.tier.start()

    async def close(self) -> None:
        """Read no more, and then serve no more."""
        await self.tier.close()
        await self.server.close()

    def outdated(self, arm: str, keys: Sequence[bytes] | None = None) -> None:
        """Neither offer nor take what was deleted or flushed and is on its way.

        Args:
            arm: The arm.
            keys: What was deleted; None: all of the arm.
        """
        self.tier.outdated(arm, keys)
        self.server.outdated(arm, keys)


def choose(which: str, device: str | None) -> tuple[list[ClientTransport], list[Offer]]:
    """Return the transports at the side that reads, the best first, and what the server offers beside TCP; says which and why.

    Args:
        which: ``auto``, ``rdma`` or ``tcp``.
        device: The RDMA device; None: the first that is usable.
    """
    clients: list[ClientTransport] = []
    offers: list[Offer] = []
    if which != "tcp":
        # Imported where it is wanted alone: what it needs is an extra.
        from serving.neighbours.verbs import available
        from serving.neighbours.verbs_link import VerbsClient, offered

        missing = available(device)
        if missing is None:
            try:
                clients.append(VerbsClient(device))
                offers.append(offered(device))
            except OSError as error:
                missing = str(error)
        if missing is None:
            _log.info("neighbours: by RDMA%s", "" if which == "rdma" else ", or TCP where a neighbour has none")
        elif which == "rdma":
            _log.warning("neighbours: none are read, since RDMA is demanded and cannot be had: %s", missing)
        else:
            _log.info("neighbours: by TCP, since RDMA cannot be had: %s", missing)
    if which != "rdma":
        clients.append(TcpTransport())
    return clients, offers
