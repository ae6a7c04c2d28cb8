"""The neighbours' arenas as a tier: a key that this node does not have is asked of the node that owns it, one-sided.

Each key has one owner among the nodes, by rendezvous hashing. Its arena is read by RDMA, or by TCP where one side has none; what
this node's cache stores anew is offered to the owner's inbox, beside the way of the request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from serving.neighbours.exchange import check_secret
from serving.neighbours.membership import Membership
from serving.neighbours.peer import Peer
from serving.neighbours.rendezvous import owner
from serving.neighbours.resolving import Resolver
from serving.neighbours.transport import ClientTransport
from serving.tiers.base import Entry


class NeighbourTier:
    """Reads and feeds the arenas of other nodes. Nobody waits for one that is dead: at most ``deadline`` seconds, once.

    For one event loop. What is not to be had is a miss, whatever the reason; nothing here raises.

    Args:
        own: This node's ``host:port``, as in the list of nodes.
        membership: Knows the nodes; started and closed with this tier.
        transports: What this side has, the best first; closed with this tier.
        secret: Shared by all nodes, at least 16 characters.
        namespace: The cache's.
        deadline: Seconds that a lookup may take.
        own_epoch: Of this node's arena, by which it knows itself under another name.
        clock: A monotonic clock, seconds.
        draw: Gives numbers from 0 to 1, for jitter.

    Attributes:
        counts: By transport (``rdma``, ``tcp``; ``none``: there was no link) and event: ``hits``, ``misses``; ``torn``: lookups
            that found an entry not whole at first; ``behind``: misses since the owner's arena has missed a removal; ``lost``:
            lookups, writes and connections that were not answered; ``offered``: entries written into an inbox; ``dropped``:
            entries that did not get there, being larger than a slot or in excess of room; ``refused``: exchanges that one side
            refused.

    Raises:
        ValueError: If the secret is too short.
    """

    name = "neighbour"

    def __init__(
        self,
        own: str,
        membership: Membership,
        transports: Sequence[ClientTransport],
        *,
        secret: str,
        namespace: str,
        deadline: float = 0.05,
        own_epoch: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.own = own
        self.membership = membership
        self.counts: Counter[tuple[str, str]] = Counter()
        self._transports = tuple(transports)
        self._secret = check_secret(secret)
        self._namespace = namespace
        self._deadline = deadline
        self._own_epoch = own_epoch
        self._clock, self._draw = clock, draw
        self._resolver = Resolver()
        self._peers: dict[str, Peer] = {}
        self._nodes: tuple[str, ...] = ()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Learn of the nodes and begin to make links to them; waits for none of them."""
        await self.membership.start()
        self._meet()

    async def close(self) -> None:
        """Let go of all nodes."""
        await self.membership.close()
        peers, self._peers = list(self._peers.values()), {}
        await asyncio.gather(*(peer.close() for peer in peers), *self._closing, return_exceptions=True)
        self._resolver.close()
        for transport in self._transports:
            transport.close()

    async def get(self, arm: str, key: bytes, *, least: int = 0) -> Entry | None:
        """Return the entry of the key's owner, expired or not; None where that is this node, has none, or cannot be asked.

        Args:
            arm: Name of the arm.
            key: Of the entry.
            least: Number of one of the store's removals; a miss unless all up to that took effect in the owner's arena.
        """
        peer = self._owner(key)
        return None if peer is None else await peer.get(arm, key, least)

    def offer(self, arm: str, entry: Entry, known: int | None = None) -> None:
        """Have the entry written into the inbox of its key's owner, if that is another node. Waits for nothing.

        Args:
            arm: Name of the arm.
            entry: What is offered.
            known: Number of the store's last removal when it had the entry: the owner takes it if no later one took effect there.
                None: the owner takes what was not removed within the last seconds.
        """
        peer = self._owner(entry.key)
        if peer is not None:
            peer.offer(arm, entry, known)

    def outdated(self, arm: str, keys: Sequence[bytes] | None = None) -> None:
        """Offer nobody what was deleted or flushed and has not got on its way yet.

        Args:
            arm: The arm.
            keys: What was deleted; None: all of the arm.
        """
        for peer in self._peers.values():
            peer.outdated(arm, keys)

    def links(self) -> dict[str, str]:
        """Return the transport of the link to each other node by its address; ``none`` where there is no link now."""
        self._meet()
        return {address: peer.transport for address, peer in self._peers.items()}

    def owner(self, key: bytes) -> str:
        """Return the node that owns the key."""
        if self._nodes is not self.membership.nodes:
            self._meet()
        return owner(key, self._nodes) if self._peers else self.own

    def _owner(self, key: bytes) -> Peer | None:
        return self._peers.get(self.owner(key))

    def _meet(self) -> None:
        """Have a peer for each of the other nodes."""
        nodes = self.membership.nodes
        if nodes is self._nodes:
            return
        self._nodes = nodes
        for address in set(self._peers) - set(nodes):
            task = asyncio.create_task(self._peers.pop(address).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for address in nodes:
            if address != self.own and address not in self._peers:
                self._peers[address] = Peer(
                    address,
                    self._transports,
                    secret=self._secret,
                    namespace=self._namespace,
                    deadline=self._deadline,
                    counts=self.counts,
                    own_epoch=self._own_epoch,
                    resolver=self._resolver,
                    clock=self._clock,
                    draw=self._draw,
                )
