"""The exchange between neighbours: who does not know the secret gets nowhere, within bounds, and is told why."""

from __future__ import annotations

import asyncio
import hmac
import struct
import time
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.arena.layout import VERSION, Geometry
from serving.neighbours import exchange, server
from serving.neighbours.dialing import parse_address
from serving.neighbours.exchange import Refused
from serving.neighbours.link import Hello, LinkLost
from tests.serving.neighbours import NAMESPACE, SECRET, linked, owner
from tests.waiting import until

NONCE = bytes(range(32))
KEY = SECRET.encode()
GEOMETRY = Geometry.plan(1 << 20, 1024, 77)
TOLD = Hello(VERSION, GEOMETRY, 0, 4, 65536)


def said() -> list[bytes]:
    """A whole exchange."""
    messages = [exchange.hello(NAMESPACE, ["rdma", "tcp"], NONCE)]
    asked = exchange.open_hello(messages[0], NAMESPACE)
    messages.append(exchange.challenge(asked.transports[1], bytes(32)))
    assert exchange.chosen(messages[1], ["rdma", "tcp"]) == "tcp"
    messages.append(exchange.proof(KEY, messages, {"qpn": 7, "gid": "fe80::1"}))
    assert exchange.open_proof(KEY, messages[:2], messages[2]) == {"qpn": 7, "gid": "fe80::1"}
    messages.append(exchange.answer(KEY, messages, TOLD, {"rkey": 9}))
    return messages


def test_both_sides_learn_what_they_need() -> None:
    messages = said()
    assert exchange.open_answer(KEY, messages[:3], messages[3]) == (TOLD, {"rkey": 9})
    assert exchange._flat(TOLD) == {
        "layout": VERSION, "bytes": GEOMETRY.bytes, "buckets": GEOMETRY.buckets, "edges": GEOMETRY.edges, "index": GEOMETRY.index,
        "values": GEOMETRY.values, "epoch": 77, "first_slot": 0, "slots": 4, "slot_bytes": 65536,
    }, "as earlier versions say it"  # fmt: skip


def test_nothing_of_the_memory_is_told_before_the_proof() -> None:
    assert str(TOLD.geometry.epoch).encode() not in said()[1]


@given(st.integers(0, 3), st.integers(0, 10_000), st.integers(1, 255))
def test_a_change_of_any_byte_of_what_was_said_is_noticed(which: int, place: int, change: int) -> None:
    messages = said()
    place %= len(messages[which])
    changed = bytearray(messages[which])
    changed[place] ^= change
    messages[which] = bytes(changed)
    if which < 3:
        with pytest.raises(Refused):
            exchange.open_proof(KEY, messages[:2], messages[2])
    with pytest.raises(Refused):
        exchange.open_answer(KEY, messages[:3], messages[3])


def test_a_proof_of_another_exchange_is_of_no_use() -> None:
    messages = said()
    again = [messages[0], exchange.challenge("tcp", b"\1" * 32)]
    with pytest.raises(Refused, match="wrong secret"):
        exchange.open_proof(KEY, again, messages[2])


def test_what_one_side_proves_is_no_proof_of_the_other_side() -> None:
    messages = said()
    body = orjson.dumps({"hello": {}, "parameters": {}})
    mac = hmac.new(KEY, exchange._READER, "sha256")
    for part in (*messages[:3], body):
        mac.update(struct.pack("<I", len(part)) + part)
    with pytest.raises(Refused, match="does not know the secret"):
        exchange.open_answer(KEY, messages[:3], b"+" + mac.digest() + body)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.sampled_from([b"", b"+", b"-", b"cachepilot-neighbour 1\n"]))
def test_rubbish_is_refused_and_nothing_else(rubbish: bytes, begin: bytes) -> None:
    messages = said()
    with pytest.raises(Refused):
        exchange.open_hello(begin + rubbish, NAMESPACE)
    with pytest.raises(Refused):
        exchange.chosen(begin + rubbish, ["tcp"])
    with pytest.raises(Refused):
        exchange.open_proof(KEY, messages[:2], begin + rubbish)
    with pytest.raises(Refused):
        exchange.open_answer(KEY, messages[:3], begin + rubbish)


@given(
    st.sampled_from(sorted(exchange._flat(TOLD))),
    st.one_of(st.integers(-5, 5), st.integers(-(2**64), 2**64), st.text(max_size=3), st.none(), st.booleans()),
)
def test_an_arena_that_cannot_be_is_refused_even_from_one_who_knows_the_secret(name: str, value: object) -> None:
    told = exchange._flat(TOLD) | {name: value}
    try:
        made = exchange._hello(orjson.loads(orjson.dumps(told)))
    except (Refused, TypeError):  # orjson writes no numbers beyond 64 bits
        return
    geometry = made.geometry
    assert geometry.index + geometry.buckets * 4 == geometry.values <= geometry.units
    assert 0 <= made.first_slot <= made.first_slot + made.slots <= 128


def test_a_short_secret_is_refused_with_the_way_to_make_one() -> None:
    with pytest.raises(ValueError, match=r"at least 16 characters.*openssl rand"):
        exchange.check_secret("short")


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:70000", "host:-1", "host:١"])
def test_an_address_is_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_address(text, "peers")
    assert parse_address("[::1]:7", "peers") == ("::1", 7)


# -- over a connection -------------------------------------------------------------------------------------------------------


async def test_a_wrong_secret_is_refused_with_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        with pytest.raises(Refused, match=r"127.0.0.1:\d+: it refused: wrong secret: expected the same") as refused:
            await linked(serving, secret=b"another secret of some length")
        assert refused.value.why == "secret"
        assert serving.counts["refused"] == 1
        assert serving.open_links == 0
        await (await linked(serving)).close()
    assert SECRET not in caplog.text


async def test_another_namespace_is_refused_with_words(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        with pytest.raises(Refused, match=r"another namespace: `gateway.namespace` has to be the same") as refused:
            await linked(serving, namespace="other")
        assert refused.value.why == "namespace"


async def test_another_layout_is_refused_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        ordinary = exchange.hello(NAMESPACE, ["tcp"], NONCE)
        old = ordinary.replace(b'"layout":%d' % VERSION, b'"layout":%d' % (VERSION + 1))
        assert old != ordinary
        monkeypatch.setattr("serving.neighbours.dialing.hello", lambda *_: old)
        with pytest.raises(Refused, match=r"expected layout version \d+ of the arena: run one version") as refused:
            await linked(serving)
        assert refused.value.why == "layout"


async def test_an_impostor_without_the_secret_is_not_read(tmp_path: Path) -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def message() -> bytes:
            (size,) = struct.unpack("<I", await reader.readexactly(4))
            return await reader.readexactly(size)

        def send(text: bytes) -> None:
            writer.write(struct.pack("<I", len(text)) + text)

        told = [await message(), exchange.challenge("tcp", NONCE)]
        send(told[1])
        told.append(await message())
        send(exchange.answer(b"not the secret of the nodes", told, TOLD, {}))
        await reader.read()
        writer.close()

    impostor = await asyncio.start_server(pretend, "127.0.0.1", 0)
    serving = type("Address", (), {"address": impostor.sockets[0].getsockname()[:2]})()
    with pytest.raises(Refused, match="it does not know the secret"):
        await linked(serving)
    impostor.close()


class Raw:
    """A connection of somebody who does not keep to the protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, serving: server.NeighbourServer) -> Raw:
        return cls(*await asyncio.open_connection(*serving.address))

    def send(self, text: bytes) -> None:
        self.writer.write(struct.pack("<I", len(text)) + text)

    async def message(self) -> bytes:
        (size,) = struct.unpack("<I", await self.reader.readexactly(4))
        return await self.reader.readexactly(size)

    async def ended(self) -> bytes:
        """What came until the owner ended the connection."""
        got = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                while part := await self.reader.read(65536):
                    got += part
        self.writer.close()
        return got


async def test_a_replayed_exchange_is_refused(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        first = await Raw.to(serving)
        hello = exchange.hello(NAMESPACE, ["tcp"], NONCE)
        first.send(hello)
        told = [hello, await first.message()]
        proof = exchange.proof(KEY, told, {})
        first.send(proof)
        assert (await first.message())[:1] == b"+"
        first.writer.close()
        second = await Raw.to(serving)
        second.send(hello)
        assert await second.message() != told[1], "a new nonce"
        second.send(proof)
        assert b"wrong secret" in await second.ended()


async def test_a_reflected_challenge_is_refused(tmp_path: Path) -> None:
    """Who does not know the secret lets the owner answer its own challenge."""
    async with owner(tmp_path / "arena") as (_, serving):
        first = await Raw.to(serving)
        first.send(exchange.hello(NAMESPACE, ["tcp"], NONCE))
        challenge = await first.message()
        nonce = bytes.fromhex(orjson.loads(challenge[1:])["nonce"])
        second = await Raw.to(serving)
        second.send(exchange.hello(NAMESPACE, ["tcp"], nonce))
        reply = await second.message()
        assert len(reply) < 200, "the owner proves nothing before the reader has"
        first.send(reply)
        assert b"wrong secret" in await first.ended()
        second.writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack("<I", 4097),
        struct.pack("<I", 0) * 10,
        struct.pack("<I", 3) + b"abc",
        b"",
    ],
)
async def test_what_is_not_of_the_protocol_ends_the_connection(
    tmp_path: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "EXCHANGE_SECONDS", 0.2)
    async with owner(tmp_path / "arena") as (_, serving):
        raw = await Raw.to(serving)
        raw.writer.write(sent)
        got = await raw.ended()
        assert len(got) < 1000
        await until(lambda: serving.counts["refused"] >= 1, "the refusal")
        assert serving.open_links == 0


async def test_one_who_sends_a_byte_now_and_then_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "EXCHANGE_SECONDS", 0.3)
    async with owner(tmp_path / "arena") as (_, serving):
        raw = await Raw.to(serving)
        message = exchange.hello(NAMESPACE, ["tcp"], NONCE)
        began = time.monotonic()
        with suppress(ConnectionError):
            for byte in struct.pack("<I", len(message)) + message:
                raw.writer.write(bytes([byte]))
                await raw.writer.drain()
                if raw.reader.at_eof():
                    break
                await asyncio.sleep(0.02)
        await raw.ended()
        assert time.monotonic() - began < 20
        assert serving.counts["refused"] == 1


async def test_a_thousand_idle_connections_are_bounded_and_keep_nobody_out(tmp_path: Path) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        idle: list[Raw] = []
        for _ in range(1000):
            raw = await Raw.to(serving)
            idle.append(raw)
            assert len(serving._unproven) <= server.MOST_UNPROVEN
        link = await linked(serving)
        assert len(await link.read(0, 64)) == 64
        await link.close()
        for raw in idle:
            raw.writer.close()
        await until(lambda: not serving._unproven, "the end of them all")


async def test_links_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_LINKS", 3)
    async with owner(tmp_path / "arena") as (_, serving):
        links = [await linked(serving) for _ in range(3)]
        with pytest.raises(LinkLost):
            await linked(serving)
        await links[0].close()
        await until(lambda: serving.open_links == 2, "the end of one")
        links.append(await linked(serving))
        for link in links:
            await link.close()


async def test_a_reader_that_takes_no_answers_is_not_answered_without_end(tmp_path: Path) -> None:
    """It asks for 8 GiB and reads nothing."""
    async with owner(tmp_path / "arena", size=8 << 20) as (_, serving):
        raw = await Raw.to(serving)
        told = [exchange.hello(NAMESPACE, ["tcp"], NONCE)]
        raw.send(told[0])
        told.append(await raw.message())
        raw.send(exchange.proof(KEY, told, {}))
        await raw.message()
        for number in range(1000):
            raw.send(struct.pack("<BxxxIQQ", 1, number, 0, 8 << 20))
        other = await linked(serving)
        for _ in range(20):
            assert len(await other.read(0, 64)) == 64
        (connection,) = (each for each in serving._links if each.peer.endswith(f":{raw.writer.get_extra_info('sockname')[1]}"))
        assert connection._transport is not None
        assert 0 < connection._transport.get_write_buffer_size() < 2 * (8 << 20)
        await other.close()
        raw.writer.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"\1",
        struct.pack("<BxxxIQQ", 9, 1, 0, 64),
        struct.pack("<BxxxIQQ", 1, 1, 0, 64) + b"more",
        struct.pack("<BxxxIQQ", 2, 1, 0, 10) + b"less",
        struct.pack("<I", 7),
    ],
)
async def test_one_who_knows_the_secret_and_breaks_the_protocol_is_cut_off(tmp_path: Path, request_: bytes) -> None:
    async with owner(tmp_path / "arena") as (_, serving):
        raw = await Raw.to(serving)
        told = [exchange.hello(NAMESPACE, ["tcp"], NONCE)]
        raw.send(told[0])
        told.append(await raw.message())
        raw.send(exchange.proof(KEY, told, {}))
        await raw.message()
        assert serving.open_links == 1
        raw.send(request_)
        await raw.ended()
        await until(lambda: serving.open_links == 0, "the end of the link")


async def test_no_memory_is_taken_for_what_has_none_yet(tmp_path: Path) -> None:
    """Reading it by the mapping would take memory, and end the process where there is none."""
    async with owner(tmp_path / "arena", size=64 << 20) as (tier, serving):
        link = await linked(serving)
        before = (tmp_path / "arena").stat().st_blocks
        for offset in range(8 << 20, 64 << 20, 8 << 20):
            assert bytes(await link.read(offset, 8 << 20)) == bytes(8 << 20)
        assert (tmp_path / "arena").stat().st_blocks == before
        assert tier.mapping.geometry.bytes == 64 << 20
        await link.close()
