"""What is said when a process of a pool ends before its work is done, as the operating system does when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager


@contextmanager
def deaths_told(what: str, jobs: int, where: str, error: type[Exception]) -> Iterator[None]:
    """Turn the end of a process of a pool into an error that says what to do.

    Args:
        what: What a process works on.
        jobs: Processes of the pool.
        where: Where their number is given.
        error: What is raised, with the text.

    Raises:
        Exception: ``error``, where a process ended before it was done.
    """
    try:
        yield
    except BrokenProcessPool as broken:
        remedy = f"try fewer jobs than {jobs} ({where})" if jobs > 1 else "free memory and try again"
        raise error(f"a process ended before its {what} was done (out of memory?): {remedy}") from broken
