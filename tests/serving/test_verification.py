"""Whether a cached answer would have been right: told by what both answers say, never guessed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.embedding import EmbeddingUnavailable
from serving.meaning.verification import MAX_PIECES, PIECE, choices_of, same_answer
from serving.recording import to_sse


def chat(*texts: str | None, **message: Any) -> bytes:
    """A chat answer; its id, time and usage differ from call to call, as real ones do."""
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
        for index, text in enumerate(texts)
    ]
    number = len(json.dumps(choices)) * 7
    return json.dumps({"id": f"chatcmpl-{number}", "object": "chat.completion", "created": number, "choices": choices}).encode()


def call(name: str, arguments: str, identity: str = "call_1") -> dict[str, Any]:
    return {"tool_calls": [{"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}]}


async def by_letters(text: str) -> bytes:
    """A toy embedding: counts of letters."""
    counts = np.bincount([ord(letter) % 64 for letter in text.lower() if letter.isalpha()], minlength=64).astype(float)
    norm = np.linalg.norm(counts)
    return np.rint(counts / norm * 127).astype(np.int8).tobytes() if norm else b""


async def never(text: str) -> bytes:
    raise AssertionError(f"embedded {text!r}, which nobody needs to know")


@pytest.mark.parametrize(
    ("cached", "fresh", "same"),
    [
        (chat("Paris."), chat("Paris."), True),
        (chat("Paris."), chat(" Paris.\n"), True),
        (chat("Caf\u00e9"), chat("Cafe\u0301"), True),
        (chat("Paris."), chat("paris."), False),
        (chat("Paris."), chat("Lyon."), False),
        (chat("a", "b"), chat("a", "b"), True),
        (chat("a", "b"), chat("b", "a"), False),
        (chat("a"), chat("a", "b"), False),
        (chat("Paris."), chat(None, refusal="I cannot say."), False),
        (chat(None, refusal="No."), chat(None, refusal="No."), True),
        (chat(None, **call("f", '{"a":1,"b":2}')), chat(None, **call("f", '{"b": 2, "a": 1}', "call_9")), True),
        (chat(None, **call("f", '{"a":1}')), chat(None, **call("f", '{"a":2}')), False),
        (chat(None, **call("f", "{}")), chat(None, **call("g", "{}")), False),
        (chat("Paris.", reasoning_content="Let me see"), chat("Paris.", reasoning_content="Hm"), True),
        (b'{"choices": [{"text": "4", "index": 0}]}', b'{"choices": [{"index": 0, "text": "4", "logprobs": null}]}', True),
        (chat([{"type": "text", "text": "Pa"}]), chat("Pa"), True),  # type: ignore[arg-type]
    ],
)  # fmt: skip
async def test_answers_are_the_same_if_they_say_the_same(cached: bytes, fresh: bytes, same: bool) -> None:
    assert await same_answer(cached, fresh) is same
    assert await same_answer(fresh, cached) is same
    # either form, and one in each: a stored stream is compared with a fresh object
    assert await same_answer(to_sse(cached, usage=False), fresh) is same
    assert await same_answer(to_sse(cached, usage=True), to_sse(fresh, usage=False)) is same


@pytest.mark.parametrize(
    "nothing",
    [
        b"", b"{", b"[]", b"nonsense", b"{}", b'{"choices": []}', b'{"choices": [1]}', b'{"error": {"message": "x"}}', chat(""),
        chat("  "), chat(None), chat("a", ""), b"data: [DONE]\n\n",
        b'{"choices": [{"message": {"tool_calls": [{"type": "x"}]}}]}',
        b"\xff\xfe", b'data: {"error": 1}\n\n',
    ],
)  # fmt: skip
async def test_nothing_is_learned_from_what_says_nothing(nothing: bytes) -> None:
    assert choices_of(nothing) is None
    assert await same_answer(chat("Paris."), nothing) is None
    assert await same_answer(nothing, chat("Paris.")) is None
    assert await same_answer(nothing, nothing) is None


async def test_by_embedding_another_wording_is_the_same_and_another_answer_is_not() -> None:
    cached = chat("The capital of France is Paris.")
    for fresh, same in (("Paris is the capital of France.", True), ("Fizz buzz, jinx!", False)):
        assert await same_answer(cached, chat(fresh), how="embedding", embed=by_letters) is same
    assert await same_answer(cached, cached, how="embedding", embed=never) is True
    assert await same_answer(cached, chat("Paris is the capital of France."), how="exact", embed=never) is False


async def test_by_embedding_tools_and_refusals_still_have_to_be_equal() -> None:
    for cached, fresh in (
        (chat("Let me look", **call("f", '{"a":1}')), chat("Let me look!", **call("f", '{"a":2}'))),
        (chat("Let me look", **call("f", '{"a":1}')), chat("Let me look!", **call("f", '{"a":1}'))),
        (chat(None, refusal="I cannot"), chat(None, refusal="I can not")),
        (chat("yes"), chat(None, refusal="yes")),
        (chat("yes", "no"), chat("yes")),
    ):
        assert await same_answer(cached, fresh, how="embedding", embed=never) is False


async def test_an_objection_outweighs_any_cosine() -> None:
    def numbers(one: str, two: str) -> str:
        digits = [[letter for letter in text if letter.isdigit()] for text in (one, two)]
        return "numbers" if digits[0] != digits[1] else ""

    cached, fresh = chat("It costs 5 euros."), chat("It costs 50 euros.")
    assert await same_answer(cached, fresh, how="embedding", embed=by_letters) is True
    assert await same_answer(cached, fresh, how="embedding", embed=never, objection=numbers) is False


async def test_what_the_embedder_cannot_see_is_not_told() -> None:
    async def blind(text: str) -> bytes:
        return b""

    async def away(text: str) -> bytes:
        raise EmbeddingUnavailable("no embedding within 0.5 s")

    for embed in (blind, away):
        assert await same_answer(chat("one"), chat("two"), how="embedding", embed=embed) is None

    # one choice is known to differ, whatever the other is
    async def partly(text: str) -> bytes:
        return b"" if text.startswith("dark") else await by_letters(text)

    cached, fresh = chat("dark", "abc"), chat("dark!", "xyz")
    assert await same_answer(cached, fresh, how="embedding", embed=partly) is False
    too_long = "A sentence of some words. " * (MAX_PIECES * PIECE // 20)
    assert await same_answer(chat(too_long), chat(too_long + "!"), how="embedding", embed=never) is None


async def test_long_answers_are_compared_to_their_end() -> None:
    asked: list[str] = []

    async def watched(text: str) -> bytes:
        asked.append(text)
        return await by_letters(text)

    beginning = "".join(f"Point {chr(97 + number % 26) * 9} is worth a look. " for number in range(60))
    cached = chat(beginning + "zzzz " * 90)
    assert await same_answer(cached, chat(beginning + "qqqq " * 90), how="embedding", similarity=0.95, embed=watched) is False
    assert max(map(len, asked)) <= PIECE
    assert await same_answer(cached, chat(beginning + "zzzz " * 91), how="embedding", similarity=0.95, embed=watched) is True


async def test_an_embedder_is_asked_for_where_one_is_needed() -> None:
    with pytest.raises(ValueError, match="needs an embedder"):
        await same_answer(chat("a"), chat("b"), how="embedding")


_NAMES = ("choices", "message", "content", "text", "tool_calls", "function", "index", "refusal")
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80) | _VALUES.map(lambda value: json.dumps({"choices": value}).encode()))
def test_no_body_breaks_the_comparison(body: bytes) -> None:
    found = choices_of(body)
    assert found is None or all(choice.text or choice.refusal or choice.calls for choice in found)
