"""What a policy's action means: a bounded residual, in grid steps, around the optimum of the ghost curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envs.knob_batch import Floats, SpaceBatch, to_array, to_knobs
from serving.knobs import Knobs, KnobSpace

RADIUS: tuple[float, float, float] = (3.0, 2.0, 2.0)
"""Most that an action moves each knob from the anchor, grid steps: size, TTL, warm-up ratio."""

RESOLUTION = 0.25
"""Residuals are rounded to this share of a grid step, so that a policy that means to stay does not dither."""


def residual_batch(actions: npt.ArrayLike, anchors: Floats, spaces: SpaceBatch, radius: tuple[float, float, float]) -> Floats:
    """Return the knobs that the actions of E lanes ask for.

    Args:
        actions: Three numbers in [-1, 1] (clipped) per lane: size, TTL, warm-up ratio; 0 is the anchor itself. Shape (E, 3).
        anchors: Where each residual starts, shape (E, 3).
        spaces: The knob spaces; the results lie within their bounds.
        radius: Grid steps that an action of 1 stands for.

    Returns:
        Knobs, shape (E, 3).

    Raises:
        ValueError: If an action is not three finite numbers.
    """
    shift = np.rint(_checked(actions, anchors) * np.asarray(radius, np.float64) / RESOLUTION) * RESOLUTION
    moved = spaces.from_steps(spaces.to_steps(anchors) + shift)
    return np.where(shift.any(axis=1, keepdims=True), moved, spaces.clip(anchors))


def _checked(actions: npt.ArrayLike, anchors: Floats) -> Floats:
    values = np.asarray(actions, np.float64)
    if values.shape != anchors.shape:
        raise ValueError(f"action: expected three finite numbers in [-1, 1] for each of {len(anchors)} lanes, got {values.shape}")
    for lane in np.flatnonzero(~np.isfinite(values).all(axis=1)):
        raise ValueError(f"action: lane {lane}: expected three finite numbers in [-1, 1], got {values[lane]}")
    clipped: Floats = np.minimum(np.maximum(values, -1.0), 1.0)
    return clipped


@dataclass(frozen=True)
class ActionMap:
    """How the three numbers of an action become knobs.

    Attributes:
        kind: ``residual``: grid steps around the anchor. ``absolute``: a position on the whole grid, -1 its lowest point and 1
            its highest, wherever the anchor is; known to learn worse (PPO with absolute actions lost to the curve), for ablation.
        radius: Grid steps that a residual action of 1 stands for: size, TTL, warm-up ratio. A knob with 0 stays at the anchor,
            with ``absolute`` too.

    Raises:
        ValueError: If the kind is unknown, or the radius is not three finite numbers >= 0.
    """

    kind: Literal["residual", "absolute"] = "residual"
    radius: tuple[float, float, float] = RADIUS

    def __post_init__(self) -> None:
        if self.kind not in ("residual", "absolute"):
            raise ValueError(f"actions: kind: expected residual or absolute, got {self.kind!r}")
        object.__setattr__(self, "radius", tuple(float(steps) for steps in self.radius))
        if len(self.radius) != 3 or not all(0 <= steps < math.inf for steps in self.radius):
            raise ValueError(f"actions: radius: expected three finite numbers of grid steps >= 0, got {self.radius!r}")

    def batch(self, actions: npt.ArrayLike, anchors: Floats, spaces: SpaceBatch) -> Floats:
        """Return the knobs that the actions of E lanes ask for, shape (E, 3); see :func:`residual_batch`."""
        if self.kind == "residual":
            return residual_batch(actions, anchors, spaces, self.radius)
        fixed = np.asarray(self.radius) == 0.0
        steps = (_checked(actions, anchors) + 1.0) / 2.0 * spaces.scale
        return np.where(fixed, spaces.clip(anchors), spaces.from_steps(np.rint(steps / RESOLUTION) * RESOLUTION))

    def knobs(self, action: npt.ArrayLike, anchor: Knobs, space: KnobSpace) -> Knobs:
        """Return the knobs that one action asks for: :meth:`batch` of one lane."""
        values = np.asarray(action, dtype=np.float64)
        if values.shape != (3,) or not np.all(np.isfinite(values)):
            raise ValueError(f"action: expected three finite numbers in [-1, 1], got {action!r}")
        return to_knobs(self.batch(values[None], to_array([anchor]), SpaceBatch.of([space]))[0])

    def inverse(self, wanted: Floats, anchors: Floats, scale: npt.ArrayLike) -> Floats:
        """Return the actions that lead to positions on the grid, or as near as an action reaches, shape (N, 3).

        Args:
            wanted: Positions, grid steps, shape (N, 3).
            anchors: Positions of the anchors, likewise.
            scale: Grid steps between the least and the greatest knobs, (3,) or (N, 3).
        """
        radius = np.asarray(self.radius)
        if self.kind == "residual":
            moved = wanted - anchors
            found: Floats = np.divide(moved, radius, out=np.zeros_like(moved), where=radius > 0)
        else:
            found = 2.0 * wanted / np.asarray(scale) - 1.0
        return np.clip(np.where(radius > 0, found, 0.0), -1.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return {"kind": self.kind, "radius_steps": list(self.radius), "resolution_steps": RESOLUTION}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ActionMap:
        """Build from :meth:`to_dict`'s form.

        Raises:
            ValueError: If a key is missing or unknown, a value is out of its range, or actions were rounded otherwise then.
        """
        if set(values) != {"kind", "radius_steps", "resolution_steps"}:
            raise ValueError(f"actions: expected the keys kind, radius_steps, resolution_steps; got {sorted(values)}")
        if values["resolution_steps"] != RESOLUTION:
            raise ValueError(f"actions: resolution_steps: expected {RESOLUTION:g}, got {values['resolution_steps']!r}")
        return cls(values["kind"], tuple(values["radius_steps"]))


RESIDUAL = ActionMap()
"""A residual of :data:`RADIUS` around the anchor."""

MAX_STEPS: tuple[float, float, float] = (2.0, 2.0, 2.0)
"""Most that each knob may move in one interval, grid steps; the guard of a live cache allows the same by default."""


def limit_step_batch(wanted: Floats, current: Floats, spaces: SpaceBatch, max_steps: tuple[float, float, float]) -> Floats:
    """Return ``wanted``, or the farthest point on the way to it that one interval allows, for each of E lanes.

    Args:
        wanted: Where to go, shape (E, 3).
        current: The knobs in force, shape (E, 3).
        spaces: The knob spaces; the results lie within their bounds.
        max_steps: Most that each knob may move, grid steps, each > 0.

    Returns:
        Knobs, shape (E, 3).
    """
    here = spaces.to_steps(current)
    move = spaces.to_steps(wanted) - here
    bound = np.asarray(max_steps, np.float64)
    near = (np.abs(move) <= bound + 1e-9).all(axis=1, keepdims=True)
    limited = spaces.from_steps(here + np.minimum(np.maximum(move, -bound), bound))
    return np.where(near, spaces.clip(wanted), limited)


def next_knobs_batch(wanted: Floats, current: Floats, spaces: SpaceBatch, max_steps: tuple[float, float, float]) -> Floats:
    """Return the next interval's knobs: :func:`limit_step_batch`, but whoever holds may do so beyond the bounds of the space."""
    held = (wanted == current).all(axis=1, keepdims=True)
    return np.where(held, current, limit_step_batch(wanted, current, spaces, max_steps))


def limit_step(wanted: Knobs, current: Knobs, space: KnobSpace, max_steps: tuple[float, float, float] = MAX_STEPS) -> Knobs:
    """Return ``wanted``, or the farthest point on the way to it that one interval allows: :func:`limit_step_batch` of one lane.

    Args:
        wanted: Where to go.
        current: The knobs in force.
        space: The knob space; the result lies within its bounds.
        max_steps: Most that each knob may move, grid steps, each > 0.
    """
    return to_knobs(limit_step_batch(to_array([wanted]), to_array([current]), SpaceBatch.of([space]), max_steps)[0])
