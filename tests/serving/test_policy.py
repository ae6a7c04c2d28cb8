"""The decision core, rule by rule, and what holds whatever is asked."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import serving.policy
from serving.directives import Directives
from serving.keys import Fingerprint, key64, ttl_jitter
from serving.knobs import Knobs
from serving.policy import (
    Asked,
    CacheRules,
    Candidate,
    Outcome,
    Rule,
    decide,
    effective_ttl,
    entry_ttl,
    is_fresh,
    is_live,
    lifetime,
    on_error,
    staleness,
    worth_fetching,
)
from serving.tiers.base import Entry
from tests.serving.entries import CONTEXT, entry, key, request

KNOBS = Knobs(1000, 100.0)
RULES = CacheRules(ttl_jitter=0.0, staleness_half_life=50.0, semantic_threshold=0.9)
STALE_RULES = replace(RULES, stale_while_revalidate=20.0, stale_if_error=60.0)
NOW = 1000.0
LIVE, OLD = NOW - 50.0, NOW - 101.0
OTHER = b"o" * 32
NO_ENTRY: dict[str, object] = {"entry": None, "age": 0.0, "stale": 0.0, "similarity": 0.0, "ttl": 0.0, "revalidate": False}


def candidate(
    number: int, similarity: float, written_at: float | None, context: bytes = CONTEXT, objection: str = ""
) -> Candidate:
    stored = None if written_at is None else entry(number, written_at=written_at)
    return Candidate(key(number), context, similarity, stored, objection)


def asked(**directives: object) -> Asked:
    return Asked(request(0, "text"), Directives(**directives))  # type: ignore[arg-type]


def own(written_at: float | None, **fields: object) -> Entry | None:
    return None if written_at is None else replace(entry(0, written_at=written_at), **fields)  # type: ignore[arg-type]


PLAIN = [
    (LIVE, [], Rule.EXACT_HIT, 0, False),
    (NOW - 100.0, [], Rule.EXACT_HIT, 0, False),  # expired only after the TTL
    (NOW + 5.0, [], Rule.EXACT_HIT, 0, False),  # another replica's clock is ahead
    (LIVE, [candidate(1, 0.99, LIVE)], Rule.EXACT_HIT, 0, False),
    (OLD, [], Rule.EXACT_EXPIRED, None, True),
    (OLD, [candidate(1, 0.95, LIVE)], Rule.SEMANTIC_HIT, 1, True),
    (OLD, [candidate(1, 0.95, OLD)], Rule.EXACT_EXPIRED, None, True),
    (OLD, [candidate(1, 0.95, LIVE, OTHER)], Rule.EXACT_EXPIRED, None, True),
    (OLD, [candidate(1, 0.95, LIVE, objection="numbers")], Rule.EXACT_EXPIRED, None, True),
    (None, [candidate(1, 0.9, LIVE)], Rule.SEMANTIC_HIT, 1, False),
    (None, [candidate(1, 0.91, LIVE), candidate(2, 0.97, LIVE)], Rule.SEMANTIC_HIT, 2, False),
    (None, [candidate(1, 0.97, OLD), candidate(2, 0.91, LIVE)], Rule.SEMANTIC_HIT, 2, False),
    (None, [candidate(1, 0.97, None), candidate(2, 0.91, LIVE)], Rule.SEMANTIC_HIT, 2, False),
    (None, [candidate(1, 0.99, LIVE, OTHER), candidate(2, 0.91, LIVE)], Rule.SEMANTIC_HIT, 2, False),
    (None, [candidate(1, 0.99, LIVE, objection="polarity"), candidate(2, 0.91, LIVE)], Rule.SEMANTIC_HIT, 2, False),
    (None, [candidate(1, 0.95, OLD)], Rule.SEMANTIC_EXPIRED, None, True),
    (None, [candidate(1, 0.95, OLD), candidate(2, 0.99, LIVE, OTHER)], Rule.SEMANTIC_EXPIRED, None, True),
    (None, [candidate(1, 0.95, OLD), candidate(2, 0.91, LIVE, objection="order")], Rule.SEMANTIC_EXPIRED, None, True),
    (None, [candidate(1, 0.95, LIVE, objection="order")], Rule.OBJECTION, None, False),
    (None, [candidate(1, 0.95, OLD, objection="order")], Rule.OBJECTION, None, False),
    (None, [candidate(1, 0.95, None, objection="order")], Rule.OBJECTION, None, False),
    (None, [candidate(1, 0.95, LIVE, objection="order"), candidate(2, 0.91, OLD)], Rule.OBJECTION, None, False),
    (None, [candidate(1, 0.5, LIVE, objection="order")], Rule.BELOW_THRESHOLD, None, False),
    (None, [candidate(1, 0.99, LIVE, OTHER, objection="order")], Rule.CONTEXT_DIFFERS, None, False),
    (None, [candidate(1, 0.99, None, OTHER)], Rule.CONTEXT_DIFFERS, None, False),
    (None, [candidate(1, 0.99, None, OTHER), candidate(2, 0.5, None)], Rule.CONTEXT_DIFFERS, None, False),
    (None, [candidate(1, 0.89999, LIVE)], Rule.BELOW_THRESHOLD, None, False),
    (None, [candidate(1, math.nan, LIVE)], Rule.BELOW_THRESHOLD, None, False),
    (None, [candidate(1, 0.5, LIVE, OTHER)], Rule.BELOW_THRESHOLD, None, False),
    (None, [candidate(1, 0.95, None)], Rule.MISS, None, False),  # gone meanwhile
    (None, [], Rule.MISS, None, False),
]  # fmt: skip
"""Age of the own entry, candidates, rule, whose entry answers, whether one that would have was expired; nothing asked."""


@pytest.mark.parametrize(("exact", "candidates", "rule", "answer", "expired"), PLAIN)
def test_rules(exact: float | None, candidates: list[Candidate], rule: Rule, answer: int | None, expired: bool) -> None:
    decision = decide(asked(), own(exact), candidates, knobs=KNOBS, rules=RULES, now=NOW)
    assert (decision.rule, decision.expired) == (rule, expired)
    assert (decision.revalidate, decision.forbidden) == (False, False)
    if answer is None:
        assert decision.outcome == "miss"
        assert {name: getattr(decision, name) for name in NO_ENTRY} == NO_ENTRY
    else:
        assert decision.entry is not None
        assert decision.entry.key == key(answer)
        assert decision.outcome == ("hit" if answer == 0 else "semantic_hit")
    assert decision.objection == (candidates[0].objection if rule is Rule.OBJECTION else "")


NEAR = [candidate(1, 0.95, LIVE)]
DIRECTED: list[tuple[dict[str, object], float | None, list[Candidate], Outcome, Rule, bool]] = [
    # what is asked, the own entry's moment, candidates, outcome, rule, whether the model is forbidden
    ({"no_store": True}, LIVE, NEAR, "bypass", Rule.NO_STORE, False),
    ({"no_store": True, "no_cache": True}, LIVE, [], "bypass", Rule.NO_STORE, False),
    ({"no_store": True, "only_if_cached": True}, LIVE, NEAR, "miss", Rule.ONLY_IF_CACHED, True),
    ({"no_cache": True}, LIVE, NEAR, "refresh", Rule.NO_CACHE, False),
    ({"no_cache": True}, None, [], "refresh", Rule.NO_CACHE, False),
    ({"no_cache": True, "only_if_cached": True}, LIVE, NEAR, "miss", Rule.ONLY_IF_CACHED, True),
    ({"only_if_cached": True}, LIVE, [], "hit", Rule.EXACT_HIT, False),
    ({"only_if_cached": True}, None, NEAR, "semantic_hit", Rule.SEMANTIC_HIT, False),
    ({"only_if_cached": True}, OLD, [], "miss", Rule.ONLY_IF_CACHED, True),
    ({"only_if_cached": True}, None, [], "miss", Rule.ONLY_IF_CACHED, True),
    ({"only_if_cached": True, "max_age": 49.0}, LIVE, [], "miss", Rule.ONLY_IF_CACHED, True),
    ({"max_age": 50.0}, LIVE, [], "hit", Rule.EXACT_HIT, False),  # "less than or equal"
    ({"max_age": 49.0}, LIVE, [], "miss", Rule.MAX_AGE, False),
    ({"max_age": 0.0}, NOW, [], "hit", Rule.EXACT_HIT, False),
    ({"max_age": 0.0}, LIVE, [], "miss", Rule.MAX_AGE, False),
    ({"max_age": 1000.0}, OLD, [], "miss", Rule.EXACT_EXPIRED, False),  # a caller cannot lengthen the TTL
    ({"max_age": 49.0}, None, NEAR, "miss", Rule.MAX_AGE, False),
    ({"max_age": 20.0}, LIVE, [candidate(1, 0.95, NOW - 10.0)], "semantic_hit", Rule.SEMANTIC_HIT, False),
    ({"max_age": 20.0}, None, [candidate(1, 0.97, LIVE), candidate(2, 0.91, NOW)], "semantic_hit", Rule.SEMANTIC_HIT, False),
    ({"min_fresh": 50.0}, LIVE, [], "hit", Rule.EXACT_HIT, False),
    ({"min_fresh": 51.0}, LIVE, [], "miss", Rule.MIN_FRESH, False),
    ({"min_fresh": 51.0}, None, NEAR, "miss", Rule.MIN_FRESH, False),
    ({"min_fresh": math.inf}, NOW, [], "miss", Rule.MIN_FRESH, False),
    ({"threshold": 0.96}, None, NEAR, "miss", Rule.BELOW_THRESHOLD, False),
    ({"threshold": 0.95}, None, NEAR, "semantic_hit", Rule.SEMANTIC_HIT, False),
    ({"threshold": 0.1}, None, [candidate(1, 0.8, LIVE)], "miss", Rule.BELOW_THRESHOLD, False),  # the operator's holds
    ({"threshold": 1.0}, None, [candidate(1, 1.0, LIVE)], "semantic_hit", Rule.SEMANTIC_HIT, False),
    ({"threshold": 1.0}, LIVE, [], "hit", Rule.EXACT_HIT, False),
    ({"max_error": 0.0}, None, NEAR, "miss", Rule.MISS, False),
    ({"max_error": 0.0}, LIVE, NEAR, "hit", Rule.EXACT_HIT, False),
    ({"max_error": 0.01}, None, NEAR, "semantic_hit", Rule.SEMANTIC_HIT, False),  # the acceptance has had its say
    ({"ttl": 10.0}, LIVE, [], "hit", Rule.EXACT_HIT, False),  # of what it stores, not of what is there
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "exact", "candidates", "outcome", "rule", "forbidden"), DIRECTED)
def test_a_callers_directives(
    wanted: dict[str, object], exact: float | None, candidates: list[Candidate], outcome: Outcome, rule: Rule, forbidden: bool
) -> None:
    decision = decide(asked(**wanted), own(exact), candidates, knobs=KNOBS, rules=RULES, now=NOW)
    assert (decision.outcome, decision.rule, decision.forbidden) == (outcome, rule, forbidden)
    assert (decision.entry is not None) == (outcome in ("hit", "semantic_hit"))


STALE: list[tuple[dict[str, object], float, list[Candidate], Outcome, Rule, bool]] = [
    # what is asked, seconds past the TTL, candidates, outcome, rule, whether it is refreshed
    ({}, 20.0, [], "stale", Rule.EXACT_STALE, True),
    ({}, 20.5, [], "miss", Rule.EXACT_EXPIRED, False),
    ({}, 20.0, NEAR, "stale", Rule.EXACT_STALE, True),  # the own answer, somewhat old, rather than another's
    ({}, 20.5, NEAR, "semantic_hit", Rule.SEMANTIC_HIT, False),
    ({"max_age": 1000.0}, 10.0, [], "miss", Rule.EXACT_EXPIRED, False),
    ({"min_fresh": 1.0}, 10.0, [], "miss", Rule.EXACT_EXPIRED, False),
    ({"only_if_cached": True}, 10.0, [], "stale", Rule.EXACT_STALE, False),  # nobody may ask the model on its behalf
    ({"no_cache": True}, 10.0, [], "refresh", Rule.NO_CACHE, False),
    ({"no_store": True}, 10.0, [], "bypass", Rule.NO_STORE, False),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "past", "candidates", "outcome", "rule", "revalidate"), STALE)
def test_stale_while_revalidate(
    wanted: dict[str, object], past: float, candidates: list[Candidate], outcome: Outcome, rule: Rule, revalidate: bool
) -> None:
    exact = own(NOW - 100.0 - past)
    decision = decide(asked(**wanted), exact, candidates, knobs=KNOBS, rules=STALE_RULES, now=NOW)
    assert (decision.outcome, decision.rule, decision.revalidate) == (outcome, rule, revalidate)
    if outcome == "stale":
        assert (decision.entry, decision.age, decision.ttl, decision.expired) == (exact, 100.0 + past, -past, True)


def test_an_answer_by_meaning_is_never_stale() -> None:
    near = [candidate(1, 0.99, NOW - 110.0)]
    assert decide(asked(), None, near, knobs=KNOBS, rules=STALE_RULES, now=NOW).rule is Rule.SEMANTIC_EXPIRED


ERRORS: list[tuple[dict[str, object], float | None, Outcome, Rule]] = [
    # what is asked, the own entry's age, outcome, rule
    ({}, 160.0, "stale", Rule.STALE_IF_ERROR),
    ({}, 160.5, "miss", Rule.EXACT_EXPIRED),
    ({}, 110.0, "stale", Rule.EXACT_STALE),
    ({}, 90.0, "hit", Rule.EXACT_HIT),  # another replica wrote it meanwhile
    ({}, None, "miss", Rule.MISS),
    ({"stale_if_error": 30.0}, 130.0, "stale", Rule.STALE_IF_ERROR),
    ({"stale_if_error": 30.0}, 131.0, "miss", Rule.EXACT_EXPIRED),
    ({"stale_if_error": 1000.0}, 161.0, "miss", Rule.EXACT_EXPIRED),  # a caller may only tighten
    ({"max_age": 1000.0}, 130.0, "miss", Rule.EXACT_EXPIRED),
    ({"max_age": 50.0}, 90.0, "miss", Rule.MAX_AGE),
    ({"min_fresh": 1.0}, 130.0, "miss", Rule.EXACT_EXPIRED),
    ({"no_cache": True}, 90.0, "refresh", Rule.NO_CACHE),
    ({"no_store": True}, 90.0, "bypass", Rule.NO_STORE),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "age", "outcome", "rule"), ERRORS)
def test_where_the_model_fails(wanted: dict[str, object], age: float | None, outcome: Outcome, rule: Rule) -> None:
    exact = own(None if age is None else NOW - age)
    decision = on_error(asked(**wanted), exact, knobs=KNOBS, rules=STALE_RULES, now=NOW)
    assert (decision.outcome, decision.rule, decision.revalidate) == (outcome, rule, False)
    assert decision.entry is (exact if outcome in ("hit", "stale") else None)


def test_without_the_operators_word_an_error_is_not_hidden_by_a_stale_answer() -> None:
    bound = asked(stale_if_error=1000.0)
    assert on_error(bound, own(OLD), knobs=KNOBS, rules=RULES, now=NOW).rule is Rule.EXACT_EXPIRED


def test_another_requests_entry_does_not_answer_an_error() -> None:
    other = entry(1, written_at=OLD)
    assert on_error(asked(), other, knobs=KNOBS, rules=STALE_RULES, now=NOW).rule is Rule.MISS


def test_a_refresh_reads_nothing() -> None:
    refreshing = Asked(request(0, "text"), refresh=True)
    decision = decide(refreshing, own(LIVE), NEAR, knobs=KNOBS, rules=STALE_RULES, now=NOW, flight=True)
    assert (decision.outcome, decision.rule, decision.entry) == ("refresh", Rule.REFRESH, None)


@pytest.mark.parametrize(
    ("wanted", "exact", "candidates", "outcome", "rule", "expired"),
    [
        ({}, None, [], "collapsed", Rule.COLLAPSED, False),
        ({}, OLD, [], "collapsed", Rule.COLLAPSED, True),
        ({}, None, [candidate(1, 0.95, LIVE, objection="order")], "collapsed", Rule.COLLAPSED, False),
        ({"max_age": 0.0}, LIVE, [], "collapsed", Rule.COLLAPSED, False),  # what comes is new
        ({}, LIVE, [], "hit", Rule.EXACT_HIT, False),
        ({}, None, NEAR, "semantic_hit", Rule.SEMANTIC_HIT, False),
        ({"only_if_cached": True}, None, [], "miss", Rule.ONLY_IF_CACHED, False),
        ({"no_cache": True}, None, [], "refresh", Rule.NO_CACHE, False),
        ({"no_store": True}, None, [], "bypass", Rule.NO_STORE, False),
    ],
)
def test_a_miss_under_way_is_joined_unless_an_answer_is_there_or_a_new_one_is_wanted(
    wanted: dict[str, object],
    exact: float | None,
    candidates: list[Candidate],
    outcome: Outcome,
    rule: Rule,
    expired: bool,
) -> None:
    decision = decide(asked(**wanted), own(exact), candidates, knobs=KNOBS, rules=RULES, now=NOW, flight=True)
    assert (decision.outcome, decision.rule, decision.expired) == (outcome, rule, expired)


@pytest.mark.parametrize(
    ("wanted", "written_at", "rule"),
    [
        ({}, LIVE, Rule.INCOMPLETE),
        ({}, OLD, Rule.EXACT_EXPIRED),  # not served within stale-while-revalidate either
        ({"max_age": 10.0}, LIVE, Rule.MAX_AGE),
        ({"only_if_cached": True}, LIVE, Rule.ONLY_IF_CACHED),
    ],
)
def test_an_interrupted_stream_is_a_miss(wanted: dict[str, object], written_at: float, rule: Rule) -> None:
    partial = own(written_at, complete=False)
    assert partial is not None
    decision = decide(asked(**wanted), partial, [], knobs=KNOBS, rules=STALE_RULES, now=NOW)
    assert (decision.outcome, decision.rule, decision.entry) == ("miss", rule, None)
    assert on_error(asked(**wanted), partial, knobs=KNOBS, rules=STALE_RULES, now=NOW).entry is None
    assert not is_live(partial, now=NOW, knobs=KNOBS, rules=RULES)
    assert is_fresh(partial, now=NOW, knobs=KNOBS, rules=RULES) is (written_at == LIVE)


def test_an_interrupted_stream_of_another_question_is_as_good_as_gone() -> None:
    partial = replace(candidate(1, 0.99, LIVE), entry=replace(entry(1, written_at=LIVE), complete=False))
    assert decide(asked(), None, [partial], knobs=KNOBS, rules=RULES, now=NOW).rule is Rule.MISS
    decision = decide(asked(), None, [partial, candidate(2, 0.91, LIVE)], knobs=KNOBS, rules=RULES, now=NOW)
    assert decision.rule is Rule.SEMANTIC_HIT


def test_an_entry_under_another_key_answers_nothing() -> None:
    assert decide(asked(), entry(7, written_at=LIVE), [], knobs=KNOBS, rules=RULES, now=NOW).rule is Rule.MISS
    swapped = replace(candidate(1, 0.99, LIVE), entry=entry(2, written_at=LIVE))
    assert decide(asked(), None, [swapped], knobs=KNOBS, rules=RULES, now=NOW).rule is Rule.MISS


def test_a_request_without_text_is_not_answered_by_meaning() -> None:
    wordless = Asked(Fingerprint(key(0), b"", ""))
    decision = decide(wordless, None, [candidate(1, 1.0, LIVE, b"")], knobs=KNOBS, rules=RULES, now=NOW)
    assert decision.entry is None


def test_every_rule_is_documented_and_has_a_case() -> None:
    documented = serving.policy.__doc__ or ""
    assert [rule for rule in Rule if f"\n``{rule}``" not in documented] == []
    covered = {row[2] for row in PLAIN} | {row[4] for row in DIRECTED} | {row[4] for row in STALE} | {row[3] for row in ERRORS}
    assert set(Rule) - covered == {Rule.REFRESH, Rule.COLLAPSED, Rule.INCOMPLETE}  # which have tests of their own


def test_a_hit_tells_its_age_its_rest_and_expected_staleness() -> None:
    decision = decide(Asked(request(0)), entry(0, written_at=NOW - 50.0), [], knobs=KNOBS, rules=RULES, now=NOW)
    assert (decision.age, decision.ttl, decision.stale, decision.similarity) == (50.0, 50.0, 0.5, 1.0)
    future = decide(Asked(request(0)), entry(0, written_at=NOW + 5.0), [], knobs=KNOBS, rules=RULES, now=NOW)
    assert (future.age, future.stale) == (0.0, 0.0)
    forever = decide(Asked(request(0)), entry(0), [], knobs=Knobs(1, math.inf), rules=RULES, now=NOW)
    assert forever.ttl == math.inf


def test_a_semantic_hit_tells_its_similarity() -> None:
    decision = decide(asked(), None, [candidate(1, 0.93, NOW - 100.0)], knobs=KNOBS, rules=RULES, now=NOW)
    assert (decision.age, decision.stale, decision.similarity) == (100.0, 0.75, 0.93)
    rounded = decide(asked(), None, [candidate(1, 1.0000001, LIVE)], knobs=KNOBS, rules=RULES, now=NOW)
    assert rounded.similarity == 1.0


def test_answers_that_never_become_outdated_are_never_stale() -> None:
    assert staleness(1e9, math.inf) == 0.0


def test_a_shorter_ttl_acts_on_what_is_already_stored() -> None:
    stored = entry(0, written_at=NOW - 50.0)
    assert decide(Asked(request(0)), stored, [], knobs=Knobs(1, 49.0), rules=RULES, now=NOW).rule == Rule.EXACT_EXPIRED
    assert decide(Asked(request(0)), stored, [], knobs=Knobs(1, math.inf), rules=RULES, now=NOW).rule == Rule.EXACT_HIT


@pytest.mark.parametrize(
    ("of_arm", "of_entry", "lives"),
    [
        (100.0, math.inf, 100.0),
        (100.0, 30.0, 30.0),
        (100.0, 300.0, 100.0),
        (math.inf, 30.0, 30.0),
        (math.inf, math.inf, math.inf),
    ],
)
def test_an_entry_lives_for_the_shorter_of_its_own_ttl_and_the_arms(of_arm: float, of_entry: float, lives: float) -> None:
    assert lifetime(replace(entry(0), ttl=of_entry), knobs=Knobs(1, of_arm), rules=RULES) == lives


def test_a_ttl_of_none_is_really_none() -> None:
    assert is_live(entry(0), now=1e12, knobs=Knobs(1, math.inf), rules=CacheRules())


@pytest.mark.parametrize(
    ("wanted", "least", "stored"), [(None, 60.0, math.inf), (30.0, 0.0, 30.0), (30.0, 60.0, 60.0), (0.0, 0.0, 0.0)]
)
def test_the_ttl_that_a_caller_asks_for_is_clamped(wanted: float | None, least: float, stored: float) -> None:
    assert entry_ttl(Directives(ttl=wanted), replace(RULES, min_ttl=least)) == stored


@pytest.mark.parametrize(("extends", "live"), [(False, False), (True, True)])
def test_a_hit_extends_an_entrys_life_only_if_that_is_configured(extends: bool, live: bool) -> None:
    touched = replace(entry(0, written_at=NOW - 150.0), renewed=80.0)  # a hit 70 seconds ago
    rules = replace(RULES, hit_extends_ttl=extends)
    assert is_live(touched, now=NOW, knobs=KNOBS, rules=rules) is live
    decision = decide(asked(), touched, [], knobs=KNOBS, rules=rules, now=NOW)
    assert (decision.outcome, decision.age, decision.ttl) == (("hit", 150.0, 30.0) if extends else ("miss", 0.0, 0.0))
    # its age is that of the answer, whatever extended its life
    assert decide(asked(max_age=140.0), touched, [], knobs=KNOBS, rules=rules, now=NOW).entry is None


@given(number=st.integers(0, 10_000), ttl=st.floats(1, 1e6), spread=st.floats(0, 0.9))
def test_each_key_expires_at_its_own_moment_within_the_jitter(number: int, ttl: float, spread: float) -> None:
    effective = effective_ttl(key(number), ttl, spread)
    assert effective == pytest.approx(ttl * ttl_jitter(key64(key(number)), spread))
    assert ttl * (1 - spread) * (1 - 1e-12) <= effective <= ttl
    rules, knobs = CacheRules(ttl_jitter=spread), Knobs(1, ttl)
    assert is_live(entry(number), now=effective, knobs=knobs, rules=rules)
    assert not is_live(entry(number), now=effective * (1 + 1e-9) + 1e-9, knobs=knobs, rules=rules)


def test_an_entry_near_its_end_is_not_live_for_a_refresh_ahead() -> None:
    for age, live in ((79.0, True), (81.0, False)):
        assert is_live(entry(0, written_at=NOW - age), now=NOW, knobs=KNOBS, rules=RULES, ahead=0.2) is live


def test_only_near_neighbours_of_the_same_context_are_worth_fetching_the_nearest_first() -> None:
    near = [
        candidate(1, 0.91, None),
        candidate(2, 0.99, None, OTHER),
        candidate(3, 0.95, None),
        candidate(4, 0.89, None),
        candidate(5, 0.99, None, objection="acceptance"),
    ]
    assert [found.key for found in worth_fetching(asked(), near, RULES)] == [key(3), key(1)]
    assert [found.key for found in worth_fetching(asked(threshold=0.92), near, RULES)] == [key(3)]
    for wanted in ({"max_error": 0.0}, {"no_cache": True}, {"no_store": True}):
        assert worth_fetching(asked(**wanted), near, RULES) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l1_share", 1.5),
        ("ttl_jitter", 1.0),
        ("staleness_half_life", 0.0),
        ("semantic_threshold", 2.0),
        ("l1_share", math.nan),
        ("stale_while_revalidate", -1.0),
        ("stale_if_error", math.nan),
        ("min_ttl", -0.1),
    ],
)
def test_rules_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected"):
        CacheRules(**{name: value})  # type: ignore[arg-type]


# -- what holds whatever is asked ----------------------------------------------------------------------------------------------

seconds = st.sampled_from([0.0, 1.0, 10.0, 49.0, 50.0, 51.0, 90.0, 100.0, 150.0]) | st.floats(0.0, 200.0)
cosines = st.sampled_from([0.0, 0.5, 0.89, 0.9, 0.95, 1.0]) | st.floats(0.0, 1.0)
directives = st.builds(
    Directives,
    no_store=st.booleans(),
    no_cache=st.booleans(),
    only_if_cached=st.booleans(),
    max_age=st.none() | seconds,
    min_fresh=st.just(0.0) | seconds,
    stale_if_error=st.none() | seconds,
    threshold=st.none() | cosines,
    max_error=st.none() | st.sampled_from([0.0, 0.01, 1.0]),
)
rule_sets = st.builds(
    CacheRules,
    ttl_jitter=st.sampled_from([0.0, 0.3]),
    semantic_threshold=cosines,
    stale_while_revalidate=st.just(0.0) | seconds,
    stale_if_error=st.just(0.0) | seconds,
    hit_extends_ttl=st.booleans(),
)
knob_sets = st.builds(Knobs, st.just(1000), st.just(math.inf) | st.floats(1.0, 200.0))


@st.composite
def entries(draw: st.DrawFn, numbers: st.SearchStrategy[int]) -> Entry:
    return replace(
        entry(draw(numbers), written_at=NOW - draw(seconds)),
        complete=draw(st.booleans()),
        ttl=draw(st.just(math.inf) | seconds),
        renewed=draw(st.just(0.0) | seconds),
    )


@st.composite
def candidates_near(draw: st.DrawFn) -> Candidate:
    number = draw(st.integers(1, 3))
    return Candidate(
        key(number),
        draw(st.sampled_from([CONTEXT, OTHER])),
        draw(cosines),
        draw(st.none() | entries(st.sampled_from([number, number, 4]))),
        draw(st.sampled_from(["", "", "numbers"])),
    )


exacts = st.none() | entries(st.sampled_from([0, 0, 9]))
collections = st.lists(candidates_near(), max_size=3)


def tightest(one: Directives, other: Directives) -> Directives:
    """What both ask for together."""

    def least(a: float | None, b: float | None) -> float | None:
        return min((value for value in (a, b) if value is not None), default=None)

    return Directives(
        no_store=one.no_store or other.no_store,
        no_cache=one.no_cache or other.no_cache,
        only_if_cached=one.only_if_cached or other.only_if_cached,
        max_age=least(one.max_age, other.max_age),
        min_fresh=max(one.min_fresh, other.min_fresh),
        stale_if_error=least(one.stale_if_error, other.stale_if_error),
        threshold=max((value for value in (one.threshold, other.threshold) if value is not None), default=None),
        max_error=least(one.max_error, other.max_error),
    )


@settings(max_examples=100)
@given(directives, exacts, collections, knob_sets, rule_sets, st.booleans())
def test_what_is_served_is_complete_within_its_time_and_the_requests_own_or_allowed_by_meaning(
    wanted: Directives, exact: Entry | None, near: list[Candidate], knobs: Knobs, rules: CacheRules, flight: bool
) -> None:
    question = Asked(request(0, "text"), wanted)
    for decision in (
        decide(question, exact, near, knobs=knobs, rules=rules, now=NOW, flight=flight),
        on_error(question, exact, knobs=knobs, rules=rules, now=NOW),
    ):
        served = decision.entry
        assert (served is not None) == (decision.outcome in ("hit", "semantic_hit", "stale"))
        if served is None:
            continue
        assert served.complete
        assert not wanted.no_store
        assert not wanted.no_cache
        assert wanted.max_age is None or NOW - served.written_at <= wanted.max_age
        live = is_live(served, now=NOW, knobs=knobs, rules=rules)
        assert live == (decision.outcome != "stale") == (decision.ttl >= 0.0)
        assert decision.ttl >= wanted.min_fresh or wanted.min_fresh == 0.0
        if decision.outcome == "stale":
            window = rules.stale_if_error if decision.rule is Rule.STALE_IF_ERROR else rules.stale_while_revalidate
            assert -decision.ttl <= window
            assert wanted.max_age is None
        if decision.outcome == "semantic_hit":
            assert wanted.max_error != 0.0
            assert any(
                found.entry is served
                and found.key == served.key
                and found.context == question.fp.context
                and not found.objection
                and found.similarity >= max(rules.semantic_threshold, wanted.threshold or 0.0)
                for found in near
            )
        else:
            assert served.key == question.fp.key


@settings(max_examples=100)
@given(directives, directives, exacts, collections, knob_sets, rule_sets, st.booleans())
def test_asking_for_more_never_brings_an_answer_that_was_not_there(
    wanted: Directives,
    more: Directives,
    exact: Entry | None,
    near: list[Candidate],
    knobs: Knobs,
    rules: CacheRules,
    flight: bool,
) -> None:
    loose, strict = Asked(request(0, "text"), wanted), Asked(request(0, "text"), tightest(wanted, more))
    before = decide(loose, exact, near, knobs=knobs, rules=rules, now=NOW, flight=flight)
    after = decide(strict, exact, near, knobs=knobs, rules=rules, now=NOW, flight=flight)
    if before.entry is None:
        assert after.entry is None
        assert after.outcome != "collapsed" or before.outcome == "collapsed"
    assert after.forbidden or not before.forbidden
    failed, failed_strictly = (on_error(question, exact, knobs=knobs, rules=rules, now=NOW) for question in (loose, strict))
    if failed.entry is None:
        assert failed_strictly.entry is None


@settings(max_examples=60)
@given(directives, exacts, collections, knob_sets, rule_sets)
def test_who_wants_only_what_is_cached_never_costs_a_call_of_the_model(
    wanted: Directives, exact: Entry | None, near: list[Candidate], knobs: Knobs, rules: CacheRules
) -> None:
    question = Asked(request(0, "text"), replace(wanted, only_if_cached=True))
    decision = decide(question, exact, near, knobs=knobs, rules=rules, now=NOW, flight=True)
    assert not decision.revalidate
    assert decision.forbidden == (decision.entry is None)


@settings(max_examples=60)
@given(directives, exacts, collections, knob_sets, rule_sets)
def test_neither_the_order_of_the_candidates_nor_the_answers_form_matters(
    wanted: Directives, exact: Entry | None, near: list[Candidate], knobs: Knobs, rules: CacheRules
) -> None:
    distinct = list({found.similarity: found for found in near}.values())  # equals have no order of their own
    question = Asked(request(0, "text"), wanted)
    decision = decide(question, exact, distinct, knobs=knobs, rules=rules, now=NOW)
    assert decision == decide(
        replace(question, stream=True, usage=True), exact, distinct[::-1], knobs=knobs, rules=rules, now=NOW
    )
