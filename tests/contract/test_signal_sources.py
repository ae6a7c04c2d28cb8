"""One suite for both signal sources, on one scripted course of two real HTTP exporters, scraped by both at the same time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from prometheus_api_client import PrometheusConnect

from envs import promql
from envs.prometheus_source import PrometheusSource
from envs.scrape_source import ScrapeSource
from envs.sources import SignalSource, SourceUnavailable, TargetHealth
from serving.ports import free_port
from tests.exporter import RAY_LABELS, Exporter, exporters
from tests.prometheus import prometheus_server

SCRAPE = 0.2
SCRAPES = 12
"""Scrapes that the course lasts at least: bounds the extrapolation beyond the last sample to 1.1 / 11 of the growth."""
TOLERANCE = 1.1 / (SCRAPES - 1)
DEADLINE = 30.0

REQUESTS = "cachepilot_requests_total"
LATENCY = "cachepilot_request_latency_seconds"
BOUNDS = (0.1, 0.2, 0.5, 1.0)
OBSERVED = [0.05] * 40 + [0.15] * 30 + [0.4] * 20 + [0.8] * 10

TRUTH = {("control", "hit"): 97.0, ("control", "miss"): 65.0, ("treatment", "hit"): 10.0, ("treatment", "miss"): 0.0}


@dataclass(frozen=True)
class Course:
    """What the course left behind: each source as of its end, each again as of a target's death."""

    url: str
    file_sd: Path
    window: float
    alive: dict[str, SignalSource]
    healthy: dict[str, list[TargetHealth]]
    bereft: dict[str, SignalSource]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE} s for {what}"
        time.sleep(SCRAPE / 4)


def latest(source: SignalSource, metric: str, **where: str) -> dict[tuple[str, ...], float]:
    source.refresh()
    return source.latest(metric, by=("replica",), where=where)


def discovery(path: Path, *found: Exporter) -> Path:
    path.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": [exporter.address for exporter in found]}]))
    return path


def zeros(exporter: Exporter) -> None:
    for arm in ("control", "treatment"):
        for outcome in ("hit", "miss"):
            exporter.set(f"ray_{REQUESTS}", 0.0, arm=arm, outcome=outcome)
        exporter.observe(f"ray_{LATENCY}", [], BOUNDS, arm=arm, outcome="miss")
    exporter.set("ray_cachepilot_resident_bytes", 0.0, arm="control", tier="redis")
    exporter.set("ray_cachepilot_knobs_version", 0.0)
    exporter.set("other_total", 5.0, quote='a "b" \\ c\nd}')
    exporter.noise = "".join(f'ray_node_noise{{n="{n}"}} 1.0\n' for n in range(200))


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    directory = tmp_path_factory.mktemp("signals")
    with ExitStack() as stack:
        first, second = stack.enter_context(exporters(2, RAY_LABELS))
        zeros(first)
        zeros(second)
        file_sd = discovery(directory / "targets.json", first, second)
        keep = ("ray_cachepilot_", "vllm:", "other_")
        began = time.time()
        url = stack.enter_context(prometheus_server(directory, file_sd=file_sd, scrape_interval=f"{SCRAPE * 1000:.0f}ms"))
        scrapers = [stack.enter_context(ScrapeSource(file_sd, keep=keep, scrape_interval=SCRAPE)) for _ in range(2)]
        servers = [stack.enter_context(PrometheusSource(url)) for _ in range(2)]
        everyone: list[SignalSource] = [*scrapers, *servers]

        def seen(metric: str, **want: float) -> bool:
            wanted = {(replica,): value for replica, value in want.items()}
            return all(latest(source, metric) == wanted for source in everyone)

        wait_for(lambda: seen(REQUESTS, r0=0.0, r1=0.0), "the zeros")
        first.add(f"ray_{REQUESTS}", 60, arm="control", outcome="hit")
        first.add(f"ray_{REQUESTS}", 40, arm="control", outcome="miss")
        first.add(f"ray_{REQUESTS}", 10, arm="treatment", outcome="hit")
        second.add(f"ray_{REQUESTS}", 30, arm="control", outcome="hit")
        second.add(f"ray_{REQUESTS}", 20, arm="control", outcome="miss")
        for exporter in (first, second):
            exporter.observe(f"ray_{LATENCY}", OBSERVED, BOUNDS, arm="control", outcome="miss")
        wait_for(lambda: seen(REQUESTS, r0=110.0, r1=50.0), "the first requests")
        second.scale(0.0)  # the replica restarts
        second.add(f"ray_{REQUESTS}", 7, arm="control", outcome="hit")
        second.add(f"ray_{REQUESTS}", 5, arm="control", outcome="miss")
        wait_for(lambda: seen(REQUESTS, r0=110.0, r1=12.0), "the restart")
        first.set("ray_cachepilot_resident_bytes", 900.0, arm="control", tier="redis")
        second.set("ray_cachepilot_resident_bytes", 700.0, arm="control", tier="redis")
        first.set("ray_cachepilot_window_drift", math.nan, arm="control")
        second.set("ray_cachepilot_window_drift", 0.25, arm="control")
        for exporter in (first, second):
            exporter.remove("ray_cachepilot_knobs_version")
        wait_for(lambda: seen("cachepilot_resident_bytes", r0=900.0, r1=700.0), "the gauges")
        wait_for(lambda: seen("cachepilot_knobs_version"), "the end of a series")
        client = PrometheusConnect(url=url)
        wait_for(
            lambda: all(float(row["value"][1]) >= SCRAPES for row in client.custom_query(f"count_over_time(ray_{REQUESTS}[1h])")),
            f"{SCRAPES} scrapes",
        )
        for source in (scrapers[0], servers[0]):
            source.refresh()
        window = time.time() - began + 1.0
        healthy = {"scrape": scrapers[0].targets(), "prometheus": servers[0].targets()}

        second.kill()
        wait_for(lambda: all(latest(source, REQUESTS) == {("r0",): 110.0} for source in (scrapers[1], servers[1])), "the death")
        died = [source.age(REQUESTS, where={"replica": "r1"}) for source in (scrapers[1], servers[1])]

        def older() -> bool:
            for source in (scrapers[1], servers[1]):
                source.refresh()
            now = [source.age(REQUESTS, where={"replica": "r1"}) for source in (scrapers[1], servers[1])]
            return all(after > before + 1.0 for before, after in zip(died, now, strict=True))

        wait_for(older, "the dead target's age to grow")
        yield Course(
            url,
            file_sd,
            window,
            alive={"scrape": scrapers[0], "prometheus": servers[0]},
            healthy=healthy,
            bereft={"scrape": scrapers[1], "prometheus": servers[1]},
        )


@pytest.fixture(params=["scrape", "prometheus"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(course: Course, kind: str) -> SignalSource:
    return course.alive[kind]


def test_increase_is_what_was_counted_over_all_replicas_and_through_a_restart(source: SignalSource, course: Course) -> None:
    grown = source.increase(REQUESTS, by=("arm", "outcome"), window=course.window)
    assert grown == pytest.approx(TRUTH, rel=TOLERANCE)
    assert all(grown[key] >= value * (1 - 1e-9) for key, value in TRUTH.items()), "counters that began at 0 never lose a request"


def test_increase_sums_over_the_labels_not_asked_for_and_filters_by_those_given(source: SignalSource, course: Course) -> None:
    def of(**where: str) -> dict[tuple[str, ...], float]:
        return source.increase(REQUESTS, where=where, window=course.window)

    assert of() == pytest.approx({(): sum(TRUTH.values())}, rel=TOLERANCE)
    assert of(arm="treatment") == pytest.approx({(): 10.0}, rel=TOLERANCE)
    assert of(arm="control", replica="r1") == pytest.approx({(): 62.0}, rel=TOLERANCE)
    assert of(arm="nobody") == {}


def test_labels_of_the_discovery_file_and_of_ray_can_be_asked_for(source: SignalSource, course: Course) -> None:
    by = ("job", "deployment", "nothing_has_this")
    assert set(source.increase(REQUESTS, by=by, window=course.window)) == {("ray", "Gateway", "")}
    addresses = json.loads(course.file_sd.read_text())[0]["targets"]
    assert set(source.latest("cachepilot_resident_bytes", by=("instance",))) == {(address,) for address in addresses}


def test_the_sources_agree_on_every_series(course: Course) -> None:
    by = ("arm", "outcome", "replica")
    ours, theirs = (course.alive[kind].increase(REQUESTS, by=by, window=course.window) for kind in ("scrape", "prometheus"))
    assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_on_the_very_same_samples_our_increase_is_prometheus_own(course: Course) -> None:
    """Its samples, taken out with a range selector, put through our function, against its function."""
    client = PrometheusConnect(url=course.url)
    # Not the present: a scrape that is under way would become visible between the two queries, with a time before them.
    at = float(client.custom_query(f"max(timestamp(ray_{REQUESTS}))")[0]["value"][1])
    for metric in (f"ray_{REQUESTS}", f"ray_{LATENCY}_bucket"):
        selector = f"{metric}[{round(course.window * 1000)}ms]"
        samples = client.custom_query(selector, params={"time": f"{at:.3f}"})
        values = client.custom_query(f"increase({selector})", params={"time": f"{at:.3f}"})
        theirs = {json.dumps({**row["metric"], "__name__": ""}, sort_keys=True): float(row["value"][1]) for row in values}
        assert len(theirs) > 5
        end = round(at, 3)
        for row in samples:
            times = np.array([float(t) for t, _ in row["values"]])
            column = np.array([[float(v)] for _, v in row["values"]])
            (ours,) = promql.increase(times, column, end - round(course.window, 3), end)
            assert ours == pytest.approx(theirs[json.dumps({**row["metric"], "__name__": ""}, sort_keys=True)], rel=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.2, 0.5, 0.9, 0.99, 1.0])
def test_quantile_interpolates_within_the_bucket(source: SignalSource, course: Course, q: float) -> None:
    found = source.quantile(q, LATENCY, where={"arm": "control"}, window=course.window)
    # Replica r1 restarted after its first observations, so both replicas' growth has the same shape.
    cumulative = [(bound, float(sum(value <= bound for value in OBSERVED))) for bound in (*BOUNDS, math.inf)]
    assert found == pytest.approx({(): promql.histogram_quantile(q, cumulative)}, rel=1e-3)


def test_quantile_of_a_histogram_that_observed_nothing_is_nan(source: SignalSource, course: Course) -> None:
    found = source.quantile(0.5, LATENCY, by=("arm",), window=course.window)
    assert set(found) == {("control",), ("treatment",)}
    assert math.isnan(found["treatment",])
    assert source.quantile(0.5, "cachepilot_no_histogram", window=course.window) == {}


@pytest.mark.parametrize(("how", "value"), [("sum", 1600.0), ("max", 900.0), ("min", 700.0), ("avg", 800.0)])
def test_latest_aggregates_over_replicas(source: SignalSource, how: str, value: float) -> None:
    found = source.latest("cachepilot_resident_bytes", by=("tier",), where={"arm": "control"}, aggregate=how)  # type: ignore[arg-type]
    assert found == {("redis",): value}


def test_a_nan_sample_is_left_out_but_counts_as_seen(source: SignalSource) -> None:
    assert source.latest("cachepilot_window_drift", aggregate="avg") == {(): 0.25}
    assert source.latest("cachepilot_window_drift", by=("replica",)) == {("r1",): 0.25}
    assert source.age("cachepilot_window_drift", where={"replica": "r0"}) < DEADLINE


def test_a_series_that_is_no_longer_exported_is_gone_at_once_and_its_age_stays_known(source: SignalSource) -> None:
    assert source.latest("cachepilot_knobs_version") == {}
    assert source.age(REQUESTS) < source.age("cachepilot_knobs_version") < math.inf


def test_a_metric_never_seen_is_absent_and_infinitely_old(source: SignalSource) -> None:
    assert source.increase("cachepilot_nothing_total", window=5.0) == {}
    assert source.latest("cachepilot_nothing") == {}
    assert source.age("cachepilot_nothing") == math.inf
    assert source.age(REQUESTS, where={"arm": "nobody"}) == math.inf


def test_a_window_with_fewer_than_two_samples_has_no_increase(source: SignalSource) -> None:
    assert source.increase(REQUESTS, window=SCRAPE / 50) == {}


def test_other_metrics_keep_their_name_and_label_values_may_hold_anything(source: SignalSource) -> None:
    text = 'a "b" \\ c\nd}'
    assert source.latest("other_total", by=("quote",)) == {(text,): 5.0}, "the restart took r1's to 0"
    assert source.latest("other_total", where={"quote": text}) == {(): 5.0}
    assert source.latest("other_total", where={"quote": "a"}) == {}


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda s: s.increase('x"} or vector(1', window=1.0), "metric"),
        (lambda s: s.latest("cachepilot_x", by=("a-b",)), "a-b"),
        (lambda s: s.latest("cachepilot_x", where={"a b": "1"}), "a b"),
        (lambda s: s.increase("cachepilot_x", window=0.0), "window"),
        (lambda s: s.increase("cachepilot_x", window=math.nan), "window"),
    ],
)
def test_what_is_no_name_or_no_window_is_refused(source: SignalSource, ask: Callable[[SignalSource], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ask(source)


def test_living_targets_are_up_and_named(course: Course, kind: str) -> None:
    addresses = json.loads(course.file_sd.read_text())[0]["targets"]
    assert {target.url for target in course.healthy[kind]} == {f"http://{address}/metrics" for address in addresses}
    assert all(target.up and not target.error and target.age < DEADLINE for target in course.healthy[kind])


def test_a_dead_target_takes_only_its_own_series_and_shows_its_age(course: Course, kind: str) -> None:
    source = course.bereft[kind]
    assert source.latest(REQUESTS, by=("replica",)) == {("r0",): 110.0}
    assert source.latest("cachepilot_resident_bytes", aggregate="max") == {(): 900.0}
    assert source.age(REQUESTS, where={"replica": "r1"}) > source.age(REQUESTS, where={"replica": "r0"})
    assert source.age(REQUESTS) == source.age(REQUESTS, where={"replica": "r0"})
    dead, alive = sorted(source.targets(), key=lambda target: target.up)
    assert not dead.up
    assert dead.error
    assert alive.up
    assert not alive.error
    assert alive.age < dead.age < math.inf


def test_what_a_dead_target_counted_still_counts_in_the_window(course: Course, kind: str) -> None:
    grown = course.bereft[kind].increase(REQUESTS, by=("replica",), window=course.window + DEADLINE)
    assert grown == pytest.approx({("r0",): 110.0, ("r1",): 62.0}, rel=TOLERANCE)


def test_a_selector_keeps_other_clusters_out(course: Course, kind: str) -> None:
    def made(**selector: str) -> SignalSource:
        if kind == "scrape":
            return ScrapeSource(course.file_sd, selector=selector)
        return PrometheusSource(course.url, selector=selector)

    for selector, expected in (({"application": "cachepilot"}, {(): 110.0}), ({"application": "another"}, {})):
        source = made(**selector)
        try:
            assert source.latest(REQUESTS) == expected
        finally:
            source.close()


def test_nobody_there_at_the_start_is_said_with_what_was_tried(kind: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(SourceUnavailable, match=rf"{address}.*[Cc]onnection refused.*check that") as raised:
        ScrapeSource([address]) if kind == "scrape" else PrometheusSource(f"http://{address}")
    assert "Expected" in str(raised.value)


def test_what_is_no_prometheus_is_said_so(kind: str) -> None:
    with Exporter() as exporter:
        exporter.noise = 'ray_cachepilot_requests_total{arm="control"} not-a-number\n'
        with pytest.raises(SourceUnavailable, match=exporter.address):
            ScrapeSource([exporter.url]) if kind == "scrape" else PrometheusSource(f"http://{exporter.address}")


def test_a_source_that_dies_in_operation_raises_by_call_and_recovers(kind: str, tmp_path: Path) -> None:
    """The embedded scraper when its last target dies; Prometheus when the server does."""
    with ExitStack() as stack:
        exporter = stack.enter_context(Exporter())
        exporter.set(f"ray_{REQUESTS}", 3.0)
        if kind == "scrape":
            source: SignalSource = stack.enter_context(ScrapeSource([exporter.url]))
            assert source.latest(REQUESTS) == {(): 3.0}
            exporter.kill()
            with pytest.raises(SourceUnavailable, match=exporter.address):
                source.refresh()
            assert source.latest(REQUESTS) == {}
        else:
            with prometheus_server(tmp_path, targets=[exporter.address]) as url:
                source = stack.enter_context(PrometheusSource(url))
                assert source.latest("never_there") == {}
            for call in (source.refresh, lambda: source.latest(REQUESTS), source.targets, lambda: source.age(REQUESTS)):
                with pytest.raises(SourceUnavailable, match=url):
                    call()
