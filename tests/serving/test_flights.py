"""Answers under way in one replica: one call, many readers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

import pytest

from serving.flights import READ_STEP, Flight, FlightFailed, Flights, Head, Overrun, Reader
from tests.waiting import until

KEY = b"k" * 32
STREAM = Head(200, "text/event-stream; charset=utf-8")


class Model:
    """A producer that says what the test tells it to, when it is told to."""

    def __init__(self, head: Head = STREAM) -> None:
        self.head = head
        self.calls = 0
        self.cancelled = 0
        self.settled: list[tuple[str, bytes | None]] = []
        self._said: asyncio.Queue[Callable[[Flight], Awaitable[None]]] = asyncio.Queue()

    def say(self, *chunks: bytes) -> None:
        async def append(chunk: bytes, flight: Flight) -> None:
            await flight.append(chunk)

        for chunk in chunks:
            self._said.put_nowait(functools.partial(append, chunk))

    def end(self, ok: bool = True) -> None:
        async def finish(flight: Flight) -> None:
            flight.finish(ok)

        self._said.put_nowait(finish)

    def fail(self, error: Exception) -> None:
        async def raises(flight: Flight) -> None:
            raise error

        self._said.put_nowait(raises)

    async def produce(self, flight: Flight) -> None:
        self.calls += 1
        try:
            flight.begin(self.head)
            while not flight.done:
                await (await self._said.get())(flight)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def settle(self, flight: Flight) -> None:
        self.settled.append((flight.state, flight.body))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def join(flights: Flights, model: Model, key: bytes = KEY, **arguments: object) -> Reader:
    return flights.join_or_start("control", key, model.produce, settle=model.settle, **arguments)  # type: ignore[arg-type]


async def read_all(reader: Reader, offset: int = 0) -> bytes:
    with reader:
        return b"".join([piece async for piece in reader.read(offset)])


async def test_twenty_identical_requests_are_one_call_and_get_the_same_bytes() -> None:
    flights, model = Flights(), Model()
    readers = [join(flights, model) for _ in range(20)]
    reading = [asyncio.create_task(read_all(reader)) for reader in readers]
    model.say(b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n")
    model.end()
    assert set(await asyncio.gather(*reading)) == {b"data: a\n\ndata: b\n\ndata: [DONE]\n\n"}
    assert model.calls == 1
    assert [reader.leader for reader in readers] == [True] + [False] * 19
    assert [reader.shared for reader in readers] == [False] + [True] * 19
    await readers[0].flight.settled.wait()
    assert model.settled == [("complete", b"data: a\n\ndata: b\n\ndata: [DONE]\n\n")]
    assert len(flights) == 0


async def test_bytes_are_read_as_they_come_and_a_late_reader_gets_everything() -> None:
    flights, model = Flights(), Model()
    with join(flights, model) as first:
        assert (await first.head()).form == "sse"
        pieces = first.read()
        model.say(b"one ")
        assert await anext(pieces) == b"one "
        model.say(b"two ")
        assert await anext(pieces) == b"two "
        late, offset = join(flights, model), join(flights, model)
        model.say(b"three")
        model.end()
        assert await read_all(late) == b"one two three"
        assert await read_all(offset, 5) == b"wo three"
        assert await read_all(join(flights, model, since=0.0), 99) == b""
        assert [piece async for piece in pieces] == [b"three"]


async def test_a_long_answer_is_replayed_in_large_steps() -> None:
    flights, model = Flights(), Model(Head())
    body = bytes(3 * READ_STEP + 1)
    model.say(body)
    model.end()
    with join(flights, model) as reader:
        pieces = [piece async for piece in reader.read()]
    assert [len(piece) for piece in pieces] == [READ_STEP] * 3 + [1]
    assert reader.flight.body == body


async def test_the_first_client_leaves_and_the_others_get_everything() -> None:
    flights, model = Flights(grace=0.0), Model()
    first, second = join(flights, model), join(flights, model)
    model.say(b"a")
    task = asyncio.create_task(read_all(first))
    await until(lambda: second.flight.position == 1, "the first bytes")
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert second.flight.readers == 1
    model.say(b"b")
    model.end()
    assert await read_all(second) == b"ab"
    assert (model.calls, model.cancelled) == (1, 0)


async def test_a_reader_that_is_cancelled_while_it_waits_takes_nothing_from_the_others() -> None:
    flights, model = Flights(), Model()
    tasks = [asyncio.create_task(read_all(join(flights, model))) for _ in range(3)]
    await until(lambda: model.calls == 1, "the call")
    tasks[1].cancel()
    model.say(b"a")
    model.end()
    assert (await tasks[0], await tasks[2]) == (b"a", b"a")


async def test_when_the_last_reader_has_gone_the_call_is_cancelled_and_what_there_is_is_kept_as_a_part() -> None:
    flights, model = Flights(grace=0.0), Model()
    with join(flights, model) as reader:
        model.say(b"data: a\n\n")
        assert await anext(reader.read()) == b"data: a\n\n"
    await reader.flight.settled.wait()
    assert model.cancelled == 1
    assert model.settled == [("abandoned", b"data: a\n\n")]
    # The next request is a call of its own, from the beginning.
    assert flights.find("control", KEY, since=0.0) is None
    with join(flights, model) as again:
        assert again.leader
    await again.flight.settled.wait()


async def test_nobody_joins_a_call_that_is_being_cancelled() -> None:
    flights, model = Flights(grace=0.0), Model()
    closing = asyncio.Event()

    async def slow_to_close(flight: Flight) -> None:
        try:
            await model.produce(flight)
        finally:
            await closing.wait()

    with flights.join_or_start("control", KEY, slow_to_close) as reader:
        await reader.head()
    await until(lambda: model.cancelled == 1, "the call to be cancelled")
    with join(flights, model) as other:
        assert other.leader
        closing.set()
        model.end()
        assert await other.body() == b""


async def test_a_reader_that_comes_back_within_the_grace_finds_the_stream() -> None:
    flights, model = Flights(grace=600.0), Model()
    with join(flights, model) as reader:
        model.say(b"abc")
        assert await anext(reader.read()) == b"abc"
    with join(flights, model) as back:
        assert back.flight is reader.flight
        model.say(b"def")
        model.end()
        assert await read_all(back, 3) == b"def"
    assert (model.calls, model.cancelled) == (1, 0)


async def test_a_call_is_not_cancelled_while_readers_elsewhere_wait() -> None:
    flights, model = Flights(grace=0.0), Model()
    reader = join(flights, model)
    await reader.head()
    reader.flight.hold(True)
    reader.close()
    model.say(b"a")
    await until(lambda: reader.flight.position == 1, "the bytes")
    reader.flight.hold(False)
    await reader.flight.settled.wait()
    assert reader.flight.state == "abandoned"


async def test_a_producer_that_fails_tells_every_reader_after_the_bytes_that_there_are() -> None:
    flights, model = Flights(), Model()
    readers = [join(flights, model) for _ in range(2)]
    model.say(b"data: a\n\n")
    model.fail(ConnectionResetError("the upstream hung up"))
    for reader in readers:
        with reader:
            pieces = reader.read()
            assert await anext(pieces) == b"data: a\n\n"
            with pytest.raises(FlightFailed, match="broke off after 9 bytes: the upstream hung up") as caught:
                await anext(pieces)
            assert isinstance(caught.value.__cause__, ConnectionResetError)
    await readers[0].flight.settled.wait()
    assert model.settled == [("failed", b"data: a\n\n")]


async def test_a_producer_that_fails_before_its_head_tells_those_who_wait_for_it() -> None:
    async def raises(flight: Flight) -> None:
        raise ValueError("no such model")

    flights = Flights()
    with flights.join_or_start("control", KEY, raises) as reader:
        with pytest.raises(FlightFailed, match="did not begin: no such model"):
            await reader.head()


async def test_a_producer_that_forgets_to_finish_has_failed() -> None:
    async def forgetful(flight: Flight) -> None:
        flight.begin(STREAM)

    with Flights().join_or_start("control", KEY, forgetful) as reader:
        with pytest.raises(FlightFailed, match="without finish"):
            await reader.body()


async def test_a_cut_stream_ends_in_order_and_is_never_joined_afterwards() -> None:
    flights, model = Flights(), Model()
    with join(flights, model) as reader:
        model.say(b"data: a\n\n")
        model.end(ok=False)
        assert await reader.body() == b"data: a\n\n"
    assert reader.flight.state == "cut"
    assert flights.find("control", KEY, since=0.0) is None
    await reader.flight.settled.wait()
    assert model.settled == [("cut", b"data: a\n\n")]


@pytest.mark.parametrize(("status", "joined"), [(200, True), (400, False), (401, False), (429, False), (500, True), (503, True)])
async def test_only_errors_of_the_upstream_are_for_others_too(status: int, joined: bool) -> None:
    flights, model = Flights(), Model(Head(status))
    with join(flights, model) as reader:
        head = await reader.head()
        assert (head.shareable, head.ok) == (joined, status == 200)
        with join(flights, model) as other:
            assert (other.flight is reader.flight) == joined
            model.end()
            model.end()
            assert await reader.body() == await other.body() == b""


async def test_an_answer_larger_than_what_is_kept_waits_for_its_reader_and_is_bounded() -> None:
    flights, model = Flights(max_bytes=1000), Model(Head())
    with join(flights, model) as reader:
        model.say(*(b"%d" % (number % 10) * 100 for number in range(100)))
        model.end()
        await until(lambda: reader.flight.position >= 1000, "the first bytes")
        read = b""
        async for piece in reader.read():
            read += piece
            assert reader.flight.position - len(read) <= 1100
        assert len(read) == 10_000
        assert reader.flight.body is None
        # Who asks now cannot have it from the beginning.
        assert flights.find("control", KEY, since=0.0) is None


async def test_a_reader_far_behind_the_fastest_is_told_and_holds_up_nobody() -> None:
    flights, model = Flights(max_bytes=1000), Model(Head())
    fast, slow = join(flights, model), join(flights, model)
    with slow:
        behind = slow.read()
        model.say(b"a" * 100)
        assert await anext(behind) == b"a" * 100
        model.say(*[b"b" * 100] * 50)
        model.end()
        assert len(await read_all(fast)) == 5100
        with pytest.raises(Overrun, match="only what follows byte 4100 is kept"):
            await anext(behind)


async def test_one_large_chunk_passes_in_steps() -> None:
    flights, model = Flights(max_bytes=1000), Model(Head())
    model.say(bytes(10 * READ_STEP))
    model.end()
    assert len(await read_all(join(flights, model))) == 10 * READ_STEP


async def test_a_near_identical_request_joins_what_its_predicate_accepts() -> None:
    flights, model = Flights(), Model()
    with join(flights, model, context=b"c", about="what is a cache") as reader:
        assert flights.near("control", b"c", lambda flight: flight.about == "what is a cache") is reader.flight
        assert flights.near("control", b"c", lambda flight: False) is None
        assert flights.near("control", b"other", lambda flight: True) is None
        assert flights.near("tuned", b"c", lambda flight: True) is None
        with reader.flight.join() as near:
            model.say(b"a")
            model.end()
            assert await near.body() == b"a"
            assert near.shared
        # The last reader of a flight that has ended well: to be joined only by who asked before.
        assert flights.near("control", b"c", lambda flight: True) is None
        assert flights.near("control", b"c", lambda flight: True, since=0.0) is reader.flight


async def test_a_request_that_began_before_the_end_joins_what_has_just_ended() -> None:
    clock = Clock()
    flights, model = Flights(clock=clock), Model()
    with join(flights, model) as reader:
        clock.now = 101.0
        model.say(b"a")
        model.end()
        await reader.body()
    await reader.flight.settled.wait()
    clock.now = 101.5
    with join(flights, model, since=100.5) as missed:
        assert missed.flight is reader.flight
        assert await missed.body() == b"a"
    with join(flights, model, since=101.2) as later:
        assert later.leader
    assert model.calls <= 2


async def test_what_has_ended_is_dropped_after_a_while() -> None:
    flights, model = Flights(linger=0.0), Model()
    with join(flights, model) as reader:
        model.end()
        await reader.body()
    await until(lambda: flights.find("control", KEY, since=0.0) is None, "the flight to be dropped")


async def test_after_a_flush_nobody_joins_what_was_under_way() -> None:
    flights, model, other = Flights(), Model(), Model()
    with join(flights, model) as before, flights.join_or_start("tuned", KEY, other.produce) as elsewhere:
        flights.forget("control")
        with join(flights, model) as after:
            assert after.leader
            assert flights.find("tuned", KEY) is elsewhere.flight
            model.end()
            model.end()
            other.end()
            assert await before.body() == await after.body() == await elsewhere.body() == b""
        assert flights.find("control", KEY, since=0.0) is after.flight


async def test_a_private_flight_is_joined_by_nobody() -> None:
    flights, model = Flights(), Model()
    with flights.start("control", KEY, model.produce, settle=model.settle) as private:
        assert flights.find("control", KEY) is None
        model.say(b"a")
        model.end()
        assert await private.body() == b"a"


async def test_a_part_that_cannot_be_kept_was_still_given() -> None:
    async def fails(flight: Flight) -> None:
        raise OSError("no room")

    flights, model = Flights(), Model()
    with flights.join_or_start("control", KEY, model.produce, settle=fails) as reader:
        model.say(b"a")
        model.end()
        assert await reader.body() == b"a"
        await reader.flight.settled.wait()


async def test_closing_cancels_calls_keeps_their_parts_and_waits_for_what_is_being_kept() -> None:
    flights, model, done = Flights(), Model(), Model()
    keeping, kept = asyncio.Event(), []

    async def slowly(flight: Flight) -> None:
        await keeping.wait()
        kept.append(flight.body)

    running = join(flights, model)
    model.say(b"a")
    ended = flights.join_or_start("control", b"e" * 32, done.produce, settle=slowly)
    done.say(b"b")
    done.end()
    assert await read_all(ended) == b"b"
    reading = asyncio.create_task(read_all(running))
    await until(lambda: running.flight.position == 1, "the bytes")
    closing = asyncio.create_task(flights.close(seconds=60.0))
    await until(lambda: model.settled != [], "the part to be kept")
    keeping.set()
    await closing
    assert model.settled == [("abandoned", b"a")]
    assert kept == [b"b"]
    with pytest.raises(FlightFailed, match="broke off after 1 bytes: the gateway stops"):
        await reading
    with pytest.raises(RuntimeError, match="closed"):
        join(flights, model)


async def test_a_call_that_is_cancelled_before_it_was_made_tells_its_readers() -> None:
    flights, model = Flights(), Model()
    with join(flights, model) as reader:
        await flights.close()
        assert model.calls == 0
        with pytest.raises(FlightFailed, match="did not begin: the gateway stops"):
            await reader.head()


async def test_the_calls_of_a_producer_come_in_order() -> None:
    async def hasty(flight: Flight) -> None:
        await flight.append(b"a")

    with Flights().join_or_start("control", KEY, hasty) as reader:
        with pytest.raises(FlightFailed, match=r"expected begin\(\), then append\(\)"):
            await reader.body()

    async def twice(flight: Flight) -> None:
        flight.begin(STREAM)
        flight.begin(Head(503))

    with Flights().join_or_start("control", KEY, twice) as reader:
        with pytest.raises(FlightFailed, match="begun with status 200"):
            await reader.body()
