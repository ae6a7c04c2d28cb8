"""One answer under way: it grows as the model sends it, and is read by everyone who asks the same thing meanwhile.

A producer appends what comes; any number of readers follow, each from the offset it wants and at its own pace, and one who joins
late gets everything from the beginning. When the last reader has gone, the producer is given up after a grace.

A reader slower than the model holds up nobody: everything is kept up to ``max_bytes``. Beyond it, nobody can join any more, the
window slides behind the *fastest* reader, the producer waits for that one, and readers who fall out of the window are told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from serving.continuation import Continuation
from serving.recording import to_sse
from serving.tiers.base import Entry, Form

READ_STEP = 1 << 16
"""Most bytes that a reader gets at once."""

State = Literal["open", "complete", "cut", "failed", "abandoned"]
"""``open``: still growing; ``complete``: the whole answer; ``cut``: it ended in order, but is not whole; ``failed``: the producer
failed; ``abandoned``: cancelled, since nobody read it any more or the gateway stops."""


class FlightFailed(RuntimeError):
    """The answer ended before its end; what was read of it is all there is. The cause says why."""


class Overrun(FlightFailed):
    """The reader fell behind the others by more than the flight keeps."""


@dataclass(frozen=True, slots=True)
class Head:
    """What comes before an answer's bytes.

    Attributes:
        status: HTTP status.
        content_type: Media type.
        headers: Headers worth passing back, lower-case names.
        private: Whether it is for the one who asked alone: the upstream would not have it stored, and that is heeded.
    """

    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    private: bool = False

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def shareable(self) -> bool:
        """Whether the answer may be given to another client who asked the same: 2xx, and errors that are the upstream's."""
        return (self.ok and not self.private) or self.status >= 500

    @property
    def form(self) -> Form:
        """``sse`` for an event stream, else ``json``."""
        return "sse" if self.content_type.partition(";")[0].strip().lower() == "text/event-stream" else "json"


class Flight:
    """One answer under way. Made by :class:`Flights`; not thread-safe.

    Args:
        arm: The arm it belongs to.
        key: Fingerprint of the request.
        context: Fingerprint of everything but the last user text.
        about: Whatever tells near-identical requests, for :meth:`Flights.near`: the text, the vector.
        max_bytes: Bytes that are kept at most.
        grace: Seconds that it goes on without readers.

    Attributes:
        head: Status and headers, once they are there.
        state: See :data:`State`.
        error: Why it failed.
        entry: The entry it became; for ``settle`` to set, None where it may not be kept.
        origin: ``upstream`` where this replica called the model, ``replica`` where another did.
        began: When it started, by the registry's clock.
        ended: When it ended.
        over: Set when it has ended.
        settled: Set when it has ended and what is kept of it is kept: then ``entry`` is final.
        outdated: Whether a flush came while it was under way: its readers get it, and it is not kept.
    """

    def __init__(
        self,
        arm: str,
        key: bytes,
        *,
        context: bytes = b"",
        about: object = None,
        max_bytes: int = 4 << 20,
        grace: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arm, self.key, self.context, self.about = arm, key, context, about
        self.head: Head | None = None
        self.state: State = "open"
        self.error: BaseException | None = None
        self.entry: Entry | None = None
        self.origin: Literal["upstream", "replica"] = "upstream"
        self.began = clock()
        self.ended = float("inf")
        self.over = asyncio.Event()
        self.settled = asyncio.Event()
        self.outdated = False
        self.unlisted: Callable[[Flight], None] = lambda _: None
        self.abandoned: Callable[[Flight], None] = lambda _: None
        self._max_bytes, self._grace, self._clock = max_bytes, grace, clock
        self._buffer = bytearray()
        self._base = 0
        self._news = asyncio.Event()
        self._moved = asyncio.Event()
        self._readers: set[Reader] = set()
        self._held = False
        self._timer: asyncio.TimerHandle | None = None
        self._resumed = False
        self._continuation: Continuation | None = None
        self._json: bytearray | None = None

    # -- the producer's side -------------------------------------------------------------------------------------------------

    def begin(self, head: Head) -> None:
        """Tell status and headers; before the first byte.

        Raises:
            FlightFailed: If the flight goes on after another producer's death, and this one got an error instead of an answer.
        """
        if self.head is not None:
            if self._resumed and head.ok and head.form == self.head.form:
                return
            if self._resumed and head.ok and self.head.form == "sse":
                self._json = bytearray()  # readers have a stream: the whole answer becomes one when it is here
                return
            raise FlightFailed(f"flight: it had begun with status {self.head.status}; going on, it got {head.status}")
        self.head = head
        if not head.shareable:
            self.unlisted(self)
        self._tell()

    async def append(self, chunk: bytes) -> None:
        """Add bytes to the answer; waits only where the answer is larger than ``max_bytes``, for the fastest reader.

        Raises:
            Diverged: If the flight goes on after another producer's death, and these bytes do not continue what readers have.
            RuntimeError: If the flight has ended, or has no head yet.
        """
        if self.done or self.head is None:
            raise RuntimeError(f"flight: expected begin(), then append(), then finish(); got append() when {self.state}")
        if self._json is not None:
            self._json += chunk
            return
        if self._continuation is not None:
            chunk = self._continuation.feed(chunk)
        if chunk:
            self._buffer += chunk
            self._tell()
            if len(self._buffer) > self._max_bytes:
                await self._slide()

    def finish(self, ok: bool) -> None:
        """End the answer.

        Args:
            ok: Whether it is whole: of a stream, ``[DONE]`` with every choice finished.

        Raises:
            Diverged: As :meth:`append`.
            ValueError: If the flight goes on as a stream, and this producer's answer is no completion.
        """
        if self._json is not None and not self.done:
            stream = to_sse(bytes(self._json), usage=True)
            self._buffer += stream if self._continuation is None else self._continuation.feed(stream)
        if self._continuation is not None and not self.done:
            self._buffer += self._continuation.close()
        self._end("complete" if ok else "cut")

    def fail(self, error: BaseException) -> None:
        """End the answer with what went wrong: readers get the bytes that there are, then :class:`FlightFailed`."""
        self._end("failed", error)

    def abandon(self, why: str = "nobody waited for the answer any more") -> None:
        """End the answer, since it is not wanted any more."""
        self._end("abandoned", FlightFailed(why))

    def resume(self) -> None:
        """Expect another producer, which begins anew: what readers have already is skipped of what it appends.

        Raises:
            FlightFailed: If too much has been read to compare, or the answer is not a stream.
        """
        self.origin = "upstream"
        self._resumed, self._json = True, None
        if self.position == 0:
            return
        if self._base or self.head is None or self.head.form != "sse":
            raise FlightFailed("flight: its producer died, and what was read of it cannot be continued")
        self._continuation = Continuation(bytes(self._buffer))

    @property
    def taken_over(self) -> bool:
        """Whether another replica made it, or began to: what it failed of may be the sharing."""
        return self._resumed or self.origin == "replica"

    def hold(self, held: bool) -> None:
        """Whether readers elsewhere wait for it: counts as a reader."""
        self._held = held
        self._rest()

    # -- the readers' side ---------------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state != "open"

    @property
    def position(self) -> int:
        """Bytes so far."""
        return self._base + len(self._buffer)

    @property
    def body(self) -> bytes | None:
        """All bytes so far; None where there are more than ``max_bytes`` of them, which are not kept."""
        return None if self._base else bytes(self._buffer)

    @property
    def readers(self) -> int:
        """Number of readers that have not closed."""
        return len(self._readers)

    def join(self, *, leader: bool = False) -> Reader:
        """Return a reader, counted from now on until it is closed."""
        reader = Reader(self, leader=leader)
        self._readers.add(reader)
        self._rest()
        return reader

    # -- inside --------------------------------------------------------------------------------------------------------------

    async def news(self) -> None:
        """Wait until something happens to the flight."""
        await self._news.wait()

    def left(self, reader: Reader) -> None:
        """A reader has closed."""
        self._readers.discard(reader)
        self._moved.set()
        self._rest()

    def moved(self) -> None:
        """A reader has read on."""
        self._moved.set()

    def piece(self, position: int) -> bytes:
        """Return the next bytes from a position, ``b""`` where there are none yet.

        Raises:
            Overrun: If they are no longer kept.
        """
        start = position - self._base
        if start < 0:
            raise Overrun(f"flight: the reader is at byte {position}, and only what follows byte {self._base} is kept")
        return bytes(self._buffer[start : start + READ_STEP])

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _end(self, state: State, error: BaseException | None = None) -> None:
        if self.done:
            return
        self.state, self.error, self.ended = state, error, self._clock()
        self.over.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell()

    def _rest(self) -> None:
        """Begin or stop waiting for somebody to come back."""
        waited_for = bool(self._readers) or self._held or self.done
        if waited_for and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not waited_for and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if not self.done:
            self.unlisted(self)
            self.abandoned(self)

    async def _slide(self) -> None:
        self.unlisted(self)
        while True:
            surplus = len(self._buffer) - self._max_bytes
            fastest = max((reader.position for reader in self._readers), default=self._base)
            take = min(surplus, fastest - self._base)
            if take > 0:
                del self._buffer[:take]
                self._base += take
            if take >= surplus:
                return
            self._moved.clear()
            await self._moved.wait()


class Reader:
    """One who reads a flight; a context manager, since the flight counts it until it is closed.

    Attributes:
        flight: What it reads.
        leader: Whether it is the one whose request started the flight.
        position: How far it has read, bytes.
    """

    def __init__(self, flight: Flight, *, leader: bool) -> None:
        self.flight = flight
        self.leader = leader
        self.position = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading; harmless when done already."""
        self.flight.left(self)

    @property
    def shared(self) -> bool:
        """Whether the answer comes from a call that was made for another request."""
        return not self.leader or self.flight.origin == "replica"

    async def head(self) -> Head:
        """Wait for status and headers.

        Raises:
            FlightFailed: If the flight ended without.
        """
        flight = self.flight
        while flight.head is None:
            if flight.done:
                raise FlightFailed(f"the answer did not begin: {_why(flight)}") from flight.error
            await flight.news()
        return flight.head

    async def begins_with(self, beginning: bytes) -> bool:
        """Wait until it is known whether the answer begins with these bytes; False where its beginning is no longer kept."""
        flight = self.flight
        while True:
            body = flight.body
            if body is None or body.startswith(beginning):
                return body is not None
            if flight.done or not beginning.startswith(body):
                return False
            await flight.news()

    async def read(self, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the answer's bytes from an offset as they come, at most :data:`READ_STEP` at once, to its end.

        An offset beyond the end of an answer that has ended yields nothing.

        Raises:
            FlightFailed: After the last byte, if the flight failed or was abandoned. A cut one ends in order: see its ``state``.
            Overrun: If the bytes at the offset are no longer kept.
        """
        flight, self.position = self.flight, offset
        while True:
            piece = flight.piece(self.position)
            if piece:
                yield piece
                self.position += len(piece)
                flight.moved()
            elif flight.done:
                if flight.error is not None:
                    raise FlightFailed(f"the answer broke off after {flight.position} bytes: {_why(flight)}") from flight.error
                return
            else:
                await flight.news()

    async def body(self) -> bytes:
        """Wait for the end and return the whole answer.

        Raises:
            FlightFailed: As :meth:`read`.
        """
        return b"".join([piece async for piece in self.read()])


def _why(flight: Flight) -> str:
    return str(flight.error) or type(flight.error).__name__ if flight.error is not None else flight.state
