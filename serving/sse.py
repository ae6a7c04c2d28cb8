"""Server-sent events, as models stream their answers: bytes in any chunking in, events with their exact place in the stream out.

The format is that of the HTML standard (https://html.spec.whatwg.org/multipage/server-sent-events.html): lines end with LF, CR LF
or CR; a blank line ends an event; lines that begin with a colon are comments; several ``data`` lines make one value with LF in
between; a byte order mark at the very beginning is skipped. Nothing is ever rewritten: what is stored and replayed are the bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DONE = b"[DONE]"
"""The data with which OpenAI's streams end."""

_BOM = b"\xef\xbb\xbf"
_END = rb"(?:\r\n|\n|\r(?!\n))"
_BLANK = re.compile(_END + rb"(" + _END + rb")")
_LINES = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Event:
    """One event that has data.

    Attributes:
        data: Its value, lines joined by LF.
        event: Its type; ``""``: a plain message.
        id: The id that it sets; None where it sets none.
        start: Offset in the stream of its first byte; comments and empty blocks before it belong to it.
        blank: Offset of the blank line that ends it.
        end: Offset behind that.
    """

    data: bytes
    event: str
    id: str | None
    start: int
    blank: int
    end: int

    @property
    def done(self) -> bool:
        """Whether it is ``[DONE]``."""
        return self.data == DONE


class EventParser:
    """Finds the events of one stream, which comes in pieces; the same events at the same places whatever the pieces.

    Attributes:
        position: Bytes fed so far.
    """

    def __init__(self) -> None:
        self.position = 0
        self._buffer = bytearray()
        self._offset = 0  # of the buffer's first byte in the stream
        self._block = 0  # where the current block begins in the buffer
        self._scanned = 0  # up to here there is no blank line in the buffer

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes; return the events that they complete."""
        return [event for event, _ in self.pairs(chunk)]

    def close(self) -> list[Event]:
        """Take the end of the stream; return the event that a last CR completes. One without its blank line is none."""
        return [event for event, _ in self.last_pairs()]

    def pairs(self, chunk: bytes) -> list[tuple[Event, bytes]]:
        """Like :meth:`feed`; each event with its bytes, from its ``start`` to its ``end``."""
        self.position += len(chunk)
        self._buffer += chunk
        # A CR at the end may be half of a CR LF: it waits for the next byte.
        return self._take(len(self._buffer) - self._buffer.endswith(b"\r"))

    def last_pairs(self) -> list[tuple[Event, bytes]]:
        """Like :meth:`close`; each event with its bytes."""
        return self._take(len(self._buffer))

    @property
    def rest(self) -> bytes:
        """The bytes behind the last event: an event that has begun, comments."""
        return bytes(self._buffer)

    def _take(self, limit: int) -> list[tuple[Event, bytes]]:
        buffer, offset, first = self._buffer, self._offset, 0
        pairs: list[tuple[Event, bytes]] = []
        while (found := _BLANK.search(buffer, self._scanned, limit)) is not None:
            blank, end = found.start(1), found.end()
            fields = self._parse(bytes(buffer[self._block : blank]))
            if fields is not None:
                pairs.append((Event(*fields, offset + first, offset + blank, offset + end), bytes(buffer[first:end])))
                first = end
            self._block = self._scanned = end
        # Of a blank line, up to three bytes may be there already (CR LF CR).
        self._scanned = max(self._block, limit - 3)
        if first:
            del buffer[:first]
            self._offset += first
            self._block -= first
            self._scanned -= first
        return pairs

    def _parse(self, block: bytes) -> tuple[bytes, str, str | None] | None:
        if self._offset == 0 and self._block == 0:
            block = block.removeprefix(_BOM)
        data: list[bytes] = []
        kind, name = "", None
        for line in block.split(b"\n") if b"\r" not in block else _LINES.split(block):
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                kind = value.decode("utf-8", "replace")
            elif field == b"id" and b"\0" not in value:
                name = value.decode("utf-8", "replace")
        return (b"\n".join(data), kind, name) if data else None


def events(stream: bytes) -> list[Event]:
    """Return the events of a whole stream."""
    parser = EventParser()
    return parser.feed(stream) + parser.close()


def count(stream: bytes) -> int:
    """Return the number of events of a whole stream, ``[DONE]`` included."""
    return len(events(stream))


def whole(stream: bytes) -> bytes:
    """Return the stream up to the end of its last complete event."""
    found = events(stream)
    return stream[: found[-1].end] if found else b""


def tail(stream: bytes, events: int) -> bytes:
    """Return what follows the first ``events`` events; ``b""`` where there are no more."""
    skip = Skip(events)
    return skip.feed(stream) + skip.close()


class Skip:
    """Passes on what follows the first events of a stream that comes in pieces.

    Args:
        events: How many to skip, >= 0.
    """

    def __init__(self, events: int) -> None:
        self._left = events
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return those that are passed on."""
        if self._left <= 0:
            return chunk
        return self._pass(self._parser.feed(chunk), chunk)

    def close(self) -> bytes:
        """Take the end of the stream; return what is still passed on."""
        return b"" if self._left <= 0 else self._pass(self._parser.close(), b"")

    def _pass(self, found: list[Event], chunk: bytes) -> bytes:
        if len(found) < self._left:
            self._left -= len(found)
            return b""
        behind = self._parser.position - found[self._left - 1].end
        self._left = 0
        return chunk[len(chunk) - behind :] if behind else b""


class Numbers:
    """Writes an ``id`` into each event of a stream that comes in pieces; events that have one get ours instead.

    Args:
        first: The number of the first event.
    """

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._parser = EventParser()

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return the events that they complete, numbered."""
        return self._write(self._parser.pairs(chunk))

    def close(self) -> bytes:
        """Take the end of the stream; return what is left of it, as it is."""
        return self._write(self._parser.last_pairs()) + self._parser.rest

    def _write(self, pairs: list[tuple[Event, bytes]]) -> bytes:
        written: list[bytes] = []
        for event, raw in pairs:
            # Just before the blank line: of several ids in an event the last counts.
            blank = event.blank - event.start
            written += (raw[:blank], b"id: %d\n" % self._next, raw[blank:])
            self._next += 1
        return b"".join(written)
