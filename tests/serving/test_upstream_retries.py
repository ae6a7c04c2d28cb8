"""When a call is made again, and how long is waited before."""

from __future__ import annotations

import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.retries import RetryRules, retry_after

NOW = 1_800_000_000.0
RULES = RetryRules(retries=3, backoff=0.1, max_backoff=1.0)


@given(st.integers(1, 12), st.floats(0, 1), st.integers(0, 10), st.floats(1e-3, 10), st.floats(1e-3, 10))
def test_waits_double_up_to_the_longest_and_half_of_each_is_random(
    tried: int, draw: float, retries: int, backoff: float, longest: float
) -> None:
    wait = RetryRules(retries, backoff, longest).wait(tried, draw)
    if tried > retries:
        assert wait is None
    else:
        full = min(backoff * 2 ** (tried - 1), longest)
        assert wait is not None
        assert full / 2 <= wait <= full
        assert math.isclose(wait, full * (1 + draw) / 2)


def test_what_the_upstream_asks_for_replaces_the_own_wait() -> None:
    assert RULES.wait(1, 0.5, asked=0.9) == 0.9
    assert RULES.wait(3, 0.0, asked=0.0) == 0.0


def test_there_is_no_next_try_before_the_moment_the_upstream_names() -> None:
    assert RULES.wait(1, 0.5, asked=1.01) is None
    assert RULES.wait(4, 0.5, asked=0.0) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("1.5", None),
        ("²", None),
        ("0", 0.0),
        (" 120 ", 120.0),
        ("9" * 400, 999_999_999.0),
        (formatdate(NOW + 30.0, usegmt=True), 30.0),
        (formatdate(NOW - 30.0, usegmt=True), 0.0),
        ("Fri, 15 Jan 2027 08:00:30", 30.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after(header, now=NOW) == seconds


@given(st.text(max_size=40) | st.from_regex(r"[A-Z][a-z]{2}, [0-9]{2} Jan [0-9]{4} [0-9:]{8} [+-]?[0-9A-Z]{1,6}", fullmatch=True))
def test_no_header_is_too_strange_to_be_read(header: str) -> None:
    seconds = retry_after(header, now=NOW)
    assert seconds is None or seconds >= 0.0
