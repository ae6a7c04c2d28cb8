"""One neighbour as this process sees it: the link to it, kept up, and the entries that are on their way to it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from serving.breaker import CircuitBreaker
from serving.ending import end
from serving.neighbours.dialing import dial
from serving.neighbours.exchange import Refused
from serving.neighbours.inbox import H_TAKEN, HEAD_BYTES, encode
from serving.neighbours.link import Link, LinkLost
from serving.neighbours.lookup import RemoteArena, to_entry
from serving.neighbours.resolving import Resolver
from serving.neighbours.transport import ClientTransport
from serving.tiers.base import Entry
from serving.tiers.codec import pack

BACKOFF = (0.1, 5.0)
"""Seconds before the first try to reach a peer again, and at most; doubled each time, with jitter."""

REFUSED_BACKOFF = 5.0
"""Seconds before the next try to reach a peer that refused: settings do not mend themselves."""

FAILURES, COOLDOWN = 3, 5.0
"""Links in a row that were lost without having answered a lookup, and seconds for which none is made after them."""

MOST_OFFERS = 256
"""Entries that wait for their way to one peer."""

MOST_OFFERED_BYTES = 8 << 20
"""Bytes that wait for their way to one peer."""

OFFER_SECONDS = 1.0
"""Seconds after which an entry that did not get on its way is dropped: it may be outdated, and others wait."""

_LOOK_AGAIN = 0.002  # seconds between two looks for a free slot, doubled up to _LOOK_AT_MOST
_LOOK_AT_MOST = 0.05
_WATCH_SECONDS = 0.5
_log = logging.getLogger(__name__)


class _Offer(NamedTuple):
    """An entry on its way: since when, and the number of the store's last removal when it had it."""

    at: float
    arm: str
    entry: Entry
    known: int | None


class Peer:
    """Reads one neighbour's arena and offers it entries; neither ever waits for a link that is not there.

    Args:
        address: ``host:port`` of the peer.
        transports: What this side has, the best first.
        secret: Shared by all nodes.
        namespace: The cache's.
        deadline: Seconds that a lookup may take.
        counts: Counts by transport and event; see :class:`serving.tiers.rdma.NeighbourTier`.
        own_epoch: Of this node's arena: a peer that has it is this node.
        resolver: Finds the addresses of names, for all peers of this process; stays its owner's.
        clock: A monotonic clock, seconds.
        draw: Gives numbers from 0 to 1, for jitter.
    """

    def __init__(
        self,
        address: str,
        transports: Sequence[ClientTransport],
        *,
        secret: bytes,
        namespace: str,
        deadline: float,
        counts: Counter[tuple[str, str]],
        own_epoch: int | None = None,
        resolver: Resolver | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.address = address
        self._transports = transports
        self._secret, self._namespace = secret, namespace
        self._deadline = deadline
        self._counts = counts
        self._own_epoch = own_epoch
        self._resolver = resolver
        self._clock, self._draw = clock, draw
        self._arena: RemoteArena | None = None
        self._outbox: Outbox | None = None
        self._breaker = CircuitBreaker(FAILURES, COOLDOWN)
        self._down = asyncio.Event()
        self._queued = asyncio.Event()
        self._offers: deque[_Offer] = deque()
        self._offered_bytes = 0
        self._complaint = self._fallback = ""
        self._tasks = [
            asyncio.create_task(self._keep(), name=f"neighbour-link-{address}"),
            asyncio.create_task(self._send(), name=f"neighbour-offers-{address}"),
        ]

    @property
    def transport(self) -> str:
        """``rdma`` or ``tcp``; ``none`` while there is no link."""
        return "none" if self._arena is None else self._arena.link.transport

    async def get(self, arm: str, key: bytes, least: int = 0) -> Entry | None:
        """Return the peer's entry; None where it has none, or cannot be asked. Takes ``deadline`` seconds at most.

        Args:
            arm: Name of the arm.
            key: Of the entry.
            least: As for :meth:`serving.neighbours.lookup.RemoteArena.find`.
        """
        arena = self._arena
        if arena is None or not self._breaker.allow(self._clock()):
            return None
        transport = arena.link.transport
        try:
            async with asyncio.timeout(self._deadline):
                stored = await arena.find(arm, key, least)
        except (LinkLost, TimeoutError) as error:
            self._counts[transport, "lost"] += 1
            await self._lose(arena, error)
            return None
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        self._counts[transport, "torn"] += arena.torn
        self._counts[transport, "behind"] += arena.behind
        arena.torn = arena.behind = 0
        entry = to_entry(key, stored) if stored is not None else None
        self._counts[transport, "hits" if entry is not None else "misses"] += 1
        return entry

    def offer(self, arm: str, entry: Entry, known: int | None = None) -> None:
        """Have the entry written into the peer's inbox when there is time; the oldest that wait give way.

        Args:
            arm: Name of the arm.
            entry: What is offered.
            known: Number of the store's last removal when it had the entry; None: not known.
        """
        arena = self._arena
        if arena is None or HEAD_BYTES + entry.size > arena.link.hello.slot_bytes:
            self._counts[self.transport, "dropped"] += 1
            return
        self._offers.append(_Offer(self._clock(), arm, entry, known))
        self._offered_bytes += entry.size
        while len(self._offers) > MOST_OFFERS or self._offered_bytes > MOST_OFFERED_BYTES:
            self._next_offer()
            self._counts[self.transport, "dropped"] += 1
        self._queued.set()

    def outdated(self, arm: str, keys: Sequence[bytes] | None) -> None:
        """Drop what has not got on its way of what was deleted; None: of the whole arm."""
        if not self._offers:
            return
        gone = None if keys is None else set(keys)
        kept = [each for each in self._offers if each.arm != arm or (gone is not None and each.entry.key not in gone)]
        self._counts[self.transport, "dropped"] += len(self._offers) - len(kept)
        self._offers = deque(kept)
        self._offered_bytes = sum(each.entry.size for each in kept)

    async def close(self) -> None:
        """Let go of the peer."""
        await end(self._tasks)

    # -- the link ------------------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Make the link, and make it again whenever it is lost."""
        tries = 0
        while True:
            least, began = 0.0, self._clock()
            try:
                await self._link()
            except Refused as error:
                self._counts["none", "refused"] += 1
                self._complain(error)
                least = REFUSED_BACKOFF
            except LinkLost as error:
                self._counts["none", "lost"] += 1
                self._complain(error)
            except Exception as error:  # noqa: BLE001 - a link that is not made again tells nobody
                self._counts["none", "lost"] += 1
                self._complain(LinkLost(f"{type(error).__name__}: {error}"))
            # One that is lost at once, again and again, is tried less and less often.
            tries = 0 if self._clock() - began > BACKOFF[1] else tries + 1
            await self._pause(tries, least)

    async def _link(self) -> None:
        """Make a link, and return when it is lost.

        Raises:
            LinkLost: If there is none to be had.
            Refused: If one side refuses the other.
        """
        link = await dial(
            self.address,
            self._transports,
            secret=self._secret,
            namespace=self._namespace,
            deadline=self._deadline,
            fell_back=self._fell_back,
            resolver=self._resolver,
        )
        try:
            if link.hello.geometry.epoch == self._own_epoch:
                words = "that is this node itself, by another name; set advertise to the one by which the others have it"
                raise Refused("protocol", f"{self.address}: {words}")
            arena = RemoteArena(link, clock=self._clock)
            await arena.open()
            outbox = Outbox(link)
            await outbox.look()
            self._complaint = ""
            self._down.clear()
            self._outbox, self._arena = outbox, arena
            _log.info("neighbours: %s is read by %s", self.address, link.transport)
            while not link.lost and not self._down.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_SECONDS):
                        await self._down.wait()
        finally:
            self._arena = self._outbox = None
            await link.close()

    async def _pause(self, tries: int, least: float) -> None:
        first, most = BACKOFF
        pause = max(least, min(most, first * 2.0 ** min(max(0, tries - 1), 16)))
        await asyncio.sleep(pause * (0.5 + self._draw()))

    async def _lose(self, arena: RemoteArena, error: BaseException) -> None:
        if self._arena is arena:  # else another lookup was first to notice
            self._breaker.failed(self._clock())
            self._complain(error if isinstance(error, LinkLost) else LinkLost(f"no answer within {self._deadline:g} s"))
            self._arena = self._outbox = None
            self._down.set()
        else:
            self._breaker.abandoned()
        await arena.link.close()

    def _complain(self, error: OSError) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            _log.warning("neighbours: %s is not read for now: %s", self.address, error)

    def _fell_back(self, words: str) -> None:
        if words != self._fallback:
            self._fallback = words
            _log.warning("neighbours: %s is read %s", self.address, words)

    # -- offers --------------------------------------------------------------------------------------------------------------

    def _next_offer(self) -> _Offer:
        offered = self._offers.popleft()
        self._offered_bytes -= offered.entry.size
        return offered

    async def _send(self) -> None:
        while True:
            if not self._offers:
                self._queued.clear()
                await self._queued.wait()
                continue
            offered = self._next_offer()
            transport = self.transport
            sent = await self._write(offered)
            self._counts[transport, "offered" if sent else "dropped"] += 1

    async def _write(self, offered: _Offer) -> bool:
        """Write an entry into a free slot, once there is one; whether it was."""
        arena, outbox, wait = self._arena, self._outbox, _LOOK_AGAIN
        if arena is None or outbox is None:
            return False
        try:
            while self._clock() < offered.at + OFFER_SECONDS and self._outbox is outbox:
                if outbox.free or await outbox.look():
                    return await outbox.write(offered.arm, offered.entry, offered.known)
                if not outbox.link.hello.slots:
                    return False
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LOOK_AT_MOST)
        except LinkLost as error:
            self._counts[arena.link.transport, "lost"] += 1
            await self._lose(arena, error)
        return False


class Outbox:
    """Our slots in a peer's inbox, as far as this side knows of them.

    Args:
        link: To the peer.

    Attributes:
        link: As given.
        free: Slots that are known to be free.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free: list[int] = []
        self._written = [0] * link.hello.slots

    async def look(self) -> bool:
        """Read what the peer has taken out of our slots; whether one is free.

        Raises:
            LinkLost: If the peer does not answer.
        """
        count = self.link.hello.slots
        if not count:
            return False
        word = H_TAKEN + self.link.hello.first_slot
        begin = word // 8 * 64
        length = -(-(8 * (word + count)) // 64) * 64 - begin
        data = await self.link.read(begin, length)
        if len(data) != length:
            raise LinkLost(f"expected {length} bytes of the header, got {len(data)}")
        words = np.frombuffer(data, np.int64)
        taken = words[word - begin // 8 :][:count]
        self.free = [slot for slot in range(count) if int(taken[slot]) == self._written[slot]]
        return bool(self.free)

    async def write(self, arm: str, entry: Entry, known: int | None = None) -> bool:
        """Write an entry into a slot that is free; whether it is one that can be written.

        Raises:
            LinkLost: If the peer does not answer.
        """
        slot = self.free[-1]
        number = self._written[slot] + 1
        try:
            data = encode(arm, entry.key, pack(entry), number, self.link.hello.geometry.epoch, known)
        except ValueError:
            return False
        if len(data) > self.link.hello.slot_bytes:
            return False
        self.free.pop()
        self._written[slot] = number
        await self.link.write(slot, data)
        return True
