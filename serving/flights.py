"""The answers under way in one replica: whoever asks what is being answered already joins, and the model is called once.

The producer of a :class:`serving.flight.Flight` runs in a task of its own, so that no client's disconnect takes the answer from
the others. With a :class:`serving.flight_feed.FlightFeed` the flights are shared with the other replicas: there, the flight of a
follower is fed with what the leader publishes instead of by a call of its own. Readers see no difference but
:attr:`serving.flight.Flight.origin`.

Rules that are not obvious:

* An answer of an error status is offered to those who wait for it only if it is the upstream's fault (5xx). A 4xx may be about
  the first client's key or limits; :attr:`serving.flight.Head.shareable` is False, nobody joins any more, and whoever has joined
  asks for itself.
* A flight that ended well can still be joined by a request that began before it ended: that request's lookup may have been too
  early to find the entry, and its own call too late to join.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from serving.flight import READ_STEP, Flight, FlightFailed, Head, Overrun, Reader

__all__ = [
    "READ_STEP",
    "Claim",
    "Feed",
    "Flight",
    "FlightFailed",
    "Flights",
    "Head",
    "Overrun",
    "Producer",
    "Reader",
    "Relayed",
    "Settle",
]

_log = logging.getLogger(__name__)

CLAIMS = 3
"""How often a flight whose leader died looks for another leader before it calls the model whatever others do."""

Producer = Callable[["Flight"], Awaitable[None]]
"""Makes the answer: calls ``flight.begin(head)``, awaits ``flight.append(chunk)`` for each chunk, ends with
``flight.finish(ok)``. What it raises fails the flight. It is cancelled when nobody waits any more: it has to close the upstream's
connection then."""

Settle = Callable[["Flight"], Awaitable[None]]
"""Awaited once the flight has ended, however it ended (see :attr:`Flight.state`), before it can no longer be joined: keeps the
answer. Never cancelled by readers who leave."""

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

    def part(self, arm: str) -> None:
        """Let nobody join an arm's flights under way any more: there may have been a flush. They go on, and may be kept."""
        for flight in [flight for flight in self._listed.values() if flight.arm == arm]:
            self._unlist(flight)

    def forget(self, arm: str | None = None, key: bytes | None = None) -> None:
        """Let nobody join the flights under way any more, of an arm or of all, of a key or of all: after a flush.

        They go on for their readers, and are outdated: they are not to be kept.
        """

        def meant(flight: Flight) -> bool:
            return arm in (None, flight.arm) and key in (None, flight.key)

        for flight in self._tasks:
            flight.outdated = flight.outdated or meant(flight)
        for flight in [flight for flight in self._listed.values() if meant(flight)]:
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
