"""From signals to what a policy sees: one fixed, documented vector, finite always, with a validity bit for what is missing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace


@dataclass(frozen=True)
class Observation:
    """What a policy decides from.

    Attributes:
        vector: Normalised components then validity bits, float32, shape (DIM,), finite, within [-1, 1]... (see COMPONENTS).
        knobs: The knobs that are applied now.
        space: The knob space.
        signals: The window's signals as measured (may hold NaN).
        curve: The smoothed ghost curve, or None before the first trustworthy one.
        anchor: Optimum of the smoothed curve under the prices; None without a curve. Residual policies act around it.
        anchor_cost: Predicted cost at the anchor, US dollars per 1,000 requests; NaN without a curve.
    """

    vector: npt.NDArray[np.float32]
    knobs: Knobs
    space: KnobSpace
    signals: ArmSignals
    curve: GhostCurve | None
    anchor: Knobs | None
    anchor_cost: float
