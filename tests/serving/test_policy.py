"""The decision core, rule by rule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.keys import key64, ttl_jitter
from serving.knobs import Knobs
from serving.policy import Asked, CacheRules, Candidate, Rule, decide, effective_ttl, is_live, staleness, worth_fetching
from tests.serving.entries import CONTEXT, entry, key, request

KNOBS = Knobs(1000, 100.0)
RULES = CacheRules(ttl_jitter=0.0, staleness_half_life=50.0, semantic_threshold=0.9)
NOW = 1000.0
LIVE, OLD = NOW - 50.0, NOW - 101.0
OTHER = b"o" * 32


def candidate(number: int, similarity: float, written_at: float | None, context: bytes = CONTEXT) -> Candidate:
    return Candidate(key(number), context, similarity, None if written_at is None else entry(number, written_at=written_at))


@pytest.mark.parametrize(
    ("exact", "candidates", "rule", "answer", "expired"),
    [
        (LIVE, [], Rule.EXACT_HIT, 0, False),
        (NOW - 100.0, [], Rule.EXACT_HIT, 0, False),  # expired only after the TTL
        (NOW + 5.0, [], Rule.EXACT_HIT, 0, False),  # another replica's clock is ahead
        (LIVE, [candidate(1, 0.99, LIVE)], Rule.EXACT_HIT, 0, False),
        (OLD, [], Rule.EXACT_EXPIRED, None, True),
        (OLD, [candidate(1, 0.95, LIVE)], Rule.SEMANTIC_HIT, 1, True),
        (OLD, [candidate(1, 0.95, OLD)], Rule.EXACT_EXPIRED, None, True),
        (OLD, [candidate(1, 0.95, LIVE, OTHER)], Rule.EXACT_EXPIRED, None, True),
        (None, [candidate(1, 0.9, LIVE)], Rule.SEMANTIC_HIT, 1, False),
        (None, [candidate(1, 0.91, LIVE), candidate(2, 0.97, LIVE)], Rule.SEMANTIC_HIT, 2, False),
        (None, [candidate(1, 0.97, OLD), candidate(2, 0.91, LIVE)], Rule.SEMANTIC_HIT, 2, False),
        (None, [candidate(1, 0.97, None), candidate(2, 0.91, LIVE)], Rule.SEMANTIC_HIT, 2, False),
        (None, [candidate(1, 0.99, LIVE, OTHER), candidate(2, 0.91, LIVE)], Rule.SEMANTIC_HIT, 2, False),
        (None, [candidate(1, 0.95, OLD)], Rule.SEMANTIC_EXPIRED, None, True),
        (None, [candidate(1, 0.95, OLD), candidate(2, 0.99, LIVE, OTHER)], Rule.SEMANTIC_EXPIRED, None, True),
        (None, [candidate(1, 0.99, None, OTHER)], Rule.CONTEXT_DIFFERS, None, False),
        (None, [candidate(1, 0.99, None, OTHER), candidate(2, 0.5, None)], Rule.CONTEXT_DIFFERS, None, False),
        (None, [candidate(1, 0.89999, LIVE)], Rule.BELOW_THRESHOLD, None, False),
        (None, [candidate(1, 0.5, LIVE, OTHER)], Rule.BELOW_THRESHOLD, None, False),
        (None, [candidate(1, 0.95, None)], Rule.MISS, None, False),  # gone meanwhile
        (None, [], Rule.MISS, None, False),
    ],
)
def test_rules(exact: float | None, candidates: list[Candidate], rule: Rule, answer: int | None, expired: bool) -> None:
    own = None if exact is None else entry(0, written_at=exact)
    decision = decide(Asked(request(0, "text")), own, candidates, knobs=KNOBS, rules=RULES, now=NOW)
    assert (decision.rule, decision.expired) == (rule, expired)
    if answer is None:
        assert (decision.outcome, decision.entry, decision.age, decision.stale, decision.similarity) == ("miss", None, 0, 0, 0)
    else:
        assert decision.entry is not None
        assert decision.entry.key == key(answer)
        assert decision.outcome == ("hit" if answer == 0 else "semantic_hit")


def test_a_hit_tells_its_age_and_expected_staleness() -> None:
    decision = decide(Asked(request(0)), entry(0, written_at=NOW - 50.0), [], knobs=KNOBS, rules=RULES, now=NOW)
    assert (decision.age, decision.stale, decision.similarity) == (50.0, 0.5, 1.0)
    future = decide(Asked(request(0)), entry(0, written_at=NOW + 5.0), [], knobs=KNOBS, rules=RULES, now=NOW)
    assert (future.age, future.stale) == (0.0, 0.0)


def test_a_semantic_hit_tells_its_similarity() -> None:
    decision = decide(Asked(request(0, "t")), None, [candidate(1, 0.93, NOW - 100.0)], knobs=KNOBS, rules=RULES, now=NOW)
    assert (decision.age, decision.stale, decision.similarity) == (100.0, 0.75, 0.93)


def test_answers_that_never_become_outdated_are_never_stale() -> None:
    assert staleness(1e9, math.inf) == 0.0


def test_a_shorter_ttl_acts_on_what_is_already_stored() -> None:
    stored = entry(0, written_at=NOW - 50.0)
    assert decide(Asked(request(0)), stored, [], knobs=Knobs(1, 49.0), rules=RULES, now=NOW).rule == Rule.EXACT_EXPIRED
    assert decide(Asked(request(0)), stored, [], knobs=Knobs(1, math.inf), rules=RULES, now=NOW).rule == Rule.EXACT_HIT


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
    near = [candidate(1, 0.91, None), candidate(2, 0.99, None, OTHER), candidate(3, 0.95, None), candidate(4, 0.89, None)]
    assert [found.key for found in worth_fetching(Asked(request(0, "t")), near, RULES)] == [key(3), key(1)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("l1_share", 1.5), ("ttl_jitter", 1.0), ("staleness_half_life", 0.0), ("semantic_threshold", 2.0), ("l1_share", math.nan)],
)
def test_rules_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected"):
        CacheRules(**{name: value})
