"""When a call to the upstream is made again: pure rules, kept apart from the client that obeys them.

Retried is what failed before the first byte of its answer and may well succeed a moment later: connections that could not be made
or were lost, 502, 503 and 504. Never retried are

- answers of which a byte has arrived: the caller may have seen it, and the tokens are billed;
- 429 and every other 4xx: the limit is the caller's own, who learns of it with the upstream's ``Retry-After`` and headers;
- 500: the server itself could not answer this request, and asking again is as likely to cost tokens as to help;
- timeouts of an answer: the upstream may still be at work on it, and a second copy makes it later.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime

RETRIED = frozenset({502, 503, 504})
"""Statuses that say: not me, or not now."""


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How often, and how long to wait.

    Attributes:
        retries: Most tries after the first.
        backoff: Seconds before the first of them; doubled each time.
        max_backoff: Longest wait, seconds.
    """

    retries: int
    backoff: float
    max_backoff: float

    def wait(self, tried: int, draw: float, *, asked: float | None = None) -> float | None:
        """Return the seconds to wait before the next try, or None where there is none.

        Args:
            tried: Tries made so far, at least 1.
            draw: Uniform from 0 to 1: half of the wait is random, so that those who failed together do not return together.
            asked: Seconds of the upstream's ``Retry-After``, which replace the own ones. Longer than ``max_backoff`` there is no
                next try: before that moment it would be in vain, and the client is told when it is.
        """
        if tried > self.retries:
            return None
        if asked is not None:
            return asked if asked <= self.max_backoff else None
        return float(min(self.backoff * 2.0 ** (tried - 1), self.max_backoff)) * (0.5 + 0.5 * draw)


def retry_after(value: str | None, *, now: float) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for (RFC 9110: seconds or a date); None: absent or not readable.

    Args:
        value: The header.
        now: Seconds since the epoch, which dates are relative to.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now)
