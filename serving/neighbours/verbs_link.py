"""Links over RDMA: reads and writes that the peer's processor has no part in.

The side that reads registers a small landing area, of lanes; each operation takes one, or several one after another, and gives it
back when it is completed, even if its caller has gone away meanwhile. Completions are polled for a moment, which is as long as
hardware takes, and then awaited by the completion channel's descriptor in the event loop.

The side that is read registers the arena, to be read only, and for each reader the slots of its inbox, to be written. Keys are
new with each registration, so those of an earlier start open nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import time
import weakref
from collections import deque
from typing import Any, Literal

from serving.arena.layout import UNIT, Words
from serving.neighbours.framing import Framed
from serving.neighbours.link import Hello, LinkLost
from serving.neighbours.tcp import check_read, check_write
from serving.neighbours.transport import Offer, Parameters
from serving.neighbours.verbs import Device, Endpoint, QueuePair, Region, Remote, VerbsError

LANES = 64
"""Operations of one link that are under way at most."""

LANE_BYTES = 16 * 1024
"""Bytes of a lane; longer reads and writes take several."""

SPIN = 20e-6
"""Seconds that a completion is polled for before the event loop goes on."""

YIELD = 200e-6
"""Seconds between polls where the completion channel has no descriptor."""

PROBE_SECONDS = 1.0
"""Seconds that the first read over a link may take, whatever the deadline: the exchange is bounded."""

_log = logging.getLogger(__name__)


class _Operation:
    """One request to the device, and who waits for it."""

    __slots__ = ("done", "lane", "length", "what")

    def __init__(self, what: Literal["read", "write"], lane: int, length: int, done: asyncio.Future[bytes]) -> None:
        self.what = what
        self.lane = lane
        self.length = length
        self.done = done


class _Landing:
    """Registered memory of this side, cut into lanes."""

    def __init__(self, device: Device) -> None:
        self.memory = mmap.mmap(-1, LANES * LANE_BYTES)
        self.region = device.register(self.memory, "none")

    def close(self) -> None:
        self.region.close()
        with contextlib.suppress(BufferError):  # unmapped when nobody has it any more
            self.memory.close()


class VerbsLink:
    """A link to one peer over RDMA; see :class:`serving.neighbours.link.Link`.

    Args:
        pair: Connected with the peer's.
        landing: Where reads land and writes come from; closed with the link.
        arena: The peer's arena.
        inbox: Our slots at the peer; None where we have none.
        hello: What the peer said.
        deadline: Seconds that an operation may take.
        connection: That of the exchange, which tells that the peer is gone.
    """

    transport = "rdma"
    hello: Hello
    lost: bool

    def __init__(
        self,
        pair: QueuePair,
        landing: _Landing,
        arena: Remote,
        inbox: Remote | None,
        hello: Hello,
        deadline: float,
        connection: Framed,
    ) -> None:
        self.hello = hello
        self.lost = False
        self._reason = ""
        self._pair, self._landing, self._arena, self._inbox = pair, landing, arena, inbox
        self._deadline = deadline
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._free = list(range(LANES))
        self._queue: deque[asyncio.Future[int]] = deque()
        self._waiting: dict[int, _Operation] = {}
        self._number = 0
        self._armed = False
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = pair.descriptor
        if self._descriptor is not None:
            self._loop.add_reader(self._descriptor, self._noticed)
        connection.received = self._spoken
        connection.ended = lambda reason: self.lose(f"{connection.peer}: {reason}")

    async def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the peer's arena; see :meth:`serving.neighbours.link.Link.read`."""
        check_read(offset, length)
        address, rkey = self._arena.address + offset, self._arena.rkey
        if length <= LANE_BYTES:
            return await self._operate("read", address, length, rkey)
        return b"".join(
            await asyncio.gather(
                *(
                    self._operate("read", address + begin, min(LANE_BYTES, length - begin), rkey)
                    for begin in range(0, length, LANE_BYTES)
                )
            )
        )

    async def write(self, slot: int, data: bytes) -> None:
        """Write into a slot of ours at the peer; see :meth:`serving.neighbours.link.Link.write`."""
        check_write(self.hello, slot, len(data))
        assert self._inbox is not None  # it is there where there are slots
        address, rkey = self._inbox.address + slot * self.hello.slot_bytes, self._inbox.rkey
        for begin in range(0, len(data), LANE_BYTES):
            part = data[begin : begin + LANE_BYTES]
            await self._operate("write", address + begin, len(part), rkey, part)

    async def close(self) -> None:
        """Let go of the peer; see :meth:`serving.neighbours.link.Link.close`."""
        self.lose("closed by this side")

    # -- operations ----------------------------------------------------------------------------------------------------------

    async def _operate(self, what: Literal["read", "write"], address: int, length: int, rkey: int, data: bytes = b"") -> bytes:
        if self.lost:
            raise LinkLost(self._reason)
        lane = self._free.pop() if self._free else await self._wait_for_lane()
        if self.lost:  # while it waited
            raise LinkLost(self._reason)
        done: asyncio.Future[bytes] = self._loop.create_future()
        self._number += 1
        self._waiting[self._number] = _Operation(what, lane, length, done)
        begin = lane * LANE_BYTES
        if data:
            self._landing.memory[begin : begin + length] = data
        region = self._landing.region
        try:
            self._pair.post(what, self._number, region.remote.address + begin, length, region.lkey, address, rkey)
        except VerbsError as error:
            self.lose(str(error))
        until = time.perf_counter() + SPIN
        while not done.done():
            self._collect()
            if time.perf_counter() >= until:
                break
        if not done.done():
            self._watch()
        if done.done():
            return done.result()
        timer = self._loop.call_later(self._deadline, self._overdue, done)
        try:
            return await done
        finally:
            timer.cancel()

    async def _wait_for_lane(self) -> int:
        lane: asyncio.Future[int] = self._loop.create_future()
        self._queue.append(lane)
        try:
            async with asyncio.timeout(self._deadline):
                return await lane
        except BaseException as error:
            if lane.done() and not lane.cancelled() and lane.exception() is None:  # it came at the same time
                self._give_back(lane.result())
            if isinstance(error, TimeoutError):
                raise LinkLost(f"{self._connection.peer}: no answer in {self._deadline:g} s") from None
            raise

    def _collect(self) -> None:
        """Give what was completed to those who wait for it."""
        if self.lost:
            return
        try:
            completed = self._pair.poll()
        except VerbsError as error:
            self.lose(str(error))
            return
        for number, wrong in completed:
            operation = self._waiting.pop(number)
            if wrong:
                self._waiting[number] = operation
                self.lose(f"{self._connection.peer}: {wrong}")
                return
            if not operation.done.done():
                begin = operation.lane * LANE_BYTES
                operation.done.set_result(
                    self._landing.memory[begin : begin + operation.length] if operation.what == "read" else b""
                )
            self._give_back(operation.lane)

    def _give_back(self, lane: int) -> None:
        while self._queue:
            waiting = self._queue.popleft()
            if not waiting.done():
                waiting.set_result(lane)
                return
        self._free.append(lane)

    def _watch(self) -> None:
        """See to it that what is under way is noticed when it is completed."""
        if self.lost or not self._waiting:
            return
        if self._descriptor is None:
            if self._timer is None:
                self._timer = self._loop.call_later(YIELD, self._again)
        elif not self._armed:
            self._armed = True
            try:
                self._pair.arm()
            except VerbsError as error:
                self.lose(str(error))
            self._collect()  # what was completed before it was armed gives no notice

    def _noticed(self) -> None:
        self._pair.disarm()
        self._armed = False
        self._collect()
        self._watch()

    def _again(self) -> None:
        self._timer = None
        self._collect()
        self._watch()

    # -- the end -------------------------------------------------------------------------------------------------------------

    def _overdue(self, done: asyncio.Future[bytes]) -> None:
        self._collect()
        if not done.done():
            self.lose(f"{self._connection.peer}: no answer in {self._deadline:g} s")

    def _spoken(self, message: bytes) -> None:
        raise ValueError(f"a message of {len(message)} bytes, where nothing is said any more")

    def lose(self, reason: str) -> None:
        """End the link at once: those who wait are told, then the device lets go of the memory, then the memory goes."""
        if self.lost:
            return
        self.lost, self._reason = True, reason
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
        if self._timer is not None:
            self._timer.cancel()
        for operation in self._waiting.values():
            if not operation.done.done():
                operation.done.set_exception(LinkLost(reason))
        for lane in self._queue:
            if not lane.done():
                lane.set_exception(LinkLost(reason))
        self._waiting.clear()
        self._queue.clear()
        _release(self._pair, self._landing)
        self._connection.ended = lambda _: None
        self._connection.abort(reason)


class VerbsDialing:
    """A link in the making; see :class:`serving.neighbours.transport.Dialing`."""

    def __init__(self, device: Device, deadline: float, links: weakref.WeakSet[VerbsLink]) -> None:
        self._deadline = deadline
        self._links = links
        self._landing = _Landing(device)
        try:
            self._pair = device.queue_pair(LANES)
        except BaseException:
            self._landing.close()
            raise
        self.parameters: Parameters = self._pair.endpoint.parameters()

    async def finish(self, answer: Parameters, hello: Hello, connection: Framed) -> VerbsLink:
        """Return the link, over which something was read; see :meth:`serving.neighbours.transport.Dialing.finish`."""
        try:
            arena = Remote.read(answer, "arena")
            inbox = Remote.read(answer, "inbox") if hello.slots else None
            if arena.length != hello.geometry.bytes or (inbox is not None and inbox.length < hello.slots * hello.slot_bytes):
                raise ValueError(f"expected the memory of {hello}, got {arena} and {inbox}")
            self._pair.connect(Endpoint.read(answer), self._deadline)
        except (ValueError, VerbsError) as error:
            self.abandon()
            raise LinkLost(f"{connection.peer}: its end of an RDMA connection is of no use: {error}") from error
        link = VerbsLink(self._pair, self._landing, arena, inbox, hello, self._deadline, connection)
        self._links.add(link)
        # Both ends can be right and the way between them closed to RDMA: then another transport has to be tried now.
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await link.read(0, UNIT)
        except TimeoutError:
            link.lose(f"{connection.peer}: no answer in {PROBE_SECONDS:g} s")
            raise LinkLost(f"{connection.peer}: no answer by RDMA in {PROBE_SECONDS:g} s") from None
        except BaseException:
            link.lose("given up")
            raise
        return link

    def abandon(self) -> None:
        """Release what was made for a link that does not come about. Safe to call twice."""
        _release(self._pair, self._landing)


class VerbsClient:
    """RDMA at the side that reads; see :class:`serving.neighbours.transport.ClientTransport`.

    Args:
        device: As for :class:`serving.neighbours.verbs.Device`.

    Raises:
        VerbsError: If there is no device, or it cannot be used.
        ValueError: If ``device`` has another form.
    """

    name = "rdma"

    def __init__(self, device: str | None = None) -> None:
        self._device = Device(device)
        self._links: weakref.WeakSet[VerbsLink] = weakref.WeakSet()

    def dial(self, deadline: float) -> VerbsDialing:
        """Begin a link; see :meth:`serving.neighbours.transport.ClientTransport.dial`."""
        try:
            return VerbsDialing(self._device, deadline, self._links)
        except VerbsError as error:
            raise LinkLost(str(error)) from error

    def close(self) -> None:
        """Release the device, and what links are left. Safe to call twice."""
        for link in list(self._links):
            link.lose("the device was released")
        _release(self._device)


class VerbsServed:
    """One reader at the owner's side; see :class:`serving.neighbours.transport.Served`."""

    def __init__(self, device: Device, peer: Endpoint, arena: Region, inbox: memoryview | None) -> None:
        self._slots = device.register(inbox, "write") if inbox is not None else None
        self._pair: QueuePair | None = None
        try:
            self._pair = device.queue_pair()
            self._pair.connect(peer)
            self.parameters: Parameters = {**self._pair.endpoint.parameters(), **arena.remote.parameters("arena")}
            if self._slots is not None:
                self.parameters = {**self.parameters, **self._slots.remote.parameters("inbox")}
        except BaseException:
            self.close()
            raise

    def start(self, connection: Framed) -> None:
        """Nothing more is said on the connection: the device serves the reader."""

        def spoken(message: bytes) -> None:
            raise ValueError(f"a message of {len(message)} bytes, where nothing is said any more")

        connection.received = spoken

    def close(self) -> None:
        """Cut the reader off; see :meth:`serving.neighbours.transport.Served.close`."""
        _release(self._pair, self._slots)


class VerbsServer:
    """RDMA at the owner's side; see :class:`serving.neighbours.transport.ServerTransport`.

    Args:
        arena: The mapped arena, all of it: a writable buffer. Registering pins it, so that all of the file gets memory; it takes
            its time, once (on soft-RoCE 15 s per GiB).
        inbox: The slots of all readers.
        device: As for :class:`serving.neighbours.verbs.Device`.

    Raises:
        VerbsError: If there is no device, or it cannot be used, or the arena cannot be pinned.
        ValueError: If ``device`` has another form.
    """

    name = "rdma"

    def __init__(self, arena: Any, inbox: Any, device: str | None = None) -> None:
        self._device = Device(device)
        self._inbox = memoryview(inbox).cast("B")
        try:
            self._arena = self._device.register(arena, "read")
        except BaseException:
            self._device.close()
            raise

    def accept(self, asked: Parameters, begin: int, length: int) -> VerbsServed:
        """Make the owner's end of a link; see :meth:`serving.neighbours.transport.ServerTransport.accept`."""
        try:
            inbox = self._inbox[begin : begin + length] if length else None
            return VerbsServed(self._device, Endpoint.read(asked), self._arena, inbox)
        except (ValueError, VerbsError) as error:
            raise LinkLost(f"RDMA: {error}") from error

    def close(self) -> None:
        """Release the device: all readers are cut off, and the keys are void. Safe to call twice."""
        _release(self._device)


def offered(device: str | None = None) -> Offer:
    """Return what makes an owner's side over RDMA.

    Args:
        device: As for :class:`serving.neighbours.verbs.Device`.
    """

    def offer(arena: Words, inbox: Words) -> VerbsServer:
        try:
            return VerbsServer(arena, inbox, device)
        except (VerbsError, ValueError) as error:
            raise LinkLost(str(error)) from error

    return offer


def _release(*parts: QueuePair | Region | _Landing | Device | None) -> None:
    """Close them in that order, all of them."""
    for part in parts:
        try:
            if part is not None:
                part.close()
        except VerbsError as error:
            _log.warning("RDMA: %s", error)
