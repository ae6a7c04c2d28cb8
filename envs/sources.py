"""Where signals come from: one protocol over a Prometheus server and over the embedded scraper.

Both answer the same few questions with the same meaning (``tests/contract/test_signal_sources.py`` holds them to it):

* Everything is evaluated as of the last :meth:`SignalSource.refresh`, so that the signals of one interval belong together.
* A series that is not there is not in the answer, nor is a sample that is NaN; nothing is ever 0 for want of data.
* A target that cannot be scraped takes only its own series away.

``increase`` needs two samples in its window. Where the interval of control is near the interval of scraping, ask for
:func:`window_for` seconds. A counter that appears at a value above 0 has its first part missed: initialise counters to 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Aggregate = Literal["sum", "max", "avg", "min"]
Groups = dict[tuple[str, ...], float]
"""Values by the values of the labels asked for, in the order asked; ``""`` for a label that a series does not have."""

NO_LABELS: Mapping[str, str] = {}

MEMORY = 900.0
"""Seconds for which a source looks back for the newest sample of a metric before it says that it never saw one."""

_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class SourceUnavailable(RuntimeError):
    """No signals can be read at all: says from where, what was tried, and what to do."""


@dataclass(frozen=True, slots=True)
class TargetHealth:
    """How one scraped endpoint is.

    Attributes:
        url: The endpoint.
        up: Whether its last scrape succeeded.
        age: Seconds since its last successful scrape; inf if there was none.
        error: Why the last scrape failed; empty if it did not.
    """

    url: str
    up: bool
    age: float
    error: str = ""


class SignalSource(Protocol):
    """Answers what metrics were and how they grew. Names are given without the prefix under which Ray exports them."""

    def refresh(self) -> None:
        """Move the time of evaluation to now; the embedded scraper scrapes.

        Raises:
            SourceUnavailable: If nothing can be read.
        """
        ...

    def increase(self, metric: str, *, by: tuple[str, ...] = (), where: Mapping[str, str] = NO_LABELS, window: float) -> Groups:
        """Return how much a counter grew in the last ``window`` seconds, summed over all labels but ``by``.

        Args:
            metric: Name of the counter.
            by: Labels to keep.
            where: Labels that must have these values (``""``: absent).
            window: Seconds, > 0.

        Raises:
            SourceUnavailable: If the source cannot be asked.
            ValueError: If a name is not one of Prometheus' grammar or the window is not positive.
        """
        ...

    def latest(
        self,
        metric: str,
        *,
        by: tuple[str, ...] = (),
        where: Mapping[str, str] = NO_LABELS,
        aggregate: Aggregate = "sum",
    ) -> Groups:
        """Return the present values of a gauge, aggregated over all labels but ``by``; NaN samples are left out.

        Raises:
            SourceUnavailable: If the source cannot be asked.
            ValueError: If a name is not one of Prometheus' grammar.
        """
        ...

    def quantile(
        self, q: float, metric: str, *, by: tuple[str, ...] = (), where: Mapping[str, str] = NO_LABELS, window: float
    ) -> Groups:
        """Return a quantile of what a histogram observed in the last ``window`` seconds; NaN where it observed nothing.

        Args:
            q: Which quantile, 0..1.
            metric: Name of the histogram, without ``_bucket``.
            by: Labels to keep.
            where: Labels that must have these values.
            window: Seconds, > 0.

        Raises:
            SourceUnavailable: If the source cannot be asked.
            ValueError: If a name is not one of Prometheus' grammar or the window is not positive.
        """
        ...

    def age(self, metric: str, *, where: Mapping[str, str] = NO_LABELS) -> float:
        """Return seconds since the newest sample of a metric; inf if there was none within :data:`MEMORY` seconds.

        Raises:
            SourceUnavailable: If the source cannot be asked.
            ValueError: If a name is not one of Prometheus' grammar.
        """
        ...

    def targets(self) -> list[TargetHealth]:
        """Return the scraped endpoints and how they are.

        Raises:
            SourceUnavailable: If the source cannot be asked.
        """
        ...

    def close(self) -> None:
        """Release connections and threads."""
        ...


def window_for(interval: float, scrape_interval: float) -> float:
    """Return the window to read after ``interval`` seconds: the interval, but at least four scrapes.

    Four, since ``increase`` needs two samples, one may be late, and the extrapolation to the edges is then at most a third.
    """
    return max(interval, 4.0 * scrape_interval)


def exported_name(metric: str, prefix: str) -> str:
    """Return the name under which a metric is exported: Ray puts ``prefix`` before the gateway's own.

    Raises:
        ValueError: If ``metric`` is not a name of Prometheus' grammar.
    """
    if not _METRIC.fullmatch(metric):
        raise ValueError(f"metric: expected a name of letters, digits, _ and :, got {metric!r}")
    return prefix + metric if metric.startswith("cachepilot_") else metric


def check_labels(*names: str) -> None:
    """Refuse what is no label name.

    Raises:
        ValueError: If a name is not one of Prometheus' grammar.
    """
    for name in names:
        if not _LABEL.fullmatch(name):
            raise ValueError(f"label: expected a name of letters, digits and _, got {name!r}")


def check_window(window: float) -> float:
    """Return ``window`` rounded to the millisecond, Prometheus' resolution.

    Raises:
        ValueError: If it is not positive and finite.
    """
    if not 0.001 <= window < 1e9:
        raise ValueError(f"window: expected seconds from 0.001 up, got {window!r}")
    return round(window, 3)
