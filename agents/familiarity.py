"""What a policy's training saw of each component of the observation, and how far a new observation is outside of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from agents.network import Floats32
from envs.observation_vector import COMPONENTS, DIM, HIGH, LOW, VALIDITY

TOLERANCE = 0.05
"""How far outside of the values seen a component still counts as familiar; components range over 1 or 2."""

UNFAMILIAR_SHARE = 0.15
"""Share of the elements that a policy sees above which it stands back for the curve's optimum.

What is strange comes in groups, each signal with its validity bit. A workload of another scale has a few such elements all the
time (load, entropy, requests of a window: about 2 %), and one group at a time may be strange in ordinary service (those of the
season ahead, in an episode longer than any trained on: a tenth). Beyond this share several groups are strange at once, as where
an exporter is gone or the signals mean something else, and the curve, which needs no training, is the better guess.
"""

NAMES: tuple[str, ...] = (*(component.name for component in COMPONENTS), *(f"{name} is there" for name in VALIDITY))
"""Names of the vector's elements, for words: the components, then their validity bits."""


@dataclass(frozen=True, eq=False)
class ObservationStatistics:
    """Statistics of the observations that a policy was trained on, each float32, shape (DIM,).

    Attributes:
        mean: Mean.
        std: Standard deviation.
        min: Least value.
        max: Greatest value.

    Raises:
        ValueError: If one has another shape, is not finite, or they contradict each other.
    """

    mean: Floats32
    std: Floats32
    min: Floats32
    max: Floats32

    def __post_init__(self) -> None:
        for name in STATISTICS:
            value = np.array(getattr(self, name), np.float32)
            value.flags.writeable = False
            object.__setattr__(self, name, value)
            if value.shape != (DIM,) or not np.all(np.isfinite(value)):
                raise ValueError(f"statistics: {name}: expected {DIM} finite numbers, got shape {value.shape}")
        # Rounding may put a mean just beyond its bounds.
        if np.any(self.min - 1e-4 > self.mean) or np.any(self.mean > self.max + 1e-4) or np.any(self.std < 0):
            raise ValueError("statistics: expected min <= mean <= max and std >= 0 of every component")
        object.__setattr__(self, "_low", self.min - np.float32(TOLERANCE))
        object.__setattr__(self, "_high", self.max + np.float32(TOLERANCE))

    @classmethod
    def of(cls, observations: npt.ArrayLike) -> ObservationStatistics:
        """Return the statistics of observations, shape (N, DIM), N >= 1."""
        running = RunningStatistics()
        running.add(observations)
        return running.statistics()

    @classmethod
    def anything(cls) -> ObservationStatistics:
        """Return statistics to which every observation is familiar: for a policy that was not trained."""
        half = np.float32(0.5)
        return cls(half * (LOW + HIGH), half * (HIGH - LOW), LOW, HIGH)

    def outside(self, vector: Floats32) -> npt.NDArray[np.bool_]:
        """Return which elements of an observation are outside of what training saw, shape (DIM,)."""
        low: Floats32 = self._low  # type: ignore[attr-defined]
        high: Floats32 = self._high  # type: ignore[attr-defined]
        return (vector < low) | (vector > high)


STATISTICS: tuple[str, ...] = tuple(field.name for field in fields(ObservationStatistics))
"""Names of the statistics, in their order."""


class RunningStatistics:
    """Gathers :class:`ObservationStatistics` batch by batch, in double precision."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = np.zeros(DIM)
        self._squares = np.zeros(DIM)
        self._min = np.full(DIM, np.inf)
        self._max = np.full(DIM, -np.inf)

    def add(self, observations: npt.ArrayLike) -> None:
        """Take in observations.

        Args:
            observations: Shape (N, DIM), or (T, E, DIM) as rollouts come; finite.

        Raises:
            ValueError: If the shape is another, or something is not finite.
        """
        values = np.asarray(observations, np.float64)
        if values.shape[-1:] != (DIM,) or not np.all(np.isfinite(values)):
            raise ValueError(f"statistics: expected finite observations of {DIM} elements, got shape {values.shape}")
        values = values.reshape(-1, DIM)
        if not len(values):
            return
        self._count += len(values)
        self._sum += values.sum(axis=0)
        self._squares += (values * values).sum(axis=0)
        self._min = np.minimum(self._min, values.min(axis=0))
        self._max = np.maximum(self._max, values.max(axis=0))

    def statistics(self) -> ObservationStatistics:
        """Return the statistics of everything taken in so far.

        Raises:
            ValueError: If that is nothing.
        """
        if not self._count:
            raise ValueError("statistics: expected at least one observation")
        mean = self._sum / self._count
        std = np.sqrt(np.maximum(self._squares / self._count - mean * mean, 0.0))
        return ObservationStatistics(*(value.astype(np.float32) for value in (mean, std, self._min, self._max)))
