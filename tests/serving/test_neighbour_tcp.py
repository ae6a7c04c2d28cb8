"""Links over TCP: what is asked is answered with just that, and an owner that breaks the protocol is done with."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.arena.layout import H_RESERVED, digest, digest_tag, name_words, slot_word
from serving.neighbours import exchange
from serving.neighbours.framing import Framed
from serving.neighbours.link import LARGEST_READ, LinkLost
from serving.neighbours.tcp import TcpServer
from tests.serving.arenas import ARM, MIB, key
from tests.serving.neighbours import PATIENT, SECRET, linked, owner, reader
from tests.serving.test_neighbour_exchange import TOLD
from tests.waiting import until

SLOT = 256
numbers = st.one_of(st.integers(0, 600), st.integers(0, 2**64 - 1), st.integers(0, 2**12).map(lambda number: number * 64))


class Sink(Framed):
    """A connection whose other end is a list."""

    def __init__(self) -> None:
        super().__init__(0)
        self.open = True
        self.sent: list[bytes] = []

    def send(self, *parts: bytes | memoryview) -> None:
        self.sent.append(b"".join(parts))


def requested(operation: int, number: int, place: int, length: int, data: bytes = b"") -> bytes:
    return struct.pack("<BxxxIQQ", operation, number, place, length) + data


@given(st.integers(0, 3), st.integers(0, 2**32 - 1), numbers, numbers, st.binary(max_size=300))
def test_a_request_reads_the_arena_or_writes_its_own_slots_or_does_nothing(
    operation: int, number: int, place: int, length: int, data: bytes
) -> None:
    arena = np.arange(8192, dtype=np.int64)
    arena[H_RESERVED] = 500
    inbox = np.zeros(8 * SLOT // 8, np.int64)
    served = TcpServer(arena, inbox, SLOT, lambda: None).accept({}, 2 * SLOT, 2 * SLOT)
    connection = Sink()
    served.start(connection)
    memory, slots = arena.tobytes()[: 500 * 64].ljust(arena.nbytes, b"\0"), inbox.data.cast("B")
    if operation == 2:
        length = len(data)
    try:
        connection.received(requested(operation, number, place, length, data if operation != 1 else b""))
    except ValueError:
        assert not connection.sent
    else:
        (answer,) = connection.sent
        status, told = struct.unpack_from("<BxxxI", answer)
        assert told == number
        if status == 0 and operation == 1:
            assert answer[8:] == memory[place : place + length]
            assert len(answer) == 8 + length
        if status == 0 and operation == 2:
            begin = (2 + place) * SLOT
            assert place < 2
            assert bytes(slots[begin : begin + length]) == data
    assert not any(slots[: 2 * SLOT]), "slots of others"
    assert not any(slots[4 * SLOT :])
    assert (
        arena.tobytes()
        == np.arange(8192, dtype=np.int64).tobytes()[: 8 * H_RESERVED]
        + struct.pack("<q", 500)
        + (np.arange(8192, dtype=np.int64).tobytes()[8 * H_RESERVED + 8 :])
    )


def test_one_whose_slots_are_taken_back_writes_nothing_more() -> None:
    inbox = np.zeros(8 * SLOT // 8, np.int64)
    served = TcpServer(np.zeros(8192, np.int64), inbox, SLOT, lambda: None).accept({}, 0, SLOT)
    connection = Sink()
    served.start(connection)
    late = connection.received
    served.close()
    late(requested(2, 1, 0, 4, b"late"))
    connection.received(requested(2, 1, 0, 4, b"late"))
    assert not inbox.any()


def test_one_without_slots_writes_nothing() -> None:
    inbox = np.zeros(8 * SLOT // 8, np.int64)
    served = TcpServer(np.zeros(8192, np.int64), inbox, SLOT, lambda: None).accept({}, 0, 0)
    connection = Sink()
    served.start(connection)
    connection.received(requested(2, 1, 0, 4, b"data"))
    assert connection.sent[0][0] == 1
    assert not inbox.any()


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 40), max_size=20))
def test_messages_are_cut_right_however_the_bytes_come(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack("<I", len(message)) + message for message in messages)
    framed = Framed(50)
    got: list[bytes] = []
    framed.open = True
    framed.received = got.append
    for cut in cuts:
        framed.data_received(stream[:cut])
        stream = stream[cut:]
    framed.data_received(stream)
    assert got == messages


async def test_a_message_that_would_be_too_long_ends_the_connection_before_it_comes() -> None:
    ends: list[str] = []
    incoming: asyncio.Queue[Framed] = asyncio.Queue()

    class Incoming(Framed):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.ended = ends.append
            incoming.put_nowait(self)

    listening = await asyncio.get_running_loop().create_server(lambda: Incoming(100), "127.0.0.1", 0)
    stream, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    connection = await incoming.get()
    writer.write(struct.pack("<I", 100) + bytes(100))
    writer.write(struct.pack("<I", 101))
    await until(lambda: bool(ends), "the end")
    assert ends == ["a message of 101 bytes, where at most 100 are expected"]
    assert not connection.open
    connection.send(b"of no use")
    with suppress(ConnectionError):
        assert await stream.read() == b""
    writer.close()
    listening.close()


# -- owners that know the secret and break the protocol ----------------------------------------------------------------------

Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Liar:
    """An owner that goes through the exchange, and then does as it is told."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self.address = ("", 0)
        self.connections = 0

    async def __aenter__(self) -> Liar:
        self._listening = await asyncio.start_server(self._greet, "127.0.0.1", 0)
        self.address = self._listening.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()

    async def _greet(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            told = [await received(stream), exchange.challenge("tcp", bytes(32))]
            writer.write(framed(told[1]))
            told.append(await received(stream))
            writer.write(framed(exchange.answer(SECRET.encode(), told, TOLD, {})))
            await self._behaviour(stream, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # asyncio's server would tell of a cancellation as of an error
        finally:
            writer.close()


async def received(stream: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack("<I", await stream.readexactly(4))
    return await stream.readexactly(size)


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def answered(number: int, content: bytes, status: int = 0) -> bytes:
    return framed(struct.pack("<BxxxI", status, number) + content)


async def says_nothing(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await stream.read()


async def hangs_up(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)


async def sends_too_little(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    writer.write(answered(1, bytes(32)))
    await stream.read()


async def sends_too_much(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    writer.write(answered(1, bytes(128)))
    await stream.read()


async def answers_another_question(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    writer.write(answered(77, bytes(64)))
    await stream.read()


async def answers_cut_short(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    writer.write(framed(b"\0\0\0"))
    await stream.read()


async def announces_four_gigabytes(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    writer.write(struct.pack("<I", 0xFFFFFFFF))
    await stream.read()


async def never_comes_to_an_end(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    writer.write(struct.pack("<I", LARGEST_READ))
    while True:
        writer.write(b"\xa5" * 1000)
        await writer.drain()
        await asyncio.sleep(0.001)


async def streams_answers_without_end(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    while True:
        writer.write(answered(1, bytes(64)))
        await writer.drain()


async def refuses(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await received(stream)
    writer.write(answered(1, b"no", status=1))
    await stream.read()


LIES = [
    says_nothing, hangs_up, sends_too_little, sends_too_much, answers_another_question, answers_cut_short,
    announces_four_gigabytes, never_comes_to_an_end, refuses,
]  # fmt: skip


@pytest.mark.parametrize("behaviour", LIES, ids=lambda behaviour: behaviour.__name__)
async def test_an_owner_that_breaks_the_protocol_loses_the_link_in_bounded_time(behaviour: Behaviour) -> None:
    async with Liar(behaviour) as liar:
        link = await linked(liar, deadline=0.2)
        reads = [asyncio.ensure_future(link.read(0, 64)) for _ in range(3)]
        async with asyncio.timeout(PATIENT):
            for outcome in await asyncio.gather(*reads, return_exceptions=True):
                assert isinstance(outcome, LinkLost)
        assert link.lost
        with pytest.raises(LinkLost):
            await link.read(0, 64)
        await link.close()


async def test_answers_without_end_do_not_pile_up() -> None:
    async with Liar(streams_answers_without_end) as liar:
        link = await linked(liar)
        assert await link.read(0, 64) == bytes(64)
        await until(lambda: link.lost, "that the second answer ends the link")


async def test_rubbish_behind_the_exchange_is_noticed() -> None:
    async def behaviour(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answered(0, b"unasked"))
        await stream.read()

    async with Liar(behaviour) as liar:
        with pytest.raises(LinkLost, match="more messages than an exchange has"):
            await linked(liar)


async def test_rubbish_from_an_idle_owner_ends_the_link() -> None:
    now = asyncio.Event()

    async def behaviour(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await now.wait()
        writer.write(answered(0, b"unasked"))
        await stream.read()

    async with Liar(behaviour) as liar:
        link = await linked(liar)
        now.set()
        await until(lambda: link.lost, "the end of the link")


async def test_a_lying_owner_costs_a_tier_misses_alone() -> None:
    """It says of its arena that every record is where nobody asked for it."""

    async def behaviour(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, number, place, length = struct.unpack("<BxxxIQQ", await received(stream))
            lies = np.random.default_rng(place).integers(-(2**62), 2**62, length // 8).astype(np.int64)
            writer.write(answered(number, lies.tobytes()))

    async with Liar(behaviour) as liar:
        there = f"{liar.address[0]}:{liar.address[1]}"
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            for number in range(200):
                assert await tier.get(ARM, key(number)) is None
            assert liar.connections == 1


async def test_a_lookup_of_many_slow_reads_takes_its_deadline_all_the_same() -> None:
    """Each read is answered in time; every slot of every bucket points to another record."""
    asked = 0

    async def behaviour(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while True:
            _, number, place, length = struct.unpack("<BxxxIQQ", await received(stream))
            content = bytearray(length)
            if length == 4096:
                struct.pack_into("<qqq", content, 0, *name_words(ARM), 1)
            if length == 256:
                asked += 1
                tag = digest_tag(digest(struct.unpack_from("<q", key(name))[0], 0))
                struct.pack_into("<8Q", content, 0, 1 << 8, *(slot_word(tag, 2, at) % 2**64 for at in range(9000, 9007)))
                await asyncio.sleep(0.3)
            elif place // 64 >= 9000:
                asked += 1
                await asyncio.sleep(0.3)
            writer.write(answered(number, bytes(content)))

    async with Liar(behaviour) as liar:
        there = f"{liar.address[0]}:{liar.address[1]}"
        async with reader(there, deadline=0.5) as tier:
            name = next(number for number in range(100) if tier.owner(key(number)) == there)
            await until(lambda: tier.links()[there] == "tcp", "the link")
            assert await tier.get(ARM, key(name)) is None
            assert tier.counts["tcp", "lost"] == 1
            assert asked == 2


async def test_a_slow_reader_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena", size=16 * MIB) as (_, serving):
        slow, other = await linked(serving), await linked(serving)
        slow._connection._transport.pause_reading()  # type: ignore[attr-defined]
        piled = [asyncio.ensure_future(slow.read(0, LARGEST_READ)) for _ in range(8)]
        for _ in range(50):
            assert len(await other.read(0, 4096)) == 4096
        slow._connection._transport.resume_reading()  # type: ignore[attr-defined]
        for answer in await asyncio.gather(*piled):
            assert len(answer) == LARGEST_READ
        for link in (slow, other):
            await link.close()
