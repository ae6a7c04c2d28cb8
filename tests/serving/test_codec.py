from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.crypto import OVERHEAD, Sealer
from serving.tiers.base import Entry
from serving.tiers.codec import HEADER, Seal, overhead, pack, unpack, unpack_head, unpack_vector
from tests.serving.entries import entry, key

SEAL = Seal(Sealer(bytes(range(32))), b"namespace:arm:")

entries = st.builds(
    Entry,
    key=st.binary(min_size=32, max_size=32),
    body=st.binary(max_size=300),
    written_at=st.floats(allow_nan=False),
    input_tokens=st.integers(0, 2**32 - 1),
    output_tokens=st.integers(0, 2**32 - 1),
    context=st.binary(max_size=255),
    vector=st.binary(max_size=400),
    meta=st.binary(max_size=400),
    form=st.sampled_from(("json", "sse")),
    complete=st.booleans(),
    ttl=st.floats(min_value=0.0, width=32),
    renewed=st.floats(min_value=0.0, width=32, allow_infinity=False),
)
seals = st.sampled_from((None, SEAL))
WHOLE = Entry(key(1), b"the body", 1.5, 7, 9, b"ctx", b"vec", b"the meta", "sse", False, 60.0, 2.0)


def head_of(stored: bytes) -> bytes:
    """What the store sends for a head: the stored form without vector and body."""
    context, vector, meta = stored[1], int.from_bytes(stored[2:4], "little"), int.from_bytes(stored[20:22], "little")
    return stored[: 32 + context] + stored[32 + context + vector :][:meta]


@given(entries, seals)
def test_an_entry_survives_and_is_as_long_as_it_is_charged(whole: Entry, seal: Seal | None) -> None:
    stored = pack(whole, seal)
    found = unpack(whole.key, stored, seal)
    assert found == whole
    assert found is not None
    assert len(stored) == found.size == replace(whole, overhead=overhead(whole, seal)).size


@given(entries, seals)
def test_a_head_tells_all_but_body_and_vector_and_how_long_it_is(whole: Entry, seal: Seal | None) -> None:
    stored = pack(whole, seal)
    head = unpack_head(whole.key, head_of(stored), len(stored), seal)
    assert head == whole.head()
    assert head is not None
    assert head.size == len(stored)


@given(entries, seals)
def test_context_and_vector_are_in_the_clear_but_an_interrupted_entry_shows_none(whole: Entry, seal: Seal | None) -> None:
    stored = pack(whole, seal)
    expected = (whole.context, whole.vector) if whole.complete else None
    assert unpack_vector(stored) == unpack_vector(stored[: 32 + len(whole.context) + len(whole.vector)]) == expected


@given(st.binary(max_size=100).map(lambda tail: b"\x02" + tail) | st.binary(max_size=100), seals)
def test_any_bytes_are_an_entry_or_a_miss_never_an_error(stored: bytes, seal: Seal | None) -> None:
    found = unpack(key(1), stored, seal)
    assert found is None or found.size == len(stored)
    unpack_head(key(1), stored, 100, seal)
    unpack_vector(stored)


def test_an_unknown_version_and_a_cut_form_are_misses() -> None:
    stored = pack(entry(1, vector=b"v" * 384))
    assert unpack(key(1), b"\x01" + stored[1:]) is None
    assert unpack(key(1), stored[:400]) is None
    assert unpack_head(key(1), b"\x01" + head_of(stored)[1:], len(stored)) is None
    assert unpack_head(key(1), stored[:10], len(stored)) is None
    assert unpack_head(key(1), head_of(stored)[:-1], len(stored)) is None
    assert unpack_vector(stored[:400]) is None


def test_the_layout_is_the_documented_one() -> None:
    stored = pack(Entry(key(1), b"body", 1.5, 7, 9, b"ctx", b"vec", b"me", "sse", False, 60.0, 2.0))
    fixed = struct.pack("<BBHII", 2, 3, 3, 7, 9) + struct.pack("<dHBxff", 1.5, 2, 3, 60.0, 2.0)
    assert stored == fixed + b"ctxvecmebody"


def test_what_does_not_fit_the_format_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a key of 32 bytes, got 3"):
        pack(Entry(b"key", b"", 0.0))
    for whole in (Entry(key(1), b"", 0.0, 2**32), Entry(key(1), b"", 0.0, -1), Entry(key(1), b"", 0.0, context=b"c" * 256)):
        with pytest.raises(ValueError, match="expected at most"):
            pack(whole)
    large = Entry(key(1), b"", 0.0, meta=bytes(65_535))
    assert unpack(key(1), pack(large)) == large
    with pytest.raises(ValueError, match="expected at most"):
        pack(large, SEAL)


def test_sealed_neither_answer_nor_metadata_can_be_read() -> None:
    stored = pack(WHOLE, SEAL)
    assert b"the body" not in stored
    assert b"the meta" not in stored
    assert len(stored) == WHOLE.size + 2 * OVERHEAD
    assert len(pack(replace(WHOLE, meta=b""), SEAL)) == WHOLE.size - len(WHOLE.meta) + OVERHEAD


def test_sealed_it_opens_only_with_its_key_in_its_place_under_its_name() -> None:
    stored = pack(WHOLE, SEAL)
    for name, seal in (
        (key(1), Seal(Sealer(bytes(32)), SEAL.scope)),
        (key(1), SEAL._replace(scope=b"namespace:other:")),
        (key(2), SEAL),
        (key(1), None),
    ):
        assert unpack(name, stored, seal) is None
        assert unpack_head(name, head_of(stored), len(stored), seal) is None


def test_a_reader_with_a_key_takes_nothing_that_is_not_sealed() -> None:
    stored = pack(WHOLE)
    assert unpack(key(1), stored, SEAL) is None
    assert unpack_head(key(1), head_of(stored), len(stored), SEAL) is None
    claimed = stored[:22] + bytes([stored[22] | 4]) + stored[23:]
    assert unpack(key(1), claimed, SEAL) is None


@pytest.mark.parametrize("place", [*range(HEADER.size - 4), HEADER.size, HEADER.size + 3, HEADER.size + 6, -1])
def test_what_stands_beside_it_in_the_clear_cannot_be_changed(place: int) -> None:
    stored = bytearray(pack(WHOLE, SEAL))
    stored[place] ^= 1
    assert unpack(key(1), bytes(stored), SEAL) is None


def test_a_store_may_set_when_a_sealed_life_began_anew() -> None:
    stored = pack(WHOLE, SEAL)
    renewed = stored[:28] + struct.pack("<f", 30.0) + stored[32:]
    assert unpack(key(1), renewed, SEAL) == replace(WHOLE, renewed=30.0)
    assert unpack_head(key(1), head_of(renewed), len(renewed), SEAL) == replace(WHOLE, renewed=30.0).head()


def test_body_and_metadata_of_two_writes_do_not_mix() -> None:
    old, new = pack(WHOLE, SEAL), pack(replace(WHOLE, written_at=2.5), SEAL)
    end = len(old) - len(WHOLE.body) - OVERHEAD
    assert unpack(key(1), new[:end] + old[end:], SEAL) is None
