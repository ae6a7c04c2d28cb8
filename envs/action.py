"""What a policy's action means: a bounded residual, in grid steps, around the optimum of the ghost curves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from serving.knobs import Knobs, KnobSpace

RADIUS: tuple[float, float, float] = (3.0, 2.0, 2.0)
"""Most that an action moves each knob from the anchor, grid steps: size, TTL, warm-up ratio."""

RESOLUTION = 0.25
"""Residuals are rounded to this share of a grid step, so that a policy that means to stay does not dither."""


def residual(
    action: npt.ArrayLike,
    anchor: Knobs,
    space: KnobSpace,
    radius: tuple[float, float, float] = RADIUS,
) -> Knobs:
    """Return the knobs that an action asks for.

    Args:
        action: Three numbers in [-1, 1] (clipped): size, TTL, warm-up ratio; 0 is the anchor itself.
        anchor: Where the residual starts: the curve's optimum, or the current knobs where there is no curve.
        space: The knob space; the result lies within its bounds.
        radius: Grid steps that an action of 1 stands for.

    Raises:
        ValueError: If the action is not three finite numbers.
    """
    values = np.asarray(action, dtype=np.float64)
    if values.shape != (3,) or not np.all(np.isfinite(values)):
        raise ValueError(f"action: expected three finite numbers in [-1, 1], got {action!r}")
    shift = np.rint(np.clip(values, -1.0, 1.0) * np.asarray(radius, np.float64) / RESOLUTION) * RESOLUTION
    if not shift.any():
        return space.clip(anchor)
    return space.from_steps(space.to_steps(anchor) + shift)


MAX_STEPS: tuple[float, float, float] = (2.0, 2.0, 2.0)
"""Most that each knob may move in one interval, grid steps; the guard of a live cache allows the same by default."""


def limit_step(wanted: Knobs, current: Knobs, space: KnobSpace, max_steps: tuple[float, float, float] = MAX_STEPS) -> Knobs:
    """Return ``wanted``, or the farthest point on the way to it that one interval allows.

    Args:
        wanted: Where to go.
        current: The knobs in force.
        space: The knob space; the result lies within its bounds.
        max_steps: Most that each knob may move, grid steps, each > 0.
    """
    here = space.to_steps(current)
    move = space.to_steps(wanted) - here
    bound = np.asarray(max_steps, np.float64)
    if np.all(np.abs(move) <= bound + 1e-9):
        return space.clip(wanted)
    return space.from_steps(here + np.clip(move, -bound, bound))
