"""What the shared memory tier is held to, beside what was measured."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.bench.result import BenchResult

Row = Mapping[str, Any]

GET_P50, GET_P99, PUT_P50 = 5.0, 25.0, 10.0
"""Microseconds."""
OVER_REDIS, OVER_DISKCACHE = 10.0, 2.0
READERS_KEEP = 0.9
"""Of the speed that as many processes have of which each reads an arena of its own."""
OPEN_MS, RECOVER_MS = 100.0, 1000.0
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, ">=": operator.ge, "=": operator.eq}


def held_to(
    command: str,
    load: str,
    *,
    size: int,
    ours: Row,
    redis: Row | None,
    diskcache: Row | None,
    readers: Sequence[Row],
    evictions: Sequence[Row],
    recovery: Mapping[str, float],
) -> BenchResult:
    """Return a row for each goal: ``what``, ``value``, ``unit``, ``goal`` and ``met`` (nothing where it was not measured).

    Args:
        command: The command that measures it again.
        load: The machine's load meanwhile, in words.
        size: Bytes of the arena.
        ours: The arena's row of the table of latencies.
        redis: Redis' row there.
        diskcache: Diskcache's.
        readers: The rows of the table of readers, the fewest first.
        evictions: The rows of the table of hit ratios.
        recovery: By what was measured; see :func:`experiments.bench.memory.recovery`.
    """
    means = [
        _mean(evictions, trace, "CLOCK") / max(_mean(evictions, trace, "LRU"), 1e-9)
        for trace in dict.fromkeys(row["trace"] for row in evictions)
    ]
    worst = min((100 * (row["CLOCK"] - row["LRU"]) for row in evictions), default=None)
    rows = [
        _row("get of 2 KB that another process wrote, P50", ours["get_p50_us"], "us", "<", GET_P50),
        _row("the same, P99", ours["get_p99_us"], "us", "<", GET_P99),
        _row("times as fast as redis-py by Unix socket, P50", _times(ours, redis), "ratio", ">=", OVER_REDIS),
        _row("times as fast as diskcache, P50", _times(ours, diskcache), "ratio", ">=", OVER_DISKCACHE),
        _row("put of 2 KB, P50", ours["put_p50_us"], "us", "<", PUT_P50),
        _row(f"speed that each of {readers[-1]['readers']} readers keeps", readers[-1]["kept"], "ratio", ">=", READERS_KEEP),
        _row("hit ratio over LRU's, mean of the budgets, worst trace", min(means, default=None), "ratio", ">=", 1),
        _row("hit ratio minus LRU's, worst budget of all traces", worst, "points", ">=", 0),
        _row(f"opening {size >> 20:,} MiB, filled", recovery["open_ms"], "ms", "<", OPEN_MS),
        _row(f"first write after kill -9, {size >> 20:,} MiB", recovery["recover_ms"], "ms", "<", RECOVER_MS),
        _row(f"wrong answers after {recovery['kills']:.0f} kills", recovery["wrong"], "", "=", 0),
        _row("hangs after them", recovery["hangs"], "", "=", 0),
    ]
    missed = [row["what"] for row in rows if row["met"] == "no"]
    open_ = [row["what"] for row in rows if row["met"] is None]
    note = f"Load {load}: times are those of this load, ratios are taken in turns. " + (
        f"Missed: {'; '.join(missed)}." if missed else "All that was measured is met."
    )
    if open_:
        note += f" Not measured: {'; '.join(open_)}."
    return BenchResult("memory, goals", rows, None, command, note)


def _times(ours: Row, theirs: Row | None) -> float | None:
    return None if theirs is None else theirs["get_p50_us"] / ours["get_p50_us"]


def _mean(rows: Sequence[Row], trace: str, policy: str) -> float:
    values = [float(row[policy]) for row in rows if row["trace"] == trace]
    return sum(values) / len(values)


def _row(what: str, value: float | None, unit: str, comparison: str, bound: float) -> dict[str, Any]:
    met = None if value is None else "yes" if _COMPARISONS[comparison](value, bound) else "no"
    return {"what": what, "value": value, "unit": unit, "goal": f"{comparison} {bound:g}", "met": met}
