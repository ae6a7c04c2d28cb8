"""Sizes and durations as people type them; :mod:`agents.words` shows them."""

from __future__ import annotations

import math
import re

_SIZES = {
    "": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?"
_SIZE = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE)
_PART = re.compile(rf"\s*({_NUMBER})\s*([a-z]*)", re.IGNORECASE)
_NEVER = frozenset({"inf", "never", "infinite", "none"})
_LARGEST = 1 << 62


class InputError(ValueError):
    """What was typed cannot be used; says what was expected."""


def parse_size(text: str, name: str = "size") -> int:
    """Return bytes.

    Args:
        text: A number of bytes, or one with a unit: ``64MiB``, ``1.5 GiB``, ``500 kB``. ``k``, ``m``, ``g`` and ``t`` alone are
            binary, as in Redis' and nginx' ``64m``.
        name: What the message calls it.

    Raises:
        InputError: If it is no such size, or negative.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _SIZES:
        raise InputError(f"{name}: {text!r}: expected bytes >= 0, plain or with a unit: 64MiB, 1.5GiB, 500kB")
    size = float(match[1]) * _SIZES[match[2].lower()]
    if not size < _LARGEST:
        raise InputError(f"{name}: {text!r}: expected fewer than 4 EiB")
    return round(size)


def parse_duration(text: str, name: str = "duration") -> float:
    """Return seconds, >= 0; ``inf`` and ``never`` give infinity.

    Args:
        text: Seconds, or numbers with units, largest first: ``5m``, ``1h30m``, ``250 ms``, ``2 d``.
        name: What the message calls it.

    Raises:
        InputError: If it is no such duration, or negative.
    """
    stripped = text.strip()
    if stripped.lower() in _NEVER:
        return math.inf
    seconds, place, last = 0.0, 0, math.inf
    while place < len(stripped) or not stripped:
        match = _PART.match(stripped, place)
        unit = _SECONDS.get(match[2].lower()) if match is not None else None
        # A number without a unit stands alone: nobody knows what the 30 of 1h30 would be.
        if match is None or unit is None or unit >= last or (not match[2] and (place or match.end() < len(stripped))):
            raise InputError(f"{name}: {text!r}: expected seconds >= 0, plain or with units: 90, 5m, 1h30m, 250ms, 2d, never")
        seconds, place, last = seconds + float(match[1]) * unit, match.end(), unit
    if not math.isfinite(seconds):
        raise InputError(f"{name}: {text!r}: expected a finite number of seconds, or never")
    return seconds
