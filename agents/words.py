"""Knobs in words, for the reasons that the ledger keeps."""

from __future__ import annotations

import math

from serving.knobs import Knobs

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_words(size: float) -> str:
    """Return bytes with a binary unit and three digits: ``1.5 MiB``."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 1000 else f"{size:.0f} {_UNITS[unit]}"


def knob_words(knobs: Knobs) -> str:
    """Return a setting in words: ``1.5 MiB, ttl 60 s, warm-up 10 %``."""
    ttl = "never" if math.isinf(knobs.ttl) else f"{knobs.ttl:.3g} s" if knobs.ttl < 1000 else f"{knobs.ttl:.0f} s"
    return f"{size_words(knobs.cache_size)}, ttl {ttl}, warm-up {knobs.warmup_ratio:.0%}"
