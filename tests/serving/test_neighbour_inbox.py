"""The inbox: what is not whole is not taken out, nobody comes short, and a slot is free when the owner says so."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.arena.layout import Words
from serving.neighbours.inbox import MOST_SLOTS, UNFINISHED, Arrived, Grant, Inbox, decode, encode
from tests.serving.arenas import ARM, key

EPOCH = 12345
BYTES = 1024


known = st.none() | st.integers(0, 2**62)


def inbox(slots: int = 32) -> tuple[Inbox, Words]:
    taken = np.full(slots, 99, np.int64)
    return Inbox(slots, BYTES, taken, EPOCH), taken


def write(box: Inbox, slot: int, data: bytes) -> None:
    box.words.data.cast("B")[slot * BYTES : slot * BYTES + len(data)] = data


def entry(number: int, turn: int = 1, size: int = 50) -> bytes:
    return encode(ARM, key(number), bytes([number % 256]) * size, turn, EPOCH)


def test_what_is_written_is_taken_out_once_and_its_slot_is_free_then() -> None:
    box, taken = inbox()
    mine = box.grant()
    assert mine == Grant(0, 2)
    write(box, 0, entry(1))
    assert taken[0] == 0
    assert box.take(8, 0.0) == ([Arrived(ARM, key(1), b"\1" * 50)], False)
    assert taken[0] == 1
    assert box.take(8, 0.0) == ([], False)
    write(box, 0, entry(1, turn=2))
    assert len(box.take(8, 0.0)[0]) == 1
    assert taken[0] == 2


@given(st.text(min_size=1, max_size=16), st.binary(min_size=32, max_size=32), st.binary(max_size=800), known)
def test_an_entry_comes_out_as_it_went_in(arm: str, name: bytes, stored: bytes, number: int | None) -> None:
    data = encode(arm, name, stored, 3, EPOCH, number)
    words = np.frombuffer(data.ljust(BYTES, b"\x5a"), np.int64).copy()
    assert decode(words, EPOCH) == Arrived(arm, name, stored, number)
    assert decode(words, EPOCH + 1) is None, "of another arena"


@settings(max_examples=300)
@given(st.integers(0, 10_000), st.integers(1, 255), st.integers(0, 500))
def test_a_change_of_any_byte_is_noticed(place: int, change: int, size: int) -> None:
    data = bytearray(entry(7, size=size))
    data[place % len(data)] ^= change
    assert decode(np.frombuffer(bytes(data).ljust(BYTES, b"\0"), np.int64).copy(), EPOCH) is None


@given(st.binary(min_size=BYTES, max_size=BYTES))
def test_rubbish_is_no_entry(rubbish: bytes) -> None:
    assert decode(np.frombuffer(rubbish, np.int64).copy(), EPOCH) is None


def test_what_is_half_written_is_waited_for() -> None:
    box, taken = inbox()
    box.grant()
    data = entry(1, size=500)
    for part in range(64, len(data), 64):
        write(box, 0, data[:part])
        assert box.take(8, 0.0) == ([], True), f"{part} bytes of {len(data)}"
        assert taken[0] == 0
    write(box, 0, data)
    assert len(box.take(8, 0.0)[0]) == 1


def test_what_is_never_whole_is_thrown_away_after_a_while() -> None:
    box, taken = inbox()
    box.grant()
    write(box, 1, entry(1)[:-8] + b"somebody")
    assert box.take(8, 10.0) == ([], True)
    assert box.take(8, 10.0 + UNFINISHED / 2) == ([], True)
    assert box.take(8, 10.1 + UNFINISHED) == ([], False)
    assert (taken[1], box.damaged) == (1, 1)
    write(box, 1, entry(2, turn=2))
    assert len(box.take(8, 20.0)[0]) == 1


def test_turns_are_bounded_and_peers_are_served_alike() -> None:
    box, _ = inbox(MOST_SLOTS)
    greedy, modest = box.grant(), box.grant()
    assert greedy.count >= 7
    for slot in range(greedy.count):
        write(box, greedy.first + slot, entry(slot))
    write(box, modest.first, entry(100))
    first, more = box.take(2, 0.0)
    assert more
    assert [arrived.key for arrived in first] == [key(0), key(100)]
    rest = 0
    while more:
        arrived, more = box.take(2, 0.0)
        assert 0 < len(arrived) <= 2
        rest += len(arrived)
    assert rest == greedy.count - 1


def test_even_turns_of_one_go_round() -> None:
    box, _ = inbox(MOST_SLOTS)
    peers = [box.grant() for _ in range(3)]
    for number, granted in enumerate(peers):
        for slot in range(4):
            write(box, granted.first + slot, entry(10 * number + slot))
    order = [arrived.key for _ in range(6) for arrived in box.take(1, 0.0)[0]]
    assert order == [key(number) for number in (0, 10, 20, 1, 11, 21)]


def test_what_is_written_into_slots_that_nobody_has_is_not_looked_at() -> None:
    box, taken = inbox()
    box.grant()
    write(box, 9, entry(1))
    assert box.take(8, 0.0) == ([], False)
    assert taken[9] == 0


def test_slots_that_are_given_back_are_empty() -> None:
    box, taken = inbox()
    mine = box.grant()
    write(box, 0, entry(1, turn=41))
    assert len(box.take(8, 0.0)[0]) == 1
    write(box, 1, entry(2)[:100])
    box.take(8, 0.0)
    box.release(mine)
    box.release(mine)
    assert not box.words.any()
    assert not taken.any()
    assert box.grant() == mine
    assert box.take(8, 99.0) == ([], False)
    assert box.damaged == 0


@given(st.integers(1, MOST_SLOTS), st.lists(st.booleans(), max_size=60), st.randoms(use_true_random=False))
def test_no_slot_is_ever_given_to_two(slots: int, steps: list[bool], chance: random.Random) -> None:
    box, _ = inbox(slots)
    held: list[Grant] = []
    for take in steps:
        if take or not held:
            granted = box.grant()
            if granted.count:
                held.append(granted)
            elif sum(each.count for each in held) < slots:
                raise AssertionError("there was a free slot")
        else:
            box.release(held.pop(chance.randrange(len(held))))
        owned = [slot for each in held for slot in range(each.first, each.first + each.count)]
        assert len(owned) == len(set(owned))
        assert all(0 <= slot < slots for slot in owned)


def test_when_all_slots_are_given_the_next_peer_has_none() -> None:
    box, _ = inbox(2)
    assert [box.grant().count for _ in range(3)] == [1, 1, 0]


@pytest.mark.parametrize(("slots", "size"), [(0, 1024), (MOST_SLOTS + 1, 1024), (4, 100), (4, 192)])
def test_an_inbox_that_cannot_be_is_refused(slots: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"expected 1 to 128 slots of a multiple of 64 bytes"):
        Inbox(slots, size, np.zeros(max(slots, 1), np.int64), EPOCH)


@pytest.mark.parametrize(("arm", "name"), [("", key(1)), ("x" * 65, key(1)), (ARM, b"short")])
def test_what_does_not_fit_its_place_is_refused(arm: str, name: bytes) -> None:
    with pytest.raises(ValueError, match="expected a name of 1 to 64 bytes and a key of 32"):
        encode(arm, name, b"", 1, EPOCH)
