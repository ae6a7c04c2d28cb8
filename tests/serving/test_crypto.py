from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.crypto import OVERHEAD, Sealer
from serving.settings import StorageSettings

KEY = bytes(range(32))


@given(st.binary(max_size=300), st.binary(max_size=40), st.binary(max_size=40))
def test_what_was_sealed_opens_in_its_place_with_its_header(plain: bytes, place: bytes, header: bytes) -> None:
    sealed = Sealer(KEY).seal(place, plain, header)
    assert len(sealed) == len(plain) + OVERHEAD
    assert Sealer(KEY).open(place, sealed, header) == plain


@given(st.binary(min_size=1, max_size=100), st.data())
def test_damage_anywhere_is_noticed(plain: bytes, data: st.DataObject) -> None:
    sealed = bytearray(Sealer(KEY).seal(b"place", plain, b"header"))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert Sealer(KEY).open(b"place", bytes(sealed), b"header") is None


@given(st.binary(max_size=100))
def test_any_bytes_are_nothing_never_an_error(junk: bytes) -> None:
    assert Sealer(KEY).open(b"place", junk) is None


def test_another_key_place_or_header_does_not_open_it() -> None:
    sealed = Sealer(KEY).seal(b"place", b"plain", b"header")
    assert Sealer(bytes(32)).open(b"place", sealed, b"header") is None
    assert Sealer(KEY).open(b"elsewhere", sealed, b"header") is None
    assert Sealer(KEY).open(b"place", sealed, b"other") is None
    assert Sealer(KEY).open(b"place", sealed[:-1], b"header") is None


def test_the_same_is_never_sealed_to_the_same_and_does_not_show() -> None:
    plain = b"a secret answer" * 10
    first, second = (Sealer(KEY).seal(b"place", plain) for _ in range(2))
    assert first != second
    assert b"secret" not in first


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"expected 32 bytes, got {size}"):
        Sealer(bytes(size))


def test_the_settings_give_the_key_or_none() -> None:
    assert Sealer.of(StorageSettings()) is None
    made = Sealer.of(StorageSettings.model_validate({"encryption_key": base64.b64encode(KEY).decode()}))
    assert made is not None
    assert made.open(b"place", Sealer(KEY).seal(b"place", b"plain")) == b"plain"


def test_a_sealer_does_not_show_its_key() -> None:
    assert "x" * 10 not in repr(Sealer(b"x" * 32))
