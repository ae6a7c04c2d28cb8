"""The owner's side: one process of a node answers its neighbours' links and empties the inbox into the node's arena."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress

from serving.arena.layout import VERSION
from serving.ending import end
from serving.neighbours.dialing import Messages, parse_address
from serving.neighbours.exchange import (
    EXCHANGE_SECONDS,
    LARGEST_MESSAGE,
    NONCE_BYTES,
    Refused,
    answer,
    challenge,
    check_secret,
    open_hello,
    open_proof,
    refusal,
)
from serving.neighbours.framing import Framed
from serving.neighbours.inbox import H_TAKEN, Arrived, Grant, Inbox
from serving.neighbours.link import Hello, LinkLost
from serving.neighbours.lookup import to_entry
from serving.neighbours.tcp import TcpServer
from serving.neighbours.transport import Offer, Parameters, Served, ServerTransport
from serving.tiers.arena import ArenaTier

TAKE_OVER_SECONDS = 1.0
"""How often a process tries to become its node's server."""

MOST_UNPROVEN = 64
"""Connections that have not proved yet that they know the secret; for one more, the oldest is ended."""

MOST_LINKS = 256
"""Links at the same time."""

TURN = 8
"""Entries that one turn takes out of the inbox; requests go in between."""

QUARANTINE = 5.0
"""Seconds for which the inbox takes nothing that was deleted or flushed, if it does not say after which removal it was stored."""

MOST_OUTDATED = 1 << 16
"""Deleted keys that are remembered."""

_POLL = (0.001, 0.02)  # seconds between two looks into the inbox, where nobody tells that something was written
_BUSY_PAUSE = 0.1  # seconds after a put that waited in vain for another writer, which held up all else in this process
_COMPLAINT_SECONDS = 10.0
_LINGER = 1.0
_LOCK = struct.Struct("hhqqi4x")  # struct flock
_LOCK_AT = 1 << 20  # users of the arena lock other bytes
_log = logging.getLogger(__name__)


class NeighbourServer:
    """Serves the arena of a node to its neighbours, if no other process of the node does.

    All processes of a node may have one: whoever locks the arena for it and binds the address serves, the others try again each
    second. All runs in the event loop of :meth:`start`; close it before the tier.

    Args:
        tier: The node's arena. Reads do not take its lease; what comes by the inbox is put as any entry.
        listen: ``host:port``; port 0 takes a free one.
        secret: Shared by all nodes, at least 16 characters.
        namespace: The cache's; neighbours of another one are refused.
        inbox_slots: Slots of the inbox, shared out to the peers.
        slot_bytes: Bytes of a slot; larger entries do not go to other nodes.
        offers: Transports beside TCP.
        tcp: Whether neighbours may read by TCP.
        clock: A monotonic clock, seconds.

    Attributes:
        serving: Whether this process is the node's server.
        address: Host and port that it listens on, while it does.
        counts: ``links``: made; ``refused``: connections; ``taken``: entries put from the inbox; ``known``: entries that were
            there already; ``rejected``: entries that are outdated, no answers, of an arm without a budget, or for which another
            process did not let go of the arena.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        tier: ArenaTier,
        listen: str,
        *,
        secret: str,
        namespace: str,
        inbox_slots: int = 64,
        slot_bytes: int = 65536,
        offers: Sequence[Offer] = (),
        tcp: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serving = False
        self.address = ("", 0)
        self.counts: Counter[str] = Counter()
        self._tier = tier
        self._listen = parse_address(listen, "listen")
        self._secret = check_secret(secret)
        self._namespace = namespace
        self._slots, self._slot_bytes = inbox_slots, slot_bytes
        self._offers, self._tcp = offers, tcp
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._transports: dict[str, ServerTransport] = {}
        self._inbox: Inbox | None = None
        self._unproven: dict[Framed, asyncio.Task[None]] = {}
        self._links: dict[Framed, tuple[Served, Grant]] = {}
        self._outdated: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._complained: dict[str, float] = {}
        self._started = asyncio.Event()

    @property
    def open_links(self) -> int:
        """Links that there are now."""
        return len(self._links)

    async def start(self) -> None:
        """Serve as soon as nobody else of the node does; returns when it does, or is known not to."""
        self._task = asyncio.create_task(self._keep(), name="neighbour-server")
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait((started, self._task), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Cut all links and let another process of the node take over."""
        if self._task is not None:
            await end([self._task])
            self._task = None

    def outdated(self, arm: str, keys: Sequence[bytes] | None = None) -> None:
        """Take nothing by the inbox for :data:`QUARANTINE` seconds that was deleted or flushed: it may have been on its way.

        An entry that comes with the number of the store's last removal is judged by that instead.

        Args:
            arm: The arm.
            keys: What was deleted; None: all of the arm.
        """
        now = self._clock()
        for key in (b"",) if keys is None else keys:
            self._outdated[arm, key] = now + QUARANTINE
            self._outdated.move_to_end((arm, key))
        while self._outdated and (len(self._outdated) > MOST_OUTDATED or next(iter(self._outdated.values())) <= now):
            self._outdated.popitem(last=False)

    # -- becoming the server -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            descriptor = self._lock()
            if descriptor is not None:
                try:
                    await self._serve()
                except Exception as error:  # noqa: BLE001 - a node that is read no more until it is started again tells nobody
                    self._complain(f"serving ended, and is tried again: {type(error).__name__}: {error}")
                finally:
                    os.close(descriptor)
            self._started.set()
            await asyncio.sleep(TAKE_OVER_SECONDS)

    def _lock(self) -> int | None:
        """Lock the arena as its server, by a descriptor of its own; None where another one has it."""
        try:
            descriptor = os.open(self._tier.mapping.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self._complain(f"cannot serve the arena {self._tier.mapping.path}: {error.strerror}")
            return None
        try:
            if not os.path.samestat(os.fstat(descriptor), os.fstat(self._tier.mapping.descriptor)):
                self._complain(f"the arena {self._tier.mapping.path} was replaced; restart this gateway to share the new one")
            else:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCK_AT, 1, 0))
                return descriptor
        except (BlockingIOError, PermissionError):
            pass
        os.close(descriptor)
        return None

    async def _serve(self) -> None:
        """Listen and empty the inbox until cancelled; return if the address cannot be had."""
        loop = asyncio.get_running_loop()
        mapping = self._tier.mapping
        inbox = self._inbox = Inbox(
            self._slots, self._slot_bytes, mapping.words[H_TAKEN : H_TAKEN + self._slots], mapping.geometry.epoch
        )
        try:
            try:
                server = await loop.create_server(lambda: _Incoming(self._arrived), *self._listen)
            except OSError as error:
                self._complain(f"cannot listen on {self._listen[0]}:{self._listen[1]}: {error.strerror or error}")
                return
            try:
                await self._offer(inbox)
                self.address = server.sockets[0].getsockname()[:2]
                self.serving = True
                self._started.set()
                _log.info("neighbours: serving %s on %s:%s by %s", mapping.path, *self.address, ", ".join(self._transports))
                await self._empty(inbox)
            finally:
                self.serving = False
                server.close()
        finally:
            await self._cut()

    async def _offer(self, inbox: Inbox) -> None:
        words = self._tier.mapping.words
        for offer in self._offers:
            try:
                made = await asyncio.to_thread(offer, words, inbox.words)
            except LinkLost as error:
                _log.warning("neighbours: this node offers one transport less: %s", error)
            else:
                self._transports[made.name] = made
        if self._tcp:
            self._transports["tcp"] = TcpServer(words, inbox.words, self._slot_bytes, self._wake.set)

    async def _cut(self) -> None:
        greeting = list(self._unproven.values())
        for task in greeting:
            task.cancel()
        await asyncio.gather(*greeting, return_exceptions=True)
        for connection in list(self._links):
            self._left(connection)
            connection.abort("the owner stopped serving")
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        if self._inbox is not None:
            self._inbox.close()  # an arena that somebody still looks into stays mapped, and so in use
            self._inbox = None

    # -- connections ---------------------------------------------------------------------------------------------------------

    def _arrived(self, connection: Framed) -> None:
        if len(self._links) >= MOST_LINKS or not self.serving:
            connection.abort("too many links")
            self.counts["refused"] += 1
            return
        if len(self._unproven) >= MOST_UNPROVEN:
            oldest = next(iter(self._unproven))
            self._unproven.pop(oldest).cancel()
            oldest.abort("too many connections that have not proved anything")
            self.counts["refused"] += 1
        self._unproven[connection] = asyncio.create_task(self._greet(connection, Messages(connection)), name="neighbour-exchange")

    async def _greet(self, connection: Framed, messages: Messages) -> None:
        try:
            async with asyncio.timeout(EXCHANGE_SECONDS):
                said = [await messages.next()]
                asked = open_hello(said[0], self._namespace)
                name = next((name for name in asked.transports if name in self._transports), None)
                if name is None:
                    raise Refused("transport", f"this node has {' and '.join(self._transports) or 'none'} only")
                said.append(challenge(name, secrets.token_bytes(NONCE_BYTES)))
                connection.send(said[1])
                said.append(await messages.next())
                messages.finish()
                parameters = open_proof(self._secret, said[:2], said[2])
            self._welcome(connection, name, parameters, said)
        except Refused as error:
            self.counts["refused"] += 1
            self._complain(f"refused a connection from {connection.peer.rpartition(':')[0]}: {error}")
            connection.send(refusal(error))
            connection.finish()
            asyncio.get_running_loop().call_later(_LINGER, connection.abort)
        except (TimeoutError, LinkLost):
            self.counts["refused"] += 1
            connection.abort("the exchange was not finished")
        except asyncio.CancelledError:
            connection.abort("the owner stopped serving")
            raise
        finally:
            self._unproven.pop(connection, None)

    def _welcome(self, connection: Framed, name: str, parameters: Parameters, said: Sequence[bytes]) -> None:
        inbox = self._inbox
        if inbox is None or not connection.open:
            raise LinkLost("the connection was closed")
        granted = inbox.grant()
        try:
            served = self._transports[name].accept(parameters, granted.first * self._slot_bytes, granted.count * self._slot_bytes)
        except LinkLost as error:
            inbox.release(granted)
            raise Refused("transport", f"{name}: {error}") from error
        told = Hello(VERSION, self._tier.mapping.geometry, granted.first, granted.count, self._slot_bytes)
        self._links[connection] = (served, granted)
        self.counts["links"] += 1
        connection.received = lambda _: None
        connection.ended = lambda _: self._left(connection)
        connection.send(answer(self._secret, said, told, served.parameters))
        served.start(connection)
        self._wake.set()

    def _left(self, connection: Framed) -> None:
        found = self._links.pop(connection, None)
        if found is not None:
            served, granted = found
            served.close()
            if self._inbox is not None:
                self._inbox.release(granted)

    def _complain(self, words: str) -> None:
        now = self._clock()
        if now >= self._complained.get(words, now):
            if len(self._complained) > MOST_LINKS:
                self._complained.clear()
            self._complained[words] = now + _COMPLAINT_SECONDS
            _log.warning("neighbours: %s", words)

    # -- the inbox -----------------------------------------------------------------------------------------------------------

    async def _empty(self, inbox: Inbox) -> None:
        least, most = _POLL
        wait = least
        while True:
            arrived, more = inbox.take(TURN, self._clock())
            for entry in arrived:
                dropped = self._tier.dropped
                self.counts[self._put(entry)] += 1
                if self._tier.dropped != dropped:
                    await asyncio.sleep(_BUSY_PAUSE)
            if arrived:
                wait = least
                await asyncio.sleep(0)
                continue
            self._wake.clear()
            # Those who write by TCP wake it; others cannot, and what is not whole yet tells nobody when it is.
            told = not more and all(transport.name == "tcp" for transport in self._transports.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(None if told else wait):
                    await self._wake.wait()
            wait = least if self._wake.is_set() else min(2 * wait, most)

    def _put(self, arrived: Arrived) -> str:
        """Put an entry that was in the inbox; what became of it."""
        arm, key = arrived.arm, arrived.key
        now = self._clock()
        # Who knows the number of the store's last removal needs no quarantine: the arena has it compared, under its lease.
        if arrived.known is None and self._outdated and now < max(self._outdated.get((arm, each), now) for each in (b"", key)):
            return "rejected"
        entry = to_entry(key, arrived.stored)
        # An arm that is not there would be made: only this node's own may be.
        if entry is None or self._tier.stats_now(arm).budget <= 0:
            return "rejected"
        held = self._tier.get_now(arm, key, touch=False)
        if held is not None and held.written_at >= entry.written_at:
            return "known"
        self._tier.put_now(arm, entry, known=arrived.known)
        held = self._tier.get_now(arm, key, touch=False)
        return "taken" if held is not None and held.written_at == entry.written_at else "rejected"


class _Incoming(Framed):
    """A connection that somebody else made."""

    def __init__(self, arrived: Callable[[Framed], None]) -> None:
        super().__init__(LARGEST_MESSAGE)
        self._arrived = arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        super().connection_made(transport)
        self._arrived(self)
