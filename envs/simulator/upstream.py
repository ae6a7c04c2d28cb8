"""The upstream model's slots: a queue, first come first served, compiled."""

from __future__ import annotations

from envs.simulator.state import IN_FLIGHT, Floats, Ints
from serving.compiled import compiled


@compiled(allocates=False)
def _drop_first(busy: Floats, ints: Ints) -> None:
    """Take the earliest end out of the heap."""
    ints[IN_FLIGHT] -= 1
    count, last = ints[IN_FLIGHT], busy[ints[IN_FLIGHT]]
    place, child = 0, 1
    while child < count:
        if child + 1 < count and busy[child + 1] < busy[child]:
            child += 1
        if busy[child] >= last:
            break
        busy[place] = busy[child]
        place, child = child, 2 * child + 1
    busy[place] = last


@compiled(allocates=False)
def free_slot(busy: Floats, ints: Ints, now: float) -> tuple[float, int]:
    """Take a slot for a call that is made now: a free one, or the first that becomes free.

    ``busy`` is a heap of when each of ``IN_FLIGHT`` slots becomes free. Calls come in order of time, so a slot that is free by
    now is dropped. A call that has to wait takes over its slot when that becomes free, and only that slot is dropped: others that
    become free at the same moment are in use until then, which lies ahead and maybe in another window.

    Returns:
        When the call starts, seconds, and how many calls run beside it then. O(log slots), but for ends at equal moments.
    """
    while ints[IN_FLIGHT] > 0 and busy[0] <= now:
        _drop_first(busy, ints)
    if ints[IN_FLIGHT] < len(busy):
        return now, ints[IN_FLIGHT]
    start = busy[0]
    _drop_first(busy, ints)
    beside = ints[IN_FLIGHT]
    if beside > 0 and busy[0] <= start:
        for slot in range(ints[IN_FLIGHT]):
            if busy[slot] <= start:
                beside -= 1
    return start, beside


@compiled(allocates=False)
def occupy(busy: Floats, ints: Ints, finish: float) -> None:
    """Put the end of a call into the heap."""
    place = ints[IN_FLIGHT]
    ints[IN_FLIGHT] += 1
    while place > 0 and busy[(place - 1) // 2] > finish:
        busy[place] = busy[(place - 1) // 2]
        place = (place - 1) // 2
    busy[place] = finish
