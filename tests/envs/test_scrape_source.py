"""What is the embedded scraper's own: discovery, filtering, bounds, staleness. What it shares is in ``tests/contract``."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from envs.scrape_history import TargetHistory, TooManySeries
from envs.scrape_source import ScrapeSource
from envs.sources import SourceUnavailable, window_for
from tests.exporter import Exporter

METRIC = "cachepilot_requests_total"
DEADLINE = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter() as exporter:
        exporter.set(f"ray_{METRIC}", 0.0, arm="a")
        yield exporter


def scraper(targets: object, clock: Clock, **settings: object) -> ScrapeSource:
    return ScrapeSource(targets, scrape_interval=None, clock=clock, **settings)  # type: ignore[arg-type]


def discovery(path: Path, *addresses: str, **labels: str) -> None:
    path.write_text(json.dumps([{"targets": list(addresses), "labels": labels}]))


def test_the_discovery_file_is_read_anew_at_every_scrape(tmp_path: Path, exporter: Exporter, clock: Clock) -> None:
    file = tmp_path / "found.json"
    discovery(file, exporter.address, job="ray")
    with Exporter() as late, scraper(file, clock) as source:
        late.set(f"ray_{METRIC}", 5.0, arm="a")
        discovery(file, exporter.address, late.address, job="ray")
        clock.now += 1
        source.refresh()
        assert source.latest(METRIC, by=("instance",)) == {(exporter.address,): 0.0, (late.address,): 5.0}


@pytest.mark.parametrize("broken", ["{", "[1]", '[{"labels": {}}]', '[{"targets": ["a b://"]}]', "null"])
def test_a_broken_discovery_file_keeps_the_targets_known(tmp_path: Path, exporter: Exporter, clock: Clock, broken: str) -> None:
    file = tmp_path / "found.json"
    discovery(file, exporter.address)
    with scraper(str(file), clock) as source:
        file.write_text(broken)
        clock.now += 1
        source.refresh()
        assert source.latest(METRIC) == {(): 0.0}
    with pytest.raises(SourceUnavailable, match=r"found\.json.*service-discovery file"):
        scraper(file, clock)


def test_a_missing_discovery_file_says_who_writes_it(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(SourceUnavailable, match=r"absent\.json: no such file.*Ray writes it"):
        scraper(tmp_path / "absent.json", clock)


def test_targets_may_be_mixed_and_may_come_from_a_function(tmp_path: Path, exporter: Exporter, clock: Clock) -> None:
    file = tmp_path / "found.json"
    discovery(file, exporter.address)
    with Exporter() as model:
        model.set("vllm:num_requests_running", 3.0)
        for targets in ([file, model.url], lambda: [str(file), model.address]):
            with scraper(targets, clock) as source:
                assert source.latest("vllm:num_requests_running") == {(): 3.0}
                assert source.latest(METRIC) == {(): 0.0}


def test_what_a_target_counted_before_it_left_the_file_still_counts(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "found.json"
    with Exporter() as stays, Exporter() as leaves:
        for target in (stays, leaves):
            target.set(f"ray_{METRIC}", 0.0)
        discovery(file, stays.address, leaves.address)
        with scraper(file, clock) as source:
            for step in range(1, 5):
                clock.now += 1
                for target in (stays, leaves):
                    target.set(f"ray_{METRIC}", 10.0 * step)
                source.refresh()
            discovery(file, stays.address)
            clock.now += 1
            source.refresh()
            assert source.latest(METRIC) == {(): 40.0}
            grown = source.increase(METRIC, by=("instance",), window=5.0)
            assert grown[stays.address,] == pytest.approx(40.0)
            assert grown[leaves.address,] == pytest.approx(50.0), "extrapolated, as Prometheus does with a series that ended"
            assert [target.url for target in source.targets()] == [stays.url]
            clock.now += 1000.0
            source.refresh()
            assert source.age(METRIC, where={"instance": leaves.address}) == math.inf


def test_a_target_label_wins_over_the_series_own(tmp_path: Path, exporter: Exporter, clock: Clock) -> None:
    exporter.set(f"ray_{METRIC}", 4.0, arm="b", job="mine")
    file = tmp_path / "found.json"
    discovery(file, exporter.address, job="ray", __meta_x="hidden")
    with scraper(file, clock) as source:
        assert source.latest(METRIC, by=("arm", "job", "exported_job", "__meta_x")) == {
            ("a", "ray", "", ""): 0.0,
            ("b", "ray", "mine", ""): 4.0,
        }


def test_lines_of_others_are_not_even_looked_at(exporter: Exporter, clock: Clock) -> None:
    exporter.noise = "ray_node_cpu{ utter nonsense\n" * 10 + "# HELP broken\n"
    with scraper([exporter.url], clock) as source:
        assert source.latest(METRIC) == {(): 0.0}


@pytest.mark.parametrize(
    "line", ["ray_cachepilot_x", 'ray_cachepilot_x{a="b" c} 1', 'ray_cachepilot_x{a="b"} one', 'ray_cachepilot_x{a="b 1']
)
def test_a_broken_line_of_ours_fails_the_whole_target_by_name(exporter: Exporter, clock: Clock, line: str) -> None:
    with scraper([exporter.url], clock) as source:
        exporter.noise = line + "\n"
        clock.now += 1
        with pytest.raises(SourceUnavailable, match="ray_cachepilot_x"):
            source.refresh()
        (target,) = source.targets()
        assert not target.up
        assert target.age == 1.0


def test_too_many_series_fail_the_target_and_say_what_to_do(exporter: Exporter, clock: Clock) -> None:
    for number in range(20):
        exporter.set("ray_cachepilot_many", 1.0, n=str(number))
    with pytest.raises(SourceUnavailable, match=r"21 series.*at most 20.*narrow the prefixes"):
        scraper([exporter.url], clock, max_series=20)


def test_churn_is_bounded_and_what_is_forgotten_makes_room() -> None:
    history = TargetHistory({}, ("x",), memory=10.0, max_series=10)
    for scrape in range(4):
        history.append(float(scrape), "".join(f'x{{n="{scrape}-{n}"}} 1\n' for n in range(10)).encode())
    with pytest.raises(TooManySeries, match="50 with those lately gone"):
        history.append(5.0, b"".join(b'x{n="new-%d"} 1\n' % n for n in range(10)))
    for scrape in range(1, 200):
        history.append(20.0 * scrape, "".join(f'x{{n="{scrape}-{n}"}} {scrape}\n' for n in range(10)).encode())
        assert len(history._labels) <= 50
        columns, labels = history.select("x", lambda _: True)
        assert sorted(label["n"] for label in labels) == sorted(f"{scrape}-{n}" for n in range(10))
        assert history.at(columns, 20.0 * scrape, 300.0).tolist() == [float(scrape)] * 10
        assert len(history._rows) <= 2


def test_a_series_is_gone_five_minutes_after_its_last_scrape(exporter: Exporter, clock: Clock) -> None:
    exporter.set(f"ray_{METRIC}", 7.0, arm="a")
    with scraper([exporter.url], clock) as source:
        source._at += 299.0
        assert source.latest(METRIC) == {(): 7.0}
        source._at += 1.0
        assert source.latest(METRIC) == {}
        assert source.age(METRIC) == 300.0


def test_time_stamps_are_the_scrapes_and_a_clock_that_steps_back_adds_nothing(exporter: Exporter, clock: Clock) -> None:
    exporter.noise = f'ray_{METRIC}{{arm="t"}} 3.0 12345\n'
    with scraper([exporter.url], clock) as source:
        assert source.age(METRIC, where={"arm": "t"}) == 0.0
        exporter.set(f"ray_{METRIC}", 50.0, arm="a")
        clock.now -= 5.0
        source.refresh()
        clock.now += 6.0
        source.refresh()
        assert source.latest(METRIC, where={"arm": "a"}) == {(): 50.0}
        assert source.increase(METRIC, where={"arm": "a"}, window=30.0)[()] > 0


def test_a_thread_scrapes_by_itself_and_ends_with_the_source(exporter: Exporter) -> None:
    source = ScrapeSource([exporter.url], scrape_interval=0.02)
    deadline = time.monotonic() + DEADLINE
    while exporter.scrapes < 5:
        assert time.monotonic() < deadline, "waited for the thread to scrape"
        time.sleep(0.01)
    exporter.set(f"ray_{METRIC}", 9.0, arm="a")
    before = source.latest(METRIC)
    assert before == {(): 0.0}, "evaluated as of the last refresh, whatever the thread has seen since"
    source.refresh()
    assert source.latest(METRIC) == {(): 9.0}
    assert source.increase(METRIC, window=DEADLINE) != {}
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("scrape")]


def test_a_target_that_hangs_is_given_up_and_the_others_are_read(exporter: Exporter, clock: Clock) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with scraper([address, exporter.url], clock, timeout=1.0) as source:
            assert source.latest(METRIC) == {(): 0.0}
            hung = next(target for target in source.targets() if not target.up)
            assert address in hung.url
            assert "timed out" in hung.error
            assert hung.age == math.inf


def test_the_window_has_room_for_two_samples() -> None:
    assert window_for(30.0, 1.0) == 30.0
    assert window_for(2.0, 1.0) == 4.0


labels_text = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\x00\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
)


@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(["x_total", "x:y", "x_bucket"]),
            st.dictionaries(st.sampled_from("abc"), labels_text).map(lambda d: tuple(sorted(d.items()))),
        ),
        st.floats(allow_nan=False),
        min_size=1,
        max_size=8,
    )
)
def test_the_fast_path_reads_what_the_parser_reads(values: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> None:
    exporter = "".join(
        name + "{" + ",".join(f'{key}="{escape(text)}"' for key, text in labels) + f"}} {value!r}\n"
        for (name, labels), value in values.items()
    )
    history = TargetHistory({}, ("x",), memory=60.0, max_series=100)
    for scrape in (1.0, 2.0):  # the second comes from the cache of parsed series
        history.append(scrape, exporter.encode())
        read = {}
        for name in ("x_total", "x:y", "x_bucket"):
            columns, labels = history.select(name, lambda _: True)
            for own, value in zip(labels, history.at(columns, scrape, 300.0).tolist(), strict=True):
                read[name, tuple(sorted((key, text) for key, text in own.items() if key != "__name__"))] = value
        parsed = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(exporter)
            for sample in family.samples
        }
        assert read == parsed == values


@given(st.binary(max_size=60).map(lambda rest: b"x" + rest))
def test_no_line_whatever_is_in_it_raises_anything_but_a_value_error(line: bytes) -> None:
    history = TargetHistory({}, ("x",), memory=60.0, max_series=100)
    with contextlib.suppress(ValueError):
        history.append(1.0, line)
    history.append(2.0, b"x 1\n")
    assert history.at(history.select("x", lambda _: True)[0], 2.0, 300.0).tolist() == [1.0]


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def test_a_target_that_sends_a_little_now_and_then_is_given_up_at_the_deadline(clock: Clock) -> None:
    given_up = threading.Event()

    class Dripping(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while not given_up.wait(0.05):
                    self.wfile.write(b"# nothing\n")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        end = threading.Timer(DEADLINE, given_up.set)  # so that a scraper without a deadline fails the test, not hangs it
        end.start()
        try:
            with pytest.raises(SourceUnavailable, match="not complete within"):
                scraper(f"http://127.0.0.1:{server.server_port}/metrics", clock, timeout=1.0)
        finally:
            end.cancel()
            given_up.set()
            server.shutdown()
