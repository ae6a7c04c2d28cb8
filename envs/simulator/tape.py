"""The ghost's windows along a trace, kept: they depend on the requests alone, so episodes on one trace need them only once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from envs.simulator.batch import SimulatorBatch
from envs.simulator.config import SimConfig
from envs.simulator.simulator import CacheSimulator
from envs.workloads import Trace
from serving.ghost import GhostWindow
from serving.knobs import Knobs

_SLOT = "_ghost_tapes"

TAPES = 8
"""Tapes kept with a trace: with randomised capacities each episode has a ghost of its own, which nobody asks for again."""


class GhostTape:
    """What a ghost that runs from the trace's start sees, interval by interval; :meth:`CacheSimulator.follow` takes it.

    Windows are computed when they are first asked for. Use :func:`tape_of` to share one.

    Args:
        trace: The requests.
        config: The simulated cache; has a ghost.
        interval: Seconds of a window.
        seed: Chooses the ghost's sample.

    Raises:
        ValueError: If ``config`` has no ghost.
    """

    def __init__(self, trace: Trace, config: SimConfig, interval: float, seed: int) -> None:
        if not config.ghost_keys:
            raise ValueError("ghost tape: ghost_keys: expected a configuration with a ghost, got 0")
        # The ghost does not look at the cache: the smallest one is the fastest.
        self._simulator = CacheSimulator(trace, config, Knobs(config.space.min_size, config.space.min_ttl), seed=seed)
        # A batch does not make the window's signals, which would take longer than the ghost.
        self._batch = SimulatorBatch([self._simulator])
        self._interval = interval
        self._windows: list[GhostWindow] = []

    def seen_at(self, now: float) -> GhostWindow:
        """Return the window that ends at a time.

        Args:
            now: Seconds on the trace's clock, a multiple of the interval.

        Raises:
            ValueError: If no window ends then.
        """
        number = round(now / self._interval) if math.isfinite(now) else 0
        # Sums of intervals differ in their last bits from multiples of them.
        if number < 1 or abs(number * self._interval - now) > 1e-6 * self._interval:
            raise ValueError(f"ghost tape: expected a multiple of {self._interval:g} s, got {now!r} s")
        while len(self._windows) < number:
            self._batch.step(np.array([self._interval]))
            seen = self._simulator.seen_at(self._simulator.now)
            assert seen is not None
            self._windows.append(seen)
        return self._windows[number - 1]


def tape_of(trace: Trace, config: SimConfig, interval: float, seed: int) -> GhostTape:
    """Return the tape of a trace, which is kept with it; all who ask with the same ghost get the same.

    A trace keeps the :data:`TAPES` tapes that were asked for last.
    """
    space = config.space
    bounds = (space.min_size, space.max_size, space.size_steps, space.min_ttl, space.max_ttl, space.ttl_steps)
    key = (bounds, config.staleness_half_life, config.ttl_jitter, config.ghost_keys, interval, seed)
    known: dict[Any, GhostTape] = trace.__dict__.setdefault(_SLOT, {})
    tape = known.pop(key, None) or GhostTape(trace, replace(config, l1_share=0.0), interval, seed)
    known[key] = tape
    while len(known) > TAPES:
        del known[next(iter(known))]
    return tape
