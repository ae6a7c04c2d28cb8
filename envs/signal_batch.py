"""The signals of many lanes as arrays: :class:`envs.signals.ArmSignals`, column by column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from envs.curve_kernel import bounded
from envs.knob_batch import Floats, Grid
from envs.objective import UsageBatch
from envs.signals import NAN, ArmSignals
from serving.ghost import GhostCurve

SIGNALS: tuple[str, ...] = tuple(
    item.name for item in fields(ArmSignals) if item.name not in ("arm", "hit_ratio_by_tier", "ghost", "age")
)
"""Names of the signals that are one number per window."""

SIGNAL_ROW = {name: row for row, name in enumerate(SIGNALS)}
"""Place of each signal in :data:`SIGNALS`."""

ABSURD = 1e15
"""Signals beyond this are taken for broken: they would overwhelm every moving average for hours."""


@dataclass(frozen=True)
class SignalBatch:
    """Signals of E lanes over one window each. NaN means missing, never 0 in its place.

    Attributes:
        values: One row per signal in the order of :data:`SIGNALS`, shape (len(SIGNALS), E).
        grid: The grids of the ghost curves.
        hits: Hits of each setting of the ghost curves, shape (E, S, T).
        stale_hits: Expected stale hits of each setting, likewise.
        ghost_requests: Requests that each curve stands for, shape (E,); NaN where a window has no curve.
    """

    values: Floats
    grid: Grid
    hits: Floats
    stale_hits: Floats
    ghost_requests: Floats

    @classmethod
    def of(
        cls, columns: Mapping[str, Floats], grid: Grid, hits: Floats, stale_hits: Floats, ghost_requests: Floats
    ) -> SignalBatch:
        """Gather signals from arrays of shape (E,) by name; names that are not signals are left out, missing ones are NaN."""
        values = np.full((len(SIGNALS), len(ghost_requests)), NAN)
        for name, row in SIGNAL_ROW.items():
            if name in columns:
                values[row] = columns[name]
        return cls(values, grid, hits, stale_hits, ghost_requests)

    @classmethod
    def alone(cls, signals: ArmSignals, grid: Grid | None) -> SignalBatch:
        """Make a batch of one lane.

        Args:
            signals: The lane's signals.
            grid: The grid of the windows before; used again where the curve has the same, or there is none.
        """
        values = np.array([[getattr(signals, name)] for name in SIGNALS], np.float64)
        curve = signals.ghost
        if curve is not None and _well_formed(curve):
            same = grid is not None and np.array_equal(grid.sizes[0], curve.sizes) and np.array_equal(grid.ttls[0], curve.ttls)
            own = grid if grid is not None and same else Grid.of(curve.sizes[None], curve.ttls[None])
            hits, stale = np.asarray(curve.hits, np.float64)[None], np.asarray(curve.stale_hits, np.float64)[None]
            window = cls(values, own, hits, stale, np.array([curve.requests], np.float64))
            if own is grid or window.usable[0]:  # a broken curve tells of no new grid
                return window
        grid = grid or Grid.of([[1.0]], [[1.0]])
        nothing = np.zeros(grid.shape)
        return cls(values, grid, nothing, nothing, np.array([NAN]))

    def __getitem__(self, name: str) -> Floats:
        """One signal of all lanes, shape (E,)."""
        row: Floats = self.values[SIGNAL_ROW[name]]
        return row

    @cached_property
    def clean(self) -> SignalBatch:
        """The same without what is negative, infinite or absurd: NaN in its place; the curves are left as they are."""
        sane = (self.values >= 0.0) & (self.values < ABSURD)
        return SignalBatch(np.where(sane, self.values, NAN), self.grid, self.hits, self.stale_hits, self.ghost_requests)

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Whether each lane has a curve that holds only what a window can hold, shape (E,)."""
        window = self["window"]
        good = (self.ghost_requests > 1e-3) & (self.ghost_requests < ABSURD) & (window > 0) & (window < ABSURD)
        for cells in (self.hits, self.stale_hits):
            bounded(cells, ABSURD, good)
        usable: npt.NDArray[np.bool_] = good
        return usable

    @cached_property
    def amounts(self) -> tuple[npt.NDArray[np.bool_], Floats]:
        """Where each window tells what hits and misses are like, and what it adds to the sums of it, both of shape (9, E).

        The sums: the curve's requests, seconds; misses, their prompt tokens, their completion tokens; misses again, their
        seconds; hits, their seconds. Each row stands beside those that it is divided by: not every window tells all of it.
        """
        with np.errstate(all="ignore"):
            misses = self["requests"] * (1.0 - self["hit_ratio"])
            hits = self["requests"] * self["hit_ratio"]
            added = np.stack(
                [
                    self.ghost_requests, self["window"], misses, self["input_tokens"], self["output_tokens"],
                    misses, misses * self["miss_latency"], hits, hits * self["hit_latency"],
                ]
            )  # fmt: skip
            some_misses, some_hits = (misses > 0) & (misses < ABSURD), (hits > 0) & (hits < ABSURD)
            clean = self.clean
            tokens = some_misses & (clean["input_tokens"] >= 0) & (clean["output_tokens"] >= 0)
            missed, found = some_misses & (clean["miss_latency"] >= 0), some_hits & (clean["hit_latency"] >= 0)
        return np.stack([self.usable, self.usable, tokens, tokens, tokens, missed, missed, found, found]), added

    def shown(self, regret: Floats, hidden: npt.NDArray[np.bool_]) -> SignalBatch:
        """Return the signals as a policy may see them; what is known of hits, misses and curves is not computed again.

        Args:
            regret: The windows' regret, shape (E,).
            hidden: Signals to take away, in the order of :data:`SIGNALS`, shape (len(SIGNALS), E); none that a price depends on.
        """
        values = self.values.copy()
        values[SIGNAL_ROW["regret"]] = regret
        values[hidden] = NAN
        other = SignalBatch(values, self.grid, self.hits, self.stale_hits, self.ghost_requests)
        other.__dict__.update(usable=self.usable, amounts=self.amounts)
        return other

    def usage(self, budget_bytes: Floats, change_steps: Floats) -> UsageBatch:
        """Return what the windows used, ready to be priced.

        Args:
            budget_bytes: The ``cache_size`` that was in force, shape (E,).
            change_steps: Grid steps by which the knobs were moved at the window's start, shape (E,).
        """
        return UsageBatch(
            requests=self["requests"],
            input_tokens=self["input_tokens"],
            output_tokens=self["output_tokens"],
            latency_seconds=self["latency_sum"],
            p99=self["p99"],
            stale_hits=self["stale_hits"],
            budget_bytes=budget_bytes,
            duration=self["window"],
            refresh_input_tokens=self["refresh_input_tokens"],
            refresh_output_tokens=self["refresh_output_tokens"],
            change_steps=change_steps,
        )

    def lane(self, lane: int, arm: str, tiers: Mapping[str, float] | None = None) -> ArmSignals:
        """Return one lane's signals; the curve is a copy.

        Args:
            lane: Which.
            arm: Name of the arm.
            tiers: Hit ratios by tier, which are not in the batch.
        """
        requests = float(self.ghost_requests[lane])
        curve = None
        if requests == requests:  # not NaN
            curve = curve_of(self.grid, lane, self.hits, self.stale_hits, requests)
        values = dict(zip(SIGNALS, self.values[:, lane].tolist(), strict=True))
        return ArmSignals(arm, **values, ghost=curve, hit_ratio_by_tier=tiers or {})


def curve_of(grid: Grid, lane: int, hits: Floats, stale_hits: Floats, requests: float) -> GhostCurve:
    """Return one lane's curve, copied out of arrays of shape (E, S, T)."""
    sizes = np.rint(grid.sizes[lane]).astype(np.int64)
    return GhostCurve(sizes, grid.ttls[lane].copy(), hits[lane].copy(), stale_hits[lane].copy(), requests)


def _well_formed(curve: GhostCurve) -> bool:
    """Whether a curve has the shape of its grid, and the grid ascends."""
    shape = (len(curve.sizes), len(curve.ttls))
    if min(shape) < 1 or curve.hits.shape != shape or curve.stale_hits.shape != shape:
        return False
    if not (np.all(curve.sizes > 0) and np.all(np.diff(curve.sizes) > 0)):
        return False
    return bool(np.all(curve.ttls > 0) and np.all(np.diff(curve.ttls) > 0) and np.all(np.isfinite(curve.ttls)))
