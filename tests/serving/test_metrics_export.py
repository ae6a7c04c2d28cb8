"""What is exported, and under which names."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving.ghost import GhostCurve, GhostWindow
from serving.knobs import Knobs, KnobSpace
from serving.metrics import BY_NAME, CATALOGUE, GatewayMetrics, PrometheusSink, size_label, ttl_label
from tests.e2e.stack import samples

SPACE = KnobSpace(size_steps=3, ttl_steps=2)


class Exported:
    """Metrics of two arms and what they look like to a scraper."""

    def __init__(self) -> None:
        self.sink = PrometheusSink()
        self.metrics = GatewayMetrics(["a", "b"], SPACE, self.sink)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        self.metrics.flush()
        order = BY_NAME[name].labels
        found = samples(self.sink.exposition().decode())
        return {tuple(labels[label] for label in order): value for metric, labels, value in found if metric == name}


@pytest.fixture
def exported() -> Exported:
    return Exported()


def test_names_follow_the_conventions() -> None:
    assert len(BY_NAME) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("cachepilot_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_counters_start_at_zero_for_every_known_combination(exported: Exported) -> None:
    assert exported.series("cachepilot_upstream_tokens_total") == {
        (arm, kind, cause): 0.0 for arm in "ab" for kind in ("input", "output") for cause in ("miss", "refresh")
    }
    assert exported.series("cachepilot_ghost_hits_total") == {}


def test_a_request_counts_once_with_its_exact_latency(exported: Exported) -> None:
    for latency in (0.25, 0.5):
        exported.metrics.request("a", "hit", latency)
    assert exported.series("cachepilot_requests_total")["a", "hit"] == 2
    assert exported.series("cachepilot_latency_seconds_total")["a", "hit"] == 0.75
    counts = samples(exported.sink.exposition().decode())
    buckets = {labels["le"]: value for name, labels, value in counts if name == "cachepilot_request_latency_seconds_bucket"}
    assert (buckets["0.2"], buckets["0.3"], buckets["+Inf"]) == (0, 1, 2)


def test_flushing_twice_counts_nothing_twice(exported: Exported) -> None:
    exported.metrics.count("cachepilot_expirations_total", "a")
    assert exported.series("cachepilot_expirations_total")["a",] == 1
    assert exported.series("cachepilot_expirations_total")["a",] == 1


def test_a_level_counts_its_growth_and_starts_anew_after_a_reset(exported: Exported) -> None:
    name = "cachepilot_evictions_total"
    for total in (5.0, 5.0, 8.0, 2.0):
        exported.metrics.level(name, "a", "redis", total=total)
    assert exported.series(name)["a", "redis"] == 10


def test_an_undefined_gauge_keeps_its_value(exported: Exported) -> None:
    exported.metrics.gauge("cachepilot_window_drift", "a", value=0.5)
    assert exported.series("cachepilot_window_drift") == {("a",): 0.5}
    exported.metrics.gauge("cachepilot_window_drift", "a", value=math.nan)
    assert exported.series("cachepilot_window_drift") == {("a",): 0.5}
    exported.metrics.knobs("b", Knobs(7, math.inf, 0.5))
    assert exported.series("cachepilot_knob_cache_size_bytes") == {("b",): 7.0}
    assert exported.series("cachepilot_knob_ttl_seconds") == {}


def test_the_ghosts_labels_parse_back_to_the_grid(exported: Exported) -> None:
    hits = np.arange(6, dtype=float).reshape(3, 2)
    curve = GhostCurve(SPACE.sizes, SPACE.ttls, hits, hits / 2, 10.0)
    exported.metrics.ghost("a", GhostWindow(curve, entropy=3.0, drift=math.nan))
    found = exported.series("cachepilot_ghost_hits_total")
    assert len(found) == 6  # of this arm; the other exports none yet
    for row, size in enumerate(SPACE.sizes):
        for column, ttl in enumerate(SPACE.ttls):
            assert found["a", size_label(int(size)), ttl_label(float(ttl))] == hits[row, column]
    assert {(int(size), float(ttl)) for _, size, ttl in found} == {(int(s), float(t)) for s in SPACE.sizes for t in SPACE.ttls}
    assert exported.series("cachepilot_ghost_requests_total") == {("a",): 10.0}
    assert exported.series("cachepilot_window_entropy_bits") == {("a",): 3.0}
