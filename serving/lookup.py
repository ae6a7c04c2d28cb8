"""What the cache says to one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.policy import Candidate, Decision, Outcome
from serving.tiers.base import Entry

ACCEPTANCE = "acceptance"
"""The check that refuses a neighbour since too little is known of it yet, or too much against it."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the cache answers to one request.

    Attributes:
        outcome: ``hit``, ``semantic_hit``, ``stale``, ``miss``, ``refresh`` or ``bypass``.
        entry: The entry to answer with; None where the model has to.
        tier: The tier that answered: ``memory``, ``neighbour``, ``redis``, ``vector`` for a semantic hit, ``""`` for a miss.
        age: Age of the entry in seconds; 0 for a miss.
        stale: Expected staleness, 0..1: ``1 - 0.5 ** (age / half-life)``.
        similarity: 1 for an exact hit, the cosine for a semantic one, 0 for a miss.
        expired: Whether an entry that would have answered was past its TTL.
        vector: The request's embedding (int8 bytes) if it was computed on the way, to be stored with the answer; else ``b""``.
        rule: The rule of :class:`serving.policy.Rule` that fired.
        ttl: Seconds that the entry has left, negative past its TTL; 0 for a miss.
        revalidate: Whether the entry is to be refreshed in the background.
        objection: The check that refused the most similar neighbour, where that is why it is a miss.
        forbidden: Whether the caller would not have the model asked.
        exact: The entry under the request's own key where it does not answer: it may where the model fails.
        refused: The neighbour that acceptance refused, whose answer shall be compared with the model's.
        search_failed: Whether neighbours were asked for in vain, since their store did not answer.
    """

    outcome: Outcome
    entry: Entry | None
    tier: str
    age: float
    stale: float
    similarity: float
    expired: bool
    vector: bytes
    rule: str
    ttl: float = 0.0
    revalidate: bool = False
    objection: str = ""
    forbidden: bool = False
    exact: Entry | None = None
    refused: Candidate | None = None
    search_failed: bool = False


def answer_of(
    decision: Decision,
    tier: str,
    *,
    exact: Entry | None = None,
    vector: bytes = b"",
    candidates: Sequence[Candidate] = (),
    search_failed: bool = False,
) -> Lookup:
    """Return the lookup that a decision makes.

    Args:
        decision: The decision.
        tier: The tier that answered.
        exact: The entry under the request's own key, where the decision has another one or none.
        vector: The request's embedding, if it was computed.
        candidates: The neighbours that were looked at.
        search_failed: Whether they were asked for in vain.
    """
    refused = next((each for each in candidates if each.objection == ACCEPTANCE), None) if candidates else None
    return Lookup(
        decision.outcome, decision.entry, tier, decision.age, decision.stale, decision.similarity, decision.expired, vector,
        decision.rule.value, decision.ttl, decision.revalidate, decision.objection, decision.forbidden, exact, refused,
        search_failed,
    )  # fmt: skip
