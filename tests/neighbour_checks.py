"""What holds for a link to a neighbour whatever carries it: plain functions, so that they also run where there is no pytest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.arena.layout import BUCKET_UNITS, UNIT, digest, home_bucket
from serving.neighbours.inbox import encode
from serving.neighbours.link import Link, LinkLost
from serving.neighbours.lookup import RemoteArena, to_entry
from serving.neighbours.server import NeighbourServer
from serving.neighbours.tcp import TcpTransport
from serving.neighbours.transport import ClientTransport, Offer
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from serving.tiers.codec import pack
from tests.serving.arenas import ARM, MIB, answer, check, key
from tests.serving.neighbours import PATIENT, address, linked, owner, reader
from tests.waiting import until


@dataclass(frozen=True)
class Bench:
    """Where the checks are made.

    Attributes:
        folder: For arenas.
        transport: Name of the transport that is checked.
        client: Makes it at the side that reads.
        offers: Makes it at the owner's side, if that is not TCP.
        reads: Reads of the race between a reader and a writer.
        seconds: That anything may take.
    """

    folder: Path
    transport: str = "tcp"
    client: Callable[[], ClientTransport] = TcpTransport
    offers: Sequence[Offer] = ()
    reads: int = 2000
    seconds: float = 20.0

    @asynccontextmanager
    async def node(self, name: str = "arena", **options: Any) -> AsyncIterator[tuple[ArenaTier, NeighbourServer]]:
        given = {"offers": self.offers, "tcp": self.transport == "tcp", **options}
        async with owner(self.folder / name, **given) as (tier, server):
            yield tier, server

    @asynccontextmanager
    async def link(self, server: NeighbourServer, **options: Any) -> AsyncIterator[Link]:
        client = self.client()
        link = await linked(server, [client], **options)
        try:
            yield link
        finally:
            await link.close()
            client.close()


async def opened(link: Link) -> RemoteArena:
    arena = RemoteArena(link)
    await arena.open()
    return arena


async def found(arena: RemoteArena, number: int) -> Entry | None:
    stored = await arena.find(ARM, key(number))
    return None if stored is None else to_entry(key(number), stored)


async def it_says_what_it_is(bench: Bench) -> None:
    async with bench.node(inbox_slots=32) as (tier, server), bench.link(server) as link:
        assert link.transport == bench.transport
        assert link.hello.geometry == tier.mapping.geometry
        assert (link.hello.slots, link.hello.slot_bytes) == (2, 65536)
        assert not link.lost


async def bytes_are_those_of_the_arena(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        tier.put_now(ARM, answer(1, 1, 3000))
        whole = tier.mapping.words.tobytes()
        for offset, length in ((0, 64), (4096, 4096), (256 * 64, 256), (0, 1 << 20), (tier.mapping.geometry.values * 64, 3008)):
            assert bytes(await link.read(offset, length)) == whole[offset : offset + length]


async def entries_of_any_size_come_back(bench: Bench) -> None:
    async with bench.node(size=32 * MIB, budget=30 * MIB) as (tier, server), bench.link(server) as link:
        arena = await opened(link)
        sizes = [0, 1, 23, 40, 200, 2000, 16_000, 65_536, MIB, 5 * MIB]
        for number, size in enumerate(sizes):
            tier.put_now(ARM, answer(number, number + 7, size))
        for number in range(len(sizes)):
            entry = await found(arena, number)
            assert entry is not None, f"an entry of {sizes[number]} bytes"
            assert check(number, entry) == number + 7


async def a_small_entry_takes_one_read(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        tier.put_now(ARM, answer(1, 1, 16))
        tier.put_now(ARM, answer(2, 1, 2000))
        counting = Counting(link)
        arena = await opened(counting)
        counting.reads.clear()
        assert await found(arena, 1) is not None
        assert [length for _, length in counting.reads] == [BUCKET_UNITS * UNIT]
        counting.reads.clear()
        assert await found(arena, 2) is not None
        assert len(counting.reads) == 2


async def what_is_not_there_is_a_miss(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        tier.resize_now("other", MIB)
        arena = await opened(link)
        tier.put_now(ARM, answer(1, 1, 100))
        assert await arena.find(ARM, key(2)) is None
        assert await arena.find("other", key(1)) is None
        assert await arena.find("an arm that nobody has", key(1)) is None
        tier.delete_now(ARM, key(1))
        assert await arena.find(ARM, key(1)) is None


async def entries_in_their_other_bucket_are_found(bench: Bench) -> None:
    async with bench.node(size=256 * 1024, budget=128 * 1024) as (tier, server), bench.link(server) as link:
        arena = await opened(link)
        buckets = tier.mapping.geometry.buckets

        def home(number: int) -> int:
            return home_bucket(digest(int.from_bytes(key(number)[:8], "little", signed=True), 0), buckets)

        numbers = [number for number in range(20_000) if home(number) == 5][:12]
        for number in numbers:
            tier.put_now(ARM, answer(number, 1, 10))
        held = [number for number in numbers if tier.get_now(ARM, key(number)) is not None]
        assert len(held) > 7, "some went to their other bucket"
        for number in numbers:
            entry = await found(arena, number)
            assert (entry is not None) == (number in held)


async def an_arm_that_comes_later_is_found(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        now = [0.0]
        arena = RemoteArena(link, clock=lambda: now[0])
        await arena.open()
        tier.resize_now("late", MIB)
        tier.put_now("late", answer(1, 1, 100))
        assert await arena.find("late", key(1)) is None, "the table is not read for each lookup"
        now[0] += 1.1
        assert await arena.find("late", key(1)) is not None


async def an_arena_that_missed_a_removal_is_not_believed(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        tier.put_now(ARM, answer(1, 1, 2000))
        tier.update_mark_now(ARM, lambda mark: 7)
        counting = Counting(link)
        arena = await opened(counting)

        async def reads(least: int) -> tuple[bool, int]:
            counting.reads.clear()
            stored = await arena.find(ARM, key(1), least)
            return stored is not None, len(counting.reads)

        assert await reads(0) == (True, 2)
        assert await reads(7) == (True, 2), "known from the table of arms"
        assert await reads(8) == (False, 1)
        tier.update_mark_now(ARM, lambda mark: 9)
        assert await reads(8) == (True, 3)
        assert await reads(9) == (True, 2)
        tier.update_mark_now(ARM, lambda mark: -12)
        assert await reads(9) == (True, 2)
        assert await reads(10) == (False, 1), "it holds what the store may not know of"


async def a_corrupted_entry_is_a_miss(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        arena = await opened(link)
        for number, size in ((1, 2000), (2, 10)):
            tier.put_now(ARM, answer(number, 1, size))
            body = answer(number, 1, size).body
            memory = tier.mapping.words.data.cast("B")
            at = tier.mapping.words.tobytes().index(body) + len(body) - 1
            memory[at] ^= 1
            assert await found(arena, number) is None
            assert arena.torn == number
            memory[at] ^= 1
            assert await found(arena, number) is not None


async def a_full_arena_is_read(bench: Bench) -> None:
    async with bench.node(size=512 * 1024, budget=8 * MIB) as (tier, server), bench.link(server) as link:
        arena = await opened(link)
        for number in range(600):
            tier.put_now(ARM, answer(number, 1, 1500))
        assert tier.stats_now(ARM).evictions > 0
        for number in range(600):
            local, remote = tier.get_now(ARM, key(number), touch=False), await found(arena, number)
            assert local == remote
        assert await found(arena, 599) is not None


async def no_torn_value_is_taken_from_a_racing_writer(bench: Bench) -> None:
    """The writer is a process of its own, which the checks of the arena know how to make."""
    from tests.serving.arenas import Worker

    async with bench.node(size=MIB, budget=64 * 1024) as (_, server), bench.link(server) as link:
        arena = await opened(link)
        worker = Worker(_write_again_and_again, bench.folder / "arena")
        try:
            worker.answer()
            hits = 0
            for number in range(bench.reads):
                entry = await found(arena, number % 8)
                if entry is not None:
                    check(number % 8, entry)
                    hits += 1
            assert hits > bench.reads // 10
        finally:
            worker.close()


def _write_again_and_again(connection: Any, path: Path) -> None:
    tier = ArenaTier(path, MIB)
    version = 0
    while True:
        version += 1
        for number in range(8):
            tier.put_now(ARM, answer(number, version, (version * 37 + number * 211) % 6000))
        if version == 1:
            connection.send(True)


async def many_calls_at_once_get_their_own_answers(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        arena = await opened(link)
        for number in range(200):
            tier.put_now(ARM, answer(number, number, number * 20))
        for number, entry in enumerate(await asyncio.gather(*(found(arena, number) for number in range(200)))):
            assert entry is not None
            assert check(number, entry) == number


async def what_is_written_arrives(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        epoch = link.hello.geometry.epoch
        largest = link.hello.slot_bytes - 128
        sizes = [0, 1, 2000, largest - 40]
        for slot, size in enumerate(sizes):
            await link.write(slot, encode(ARM, key(slot), pack(answer(slot, 3, size)), 1, epoch))
        await until(lambda: server.counts["taken"] == len(sizes), "the entries", bench.seconds)
        for number in range(len(sizes)):
            entry = tier.get_now(ARM, key(number))
            assert entry is not None
            assert check(number, entry) == 3


async def peers_have_slots_of_their_own(bench: Bench) -> None:
    async with bench.node(inbox_slots=32) as (tier, server), bench.link(server) as first, bench.link(server) as second:
        assert (first.hello.slots, second.hello.slots) == (2, 2)
        assert first.hello.first_slot + 2 <= second.hello.first_slot
        epoch = first.hello.geometry.epoch
        for number, link in enumerate((first, second)):
            await link.write(0, encode(ARM, key(number), pack(answer(number, 1, 100)), 1, epoch))
        await until(lambda: server.counts["taken"] == 2, "both entries", bench.seconds)
        for number in range(2):
            assert tier.get_now(ARM, key(number)) is not None


async def what_cannot_be_asked_is_refused_at_once(bench: Bench) -> None:
    async with bench.node() as (_, server), bench.link(server) as link:
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: link.read(32, 64),
            lambda: link.read(0, 100),
            lambda: link.read(-64, 64),
            lambda: link.read(0, 0),
            lambda: link.read(0, 1 << 30),
            lambda: link.write(link.hello.slots, b"x"),
            lambda: link.write(-1, b"x"),
            lambda: link.write(0, b"x" * (link.hello.slot_bytes + 1)),
        ]
        for call in calls:
            try:
                await call()
            except ValueError:
                continue
            raise AssertionError("expected a ValueError")
        assert len(await link.read(0, 64)) == 64


async def reads_outside_the_arena_are_refused(bench: Bench) -> None:
    async with bench.node(size=MIB) as (_, server), bench.link(server) as link:
        await _lost(link.read(MIB - 64, 128))
        assert link.lost
        await _lost(link.read(0, 64))


async def a_cancelled_call_leaves_the_link_usable(bench: Bench) -> None:
    async with bench.node() as (tier, server), bench.link(server) as link:
        for length in (64, 1 << 20):
            calls = [asyncio.ensure_future(link.read(0, length)) for _ in range(20)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        tier.put_now(ARM, answer(1, 1, 100))
        assert await found(await opened(link), 1) is not None


async def a_server_that_ends_costs_no_more_than_a_bounded_wait(bench: Bench) -> None:
    async with bench.node() as (_, server), bench.link(server, deadline=1.0) as link:
        calls = [asyncio.ensure_future(link.read(0, 64)) for _ in range(5)]
        await server.close()
        await asyncio.gather(*calls, return_exceptions=True)
        began = time.monotonic()
        await _lost(link.read(0, 64))
        assert time.monotonic() - began < bench.seconds
        assert link.lost


async def a_closed_link_gives_its_slots_back(bench: Bench) -> None:
    async with bench.node(inbox_slots=8) as (tier, server):
        for number in range(20):
            async with bench.link(server) as link:
                assert (link.hello.slots, link.hello.first_slot) == (1, 0)
                data = encode(ARM, key(number), pack(answer(number, 1, 10)), 1, link.hello.geometry.epoch)
                await link.write(0, data)
                await until(lambda number=number: server.counts["taken"] == number + 1, "the entry", bench.seconds)  # type: ignore[misc]
            await until(lambda number=number: server.open_links == 0, "the end of the link", bench.seconds)  # type: ignore[misc]
        assert tier.stats_now(ARM).entries == 20


async def a_tier_reads_and_feeds_its_neighbour(bench: Bench) -> None:
    async with bench.node() as (tier, server):
        there = address(server)
        async with reader(there, transports=[bench.client()], deadline=PATIENT) as mine:
            await until(lambda: mine.links() == {there: bench.transport}, "the link", bench.seconds)
            theirs = [number for number in range(60) if mine.owner(key(number)) == there]
            for number in theirs:
                mine.offer(ARM, answer(number, 5, 1000))
            await until(lambda: server.counts["taken"] == len(theirs), "what was offered", bench.seconds)
            for number in range(60):
                entry = await mine.get(ARM, key(number))
                assert (entry is not None) == (number in theirs)
                if entry is not None:
                    assert check(number, entry) == 5
            counts = mine.counts
            assert counts[bench.transport, "hits"] == counts[bench.transport, "offered"] == len(theirs)
            assert tier.stats_now(ARM).entries == len(theirs)


async def a_restarted_neighbour_with_another_arena_is_read_again(bench: Bench) -> None:
    async with reader_of_restarts(bench) as (mine, there, number):
        epochs = set()
        for turn, size in enumerate((2 * MIB, 4 * MIB)):
            async with bench.node(size=size, listen=there) as (tier, server):
                tier.put_now(ARM, answer(number, turn, 500))
                epochs.add(tier.mapping.geometry.epoch)
                await until(lambda: mine.links()[there] == bench.transport, "the link", bench.seconds)
                entry = await mine.get(ARM, key(number))
                assert entry is not None
                assert check(number, entry) == turn
                assert server.serving
            assert await mine.get(ARM, key(number)) is None, "nobody is there"
        assert len(epochs) == 2


@asynccontextmanager
async def reader_of_restarts(bench: Bench) -> AsyncIterator[tuple[Any, str, int]]:
    """A tier whose one neighbour is not there yet, its address, and a key that it owns."""
    from serving.ports import free_port

    there = f"127.0.0.1:{free_port()}"
    async with reader(there, transports=[bench.client()]) as mine:
        yield mine, there, next(number for number in range(1000) if mine.owner(key(number)) == there)


CHECKS: tuple[Callable[[Bench], Awaitable[None]], ...] = (
    it_says_what_it_is,
    bytes_are_those_of_the_arena,
    entries_of_any_size_come_back,
    a_small_entry_takes_one_read,
    what_is_not_there_is_a_miss,
    entries_in_their_other_bucket_are_found,
    an_arm_that_comes_later_is_found,
    an_arena_that_missed_a_removal_is_not_believed,
    a_corrupted_entry_is_a_miss,
    a_full_arena_is_read,
    no_torn_value_is_taken_from_a_racing_writer,
    many_calls_at_once_get_their_own_answers,
    what_is_written_arrives,
    peers_have_slots_of_their_own,
    what_cannot_be_asked_is_refused_at_once,
    reads_outside_the_arena_are_refused,
    a_cancelled_call_leaves_the_link_usable,
    a_server_that_ends_costs_no_more_than_a_bounded_wait,
    a_closed_link_gives_its_slots_back,
    a_tier_reads_and_feeds_its_neighbour,
    a_restarted_neighbour_with_another_arena_is_read_again,
)
"""All of them; each may be run by itself, in an empty folder."""


class Counting:
    """A link that notes what is read over it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.transport, self.hello, self.lost = link.transport, link.hello, False
        self.reads: list[tuple[int, int]] = []

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        self.reads.append((offset, length))
        return await self._link.read(offset, length)

    async def write(self, slot: int, data: bytes) -> None:
        await self._link.write(slot, data)

    async def close(self) -> None:
        await self._link.close()


async def _lost(call: Awaitable[Any]) -> None:
    try:
        await call
    except LinkLost:
        return
    raise AssertionError("expected that the link is lost")
