"""What only a Prometheus server can do to a reading: scrapes that end between two queries, and samples that outlive a target."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_api_client import PrometheusConnect

from envs.prometheus_source import HOLDS_BACK, PrometheusSource
from envs.sources import SourceUnavailable
from tests.exporter import Exporter
from tests.prometheus import prometheus_server

REQUESTS = "cachepilot_requests_total"
DEADLINE = 60.0


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
        # A scrape that is held up for longer than the interval has failed.
        with prometheus_server(tmp_path, targets=[exporter.address], scrape_interval="3s") as url:
            wait_for(lambda: exporter.scrapes >= 2 and exporter.address in newest(url), "a few scrapes")
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


@pytest.mark.parametrize("result", [None, [{"metric": {}}], [{"metric": {}, "value": [1, "abc"]}], [1, "1"]])
def test_an_answer_of_another_form_is_said_to_be_one(result: object) -> None:
    """A proxy or another server may answer 200 with JSON of its own: the loop has to hold, not to end."""
    answers = [[1, "1"], [], result]

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"status": "success", "data": {"result": answers.pop(0)}}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with PrometheusSource(f"http://127.0.0.1:{server.server_port}") as source:
                with pytest.raises(SourceUnavailable, match="unexpected answer"):
                    source.latest(REQUESTS)
        finally:
            server.shutdown()
            thread.join()
