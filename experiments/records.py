"""What is recorded of every decision and event, and the form in which signals are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.signals import ArmSignals
from serving.audit import AuditEvent
from serving.ghost import GhostCurve
from serving.knobs import Knobs

ADMIN = "admin"
"""Kind of the events that tell what operators did by the gateway's admin API."""


@dataclass(frozen=True)
class DecisionRecord:
    """One decision interval of one arm.

    Attributes:
        at: When it was decided, seconds since the epoch.
        namespace: The gateway's namespace.
        arm: The arm.
        policy: Name of the policy that proposed.
        signals: What it was decided from (:func:`signals_to_dict`).
        current: The knobs before.
        proposal: What the policy wanted; None where it was not asked or failed.
        verdict: The guard's verdict in one word (``apply``, ``limit``, ``keep``, ``hold``).
        reason: Why, in words.
        applied: The knobs from here on; equal to ``current`` where nothing was changed.
        version: The version of the desired knobs after the decision.
        replicas_expected: Replicas that should have applied it.
        replicas_confirmed: Replicas that reported it as applied.
        cost: Cost of the window before the decision, USD per 1,000 requests by term (``Cost.to_dict()``); empty if unknown.
    """

    at: float
    namespace: str
    arm: str
    policy: str
    signals: Mapping[str, Any]
    current: Knobs
    proposal: Knobs | None
    verdict: str
    reason: str
    applied: Knobs
    version: int
    replicas_expected: int = 0
    replicas_confirmed: int = 0
    cost: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class EventRecord:
    """Something that happened beside the decisions: a start, an end, a lost replica.

    Attributes:
        at: Seconds since the epoch.
        namespace: The gateway's namespace.
        kind: A short name to filter by.
        message: What happened, in words.
        details: JSON-ready values.
    """

    at: float
    namespace: str
    kind: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)


def audit_record(namespace: str, identifier: str, event: AuditEvent) -> EventRecord:
    """Return what an operator did by the admin API as an event of the ledger.

    Args:
        namespace: The gateway's namespace.
        identifier: Of the event in the gateway's audit, by which it is recorded once.
        event: What was done.
    """
    said = ", ".join(f"{name} {_said(value)}" for name, value in event.detail.items())
    message = f"{event.action} by {event.actor}" + (f": {said}" if said else "")
    details = {"audit": identifier, "actor": event.actor, "action": event.action, "detail": event.detail}
    return EventRecord(event.at, namespace, ADMIN, message, details)


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={item!r}" for name, item in value.items()) or "everything"
    return str(value)


def signals_to_dict(signals: ArmSignals) -> dict[str, Any]:
    """Return signals in the form in which the ledger keeps them: JSON-ready, NaN as None, the ghost curve as nested lists."""
    values = {name: getattr(signals, name) for name in signals.__dataclass_fields__ if name != "ghost"}
    curve = signals.ghost
    if curve is not None:
        values["ghost"] = {name: getattr(curve, name) for name in ("sizes", "ttls", "hits", "stale_hits", "requests")}
    else:
        values["ghost"] = None
    cleaned: dict[str, Any] = clean(values)
    return cleaned


def ghost_from_dict(signals: Mapping[str, Any]) -> GhostCurve | None:
    """Return the ghost curve within recorded signals, or None where there is none (or a broken one)."""
    curve = signals.get("ghost")
    if not isinstance(curve, Mapping):
        return None
    try:
        sizes = np.asarray(curve["sizes"], np.int64)
        ttls = np.asarray(curve["ttls"], np.float64)
        hits = np.asarray(curve["hits"], np.float64)
        stale = np.asarray(curve["stale_hits"], np.float64)
        requests = float(curve["requests"])
    except (KeyError, TypeError, ValueError):
        return None
    if hits.shape != (len(sizes), len(ttls)) or stale.shape != hits.shape or not np.all(np.isfinite(hits)):
        return None
    return GhostCurve(sizes, ttls, hits, stale, requests)


def clean(value: Any) -> Any:
    """Make a value strict JSON: numpy to Python, what is not finite to None, mappings and sequences all the way down."""
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, np.generic):
        return clean(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def latest_by_arm(decisions: Sequence[DecisionRecord]) -> dict[str, DecisionRecord]:
    """Return the newest decision of each arm."""
    return {record.arm: record for record in sorted(decisions, key=lambda record: record.at)}
