"""Waiting for what happens elsewhere, with a deadline instead of a sleep of a guessed length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PATIENCE = 60.0
"""Seconds after which what did not happen will not: a start beside others that compile takes half of it on two processors."""


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = PATIENCE) -> None:
    """Return as soon as the condition holds; fail naming it when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        await asyncio.sleep(0.005)
