"""Policies that do not look: a fixed setting."""

from __future__ import annotations

from agents.policy import Proposal
from envs.observation import Observation
from serving.knobs import Knobs


class StaticPolicy:
    """Always the same knobs, moved into the space where they lie outside it.

    Args:
        knobs: The setting.
    """

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs

    @property
    def name(self) -> str:
        """``static:<size>,<ttl>,<warm-up ratio>``, which :func:`agents.registry.load_policy` reads."""
        return f"static:{self.knobs.cache_size},{self.knobs.ttl:g},{self.knobs.warmup_ratio:g}"

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the setting."""
        return Proposal(observation.space.clip(self.knobs), "static setting")
