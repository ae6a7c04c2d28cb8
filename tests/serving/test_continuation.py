"""A stream that broke off goes on where it was, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.continuation import Continuation, Diverged
from serving.recording import finished, to_json
from serving.sse import events
from tests.serving.streams import USAGE, chunk, delta, pieces_of, spoken

DONE = b"data: [DONE]\n\n"


def again(pieces: list[str], **fields: Any) -> bytes:
    """The same answer from another call: another id, another time."""
    return spoken(pieces, name="chatcmpl-2", created=1_700_000_009, **fields)


def beyond(partial: bytes, fresh: bytes, size: int = 1 << 20) -> bytes:
    continuation = Continuation(partial)
    return b"".join(map(continuation.feed, pieces_of(fresh, size))) + continuation.close()


@settings(max_examples=150, deadline=None)
@given(st.text(min_size=1, max_size=20), st.data())
def test_wherever_it_broke_off_and_however_the_model_cuts_its_tokens_the_whole_is_the_same(
    text: str, data: st.DataObject
) -> None:
    def pieces() -> list[str]:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    old = spoken(pieces())
    ends = [0, *(event.end for event in events(old))]
    partial = old[: data.draw(st.sampled_from(ends[:-1]))]
    rest = beyond(partial, again(pieces()), data.draw(st.integers(1, 200)))
    whole, wanted = to_json(partial + rest), to_json(old if partial else again([text]))
    assert whole == wanted
    assert finished(partial + rest)
    if partial:
        assert b"chatcmpl-2" not in rest


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_stream_that_broke_off_within_an_event_goes_on_to_the_byte_where_the_model_cuts_the_same(data: st.DataObject) -> None:
    said = ["Hel", "lo", ", ", "world"]
    old = spoken(said)
    # From where the first event has told id and time: a torn id cannot be told to its end.
    end = data.draw(st.integers(old.index(b'"model"'), len(old)))
    assert old[:end] + beyond(old[:end], again(said), data.draw(st.integers(1, 500))) == old


def test_a_model_that_says_something_else_has_diverged() -> None:
    partial = spoken(["The answer is ", "42"], done=False, usage=False, finish=None)
    continuation = Continuation(partial)
    assert continuation.feed(chunk(delta(content="The answer "))) == b""
    with pytest.raises(Diverged, match="something else after 11 characters of content"):
        continuation.feed(chunk(delta(content="was")))


@pytest.mark.parametrize(
    "fresh",
    [
        spoken(["ab"]),
        spoken(["ab"], done=False, finish=None, usage=False),
        b"",
        b'data: {"error": {"message": "overloaded"}}\n\n',
        b"data: {not json\n\n",
        chunk(delta(content="abcd"), delta(1, content="x")) + b'data: {"choices": [7]}\n\n',
    ],
)
def test_a_stream_that_ends_sooner_or_fails_has_diverged(fresh: bytes) -> None:
    partial = spoken(["abc"], done=False, usage=False, finish=None)
    with pytest.raises(Diverged):
        beyond(partial, fresh)


def test_a_torn_event_that_the_new_stream_does_not_have_has_diverged() -> None:
    partial = spoken(["a"], done=False, usage=False, finish=None) + b'data: {"id":"chatcmpl-1","torn'
    with pytest.raises(Diverged, match="within an event"):
        beyond(partial, again(["a", "b"]))


def test_a_torn_comment_or_blank_line_tears_nothing() -> None:
    partial = spoken(["a"], done=False, usage=False, finish=None)
    for torn in (b": pi", b": ping\n", b"\n", b"\r"):
        whole = partial + torn + beyond(partial + torn, again(["a", "b"]))
        assert to_json(whole) == to_json(spoken(["a", "b"])), torn


def test_a_stream_with_an_error_in_it_is_not_continued() -> None:
    with pytest.raises(Diverged, match="has an error in it"):
        Continuation(b'data: {"error": {"message": "overloaded"}}\n\n')


@pytest.mark.parametrize("fresh", [b"data: SECRET of an answer\n\n", b'data: {"error": {"message": "SECRET"}}\n\n'])
def test_what_it_says_of_a_divergence_has_no_word_of_the_answer(fresh: bytes) -> None:
    with pytest.raises(Diverged) as raised:
        beyond(spoken(["SECRET"], done=False, usage=False, finish=None), fresh)
    assert "SECRET" not in str(raised.value)
    with pytest.raises(Diverged) as raised:
        beyond(spoken(["SECRET"], done=False, usage=False, finish=None), again(["other SECRET"]))
    assert "SECRET" not in str(raised.value)


def test_tool_calls_go_on_under_their_first_id() -> None:
    def call(name: str, number: int) -> list[bytes]:
        head = {"index": 0, "id": name, "type": "function", "function": {"name": "weather", "arguments": ""}}
        return [
            chunk(delta(role="assistant", content=None, tool_calls=[head]), name=f"chatcmpl-{number}"),
            chunk(delta(tool_calls=[{"index": 0, "function": {"arguments": '{"city"'}}]), name=f"chatcmpl-{number}"),
            chunk(delta(tool_calls=[{"index": 0, "function": {"arguments": ': "Oslo"}'}}]), name=f"chatcmpl-{number}"),
            chunk(delta(finish="tool_calls"), name=f"chatcmpl-{number}"),
            DONE,
        ]

    old, new = call("call_a", 1), b"".join(call("call_b", 2))
    for known in range(1, 4):
        partial = b"".join(old[:known])
        assert partial + beyond(partial, new) == b"".join(old)


def test_what_is_counted_is_not_counted_twice() -> None:
    def tokens(*names: str) -> dict[str, Any]:
        return {"logprobs": {"content": [{"token": name, "logprob": -0.5} for name in names]}}

    partial = chunk({**delta(content="ab"), **tokens("a", "b")})
    fresh = chunk({**delta(content="abc"), **tokens("a", "b", "c")}) + chunk(delta(finish="stop")) + chunk(usage=USAGE) + DONE
    whole = to_json(partial + beyond(partial, fresh))
    assert whole is not None
    assert whole["choices"][0]["message"]["content"] == "abc"
    assert [one["token"] for one in whole["choices"][0]["logprobs"]["content"]] == ["a", "b", "c"]
    # What had been told before the break is told once: the usage, the end.
    partial = spoken(["abc"], done=False)
    assert partial + beyond(partial, again(["abc"])) == spoken(["abc"])
    assert beyond(spoken(["abc"]), again(["abc"])) == b""


def test_a_torn_id_or_time_cannot_be_told_to_its_end() -> None:
    old = spoken(["a"])
    for torn in (old[: old.index(b"chatcmpl-1") + 10], old[: old.index(b"1700000000") + 10]):
        with pytest.raises(Diverged, match="within an event"):
            beyond(torn, again(["a"]))


def test_another_reason_to_finish_has_diverged() -> None:
    with pytest.raises(Diverged, match="finished with 'stop'"):
        beyond(spoken(["a"], done=False), again(["a"], finish="length"))
