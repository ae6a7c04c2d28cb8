"""What makes two requests the same. Each difference here let some cache answer the wrong question."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.keys import IGNORED_FIELDS, MAX_DEPTH, Endpoint, Fingerprint, fingerprint, parse_body

QUESTION = "What is 17 * 23?"
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(text: Any = QUESTION, **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": text}],
        "temperature": 0.5,
        "tools": [TOOL],
        **fields,
    }


def history(*turns: tuple[str, str], text: str = QUESTION) -> dict[str, Any]:
    return chat(messages=[*({"role": role, "content": said} for role, said in turns), {"role": "user", "content": text}])


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in chat().items() if key != name}


OTHER_CONTEXTS: dict[str, dict[str, Any]] = {
    "another model": chat(model="n"),
    "another system prompt": history(("system", "Be long.")),
    "no system prompt": history(),
    "another history": history(("system", "Be short."), ("user", "Hi"), ("assistant", "Hello")),
    "the same turns in another order": history(("user", "Be short."), ("system", "")),
    "another role of the prompt": history(("developer", "Be short.")),
    "a name of the user": chat(messages=[chat()["messages"][0], {"role": "user", "name": "ada", "content": QUESTION}]),
    "temperature left out": without("temperature"),
    "temperature 0": chat(temperature=0),
    "temperature null": chat(temperature=None),
    "other tools": chat(tools=[{**TOOL, "function": {"name": "sub"}}]),
    "no tools": without("tools"),
    "an empty list of tools": chat(tools=[]),
    "tool_choice none": chat(tool_choice="none"),
    "tool_choice auto": chat(tool_choice="auto"),
    "response_format text": chat(response_format={"type": "text"}),
    "response_format json": chat(response_format={"type": "json_object"}),
    "a schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}),
    "another schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}),
    "seed": chat(seed=1),
    "another seed": chat(seed=2),
    "a seed beyond 64 bits": chat(seed=2**64),
    "its neighbour": chat(seed=2**64 + 1),
    "a seed as a fraction": chat(seed=1.0),
    "a seed as text": chat(seed="1"),
    "a seed that is true": chat(seed=True),
    "n": chat(n=2),
    "max_tokens": chat(max_tokens=10),
    "max_completion_tokens": chat(max_completion_tokens=10),
    "stop": chat(stop=["\n"]),
    "stop as text": chat(stop="\n"),
    "logit_bias": chat(logit_bias={"50256": -100}),
    "logprobs": chat(logprobs=True),
    "top_p": chat(top_p=0.9),
    "frequency_penalty": chat(frequency_penalty=0.1),
    "reasoning_effort": chat(reasoning_effort="high"),
    "a field that nobody knows": chat(frobnicate={"deep": [1, {"er": None}]}),
}
OTHER_TEXTS: dict[str, dict[str, Any]] = {
    "one digit changed": chat("What is 17 * 24?"),
    "on and off": chat("Turn it off"),
    "the other way round": chat("Turn it on"),
    "from A to B": chat("Translate from French to German"),
    "from B to A": chat("Translate from German to French"),
    "another case": chat(QUESTION.lower()),
    "a space more": chat(QUESTION + " "),
    "Chinese": chat("北京的人口是多少?"),
    "other Chinese": chat("上海的人口是多少?"),
    "emoji": chat("\U0001f600"),
    "another emoji": chat("\U0001f603"),
    "emoji with a colour": chat("\U0001f44d\U0001f3fd"),
    "emoji without": chat("\U0001f44d"),
    "composed": chat("é"),
    "decomposed": chat("e\u0301"),
    "a zero byte": chat("a\x00b"),
    "the last of a megabyte": chat("x" * (1 << 20) + "1"),
    "another last": chat("x" * (1 << 20) + "2"),
}
OTHER_FORMS: dict[str, dict[str, Any]] = {
    "an empty prompt": chat(""),
    "no prompt": chat(None),
    "blank": chat(" \n"),
    "nothing said": chat([]),
    "an image": chat([{"type": "text", "text": QUESTION}, PNG]),
    "another image": chat([{"type": "text", "text": QUESTION}, {**PNG, "image_url": {"url": "data:image/png;base64,AAAB"}}]),
    "the image in more detail": chat(
        [{"type": "text", "text": QUESTION}, {**PNG, "image_url": {**PNG["image_url"], "detail": "high"}}]  # type: ignore[dict-item]
    ),
    "the image first": chat([PNG, {"type": "text", "text": QUESTION}]),
    "audio": chat([{"type": "text", "text": QUESTION}, {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]),
    "other audio": chat(
        [{"type": "text", "text": QUESTION}, {"type": "input_audio", "input_audio": {"data": "AB", "format": "wav"}}]
    ),
    "a file": chat([{"type": "text", "text": QUESTION}, {"type": "file", "file": {"file_id": "a"}}]),
    "another file": chat([{"type": "text", "text": QUESTION}, {"type": "file", "file": {"file_id": "b"}}]),
    "an assistant's last word": history(("user", QUESTION), ("assistant", "3"), text=""),
}
PARTS = chat([{"type": "text", "text": QUESTION}])
ALL = {"the question": chat(), "as a part": PARTS, **OTHER_CONTEXTS, **OTHER_TEXTS, **OTHER_FORMS}


def test_no_two_of_many_requests_that_differ_are_the_same() -> None:
    prints = {name: fingerprint(body) for name, body in ALL.items()}
    assert len({found.key for found in prints.values()}) == len(ALL)


@pytest.mark.parametrize("name", OTHER_CONTEXTS)
def test_by_meaning_only_the_last_user_text_may_differ(name: str) -> None:
    other = fingerprint(OTHER_CONTEXTS[name])
    assert other.text == QUESTION
    assert other.context != fingerprint(chat()).context


def test_contexts_of_requests_that_differ_are_as_different_as_the_requests() -> None:
    assert len({fingerprint(body).context for body in OTHER_CONTEXTS.values()}) == len(OTHER_CONTEXTS)


@pytest.mark.parametrize("name", OTHER_TEXTS)
def test_another_last_user_text_has_the_same_context(name: str) -> None:
    body = OTHER_TEXTS[name]
    other = fingerprint(body)
    assert other.text == body["messages"][-1]["content"]
    assert other.context == fingerprint(chat()).context


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_what_is_not_plain_user_text_has_no_meaning_to_look_up(name: str) -> None:
    assert fingerprint(OTHER_FORMS[name]).text == ""


def test_text_in_parts_is_text_in_a_context_of_its_own() -> None:
    two = fingerprint(chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]))
    assert two.text == "a\nb"
    assert fingerprint(PARTS).text == QUESTION
    assert fingerprint(PARTS).context == fingerprint(chat([{"type": "text", "text": "other"}])).context
    assert len({found.context for found in (two, fingerprint(PARTS), fingerprint(chat()))}) == 3
    marked = chat([{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}])
    assert fingerprint(marked).context != fingerprint(PARTS).context


@pytest.mark.parametrize("name", sorted(IGNORED_FIELDS))
def test_what_does_not_change_the_answer_does_not_count(name: str) -> None:
    assert fingerprint(chat(**{name: "x"})) == fingerprint(chat())
    nested = chat(messages=[{"role": "user", "content": QUESTION, name: "x"}])
    assert fingerprint(nested).key != fingerprint(history()).key, "only at the top"


def shuffled(value: Any) -> Any:
    """The same value with every object's keys in the opposite order."""
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_keys_does_not_count(name: str) -> None:
    assert fingerprint(shuffled(ALL[name])) == fingerprint(ALL[name])


def test_a_body_is_read_not_changed() -> None:
    for body in ALL.values():
        before = copy.deepcopy(body)
        fingerprint(body, tenant="t")
        assert body == before


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(2**63, 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)  # fmt: skip
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
values = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)), max_leaves=12
)
bodies = st.dictionaries(names.filter(lambda name: name not in IGNORED_FIELDS), values, max_size=5)


def as_given(value: Any) -> str:
    """The standard library's JSON: 1, 1.0 and true apart, numbers exact."""
    return json.dumps(value, sort_keys=True)


@settings(max_examples=60)
@given(bodies, bodies)
def test_keys_are_equal_exactly_where_the_json_is(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert (fingerprint(one).key == fingerprint(two).key) == (as_given(one) == as_given(two))
    assert fingerprint(shuffled(one)) == fingerprint(one)


@settings(max_examples=50)
@given(bodies, st.booleans())
def test_written_in_another_way_it_is_the_same_request(body: dict[str, Any], ascii_only: bool) -> None:
    plain = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    other = json.dumps(shuffled(body), ensure_ascii=ascii_only, indent=2).encode()
    assert as_given(parse_body(plain)) == as_given(parse_body(other)) == as_given(body)
    assert fingerprint(parse_body(plain)) == fingerprint(parse_body(other)) == fingerprint(body)


scopes = st.tuples(st.sampled_from(["chat", "completions", "embeddings"]), names, names, names)


def scoped(scope: tuple[Endpoint, str, str, str]) -> Fingerprint:
    endpoint, tenant, namespace, generation = scope
    return fingerprint(chat(), endpoint=endpoint, tenant=tenant, namespace=namespace, generation=generation)


@settings(max_examples=60)
@given(scopes, scopes)
def test_tenants_namespaces_and_generations_never_run_into_each_other(
    one: tuple[Endpoint, str, str, str], two: tuple[Endpoint, str, str, str]
) -> None:
    assume(one != two)
    assert scoped(one).key != scoped(two).key
    assert scoped(one).context != scoped(two).context


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("acme", "", ""), ("other", "", "")),
        (("acme", "", ""), ("", "acme", "")),
        (("ab", "c", ""), ("a", "bc", "")),
        (("a", "\x00b", ""), ("a\x00", "b", "")),
        (("a:b", "", ""), ("a", "b", "")),
        (("", "", "1"), ("", "1", "")),
    ],
)
def test_two_tenants_with_the_same_prompt_do_not_share(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    assert scoped(("chat", *one)).key != scoped(("chat", *two)).key


def test_a_tenant_is_never_taken_from_what_a_request_says() -> None:
    asked = fingerprint(chat(tenant="acme", namespace="n", user="acme"), tenant="other")
    assert asked.key != fingerprint(chat(), tenant="acme").key
    assert asked.key != fingerprint(chat(), tenant="acme", namespace="n").key


@pytest.mark.parametrize("endpoint", ["completions", "embeddings"])
def test_what_is_continued_or_embedded_is_never_looked_up_by_meaning(endpoint: Endpoint) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": "m", name: value}
        for name in ("prompt", "input")
        for value in ("a", "b", ["a"], ["a", "b"], ["b", "a"], [], "", None, [1, 2], [[1, 2]], "1")
    ] + [{"model": "m", "input": "a", "encoding_format": "base64"}, {"model": "m", "input": "a", "dimensions": 8}, chat()]
    found = [fingerprint(body, endpoint=endpoint) for body in bodies]
    assert len({one.key for one in found}) == len(bodies)
    assert {one.text for one in found} == {""}


@pytest.mark.parametrize(
    "messages", [None, {}, "text", 7, [], [None], [7], [{}], [{"role": "user"}], [{"role": "user", "content": 7}]]
)
def test_messages_of_any_shape_have_an_identity(messages: Any) -> None:
    assert fingerprint({"messages": messages}).text == ""


def test_an_identity_that_others_have_stored_stays_what_it_is() -> None:
    found = fingerprint(chat(), tenant="t", namespace="n", generation="g")
    assert found.key.hex() == "9cbd9cff6814ed86b8f20077ccbdd17317ca2ce1e1ddb069602c39ba83f09bd3"
    assert found.context.hex() == "27e0b463922874b48041c0ba6e916fbf7e4667db117a28038bb196d2affad465"


# -- bodies ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64 - 1, 2**64, 2**64 + 1, -(2**63) - 1, 10**300, 123456789012345678901])
def test_whole_numbers_are_exact_whatever_their_size(number: int) -> None:
    for raw in (b'{"seed":%d}' % number, b'{ "seed" : %d }' % number):
        assert parse_body(raw) == {"seed": number}
    assert fingerprint({"seed": number}).key != fingerprint({"seed": number + 1}).key


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON: .*line 1 column 1"),
        (b'{"a": 1,}', r"not valid JSON: .*line 1 column 8 \(char 7\)"),
        (b'{"a": NaN}', "not valid JSON: .*column 7"),
        (b'{"a": 1e400}', "not valid JSON"),
        (b'{"a": Infinity}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON: .*surrogate"),
        (b'{"a": "\n"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'"text"', "expected a JSON object, got str"),
        (b'{"a": 1, "b": 2, "a": 1}', "each key of an object once, got 'a' twice"),
        (b'{"b":[{"c":{"a":1,"\\u0061":2}}]}', "got 'a' twice"),
    ],
)
def test_what_is_no_request_is_refused_with_the_place(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_body(raw)


@pytest.mark.parametrize("depth", [2, MAX_DEPTH, MAX_DEPTH + 1, 200, 300, 900, 5000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b"[ ", b"]")])
def test_nesting_is_bounded(depth: int, opening: bytes, closing: bytes) -> None:
    inner = depth - 1
    raw = b'{"a":' + opening * inner + (b"1" if opening != b"[" else b"") + closing * inner + b"}"
    if depth <= MAX_DEPTH:
        assert len(fingerprint(parse_body(raw)).key) == 32
    else:
        with pytest.raises(ValueError, match=r"nested too deeply|not valid JSON"):
            parse_body(raw)


def test_a_body_made_by_hand_is_bounded_as_well() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    with pytest.raises(ValueError, match=f"expected at most {MAX_DEPTH} levels"):
        fingerprint({"a": deep})


def test_many_brackets_are_not_many_levels() -> None:
    assert parse_body(b'{"a":[' + b"[]," * 500 + b"{}]}")["a"][-1] == {}


@given(st.binary(max_size=50))
def test_any_bytes_are_a_body_or_refused(raw: bytes) -> None:
    try:
        body = parse_body(raw)
    except ValueError:
        return
    assert len(fingerprint(body).key) == 32


@settings(max_examples=60)
@given(values, st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans())
def test_a_body_is_read_as_it_was_written(value: Any, separators: tuple[str, str], ascii_only: bool) -> None:
    raw = json.dumps({"value": value}, separators=separators, ensure_ascii=ascii_only).encode()
    assert as_given(parse_body(raw)) == as_given({"value": value})


def test_a_huge_prompt_keeps_its_last_character() -> None:
    raw = [json.dumps(chat("wörd " * 200_000 + end)).encode() for end in "12"]
    assert min(len(one) for one in raw) > 1 << 20
    assert fingerprint(parse_body(raw[0])).key != fingerprint(parse_body(raw[1])).key
