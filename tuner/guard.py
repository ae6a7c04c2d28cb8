"""The guard between a policy and a live cache: what may be applied of what was proposed, and why.

A pure function of the proposal, the knobs in force and the signals. It knows nothing of the policy, so that no policy can talk it
into anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agents.policy import Proposal
from envs.signals import ArmSignals
from serving.knobs import Knobs, KnobSpace

Action = Literal["apply", "limit", "keep", "hold"]

REQUIRED = ("requests", "hit_ratio", "p99")
"""Signals without which nothing is changed."""

REQUIRED_GROUPS = ("requests", "latency", "hits")
"""Groups of metrics behind them, whose age counts."""


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """How far and on what evidence the knobs may move.

    Attributes:
        max_steps: Largest move of cache_size, ttl and warmup_ratio in one interval, in grid steps of the knob space.
        dead_band: Moves below this many grid steps in every knob are not worth a new version.
        max_age: Oldest acceptable sample behind the required signals, seconds.
        min_requests: Fewest requests in the window that count as evidence.
    """

    max_steps: tuple[float, float, float] = (2.0, 2.0, 2.0)
    dead_band: float = 0.25
    max_age: float = 60.0
    min_requests: float = 20.0

    def __post_init__(self) -> None:
        for name in ("dead_band", "max_age", "min_requests"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"guard: {name}: expected a number >= 0, got {value!r}")
        if len(self.max_steps) != 3 or not all(math.isfinite(step) and step > 0 for step in self.max_steps):
            raise ValueError(f"guard: max_steps: expected three finite numbers > 0, got {self.max_steps!r}")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the guard allows.

    Attributes:
        knobs: The knobs to run in the next interval.
        action: ``apply`` as proposed; ``limit`` (moved into the bounds or the step limit); ``keep`` (too small a change
            to be worth a version); ``hold`` (the evidence is missing, stale or not finite).
        reason: Why, in words for the ledger.
    """

    knobs: Knobs
    action: Action
    reason: str

    @property
    def changes(self) -> bool:
        """Whether a new version has to be written."""
        return self.action in ("apply", "limit")


def evidence_fault(signals: ArmSignals, limits: GuardLimits) -> str:
    """Return why the signals are no evidence to act on, or ``""`` if they are."""
    nothing = _nothing_happened(signals)
    missing = [name for name in REQUIRED if not math.isfinite(getattr(signals, name))]
    if missing and not nothing:
        return f"missing or not finite: {', '.join(missing)}"
    stale = {
        group: signals.age[group]
        for group in REQUIRED_GROUPS
        if group in signals.age and not signals.age[group] <= limits.max_age
    }
    if stale:
        worst = max(stale, key=lambda group: stale[group])
        return f"stale: {worst} is {stale[worst]:.0f} s old, at most {limits.max_age:.0f} s allowed"
    if nothing:
        return nothing
    if signals.requests < limits.min_requests:
        return f"too few requests: {signals.requests:.0f} in {signals.window:.0f} s, at least {limits.min_requests:.0f} needed"
    return ""


def _nothing_happened(signals: ArmSignals) -> str:
    """Return what did not happen in the window, where that is why signals are missing; ``""`` where they should be there."""
    if signals.requests == 0:
        return f"no traffic in the window of {signals.window:.0f} s"
    # A lookup counts when its request comes, a request when it is answered: what a window answers may have been looked up before.
    # Had there been lookups, there would be a share of them for each tier; were they not exported, they would have no age.
    shares = [signals.hit_ratio, *signals.hit_ratio_by_tier.values()]
    exported = len(shares) > 1 and math.isfinite(signals.age.get("hits", math.inf))
    if 0 < signals.requests < math.inf and math.isfinite(signals.p99) and exported and all(map(math.isnan, shares)):
        return f"no lookups in the window of {signals.window:.0f} s: what it answered came before it or was not for the cache"
    return ""


def judge(proposal: Proposal, current: Knobs, signals: ArmSignals, space: KnobSpace, limits: GuardLimits) -> Verdict:
    """Decide what of a proposal is applied.

    The current knobs may lie outside the space (an operator set them so): a move towards it is limited like any other, and
    holding keeps them untouched.

    Args:
        proposal: What the policy wants.
        current: The knobs in force.
        signals: The window's signals of the arm.
        space: Bounds and grid.
        limits: The guard's limits.

    Returns:
        The verdict; its knobs are within the space unless they are ``current``.
    """
    fault = evidence_fault(signals, limits)
    if fault:
        return Verdict(current, "hold", f"held: {fault}")
    wanted = space.clip(proposal.knobs)
    reasons = [] if wanted == proposal.knobs else ["moved into the bounds"]
    here = space.to_steps(current)
    move = space.to_steps(wanted) - here
    if space.contains(current) and np.all(np.abs(move) < limits.dead_band):
        return Verdict(current, "keep", f"kept: the change is below {limits.dead_band:g} grid steps")
    bound = np.asarray(limits.max_steps)
    allowed = np.clip(move, -bound, bound)
    if np.any(np.abs(move) > bound + 1e-9):
        knobs = space.from_steps(here + allowed)
        names = [
            name for name, over in zip(("cache_size", "ttl", "warmup_ratio"), np.abs(move) > bound + 1e-9, strict=True) if over
        ]
        reasons.append(f"step limit on {', '.join(names)}")
    else:
        knobs = wanted
    if reasons:
        return Verdict(knobs, "limit", "limited: " + "; ".join(reasons))
    return Verdict(knobs, "apply", "applied as proposed")
