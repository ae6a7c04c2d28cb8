"""What the guest hears from its host."""

from __future__ import annotations

from collections.abc import Iterable


def compiled(lines: Iterable[str]) -> bool:
    """Whether the host compiled what is checked: its first whole ``go`` or ``no``, which it repeats each second.

    Anything else is passed over: a serial line drops what it holds when it is opened, also in the midst of a word.
    """
    for line in lines:
        if (word := line.strip()) in ("go", "no"):
            return word == "go"
    return False
