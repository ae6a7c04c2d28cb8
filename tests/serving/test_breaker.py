from __future__ import annotations

import pytest

from serving.breaker import CircuitBreaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(failures=3, cooldown=1.0)
    for _ in range(2):
        assert breaker.allow(0.0)
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(0.0)
    assert not breaker.is_open
    breaker.failed(0.0)
    assert breaker.is_open
    assert not breaker.allow(0.99)


def test_after_the_cooldown_one_probe_is_let_through() -> None:
    breaker = CircuitBreaker(failures=1, cooldown=1.0)
    breaker.failed(0.0)
    assert breaker.allow(1.0)
    assert not breaker.allow(1.0), "one probe at a time"
    breaker.failed(1.5)
    assert not breaker.allow(2.4)
    assert breaker.allow(2.5)
    breaker.succeeded()
    assert breaker.allow(2.5)
    assert breaker.allow(2.5)


def test_an_abandoned_probe_makes_room_for_the_next() -> None:
    breaker = CircuitBreaker(failures=1, cooldown=1.0)
    breaker.failed(0.0)
    assert breaker.allow(1.0)
    breaker.abandoned()
    assert breaker.is_open
    assert breaker.allow(1.0)


def test_senseless_settings_are_refused() -> None:
    for failures, cooldown in ((0, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(ValueError, match="circuit breaker: expected"):
            CircuitBreaker(failures, cooldown)
