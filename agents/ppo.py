"""The trained policy, inferred in numpy: as a rule a bounded residual around the optimum of the smoothed ghost curve."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agents import artifact
from agents.artifact import Artifact, ArtifactError
from agents.familiarity import NAMES, UNFAMILIAR_SHARE
from agents.policy import Proposal
from agents.words import knob_words
from envs.knob_batch import SpaceBatch, to_array, to_knobs
from envs.observation import Observation
from serving.knobs import KnobSpace

PRETRAINED = Path(__file__).parent / "pretrained"
"""Policies that are shipped, by name."""

DEFAULT = "suites"
"""The shipped policy that ``ppo`` means."""

_TOLD = 3
"""Unfamiliar components that a reason names."""


def artifact_directory(name: str) -> Path:
    """Return where a trained policy is.

    Args:
        name: Its directory; or ``ppo`` (the shipped one), or a shipped policy's name with or without ``ppo:`` before it.

    Raises:
        agents.artifact.ArtifactError: If there is none.
    """
    path = Path(name)
    if path.is_dir():
        return path
    shipped = sorted(card.parent.name for card in PRETRAINED.glob("*/card.json"))
    wanted = DEFAULT if name == "ppo" else name.removeprefix("ppo:")
    if wanted in shipped:
        return PRETRAINED / wanted
    raise ArtifactError(
        f"policy {name!r}: expected the directory of a trained policy, or one of those shipped: {', '.join(shipped) or 'none'}. "
        "Train one (cachepilot train)."
    )


class PPOPolicy:
    """Acts as it was trained, by the mean action; where it cannot know what it is doing it says so and leaves it to others.

    It holds the knobs while there is no curve, and when the observation or its own action is not finite. It proposes the curve's
    optimum where too much of the observation is outside of what its training saw.

    Args:
        trained: The artifact.
        name: Its name in evaluations and ledgers; default: ``ppo:<artifact's name>``.
        unfamiliar_share: Share of the elements it sees that may be outside of what training saw, 0..1; 1: all.

    Raises:
        ValueError: If the share is not in [0, 1].
    """

    def __init__(self, trained: Artifact, name: str | None = None, *, unfamiliar_share: float = UNFAMILIAR_SHARE) -> None:
        if not 0.0 <= unfamiliar_share <= 1.0:
            raise ValueError(f"policy {trained.name}: unfamiliar_share: expected a share in [0, 1], got {unfamiliar_share!r}")
        self.artifact = trained
        self.unfamiliar_share = unfamiliar_share
        self._name = name or f"ppo:{trained.name}"
        self._seen = trained.mask > 0
        self._space: KnobSpace | None = None
        self._elements = max(1, int(self._seen.sum()))
        self.reset()

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
        """Forget what a recurrent network remembers; a feed-forward one remembers nothing."""
        self._state = self.artifact.network.initial()

    def decide(self, observation: Observation) -> Proposal:
        """Return the knobs of the network's action, the curve's optimum, or the current knobs, and why.

        The details are ``anchor_cost`` and ``current_cost`` in US dollars per 1,000 requests, ``unfamiliar`` (the share of what
        the network sees that is outside of its training) and the action, -1..1.
        """
        space, anchor = observation.space, observation.anchor
        vector = observation.vector
        if not np.isfinite(vector).all():
            return Proposal(space.clip(observation.knobs), "held: the observation is not finite")
        # A recurrent network sees every interval, as it did in training, also those in which its action is not asked for.
        action = self._act(vector)
        if anchor is None:
            return Proposal(space.clip(observation.knobs), "held: no trustworthy ghost curve to act around")
        outside = self.artifact.statistics.outside(vector) & self._seen
        unfamiliar = int(outside.sum()) / self._elements
        details = {
            "anchor_cost": observation.anchor_cost,
            "current_cost": observation.current_cost,
            "unfamiliar": unfamiliar,
        }
        if action is None:
            return Proposal(space.clip(observation.knobs), "held: the policy's action is not finite", details)
        details |= zip(("action_size", "action_ttl", "action_warmup"), action, strict=True)
        if unfamiliar > self.unfamiliar_share:
            return Proposal(
                anchor,
                f"{unfamiliar:.0%} of the observation is outside of what the policy was trained on, more than "
                f"{self.unfamiliar_share:.0%} ({_most_telling(outside)}): the curve's optimum instead, {knob_words(anchor)}",
                details,
            )
        if space is not self._space:  # as a rule it is the same one again
            self._space, self._spaces = space, SpaceBatch.of([space])
        knobs = to_knobs(self.artifact.actions.batch([action], to_array([anchor]), self._spaces)[0])
        shift = space.to_steps(knobs) - space.to_steps(anchor)
        return Proposal(
            knobs,
            f"policy goes {shift[0]:+.2f} size, {shift[1]:+.2f} ttl and {shift[2]:+.2f} warm-up steps from the curve's optimum "
            f"({knob_words(anchor)}) to {knob_words(knobs)}",
            details,
        )

    def _act(self, vector: npt.NDArray[np.float32]) -> list[float] | None:
        """Return the action, three numbers within [-1, 1], or None and an empty memory if it is not finite.

        The memory needs no look of its own: it is bounded, and a NaN in it is one in the output.
        """
        with np.errstate(all="ignore"):
            output, state = self.artifact.network.step(vector * self.artifact.mask, self._state)
        action: list[float] = output.tolist()
        if not all(map(math.isfinite, action)):
            self.reset()
            return None
        self._state = state
        return [min(max(value, -1.0), 1.0) for value in action]


def _most_telling(outside: npt.NDArray[np.bool_]) -> str:
    """Return the first of the unfamiliar elements by name, and how many more there are."""
    names = [NAMES[index] for index in np.flatnonzero(outside)]
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more
