from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields

import numpy as np
import pytest

from envs.live_signals import read_signals, regret
from envs.objective import Prices, grid_cost
from envs.scrape_source import ScrapeSource
from envs.signals import ArmSignals
from serving.ghost import Ghost, GhostWindow
from serving.knobs import Knobs, KnobSpace
from serving.metrics import GatewayMetrics, PrometheusSink
from tests.envs.live_gateway import as_ray
from tests.exporter import Exporter

SPACE = KnobSpace(min_size=10_000, max_size=1_000_000, min_ttl=5.0, max_ttl=5000.0, size_steps=5, ttl_steps=3)
PRICES = Prices()
KNOBS = Knobs(100_000, 50.0, 0.1)
WINDOW = 10.0


class Replica:
    """The real instruments of one gateway replica, shown as Ray shows them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exporter = Exporter()
        self.sink = PrometheusSink()
        self.metrics = GatewayMetrics(["control", "treatment"], SPACE, self.sink)
        for arm in ("control", "treatment"):
            self.metrics.open_ghost(arm)
        self.extra = ""
        self.edit: Callable[[str], str] = str
        self.publish()

    def publish(self) -> None:
        self.metrics.flush()
        self.exporter.noise = self.edit(as_ray(self.sink.exposition().decode(), self.name)) + self.extra


class Stage:
    """Two replicas and a scraper whose clock stands still between scrapes: the window's numbers are exact."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.replicas = [Replica("r0"), Replica("r1")]
        self.first, self.second = (replica.metrics for replica in self.replicas)
        self.source = ScrapeSource(
            [replica.exporter.url for replica in self.replicas], scrape_interval=None, clock=lambda: self.now
        )

    def signals(self, arm: str = "control") -> ArmSignals:
        """End the window and read it."""
        self.now += WINDOW
        for replica in self.replicas:
            replica.publish()
        self.source.refresh()
        return self.read(arm)

    def read(self, arm: str = "control") -> ArmSignals:
        return read_signals(self.source, arm, window=WINDOW, now=self.now, knobs=KNOBS, space=SPACE, prices=PRICES)

    def close(self) -> None:
        self.source.close()
        for replica in self.replicas:
            replica.exporter.kill()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def serve(metrics: GatewayMetrics, hits: dict[str, int], misses: int, arm: str = "control") -> None:
    for tier, count in hits.items():
        metrics.count("cachepilot_hits_total", arm, tier, amount=count)
        for _ in range(count):
            metrics.request(arm, "semantic_hit" if tier == "vector" else "hit", 0.004)
    for _ in range(misses):
        metrics.request(arm, "miss", 0.9)
        metrics.tokens(arm, "miss", 10, 200)
    metrics.count("cachepilot_cacheable_lookups_total", arm, amount=sum(hits.values()) + misses)


def test_one_window_of_two_replicas_is_read_back_as_it_was(stage: Stage) -> None:
    serve(stage.first, {"memory": 40, "redis": 20, "vector": 5}, 15)
    serve(stage.second, {"memory": 10, "redis": 0}, 10)
    serve(stage.second, {"memory": 3}, 4, arm="treatment")
    stage.first.request("control", "bypass", 0.5)
    stage.second.tokens("control", "refresh", 7, 70)
    stage.first.count("cachepilot_expirations_total", "control", amount=3)
    stage.first.count("cachepilot_expected_stale_hits_total", "control", amount=1.5)
    stage.second.count("cachepilot_evictions_total", "control", "redis", amount=6)
    stage.second.count("cachepilot_evictions_total", "control", "memory", amount=60)
    for metrics, memory in ((stage.first, 1000.0), (stage.second, 500.0)):
        metrics.gauge("cachepilot_resident_bytes", "control", "redis", value=9000.0)
        metrics.gauge("cachepilot_resident_bytes", "control", "memory", value=memory)
        metrics.gauge("cachepilot_upstream_inflight", value=2.0)
    s = stage.signals()
    assert (s.arm, s.at, s.window) == ("control", stage.now, WINDOW)
    assert s.requests == pytest.approx(101.0)
    assert s.qps == pytest.approx(10.1)
    assert s.hit_ratio == pytest.approx(0.75)
    assert s.hit_ratio_by_tier == pytest.approx({"memory": 0.5, "redis": 0.2, "vector": 0.05})
    assert s.latency_sum == pytest.approx(75 * 0.004 + 25 * 0.9 + 0.5)
    assert s.hit_latency == pytest.approx(0.004)
    assert s.miss_latency == pytest.approx(0.9)
    assert (s.input_tokens, s.output_tokens) == pytest.approx((250.0, 5000.0))
    assert (s.refresh_input_tokens, s.refresh_output_tokens) == pytest.approx((7.0, 70.0))
    assert s.expirations == pytest.approx(3.0)
    assert s.stale_hits == pytest.approx(1.5)
    assert s.resident_bytes == 9000.0, "the memory tiers hold copies of what the shared tier holds"
    assert s.evictions == pytest.approx(6.0), "what only left a memory tier is still in the shared one"
    assert s.upstream_running == 4.0
    assert all(age == 0.0 for age in s.age.values())
    other = stage.read("treatment")
    assert other.requests == pytest.approx(7.0)
    assert other.hit_ratio == pytest.approx(3 / 7)


def test_without_a_shared_tier_the_memory_tiers_are_the_budget(stage: Stage) -> None:
    stage.first.gauge("cachepilot_resident_bytes", "control", "memory", value=1000.0)
    stage.second.gauge("cachepilot_resident_bytes", "control", "memory", value=500.0)
    stage.first.count("cachepilot_evictions_total", "control", "memory", amount=4)
    s = stage.signals()
    assert s.resident_bytes == 1500.0
    assert s.evictions == pytest.approx(4.0)


def test_latency_quantiles_come_from_the_histogram(stage: Stage) -> None:
    serve(stage.first, {"memory": 1}, 1)  # a histogram's series appear with its first observation
    stage.signals()
    serve(stage.first, {"memory": 90}, 10)
    s = stage.signals()
    assert 0.003 <= s.p50 <= 0.005
    assert 0.8 <= s.p99 <= 1.0


def test_a_window_without_requests_has_no_ratios_and_no_cost(stage: Stage) -> None:
    s = stage.signals()
    assert s.requests == 0.0
    for value in (s.hit_ratio, s.p99, s.hit_latency, s.miss_latency, s.regret):
        assert math.isnan(value)


def test_missing_metrics_are_nan_never_zero() -> None:
    now = 100.0
    with Exporter() as exporter:
        exporter.set("ray_cachepilot_something_else", 1.0, arm="control")
        with ScrapeSource([exporter.url], scrape_interval=None, clock=lambda: now) as source:
            now += WINDOW
            source.refresh()
            s = read_signals(source, "control", window=WINDOW, now=now, knobs=KNOBS, space=SPACE, prices=PRICES)
    assert s.ghost is None
    assert s.hit_ratio_by_tier == {}
    assert s.age
    assert all(age == math.inf for age in s.age.values())
    kept = {"arm", "at", "window", "ghost", "hit_ratio_by_tier", "age"}
    assert [f.name for f in fields(s) if f.name not in kept and not math.isnan(getattr(s, f.name))] == []


def test_the_age_of_every_group_grows_when_scrapes_bring_nothing(stage: Stage) -> None:
    serve(stage.first, {"memory": 1}, 0)
    stage.signals()
    for replica in stage.replicas:
        replica.exporter.kill()
    stage.replicas.clear()
    alive = Exporter()
    alive.set("ray_cachepilot_something_else", 1.0)
    with alive:
        stage.source._where_from = [*stage.source._where_from, alive.url]  # type: ignore[misc]
        s = stage.signals()
    assert all(age in (WINDOW, math.inf) for age in s.age.values())
    assert s.age["requests"] == WINDOW


def filled_curve(metrics: GatewayMetrics, arm: str = "control", seed: int = 1) -> GhostWindow:
    ghost = Ghost(SPACE.sizes, SPACE.ttls, staleness_half_life=100.0)
    random = np.random.default_rng(seed)
    for step, key in enumerate(np.minimum(random.zipf(1.3, 800), 300).tolist()):
        ghost.access(key, 2000, step * 0.1)
    window = ghost.take()
    metrics.ghost(arm, window)
    return window


def test_the_ghost_curve_comes_back_on_the_grid_summed_over_replicas(stage: Stage) -> None:
    one, two = filled_curve(stage.first, seed=1), filled_curve(stage.second, seed=2)
    filled_curve(stage.second, arm="treatment", seed=3)
    curve = stage.signals().ghost
    assert curve is not None
    assert np.array_equal(curve.sizes, SPACE.sizes)
    assert np.array_equal(curve.ttls, SPACE.ttls)
    assert curve.requests == pytest.approx(1600.0)
    assert curve.hits == pytest.approx(one.curve.hits + two.curve.hits)
    assert curve.stale_hits == pytest.approx(one.curve.stale_hits + two.curve.stale_hits)
    assert curve.hits.min() < curve.hits.max()


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        (f'size="{SPACE.sizes[2]}"', None),
        (f'size="{SPACE.sizes[2]}"', 'size="777"'),
        (f'size="{SPACE.sizes[2]}"', 'size="large"'),
        (f'size="{SPACE.sizes[2]}"', f'size="{SPACE.sizes[1]}.0"'),
    ],
    ids=["absent", "another grid", "no number", "twice"],
)
def test_a_curve_that_does_not_cover_the_grid_is_refused(stage: Stage, line: str, instead: str | None) -> None:
    def edit(text: str) -> str:
        lines = [row.replace(line, instead or "") for row in text.splitlines() if line not in row or instead]
        return "\n".join(lines) + "\n"

    for replica in stage.replicas:
        replica.edit = edit
    filled_curve(stage.first)
    stage.signals()
    filled_curve(stage.first)
    s = stage.signals()
    assert s.ghost is None
    assert math.isnan(s.regret)


def test_entropy_and_drift_are_weighted_by_the_replicas_requests(stage: Stage) -> None:
    for metrics, requests, entropy in ((stage.first, 30, 4.0), (stage.second, 10, 8.0)):
        serve(metrics, {"memory": requests}, 0)
        metrics.gauge("cachepilot_window_entropy_bits", "control", value=entropy)
    stage.second.gauge("cachepilot_window_drift", "control", value=0.5)
    s = stage.signals()
    assert s.entropy == pytest.approx(5.0)
    assert s.drift == 0.5, "a replica that has not yet seen two windows does not count"
    idle = stage.signals()
    assert idle.entropy == pytest.approx(6.0)


@pytest.mark.parametrize("usage", ["vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"])
def test_the_models_own_metrics_come_before_the_gateways(stage: Stage, usage: str) -> None:
    stage.first.gauge("cachepilot_upstream_inflight", value=50.0)
    stage.replicas[
        0
    ].extra = (
        f'vllm:num_requests_running{{model_name="m"}} 7.0\nvllm:num_requests_waiting{{model_name="m"}} 3.0\n{usage}{{}} 0.4\n'
    )
    stage.replicas[1].extra = f'vllm:num_requests_running{{model_name="m"}} 1.0\n{usage}{{}} 0.6\n'
    s = stage.signals()
    assert (s.upstream_running, s.upstream_waiting, s.gpu_cache_usage) == pytest.approx((8.0, 3.0, 0.5))


def test_regret_is_the_cost_of_the_knobs_over_the_best_of_the_grid(stage: Stage) -> None:
    filled_curve(stage.first)
    serve(stage.first, {"memory": 300}, 500)
    s = stage.signals()
    assert s.ghost is not None
    costs = grid_cost(
        s.ghost.hits,
        s.ghost.stale_hits,
        SPACE.sizes,
        requests=s.ghost.requests,
        duration=WINDOW,
        input_tokens_per_miss=10.0,
        output_tokens_per_miss=200.0,
        miss_latency=0.9,
        hit_latency=0.004,
        prices=PRICES,
    )
    for row, size in enumerate(SPACE.sizes.tolist()):
        for column, ttl in enumerate(SPACE.ttls.tolist()):
            assert regret(s, Knobs(size, ttl), PRICES) == pytest.approx(costs[row, column] / costs.min() - 1.0, abs=1e-9)
    assert s.regret == pytest.approx(regret(s, KNOBS, PRICES))
    assert s.regret > 0
    between = regret(s, Knobs(int(math.sqrt(10_000 * SPACE.sizes[1])), SPACE.ttls[0]), PRICES)
    ends = [regret(s, Knobs(int(size), SPACE.ttls[0]), PRICES) for size in SPACE.sizes[:2]]
    assert between == pytest.approx(sum(ends) / 2, rel=0.01)


def test_labels_of_the_instruments_are_those_that_are_read() -> None:
    """The grid's labels survive the exposition to the last digit that matters, whatever the bounds."""
    for space in (KnobSpace(), SPACE, KnobSpace(min_size=3, max_size=7, size_steps=5, min_ttl=0.001, max_ttl=1e9, ttl_steps=23)):
        sink = PrometheusSink()
        GatewayMetrics(["a"], space, sink).open_ghost("a")
        clock = iter((1.0, 1.0, 1.0 + WINDOW, 1.0 + WINDOW))
        with Exporter() as exporter:
            exporter.noise = as_ray(sink.exposition().decode(), "r0")
            with ScrapeSource([exporter.url], scrape_interval=None, clock=clock.__next__) as source:
                source.refresh()
                s = read_signals(source, "a", window=WINDOW, now=1.0 + WINDOW, knobs=KNOBS, space=space, prices=PRICES)
        assert s.ghost is not None
        assert s.ghost.hits.shape == (space.size_steps, space.ttl_steps)
