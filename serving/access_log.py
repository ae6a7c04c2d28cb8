"""The gateway's access log: one JSON line per request, without a word of any prompt or answer.

Reports cluster by key, so they need single requests; metrics only have sums. The log is also a workload that can be simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["hit", "semantic_hit", "miss", "bypass", "error"]


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """One answered request.

    Attributes:
        at: Arrival, seconds since the epoch.
        key: 64-bit name of the request's fingerprint (:func:`serving.keys.key64`).
        arm: The arm that it was assigned to.
        outcome: What happened.
        tier: The tier that answered: ``memory``, ``redis``, ``vector``, or ``""``.
        latency: Seconds from arrival to the complete answer.
        size: Bytes of the entry (key, body, vector).
        input_tokens: Prompt tokens of the answer, as originally billed.
        output_tokens: Completion tokens of the answer, as originally billed.
        age: Age of the entry that answered, seconds; 0 for a miss.
        stale: Expected staleness of the answer, 0..1.
        version: Version of the knobs that were applied.
        status: HTTP status of the answer.
    """

    at: float
    key: int
    arm: str
    outcome: Outcome
    tier: str
    latency: float
    size: int
    input_tokens: int
    output_tokens: int
    age: float
    stale: float
    version: int
    status: int
