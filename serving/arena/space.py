"""Where records are put: free blocks by size, joined with their neighbours as soon as they are free. For the writer alone.

A free block says its units in its first word and in its last, the next and the previous block of its size class in words 1 and 2;
the edges have a bit for its first and its last unit, which tells a neighbour that is being freed that it may be joined. What lies
behind ``H_TOP`` was never used, and what lies behind ``H_RESERVED`` has no memory yet. Nothing found in the arena is used before
it was checked: another writer may have left it half done, and then :data:`serving.arena.layout.CORRUPT` is the result. One
that writes at the same time by mistake may change it between two reads, so that what is read again is checked again.
"""

from __future__ import annotations

from serving.arena.layout import (
    CORRUPT,
    FREE_CLASSES,
    H_FREE,
    H_RESERVED,
    H_TOP,
    P_EDGES,
    P_LIMIT,
    P_UNITS,
    P_VALUES,
    UNIT_WORDS,
    Words,
)
from serving.arena.reader import has_memory
from serving.compiled import compiled

GROW = -4
"""Result: there is room, once the file has memory for it."""

_TRIES = 8


@compiled("int64(int64)", allocates=False)
def size_class(units: int) -> int:
    """Return the class of blocks of so many units: each size of its own below 8, then eight to a doubling."""
    if units < 8:
        return units
    power = 3
    while units >> (power + 1):
        power += 1
    return (power - 2) * 8 + ((units >> (power - 3)) & 7)


@compiled("boolean(int64[::1], int64[::1], int64)", allocates=False)
def is_edge(words: Words, private: Words, unit: int) -> bool:
    """Whether the unit is the first or last of a free block."""
    if unit < 0 or unit >= private[P_UNITS]:
        return False
    return bool((words[private[P_EDGES] + (unit >> 6)] >> (unit & 63)) & 1)


@compiled("void(int64[::1], int64[::1], int64, boolean)", allocates=False)
def set_edge(words: Words, private: Words, unit: int, edge: bool) -> None:
    """Say whether the unit is the first or last of a free block."""
    if unit < 0 or unit >= private[P_UNITS]:
        return
    at = private[P_EDGES] + (unit >> 6)
    if edge:
        words[at] |= 1 << (unit & 63)
    else:
        words[at] &= ~(1 << (unit & 63))


@compiled("boolean(int64[::1], int64[::1], int64)", allocates=False)
def is_block(words: Words, private: Words, unit: int) -> bool:
    """Whether there is a free block at that unit that is what it says."""
    top = words[H_TOP]
    if unit < private[P_VALUES] or unit >= top or not has_memory(words, private, top, 0) or not is_edge(words, private, unit):
        return False
    size = words[unit * UNIT_WORDS]
    if size < 1 or size > top - unit:  # their sum may be too great for a word
        return False
    return bool(words[(unit + size) * UNIT_WORDS - 1] == size and is_edge(words, private, unit + size - 1))


@compiled("void(int64[::1], int64[::1], int64, int64)", allocates=False)
def put_block(words: Words, private: Words, unit: int, size: int) -> None:
    """Make a free block; nothing if it cannot be one."""
    if size < 1 or unit < private[P_VALUES] or not has_memory(words, private, unit, size):
        return
    head = H_FREE + size_class(size)
    following = words[head]
    at = unit * UNIT_WORDS
    words[at], words[at + 1], words[at + 2] = size, following, 0
    words[(unit + size) * UNIT_WORDS - 1] = size
    if following != 0 and is_block(words, private, following):
        words[following * UNIT_WORDS + 2] = unit
    words[head] = unit
    set_edge(words, private, unit, True)
    set_edge(words, private, unit + size - 1, True)


@compiled("boolean(int64[::1], int64[::1], int64)", allocates=False)
def take_block(words: Words, private: Words, unit: int) -> bool:
    """Take a free block out of its list; False if its neighbours there are not what they should be."""
    at = unit * UNIT_WORDS
    size, following, before = words[at], words[at + 1], words[at + 2]
    if size < 1 or not has_memory(words, private, unit, size):
        return False
    if following != 0:
        if not is_block(words, private, following):
            return False
        words[following * UNIT_WORDS + 2] = before
    if before != 0:
        if not is_block(words, private, before):
            return False
        words[before * UNIT_WORDS + 1] = following
    else:
        head = H_FREE + size_class(size)
        if words[head] != unit:
            return False
        words[head] = following
    set_edge(words, private, unit, False)
    set_edge(words, private, unit + size - 1, False)
    return True


@compiled("int64(int64[::1], int64[::1], int64)", allocates=False)
def allocate(words: Words, private: Words, units: int) -> int:
    """Return the first of so many units that are free from now on no more; 0: no room, :data:`GROW`, or CORRUPT."""
    kind = size_class(units)
    block = words[H_FREE + kind]
    tries = 0
    while block != 0 and tries < _TRIES:
        if not is_block(words, private, block):
            return CORRUPT
        if words[block * UNIT_WORDS] >= units:
            break
        block = words[block * UNIT_WORDS + 1]
        tries += 1
    if tries == _TRIES:
        block = 0
    kind += 1
    while block == 0 and kind < FREE_CLASSES:
        block = words[H_FREE + kind]
        kind += 1
    if block != 0:
        if not is_block(words, private, block):
            return CORRUPT
        size = words[block * UNIT_WORDS]
        if size < units or not take_block(words, private, block):
            return CORRUPT
        if size > units:
            put_block(words, private, block + units, size - units)
        return block  # type: ignore[no-any-return]
    top = words[H_TOP]
    if top < private[P_VALUES] or top > private[P_UNITS]:
        return CORRUPT
    if top + units <= min(words[H_RESERVED], private[P_UNITS]):
        words[H_TOP] = top + units
        return top  # type: ignore[no-any-return]
    return GROW if top + units <= private[P_LIMIT] else 0


@compiled("int64(int64[::1], int64[::1], int64, int64)", allocates=False)
def release(words: Words, private: Words, unit: int, units: int) -> int:
    """Give so many units back; 0, or CORRUPT. Those of a small record behind its bucket are not of this space."""
    if unit < private[P_VALUES]:
        return 0
    if unit + units > words[H_TOP] or is_edge(words, private, unit):
        return CORRUPT
    behind = unit + units
    if behind < words[H_TOP] and is_edge(words, private, behind):
        if not is_block(words, private, behind):
            return CORRUPT
        units += words[behind * UNIT_WORDS]
        if not take_block(words, private, behind):
            return CORRUPT
    if unit > private[P_VALUES] and is_edge(words, private, unit - 1):
        size = words[unit * UNIT_WORDS - 1]
        before = unit - size
        if size < 1 or not is_block(words, private, before) or words[before * UNIT_WORDS] != size:
            return CORRUPT
        if not take_block(words, private, before):
            return CORRUPT
        unit, units = before, units + size
    if unit + units == words[H_TOP]:
        words[H_TOP] = unit
    else:
        put_block(words, private, unit, units)
    return 0
