"""Lookups in a peer's arena: whatever comes back, an answer is right, or there is none."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.arena.layout import R_KEY, R_LENGTH, VERSION, Geometry, digest, digest_tag, home_bucket, slot_word
from serving.neighbours.link import LARGEST_READ, Hello, LinkLost
from serving.neighbours.lookup import ATTEMPTS, RemoteArena, to_entry
from serving.tiers.arena import ArenaTier
from serving.tiers.base import Entry
from serving.tiers.codec import pack
from tests.serving.arenas import ARM, answer, check, key

SIZE = 256 * 1024
ENTRIES = 40
MOST_READS = ATTEMPTS * (2 + 14) + 1


class Memory:
    """A link to a copy of an arena, whose answers may be spoilt on the way."""

    transport = "memory"
    lost = False

    def __init__(self, content: bytes, geometry: Geometry, spoil: Callable[[int, bytes], bytes] | None = None) -> None:
        self.content = bytearray(content)
        self.hello = Hello(VERSION, geometry, 0, 0, 4096)
        self.reads: list[tuple[int, int]] = []
        self.spoil = spoil

    async def read(self, offset: int, length: int) -> bytes:
        assert offset % 64 == length % 64 == 0
        assert 0 < length <= LARGEST_READ
        assert 0 <= offset <= offset + length <= len(self.content), "a read outside"
        self.reads.append((offset, length))
        data = bytes(self.content[offset : offset + length])
        return data if self.spoil is None else self.spoil(len(self.reads), data)

    async def write(self, slot: int, data: bytes) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArenaTier]:
    tier = ArenaTier(tmp_path_factory.mktemp("lookup") / "arena", SIZE)
    tier.resize_now(ARM, SIZE)
    for number in range(ENTRIES):
        tier.put_now(ARM, answer(number, number + 1, number * 37 % 2500))
    yield tier
    tier.close_now()


async def look(memory: Memory, number: int) -> Entry | None:
    remote = RemoteArena(memory)
    try:
        await remote.open()
        stored = await remote.find(ARM, key(number))
    except LinkLost:
        return None
    return None if stored is None else to_entry(key(number), stored)


async def test_whole_answers_are_found(arena: ArenaTier) -> None:
    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry)
    for number in range(ENTRIES):
        entry = await look(memory, number)
        assert entry is not None
        assert check(number, entry) == number + 1


anything = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@anything
@given(st.integers(0, ENTRIES - 1), st.data())
async def test_bytes_that_were_changed_on_the_way_never_make_a_wrong_answer(
    arena: ArenaTier, number: int, data: st.DataObject
) -> None:
    def spoil(_: int, answer: bytes) -> bytes:
        kind = data.draw(
            st.sampled_from(["as it is", "flipped", "rubbish", "short", "stub", "long", "zeros", "elsewhere", "shifted"])
        )
        if kind == "flipped":
            changed = bytearray(answer)
            for place in data.draw(st.lists(st.integers(0, len(answer) - 1), min_size=1, max_size=5)):
                changed[place] ^= data.draw(st.integers(1, 255))
            return bytes(changed)
        if kind == "rubbish":
            return data.draw(st.binary(min_size=64, max_size=64)) * (len(answer) // 64)
        if kind == "elsewhere":
            at = data.draw(st.integers(0, (SIZE - len(answer)) // 64)) * 64
            return arena.mapping.words.tobytes()[at : at + len(answer)]
        made = {
            "short": answer[:-8],
            "long": answer + bytes(64),
            "zeros": bytes(len(answer)),
            "shifted": answer[64:] + answer[:64],
        }
        return made.get(kind, answer)

    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry, spoil)
    entry = await look(memory, number)
    if entry is not None:
        assert check(number, entry) == number + 1
    assert len(memory.reads) <= MOST_READS


@anything
@given(st.integers(0, ENTRIES - 1), st.lists(st.tuples(st.integers(1, 7), st.integers(0, 2**52 - 1)), min_size=1, max_size=7))
async def test_slots_that_point_anywhere_are_not_followed_outside(
    arena: ArenaTier, number: int, slots: list[tuple[int, int]]
) -> None:
    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry)
    value = digest(int.from_bytes(key(number)[:8], "little", signed=True), 0)
    bucket = (arena.mapping.geometry.index + 4 * home_bucket(value, arena.mapping.geometry.buckets)) * 64
    for place, rest in slots:
        lie = slot_word(digest_tag(value), rest >> 32, rest & 0xFFFFFFFF) & (2**64 - 1)
        struct.pack_into("<Q", memory.content, bucket + 8 * place, lie)
    entry = await look(memory, number)
    if entry is not None:
        check(number, entry)
    assert len(memory.reads) <= MOST_READS


@pytest.mark.parametrize("length", [2000, 2**16, 2**31, 2**32 - 1])
async def test_a_record_that_says_it_is_longer_than_its_room_is_a_miss(arena: ArenaTier, length: int) -> None:
    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry)
    at = memory.content.index(key(20)) - 8 * R_KEY
    (before,) = struct.unpack_from("<Q", memory.content, at + 8 * R_LENGTH)
    assert before & 0xFFFFFFFF < length
    struct.pack_into("<Q", memory.content, at + 8 * R_LENGTH, before >> 32 << 32 | length)
    assert await look(memory, 20) is None
    assert len(memory.reads) <= MOST_READS


@pytest.mark.parametrize("length", [0, 8, 56, 64, 192, 320])
@pytest.mark.parametrize("after", [0, 1, 2])
async def test_an_answer_of_another_length_is_a_miss(arena: ArenaTier, length: int, after: int) -> None:
    def spoil(count: int, data: bytes) -> bytes:
        return data if count <= after else data[:length].ljust(length, b"\0")

    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry, spoil)
    assert await look(memory, 20) is None
    assert len(memory.reads) <= MOST_READS


async def test_an_entry_of_another_epoch_is_a_miss(arena: ArenaTier) -> None:
    geometry = arena.mapping.geometry
    other = Geometry(geometry.bytes, geometry.buckets, geometry.edges, geometry.index, geometry.values, geometry.epoch + 1)
    for number in range(ENTRIES):
        assert await look(Memory(arena.mapping.words.tobytes(), other), number) is None


async def test_another_key_with_the_same_digest_is_no_answer(arena: ArenaTier) -> None:
    """The digest is of the first word of the key alone."""
    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry)
    remote = RemoteArena(memory)
    await remote.open()
    assert await remote.find(ARM, key(3)) is not None
    assert await remote.find(ARM, key(3)[:8] + key(4)[8:]) is None


async def test_an_entry_that_is_torn_once_is_found_the_second_time(arena: ArenaTier) -> None:
    def spoil(count: int, data: bytes) -> bytes:
        return data[:80] + bytes([data[80] ^ 1]) + data[81:] if count == 3 else data

    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry, spoil)
    remote = RemoteArena(memory)
    await remote.open()
    assert await remote.find(ARM, key(20)) is not None
    assert remote.torn == 1
    assert len(memory.reads) == 5, "the arms, and bucket and record twice"


async def test_a_peer_without_the_arm_is_asked_for_its_arms_once_a_second_at_most(arena: ArenaTier) -> None:
    now = [100.0]
    memory = Memory(arena.mapping.words.tobytes(), arena.mapping.geometry)
    remote = RemoteArena(memory, clock=lambda: now[0])
    await remote.open()
    for _ in range(50):
        assert await remote.find("nobody's", key(1)) is None
        now[0] += 0.1
    assert 5 <= len(memory.reads) <= 6


@pytest.mark.parametrize(
    "entry",
    [
        Entry(key(1), b"x", math.nan),
        Entry(key(1), b"x", math.inf),
        Entry(key(1), b"x", 1.0, ttl=math.nan),
        Entry(key(1), b"x", 1.0, ttl=-1.0),
        Entry(key(1), b"x", 1.0, renewed=math.nan),
        Entry(key(1), b"x", 1.0, renewed=math.inf),
    ],
)
def test_times_that_would_never_end_are_refused(entry: Entry) -> None:
    assert to_entry(key(1), pack(entry)) is None
    assert to_entry(key(1), pack(Entry(key(1), b"x", 1.0))) is not None
