"""Messages over a TCP connection: a length of four bytes, then so many bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

_LENGTH = struct.Struct("<I")


class Framed(asyncio.Protocol):
    """Cuts a stream of bytes into messages; takes no more while what it sends is not taken.

    Attributes:
        limit: Bytes of the largest message that is taken; a larger one ends the connection.
        received: Called with each message, as soon as it is whole. What it raises as ``ValueError`` ends the connection.
        ended: Called once, when the connection has ended, with the reason in words.
        open: Whether the connection has not ended.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.received: Callable[[bytes], None] = lambda _: None
        self.ended: Callable[[str], None] = lambda _: None
        self.open = False
        self.peer = "?"
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._full = False
        self._reason = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)
        _keep_alive(transport.get_extra_info("socket"))
        address = transport.get_extra_info("peername")
        self.peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        self.open = True

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._buffer += data
        self._deliver()

    def pause_writing(self) -> None:
        """Called by the event loop: the other side does not take what it is sent, so nothing more is taken of it."""
        self._full = True
        if self._transport is not None and self.open:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Called by the event loop."""
        self._full = False
        if self._transport is not None and self.open:
            self._transport.resume_reading()
            self._deliver()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self._end(self._reason or (str(error) if error is not None else "the connection was closed"))

    def send(self, *parts: bytes | memoryview) -> None:
        """Send the parts as one message; they are dropped if the connection has ended."""
        if self._transport is None or not self.open:
            return
        size = sum(len(part) for part in parts)
        if size <= 1 << 12:
            self._transport.write(_LENGTH.pack(size) + b"".join(parts))
        else:
            self._transport.write(_LENGTH.pack(size) + parts[0])
            for part in parts[1:]:
                self._transport.write(part)

    def abort(self, reason: str = "closed by this side") -> None:
        """End the connection at once, whatever has not been sent."""
        if self._transport is not None and self.open:
            self._reason = reason
            self._transport.abort()
            self._end(reason)

    def finish(self) -> None:
        """End the connection when what was sent is on its way."""
        if self._transport is not None and self.open:
            self._transport.close()

    def _deliver(self) -> None:
        begin = 0
        while self.open and not self._full and len(self._buffer) - begin >= 4:
            (size,) = _LENGTH.unpack_from(self._buffer, begin)
            if size > self.limit:
                self.abort(f"a message of {size} bytes, where at most {self.limit} are expected")
                return
            if len(self._buffer) - begin < 4 + size:
                break
            message = bytes(memoryview(self._buffer)[begin + 4 : begin + 4 + size])
            begin += 4 + size
            try:
                self.received(message)
            except ValueError as error:
                self.abort(str(error))
                return
        del self._buffer[:begin]

    def _end(self, reason: str) -> None:
        if self.open:
            self.open = False
            self._buffer.clear()
            ended, self.ended = self.ended, lambda _: None
            ended(reason)


def _keep_alive(connection: socket.socket | None) -> None:
    """Have the kernel end the connection when the other machine is gone without a word, after half a minute."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
