"""Server-sent events: found wherever the network cuts them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.sse import Event, EventParser, Numbers, Skip, count, events, tail, whole

# What the format is made of, and what is none of it, in any order.
_TOKENS = [
    b"data: x",
    b"data:",
    b"data",
    b"data:  two",
    b": note",
    b"id: 7",
    b"event: error",
    b"retry: 5",
    b"\xef\xbb\xbf",
    b"\xff",
]
streams = st.lists(st.sampled_from([*_TOKENS, b"\n", b"\n", b"\r\n", b"\r\n", b"\r", b"\n\n"]), max_size=24).map(b"".join)


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    stream = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    return stream, [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def by_the_standard(stream: bytes) -> list[tuple[bytes, str, str | None]]:
    """The algorithm as the HTML standard words it: line by line over the whole."""
    found: list[tuple[bytes, str, str | None]] = []
    data: list[bytes] = []
    kind, name = "", None
    *lines, _ = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    for line in lines:
        if not line:
            if data:
                found.append((b"\n".join(data), kind, name))
            data, kind, name = [], "", None
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            kind = value.decode(errors="replace")
        elif field == b"id":
            name = value.decode(errors="replace")
    return found


@settings(max_examples=150, deadline=None)
@given(cut_streams())
def test_the_events_are_those_of_the_standard_at_the_same_places_however_the_stream_is_cut(
    cut: tuple[bytes, list[bytes]],
) -> None:
    stream, pieces = cut
    parser = EventParser()
    pairs = [pair for piece in pieces for pair in parser.pairs(piece)] + parser.last_pairs()
    found = [event for event, _ in pairs]
    assert [(event.data, event.event, event.id) for event in found] == by_the_standard(stream)
    assert found == events(stream)
    assert parser.position == len(stream)
    # Together they are the stream, without a gap.
    edges = [0, *(event.end for event in found)]
    assert [event.start for event in found] == edges[:-1]
    assert all(raw == stream[event.start : event.end] for event, raw in pairs)
    assert b"".join(raw for _, raw in pairs) + parser.rest == stream


@settings(max_examples=75, deadline=None)
@given(cut_streams(), st.integers(0, 5))
def test_what_follows_the_first_events_is_the_same_in_pieces_and_at_once(cut: tuple[bytes, list[bytes]], number: int) -> None:
    stream, pieces = cut
    skip = Skip(number)
    passed = b"".join(map(skip.feed, pieces)) + skip.close()
    found = events(stream)
    start = 0 if number == 0 else found[number - 1].end if len(found) >= number else len(stream)
    assert passed == tail(stream, number) == stream[start:]


@settings(max_examples=75, deadline=None)
@given(cut_streams())
def test_numbers_are_written_into_each_event_and_change_nothing_else(cut: tuple[bytes, list[bytes]]) -> None:
    stream, pieces = cut
    numbers = Numbers()
    written = b"".join(map(numbers.feed, pieces)) + numbers.close()
    whole_at_once = Numbers()
    assert written == whole_at_once.feed(stream) + whole_at_once.close()
    before, after = events(stream), events(written)
    assert [(event.data, event.event) for event in after] == [(event.data, event.event) for event in before]
    assert [event.id for event in after] == [str(number + 1) for number in range(len(before))]


def test_a_comment_before_an_event_does_not_carry_its_number_ahead() -> None:
    # The client would take the number for one of an event that it has received.
    assert Numbers().feed(b": ping\n\ndata: a\n\n") == b": ping\n\ndata: a\nid: 1\n\n"


def test_an_event_is_told_as_soon_as_its_blank_line_is_there() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\r\n\r\n") == [Event(b"a", "", None, 0, 9, 11)]
    assert parser.feed(b"data: b\n\nda") == [Event(b"b", "", None, 11, 19, 20)]
    assert parser.rest == b"da"


@pytest.mark.parametrize(
    ("stream", "number"),
    [
        (b"", 0),
        (b"data: a\n\ndata: [DONE]\n\n", 2),
        (b": ping\n\n: ping\n\n", 0),
        (b"event: only-a-type\n\n", 0),
        (b"data: a\ndata: b\n\n", 1),
        (b"data: a\n\ndata: cut", 1),
        (b"\xef\xbb\xbfdata: a\n\n", 1),
    ],
)
def test_events_are_counted_by_their_data(stream: bytes, number: int) -> None:
    assert count(stream) == number


def test_a_cut_stream_is_whole_up_to_its_last_event() -> None:
    assert whole(b"data: a\n\ndata: b\n\ndata: {") == b"data: a\n\ndata: b\n\n"
    assert whole(b"data: {") == b""
