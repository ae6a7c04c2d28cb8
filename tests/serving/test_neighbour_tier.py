"""The tier over neighbours: the dead, the slow and the full cost a bounded wait or nothing; the restarted are found again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from serving.neighbours import exchange, peer, server
from serving.neighbours.link import LinkLost
from serving.neighbours.server import NeighbourServer
from serving.neighbours.tcp import TcpTransport
from serving.ports import free_port
from serving.tiers.arena import ArenaTier
from serving.tiers.rdma import NeighbourTier
from tests.serving.arenas import ARM, MIB, answer, check, key
from tests.serving.neighbours import NAMESPACE, SECRET, address, owner, reader
from tests.waiting import until


def owned(tier: NeighbourTier, there: str, count: int) -> list[int]:
    """Numbers of keys that the node owns."""
    return [number for number in range(50 * count) if tier.owner(key(number)) == there][:count]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries that fail are made again soon."""
    monkeypatch.setattr(peer, "BACKOFF", (0.01, 0.1))
    monkeypatch.setattr(peer, "REFUSED_BACKOFF", 0.05)


class Proxy:
    """Stands before an owner: passes all on, or, ``silent``, nothing any more, with the connections open."""

    def __init__(self, there: tuple[str, int]) -> None:
        self.there = there
        self.silent = asyncio.Event()
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self.listening = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        host, port = self.listening.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        other_reader, other_writer = await asyncio.open_connection(*self.there)
        self.writers += [writer, other_writer]
        await asyncio.gather(self._one(reader, other_writer), self._one(other_reader, writer))

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while part := await reader.read(65536):
                if not self.silent.is_set():
                    writer.write(part)
        writer.close()

    async def close(self) -> None:
        self.listening.close()
        for writer in self.writers:
            writer.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def behind_a_proxy(folder: Path, **options: Any) -> AsyncIterator[tuple[ArenaTier, Proxy, NeighbourTier, str]]:
    async with owner(folder / "arena") as (arena, serving):
        proxy = Proxy(serving.address)
        there = await proxy.start()
        try:
            async with reader(there, **options) as tier:
                await until(lambda: tier.links()[there] == "tcp", "the link")
                yield arena, proxy, tier, there
        finally:
            await proxy.close()


async def test_keys_of_this_node_are_asked_of_nobody(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (arena, serving):
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links() == {there: "tcp"}, "the link")
            mine = [number for number in range(50) if tier.owner(key(number)) != there]
            assert mine
            for number in mine:
                arena.put_now(ARM, answer(number, 1, 100))
                assert await tier.get(ARM, key(number)) is None
                tier.offer(ARM, answer(number, 2, 100))
            assert not +tier.counts


async def test_a_node_alone_has_no_neighbours() -> None:
    async with reader() as tier:
        assert tier.links() == {}
        assert tier.owner(key(1)) == tier.own
        assert await tier.get(ARM, key(1)) is None
        tier.offer(ARM, answer(1, 1, 100))


async def test_a_silent_neighbour_costs_one_bounded_wait_and_then_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "EXCHANGE_SECONDS", 30.0)
    monkeypatch.setattr("serving.neighbours.dialing.EXCHANGE_SECONDS", 30.0)
    async with behind_a_proxy(tmp_path, deadline=0.5) as (_, proxy, tier, there):
        numbers = owned(tier, there, 30)
        assert await tier.get(ARM, key(numbers[0])) is None
        assert tier.counts["tcp", "lost"] == 0
        proxy.silent.set()
        began = time.monotonic()
        await asyncio.gather(*(tier.get(ARM, key(number)) for number in numbers))
        waited = time.monotonic() - began
        assert waited > 0.4
        assert tier.counts["tcp", "lost"] == len(numbers), "they waited together"
        for number in numbers:
            with pytest.raises(StopIteration):  # nobody waits for a dead peer: it returns without having awaited anything
                tier.get(ARM, key(number)).send(None)
        assert tier.counts["tcp", "lost"] == len(numbers)
        assert tier.links() == {there: "none"}


async def test_one_that_accepts_and_then_answers_nothing_is_tried_less_and_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes the exchange each time, so that the connection alone proves nothing."""

    class Deaf(TcpTransport):
        def dial(self, deadline: float) -> Any:
            dialing = super().dial(deadline)
            finish = dialing.finish

            async def deaf(*args: Any) -> Any:
                link = await finish(*args)
                read = link.read

                async def once(offset: int, length: int) -> Any:
                    await asyncio.sleep(0)
                    if length == 256:
                        link._lose("it says nothing")
                    return await read(offset, length)

                monkeypatch.setattr(link, "read", once)
                return link

            monkeypatch.setattr(dialing, "finish", deaf)
            return dialing

    monkeypatch.setattr(peer, "BACKOFF", (0.02, 10.0))
    now = [0.0]
    async with owner(tmp_path / "arena") as (_, serving):
        there = address(serving)
        async with reader(there, transports=[Deaf()], clock=lambda: now[0], draw=lambda: 0.5) as tier:
            (number,) = owned(tier, there, 1)
            for links in range(1, peer.FAILURES + 1):
                await until(lambda: tier.links()[there] == "tcp", "a link")
                assert await tier.get(ARM, key(number)) is None
                assert tier.counts["tcp", "lost"] == links
            await until(lambda: tier.links()[there] == "tcp", "a link")
            for _ in range(20):
                assert await tier.get(ARM, key(number)) is None
            assert tier.counts["tcp", "lost"] == peer.FAILURES, "the breaker is open: it is not asked"
            assert tier.links()[there] == "tcp"
            now[0] += peer.COOLDOWN
            given_up = asyncio.ensure_future(tier.get(ARM, key(number)))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            assert tier.counts["tcp", "lost"] == peer.FAILURES, "its caller has gone"
            await tier.get(ARM, key(number))
            assert tier.counts["tcp", "lost"] == peer.FAILURES + 1, "one probe"


async def test_a_cancelled_lookup_says_nothing_of_the_peer(tmp_path: Path) -> None:
    async with behind_a_proxy(tmp_path) as (arena, proxy, tier, there):
        numbers = owned(tier, there, 20)
        for number in numbers:
            arena.put_now(ARM, answer(number, 1, 100))
        lookups = [asyncio.ensure_future(tier.get(ARM, key(number))) for number in numbers]
        await asyncio.sleep(0)
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)
        for number in numbers:
            assert await tier.get(ARM, key(number)) is not None
        assert tier.counts["tcp", "lost"] == 0
        assert proxy.connections == 1


@pytest.mark.usefixtures("quick")
async def test_a_neighbour_with_another_secret_is_tried_again_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with owner(tmp_path / "arena", secret="quite another one, of enough characters") as (_, serving):
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.counts["none", "refused"] >= 3, "three refusals")
            assert tier.links() == {there: "none"}
            assert await tier.get(ARM, key(1)) is None
    told = [record for record in caplog.records if "wrong secret" in record.message and record.name.endswith("peer")]
    assert len(told) == 1
    assert "the same `neighbours.secret` on every node" in told[0].message


async def test_a_node_that_is_listed_by_another_name_does_not_ask_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with owner(tmp_path / "arena") as (tier, serving):
        async with reader(address(serving), own="localhost:1", own_epoch=tier.mapping.geometry.epoch) as neighbours:
            await until(lambda: neighbours.counts["none", "refused"] > 0, "the node to meet itself")
            assert set(neighbours.links().values()) == {"none"}
    assert "that is this node itself, by another name; set advertise" in caplog.text


async def test_a_name_that_no_host_can_have_is_a_neighbour_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    async with reader("a..b:1", "x" * 70 + ":1", own="localhost:1") as neighbours:
        await until(lambda: neighbours.counts["none", "lost"] >= 4, "each to be tried twice")
    assert "a..b:1 is not read for now" in caplog.text


async def test_a_transport_that_fails_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(TcpTransport):
        name = "rdma"

        def dial(self, deadline: float) -> Any:
            raise LinkLost("no more queue pairs")

    class Offered:
        name = "rdma"

        def accept(self, *_: Any) -> Any:
            raise AssertionError

        def close(self) -> None:
            pass

    async with owner(tmp_path / "arena", offers=[lambda arena, inbox: Offered()]) as (_, serving):
        async with reader(address(serving), transports=[Failing(), TcpTransport()], own="localhost:1") as neighbours:
            await until(lambda: set(neighbours.links().values()) == {"tcp"}, "the other one to be taken")
    assert caplog.text.count("is read by tcp, since rdma failed") == 1


async def test_what_is_offered_is_in_the_owners_arena_and_counted(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena", inbox_slots=8, slot_bytes=4096) as (arena, serving):
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            numbers = owned(tier, there, 40)
            for number in numbers:
                tier.offer(ARM, answer(number, 1, 900))
            tier.offer(ARM, answer(numbers[0], 2, 5000))  # larger than a slot
            assert tier.counts["tcp", "dropped"] == 1
            await until(lambda: serving.counts["taken"] == len(numbers), "all of them, by one slot")
            assert tier.counts["tcp", "offered"] == len(numbers)
            for number in numbers:
                entry = arena.get_now(ARM, key(number))
                assert entry is not None
                assert check(number, entry) == 1


async def test_a_full_inbox_drops_and_counts_and_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "OFFER_SECONDS", 1.0)
    async with owner(tmp_path / "arena", inbox_slots=8) as (_, serving):
        monkeypatch.setattr("serving.neighbours.inbox.Inbox.take", lambda self, most, now: ([], False))
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            numbers = owned(tier, there, peer.MOST_OFFERS + 50)
            for number in numbers:
                tier.offer(ARM, answer(number, 1, 100))
            assert tier.counts["tcp", "dropped"] == 50, "no more wait than there is room for"
            await until(lambda: tier.counts["tcp", "dropped"] == len(numbers) - 1, "that the others are given up")
            assert tier.counts["tcp", "offered"] == 1, "into its one slot"


async def test_offers_without_a_link_are_dropped(tmp_path: Path) -> None:
    there = f"127.0.0.1:{free_port()}"
    async with reader(there) as tier:
        (number,) = owned(tier, there, 1)
        tier.offer(ARM, answer(number, 1, 100))
        assert tier.counts["none", "dropped"] == 1


async def test_the_owner_keeps_what_is_newer(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (arena, serving):
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            older, newer = owned(tier, there, 2)
            arena.put_now(ARM, answer(older, 5, 100))
            arena.put_now(ARM, answer(newer, 5, 100))
            tier.offer(ARM, answer(older, 4, 100))
            tier.offer(ARM, answer(newer, 6, 100))
            await until(lambda: serving.counts["known"] + serving.counts["taken"] == 2, "both")
            assert [arena.get_now(ARM, key(number)) for number in (older, newer)] == [
                answer(older, 5, 100),
                answer(newer, 6, 100),
            ]


async def test_an_arm_without_a_budget_takes_nothing_and_is_not_made(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (arena, serving):
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            numbers = owned(tier, there, 40)
            for number in numbers:
                tier.offer(f"made-up-{number}", answer(number, 1, 100))
            await until(lambda: serving.counts["rejected"] == len(numbers), "all of them")
            assert await tier.get("made-up-0", key(numbers[0])) is None
            arena.resize_now("one more", MIB)


async def test_what_was_flushed_or_deleted_does_not_come_back_by_the_inbox(tmp_path: Path) -> None:
    now = [100.0]
    async with owner(tmp_path / "arena", clock=lambda: now[0]) as (arena, serving):
        arena.resize_now("other", MIB)
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            deleted, kept = owned(tier, there, 2)
            serving.outdated(ARM, [key(deleted)])
            serving.outdated("other")
            tier.offer(ARM, answer(deleted, 1, 100))
            tier.offer(ARM, answer(kept, 1, 100))
            tier.offer("other", answer(kept, 1, 100))
            await until(lambda: serving.counts["rejected"] + serving.counts["taken"] == 3, "all three")
            assert serving.counts["rejected"] == 2
            assert arena.get_now(ARM, key(deleted)) is None
            assert arena.get_now("other", key(kept)) is None
            now[0] += server.QUARANTINE
            tier.offer(ARM, answer(deleted, 1, 100))
            await until(lambda: serving.counts["taken"] == 2, "what is new again")


async def test_an_offer_older_than_a_removal_that_took_effect_is_not_taken(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (arena, serving):
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            before, after, later = owned(tier, there, 3)
            arena.update_mark_now(ARM, lambda mark: 5)
            serving.outdated(ARM)
            tier.offer(ARM, answer(before, 1, 100), 4)
            tier.offer(ARM, answer(after, 1, 100), 5)
            tier.offer(ARM, answer(later, 1, 100), 6)
            await until(lambda: serving.counts["rejected"] + serving.counts["taken"] == 3, "all three")
            assert arena.get_now(ARM, key(before)) is None
            assert arena.get_now(ARM, key(after)) is not None, "it says that it is not older"
            assert arena.get_now(ARM, key(later)) is not None, "removals to come will find it"
            assert serving.counts["rejected"] == 1
            for number in (after, later):
                assert await tier.get(ARM, key(number), least=5) is not None
                assert await tier.get(ARM, key(number), least=6) is None
            assert (tier.counts["tcp", "hits"], tier.counts["tcp", "misses"], tier.counts["tcp", "behind"]) == (2, 2, 2)


async def test_a_peer_that_was_found_in_doubt_of_what_it_has_is_believed_again_when_it_says_so(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (arena, serving):
        there = address(serving)
        arena.update_mark_now(ARM, lambda mark: 5)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            number = owned(tier, there, 1)[0]
            arena.put_now(ARM, answer(number, 1, 100))
            assert await tier.get(ARM, key(number), least=5) is not None
            arena.update_mark_now(ARM, lambda mark: -mark)
            assert await tier.get(ARM, key(number), least=6) is None, "its mark is read"
            assert await tier.get(ARM, key(number), least=5) is None, "and now it is known to be in doubt"
            arena.update_mark_now(ARM, abs)
            assert await tier.get(ARM, key(number), least=5) is not None


async def test_what_waits_to_be_offered_is_dropped_when_it_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            one, two, three = owned(tier, there, 3)
            tier.offer(ARM, answer(one, 1, 100))
            tier.offer(ARM, answer(two, 1, 100))
            tier.offer("other", answer(three, 1, 100))
            tier.outdated(ARM, [key(one)])
            tier.outdated("other")
            await until(lambda: tier.counts["tcp", "offered"] == 1, "the one that is left")
            await until(lambda: serving.counts["taken"] == 1, "it")
            assert tier.counts["tcp", "dropped"] == 2


def test_deleted_keys_are_remembered_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_OUTDATED", 100)
    now = [0.0]
    tier = ArenaTier(tmp_path / "arena", MIB)
    serving = NeighbourServer(tier, "127.0.0.1:0", secret=SECRET, namespace=NAMESPACE, clock=lambda: now[0])
    serving.outdated(ARM, [key(number) for number in range(1000)])
    assert len(serving._outdated) == 100
    now[0] += server.QUARANTINE
    serving.outdated(ARM)
    assert list(serving._outdated) == [(ARM, b"")]
    tier.close_now()


_NODE = """
import asyncio, json, sys
from pathlib import Path
from serving.tiers.arena import ArenaTier
from tests.serving.arenas import ARM, answer
from tests.serving.neighbours import NAMESPACE, SECRET
from serving.neighbours.server import NeighbourServer

async def main(path, size, listen, version):
    tier = ArenaTier(Path(path), int(size))
    tier.resize_now(ARM, int(size) // 2)
    if version != "0":
        for number in range(100):
            tier.put_now(ARM, answer(number, int(version), 1500))
    server = NeighbourServer(tier, listen, secret=SECRET, namespace=NAMESPACE)
    await server.start()
    print(json.dumps({"serving": server.serving, "epoch": tier.mapping.geometry.epoch}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""


class Node:
    """A node that is a process of its own."""

    def __init__(self, path: Path, size: int, listen: str, version: int) -> None:
        command = [sys.executable, "-c", _NODE, str(path), str(size), listen, str(version)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def started(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(120):  # it may have to compile first
            told: dict[str, Any] = json.loads(await asyncio.to_thread(self.process.stdout.readline))
        return told

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.usefixtures("quick")
async def test_a_neighbour_killed_and_started_again_is_read_again_with_what_its_arena_kept(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    node = Node(tmp_path / "arena", 2 * MIB, listen, 1)
    try:
        told = await node.started()
        assert told["serving"]
        async with reader(listen) as tier:
            numbers = [number for number in owned(tier, listen, 30) if number < 100]
            await until(lambda: tier.links()[listen] == "tcp", "the link")
            for number in numbers:
                entry = await tier.get(ARM, key(number))
                assert entry is not None
                assert check(number, entry) == 1
            lookups = [asyncio.ensure_future(tier.get(ARM, key(number))) for number in numbers]
            node.kill()
            for lookup in lookups:
                entry = await lookup
                if entry is not None:
                    assert check(next(number for number in numbers if key(number) == entry.key), entry) == 1
            await until(lambda: tier.links()[listen] == "none", "that its end is noticed")
            assert await tier.get(ARM, key(numbers[0])) is None

            node = Node(tmp_path / "arena", 2 * MIB, listen, 0)
            again = await node.started()
            assert again["epoch"] == told["epoch"], "the arena outlives the process"
            await until(lambda: tier.links()[listen] == "tcp", "the link")
            for number in numbers:
                entry = await tier.get(ARM, key(number))
                assert entry is not None
                assert check(number, entry) == 1
            node.kill()

            node = Node(tmp_path / "arena", 4 * MIB, listen, 2)
            third = await node.started()
            assert third["epoch"] != told["epoch"], "another size, another arena"
            await until(lambda: tier.links()[listen] == "tcp", "the link")
            for number in numbers:
                entry = await tier.get(ARM, key(number))
                assert entry is not None
                assert check(number, entry) == 2
    finally:
        if node.process.poll() is None:
            node.kill()
