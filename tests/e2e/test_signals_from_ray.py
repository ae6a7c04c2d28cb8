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
"""Ray's replicas report once a second: counters that stood still for longer have everything."""
DEADLINE = 40.0
ASKED = {"control": (12, 3), "treatment": (20, 2)}
"""Distinct questions, and how often each is asked: the first time is a miss."""
KNOBS = Knobs(1 << 20, 600.0)


@dataclass(frozen=True)
class Reading:
    """What both sources said after the same traffic."""

    signals: dict[tuple[str, str], ArmSignals]
    deltas: dict[tuple[str, str], float]
    space: KnobSpace
    kinds: tuple[str, ...] = ("scrape", "prometheus")


def counted(source: SignalSource) -> dict[tuple[str, ...], float]:
    source.refresh()
    return source.latest("cachepilot_requests_total", by=("arm", "outcome"))


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
        arms = {(arm, outcome) for arm in ASKED for outcome in ("hit", "miss")}
        wait_for(lambda: all(arms <= set(counted(source)) for source in everyone), "every counter to be there from 0 on")
        # A histogram's series appear with their first observation, which is then lost to increase(): let that be another one.
        for arm in ASKED:
            for question in [stack.question(arm) for _ in range(10)] * 3:
                assert stack.ask(question).status == 200
        seen: dict[tuple[str, ...], float] = {}
        changed = time.monotonic()

        def still() -> bool:
            nonlocal seen, changed
            now = counted(everyone[0])
            if now != seen or now != counted(everyone[1]):
                seen, changed = now, time.monotonic()
            return time.monotonic() - changed > QUIET

        wait_for(still, "earlier traffic to be counted")
        before = counted(everyone[0])
        began = time.monotonic()
        for arm, (distinct, times) in ASKED.items():
            questions = [stack.question(arm) for _ in range(distinct)]
            for _ in range(times):
                for question in questions:
                    assert stack.ask(question).status == 200
        total = sum(before.values()) + sum(distinct * times for distinct, times in ASKED.values())
        for name, source in sources.items():
            wait_for(lambda source=source: sum(counted(source).values()) == total, f"{name} to have counted {total:g}")  # type: ignore[misc]
        wait_for(lambda: time.monotonic() - began > SAMPLES * SCRAPE, "enough samples")
        signals = {}
        for kind, source in sources.items():
            source.refresh()
            window = time.monotonic() - began + 2 * SCRAPE
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
        after = counted(everyone[0])
        deltas = {(arm, outcome): after[arm, outcome] - before[arm, outcome] for arm, outcome in sorted(arms)}
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
    assert max(signals.age.values()) < DEADLINE


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
