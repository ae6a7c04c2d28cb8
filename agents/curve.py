"""The optimum of the smoothed ghost curve: the policy to beat, and the one to fall back on."""

from __future__ import annotations

import numpy as np

from agents.policy import Proposal
from agents.words import knob_words
from envs.observation import Observation


class CurvePolicy:
    """Goes to the cheapest setting of the smoothed ghost curve; holds while there is no curve.

    Args:
        hysteresis: Share of the predicted cost that the move must save, 0..1; 0 always moves.

    Raises:
        ValueError: If ``hysteresis`` is not in [0, 1).
    """

    def __init__(self, hysteresis: float = 0.0) -> None:
        if not 0.0 <= hysteresis < 1.0:
            raise ValueError(f"curve policy: hysteresis: expected a share in [0, 1), got {hysteresis!r}")
        self.hysteresis = hysteresis

    @property
    def name(self) -> str:
        """``curve``, with the hysteresis where there is one."""
        return f"curve:{self.hysteresis:g}" if self.hysteresis else "curve"

    def reset(self) -> None:
        """Nothing to forget: the smoothing belongs to the observation."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the curve's optimum, or the current knobs where there is no curve or too little to save."""
        anchor, current = observation.anchor, observation.space.clip(observation.knobs)
        if anchor is None:
            return Proposal(current, "held: no trustworthy ghost curve yet")
        best, now = observation.anchor_cost, observation.current_cost
        details = {"anchor_cost": best, "current_cost": now}
        saving = (now - best) / now if now > 0 else 0.0
        if self.hysteresis and saving <= self.hysteresis and observation.space.contains(observation.knobs):
            return Proposal(current, f"held: moving would save {saving:.1%}, less than {self.hysteresis:.1%}", details)
        return Proposal(
            anchor,
            f"smoothed curve is cheapest at {knob_words(anchor)}: ${best:.4f} per 1,000 requests against ${now:.4f} now",
            details,
        )


class LastCurvePolicy:
    """Goes to the cheapest setting of the last window's own curve: what smoothing is worth is seen beside it."""

    @property
    def name(self) -> str:
        """``last-curve``."""
        return "last-curve"

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the last curve's optimum, or the current knobs where the last window had no curve."""
        if observation.last_anchor is None:
            return Proposal(observation.space.clip(observation.knobs), "held: the last window had no ghost curve")
        return Proposal(observation.last_anchor, f"last window's curve is cheapest at {knob_words(observation.last_anchor)}")


class OffsetPolicy:
    """The smoothed curve's optimum moved by a constant: the least that a trained residual has to beat.

    Args:
        steps: Grid steps from the optimum: size, TTL, warm-up ratio.
    """

    def __init__(self, steps: tuple[float, float, float]) -> None:
        self.steps = steps

    @property
    def name(self) -> str:
        """``curve`` with the offset: ``curve+2+0.5+0``."""
        return "curve" + "".join(f"{step:+g}" for step in self.steps)

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the moved optimum, or the current knobs where there is no curve."""
        space, anchor = observation.space, observation.anchor
        if anchor is None:
            return Proposal(space.clip(observation.knobs), "held: no trustworthy ghost curve yet")
        knobs = space.from_steps(space.to_steps(anchor) + np.asarray(self.steps, np.float64))
        return Proposal(knobs, f"smoothed curve is cheapest at {knob_words(anchor)}; moved by a constant")
