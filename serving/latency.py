"""How long a model with a bounded number of slots takes: the one formula shared by the simulated server and the simulator.

A continuous-batching engine runs up to ``slots`` sequences together and queues the rest, first come first served. Each token
takes longer the fuller the batch is, which is what makes P99 rise with load before any queue forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

MOST_SLOTS = 1_000_000
"""More than any fleet runs at the same time; who simulates a model remembers each slot."""


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """Latency of a model server.

    Attributes:
        slots: Requests that run at the same time; further ones wait in a FIFO queue.
        ttft: Seconds to the first token of a request that runs alone.
        tpot: Seconds per output token of a request that runs alone.
        contention: Relative slowdown per token when all slots are busy.

    Raises:
        ValueError: If ``slots`` is below 1 or above :data:`MOST_SLOTS`, or another value is negative or not finite.
    """

    slots: int = 8
    ttft: float = 0.08
    tpot: float = 0.002
    contention: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MOST_SLOTS:
            raise ValueError(f"upstream model: slots: expected a whole number from 1 to {MOST_SLOTS:,}, got {self.slots!r}")
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"upstream model: {item.name}: expected a finite number of seconds >= 0, got {value!r}")

    def token_time(self, running: int) -> float:
        """Return the seconds per output token of a request that starts with ``running`` others already running."""
        return self.tpot * (1.0 + self.contention * running / self.slots)

    def service_time(self, output_tokens: int, running: int) -> float:
        """Return the seconds from start (not from arrival) to the last token.

        Args:
            output_tokens: Completion tokens.
            running: Other requests that are running when this one starts, 0..slots - 1.
        """
        return self.ttft + output_tokens * self.token_time(running)
