"""What callers ask of the cache, in every form in which they may."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.directives import LONGEST_SECONDS, NO_DIRECTIVES, DirectiveError, Directives, parse_directives
from serving.settings import CallerSettings

CALLERS = CallerSettings()
DEAF = CallerSettings(directives=False)
WHOLE = CallerSettings(namespaces=False)


def parsed(cache_control: str | None = None, body: object = None, **headers: str) -> Directives:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return parse_directives(cache_control, named, body, CALLERS)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, {}),
        ("", {}),
        (" , ,, ", {}),
        ("no-store", {"no_store": True}),
        ("No-Store , NO-CACHE", {"no_store": True, "no_cache": True}),
        ("no-cache", {"no_cache": True}),
        ('no-cache="set-cookie"', {"no_cache": True}),
        ("only-if-cached", {"only_if_cached": True}),
        ("max-age=60", {"max_age": 60.0}),
        ('max-age="60"', {"max_age": 60.0}),
        ("max-age = 60", {"max_age": 60.0}),
        ("max-age=0060", {"max_age": 60.0}),
        ("max-age=0", {"max_age": 0.0}),
        ("max-age=60, max-age=30", {"max_age": 30.0}),
        ("max-age=30, max-age=60", {"max_age": 30.0}),
        ("max-age=60, max-age=x", {"max_age": 0.0}),
        ("max-age", {"max_age": 0.0}),
        ("max-age=", {"max_age": 0.0}),
        ("max-age=abc", {"max_age": 0.0}),
        ("max-age=-1", {"max_age": 0.0}),
        ("max-age=1.5", {"max_age": 0.0}),
        ("max-age=1_000", {"max_age": 0.0}),
        ("max-age=\u0663", {"max_age": 0.0}),  # a digit, but not one of HTTP's
        ("max-age=99999999999999999999", {"max_age": float(LONGEST_SECONDS)}),
        ("max-age=" + "9" * 5000, {"max_age": float(LONGEST_SECONDS)}),
        ("max-age=" + "0" * 5000 + "7", {"max_age": 7.0}),
        ("min-fresh=20", {"min_fresh": 20.0}),
        ("min-fresh=20, min-fresh=40", {"min_fresh": 40.0}),
        ("min-fresh=soon", {"min_fresh": math.inf}),
        ("stale-if-error=30", {"stale_if_error": 30.0}),
        ("stale-if-error", {"stale_if_error": 0.0}),
        ("max-stale=100, no-transform, s-maxage=3, private, x=1", {}),  # loosening, or not for requests, or unknown
        ('extension="a, no-store, max-age=1", no-cache', {"no_cache": True}),
        ('extension="never closed, no-store', {"no_store": True}),
        ('extension="a \\" b, no-store', {"no_store": True}),
        ("no-storex, xno-cache, max-age2=1", {}),
    ],
)
def test_cache_control(header: str | None, expected: dict[str, object]) -> None:
    assert parsed(header) == Directives(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"no-cache": True}, {"no_cache": True}),
        ({"no_cache": True}, {"no_cache": True}),
        ({"no-cache": False, "no-store": None}, {}),
        ({"no-store": True}, {"no_store": True}),
        ({"only-if-cached": True}, {"only_if_cached": True}),
        ({"use-cache": True}, {}),
        ({"use-cache": False}, {"no_store": True}),
        ({"ttl": 300}, {"ttl": 300.0}),
        ({"ttl": 0.5}, {"ttl": 0.5}),
        ({"ttl": 0}, {"ttl": 0.0}),
        ({"ttl": None}, {}),
        ({"ttl": 10**30}, {"ttl": float(LONGEST_SECONDS)}),
        ({"s-maxage": 600}, {"max_age": 600.0}),
        ({"s-max-age": 600}, {"max_age": 600.0}),
        ({"max-age": 700, "s-maxage": 600}, {"max_age": 600.0}),
        ({"s-maxage": 0}, {"max_age": 0.0}),
        ({"min-fresh": 5}, {"min_fresh": 5.0}),
        ({"stale-if-error": 5}, {"stale_if_error": 5.0}),
        ({"namespace": "team: blue"}, {"namespace": "team: blue"}),
        ({"namespace": "蓝队"}, {"namespace": "蓝队"}),
        ({"namespace": ""}, {}),
        ({"namespace": None}, {}),
    ],
)
def test_the_bodys_cache_object(body: object, expected: dict[str, object]) -> None:
    assert parsed(None, body) == Directives(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (True, "cache", "expected an object"),
        ("no-store", "cache", "expected an object"),
        ([], "cache", "expected an object"),
        ({"no-cache": "yes"}, "cache.no-cache", "expected true or false, got 'yes'"),
        ({"no-store": 1}, "cache.no-store", "expected true or false, got 1"),
        ({"ttl": "300"}, "cache.ttl", "expected a number of seconds >= 0, got '300'"),
        ({"ttl": -1}, "cache.ttl", "expected a number of seconds >= 0, got -1"),
        ({"ttl": True}, "cache.ttl", "expected a number of seconds >= 0, got True"),
        ({"s-maxage": math.inf}, "cache.s-maxage", "expected a number of seconds >= 0, got inf"),
        ({"s-maxage": math.nan}, "cache.s-maxage", "expected a number of seconds >= 0, got nan"),
        ({"nocache": True}, "cache.nocache", "not known; expected one of"),
        ({"no-cache": False, "no_cache": True}, "cache", "expected each member once"),
        ({"namespace": 7}, "cache.namespace", "expected up to 256 characters"),
        ({"namespace": "x" * 257}, "cache.namespace", "expected up to 256 characters"),
        ({"namespace": "a\nb"}, "cache.namespace", "without control characters"),
        ({"namespace": "\ud800"}, "cache.namespace", "without control characters"),
    ],
)
def test_what_is_wrong_in_the_body_is_refused_by_name(body: object, param: str, message: str) -> None:
    with pytest.raises(DirectiveError) as caught:
        parsed(None, body)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("header", "body", "expected"),
    [
        ("max-age=60", {"s-maxage": 30}, {"max_age": 30.0}),
        ("max-age=30", {"s-maxage": 60}, {"max_age": 30.0}),
        ("no-store", {"no-store": False}, {"no_store": True}),
        (None, {"no-store": True, "no-cache": True}, {"no_store": True, "no_cache": True}),
        ("min-fresh=10", {"min-fresh": 20}, {"min_fresh": 20.0}),
        ("stale-if-error=10", {"stale-if-error": 20}, {"stale_if_error": 10.0}),
        ("no-cache", {"ttl": 60, "namespace": "n"}, {"no_cache": True, "ttl": 60.0, "namespace": "n"}),
    ],
)
def test_of_header_and_body_the_stricter_holds(header: str | None, body: object, expected: dict[str, object]) -> None:
    assert parsed(header, body) == Directives(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "share"),
    [("0.95", 0.95), ("0", 0.0), ("1", 1.0), (" 0.5 ", 0.5), (".5", 0.5), ("1.", 1.0), ("1e-3", 0.001)],
)
def test_bounds_of_answers_by_meaning_come_in_headers(value: str, share: float) -> None:
    assert parsed(x_cache_threshold=value) == Directives(threshold=share)
    assert parsed(x_cache_max_error=value) == Directives(max_error=share)


@pytest.mark.parametrize("value", ["", "x", "1.01", "-0.1", "nan", "inf", "0x1", "1_0", "95%", "0.9, 0.8", "1" * 100_000 + "x"])
@pytest.mark.parametrize("header", ["x-cache-threshold", "x-cache-max-error"])
def test_bounds_that_are_none_are_refused_by_name(header: str, value: str) -> None:
    with pytest.raises(DirectiveError, match=f"^{header}: expected a number from 0 to 1, got ") as caught:
        parse_directives(None, {header: value}, None, CALLERS)
    assert caught.value.param == header
    assert len(str(caught.value)) < 200


def test_tags_and_documents_are_lists_of_names() -> None:
    asked = parsed(x_cache_tags="faq, billing,,faq ,", x_cache_documents=" manual.pdf#3 ")
    assert asked == Directives(tags=("faq", "billing"), documents=("manual.pdf#3",))
    assert parsed(x_cache_tags="手册".encode().decode("latin-1")).tags == ("手册",)
    assert parsed(x_cache_tags="caf\xe9").tags == ("caf\xe9",)


@pytest.mark.parametrize(
    ("value", "message"),
    [("x" * 257, "256 characters"), ("a\x01b", "control characters"), (",".join(map(str, range(33))), "at most 32")],
)
@pytest.mark.parametrize("header", ["x-cache-tags", "x-cache-documents"])
def test_names_that_are_too_long_or_too_many_are_refused(header: str, value: str, message: str) -> None:
    with pytest.raises(DirectiveError, match=message) as caught:
        parse_directives(None, {header: value}, None, CALLERS)
    assert caught.value.param == header


def test_callers_are_not_heeded_where_the_operator_says_so_but_what_an_entry_is_stays() -> None:
    body = {"no-store": True, "ttl": "wrong", "unknown": 1, "namespace": "n"}
    headers = {"x-cache-threshold": "wrong", "x-cache-tags": "t", "x-cache-documents": "d"}
    asked = parse_directives("no-cache, max-age=0", headers, body, DEAF)
    assert asked == Directives(namespace="n", tags=("t",), documents=("d",))
    assert parse_directives("no-cache", {}, "not an object", DEAF) == NO_DIRECTIVES


@pytest.mark.parametrize("heeded", [True, False])
def test_a_namespace_is_refused_rather_than_ignored_where_it_is_not_allowed(heeded: bool) -> None:
    callers = CallerSettings(directives=heeded, namespaces=False)
    with pytest.raises(DirectiveError, match="does not let callers divide the cache") as caught:
        parse_directives(None, {}, {"namespace": "n"}, callers)
    assert caught.value.param == "cache.namespace"
    assert parse_directives(None, {}, {"namespace": ""}, WHOLE) == NO_DIRECTIVES


def test_a_request_that_asks_nothing_asks_nothing() -> None:
    assert parse_directives(None, {"content-type": "application/json"}, None, CALLERS) is NO_DIRECTIVES
    assert NO_DIRECTIVES.by_meaning


@pytest.mark.parametrize(
    ("operator", "caller", "bound"),
    [(None, None, None), (0.02, None, 0.02), (None, 0.01, 0.01), (0.02, 0.01, 0.01), (0.01, 0.02, 0.01)],
)
def test_of_two_error_bounds_the_smaller_holds(operator: float | None, caller: float | None, bound: float | None) -> None:
    assert Directives(max_error=caller).error_bound(operator) == bound


@pytest.mark.parametrize(
    ("asked", "by_meaning"),
    [
        (Directives(), True),
        (Directives(max_error=0.01), True),
        (Directives(max_error=0.0), False),
        (Directives(no_cache=True), False),
        (Directives(no_store=True), False),
        (Directives(only_if_cached=True), True),
    ],
)
def test_who_wants_no_answer_by_meaning_gets_none_looked_up(asked: Directives, by_meaning: bool) -> None:
    assert asked.by_meaning is by_meaning


names = st.sampled_from(["no-store", "no-cache", "max-age", "min-fresh", "only-if-cached", "stale-if-error", "x", "NO-STORE", ""])
arguments = st.sampled_from(["", "=", "=1", "=60", '="60"', "=abc", '="a,b"', '=""', " = 5", "=999999999999"])
elements = st.builds(lambda name, argument: name + argument, names, arguments)


@settings(max_examples=100)
@given(st.lists(elements | st.text(alphabet=",= \\aé0", max_size=8), max_size=5), elements)
def test_another_directive_never_loosens_a_header(header: list[str], more: str) -> None:
    before, after = parsed(", ".join(header)), parsed(", ".join([*header, more]))
    assert after.no_store >= before.no_store
    assert after.no_cache >= before.no_cache
    assert after.only_if_cached >= before.only_if_cached
    assert after.min_fresh >= before.min_fresh
    for name in ("max_age", "stale_if_error"):
        old, new = getattr(before, name), getattr(after, name)
        assert old is None or new <= old


@settings(max_examples=100)
@given(st.text(max_size=40), st.dictionaries(st.text(max_size=12), st.none() | st.booleans() | st.floats() | st.text(max_size=5)))
def test_whatever_comes_is_understood_or_refused_by_name(header: str, body: dict[str, object]) -> None:
    for given_body in (None, body):
        try:
            asked = parsed(header, given_body)
        except DirectiveError as error:
            name = error.param
            assert given_body is not None  # a header of HTTP's own is never refused
            assert name == "cache" or name.startswith("cache.")
            continue
        assert asked.max_age is None or 0 <= asked.max_age <= LONGEST_SECONDS
        assert asked.ttl is None or 0 <= asked.ttl <= LONGEST_SECONDS


@settings(max_examples=100)
@given(
    st.builds(
        Directives,
        no_store=st.booleans(),
        no_cache=st.booleans(),
        only_if_cached=st.booleans(),
        ttl=st.none() | st.floats(0, 1e6),
    )
)
def test_the_body_carries_every_directive_that_the_header_does(asked: Directives) -> None:
    body = {
        name.replace("_", "-"): value
        for name, value in asdict(asked).items()
        if name in ("no_store", "no_cache", "only_if_cached", "ttl")
    }
    assert parsed(None, body) == asked
    in_header = ", ".join(name.replace("_", "-") for name in ("no_store", "no_cache", "only_if_cached") if getattr(asked, name))
    assert parsed(in_header) == replace(asked, ttl=None)


def test_nothing_is_asked_by_default() -> None:
    assert all(getattr(NO_DIRECTIVES, item.name) in (False, None, 0.0, "", ()) for item in fields(Directives))
