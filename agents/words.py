"""Knobs in words, for the reasons that the ledger keeps; numbers in words, for the names of policies."""

from __future__ import annotations

import math
from collections.abc import Mapping

from serving.knobs import Knobs

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_words(size: float) -> str:
    """Return bytes with a binary unit and three digits: ``1.5 MiB``."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 1000 else f"{size:.0f} {_UNITS[unit]}"


def ttl_words(ttl: float) -> str:
    """Return a time to live in the unit that a person would use: ``12.5 s``, ``90 min``, ``36 h``, ``never``."""
    if math.isinf(ttl):
        return "never"
    for seconds, unit in ((3600.0, "h"), (60.0, "min")):
        if ttl >= 2 * seconds:
            return f"{ttl / seconds:.3g} {unit}"
    return f"{ttl:.3g} s"


def knob_words(knobs: Knobs) -> str:
    """Return a setting in words: ``1.5 MiB, ttl 60 s, warm-up 10 %``."""
    return f"{size_words(knobs.cache_size)}, ttl {ttl_words(knobs.ttl)}, warm-up {knobs.warmup_ratio:.0%}"


def exact_words(value: float) -> str:
    """Return a number as short as it can be read back to the last bit: ``60``, ``0.1``, ``61.234567``."""
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


def parameter_words(given: Mapping[str, float], defaults: Mapping[str, float]) -> str:
    """Return the parameters that are not their defaults as a policy's name has them: ``:step=0.1,decay=0.9``, or nothing.

    Args:
        given: The parameters, in the order in which they are to be named.
        defaults: The default of each.
    """
    other = [f"{name}={exact_words(value)}" for name, value in given.items() if value != defaults[name]]
    return ":" + ",".join(other) if other else ""
