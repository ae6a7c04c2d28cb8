"""The optimum of the smoothed ghost curve: the policy to beat, and the one to fall back on."""

from __future__ import annotations

import math

import numpy as np

from agents.policy import Proposal
from agents.priced_curve import PricedCurve
from agents.words import exact_words, knob_words
from envs.observation import Observation
from envs.smoothing import cost_at
from serving.knobs import Knobs


class CurvePolicy:
    """Goes to the cheapest setting of the smoothed ghost curve; holds while there is no curve.

    The curve is SHARDS' (Waldspurger et al., FAST'15), kept for sizes and TTLs at once (:mod:`serving.ghost`); taking its optimum
    is what every sizing by miss ratio curves does. Smoothing is worth more than reaction wherever shrinking and refilling costs
    something; hysteresis leaves out moves that save too little to be worth their cost. The curve does not know warm-up: 0.

    Args:
        hysteresis: Share of the predicted cost that the move must save, 0..1; 0 always moves.
        smoothing: Weight of the newest window, (0, 1]; None: the observation's own smoothed curve.

    Raises:
        ValueError: If ``hysteresis`` is not in [0, 1) or ``smoothing`` not in (0, 1].
    """

    def __init__(self, hysteresis: float = 0.0, smoothing: float | None = None) -> None:
        if not 0.0 <= hysteresis < 1.0:
            raise ValueError(f"curve policy: hysteresis: expected a share in [0, 1), got {hysteresis!r}")
        if smoothing is not None and not 0.0 < smoothing <= 1.0:
            raise ValueError(f"curve policy: smoothing: expected a weight in (0, 1], got {smoothing!r}")
        self.hysteresis = hysteresis
        self.smoothing = smoothing
        self._curve = PricedCurve(smoothing) if smoothing is not None else None

    @property
    def name(self) -> str:
        """``curve``, with the hysteresis and the smoothing where there are: ``curve:0.02``, ``curve:smoothing=0.1``."""
        if self.smoothing is None:
            return f"curve:{exact_words(self.hysteresis)}" if self.hysteresis else "curve"
        rest = f",hysteresis={exact_words(self.hysteresis)}" if self.hysteresis else ""
        return f"curve:smoothing={exact_words(self.smoothing)}{rest}"

    def reset(self) -> None:
        """Forget the curve that is smoothed here; another smoothing belongs to the observation."""
        if self._curve is not None:
            self._curve.reset()

    def decide(self, observation: Observation) -> Proposal:
        """Return the curve's optimum, or the current knobs where there is no curve or too little to save."""
        current = observation.space.clip(observation.knobs)
        anchor, best, now = self._optimum(observation)
        if anchor is None:
            return Proposal(current, "held: no trustworthy ghost curve yet")
        details = {"anchor_cost": best, "current_cost": now}
        saving = (now - best) / now if now > 0 else 0.0
        if self.hysteresis and saving <= self.hysteresis and observation.space.contains(observation.knobs):
            return Proposal(current, f"held: moving would save {saving:.1%}, less than {self.hysteresis:.1%}", details)
        return Proposal(
            anchor,
            f"smoothed curve is cheapest at {knob_words(anchor)}: ${best:.4f} per 1,000 requests against ${now:.4f} now",
            details,
        )

    def _optimum(self, observation: Observation) -> tuple[Knobs | None, float, float]:
        """Return the optimum, its cost and that of the current knobs; no optimum without a curve."""
        if self._curve is None:
            return observation.anchor, observation.anchor_cost, observation.current_cost
        reading = self._curve.read(observation)
        if reading is None:
            return None, math.nan, math.nan
        now = cost_at(reading.costs, reading.curve, observation.knobs)
        return observation.space.clip(reading.best), reading.best_cost, now


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
        return "curve" + "".join(f"{'-' if step < 0 else '+'}{exact_words(abs(step))}" for step in self.steps)

    def reset(self) -> None:
        """Nothing to forget."""

    def decide(self, observation: Observation) -> Proposal:
        """Return the moved optimum, or the current knobs where there is no curve."""
        space, anchor = observation.space, observation.anchor
        if anchor is None:
            return Proposal(space.clip(observation.knobs), "held: no trustworthy ghost curve yet")
        knobs = space.from_steps(space.to_steps(anchor) + np.asarray(self.steps, np.float64))
        return Proposal(knobs, f"smoothed curve is cheapest at {knob_words(anchor)}; moved by a constant")
