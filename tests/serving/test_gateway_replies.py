"""What is sent upstream and back: bodies in either form, and headers that other caches and clients understand."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.inbound import Inbound, namespace_of, upstream_body
from serving.keys import Fingerprint
from serving.policy import Asked
from serving.replies import Renditions, cache_status, convert, with_fresh_id
from serving.tiers.base import Entry

KEY = bytes(range(32))
ANSWER: dict[str, Any] = {
    "id": "chatcmpl-7",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": 'he said "chatcmpl-7"'}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


def inbound(**changes: Any) -> Inbound:
    stream, usage = changes.pop("stream", False), changes.pop("usage", False)
    return Inbound("chat", b"", {}, Asked(Fingerprint(KEY, KEY, ""), stream=stream, usage=usage), "", **changes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("hit", "exact_hit", 12.7, None, False), 'cachepilot; hit; ttl=12; key; detail=exact_hit'),
        (("stale", "exact_stale", -3.2, None, False), 'cachepilot; hit; ttl=-3; key; detail=exact_stale'),
        (("hit", "exact_hit", float("inf"), None, False), 'cachepilot; hit; key; detail=exact_hit'),
        (("miss", "miss", None, 200, True), 'cachepilot; fwd=uri-miss; fwd-status=200; stored; key; detail=miss'),
        (("miss", "exact_expired", None, 500, False), 'cachepilot; fwd=stale; fwd-status=500; key; detail=exact_expired'),
        (("miss", "max_age", None, 200, True), 'cachepilot; fwd=request; fwd-status=200; stored; key; detail=max_age'),
        (("miss", "min_fresh", None, 200, False), 'cachepilot; fwd=request; fwd-status=200; key; detail=min_fresh'),
        (("miss", "only_if_cached", None, None, False), 'cachepilot; key; detail=only_if_cached'),
        (("collapsed", "collapsed", None, None, False), 'cachepilot; fwd=uri-miss; collapsed; key; detail=collapsed'),
        (("refresh", "no_cache", None, None, False), 'cachepilot; fwd=request; key; detail=no_cache'),
        (("bypass", "no_store", None, None, False), 'cachepilot; fwd=bypass; key; detail=no_store'),
    ],
)  # fmt: skip
def test_cache_status_is_a_structured_field(given: tuple[Any, ...], expected: str) -> None:
    outcome, rule, ttl, status, stored = given
    assert cache_status(outcome, rule, KEY, ttl=ttl, status=status, stored=stored).decode() == expected.replace(
        "key", 'key="0001020304050607"'
    )


def test_a_fresh_id_replaces_the_id_and_no_word_of_the_text() -> None:
    for stream in (False, True):
        body = convert(orjson.dumps(ANSWER), "json", stream=stream, usage=False)
        assert body is not None
        fresh = with_fresh_id(body, stream=stream)
        assert b'"id":"chatcmpl-7"' not in fresh
        assert b'he said \\"chatcmpl-7\\"' in fresh
    assert with_fresh_id(b"no json", stream=False) == b"no json"


def test_converted_bodies_are_kept_within_their_limit() -> None:
    renditions = Renditions(limit=4000)
    entries = [Entry(bytes([number]) * 32, orjson.dumps({**ANSWER, "id": f"c-{number}"}), 1.0) for number in range(20)]
    for entry in entries:
        first = renditions.body(entry, inbound(stream=True))
        assert first is not None
        assert renditions.body(entry, inbound(stream=True)) is first
    assert renditions._used <= 4000
    assert sum(map(len, renditions._kept.values())) == renditions._used


def test_an_entry_that_cannot_be_read_is_none_in_the_other_form() -> None:
    assert Renditions().body(Entry(KEY, b"nonsense", 1.0), inbound(stream=True)) is None
    assert Renditions().body(Entry(KEY, b"nonsense", 1.0), inbound()) == b"nonsense"


bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.just([{"role": "user", "content": "x"}])},
    optional={
        "stream": st.booleans(),
        "stream_options": st.none() | st.dictionaries(st.sampled_from(["include_usage", "other"]), st.booleans()),
        "cache": st.none() | st.just({"ttl": 3}),
        "seed": st.integers(0, 2**80),
    },
)


@given(bodies, st.booleans())
def test_the_model_gets_what_the_client_sent_but_for_what_is_the_gateways(body: dict[str, Any], usage: bool) -> None:

    raw = json.dumps(body).encode()
    sent = json.loads(upstream_body(raw, body, usage=usage))
    own = {"cache"} if isinstance(body.get("cache"), dict) else set()
    asked = {"stream_options"} if usage and body.get("stream") else set()
    rest = set(body) - own - asked
    assert {name: sent[name] for name in rest} == {name: body[name] for name in rest}
    assert set(sent) == rest | asked
    if asked:
        assert sent["stream_options"]["include_usage"] is True


@given(st.from_regex(r"[A-Za-z0-9._-]{1,8}", fullmatch=True), st.text(max_size=8), st.text(max_size=8))
def test_no_two_namespaces_of_callers_are_one(own: str, one: str, other: str) -> None:
    assert (namespace_of(own, one) == namespace_of(own, other)) == (one == other)
