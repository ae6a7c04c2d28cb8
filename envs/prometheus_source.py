"""Signals from a Prometheus server, by ``prometheus-api-client``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from urllib3.util.retry import Retry

from envs.sources import (
    MEMORY,
    NO_LABELS,
    Aggregate,
    Groups,
    SourceUnavailable,
    TargetHealth,
    check_labels,
    check_window,
    exported_name,
)

HOLDS_BACK = 120.0
"""Seconds without a new sample after which a target no longer holds the others back: two of Prometheus' default intervals."""


class PrometheusSource:
    """A :class:`~envs.sources.SignalSource` that asks PromQL of a Prometheus server.

    All queries between two refreshes are evaluated at one instant: that of the newest scrape of the gateway's metrics that is
    complete. A sample carries the time at which its scrape began, but is there only when the scrape has ended: at the server's
    present time one query could miss a scrape that the next one sees, and a ratio of the two would be wrong.

    Args:
        url: The server's address, such as ``http://127.0.0.1:9090``.
        prefix: What Ray puts before the gateway's metric names.
        selector: Labels that the gateway's series must have, for a server that scrapes more than one cluster
            (``{"application": "cachepilot"}``).
        timeout: Deadline of one query, seconds.

    Raises:
        SourceUnavailable: If the server does not answer.
    """

    def __init__(self, url: str, *, prefix: str = "ray_", selector: Mapping[str, str] = NO_LABELS, timeout: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._prefix = prefix
        self._selector = dict(selector)
        self._now = self._at = math.nan
        # No retries: the tuner holds its knobs and asks again in the next interval; sleeping here would only make it late.
        self._client = PrometheusConnect(url=self.url, retry=Retry(total=0), timeout=timeout)
        self.refresh()

    def __enter__(self) -> PrometheusSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def refresh(self) -> None:
        """Pin the time of evaluation to the newest instant to which every target of the gateway has been scraped."""
        result = self._call("the query time()", lambda: self._client.custom_query("time()"))
        try:
            self._now = self._at = float(result[1])
        except (LookupError, TypeError, ValueError) as error:
            raise self._unavailable("the query time()", f"unexpected answer {result!r}") from error
        # Not `up`: targets that have nothing to do with the gateway may be scraped much more rarely.
        series = self._series("cachepilot_requests_total", NO_LABELS)
        by_target = ("job", "instance")
        newest = self._groups(f"max{_by(by_target)} (timestamp({series}))", by_target)
        self._at = min((at for at in newest.values() if at > self._now - HOLDS_BACK), default=self._now)

    def increase(self, metric: str, *, by: tuple[str, ...] = (), where: Mapping[str, str] = NO_LABELS, window: float) -> Groups:
        """Return ``sum by (...) (increase(metric{...}[window]))``."""
        return self._groups(f"sum{_by(by)} (increase({self._series(metric, where)}[{_duration(window)}]))", by)

    def latest(
        self,
        metric: str,
        *,
        by: tuple[str, ...] = (),
        where: Mapping[str, str] = NO_LABELS,
        aggregate: Aggregate = "sum",
    ) -> Groups:
        """Return ``aggregate by (...) (metric{...} > -Inf)``: the comparison is false for NaN and so leaves it out."""
        return self._groups(f"{aggregate}{_by(by)} ({self._series(metric, where)} > -Inf)", by)

    def quantile(
        self, q: float, metric: str, *, by: tuple[str, ...] = (), where: Mapping[str, str] = NO_LABELS, window: float
    ) -> Groups:
        """Return ``histogram_quantile(q, sum by (le, ...) (rate(metric_bucket{...}[window])))``."""
        rate = f"rate({self._series(metric + '_bucket', where)}[{_duration(window)}])"
        return self._groups(f"histogram_quantile({float(q)!r}, sum{_by(('le', *by))} ({rate}))", by)

    def age(self, metric: str, *, where: Mapping[str, str] = NO_LABELS) -> float:
        """Return seconds since the newest sample of a metric, alive or gone; inf if none is remembered."""
        series = self._series(metric, where)
        newest = self._groups(f"max(timestamp({series}))", ())
        return max(0.0, self._now - (newest[()] if newest else self._gone_since(series)))

    def _gone_since(self, series: str) -> float:
        """Return the time of the newest sample of series that are no longer there; -inf if none is remembered.

        First the second that it lies in, since the server counts samples and sends one number; then that second's own samples.
        Whole seconds leave no gap between them, however short a series' life was, but end before the time of evaluation does.
        """
        second = f"timestamp(count_over_time({series}[1s]))"
        ends = self._groups(f"max(max_over_time({second}[{_duration(MEMORY)}:1s]))", ())
        back = self._at - ends.get((), math.floor(self._at)) + 1.0
        found = self._ask(f"{series}[{_duration(back)}]")
        return max((float(at) for row in found for at, _ in row["values"]), default=-math.inf)

    def targets(self) -> list[TargetHealth]:
        """Return the server's active scrape targets."""
        answer = self._call("its targets", lambda: self._client.get_targets(state="active"))
        found = []
        for target in answer["activeTargets"]:
            series = f"up{{{_matchers({k: target['labels'][k] for k in ('job', 'instance')})}}} == 1"
            seen = self._groups(f"max_over_time(timestamp({series})[{_duration(MEMORY)}:1s])", ())
            age = max(0.0, self._now - max(seen.values())) if seen else math.inf
            found.append(TargetHealth(target["scrapeUrl"], target["health"] == "up", age, target["lastError"]))
        return found

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _series(self, metric: str, where: Mapping[str, str]) -> str:
        name = exported_name(metric, self._prefix)
        own = self._selector if metric.startswith("cachepilot_") else {}
        return f"{name}{{{_matchers({**own, **where})}}}"

    def _groups(self, query: str, by: tuple[str, ...]) -> Groups:
        rows = self._ask(query)
        try:
            return {tuple(row["metric"].get(label, "") for label in by): float(row["value"][1]) for row in rows}
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise self._unavailable(f"the query {query}", f"unexpected answer {str(rows)[:200]} ({error!r})") from error

    def _ask(self, query: str) -> Any:
        return self._call(f"the query {query}", lambda: self._client.custom_query(query, params={"time": f"{self._at:.3f}"}))

    def _call(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        # requests' own errors, a bad JSON among them, are OSErrors.
        except (OSError, PrometheusApiClientException, LookupError, TypeError, ValueError) as error:
            raise self._unavailable(what, str(error)) from error

    def _unavailable(self, what: str, why: str) -> SourceUnavailable:
        return SourceUnavailable(
            f"Prometheus at {self.url}: asked for {what}, got: {why}. Expected a Prometheus HTTP API there: check that the "
            f"server runs and the URL is right (curl {self.url}/-/ready), or use the embedded scraper (signals source: scrape)."
        )


def _by(labels: tuple[str, ...]) -> str:
    check_labels(*labels)
    return f" by ({', '.join(labels)})" if labels else ""


def _duration(seconds: float) -> str:
    return f"{round(check_window(seconds) * 1000)}ms"


def _matchers(where: Mapping[str, str]) -> str:
    check_labels(*where)
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in sorted(where.items())
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())
