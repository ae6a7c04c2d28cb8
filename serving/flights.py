"""Answers under way: one call to the model, read by everyone who asks the same thing meanwhile.

A :class:`Flight` is one answer that grows. A producer appends what the model sends; any number of readers follow, each from the
offset it wants and at its own pace, and one who joins late gets everything from the beginning. The producer runs in a task of
its own, so that no client's disconnect takes the answer from the others; when the last reader has gone, it is cancelled after a
grace.

:class:`Flights` knows the flights of one replica by arm and key. With a :class:`serving.flight_feed.FlightFeed` it shares them
with the other replicas: there, the flight of a follower is fed with what the leader publishes instead of by a call of its own.
Readers see no difference but :attr:`Flight.origin`.

Rules that are not obvious:

* An answer of an error status is offered to those who wait for it only if it is the upstream's fault (5xx). A 4xx may be about
  the first client's key or limits; :attr:`Head.shareable` is False, nobody joins any more, and whoever has joined asks for
  itself.
* A flight that ended well can still be joined by a request that began before it ended: that request's lookup may have been too
  early to find the entry, and its own call too late to join.
* A reader slower than the model holds up nobody: everything is kept up to ``max_bytes``. Beyond it, nobody can join any more, the
  window slides behind the *fastest* reader, the producer waits for that one, and readers who fall out of the window are told.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol

from serving.continuation import Continuation
from serving.tiers.base import Entry, Form

_log = logging.getLogger(__name__)

READ_STEP = 1 << 16
"""Most bytes that a reader gets at once."""

CLAIMS = 3
"""How often a flight whose leader died looks for another leader before it calls the model whatever others do."""

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
    """

    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def shareable(self) -> bool:
        """Whether the answer may be given to another client who asked the same: 2xx, and errors that are the upstream's."""
        return self.ok or self.status >= 500

    @property
    def form(self) -> Form:
        """``sse`` for an event stream, else ``json``."""
        return "sse" if self.content_type.partition(";")[0].strip().lower() == "text/event-stream" else "json"


Producer = Callable[["Flight"], Awaitable[None]]
"""Makes the answer: calls ``flight.begin(head)``, awaits ``flight.append(chunk)`` for each chunk, ends with
``flight.finish(ok)``. What it raises fails the flight. It is cancelled when nobody waits any more: it has to close the upstream's
connection then."""

Settle = Callable[["Flight"], Awaitable[None]]
"""Awaited once the flight has ended, however it ended (see :attr:`Flight.state`), before it can no longer be joined: keeps the
answer. Never cancelled by readers who leave."""


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

    # -- the producer's side -------------------------------------------------------------------------------------------------

    def begin(self, head: Head) -> None:
        """Tell status and headers; before the first byte.

        Raises:
            FlightFailed: If the flight goes on after another producer's death, and this one got an error instead of an answer.
        """
        if self.head is not None:
            if self._resumed and head.ok and head.form == self.head.form:
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
        """
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
        self._resumed = True
        if self.position == 0:
            return
        if self._base or self.head is None or self.head.form != "sse":
            raise FlightFailed("flight: its producer died, and what was read of it cannot be continued")
        self._continuation = Continuation(bytes(self._buffer))

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


Relayed = Literal["ended", "lost", "alone"]
"""How following another replica came out. ``ended``: the flight has ended as the other one did. ``lost``: the leader died or gave
up, another may lead. ``alone``: the answer is not for others, or cannot be shared: one's own call is due."""


class Claim(Protocol):
    """One replica's role in a flight that replicas share."""

    leading: bool
    """Whether it is to call the model."""

    def publishing(self, flight: Flight) -> AbstractAsyncContextManager[None]:
        """As the leader: tell the others, from entering the context to leaving it."""
        ...

    async def relay(self, flight: Flight) -> Relayed:
        """As a follower: feed the flight with what the leader tells."""
        ...


class Feed(Protocol):
    """Shares flights between replicas (:class:`serving.flight_feed.FlightFeed`)."""

    async def claim(self, arm: str, key: bytes, *, waited: float) -> Claim | None:
        """Lead or follow the flight of a key; None: nothing can be shared at the moment."""
        ...


class Flights:
    """The flights of one replica.

    Args:
        grace: Seconds that a flight goes on after its last reader has gone.
        max_bytes: Bytes kept of each answer. Larger answers reach their readers, but are shared only by those who joined before.
        feed: Shares the flights with other replicas; None: this replica's own.
        linger: Seconds after its end that a flight may be joined by a request that began before.
        clock: A monotonic clock, seconds.
    """

    def __init__(
        self,
        *,
        grace: float = 2.0,
        max_bytes: int = 4 << 20,
        feed: Feed | None = None,
        linger: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grace, self._max_bytes, self._feed, self._linger, self._clock = grace, max_bytes, feed, linger, clock
        self._listed: dict[tuple[str, bytes], Flight] = {}
        self._contexts: dict[tuple[str, bytes], set[Flight]] = {}
        self._tasks: dict[Flight, asyncio.Task[None]] = {}
        self._timers: dict[Flight, asyncio.TimerHandle] = {}
        self._closed = False

    def __len__(self) -> int:
        """Number of flights that have not ended and settled."""
        return len(self._tasks)

    def find(self, arm: str, key: bytes, *, since: float | None = None) -> Flight | None:
        """Return the flight that a request may join.

        Args:
            arm: The arm.
            key: Fingerprint of the request.
            since: When the request began, by the clock: a flight that ended well after that can still be joined. None: only
                one that has not ended.
        """
        flight = self._listed.get((arm, key))
        return flight if flight is not None and _joinable(flight, since) else None

    def near(self, arm: str, context: bytes, accept: Callable[[Flight], bool], *, since: float | None = None) -> Flight | None:
        """Return the first flight of the context that the predicate accepts, by its ``about``; ``since`` as in :meth:`find`."""
        flights = sorted(self._contexts.get((arm, context), ()), key=lambda flight: flight.began)
        return next((flight for flight in flights if _joinable(flight, since) and accept(flight)), None)

    def join_or_start(
        self,
        arm: str,
        key: bytes,
        producer: Producer,
        *,
        settle: Settle | None = None,
        context: bytes = b"",
        about: object = None,
        since: float | None = None,
    ) -> Reader:
        """Join the flight of this key, or start one; nothing is awaited, so that two callers cannot both start it.

        Args:
            arm: The arm.
            key: Fingerprint of the request.
            producer: Makes the answer, if nobody else does.
            settle: Keeps it. Not called where another replica made the answer.
            context: Fingerprint of everything but the last user text.
            about: Whatever tells near-identical requests.
            since: See :meth:`find`.

        Returns:
            A reader; close it. ``reader.leader`` tells whether the flight was started for it.
        """
        flight = self.find(arm, key, since=since)
        if flight is not None:
            return flight.join()
        return self._start(arm, key, producer, settle, context, about, since, listed=True)

    def start(self, arm: str, key: bytes, producer: Producer, *, settle: Settle | None = None) -> Reader:
        """Start a flight that nobody else can join: for requests that bypass the cache."""
        return self._start(arm, key, producer, settle, b"", None, None, listed=False)

    def forget(self, arm: str | None = None) -> None:
        """Let nobody join the flights under way any more, of an arm or of all: after a flush. They go on for their readers."""
        for flight in [flight for flight in self._listed.values() if arm is None or flight.arm == arm]:
            self._unlist(flight)

    async def close(self, *, seconds: float = 2.0) -> None:
        """Cancel what is under way, and wait for what keeps it; at most so long."""
        self._closed = True
        for flight, task in self._tasks.items():
            if not flight.done:
                flight.abandon("the gateway stops")
                task.cancel()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks.values()), timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._listed.clear()
        self._contexts.clear()

    # -- inside --------------------------------------------------------------------------------------------------------------

    def _start(
        self,
        arm: str,
        key: bytes,
        producer: Producer,
        settle: Settle | None,
        context: bytes,
        about: object,
        since: float | None,
        *,
        listed: bool,
    ) -> Reader:
        if self._closed:
            raise RuntimeError("flights: closed; expected no request after close()")
        flight = Flight(arm, key, context=context, about=about, max_bytes=self._max_bytes, grace=self._grace, clock=self._clock)
        flight.unlisted, flight.abandoned = self._unlist, self._abandon
        if listed:
            previous = self._listed.get((arm, key))
            if previous is not None:
                self._unlist(previous)
            self._listed[arm, key] = flight
            if context:
                self._contexts.setdefault((arm, context), set()).add(flight)
        feed = self._feed if listed else None
        work = self._make(flight, producer, settle) if feed is None else self._make_shared(feed, flight, producer, settle, since)
        task = self._tasks[flight] = asyncio.create_task(work, name="flight")
        task.add_done_callback(functools.partial(self._landed, flight))
        return flight.join(leader=True)

    async def _make(self, flight: Flight, producer: Producer, settle: Settle | None) -> None:
        """Run the producer to its end, however that comes about, then keep what it made."""
        try:
            await producer(flight)
            if not flight.done:
                flight.fail(RuntimeError("the producer returned without finish()"))
        except asyncio.CancelledError:
            flight.abandon()
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()  # what there is of the answer is still to be kept
        except Exception as error:  # noqa: BLE001 - whatever it is, the readers have to be told
            flight.fail(error)
        if settle is not None:
            try:
                await settle(flight)
            except Exception:  # noqa: BLE001 - an answer that cannot be kept was still given
                _log.exception("an answer could not be kept")

    async def _make_shared(
        self, feed: Feed, flight: Flight, producer: Producer, settle: Settle | None, since: float | None
    ) -> None:
        """Lead the flight for all replicas, or follow the one that does; where that one dies, take its place."""
        try:
            for _ in range(CLAIMS):
                waited = 0.0 if since is None else max(0.0, self._clock() - since)
                claim = await feed.claim(flight.arm, flight.key, waited=waited)
                if claim is None:  # Redis is away
                    break
                if claim.leading:
                    async with claim.publishing(flight):
                        await self._make(flight, producer, settle)
                    return
                outcome = await claim.relay(flight)
                if outcome == "ended":
                    return
                flight.resume()
                if outcome == "alone":
                    break
        except asyncio.CancelledError:
            flight.abandon()
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the readers have to be told
            flight.fail(error)
            return
        await self._make(flight, producer, settle)

    def _abandon(self, flight: Flight) -> None:
        task = self._tasks.get(flight)
        if task is not None:
            task.cancel()

    def _landed(self, flight: Flight, task: asyncio.Task[None]) -> None:
        del self._tasks[flight]
        flight.abandon()  # without effect unless it was cancelled before it ran at all
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a flight came down badly", exc_info=error)
        flight.settled.set()
        if flight.state != "complete" or self._listed.get((flight.arm, flight.key)) is not flight or self._closed:
            self._unlist(flight)
            return
        self._timers[flight] = asyncio.get_running_loop().call_later(self._linger, self._unlist, flight)

    def _unlist(self, flight: Flight) -> None:
        timer = self._timers.pop(flight, None)
        if timer is not None:
            timer.cancel()
        if self._listed.get((flight.arm, flight.key)) is flight:
            del self._listed[flight.arm, flight.key]
        alike = self._contexts.get((flight.arm, flight.context))
        if alike is not None:
            alike.discard(flight)
            if not alike:
                del self._contexts[flight.arm, flight.context]


def _joinable(flight: Flight, since: float | None) -> bool:
    if not flight.done:
        return True
    return flight.state == "complete" and since is not None and flight.ended >= since
