"""Both signal sources read the running gateway: a real Prometheus on Ray's own service-discovery file, and the scraper."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import pytest
from prometheus_api_client import PrometheusConnect

from envs.live_signals import read_signals
from envs.objective import Prices
from envs.prometheus_source import PrometheusSource
from envs.scrape_source import ScrapeSource
from envs.signals import ArmSignals
from envs.sources import SignalSource
from serving.knobs import Knobs, KnobSpace
from tests.e2e.stack import Stack
from tests.prometheus import prometheus_server

pytestmark = pytest.mark.e2e

SCRAPE = 0.5
SAMPLES = 12
TOLERANCE = 2 * 1.1 / (SAMPLES - 1)
"""Counters that ran before are extrapolated at both edges, each by at most 1.1 of so many intervals."""
QUIET = 2.5
"""Replicas gather for a second, Ray reports once a second: counters that all stood still for longer have everything."""
DEADLINE = 90.0
FRESH = 40.0
ASKED = {"control": (12, 3), "treatment": (20, 2)}
"""Distinct questions, and how often each is asked: the first time is a miss."""
WARM = (21, 3)
"""The same of the traffic before: it lifts every series above 0, below which nothing is extrapolated. An odd number of questions,
so that replicas that take turns get each other's."""
KNOBS = Knobs(1 << 20, 600.0)
COUNTERS = {
    "cachepilot_requests_total": ("arm", "outcome"),
    "cachepilot_cacheable_lookups_total": ("arm",),
    "cachepilot_hits_total": ("arm", "tier"),
    "cachepilot_latency_seconds_total": ("arm",),
    "cachepilot_request_latency_seconds_count": ("arm",),
    "cachepilot_upstream_tokens_total": ("arm", "kind"),
    "cachepilot_ghost_requests_total": ("arm",),
}
"""Everything that must stand still at a window's edges, with the labels that are told apart."""

Counted = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class Reading:
    """What both sources said after the same traffic."""

    signals: dict[tuple[str, str], ArmSignals]
    deltas: dict[tuple[str, str], float]
    space: KnobSpace
    kinds: tuple[str, ...] = ("scrape", "prometheus")


def counted(source: SignalSource) -> Counted:
    """Refresh the source and read the counters, and the model's gauge, of which a failed scrape would leave none."""
    source.refresh()
    found = {
        (metric, *labels): round(value, 6)
        for metric, by in COUNTERS.items()
        for labels, value in source.latest(metric, by=by).items()
    }
    return {**found, **{("model", *none): value for none, value in source.latest("vllm:num_requests_running").items()}}


def expected(before: Counted, asked: dict[str, tuple[int, int]]) -> Counted:
    """The counters of requests after each arm was asked so many distinct questions so often."""
    grown: Counted = {}
    for arm, (distinct, times) in asked.items():
        grown["cachepilot_requests_total", arm, "miss"] = distinct
        grown["cachepilot_requests_total", arm, "hit"] = distinct * (times - 1)
        grown["cachepilot_cacheable_lookups_total", arm] = distinct * times
        grown["cachepilot_request_latency_seconds_count", arm] = distinct * times
    return {key: before.get(key, 0.0) + value for key, value in grown.items()}


def ask(stack: Stack, what: dict[str, tuple[int, int]]) -> None:
    for arm, (distinct, times) in what.items():
        questions = [stack.question(arm) for _ in range(distinct)]
        for _ in range(times):
            for question in questions:
                assert stack.ask(question).status == 200


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE} s for {what}"
        time.sleep(SCRAPE / 2)


@pytest.fixture(scope="module")
def reading(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    discovery = stack.gateway.service_discovery
    assert discovery is not None
    wait_for(discovery.is_file, "Ray's service-discovery file")
    directory = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as opened:
        url = opened.enter_context(
            prometheus_server(
                directory,
                file_sd=discovery,
                targets=[urlsplit(stack.model.metrics_url).netloc],
                scrape_interval=f"{SCRAPE * 1000:.0f}ms",
            )
        )
        sources: dict[str, SignalSource] = {
            "scrape": opened.enter_context(
                ScrapeSource([discovery, stack.model.metrics_url], scrape_interval=SCRAPE, timeout=DEADLINE)
            ),
            "prometheus": opened.enter_context(PrometheusSource(url, timeout=DEADLINE)),
        }
        everyone = tuple(sources.values())
        arms = {("cachepilot_requests_total", arm, outcome) for arm in ASKED for outcome in ("hit", "miss")}
        wait_for(lambda: all(arms <= set(counted(source)) for source in everyone), "every counter to be there from 0 on")

        def rest() -> Counted:
            """Wait until neither source has seen anything move for a while; return what it stands at."""
            seen: list[Counted] = []
            changed = time.monotonic()

            def still() -> bool:
                nonlocal seen, changed
                now = [counted(source) for source in everyone]
                if not all(found and found.keys() >= set().union(*seen) for found in now):
                    return False  # a scrape that failed leaves out all of a target, which is not a counter that moved
                if now != seen or now[0] != pytest.approx(now[1], abs=1e-5):
                    seen, changed = now, time.monotonic()
                return time.monotonic() - changed > QUIET

            wait_for(still, "traffic to be counted")
            return seen[0]

        def arrive(total: Counted) -> None:
            wait_for(lambda: all(total.items() <= counted(source).items() for source in everyone), f"the counters to be {total}")

        # A histogram's series appear with their first observation, which is then lost to increase(): let that be another one.
        warm = dict.fromkeys(ASKED, WARM)
        before = rest()
        ask(stack, warm)
        arrive(expected(before, warm))
        before = rest()
        began = time.monotonic()
        ask(stack, ASKED)
        arrive(expected(before, ASKED))
        after = rest()
        server = PrometheusConnect(url=url)
        for_scraper = 0

        def sampled() -> bool:
            """Whether both have so many samples since the traffic began; every look is one of the scraper's."""
            nonlocal for_scraper
            for_scraper += 1
            counted(sources["scrape"])
            window = f"{time.monotonic() - began:.0f}s"
            rows = server.custom_query(f"min(count_over_time(ray_cachepilot_requests_total[{window}]))")
            return for_scraper >= SAMPLES and bool(rows) and float(rows[0]["value"][1]) >= SAMPLES

        wait_for(sampled, f"{SAMPLES} scrapes")
        signals = {}
        for kind, source in sources.items():
            wait_for(lambda source=source: counted(source) == pytest.approx(after, abs=1e-5), f"a good scrape by {kind}")  # type: ignore[misc]
            # The window begins amid the quiet time: `age` is how long before now the reading, hence the window, ends.
            window = time.monotonic() - began - source.age("cachepilot_requests_total") + QUIET / 2
            for arm in ASKED:
                signals[kind, arm] = read_signals(
                    source,
                    arm,
                    window=window,
                    now=time.time(),
                    knobs=KNOBS,
                    space=stack.settings.space.space(),
                    prices=Prices(),
                )
        deltas = {(arm, outcome): after[name, arm, outcome] - before[name, arm, outcome] for name, arm, outcome in sorted(arms)}
        yield Reading(signals, deltas, stack.settings.space.space())


def test_what_was_asked_is_what_was_counted(reading: Reading) -> None:
    for arm, (distinct, times) in ASKED.items():
        assert reading.deltas[arm, "miss"] == distinct
        assert reading.deltas[arm, "hit"] == distinct * (times - 1)


@pytest.mark.parametrize("arm", ASKED)
@pytest.mark.parametrize("kind", ["scrape", "prometheus"])
def test_requests_and_hit_ratio_of_each_arm(reading: Reading, kind: str, arm: str) -> None:
    signals = reading.signals[kind, arm]
    distinct, times = ASKED[arm]
    assert signals.requests == pytest.approx(distinct * times, rel=TOLERANCE)
    assert signals.hit_ratio == pytest.approx(1 - 1 / times, abs=0.02)
    assert sum(signals.hit_ratio_by_tier.values()) == pytest.approx(signals.hit_ratio, abs=0.02)
    assert signals.output_tokens > signals.input_tokens > 0
    assert 0 < signals.hit_latency < signals.miss_latency
    assert 0 < signals.p50 <= signals.p99
    assert signals.resident_bytes > 0
    assert signals.upstream_running == 0.0
    assert signals.gpu_cache_usage >= 0.0
    assert max(signals.age.values()) < FRESH


@pytest.mark.parametrize("arm", ASKED)
@pytest.mark.parametrize("kind", ["scrape", "prometheus"])
def test_the_ghost_curve_of_each_arm_covers_the_grid_and_its_requests(reading: Reading, kind: str, arm: str) -> None:
    signals = reading.signals[kind, arm]
    assert signals.ghost is not None
    assert signals.ghost.hits.shape == (reading.space.size_steps, reading.space.ttl_steps)
    assert signals.ghost.requests == pytest.approx(signals.requests, rel=2 * TOLERANCE)
    # Everything fits the largest setting, so the ghost there has the hits that the cache had.
    assert signals.ghost.hit_ratio[-1, -1] == pytest.approx(signals.hit_ratio, abs=0.05)
    assert np.all(np.diff(signals.ghost.hits, axis=0) >= -1e-6)
    assert signals.regret >= 0.0


@pytest.mark.parametrize("arm", ASKED)
def test_the_two_sources_agree(reading: Reading, arm: str) -> None:
    ours, theirs = (reading.signals[kind, arm] for kind in reading.kinds)
    for name in ("requests", "latency_sum", "input_tokens", "output_tokens"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=TOLERANCE), name
    assert ours.hit_ratio == pytest.approx(theirs.hit_ratio, abs=0.01)
    assert ours.p99 == pytest.approx(theirs.p99, rel=0.1)
    assert ours.resident_bytes == theirs.resident_bytes
    assert not math.isnan(ours.regret)
