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


class PrometheusSource:
    """A :class:`~envs.sources.SignalSource` that asks PromQL of a Prometheus server.

    All queries between two refreshes are evaluated at one instant of the server's own clock.

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
        self._at = math.nan
        # No retries: the tuner holds its knobs and asks again in the next interval; sleeping here would only make it late.
        self._client = PrometheusConnect(url=self.url, retry=Retry(total=0), timeout=timeout)
        self.refresh()

    def __enter__(self) -> PrometheusSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def refresh(self) -> None:
        """Pin the time of evaluation to the server's present time."""
        result = self._call("the query time()", lambda: self._client.custom_query("time()"))
        try:
            self._at = float(result[1])
        except (LookupError, TypeError, ValueError) as error:
            raise self._unavailable("the query time()", f"unexpected answer {result!r}") from error

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
        if not newest:  # its targets are gone: look back for when they were last there
            newest = self._groups(f"max(max_over_time(timestamp({series})[{_duration(MEMORY)}:1s]))", ())
        return max(0.0, self._at - newest[()]) if newest else math.inf

    def targets(self) -> list[TargetHealth]:
        """Return the server's active scrape targets."""
        answer = self._call("its targets", lambda: self._client.get_targets(state="active"))
        found = []
        for target in answer["activeTargets"]:
            series = f"up{{{_matchers({k: target['labels'][k] for k in ('job', 'instance')})}}} == 1"
            seen = self._groups(f"max_over_time(timestamp({series})[{_duration(MEMORY)}:1s])", ())
            age = max(0.0, self._at - max(seen.values())) if seen else math.inf
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
        result = self._call(f"the query {query}", lambda: self._client.custom_query(query, params={"time": f"{self._at:.3f}"}))
        return {tuple(row["metric"].get(label, "") for label in by): float(row["value"][1]) for row in result}

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
