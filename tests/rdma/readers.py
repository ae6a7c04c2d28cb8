"""The node that reads, in the guest: its tier or its bare links, and what it can see of the other one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from serving.neighbours import verbs_link
from serving.neighbours.dialing import dial
from serving.neighbours.framing import Framed
from serving.neighbours.link import Hello, Link, LinkLost
from serving.neighbours.membership import StaticMembership
from serving.neighbours.rendezvous import owner
from serving.neighbours.transport import ClientTransport, Dialing, Parameters
from serving.tiers.base import Entry
from serving.tiers.rdma import NeighbourTier
from tests.rdma.nodes import ARM, NAMESPACE, SECRET, Node, key

ARENA = Path("/dev/shm/arena")
SIZE = 8 << 20
OWN = "127.0.0.1:1"
CHECK_SECONDS = 120.0  # that a check may take
PATIENT = 5.0  # seconds that a lookup may take where its time is not what is checked: the guest is slow


class Reader:
    """The other node: its tier, and the numbers of keys that the owner has."""

    def __init__(self, node: Node, transports: Sequence[ClientTransport], deadline: float = PATIENT) -> None:
        self.node = node
        nodes = StaticMembership(OWN, [node.address])
        self.tier = NeighbourTier(OWN, nodes, transports, secret=SECRET, namespace=NAMESPACE, deadline=deadline)
        self._numbers = (number for number in range(1 << 30) if owner(key(number), nodes.nodes) == node.address)

    def take(self, count: int) -> list[int]:
        """Return numbers that were not taken before, whose keys the owner owns."""
        return [next(self._numbers) for _ in range(count)]

    def count(self, event: str, transport: str = "rdma") -> int:
        """Return how often something happened."""
        return self.tier.counts[transport, event]

    async def get(self, number: int) -> Entry | None:
        """Look an entry up."""
        return await self.tier.get(ARM, key(number))

    async def linked(self, transport: str) -> None:
        """Wait until the owner is read by that transport."""
        await until(lambda: self.tier.links() == {self.node.address: transport})


class Altered:
    """A client of RDMA that is told another thing than the owner said."""

    name = "rdma"

    def __init__(self, inner: verbs_link.VerbsClient, change: Callable[[dict[str, int | str]], None]) -> None:
        self._inner, self._change = inner, change

    def dial(self, deadline: float) -> Dialing:
        return _AlteredDialing(self._inner.dial(deadline), self._change)

    def close(self) -> None:
        pass


class _AlteredDialing:
    def __init__(self, inner: Dialing, change: Callable[[dict[str, int | str]], None]) -> None:
        self.parameters = inner.parameters
        self._inner, self._change = inner, change

    async def finish(self, given: Parameters, hello: Hello, connection: Framed) -> Link:
        changed = dict(given)
        self._change(changed)
        return await self._inner.finish(changed, hello, connection)

    def abandon(self) -> None:
        self._inner.abandon()


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until it holds."""
    while True:
        found = holds()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.005)


async def direct(node: Node, client: ClientTransport, deadline: float = PATIENT) -> Link:
    """Return a link without a tier around it."""
    for _ in range(10):
        try:
            return await dial(node.address, [client], secret=SECRET.encode(), namespace=NAMESPACE, deadline=deadline)
        except LinkLost as error:
            if "no exchange within" not in str(error):  # which takes no more than 2 s, but here, where others take the processor
                raise
    raise AssertionError("no exchange in ten")


def queue_pairs(node: Node) -> int:
    """Return how many queue pairs the kernel has for this process and the node's."""
    shown = subprocess.run(["rdma", "-j", "resource", "show", "qp"], capture_output=True, check=True, text=True).stdout
    pairs = [pair for pair in json.loads(shown or "[]") if pair.get("type") == "RC"]
    return sum(1 for pair in pairs if pair.get("pid") in (os.getpid(), node.pid))


def say(text: str) -> None:
    """Print it at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
