"""Many simulated arms stepped by one call, side by side on the machine's cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt
from numba import prange
from numba.typed import List as TypedList

from envs.simulator import kernel
from envs.simulator.measure import measure
from envs.simulator.simulator import CacheSimulator
from envs.simulator.state import SIGNALS
from serving.compiled import compiled
from serving.knobs import Knobs

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BatchWindow:
    """What one step of E simulators gives, by column.

    Attributes:
        columns: The numeric fields of :class:`envs.signals.ArmSignals` and :data:`envs.simulator.state.SIGNALS`, each of shape
            (E,); NaN for what has no value.
        ghost_hits: Hits of each setting of the grid, (E, S, T); zeros for a lane without a ghost.
        ghost_stale: Expected stale hits of each setting, (E, S, T).
        ghost_requests: Requests that the curve stands for, (E,); NaN for a lane without a ghost.
        done: Whether the trace has come to its end, bool, (E,).
    """

    columns: dict[str, Floats]
    ghost_hits: Floats
    ghost_stale: Floats
    ghost_requests: Floats
    done: npt.NDArray[np.bool_]


_FEW = 4
"""Up to so many lanes it costs more to wake other threads than to step them one after the other."""


@compiled()
def _room(states, columns, until: Floats, needed: npt.NDArray[np.int64]) -> None:  # type: ignore[no-untyped-def]
    for lane in range(len(until)):
        needed[lane] = kernel.room(states[lane], columns[lane], until[lane])


@compiled(parallel=True)
def _step(states, columns, begin: Floats, until: Floats, measured: Floats) -> None:  # type: ignore[no-untyped-def]
    for index in prange(len(begin)):
        lane = np.int64(index)  # lists want signed numbers
        kernel.trim(states[lane])
        kernel.run(states[lane], columns[lane], begin[lane], until[lane])
        measure(states[lane], until[lane] - begin[lane], measured[lane])


class SimulatorBatch:
    """Steps E simulators together; each is what :meth:`CacheSimulator.step` would have made of it.

    The lanes are shared out to threads, see :func:`use_threads`. A simulator belongs to one lane at a time and may be asked and
    given knobs between steps; it is stepped through the batch alone.

    Args:
        simulators: One for each lane; all with ghost grids of the same shape.

    Raises:
        ValueError: If there is none, or grids differ in shape.
    """

    def __init__(self, simulators: Sequence[CacheSimulator]) -> None:
        if not simulators:
            raise ValueError("simulator batch: expected at least one simulator")
        self._lanes = list(simulators)
        space = simulators[0].config.space
        self._grid = (len(space.sizes), len(space.ttls))
        self._states, self._columns = TypedList(), TypedList()
        for simulator in simulators:
            self._check(simulator)
            self._states.append(simulator.state)
            self._columns.append(simulator.columns)

    def __len__(self) -> int:
        return len(self._lanes)

    def __getitem__(self, lane: int) -> CacheSimulator:
        return self._lanes[lane]

    def replace(self, lane: int, simulator: CacheSimulator) -> None:
        """Put another simulator into a lane.

        Raises:
            ValueError: If its grid differs in shape from the others'.
        """
        self._check(simulator)
        self._lanes[lane] = simulator
        self._states[lane] = simulator.state
        self._columns[lane] = simulator.columns

    def apply(self, lane: int, knobs: Knobs) -> None:
        """Put knobs into effect in one lane; what a smaller budget evicts goes when the next step begins."""
        self._lanes[lane].set_knobs(knobs)

    def step(self, durations: Floats) -> BatchWindow:
        """Run the requests that arrive in each lane's next seconds.

        Args:
            durations: Seconds, finite and > 0, shape (E,).

        Raises:
            ValueError: If ``durations`` is not that.
        """
        lanes = self._lanes
        durations = np.asarray(durations, np.float64)
        if durations.shape != (len(lanes),) or not np.all((durations > 0) & (durations < math.inf)):
            raise ValueError(f"simulator batch: durations: expected {len(lanes)} finite seconds > 0, got {durations!r}")
        begin = np.array([lane.now for lane in lanes])
        until = begin + durations
        first = [lane.position for lane in lanes]
        needed = np.empty((len(lanes), 2), np.int64)
        measured = np.empty((len(lanes), len(SIGNALS)))
        if len(lanes) <= _FEW:
            for index, lane in enumerate(lanes):
                lane.make_room(*kernel.room(lane.state, lane.columns, until[index]))
                kernel.trim(lane.state)
                kernel.run(lane.state, lane.columns, begin[index], until[index])
                measure(lane.state, until[index] - begin[index], measured[index])
        else:
            _room(self._states, self._columns, until, needed)
            for index, (starts, misses) in enumerate(needed.tolist()):
                if lanes[index].make_room(starts, misses):
                    self._states[index] = lanes[index].state
            _step(self._states, self._columns, begin, until, measured)

        columns = dict(zip(SIGNALS, np.ascontiguousarray(measured.T), strict=True))
        columns["at"], columns["window"] = until, durations
        for name in ("entropy", "drift", "regret"):
            columns[name] = np.full(len(lanes), math.nan)
        hits, stale = np.zeros((len(lanes), *self._grid)), np.zeros((len(lanes), *self._grid))
        requests = np.full(len(lanes), math.nan)
        done = np.empty(len(lanes), np.bool_)
        for index, lane in enumerate(lanes):
            lane.advance(float(until[index]))
            seen = lane.observe(first[index])
            if seen is not None:
                hits[index], stale[index], requests[index] = seen.curve.hits, seen.curve.stale_hits, seen.curve.requests
                columns["entropy"][index], columns["drift"][index] = seen.entropy, seen.drift
            done[index] = lane.position >= len(lane.columns.time)
        return BatchWindow(columns, hits, stale, requests, done)

    def _check(self, simulator: CacheSimulator) -> None:
        space = simulator.config.space
        if (len(space.sizes), len(space.ttls)) != self._grid:
            raise ValueError(
                f"simulator batch: expected a grid of {self._grid[0]} sizes and {self._grid[1]} TTLs as in the first lane, "
                f"got {len(space.sizes)} and {len(space.ttls)}"
            )


def use_threads(count: int) -> None:
    """Let at most so many cores share the lanes of a batch.

    Raises:
        ValueError: If the machine has not so many.
    """
    numba.set_num_threads(count)
