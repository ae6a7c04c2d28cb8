"""The trained policy: a bounded residual around the optimum of the smoothed ghost curve, inferred in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agents import artifact
from agents.artifact import Artifact
from agents.policy import Proposal
from agents.words import knob_words
from envs.action import residual
from envs.observation import Observation

PRETRAINED = Path(__file__).parent / "pretrained"
"""Policies that are shipped, by name."""

DEFAULT = "sessions"
"""The shipped policy that ``ppo`` means."""


class PPOPolicy:
    """Acts as it was trained: the mean action, as a residual around the anchor; holds while there is no curve.

    Args:
        trained: The artifact.
        name: Its name in evaluations and ledgers; default: ``ppo:<artifact's name>``.
    """

    def __init__(self, trained: Artifact, name: str | None = None) -> None:
        self.artifact = trained
        self._name = name or f"ppo:{trained.name}"

    @classmethod
    def from_directory(cls, directory: Path, name: str | None = None) -> PPOPolicy:
        """Load a policy.

        Raises:
            agents.artifact.ArtifactError: If it cannot be used.
        """
        return cls(artifact.load(directory), name)

    @property
    def name(self) -> str:
        """The policy's name."""
        return self._name

    def reset(self) -> None:
        """Nothing to forget: the network has no memory of its own."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the residual's knobs, or the current ones where there is no curve to act around."""
        space = observation.space
        if observation.anchor is None:
            return Proposal(space.clip(observation.knobs), "held: no trustworthy ghost curve to act around")
        action = np.clip(self.artifact.network(observation.vector), -1.0, 1.0)
        if not np.all(np.isfinite(action)):
            return Proposal(space.clip(observation.knobs), "held: the policy's action is not finite")
        knobs = residual(action, observation.anchor, space, self.artifact.radius)
        shift = space.to_steps(knobs) - space.to_steps(observation.anchor)
        details = {
            "anchor_cost": observation.anchor_cost,
            "current_cost": observation.current_cost,
            **dict(zip(("action_size", "action_ttl", "action_warmup"), action.astype(float).tolist(), strict=True)),
        }
        return Proposal(
            knobs,
            f"policy goes {shift[0]:+.2f} size, {shift[1]:+.2f} ttl and {shift[2]:+.2f} warm-up steps from the curve's optimum "
            f"({knob_words(observation.anchor)}) to {knob_words(knobs)}",
            details,
        )
