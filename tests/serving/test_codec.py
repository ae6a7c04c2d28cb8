from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tiers.base import Entry
from serving.tiers.codec import HEADER, header_time, pack, unpack
from tests.serving.entries import entry, key

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


@given(entries)
def test_an_entry_survives_and_is_as_long_as_it_is_charged(whole: Entry) -> None:
    stored = pack(whole)
    assert unpack(whole.key, stored) == whole
    assert len(stored) == whole.size
    assert header_time(stored[: HEADER.size]) == whole.written_at


@given(st.binary(max_size=100))
def test_any_bytes_are_an_entry_or_a_miss_never_an_error(stored: bytes) -> None:
    found = unpack(key(1), stored)
    assert found is None or found.size == len(stored)


def test_an_unknown_version_and_a_cut_form_are_misses() -> None:
    stored = pack(entry(1, vector=b"v" * 384))
    assert unpack(key(1), b"\x01" + stored[1:]) is None
    assert header_time(b"\x01" + stored[1:32]) is None
    assert unpack(key(1), stored[:400]) is None
    assert header_time(stored[:10]) is None


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
