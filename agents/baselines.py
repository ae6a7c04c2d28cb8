"""Policies that do not look: a fixed setting."""

from __future__ import annotations

from agents.policy import Proposal
from agents.words import exact_words
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
        return f"static:{self.knobs.cache_size},{exact_words(self.knobs.ttl)},{exact_words(self.knobs.warmup_ratio)}"

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the setting."""
        return Proposal(observation.space.clip(self.knobs), "static setting")


class HoldPolicy:
    """Leaves the knobs as they are, moved into the space where they lie outside it."""

    @property
    def name(self) -> str:
        """``hold``."""
        return "hold"

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the current knobs."""
        return Proposal(observation.space.clip(observation.knobs), "holds whatever is set")


class MiddlePolicy:
    """The middle of every grid, without warm-up: the guess of one who knows nothing of the workload."""

    @property
    def name(self) -> str:
        """``mid-grid``."""
        return "mid-grid"

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the middle of the space's grids."""
        space = observation.space
        return Proposal(space.from_steps([(space.size_steps - 1) / 2, (space.ttl_steps - 1) / 2, 0.0]), "middle of the grid")
