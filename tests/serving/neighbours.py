"""Nodes with arenas, servers and tiers, in one process or in several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from serving.neighbours.dialing import dial
from serving.neighbours.link import Link
from serving.neighbours.membership import StaticMembership
from serving.neighbours.server import NeighbourServer
from serving.neighbours.tcp import TcpTransport
from serving.neighbours.transport import ClientTransport
from serving.tiers.arena import ArenaTier
from serving.tiers.rdma import NeighbourTier
from tests.serving.arenas import ARM, MIB

SECRET = "a secret that all the nodes share"
NAMESPACE = "tests"
PATIENT = 5.0
"""Seconds that a call may take where a test is not about that."""


@asynccontextmanager
async def owner(
    path: Path, size: int = 4 * MIB, budget: int = MIB, **options: Any
) -> AsyncIterator[tuple[ArenaTier, NeighbourServer]]:
    """An arena with one arm, and its server on a free port."""
    tier = ArenaTier(path, size)
    tier.resize_now(ARM, budget)
    given = {"listen": "127.0.0.1:0", "secret": SECRET, "namespace": NAMESPACE, **options}
    server = NeighbourServer(tier, given.pop("listen"), **given)
    await server.start()
    try:
        yield tier, server
    finally:
        await server.close()
        tier.close_now()


class Listening(Protocol):
    """Whatever has host and port."""

    address: tuple[str, int]


def address(server: Listening) -> str:
    return f"{server.address[0]}:{server.address[1]}"


async def linked(server: Listening, transports: Sequence[ClientTransport] = (), **options: Any) -> Link:
    """A link to the server."""
    given = {"secret": SECRET.encode(), "namespace": NAMESPACE, "deadline": PATIENT, **options}
    return await dial(address(server), transports or [TcpTransport()], **given)


@asynccontextmanager
async def reader(*nodes: str, own: str = "127.0.0.1:1", **options: Any) -> AsyncIterator[NeighbourTier]:
    """A tier that reads those nodes; its own name owns keys, too."""
    given = {"secret": SECRET, "namespace": NAMESPACE, "deadline": PATIENT, **options}
    transports = given.pop("transports", [TcpTransport()])
    tier = NeighbourTier(own, StaticMembership(own, nodes), transports, **given)
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close()


async def settled(turns: int = 5) -> None:
    """Let what is under way in this event loop go on."""
    for _ in range(turns):
        await asyncio.sleep(0)
