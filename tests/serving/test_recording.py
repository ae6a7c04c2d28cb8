"""One recorded answer in both forms, with everything that the model said."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.recording import UsageFilter, finished, text_of, to_json, to_sse, usage_in, with_usage, without_usage
from serving.sse import count, events
from serving.tiers.base import Entry
from tests.serving.streams import ID, USAGE, chunk, delta, event, pieces_of, spoken

DONE = b"data: [DONE]\n\n"
HEAD = {"id": ID, "object": "chat.completion", "created": 1_700_000_000, "model": "m", "system_fingerprint": "fp_1"}


def only_choice(stream: bytes) -> dict[str, Any]:
    whole = to_json(stream)
    assert whole is not None
    (choice,) = whole["choices"]
    assert isinstance(choice, dict)
    return choice


# -- a stream as one object --------------------------------------------------------------------------------------------------


def test_a_stream_becomes_the_object_that_the_model_would_have_sent() -> None:
    assert to_json(spoken(["Hello", ", ", "世界 🌍"])) == {
        **HEAD,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello, 世界 🌍"}, "finish_reason": "stop"}],
        "usage": USAGE,
    }


def test_reasoning_and_refusal_are_kept() -> None:
    stream = b"".join(
        [
            chunk(delta(role="assistant", content=None, refusal=None)),
            chunk(delta(reasoning_content="Let me ")),
            chunk(delta(reasoning_content="think.")),
            chunk(delta(refusal="I ")),
            chunk(delta(refusal="cannot.")),
            chunk(delta(finish="stop")),
            DONE,
        ]
    )
    assert only_choice(stream)["message"] == {
        "role": "assistant", "content": None, "refusal": "I cannot.", "reasoning_content": "Let me think.",
    }  # fmt: skip
    assert text_of(stream) == "I cannot."


def tool(index: int, **fields: Any) -> dict[str, Any]:
    return delta(tool_calls=[{"index": index, **fields}])


def test_interleaved_tool_calls_are_put_together_each_by_its_index() -> None:
    stream = b"".join(
        [
            chunk(delta(role="assistant", content=None)),
            chunk(tool(1, id="call_b", type="function", function={"name": "time", "arguments": ""})),
            chunk(tool(0, id="call_a", type="function", function={"name": "weather", "arguments": ""})),
            chunk(tool(0, function={"arguments": '{"city":'})),
            chunk(tool(1, function={"arguments": "{}"})),
            # Some models repeat what they have said of a call in every delta.
            chunk(tool(0, id="call_a", type="function", function={"name": "weather", "arguments": ' "Oslo"}'})),
            chunk(delta(finish="tool_calls")),
            DONE,
        ]
    )
    choice = only_choice(stream)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
            {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }
    assert text_of(stream) == 'weather({"city": "Oslo"})\ntime({})'


def test_several_choices_come_interleaved_and_each_finishes_by_itself() -> None:
    stream = b"".join(
        [
            chunk(delta(1, role="assistant", content="b")),
            chunk(delta(0, role="assistant", content="a")),
            chunk(delta(0, content="A"), delta(1, content="B")),
            chunk(delta(1, finish="stop")),
        ]
    )
    assert not finished(stream + DONE)
    stream += chunk(delta(0, finish="length")) + DONE
    assert finished(stream)
    assert finished(stream, choices=2)
    assert not finished(stream, choices=3)
    whole = to_json(stream)
    assert whole is not None
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in whole["choices"]] == [
        (0, "aA", "length"),
        (1, "bB", "stop"),
    ]
    assert text_of(stream) == "aA\n\nbB"


def test_logprobs_grow_token_by_token() -> None:
    stream = b"".join(
        [
            chunk({**delta(content="a"), "logprobs": {"content": [{"token": "a", "logprob": -0.1}], "refusal": None}}),
            chunk({**delta(content="b"), "logprobs": {"content": [{"token": "b", "logprob": -0.2}], "refusal": None}}),
            chunk({**delta(finish="stop"), "logprobs": None}),
            DONE,
        ]
    )
    logprobs = only_choice(stream)["logprobs"]
    assert logprobs == {"content": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.2}], "refusal": None}


def test_a_text_completion_is_put_together_too() -> None:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    one = {"index": 0, "text": "Once", "logprobs": {"tokens": ["Once"], "token_logprobs": [-1.0]}, "finish_reason": None}
    two = {"index": 0, "text": " upon", "logprobs": {"tokens": [" upon"], "token_logprobs": [-2.0]}, "finish_reason": "stop"}
    stream = event({**head, "choices": [one]}) + event({**head, "choices": [two]}) + DONE
    assert to_json(stream) == {
        **head,
        "choices": [
            {
                "index": 0,
                "text": "Once upon",
                "logprobs": {"tokens": ["Once", " upon"], "token_logprobs": [-1.0, -2.0]},
                "finish_reason": "stop",
            }
        ],
    }
    assert finished(stream)
    assert text_of(stream) == "Once upon"


def test_what_nobody_knows_yet_is_kept() -> None:
    stream = b"".join(
        [
            chunk(delta(role="assistant", content="x", mood={"tone": "ca"}, notes=["n1"]), service_tier="default", trace=None),
            chunk({**delta(mood={"tone": "lm"}, notes=["n2"]), "stop_reason": None}, trace="t"),
            chunk(delta(reasoning_details=[{"index": 0, "type": "text", "text": "a"}])),
            chunk(delta(reasoning_details=[{"index": 0, "type": "text", "text": "b"}])),
            chunk({**delta(finish="stop"), "stop_reason": 128_009}),
            DONE,
        ]
    )
    whole = to_json(stream)
    assert whole is not None
    assert (whole["service_tier"], whole["trace"]) == ("default", "t")
    (choice,) = whole["choices"]
    assert choice["stop_reason"] == 128_009
    assert choice["message"]["mood"] == {"tone": "calm"}
    assert choice["message"]["notes"] == ["n1", "n2"]
    assert choice["message"]["reasoning_details"] == [{"index": 0, "type": "text", "text": "ab"}]


# -- what is whole -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        DONE,
        spoken(["a"], done=False),
        spoken(["a"], finish=None),
        spoken(["a"])[:-3],
        spoken(["a"]).replace(b"[DONE]", b"[DON"),
        spoken(["a"])[: len(spoken(["a"])) // 2],
        event({"error": {"message": "overloaded"}}) + DONE,
        chunk(delta(content="a", finish="stop")) + b'event: error\ndata: {"message": "overloaded"}\n\n' + DONE,
        chunk(delta(content="a", finish="stop")) + b"data: {not json\n\n" + DONE,
    ],
)
def test_a_stream_that_was_cut_or_failed_is_not_finished(stream: bytes) -> None:
    assert not finished(stream)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_beginning_of_a_stream_is_finished(size: int) -> None:
    stream = spoken(["Hel", "lo"])
    assert finished(stream)
    # The last line's own end may be missing, as some servers do; anything less is cut.
    cut = stream.removesuffix(b"\n\n")
    assert finished(cut)
    assert not any(finished(stream[:end]) for end in range(0, len(cut), size))


def test_an_error_or_audio_is_no_object() -> None:
    assert to_json(event({"error": {"message": "overloaded"}})) is None
    assert to_json(chunk(delta(audio={"id": "a", "data": "UklGRg=="}))) is None
    assert to_json(b"<html>") is None
    assert to_json(DONE) is None


# -- an object as a stream ---------------------------------------------------------------------------------------------------

texts = st.text(max_size=12)
calls = st.lists(
    st.builds(
        lambda name, arguments: {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}},
        st.text("abc_", min_size=1, max_size=5),
        texts,
    ),
    min_size=1,
    max_size=3,
)
messages = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | texts},
    optional={
        "reasoning_content": texts,
        "refusal": st.none() | texts,
        "tool_calls": calls,
        "unknown": st.integers(-(2**63), 2**63) | texts,
    },
)
logprobs = st.none() | st.builds(lambda values: {"content": [{"token": "t", "logprob": value} for value in values]}, st.lists(
    st.floats(-9, 0), max_size=3))  # fmt: skip
parts = st.fixed_dictionaries(
    {"message": messages, "finish_reason": st.sampled_from(["stop", "length", "tool_calls"])},
    optional={"logprobs": logprobs, "stop_reason": st.none() | st.integers(0, 200_000)},
)
completions = st.builds(
    lambda choices, usage: {**HEAD, "choices": [{"index": i, **choice} for i, choice in enumerate(choices)], **usage},
    st.lists(parts, min_size=1, max_size=3),
    st.sampled_from([{}, {"usage": USAGE}]),
)


@settings(max_examples=100, deadline=None)
@given(completions)
def test_an_object_written_as_a_stream_and_put_together_again_is_the_same(completion: dict[str, Any]) -> None:
    stream = to_sse(orjson.dumps(completion), usage=True)
    assert finished(stream, choices=len(completion["choices"]))
    assert to_json(stream) == completion
    assert text_of(stream) == text_of(orjson.dumps(completion))


@settings(max_examples=50, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4))
def test_a_text_completion_written_as_a_stream_is_the_same(said: list[str]) -> None:
    choices = [{"index": i, "text": text, "logprobs": None, "finish_reason": "stop"} for i, text in enumerate(said)]
    completion = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices, "usage": USAGE}
    assert to_json(to_sse(orjson.dumps(completion), usage=True)) == completion


def test_the_usage_is_told_only_if_asked() -> None:
    body = orjson.dumps({**HEAD, "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}], "usage": USAGE})
    assert usage_in(to_sse(body, usage=True)) == (11, 7)
    assert usage_in(to_sse(body, usage=False)) is None
    assert count(to_sse(body, usage=True)) == count(to_sse(body, usage=False)) + 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [1]}', b'{"object": "list", "data": []}'])
def test_what_is_no_completion_is_no_stream(body: bytes) -> None:
    with pytest.raises(ValueError, match="expected a completion"):
        to_sse(body, usage=False)


# -- the usage of a stream ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_client_that_did_not_ask_sees_the_stream_without_its_usage_to_the_byte(size: int) -> None:
    stream = spoken(["a", "b"])
    wanted = UsageFilter()
    passed = b"".join(map(wanted.feed, pieces_of(stream, size))) + wanted.close()
    assert passed == without_usage(stream) == spoken(["a", "b"], usage=False)


def test_a_chunk_that_tells_more_than_the_usage_stays() -> None:
    stream = chunk(delta(content='"usage"', finish="stop"), usage=USAGE) + DONE
    assert without_usage(stream) == stream


blocks_with_usage = [
    chunk(delta(content="a"), usage=None),
    chunk(usage=USAGE),
    chunk(delta(content='"usage":{'), usage=USAGE),
    event({"usage": {"usage": {}}}),
    b'data: {"usage":{\n',
    b"data: }}\n\n",
    b": ping\n\n",
    b"\n",
    b"\r\n",
    DONE,
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(blocks_with_usage)))
def test_at_once_and_in_pieces_the_same_usage_is_taken_out(blocks: list[bytes]) -> None:
    stream = b"".join(blocks)
    wanted = UsageFilter()
    in_pieces = b"".join(map(wanted.feed, pieces_of(stream, 50))) + wanted.close()
    at_once = without_usage(stream)
    assert [one.data for one in events(at_once)] == [one.data for one in events(in_pieces)]


def test_what_is_cut_within_an_event_is_passed_on_as_it_is() -> None:
    stream = spoken(["a"]) + b'data: {"usage"'
    assert without_usage(stream) == spoken(["a"], usage=False) + b'data: {"usage"'


def test_a_usage_is_added_before_the_end_where_there_is_none() -> None:
    stream = spoken(["a"], usage=False)
    told = with_usage(stream, 11, 7)
    assert told == spoken(["a"])
    assert with_usage(told, 1, 1) == told
    assert with_usage(DONE, 1, 1) == DONE


@pytest.mark.parametrize(("usage", "told"), [({"prompt_tokens": -1, "completion_tokens": 2**40}, (0, 0)), ({}, (0, 0))])
def test_a_usage_that_cannot_be_counts_as_nothing(usage: dict[str, int], told: tuple[int, int]) -> None:
    assert usage_in(spoken(["a"], usage=False) + chunk(usage=usage)) == told


# -- the text ----------------------------------------------------------------------------------------------------------------


def test_an_entry_has_the_same_text_in_either_form() -> None:
    stream = spoken(["12 ", "apples"])
    whole = orjson.dumps(to_json(stream))
    assert text_of(Entry(b"k" * 32, stream, 0.0, form="sse")) == text_of(Entry(b"k" * 32, whole, 0.0)) == "12 apples"
    assert text_of(b"") == text_of(b"[]") == text_of(b"\xff") == ""


def test_a_token_called_index_is_no_number_of_an_item() -> None:
    said = [{"tokens": [" index"], "token_logprobs": [-0.5], "top_logprobs": [{"index": -0.5}]}] * 2
    choices = [
        {"index": 0, "text": " index", "logprobs": given, "finish_reason": end}
        for given, end in zip(said, (None, "stop"), strict=True)
    ]
    stream = b"".join(
        b"data: " + orjson.dumps({"object": "text_completion", "choices": [choice]}) + b"\n\n" for choice in choices
    )
    assert only_choice(stream + b"data: [DONE]\n\n")["logprobs"]["top_logprobs"] == [{"index": -0.5}, {"index": -0.5}]
