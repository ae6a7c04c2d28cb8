"""Which answers are kept, reason by reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving.admission
from serving.admission import AdmissionRules, CompletedAnswer, Endpoint, Refusal, admit, mean_logprob
from serving.directives import Directives
from serving.policy import Asked, CacheRules
from serving.settings import AdmissionSettings
from tests.serving.entries import request

RULES = CacheRules()
KEEP = AdmissionRules()
ASKED = Asked(request(0, "text"))
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(finish: object = "stop", logprobs: object = None, **message: object) -> dict[str, Any]:
    given = message or {"content": "Paris."}
    return {"choices": [{"index": 0, "message": {"role": "assistant", **given}, "finish_reason": finish, "logprobs": logprobs}]}


def two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"choices": first["choices"] + second["choices"]}


def completion(text: object = "Paris.", finish: object = "stop", logprobs: object = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}]}


def embeddings(*vectors: object) -> dict[str, Any]:
    return {"object": "list", "data": [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]}


def tokens(*logprobs: object) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": logprob} for logprob in logprobs]}


def refused(
    parsed: Mapping[str, Any] | None,
    endpoint: Endpoint = "chat",
    *,
    asked: Asked = ASKED,
    rules: AdmissionRules = KEEP,
    status: int = 200,
    size: int = 100,
    interrupted: bool = False,
) -> Refusal | None:
    return admit(CompletedAnswer(status, parsed, endpoint, size, interrupted), asked, rules, RULES)


CHAT: list[tuple[Mapping[str, Any] | None, Refusal | None]] = [
    (chat(), None),
    (chat(content="0"), None),
    (chat(content="", refusal="I cannot."), None),
    (chat(content=None, refusal="I cannot."), None),
    (chat(content=None, audio={"id": "a", "data": "UklG"}), None),
    (chat(content=[{"type": "text", "text": "Paris."}]), None),
    (chat(content="Paris.", reasoning_content="Let me think."), None),
    (two(chat(), chat()), None),
    ({**chat(), "error": None}, None),
    (None, Refusal.NOT_JSON),
    ({"error": {"message": "overloaded"}}, Refusal.ERROR_BODY),
    ({**chat(), "error": {"message": "overloaded"}}, Refusal.ERROR_BODY),
    ({"object": "error", "message": "overloaded"}, Refusal.ERROR_BODY),
    ({}, Refusal.NO_CHOICES),
    ({"choices": []}, Refusal.NO_CHOICES),
    ({"choices": {}}, Refusal.NO_CHOICES),
    ({"choices": ["Paris."]}, Refusal.NO_CHOICES),
    ({"choices": [{"message": "Paris.", "finish_reason": "stop"}]}, Refusal.NO_CHOICES),
    (completion(), Refusal.NO_CHOICES),  # another endpoint's shape
    (chat(None), Refusal.UNFINISHED),
    (chat(""), Refusal.UNFINISHED),
    ({"choices": [{"message": {"content": "Paris."}}]}, Refusal.UNFINISHED),
    (two(chat(), chat(None)), Refusal.UNFINISHED),
    (chat("length"), Refusal.CUT),
    (chat("content_filter"), Refusal.CUT),
    (chat("error"), Refusal.CUT),
    (chat("abort"), Refusal.CUT),
    (chat(["stop"]), Refusal.CUT),
    (two(chat(), chat("length")), Refusal.CUT),
    (chat(content=""), Refusal.EMPTY),
    (chat(content=" \n\t"), Refusal.EMPTY),
    (chat(content=None), Refusal.EMPTY),
    (chat(content=[]), Refusal.EMPTY),
    (chat(content="", reasoning_content="Let me think."), Refusal.EMPTY),
    (chat(content="", tool_calls=[]), Refusal.EMPTY),
    (two(chat(), chat(content="")), Refusal.EMPTY),
    (chat("tool_calls", content="I will look it up."), Refusal.EMPTY),  # the call was lost
    (chat("tool_calls", content=None, tool_calls=[CALL]), Refusal.TOOL_CALLS),
    (chat("stop", content="Wait.", tool_calls=[CALL]), Refusal.TOOL_CALLS),  # a named tool_choice ends with stop
    (chat("function_call", content=None, function_call={"name": "f", "arguments": "{}"}), Refusal.TOOL_CALLS),
    (two(chat(), chat("tool_calls", tool_calls=[CALL])), Refusal.TOOL_CALLS),
    (chat(logprobs=tokens(-0.1, -0.2)), None),
    (chat(logprobs=tokens(-2.3, -2.3)), None),  # not below
    (chat(logprobs=tokens(-5.0, -0.1)), Refusal.LOW_LOGPROB),
    (two(chat(logprobs=tokens(-0.1)), chat(logprobs=tokens(-3.0))), Refusal.LOW_LOGPROB),
    (chat(logprobs={"content": None, "refusal": None}), None),
    (chat(logprobs={"content": [], "refusal": [{"token": "I", "logprob": -9.0}]}), Refusal.LOW_LOGPROB),
    (chat(logprobs={"content": [{"token": "t"}, "odd", {"logprob": "low"}]}), None),  # not known
    (chat(logprobs="odd"), None),
]  # fmt: skip


def test_the_upstreams_no_store_counts_where_it_is_heeded() -> None:
    answer = CompletedAnswer(200, chat(), no_store=True)
    reasons = [admit(answer, ASKED, AdmissionRules(heed_no_store=heeded), RULES) for heeded in (False, True)]
    assert reasons == [None, Refusal.UPSTREAM]
    assert refused(chat(), rules=AdmissionRules(heed_no_store=True)) is None


@pytest.mark.parametrize(("parsed", "reason"), CHAT)
def test_chat_completions(parsed: Mapping[str, Any] | None, reason: Refusal | None) -> None:
    assert refused(parsed) is reason


@pytest.mark.parametrize(
    ("parsed", "reason"),
    [
        (completion(), None),
        (completion(finish="length"), Refusal.CUT),
        (completion(finish=None), Refusal.UNFINISHED),
        (completion(" "), Refusal.EMPTY),
        (completion(None), Refusal.NO_CHOICES),
        (chat(), Refusal.NO_CHOICES),
        (completion(logprobs={"token_logprobs": [None, -0.5]}), None),  # the first token of an echoed prompt has none
        (completion(logprobs={"token_logprobs": [None, -5.0]}), Refusal.LOW_LOGPROB),
        (completion(logprobs={"token_logprobs": None}), None),
    ],
)
def test_completions(parsed: Mapping[str, Any], reason: Refusal | None) -> None:
    assert refused(parsed, "completions") is reason


@pytest.mark.parametrize(
    ("parsed", "reason"),
    [
        (embeddings([0.1, 0.2]), None),
        (embeddings("zczMPQ=="), None),  # base64, as the official client asks for it
        (embeddings([0.1], [0.2]), None),
        (embeddings(), Refusal.NO_CHOICES),
        (embeddings(None), Refusal.NO_CHOICES),
        ({"data": None}, Refusal.NO_CHOICES),
        ({"data": [0.1]}, Refusal.NO_CHOICES),
        (embeddings([]), Refusal.EMPTY),
        (embeddings([0.1], ""), Refusal.EMPTY),
        ({"error": {"message": "too long"}}, Refusal.ERROR_BODY),
        (None, Refusal.NOT_JSON),
        (chat(), Refusal.NO_CHOICES),
    ],
)
def test_embeddings(parsed: Mapping[str, Any] | None, reason: Refusal | None) -> None:
    assert refused(parsed, "embeddings", asked=replace(ASKED, temperature=2.0)) is reason


@pytest.mark.parametrize("status", [201, 203])
def test_other_successes_are_kept(status: int) -> None:
    assert refused(chat(), status=status) is None


@pytest.mark.parametrize("status", [100, 206, 301, 400, 401, 404, 429, 500, 502, 503, 504])
def test_nothing_but_success_is_kept_whatever_the_body_says(status: int) -> None:
    assert refused(chat(), status=status) is Refusal.STATUS


def test_an_answer_larger_than_the_limit_is_not_kept() -> None:
    rules = replace(KEEP, max_entry_bytes=1000)
    assert refused(chat(), rules=rules, size=1000) is None
    assert refused(chat(), rules=rules, size=1001) is Refusal.TOO_LARGE


def test_a_stream_that_broke_off_is_not_kept_although_every_choice_was_finished() -> None:
    assert refused(chat(), interrupted=True) is Refusal.INTERRUPTED


@pytest.mark.parametrize(
    ("endpoint", "one"), [("chat", chat()), ("completions", completion()), ("embeddings", embeddings([0.1]))]
)
def test_fewer_answers_than_were_asked_for_are_not_kept(endpoint: Endpoint, one: dict[str, Any]) -> None:
    name = "data" if endpoint == "embeddings" else "choices"
    assert refused(one, endpoint, asked=replace(ASKED, choices=2)) is Refusal.NO_CHOICES
    assert refused({name: one[name] * 2}, endpoint, asked=replace(ASKED, choices=2)) is None


@pytest.mark.parametrize(
    ("limit", "temperature", "reason"),
    [
        (1.0, 1.0, None),
        (1.0, 0.0, None),
        (1.0, None, None),
        (1.0, 1.01, Refusal.TEMPERATURE),
        (0.5, None, Refusal.TEMPERATURE),  # absent is the API's default, 1, not 0
        (0.0, 0.0, None),
        (None, 2.0, None),
        (None, None, None),
        (1.0, math.nan, Refusal.TEMPERATURE),
    ],
)
def test_temperature(limit: float | None, temperature: float | None, reason: Refusal | None) -> None:
    asked, rules = replace(ASKED, temperature=temperature), replace(KEEP, max_temperature=limit)
    assert refused(chat(), asked=asked, rules=rules) is reason


def test_tool_calls_are_kept_only_if_configured() -> None:
    kept = replace(KEEP, tool_calls=True)
    assert refused(chat("tool_calls", content=None, tool_calls=[CALL]), rules=kept) is None
    assert refused(chat("function_call", content=None, function_call={"name": "f"}), rules=kept) is None
    assert refused(chat("tool_calls", content=None, tool_calls=[]), rules=kept) is Refusal.EMPTY


def test_improbable_answers_are_kept_if_the_operator_does_not_mind() -> None:
    assert refused(chat(logprobs=tokens(-50.0)), rules=replace(KEEP, min_logprob=None)) is None


def test_what_a_caller_wants_not_kept_is_not_kept() -> None:
    assert refused(chat(), asked=replace(ASKED, directives=Directives(no_store=True))) is Refusal.NO_STORE
    assert refused(chat(), asked=replace(ASKED, directives=Directives(no_cache=True, only_if_cached=True))) is None


@pytest.mark.parametrize(("ttl", "least", "reason"), [(0.0, 0.0, Refusal.EXPIRED), (0.0, 60.0, None), (1.0, 0.0, None)])
def test_what_a_caller_wants_kept_for_no_time_is_not_kept(ttl: float, least: float, reason: Refusal | None) -> None:
    asked = replace(ASKED, directives=Directives(ttl=ttl))
    assert admit(CompletedAnswer(200, chat()), asked, KEEP, CacheRules(min_ttl=least)) is reason


def test_mean_logprob_is_per_token_and_leaves_out_what_is_not_finite() -> None:
    assert mean_logprob({"logprobs": tokens(-1.0, -3.0)}) == -2.0
    assert mean_logprob({"logprobs": tokens(-1.0, -math.inf, math.nan, None)}) == -1.0
    assert mean_logprob({"logprobs": {"token_logprobs": [None, -1.0, -2.0]}}) == -1.5
    nothing: list[object] = [None, {}, {"content": []}, {"token_logprobs": [None]}]
    for unknown in nothing:
        assert mean_logprob({"logprobs": unknown}) is None
    assert mean_logprob({}) is None


def test_the_operators_settings_are_the_rules() -> None:
    assert AdmissionRules(**AdmissionSettings().model_dump()) == KEEP


def test_every_refusal_is_documented() -> None:
    assert [reason for reason in Refusal if f"\n``{reason}``" not in (serving.admission.__doc__ or "")] == []


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(["", "stop", "length", "tool_calls", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "message", "content", "finish_reason", "text", "tool_calls", "logprobs", "data", "embedding"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
choices = st.fixed_dictionaries(
    {"finish_reason": st.sampled_from(["stop", "length", "tool_calls", None])},
    optional={
        "message": st.dictionaries(st.sampled_from(["content", "tool_calls", "refusal"]), values, max_size=3),
        "text": values,
        "logprobs": values,
    },
)
bodies = st.fixed_dictionaries({"choices": st.lists(choices, max_size=3)}) | st.dictionaries(
    st.sampled_from(["choices", "data", "error"]), values
)


@settings(max_examples=100)
@given(st.none() | bodies, st.sampled_from(["chat", "completions", "embeddings"]))
def test_whatever_comes_is_judged_and_what_is_kept_is_whole(parsed: dict[str, Any] | None, endpoint: Endpoint) -> None:
    if refused(parsed, endpoint) is not None:
        return
    assert parsed is not None
    if endpoint == "embeddings":
        assert all(item["embedding"] for item in parsed["data"])
    else:
        assert parsed["choices"]
        assert all(choice["finish_reason"] == "stop" for choice in parsed["choices"])
