"""What is told to those who wait for the simulator to be compiled, which happens when it is first used."""

from __future__ import annotations

from pathlib import Path

from serving.compiled import is_kept


def compiling(folder: Path = Path(__file__).parent) -> str | None:
    """Return a line to show before the simulator is used; None where its compiled code is kept from before.

    Args:
        folder: The modules that are compiled.
    """
    return None if is_kept(folder) else "compiling the simulator first: about a minute, once after each installation or update"
