"""The decision core: request, candidate entries, knobs and clock in; a decision and the rule that made it out. No I/O.

The cache collects candidates and carries decisions out; what an answer may be served for is decided here alone. The rules, in the
order in which they are tried:

=====================  ============  ==========================================================================================
rule                   outcome       fires when
=====================  ============  ==========================================================================================
``only_if_cached``     miss          the caller forbids to ask the model, and nothing below may be served: ``forbidden`` is set.
                                     RFC 9111, 5.2.1.7: "respond with [...] a 504 (Gateway Timeout) status code"
``no_store``           bypass        the caller wants neither read nor written (:mod:`serving.directives`)
``no_cache``           refresh       the caller wants a new answer, which is stored. 5.2.1.4: "the client prefers a stored
                                     response not be used to satisfy the request without successful validation"
``refresh``            refresh       warm-up or revalidation asks, not a client
``exact_hit``          hit           the entry under the request's own key is live and meets the caller's directives
``exact_stale``        stale         it is past its TTL by no more than ``stale_while_revalidate``: served while it is refreshed.
                                     RFC 5861, 3: "caches MAY serve the response in which it appears after it becomes stale, up
                                     to the indicated number of seconds". Not for a caller with ``max-age`` (5.2.1.1: "does not
                                     wish to receive a stale response") or ``min-fresh``. Answers by meaning are never served
                                     stale: one approximation at a time
``semantic_hit``       semantic_hit  a live entry of the same context is similar enough, nothing objects, and it meets the
                                     caller's directives; the most similar one is served
``collapsed``          collapsed     the same miss is under way: its answer is waited for. RFC 9111, 4: "A cache can use a
                                     response that is stored or storable to satisfy multiple requests"
``incomplete``         miss          the request's own entry would do, but is a stream that was interrupted; it may be continued
``exact_expired``      miss          the request's own entry is past its TTL
``max_age``            miss          the own or the most similar entry is live, but older than the caller's ``max-age``
``min_fresh``          miss          it is live, but for less than the caller's ``min-fresh``
``objection``          miss          the most similar entry was refused by a guard or by its acceptance: ``objection`` names it
``semantic_expired``   miss          the most similar entry is past its TTL
``context_differs``    miss          an entry is similar enough, but was the answer to another context (system prompt, model, ...)
``below_threshold``    miss          the nearest entries are not similar enough
``miss``               miss          there was no candidate at all
``stale_if_error``     stale         only :func:`on_error`: the model failed, and the own entry is past its TTL by no more than
                                     ``stale_if_error``. RFC 5861, 4: "when an error is encountered, a cached stale response MAY
                                     be used to satisfy the request, regardless of other freshness information"
=====================  ============  ==========================================================================================

RFC 9111, 4.2.4, is why staleness needs the operator's word: "A cache MUST NOT generate a stale response unless it is disconnected
or doing so is explicitly permitted by the client or origin server (e.g., by [...] configuration in accordance with an out-of-band
contract)".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from serving.directives import NO_DIRECTIVES, Directives
from serving.keys import Fingerprint, key64, ttl_jitter
from serving.knobs import Knobs
from serving.tiers.base import Entry

Outcome = Literal["hit", "semantic_hit", "stale", "miss", "bypass", "collapsed", "refresh"]

ERROR_STATUSES = frozenset({500, 502, 503, 504})
"""RFC 5861, 4: "any situation that would result in a 500, 502, 503, or 504 HTTP response status code being returned"."""


class Rule(StrEnum):
    """The rule that made a decision; the module's table says when each fires."""

    ONLY_IF_CACHED = "only_if_cached"
    NO_STORE = "no_store"
    NO_CACHE = "no_cache"
    REFRESH = "refresh"
    EXACT_HIT = "exact_hit"
    EXACT_STALE = "exact_stale"
    SEMANTIC_HIT = "semantic_hit"
    COLLAPSED = "collapsed"
    INCOMPLETE = "incomplete"
    EXACT_EXPIRED = "exact_expired"
    MAX_AGE = "max_age"
    MIN_FRESH = "min_fresh"
    OBJECTION = "objection"
    SEMANTIC_EXPIRED = "semantic_expired"
    CONTEXT_DIFFERS = "context_differs"
    BELOW_THRESHOLD = "below_threshold"
    MISS = "miss"
    STALE_IF_ERROR = "stale_if_error"


@dataclass(frozen=True, slots=True)
class CacheRules:
    """Settings of the cache that are not tuned at run time.

    Attributes:
        l1_share: Share of an arm's budget that may be resident in the memory tiers of all replicas together, 0..1.
        ttl_jitter: Width of the per-key jitter on the TTL, 0..1 (:func:`serving.keys.ttl_jitter`).
        staleness_half_life: Seconds after which an answer is outdated with probability 1/2; inf: answers never become outdated.
        semantic_threshold: Least cosine similarity at which an answer stands in for another, -1..1.
        stale_while_revalidate: Seconds past its TTL that an entry is still served while it is refreshed, >= 0.
        stale_if_error: Seconds past its TTL that an entry is still served where the model fails, >= 0.
        hit_extends_ttl: Whether a hit begins an entry's life anew.
        min_ttl: Least TTL that a caller may ask for its entry, seconds, >= 0.

    Raises:
        ValueError: If a value is out of its range.
    """

    l1_share: float = 0.25
    ttl_jitter: float = 0.1
    staleness_half_life: float = math.inf
    semantic_threshold: float = 0.9
    stale_while_revalidate: float = 0.0
    stale_if_error: float = 0.0
    hit_extends_ttl: bool = False
    min_ttl: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.l1_share <= 1.0:
            raise ValueError(f"l1_share: expected a share between 0 and 1, got {self.l1_share!r}")
        if not 0.0 <= self.ttl_jitter < 1.0:
            raise ValueError(f"ttl_jitter: expected a width from 0 to below 1, got {self.ttl_jitter!r}")
        if not self.staleness_half_life > 0:
            raise ValueError(f"staleness_half_life: expected seconds > 0 (or inf), got {self.staleness_half_life!r}")
        if not -1.0 <= self.semantic_threshold <= 1.0:
            raise ValueError(f"semantic_threshold: expected a cosine between -1 and 1, got {self.semantic_threshold!r}")
        for name in ("stale_while_revalidate", "stale_if_error", "min_ttl"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}: expected seconds >= 0, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the core sees it.

    Attributes:
        fp: Its identity.
        directives: What its caller asks of the cache.
        stream: Whether it wants an event stream. Form only: a stream and its JSON are one entry.
        usage: Whether its stream is to end with the usage. Form only, too.
        refresh: Whether no client waits for it: its answer is to replace what is stored.
        temperature: As given; None where it is absent.
        choices: How many answers it asks for: ``n`` times its prompts, or the inputs of an embeddings request; >= 1.
    """

    fp: Fingerprint
    directives: Directives = NO_DIRECTIVES
    stream: bool = False
    usage: bool = False
    refresh: bool = False
    temperature: float | None = None
    choices: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that may answer by meaning.

    Attributes:
        key: The entry's key.
        context: The context that it answered.
        similarity: Cosine between its text and the request's, -1..1.
        entry: The entry; None where it was not fetched (it is not worth it) or is gone.
        objection: Name of the check that refused it: a guard's, or ``acceptance``; ``""``: none did.
    """

    key: bytes
    context: bytes
    similarity: float
    entry: Entry | None = None
    objection: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to answer with, and why.

    Attributes:
        outcome: How the request is answered.
        rule: The rule that fired.
        entry: The entry to answer with; None unless the outcome is ``hit``, ``semantic_hit`` or ``stale``.
        age: Seconds since its answer was made, >= 0; 0 without an entry.
        stale: Probability that it is outdated, 0..1: ``1 - 0.5 ** (age / half-life)``; 0 without an entry.
        similarity: 1 for the request's own entry, the cosine for another's, 0 without one.
        expired: Whether an entry that would have answered was past its TTL.
        ttl: Seconds that it has still to live; negative where it is stale, inf where it never expires; 0 without an entry.
        revalidate: Whether it is to be refreshed in the background.
        objection: What refused the most similar entry, where that is why it is a miss.
        forbidden: Whether the caller forbids to ask the model: the answer is 504.
    """

    outcome: Outcome
    rule: Rule
    entry: Entry | None = None
    age: float = 0.0
    stale: float = 0.0
    similarity: float = 0.0
    expired: bool = False
    ttl: float = 0.0
    revalidate: bool = False
    objection: str = ""
    forbidden: bool = False


def effective_ttl(key: bytes, ttl: float, jitter: float) -> float:
    """Return the TTL of one key, seconds: ``ttl`` times the key's own jitter, so that not all of one moment expires at once."""
    return ttl * ttl_jitter(key64(key), jitter) if jitter else ttl


def entry_ttl(directives: Directives, rules: CacheRules) -> float:
    """Return the TTL to store an answer with, seconds: what its caller asked for, but at least ``min_ttl``; inf: nothing asked.

    The arm's TTL is the upper bound. It is applied when the entry is read (:func:`lifetime`), since it may change meanwhile.
    """
    return math.inf if directives.ttl is None else max(directives.ttl, rules.min_ttl)


def lifetime(entry: Entry, *, knobs: Knobs, rules: CacheRules) -> float:
    """Return how long an entry lives, seconds: the arm's TTL with the key's jitter, or the entry's own where that is shorter."""
    return min(effective_ttl(entry.key, knobs.ttl, rules.ttl_jitter), entry.ttl)


def is_live(entry: Entry, *, now: float, knobs: Knobs, rules: CacheRules, ahead: float = 0.0) -> bool:
    """Whether an entry may be served, decided at read time: a change of the TTL acts on what is already stored.

    Args:
        entry: The entry; its head (without body) is enough.
        now: The clock, seconds.
        knobs: The arm's knobs.
        rules: The cache's settings.
        ahead: Counts an entry within the last ``ahead`` share (0..1) of its TTL as no longer live: to refresh it in time.
    """
    return entry.complete and is_fresh(entry, now=now, knobs=knobs, rules=rules, ahead=ahead)


def is_fresh(entry: Entry, *, now: float, knobs: Knobs, rules: CacheRules, ahead: float = 0.0) -> bool:
    """Whether an entry is within its TTL, complete or not: whether it is worth keeping, or continuing. See :func:`is_live`."""
    return now - _born(entry, rules) <= lifetime(entry, knobs=knobs, rules=rules) * (1.0 - ahead)


def staleness(age: float, half_life: float) -> float:
    """Return the probability that an answer of this age (seconds) is outdated, 0..1."""
    return float(1.0 - 0.5 ** (max(age, 0.0) / half_life))


def worth_fetching(asked: Asked, neighbours: Sequence[Candidate], rules: CacheRules) -> list[Candidate]:
    """Return the neighbours that could answer the request if their entries are live, the most similar first."""
    return [neighbour for neighbour in _near_enough(asked, neighbours, rules) if not neighbour.objection]


def decide(
    asked: Asked,
    exact: Entry | None,
    candidates: Sequence[Candidate],
    *,
    knobs: Knobs,
    rules: CacheRules,
    now: float,
    flight: bool = False,
) -> Decision:
    """Decide what answers the request, from what has been collected so far.

    It is asked after each stage (memory, store, meaning, flights): a decision with an entry, a bypass or a refresh is final, a
    miss is final only after the last stage.

    Args:
        asked: The request.
        exact: The entry under the request's own key, expired or not.
        candidates: Entries near in meaning, in any order, of any context.
        knobs: The arm's knobs.
        rules: The cache's settings.
        now: The clock, seconds, the same as the entries' ``written_at``.
        flight: Whether the same miss is under way. Only for the last stage: a stored answer is better than a wait.
    """
    directives = asked.directives
    if directives.no_store:
        return _without_reading("bypass", Rule.NO_STORE, directives)
    if directives.no_cache:
        return _without_reading("refresh", Rule.NO_CACHE, directives)
    if asked.refresh:
        return _without_reading("refresh", Rule.REFRESH, directives)

    own = exact if exact is not None and exact.key == asked.fp.key else None
    reason: Rule | None = None
    expired = False
    if own is not None:
        left = _left(own, knobs=knobs, rules=rules, now=now)
        reason = _unfit(own, left, directives, now=now)
        if reason is None:
            return _serve("hit", Rule.EXACT_HIT, own, left, rules=rules, now=now)
        if reason is Rule.EXACT_EXPIRED:
            expired = True
            if _may_be_stale(own, left, rules.stale_while_revalidate, directives):
                stale = _serve("stale", Rule.EXACT_STALE, own, left, expired=True, rules=rules, now=now)
                return replace(stale, revalidate=not directives.only_if_cached)

    near = _near_enough(asked, candidates, rules)
    objection = ""
    for candidate in near:
        unfit, entry = Rule.OBJECTION if candidate.objection else None, candidate.entry
        if unfit is None:
            if entry is None or entry.key != candidate.key:
                continue
            left = _left(entry, knobs=knobs, rules=rules, now=now)
            unfit = _unfit(entry, left, directives, now=now)
            if unfit is Rule.INCOMPLETE:
                continue
            if unfit is None:
                similarity = min(candidate.similarity, 1.0)
                return _serve("semantic_hit", Rule.SEMANTIC_HIT, entry, left, similarity, expired=expired, rules=rules, now=now)
        if reason is None:
            reason = Rule.SEMANTIC_EXPIRED if unfit is Rule.EXACT_EXPIRED else unfit
            objection = candidate.objection
    expired = expired or reason is Rule.SEMANTIC_EXPIRED

    if directives.only_if_cached:
        return Decision("miss", Rule.ONLY_IF_CACHED, expired=expired, forbidden=True)
    if flight:
        return Decision("collapsed", Rule.COLLAPSED, expired=expired)
    if reason is None:
        reason = _nothing_near(candidates, near, asked, rules)
    return Decision("miss", reason, expired=expired, objection=objection)


def on_error(asked: Asked, exact: Entry | None, *, knobs: Knobs, rules: CacheRules, now: float) -> Decision:
    """Decide what answers a request for which the model failed (:data:`ERROR_STATUSES`, or no answer at all).

    The own entry is served if it may be (another replica may have written it meanwhile), or if it is within ``stale_if_error``
    of its TTL. Not where the caller wanted a new answer, or none that is stale. Without an entry the error is the answer.

    Args:
        asked: The request.
        exact: The entry under the request's own key, expired or not.
        knobs: The arm's knobs.
        rules: The cache's settings.
        now: The clock, seconds.
    """
    decision = decide(asked, exact, (), knobs=knobs, rules=rules, now=now)
    if decision.entry is not None:
        return replace(decision, revalidate=False)  # the model has just failed
    if decision.rule is not Rule.EXACT_EXPIRED or exact is None:
        return decision
    bound = asked.directives.stale_if_error
    window = rules.stale_if_error if bound is None else min(rules.stale_if_error, bound)
    left = _left(exact, knobs=knobs, rules=rules, now=now)
    if not _may_be_stale(exact, left, window, asked.directives):
        return decision
    return _serve("stale", Rule.STALE_IF_ERROR, exact, left, expired=True, rules=rules, now=now)


def _without_reading(outcome: Outcome, rule: Rule, directives: Directives) -> Decision:
    if directives.only_if_cached:
        return Decision("miss", Rule.ONLY_IF_CACHED, forbidden=True)
    return Decision(outcome, rule)


def _unfit(entry: Entry, left: float, directives: Directives, *, now: float) -> Rule | None:
    """Why an entry with ``left`` seconds to live may not be served as fresh; None: it may."""
    if not left >= 0.0:
        return Rule.EXACT_EXPIRED
    if directives.max_age is not None and now - entry.written_at > directives.max_age:
        return Rule.MAX_AGE
    if left < directives.min_fresh:
        return Rule.MIN_FRESH
    return None if entry.complete else Rule.INCOMPLETE


def _may_be_stale(entry: Entry, left: float, window: float, directives: Directives) -> bool:
    """Whether an expired entry may be served, ``window`` seconds past its TTL."""
    wants_fresh = directives.max_age is not None or directives.min_fresh > 0.0
    return entry.complete and not wants_fresh and -left <= window


def _near_enough(asked: Asked, candidates: Sequence[Candidate], rules: CacheRules) -> list[Candidate]:
    if not candidates or not asked.fp.text or not asked.directives.by_meaning:
        return []
    least = _threshold(asked, rules)
    near = [found for found in candidates if found.context == asked.fp.context and found.similarity >= least]
    return sorted(near, key=lambda found: -found.similarity)


def _threshold(asked: Asked, rules: CacheRules) -> float:
    asked_for = asked.directives.threshold
    return rules.semantic_threshold if asked_for is None else max(rules.semantic_threshold, asked_for)


def _nothing_near(candidates: Sequence[Candidate], near: Sequence[Candidate], asked: Asked, rules: CacheRules) -> Rule:
    others = [candidate for candidate in candidates if candidate not in near]
    if not others or not asked.directives.by_meaning:
        return Rule.MISS
    least = _threshold(asked, rules)
    return Rule.CONTEXT_DIFFERS if any(candidate.similarity >= least for candidate in others) else Rule.BELOW_THRESHOLD


def _born(entry: Entry, rules: CacheRules) -> float:
    return entry.written_at + entry.renewed if rules.hit_extends_ttl else entry.written_at


def _left(entry: Entry, *, knobs: Knobs, rules: CacheRules, now: float) -> float:
    """Seconds that the entry has still to live; negative where it is expired."""
    return lifetime(entry, knobs=knobs, rules=rules) - (now - _born(entry, rules))


def _serve(
    outcome: Outcome,
    rule: Rule,
    entry: Entry,
    left: float,
    similarity: float = 1.0,
    *,
    expired: bool = False,
    rules: CacheRules,
    now: float,
) -> Decision:
    age = max(now - entry.written_at, 0.0)
    return Decision(outcome, rule, entry, age, staleness(age, rules.staleness_half_life), similarity, expired, left)
