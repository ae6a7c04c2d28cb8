"""The processes that a test has started, however they come and go."""

from __future__ import annotations

import psutil


def family() -> dict[int, list[str]]:
    """The command lines, by pid, of all that this process has started, and that these have; those that just end are left out."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.pid] = process.cmdline()
        except psutil.Error:
            continue
    return {pid: words for pid, words in found.items() if words}
