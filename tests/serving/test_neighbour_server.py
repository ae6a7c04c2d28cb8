"""One process of a node serves its arena to the neighbours, by the transports that it has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from serving.neighbours import server
from serving.neighbours.exchange import NONCE_BYTES, chosen, hello
from serving.neighbours.link import LinkLost
from serving.neighbours.server import NeighbourServer, _Incoming
from serving.neighbours.tcp import TcpTransport
from serving.ports import free_port
from serving.tiers.arena import ArenaTier
from tests.serving.arenas import ARM, MIB, answer, key
from tests.serving.neighbours import NAMESPACE, SECRET, address, linked, owner, reader
from tests.waiting import until


async def test_one_process_of_a_node_serves_and_another_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TAKE_OVER_SECONDS", 0.02)
    listen = f"127.0.0.1:{free_port()}"
    async with owner(tmp_path / "arena", listen=listen) as (first, one):
        async with owner(tmp_path / "arena", listen=listen) as (_, two):
            assert (one.serving, two.serving) == (True, False)
            first.put_now(ARM, answer(1, 1, 100))
            await one.close()
            await until(lambda: two.serving, "the other one")
            link = await linked(two)
            assert link.hello.geometry == first.mapping.geometry
            await link.close()


async def test_an_address_that_another_program_has_is_told_and_taken_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "TAKE_OVER_SECONDS", 0.02)
    port = free_port()
    other = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)
    async with owner(tmp_path / "arena", listen=f"127.0.0.1:{port}") as (_, serving):
        assert not serving.serving
        assert f"cannot listen on 127.0.0.1:{port}" in caplog.text
        other.close()
        await other.wait_closed()
        await until(lambda: serving.serving, "the address")


async def test_an_arena_that_was_replaced_is_not_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = ArenaTier(tmp_path / "arena", MIB)
    (tmp_path / "arena").unlink()
    other = ArenaTier(tmp_path / "arena", MIB)
    serving = NeighbourServer(tier, "127.0.0.1:0", secret=SECRET, namespace=NAMESPACE)
    await serving.start()
    assert not serving.serving
    assert "was replaced" in caplog.text
    await serving.close()
    for each in (tier, other):
        each.close_now()


async def test_a_server_that_fails_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serving.neighbours.server.TAKE_OVER_SECONDS", 0.05)
    async with owner(tmp_path / "arena") as (_, serving):
        inbox, links = serving._inbox, serving.counts["links"]
        link = await linked(serving)
        monkeypatch.setattr(inbox, "take", None)
        await link.write(0, bytes(256))  # which wakes it
        await until(lambda: serving.serving and serving._inbox is not inbox, "it to serve again")
        again = await linked(serving)
        assert serving.counts["links"] == links + 2
        for each in (link, again):
            await each.close()
    assert "serving ended, and is tried again: TypeError" in caplog.text


async def test_a_transport_that_fails_is_left_out(tmp_path: Path) -> None:
    class Broken(TcpTransport):
        name = "rdma"

        def dial(self, deadline: float) -> Any:
            raise LinkLost("no more queue pairs")

    class Refusing:
        name = "rdma"

        def accept(self, *_: Any) -> Any:
            raise LinkLost("no more memory to register")

        def close(self) -> None:
            pass

    async with owner(tmp_path / "arena", offers=[lambda arena, inbox: Refusing()]) as (_, serving):
        told: list[str] = []
        link = await linked(serving, [Broken(), TcpTransport()], fell_back=told.append)
        assert link.transport == "tcp"
        assert told == ["by tcp, since rdma failed: no more queue pairs"]
        await link.close()

        class Willing(TcpTransport):
            name = "rdma"

        link = await linked(serving, [Willing(), TcpTransport()])
        assert link.transport == "tcp"
        await link.close()
        with pytest.raises(ConnectionError, match="rdma: no more memory to register"):
            await linked(serving, [Willing()])
        await until(lambda: serving.open_links == 0, "the end of the links")


async def test_an_offer_that_cannot_be_made_leaves_tcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def offer(*_: Any) -> Any:
        raise LinkLost("no device here")

    async with owner(tmp_path / "arena", offers=[offer]) as (_, serving):
        assert serving.serving
        assert "one transport less: no device here" in caplog.text
    async with owner(tmp_path / "arena", offers=[offer], tcp=False) as (_, serving):
        with pytest.raises(ConnectionError, match="this node has none only"):
            await linked(serving)


async def test_a_stopped_writer_does_not_hold_up_those_who_read(tmp_path: Path) -> None:
    """It holds the lease, so that nothing of the inbox can be put."""
    async with owner(tmp_path / "arena") as (arena, serving):
        arena.put_now(ARM, answer(1, 1, 100))
        there = address(serving)
        async with reader(there) as tier:
            await until(lambda: tier.links()[there] == "tcp", "the link")
            offered = [number for number in range(200) if tier.owner(key(number)) == there][:8]
            writer = ArenaTier(tmp_path / "arena", 4 * MIB)
            assert writer.lease.acquire()
            for number in offered[:2]:
                tier.offer(ARM, answer(number, 2, 100))
            await until(lambda: serving.counts["rejected"] == 2, "that two were given up")
            link = await linked(serving)
            assert len(await link.read(0, 64)) == 64
            await link.close()
            writer.lease.release()
            writer.close_now()
            for number in offered[2:]:
                tier.offer(ARM, answer(number, 2, 100))
            await until(lambda: serving.counts["taken"] == len(offered) - 2, "the rest")


async def test_a_hello_that_comes_with_the_connection_is_heard(tmp_path: Path) -> None:
    # As uvloop delivers it, on which Ray runs: before any task that the connection has made ready.
    async with owner(tmp_path / "arena") as (_, serving):
        said = hello(NAMESPACE, ["tcp"], bytes(NONCE_BYTES))
        transport = Mock(**{"get_extra_info.return_value": None})
        connection = _Incoming(serving._arrived)
        connection.connection_made(transport)
        connection.data_received(len(said).to_bytes(4, "little") + said)
        await until(lambda: transport.write.called, "the challenge")
        ((sent,), _) = transport.write.call_args
        assert chosen(sent[4:], ["tcp"]) == "tcp"
        connection.connection_lost(None)
        await until(lambda: not serving._unproven, "the end of the exchange")
