"""Edit distance of two texts: Levenshtein's, in code points, by Myers' bit vectors.

A column of the distance table is two integers of one bit per character, and Python's integers are as long as they have to be: a
column costs a dozen operations on whole integers instead of a loop over its cells (Myers, J. ACM 46(3), 1999; in the form of
Hyyrö, 2003). Two questions of 60 characters take about 50 us, two texts of 2,000 characters some milliseconds, and far less
where the bound shows early that they are too far apart.
"""

from __future__ import annotations

import math
from collections import Counter

MAX_CHARACTERS = 2_000
"""Longer texts are not compared character by character on the way of a request; see :func:`within`."""


def edit_distance(a: str, b: str, limit: int | None = None) -> int:
    """Return how many characters have to be inserted, removed or replaced to make one text from the other.

    Args:
        a: A text.
        b: A text.
        limit: Greatest distance of interest, >= 0; None: any.

    Returns:
        The distance; ``limit + 1`` for any distance above ``limit``.
    """
    bound = max(len(a), len(b)) if limit is None else limit
    if len(a) < len(b):
        a, b = b, a
    start = common_prefix(a, b)
    a, b = a[start:], b[start:]
    end = common_prefix(a[::-1], b[::-1])
    if end:
        a, b = a[:-end], b[:-end]
    if not b:
        return min(len(a), bound + 1)
    # Each edit changes the counts of characters by at most one on either side, so this is a lower bound.
    if (Counter(a) - Counter(b)).total() > bound:
        return bound + 1
    return _myers(a, b, bound)


def edit_ratio(a: str, b: str) -> float:
    """Return the edit distance over the length of the longer text, 0 (the same) to 1 (nothing in common)."""
    longest = max(len(a), len(b))
    return edit_distance(a, b) / longest if longest else 0.0


def within(a: str, b: str, ratio: float) -> bool:
    """Whether the edit distance over the longer text's length is at most ``ratio``, 0..1.

    Texts longer than :data:`MAX_CHARACTERS` are within only if they are equal: what cannot be looked at in time is not vouched
    for.
    """
    if a == b:
        return True
    longest = max(len(a), len(b))
    if longest > MAX_CHARACTERS:
        return False
    # the small constant keeps 0.15 * 20 at 3, whatever the rounding
    limit = math.floor(ratio * longest + 1e-9)
    return edit_distance(a, b, limit) <= limit


def common_prefix(a: str, b: str) -> int:
    """Return how many characters two texts have in common at their start."""
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return place
    return min(len(a), len(b))


def _myers(text: str, pattern: str, bound: int) -> int:
    """Return min(distance, bound + 1) of two texts, neither empty."""
    size = len(pattern)
    places: dict[str, int] = {}
    for place, character in enumerate(pattern):
        places[character] = places.get(character, 0) | 1 << place
    mask, last = (1 << size) - 1, 1 << (size - 1)
    rising, falling, distance = mask, 0, size
    left = len(text)
    for character in text:
        match = places.get(character, 0)
        across = match | falling
        diagonal = ((match & rising) + rising) ^ rising | match
        up = falling | ~(diagonal | rising) & mask
        down = rising & diagonal
        left -= 1
        if up & last:
            distance += 1
        elif down & last:
            distance -= 1
        # what is left of the text can take the distance down by one per character at most
        if distance - left > bound:
            return bound + 1
        up, down = up << 1 | 1, down << 1
        rising, falling = (down | ~(across | up)) & mask, up & across & mask
    return min(distance, bound + 1)
