"""What only a Prometheus server can do to a reading: scrapes that end between two queries, and samples that outlive a target."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from prometheus_api_client import PrometheusConnect

from envs.prometheus_source import HOLDS_BACK, PrometheusSource
from tests.exporter import Exporter
from tests.prometheus import prometheus_server

REQUESTS = "cachepilot_requests_total"
DEADLINE = 30.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE} s for {what}"
        time.sleep(0.02)


def newest(url: str) -> dict[str, float]:
    """The values that the server has at this very moment, by target."""
    rows = PrometheusConnect(url=url).custom_query(f"ray_{REQUESTS}")
    return {row["metric"]["instance"]: float(row["value"][1]) for row in rows}


def test_a_scrape_that_ends_between_two_queries_changes_nothing_until_the_next_refresh(tmp_path: Path) -> None:
    with Exporter() as exporter:
        exporter.set(f"ray_{REQUESTS}", 0.0)
        with prometheus_server(tmp_path, targets=[exporter.address], scrape_interval="500ms") as url:
            wait_for(lambda: exporter.scrapes >= 3 and exporter.address in newest(url), "a few scrapes")
            with PrometheusSource(url) as source:
                exporter.gate.clear()
                arrived = exporter.arrived
                exporter.set(f"ray_{REQUESTS}", 5.0)
                wait_for(lambda: exporter.arrived > arrived, "a scrape to be under way")
                source.refresh()
                before = source.latest(REQUESTS), source.increase(REQUESTS, window=DEADLINE), source.age(REQUESTS)
                exporter.gate.set()
                wait_for(lambda: newest(url).get(exporter.address) == 5.0, "the scrape to end")
                after = source.latest(REQUESTS), source.increase(REQUESTS, window=DEADLINE), source.age(REQUESTS)
                assert before[:2] == ({(): 0.0}, {(): 0.0})
                assert after == before
                wait_for(lambda: [source.refresh(), source.latest(REQUESTS)][1] == {(): 5.0}, "the next refresh to show it")


def test_what_is_left_of_a_target_of_long_ago_does_not_hold_the_others_back(tmp_path: Path) -> None:
    """After a restart the server shows the last samples of targets that are gone for five minutes."""
    then = time.time() - HOLDS_BACK - 60.0
    past = f'# TYPE ray_{REQUESTS} gauge\nray_{REQUESTS}{{job="ray",instance="gone:1"}} 7 {then:.3f}\n# EOF\n'
    with Exporter() as exporter:
        exporter.set(f"ray_{REQUESTS}", 3.0)
        with prometheus_server(tmp_path, targets=[exporter.address], scrape_interval="500ms", openmetrics=past) as url:
            wait_for(lambda: newest(url) == {"gone:1": 7.0, exporter.address: 3.0}, "both")
            with PrometheusSource(url) as source:
                assert source.latest(REQUESTS, by=("instance",)) == {("gone:1",): 7.0, (exporter.address,): 3.0}
                assert source.age(REQUESTS) < DEADLINE
                assert source.age(REQUESTS, where={"instance": "gone:1"}) > HOLDS_BACK
