"""What each time of the day was like on the days before: a policy that sees it can act ahead of what recurs.

The day is cut into :data:`BINS` stretches. A window writes what it measured into all stretches that it covers, as a moving
average over days; a lookup says what was measured there, today if the stretch has begun. What has not been seen yet is NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from serving.compiled import compiled

Floats = npt.NDArray[np.float64]

BINS = 48
"""Stretches of a day."""

WEIGHT = 0.5
"""Weight of the newest day in the moving average."""

DAY = 86_400.0


class SeasonalMemory:
    """Remembers some values by the time of day, for E lanes; lanes do not depend on each other, to the last bit.

    Args:
        lanes: Number of lanes E.
        values: Number of values V that are remembered.
    """

    def __init__(self, lanes: int, values: int) -> None:
        self._kept = np.full((lanes, BINS, values), np.nan)
        self._seen = np.full((lanes, BINS), -np.inf)

    def update(self, end: Floats, length: Floats, values: Floats) -> None:
        """Take one window of each lane in; what is NaN in it leaves the memory as it is.

        Of a window longer than a day, the last day is taken: what is newest of each stretch. A clock that was set back begins
        a day anew.

        Args:
            end: End of the window, seconds of the workload's own time, shape (E,); a lane with NaN is left out.
            length: Its length, likewise.
            values: What was measured, shape (V, E).
        """
        _write(self._kept, self._seen, end, length, values)

    def at(self, start: Floats, length: Floats) -> Floats:
        """Return what was remembered for the stretch around the middle of a window, shape (V, E).

        Args:
            start: Beginning of the window, seconds of the workload's own time, shape (E,).
            length: Its length, likewise.
        """
        found = np.empty((self._kept.shape[2], len(start)))
        _read(self._kept, start + 0.5 * length, found)
        return found

    def put(self, lanes: npt.NDArray[np.intp], other: SeasonalMemory) -> None:
        """Continue in ``lanes`` from the state of ``other``'s lanes."""
        self._kept[lanes], self._seen[lanes] = other._kept, other._seen


@compiled()
def _bin(time: float) -> int:
    return int(np.floor((time / DAY - np.floor(time / DAY)) * BINS)) % BINS


@compiled()
def _write(kept: Floats, seen: Floats, end: Floats, length: Floats, values: Floats) -> None:
    for lane in range(len(end)):
        if not (np.isfinite(end[lane]) and np.isfinite(length[lane]) and length[lane] > 0.0):
            continue
        if not np.isfinite(values[:, lane]).any():
            continue  # nothing to remember must not take the day's visit from the window that has something
        span = min(length[lane], DAY)
        count = min(BINS, int(np.ceil(span / DAY * BINS)))
        for step in range(count):
            time = end[lane] - span + (step + 0.5) * span / count
            place = _bin(time)
            # Windows of one visit to a stretch have one share of the average between them: the first takes WEIGHT, the others
            # are taken into what is there, so that a day counts the same however many windows it has.
            again = abs(time - seen[lane, place]) < 0.5 * DAY
            if not again:
                seen[lane, place] = time
            for index in range(len(values)):
                value = values[index, lane]
                if np.isfinite(value):
                    before = kept[lane, place, index]
                    if not np.isfinite(before):
                        kept[lane, place, index] = value
                    else:
                        weight = WEIGHT * (0.5 if again else 1.0)
                        kept[lane, place, index] = before + weight * (value - before)


@compiled()
def _read(kept: Floats, time: Floats, found: Floats) -> None:
    for lane in range(len(time)):
        if np.isfinite(time[lane]):
            found[:, lane] = kept[lane, _bin(time[lane])]
        else:
            found[:, lane] = np.nan
