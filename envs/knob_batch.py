"""Knobs and knob spaces of many lanes as arrays: :class:`serving.knobs.KnobSpace`, vectorised.

Knobs of E lanes are an array of shape (E, 3): bytes, seconds, share. Everything is computed lane by lane in the same way
however many lanes there are, so a lane's results do not depend on its company, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from serving.knobs import Knobs, KnobSpace

Floats = npt.NDArray[np.float64]
Batch = TypeVar("Batch")


def to_array(knobs: Sequence[Knobs]) -> Floats:
    """Return the knobs of some lanes as an array, shape (E, 3); sizes beyond 2**53 bytes (8 PiB) are rounded."""
    return np.array([(each.cache_size, each.ttl, each.warmup_ratio) for each in knobs], np.float64).reshape(-1, 3)


def to_knobs(row: Floats) -> Knobs:
    """Return one lane's row as knobs."""
    size, ttl, warmup = row.tolist()
    return Knobs(int(size), ttl, warmup)


@dataclass(frozen=True)
class Grid:
    """The ghost curves' grids of E lanes.

    Attributes:
        sizes: ``cache_size`` of each row, bytes, ascending, shape (E, S).
        ttls: ``ttl`` of each column, seconds, ascending, shape (E, T).
        log_sizes: Natural logarithm of ``sizes``.
        log_ttls: Natural logarithm of ``ttls``.
    """

    sizes: Floats
    ttls: Floats
    log_sizes: Floats
    log_ttls: Floats

    @classmethod
    def of(cls, sizes: npt.ArrayLike, ttls: npt.ArrayLike) -> Grid:
        """Make the grids of E lanes from ``sizes``, shape (E, S), and ``ttls``, shape (E, T), all > 0."""
        rows, columns = np.array(sizes, np.float64), np.array(ttls, np.float64)
        return cls(rows, columns, np.log(rows), np.log(columns))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Lanes, sizes and TTLs: (E, S, T)."""
        return (*self.sizes.shape, self.ttls.shape[1])

    def put(self, lanes: npt.NDArray[np.intp], other: Grid) -> Grid:
        """Return a copy in which ``lanes`` have the grids of ``other``."""
        return put_lanes(self, lanes, other)


@dataclass(frozen=True)
class SpaceBatch:
    """The knob spaces of E lanes; their bounds differ, the shape of their grids does not.

    Attributes:
        low: Least knobs, shape (E, 3).
        high: Greatest knobs, shape (E, 3).
        scale: Grid steps between the two, shape (E, 3), the same in all lanes.
        ratio: ``high / low`` of size and TTL, shape (E, 2).
        span: Natural logarithm of ``ratio``.
        sizes: Sizes of the grid, bytes, shape (E, S).
        ttls: TTLs of the grid, seconds, shape (E, T).
    """

    low: Floats
    high: Floats
    scale: Floats
    ratio: Floats
    span: Floats
    sizes: Floats
    ttls: Floats

    @classmethod
    def of(cls, spaces: Sequence[KnobSpace]) -> SpaceBatch:
        """Gather the spaces of some lanes.

        Raises:
            ValueError: If there are none, or their grids differ in shape.
        """
        if not spaces:
            raise ValueError("knob spaces: expected at least one lane, got none")
        shapes = [(space.size_steps, space.ttl_steps, space.warmup_steps) for space in spaces]
        for lane, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(
                    f"knob spaces: lane {lane}: expected a grid of {shapes[0]} steps (size, ttl, warm-up) as in lane 0, "
                    f"got {shape}: lanes that are stepped together need grids of one shape, their bounds may differ"
                )
        low = np.array([(space.min_size, space.min_ttl, 0.0) for space in spaces], np.float64)
        high = np.array([(space.max_size, space.max_ttl, space.max_warmup) for space in spaces], np.float64)
        ratio = high[:, :2] / low[:, :2]
        return cls(
            low,
            high,
            np.array(shapes, np.float64) - 1.0,
            ratio,
            np.log(ratio),
            np.array([space.sizes for space in spaces], np.float64),
            np.array([space.ttls for space in spaces], np.float64),
        )

    def __len__(self) -> int:
        return len(self.low)

    def grid(self) -> Grid:
        """Return the grids on which the ghost curves of these spaces are kept."""
        return Grid.of(self.sizes, self.ttls)

    def clip(self, knobs: Floats) -> Floats:
        """Return ``knobs``, shape (E, 3), moved to the nearest point within the bounds."""
        inside: Floats = np.minimum(np.maximum(knobs, self.low), self.high)
        return inside

    def to_steps(self, knobs: Floats) -> Floats:
        """Return the position of ``knobs`` on the three grids, in fractional grid steps, shape (E, 3); clipped first."""
        inside = self.clip(knobs)
        steps = np.empty_like(inside)
        steps[:, :2] = self.scale[:, :2] * np.log(inside[:, :2] / self.low[:, :2]) / self.span
        highest = self.high[:, 2]
        steps[:, 2] = self.scale[:, 2] * np.divide(inside[:, 2], highest, out=np.zeros(len(self)), where=highest > 0)
        return steps

    def from_steps(self, steps: Floats) -> Floats:
        """Return the knobs at fractional grid positions, both of shape (E, 3), clipped to the bounds."""
        position = np.minimum(np.maximum(steps / self.scale, 0.0), 1.0)
        knobs = np.empty_like(position)
        knobs[:, :2] = self.low[:, :2] * np.power(self.ratio, np.ascontiguousarray(position[:, :2]))
        knobs[:, 0] = np.rint(knobs[:, 0])
        knobs[:, 2] = self.high[:, 2] * position[:, 2]
        return self.clip(knobs)

    def put(self, lanes: npt.NDArray[np.intp], other: SpaceBatch) -> SpaceBatch:
        """Return a copy in which ``lanes`` have the spaces of ``other``.

        Raises:
            ValueError: If the grids of ``other`` have another shape.
        """
        if not np.array_equal(other.scale[0], self.scale[0]):
            ours, theirs = ([int(steps) + 1 for steps in each.scale[0]] for each in (self, other))
            raise ValueError(
                f"knob spaces: expected grids of {ours} steps (size, ttl, warm-up) as in the other lanes, got {theirs}: lanes "
                "that are stepped together need grids of one shape, their bounds may differ"
            )
        return put_lanes(self, lanes, other)


def distance(steps: Floats, others: Floats) -> Floats:
    """Return how far positions are apart, grid steps: the root of the sum of squares, shapes (E, 3), (E, 3) and (E,)."""
    move = steps - others
    move *= move
    apart: Floats = np.sqrt(move[:, 0] + move[:, 1] + move[:, 2])
    return apart


def put_lanes(batch: Batch, lanes: npt.NDArray[np.intp], other: Batch) -> Batch:
    """Return a copy of a dataclass of arrays with a leading lane axis, in which ``lanes`` have the rows of ``other``."""
    arrays = {}
    for item in fields(batch):  # type: ignore[arg-type]
        array = getattr(batch, item.name).copy()
        array[lanes] = getattr(other, item.name)
        arrays[item.name] = array
    return replace(batch, **arrays)  # type: ignore[type-var]
