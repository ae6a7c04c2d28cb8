"""The compiled core of what walks over whole ghost curves: a hundred settings for each of many lanes, several times a step.

Lanes are computed one by one, so that a lane's numbers do not depend on how many there are. Arrays of cells have shape (E, S, T).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from serving.compiled import compiled

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@compiled()
def bounded(cells: Floats, most: float, good: Mask) -> None:
    """Clear ``good``, shape (E,), where not every cell of a lane is at least 0 and less than ``most``; a NaN is not."""
    lanes, rows, columns = cells.shape
    for lane in range(lanes):
        for row in range(rows):
            for column in range(columns):
                good[lane] &= (cells[lane, row, column] >= 0.0) & (cells[lane, row, column] < most)


@compiled()
def smooth(kept: Floats, new: Floats, usable: Mask, weight: float) -> None:
    """Take ``new`` into the moving averages ``kept``, in place, in the lanes that are usable."""
    lanes, rows, columns = kept.shape
    for lane in range(lanes):
        if usable[lane]:
            for row in range(rows):
                for column in range(columns):
                    kept[lane, row, column] = (1.0 - weight) * kept[lane, row, column] + weight * new[lane, row, column]


@compiled(error_model="numpy")
def settings_cost(
    hits: Floats, stale_hits: Floats, requests: Floats, of_size: Floats, per_hit: Floats, per_stale: Floats, cost: Floats
) -> None:
    """Fill in what every setting costs: ``of_size`` + hit ratio x ``per_hit`` + stale hits x ``per_stale``.

    Args:
        hits: Hits of each setting.
        stale_hits: Expected stale hits of each setting.
        requests: Requests that both stand for, shape (E,).
        of_size: What a size costs if all its requests are misses, shape (E, S).
        per_hit: What a hit ratio of 1 adds to that, shape (E,).
        per_stale: What each stale hit adds, shape (E,).
        cost: Out.
    """
    lanes, rows, columns = hits.shape
    for lane in range(lanes):
        for row in range(rows):
            for column in range(columns):
                ratio = hits[lane, row, column] / requests[lane]
                ratio = min(max(ratio, 0.0), 1.0)
                cost[lane, row, column] = (
                    of_size[lane, row] + ratio * per_hit[lane] + stale_hits[lane, row, column] * per_stale[lane]
                )


@compiled()
def cheapest(cost: Floats, finite: Mask, best_row: Indices, best_column: Indices) -> None:
    """Find the cheapest setting of each lane; of equals the smallest size, then the longest TTL.

    A window cannot tell TTLs apart that are longer than anything in it was old. The longest then is the choice that loses
    nothing: it does not expire what nothing speaks against.

    Args:
        cost: What each setting costs.
        finite: Out: whether all costs of a lane are finite, shape (E,); elsewhere row and column are 0.
        best_row: Out, shape (E,).
        best_column: Out, shape (E,).
    """
    lanes, rows, columns = cost.shape
    for lane in range(lanes):
        least, whole = np.inf, True
        for row in range(rows):
            for column in range(columns):
                value = cost[lane, row, column]
                whole &= np.isfinite(value)
                if value < least:
                    least = value
        finite[lane] = whole
        best_row[lane] = best_column[lane] = 0
        if not whole:
            continue
        bound = least + 1e-9 * abs(least)  # the tolerance keeps rounding from deciding
        found = False
        for row in range(rows):
            for column in range(columns):
                if cost[lane, row, column] <= bound:
                    best_row[lane], best_column[lane] = row, column
                    found = True
            if found:
                break
