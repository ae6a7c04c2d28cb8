"""The one protocol of everything that chooses knobs: static settings, the curve optimum, PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from envs.observation import Observation
from serving.knobs import Knobs


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a policy wants, before the guard.

    Attributes:
        knobs: The knobs it proposes; within the knob space.
        reason: Why, in words for the ledger.
        details: Numbers behind the reason, for the ledger (the raw action, the curve optimum's cost, ...).
    """

    knobs: Knobs
    reason: str
    details: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Policy(Protocol):
    """Chooses knobs from an observation. Deterministic: equal observations since :meth:`reset` give equal proposals."""

    @property
    def name(self) -> str:
        """A short name, unique among the policies of one evaluation."""
        ...

    def reset(self) -> None:
        """Forget everything seen since the last reset."""
        ...

    def decide(self, observation: Observation) -> Proposal:
        """Return the knobs for the next interval; finite and within ``observation.space`` whatever the observation holds."""
        ...
