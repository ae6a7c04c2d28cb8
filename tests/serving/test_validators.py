"""Which stream a client has, told by its validator: never another's, whatever is lost and gone on with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import validators
from serving.sse import events
from serving.tiers.base import Entry, EntryMeta
from serving.validators import EventIds, content_tag, extended, holds, new_tag, of_event_id, of_if_range, stamped, tag_of
from tests.serving.streams import pieces_of, spoken

KEY = bytes(32)


def entry(meta: bytes, body: bytes = b"{}") -> Entry:
    return Entry(KEY, body, 1.0, meta=meta)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30), st.lists(st.text(max_size=10), max_size=3))
def test_a_tag_is_kept_beside_whatever_is_known_of_an_entry(text: str, namespace: str, documents: list[str]) -> None:
    meta = EntryMeta(text=text, namespace=namespace, documents=tuple(documents))
    first, second = new_tag(), extended(new_tag(), 3)
    once = stamped(meta.dump(), first)
    assert tag_of(entry(once)) == first
    assert tag_of(entry(stamped(once, second))) == second
    assert len(stamped(once, first)) == len(once)
    assert EntryMeta.load(once) == EntryMeta.load(meta.dump())


def test_what_was_kept_without_a_tag_is_known_by_its_bytes() -> None:
    for meta in (b"", EntryMeta(namespace='","stream":"0123456789abcdef').dump()):
        assert tag_of(entry(meta, b'{"a":1}')) == content_tag(b'{"a":1}') != tag_of(entry(meta, b'{"a":2}'))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.data())
def test_a_stream_that_went_on_holds_what_each_before_it_had_in_common_with_it_and_no_more(
    cuts: list[int], data: st.DataObject
) -> None:
    lineage = [new_tag()]
    for cut in cuts:
        lineage.append(extended(lineage[-1], cut))
    current = lineage[-1]
    for place, cut in enumerate(cuts):
        had = data.draw(st.integers(0, 40))
        assert holds(lineage[place], current, had) == (had <= cut)
    assert holds(current, current, 1000)
    assert not holds(current, lineage[-2], 0)
    assert not holds(extended(lineage[-2], cuts[-1]), current, 0)
    assert not holds("", current, 1)
    assert not holds(current[:-1], current, 1)
    assert not holds(new_tag(), current, 1)


def test_the_same_two_answers_make_the_same_stream_again_and_others_another() -> None:
    assert extended("aa", 3, "bb") == extended("aa", 3, "bb") != extended("aa", 3, "cc")
    assert extended("aa", 3) != extended("aa", 3)


def test_a_stream_that_broke_off_very_often_is_known_by_a_new_tag_not_by_an_endless_one() -> None:
    tag = new_tag()
    for _ in range(100):
        tag = extended(tag, 10_000)
        assert len(tag) <= validators.LONGEST
        assert of_event_id(f"7-un{tag}") == (7, f"un{tag}")
        assert of_if_range(f'"un{tag}"') == f"un{tag}"


@pytest.mark.parametrize(
    "value", [None, "", "abc", 'W/"abc"', '"a" "b"', '""', '"abc', "Wed, 21 Oct 2026 07:28:00 GMT", '"a\x07"']
)
def test_what_is_no_strong_validator_is_none(value: str | None) -> None:
    assert of_if_range(value) == ""


@pytest.mark.parametrize("value", ["-1", "1.5", "a", "1-", "1-A", "9" * 21, "١"])
def test_what_is_no_id_of_ours_is_none(value: str) -> None:
    assert of_event_id(value) is None


@given(st.integers(1, 200))
def test_ids_have_the_number_and_the_stream_however_the_stream_comes(size: int) -> None:
    stream = spoken(["a", "b"])
    for named, wanted in (("pabc", "%d-pabc"), ("", "%d")):
        ids = EventIds(named)
        written = b"".join(map(ids.feed, pieces_of(stream, size))) + ids.close()
        assert [event.id for event in events(written)] == [wanted % (number + 1) for number in range(len(events(stream)))]
        assert [event.data for event in events(written)] == [event.data for event in events(stream)]
