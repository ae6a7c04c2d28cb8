"""A circuit breaker: a dead service costs one attempt per cool-down instead of one deadline per request."""

from __future__ import annotations


class CircuitBreaker:
    """Closed, open or half-open, by the clock that it is given; no I/O, no thread-safety.

    After ``failures`` failures in a row it opens: nothing is allowed for ``cooldown`` seconds. Then one call is let through as a
    probe; its success closes the breaker, its failure opens it for another ``cooldown``.

    Args:
        failures: Failures in a row that open it, >= 1.
        cooldown: Seconds to wait before a probe, >= 0.

    Raises:
        ValueError: If a value is out of its range.
    """

    def __init__(self, failures: int = 5, cooldown: float = 1.0) -> None:
        if failures < 1 or not cooldown >= 0:
            raise ValueError(f"circuit breaker: expected failures >= 1 and cooldown >= 0, got {failures!r} and {cooldown!r}")
        self._limit = failures
        self._cooldown = cooldown
        self._failed = 0
        self._retry_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether it is open or half-open."""
        return self._failed >= self._limit

    def allow(self, now: float) -> bool:
        """Whether a call may be made; each allowed call must be answered by exactly one of the three methods below."""
        if not self.is_open:
            return True
        if self._probing or now < self._retry_at:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The call was answered."""
        self._failed = 0
        self._probing = False

    def failed(self, now: float) -> None:
        """The call was not answered."""
        self._failed += 1
        self._probing = False
        if self.is_open:
            self._retry_at = now + self._cooldown

    def abandoned(self) -> None:
        """The call was given up by its caller and says nothing of the service."""
        self._probing = False
