"""The decision core: request, candidate entries, knobs and clock in; a decision and the rule that made it out. No I/O.

The cache collects candidates and carries decisions out; what an answer may be served for is decided here alone. The rules, in the
order in which they are tried:

=====================  ============  ==========================================================================================
rule                   outcome       fires when
=====================  ============  ==========================================================================================
``exact_hit``          hit           the entry under the request's own key is live
``semantic_hit``       semantic_hit  a live entry of the same context is similar enough; the most similar one is served
``exact_expired``      miss          the request's own entry is past its TTL, and no similar one may stand in
``semantic_expired``   miss          an entry of the same context is similar enough, but all such are past their TTL
``context_differs``    miss          an entry is similar enough, but was the answer to another context (system prompt, model, ...)
``below_threshold``    miss          the nearest entries are not similar enough
``miss``               miss          there was no candidate at all
=====================  ============  ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from serving.keys import Fingerprint, key64, ttl_jitter
from serving.knobs import Knobs
from serving.tiers.base import Entry

Outcome = Literal["hit", "semantic_hit", "miss"]


class Rule(StrEnum):
    """The rule that made a decision."""

    EXACT_HIT = "exact_hit"
    SEMANTIC_HIT = "semantic_hit"
    EXACT_EXPIRED = "exact_expired"
    SEMANTIC_EXPIRED = "semantic_expired"
    CONTEXT_DIFFERS = "context_differs"
    BELOW_THRESHOLD = "below_threshold"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class CacheRules:
    """Settings of the cache that are not tuned at run time.

    Attributes:
        l1_share: Share of an arm's budget that may be resident in the memory tiers of all replicas together, 0..1.
        ttl_jitter: Width of the per-key jitter on the TTL, 0..1 (:func:`serving.keys.ttl_jitter`).
        staleness_half_life: Seconds after which an answer is outdated with probability 1/2; inf: answers never become outdated.
        semantic_threshold: Least cosine similarity at which an answer stands in for another, -1..1.

    Raises:
        ValueError: If a value is out of its range.
    """

    l1_share: float = 0.25
    ttl_jitter: float = 0.1
    staleness_half_life: float = math.inf
    semantic_threshold: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.l1_share <= 1.0:
            raise ValueError(f"l1_share: expected a share between 0 and 1, got {self.l1_share!r}")
        if not 0.0 <= self.ttl_jitter < 1.0:
            raise ValueError(f"ttl_jitter: expected a width from 0 to below 1, got {self.ttl_jitter!r}")
        if not self.staleness_half_life > 0:
            raise ValueError(f"staleness_half_life: expected seconds > 0 (or inf), got {self.staleness_half_life!r}")
        if not -1.0 <= self.semantic_threshold <= 1.0:
            raise ValueError(f"semantic_threshold: expected a cosine between -1 and 1, got {self.semantic_threshold!r}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that may answer by meaning.

    Attributes:
        key: The entry's key.
        context: The context that it answered.
        similarity: Cosine between its text and the request's, -1..1.
        entry: The entry; None where it was not fetched (it is not worth it) or is gone.
    """

    key: bytes
    context: bytes
    similarity: float
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to answer with, and why.

    Attributes:
        outcome: ``hit``, ``semantic_hit`` or ``miss``.
        rule: The rule that fired.
        entry: The entry to answer with; None for a miss.
        age: Its age in seconds, >= 0; 0 for a miss.
        stale: Probability that it is outdated, 0..1: ``1 - 0.5 ** (age / half-life)``; 0 for a miss.
        similarity: 1 for an exact hit, the cosine for a semantic one, 0 for a miss.
        expired: Whether an entry that would have answered was past its TTL.
    """

    outcome: Outcome
    rule: Rule
    entry: Entry | None = None
    age: float = 0.0
    stale: float = 0.0
    similarity: float = 0.0
    expired: bool = False


def effective_ttl(key: bytes, ttl: float, jitter: float) -> float:
    """Return the TTL of one key, seconds: ``ttl`` times the key's own jitter, so that not all of one moment expires at once."""
    return ttl * ttl_jitter(key64(key), jitter) if jitter else ttl


def is_live(key: bytes, written_at: float, *, now: float, knobs: Knobs, rules: CacheRules, ahead: float = 0.0) -> bool:
    """Whether an entry may be served, decided at read time: a change of the TTL acts on what is already stored.

    Args:
        key: The entry's key.
        written_at: When it was written, seconds.
        now: The clock, seconds.
        knobs: The arm's knobs.
        rules: The cache's settings.
        ahead: Counts an entry within the last ``ahead`` share (0..1) of its TTL as no longer live: to refresh it in time.
    """
    return now - written_at <= effective_ttl(key, knobs.ttl, rules.ttl_jitter) * (1.0 - ahead)


def staleness(age: float, half_life: float) -> float:
    """Return the probability that an answer of this age (seconds) is outdated, 0..1."""
    return float(1.0 - 0.5 ** (max(age, 0.0) / half_life))


def worth_fetching(request: Fingerprint, neighbours: Sequence[Candidate], rules: CacheRules) -> list[Candidate]:
    """Return the neighbours that could answer the request if their entries are live, the most similar first."""
    return sorted(
        (n for n in neighbours if n.context == request.context and n.similarity >= rules.semantic_threshold),
        key=lambda n: -n.similarity,
    )


def decide(
    request: Fingerprint,
    exact: Entry | None,
    candidates: Sequence[Candidate],
    *,
    knobs: Knobs,
    rules: CacheRules,
    now: float,
) -> Decision:
    """Decide what answers the request.

    Args:
        request: The request's identity.
        exact: The entry under the request's own key, expired or not.
        candidates: Entries near in meaning, in any order, of any context.
        knobs: The arm's knobs.
        rules: The cache's settings.
        now: The clock, seconds, the same as the entries' ``written_at``.
    """
    if exact is not None and is_live(exact.key, exact.written_at, now=now, knobs=knobs, rules=rules):
        return _serve("hit", Rule.EXACT_HIT, exact, 1.0, exact_expired=False, rules=rules, now=now)
    exact_expired = exact is not None
    eligible = worth_fetching(request, candidates, rules)
    for candidate in eligible:
        entry = candidate.entry
        if entry is not None and is_live(entry.key, entry.written_at, now=now, knobs=knobs, rules=rules):
            return _serve(
                "semantic_hit", Rule.SEMANTIC_HIT, entry, candidate.similarity, exact_expired=exact_expired, rules=rules, now=now
            )
    if exact_expired:
        return Decision("miss", Rule.EXACT_EXPIRED, expired=True)
    if any(candidate.entry is not None for candidate in eligible):
        return Decision("miss", Rule.SEMANTIC_EXPIRED, expired=True)
    others = [candidate for candidate in candidates if candidate not in eligible]
    if any(candidate.similarity >= rules.semantic_threshold for candidate in others):
        return Decision("miss", Rule.CONTEXT_DIFFERS)
    if others:
        return Decision("miss", Rule.BELOW_THRESHOLD)
    return Decision("miss", Rule.MISS)


def _serve(
    outcome: Outcome, rule: Rule, entry: Entry, similarity: float, *, exact_expired: bool, rules: CacheRules, now: float
) -> Decision:
    age = max(now - entry.written_at, 0.0)
    return Decision(
        outcome, rule, entry, age, staleness(age, rules.staleness_half_life), similarity=similarity, expired=exact_expired
    )
