"""Links over TCP: the same reads and writes as over RDMA, carried out by the owner's process on the connection of the exchange.

A request is a message (:mod:`serving.neighbours.framing`) of operation, number, offset or slot, and length or data; its answer
has the number and the bytes. Any number of requests may be under way.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import numpy as np

from serving.arena.layout import H_RESERVED, UNIT, Words
from serving.neighbours.framing import Framed
from serving.neighbours.link import LARGEST_READ, Hello, LinkLost
from serving.neighbours.transport import Parameters

_READ, _WRITE = 1, 2
_DONE, _NO = 0, 1
_REQUEST = struct.Struct("<BxxxIQQ")
_ANSWER = struct.Struct("<BxxxI")
_UNITS = struct.Struct("<q")


class TcpLink:
    """A link to a peer, over TCP.

    Args:
        connection: That of the exchange; the link owns it.
        hello: What the peer said.
        deadline: Seconds that a call may take.

    Attributes:
        transport: ``tcp``.
        hello: As given.
        lost: Whether the link is lost.
    """

    transport = "tcp"

    def __init__(self, connection: Framed, hello: Hello, deadline: float) -> None:
        self.hello = hello
        self.lost = not connection.open
        self._reason = "the connection was closed"
        self._connection = connection
        self._deadline = deadline
        self._number = 0
        self._waiting: dict[int, tuple[asyncio.Future[bytes], int, asyncio.TimerHandle]] = {}
        self._loop = asyncio.get_running_loop()
        connection.limit = _ANSWER.size + LARGEST_READ
        connection.received = self._received
        connection.ended = self._end

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return bytes of the peer's arena; see :meth:`serving.neighbours.link.Link.read`.

        Raises:
            LinkLost: If the peer refused, is gone, or did not answer in time.
            ValueError: If offset or length are not multiples of 64, or too large.
        """
        check_read(offset, length)
        return await self._call(length, _READ, offset, length)

    async def write(self, slot: int, data: bytes) -> None:
        """Write into a slot of ours at the peer; see :meth:`serving.neighbours.link.Link.write`.

        Raises:
            LinkLost: If the peer refused, is gone, or did not answer in time.
            ValueError: If there is no such slot, or it is shorter.
        """
        check_write(self.hello, slot, len(data))
        await self._call(0, _WRITE, slot, len(data), data)

    async def close(self) -> None:
        """End the connection."""
        self._lose("closed by this side")

    async def _call(self, expected: int, operation: int, place: int, length: int, data: bytes = b"") -> bytes:
        if self.lost:
            raise LinkLost(self._reason)
        self._number = number = (self._number + 1) & 0xFFFFFFFF
        future: asyncio.Future[bytes] = self._loop.create_future()
        timer = self._loop.call_later(self._deadline, self._lose, f"no answer within {self._deadline:g} s")
        self._waiting[number] = (future, expected, timer)
        self._connection.send(_REQUEST.pack(operation, number, place, length), data)
        return await future

    def _received(self, message: bytes) -> None:
        if len(message) < _ANSWER.size:
            raise ValueError("its answer is cut short")
        status, number = _ANSWER.unpack_from(message)
        future, expected, timer = self._waiting.pop(number, (None, 0, None))
        if future is None or timer is None:
            raise ValueError("it answers what was not asked")
        timer.cancel()
        content = message[_ANSWER.size :]
        if status == _DONE and len(content) == expected:
            if not future.done():  # else its caller was cancelled
                future.set_result(content)
            return
        reason = f"it refused: {content[:200]!r}" if status != _DONE else f"it sent {len(content)} bytes instead of {expected}"
        if not future.done():
            future.set_exception(LinkLost(reason))
        raise ValueError(reason)

    def _lose(self, reason: str) -> None:
        self._connection.abort(reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.lost:
            self.lost, self._reason = True, reason
        waiting, self._waiting = self._waiting, {}
        for future, _, timer in waiting.values():
            timer.cancel()
            if not future.done():
                future.set_exception(LinkLost(self._reason))


class TcpDialing:
    """A link over TCP in the making."""

    def __init__(self, deadline: float) -> None:
        self.parameters: Parameters = {}
        self._deadline = deadline

    async def finish(self, answer: Parameters, hello: Hello, connection: Framed) -> TcpLink:
        """Return the link over the connection of the exchange."""
        return TcpLink(connection, hello, self._deadline)

    def abandon(self) -> None:
        """Nothing was made."""


class TcpTransport:
    """TCP, at the side that reads."""

    name = "tcp"

    def dial(self, deadline: float) -> TcpDialing:
        """Begin a link whose calls take ``deadline`` seconds at most."""
        return TcpDialing(deadline)

    def close(self) -> None:
        """Nothing to release."""


class TcpServed:
    """The owner's side of one link.

    Args:
        arena: The whole arena.
        slots: The slots of this reader.
        slot_bytes: Bytes of each.
        wake: Called when something was written into them.
    """

    def __init__(self, arena: Words, slots: memoryview, slot_bytes: int, wake: Callable[[], None]) -> None:
        self.parameters: Parameters = {}
        self._arena = arena.data.cast("B")
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._wake = wake
        self._connection: Framed | None = None

    def start(self, connection: Framed) -> None:
        """Answer requests from now on."""
        self._connection = connection
        connection.limit = _REQUEST.size + self._slot_bytes
        connection.received = self._received

    def close(self) -> None:
        """Answer no more, and let go of the memory."""
        self._arena = self._slots = memoryview(b"")
        if self._connection is not None:
            self._connection.received = lambda _: None
            self._connection.abort("the owner ended the link")
            self._connection = None

    def _received(self, message: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        if len(message) < _REQUEST.size:
            raise ValueError("a request is cut short")
        operation, number, place, length = _REQUEST.unpack_from(message)
        if operation == _READ and len(message) == _REQUEST.size:
            self._read(connection, number, place, length)
        elif operation == _WRITE and len(message) == _REQUEST.size + length:
            begin = place * self._slot_bytes
            if not 0 < length <= self._slot_bytes or begin + self._slot_bytes > len(self._slots):
                _refuse(connection, number, "expected a slot of this reader")
                return
            self._slots[begin : begin + length] = message[_REQUEST.size :]
            connection.send(_ANSWER.pack(_DONE, number))
            self._wake()
        else:
            raise ValueError("a request that is none")

    def _read(self, connection: Framed, number: int, offset: int, length: int) -> None:
        if offset % UNIT or length % UNIT or not 0 < length <= LARGEST_READ or offset + length > len(self._arena):
            _refuse(connection, number, f"expected whole units of {UNIT} bytes inside the arena")
            return
        # What has no memory yet must not be touched: without room for it the process would be ended. It is all zeros.
        (reserved,) = _UNITS.unpack_from(self._arena, 8 * H_RESERVED)
        end = min(offset + length, reserved * UNIT)
        there = max(0, end - offset)
        connection.send(_ANSWER.pack(_DONE, number), self._arena[offset : offset + there], bytes(length - there))


class TcpServer:
    """TCP, at the owner's side.

    Args:
        arena: The whole arena.
        inbox: The memory of the inbox.
        slot_bytes: Bytes of a slot.
        wake: Called when something was written into a slot.
    """

    name = "tcp"

    def __init__(self, arena: Words, inbox: Words, slot_bytes: int, wake: Callable[[], None]) -> None:
        self._arena = arena
        self._inbox = inbox
        self._slot_bytes = slot_bytes
        self._wake = wake

    def accept(self, asked: Parameters, begin: int, length: int) -> TcpServed:
        """Return the owner's side of a link that may write those bytes of the inbox."""
        return TcpServed(self._arena, self._inbox.data.cast("B")[begin : begin + length], self._slot_bytes, self._wake)

    def close(self) -> None:
        """Let go of the memory."""
        self._arena = self._inbox = np.zeros(0, np.int64)


def check_read(offset: int, length: int) -> None:
    """Check a read before it goes to whichever transport.

    Raises:
        ValueError: If offset or length are not multiples of 64, or too large.
    """
    if offset < 0 or offset % UNIT or length % UNIT or not 0 < length <= LARGEST_READ:
        raise ValueError(f"link: expected multiples of {UNIT} and at most {LARGEST_READ} bytes, got {length} at {offset}")


def check_write(hello: Hello, slot: int, length: int) -> None:
    """Check a write before it goes to whichever transport.

    Raises:
        ValueError: If there is no such slot, or it is shorter.
    """
    if not 0 <= slot < hello.slots or not 0 < length <= hello.slot_bytes:
        raise ValueError(
            f"link: expected a slot below {hello.slots} and at most {hello.slot_bytes} bytes, got {length} for slot {slot}"
        )


def _refuse(connection: Framed, number: int, words: str) -> None:
    connection.send(_ANSWER.pack(_NO, number), words.encode())
