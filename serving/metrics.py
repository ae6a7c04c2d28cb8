"""The metrics of the gateway: one catalogue, from which the instruments are made and the docs are checked.

Names follow Prometheus' conventions (base units, ``_total`` on counters). Every metric carries the label ``arm`` but for those of
the whole process. What a scraper has to know:

* Ray exports a metric as ``ray_`` + its name on every node's metrics port, with labels of its own (``deployment``, ``replica``,
  ``application``, ``WorkerId``, ...). A counter whose name ends with ``_total`` keeps it: ``ray_cachepilot_requests_total``.
* Every counter starts at 0 for every combination of labels that is known beforehand (the ghost's when its replica begins to
  export it, at least a window before they grow); histograms and counters by rule, reason or guard appear with their first value.
* Ray rebuilds a histogram from bucket midpoints, so its ``_bucket`` and ``_count`` are exact but its ``_sum`` is not. The exact
  sum of latencies is ``cachepilot_latency_seconds_total``.
* ``size`` is the decimal integer of the grid's bytes, ``ttl`` the ``repr`` of the grid's float: both parse back exactly.
* A gauge that is undefined (entropy without requests) is not set; it keeps its last value.
* The ghost's metrics, entropy and drift are exported by one replica at a time, which sees the whole traffic: sum the counters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Protocol

from serving.ghost import GhostWindow
from serving.knobs import Knobs, KnobSpace

Kind = Literal["counter", "gauge", "histogram"]

LATENCY_BUCKETS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.65, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0,
)  # fmt: skip
"""Upper bounds in seconds; dense between 0.1 s and 3 s, where P99 of a model behind a cache lies."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name without Ray's prefix, its kind, its labels beside Ray's own, what it means."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


CATALOGUE: tuple[Metric, ...] = (
    Metric("cachepilot_requests_total", "counter", ("arm", "outcome"),
           "Requests by who answered: hit (stale and collapsed ones too), semantic_hit, miss (refreshes too), "
           "bypass (the cache was not asked), error (the upstream failed)."),
    Metric("cachepilot_decisions_total", "counter", ("arm", "rule"), "Requests by the rule that decided (serving/policy.py)."),
    Metric("cachepilot_hits_total", "counter", ("arm", "tier"),
           "Hits by the tier that answered: memory, neighbour (another node's arena), redis, vector."),
    Metric("cachepilot_cacheable_lookups_total", "counter", ("arm",), "Requests that were looked up in the cache."),
    Metric("cachepilot_request_latency_seconds", "histogram", ("arm", "outcome"),
           "Time from a request's arrival at the replica to its complete answer."),
    Metric("cachepilot_latency_seconds_total", "counter", ("arm", "outcome"), "Sum of the latencies of all requests, exact."),
    Metric("cachepilot_coalesced_requests_total", "counter", ("arm",),
           "Hits that waited for the answer to the same question, or nearly the same, that was under way."),
    Metric("cachepilot_clients_left_total", "counter", ("arm",),
           "Requests whose clients went away before their answer's end; in no other figure about requests."),
    Metric("cachepilot_resident_bytes", "gauge", ("arm", "tier"),
           "Bytes held. The redis tier is shared: each replica reports the same number (take the max). Sum over memory: of the"
           " replicas that share an arena one reports what it holds, the others 0."),
    Metric("cachepilot_evictions_total", "counter", ("arm", "tier"), "Entries dropped for want of room by this replica's calls."),
    Metric("cachepilot_memory_shared", "gauge", (),
           "1 where the replica's memory tier is its node's arena, 0 where it has memory of its own."),
    Metric("cachepilot_memory_refused", "gauge", (),
           "1 where the replica has memory of its own since the arena could not be opened; its log says why."),
    Metric("cachepilot_memory_dropped_writes_total", "counter", (),
           "Entries that were not put into the arena since another process was writing all the time; a miss each."),
    Metric("cachepilot_memory_repairs_total", "counter", (),
           "How often this replica found that a writer of the arena had not finished, and repaired it."),
    Metric("cachepilot_neighbour_events_total", "counter", ("transport", "event"),
           "What came of other nodes' memory, by transport (rdma, tcp; none: there was no link): hits, misses, torn, behind,"
           " lost, offered, dropped, refused (serving/tiers/rdma.py)."),
    Metric("cachepilot_neighbour_links", "gauge", ("transport",),
           "Other nodes that the replica reads by that transport now (rdma, tcp); none: nodes to which it has no link."),
    Metric("cachepilot_expirations_total", "counter", ("arm",), "Lookups that found an entry past its TTL."),
    Metric("cachepilot_expected_stale_hits_total", "counter", ("arm",),
           "Each hit adds 1 - 0.5^(age / staleness half-life): the expected number of hits on outdated answers."),
    Metric("cachepilot_upstream_tokens_total", "counter", ("arm", "kind", "cause"),
           "Tokens billed by the upstream; kind: input, output; cause: miss, refresh."),
    Metric("cachepilot_upstream_errors_total", "counter", ("arm",), "Upstream answers that were not 2xx, and failed calls."),
    Metric("cachepilot_upstream_retries_total", "counter", (), "Upstream calls that were made again before their first byte."),
    Metric("cachepilot_upstream_rejections_total", "counter", ("arm",),
           "Requests answered 429 because too many upstream calls were under way or waiting."),
    Metric("cachepilot_answers_not_kept_total", "counter", ("arm", "reason"),
           "Complete upstream answers that were not stored, by the reason (serving/admission.py)."),
    Metric("cachepilot_semantic_objections_total", "counter", ("arm", "guard"),
           "Answers by meaning that a check refused, by its name: a guard, or acceptance."),
    Metric("cachepilot_semantic_verifications_total", "counter", ("arm", "verdict"),
           "Answers by meaning that were compared with the model's own afterwards: right, wrong."),
    Metric("cachepilot_embedding_failures_total", "counter", (), "Texts that could not be embedded in time; a miss each."),
    Metric("cachepilot_vector_failures_total", "counter", (), "Searches for neighbours that failed or came late; a miss each."),
    Metric("cachepilot_upstream_inflight", "gauge", (), "Upstream calls under way from this replica."),
    Metric("cachepilot_window_entropy_bits", "gauge", ("arm",),
           "Shannon entropy of the last window's key distribution, bits, Miller-Madow corrected."),
    Metric("cachepilot_window_drift", "gauge", ("arm",),
           "Jensen-Shannon distance (0..1) between the key distributions of the last two windows."),
    Metric("cachepilot_ghost_requests_total", "counter", ("arm",), "Requests estimated by the ghost's sample."),
    Metric("cachepilot_ghost_hits_total", "counter", ("arm", "size", "ttl"),
           "Hits that the arm would have had with that cache_size (bytes) and ttl (seconds)."),
    Metric("cachepilot_ghost_stale_hits_total", "counter", ("arm", "size", "ttl"),
           "Expected stale hits that the arm would have had with that cache_size and ttl."),
    Metric("cachepilot_knob_cache_size_bytes", "gauge", ("arm",), "Applied cache_size."),
    Metric("cachepilot_knob_ttl_seconds", "gauge", ("arm",), "Applied ttl."),
    Metric("cachepilot_knob_warmup_ratio", "gauge", ("arm",), "Applied warmup_ratio."),
    Metric("cachepilot_knobs_version", "gauge", (), "Version of the desired knobs that this replica has applied."),
)  # fmt: skip
"""Everything the gateway exports."""

BY_NAME = {metric.name: metric for metric in CATALOGUE}

OUTCOMES = ("hit", "semantic_hit", "miss", "bypass", "error")
_STEP = 50
TIERS = ("memory", "redis", "vector")


def size_label(size: int) -> str:
    """Return the label of a point on the grid of sizes (bytes)."""
    return str(int(size))


def ttl_label(ttl: float) -> str:
    """Return the label of a point on the grid of TTLs (seconds)."""
    return repr(float(ttl))


class Sink(Protocol):
    """Where values go. Labels are given in the order of :attr:`Metric.labels`."""

    def add(self, metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        """Add to a counter; 0 makes its series appear."""
        ...

    def set(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""
        ...

    def observe(self, metric: Metric, labels: tuple[str, ...], values: Sequence[float]) -> None:
        """Add values to a histogram."""
        ...


class RaySink:
    """Ray Serve's own metrics; only within a replica."""

    def __init__(self, catalogue: Iterable[Metric] = CATALOGUE) -> None:
        from ray.serve import metrics

        self._made: dict[str, Any] = {}
        for metric in catalogue:
            keys: Any = metric.labels  # Ray's annotation says one label only
            if metric.kind == "counter":
                self._made[metric.name] = metrics.Counter(metric.name, metric.help, tag_keys=keys)
            elif metric.kind == "gauge":
                self._made[metric.name] = metrics.Gauge(metric.name, metric.help, tag_keys=keys)
            else:
                bounds = list(LATENCY_BUCKETS)
                self._made[metric.name] = metrics.Histogram(metric.name, metric.help, boundaries=bounds, tag_keys=keys)

    def add(self, metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        """Add to a counter; 0 makes its series appear."""
        counter = self._made[metric.name]
        tags = dict(zip(metric.labels, labels, strict=True))
        if amount > 0:
            counter.inc(amount, tags)
        else:
            counter._record(0.0, tags)  # inc() refuses 0, but a counter that first appears at 1 has lost that 1 for increase()

    def set(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""
        self._made[metric.name].set(value, dict(zip(metric.labels, labels, strict=True)))

    def observe(self, metric: Metric, labels: tuple[str, ...], values: Sequence[float]) -> None:
        """Add values to a histogram."""
        histogram = self._made[metric.name]
        tags = dict(zip(metric.labels, labels, strict=True))
        for value in values:
            histogram.observe(value, tags)


class PrometheusSink:
    """A registry of its own, for a gateway that runs without Ray; :meth:`exposition` is what it serves at ``/metrics``."""

    def __init__(self, catalogue: Iterable[Metric] = CATALOGUE) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        self._made: dict[str, Any] = {}
        for metric in catalogue:
            if metric.kind == "histogram":
                self._made[metric.name] = Histogram(
                    metric.name, metric.help, metric.labels, buckets=LATENCY_BUCKETS, registry=self._registry
                )
            else:
                kind = Counter if metric.kind == "counter" else Gauge
                self._made[metric.name] = kind(metric.name, metric.help, metric.labels, registry=self._registry)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Any:
        made = self._made[metric.name]
        return made.labels(*labels) if metric.labels else made

    def add(self, metric: Metric, labels: tuple[str, ...], amount: float) -> None:
        """Add to a counter; 0 makes its series appear."""
        self._child(metric, labels).inc(amount)

    def set(self, metric: Metric, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""
        self._child(metric, labels).set(value)

    def observe(self, metric: Metric, labels: tuple[str, ...], values: Sequence[float]) -> None:
        """Add values to a histogram."""
        child = self._child(metric, labels)
        for value in values:
            child.observe(value)

    def exposition(self) -> bytes:
        """Return Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class GatewayMetrics:
    """Counts in plain dictionaries, a fraction of a microsecond each, and hands the sums to a sink when flushed.

    Args:
        arms: The arms; every counter starts at 0 for each.
        space: The grid of the ghost curves.
        sink: Where the sums go.
    """

    def __init__(self, arms: Sequence[str], space: KnobSpace, sink: Sink) -> None:
        self._sink = sink
        self._counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._latencies: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._levels: dict[tuple[str, tuple[str, ...]], float] = {}
        self._sizes = [size_label(size) for size in space.sizes]
        self._ttls = [ttl_label(ttl) for ttl in space.ttls]
        known: Mapping[str, Sequence[str]] = {
            "arm": tuple(arms),
            "outcome": OUTCOMES,
            "tier": TIERS,
            "kind": ("input", "output"),
            "cause": ("miss", "refresh"),
            "size": self._sizes,
            "ttl": self._ttls,
            "verdict": ("right", "wrong"),
            # these appear with their first value: many never have one
            "rule": (),
            "reason": (),
            "guard": (),
            "transport": (),
            "event": (),
        }
        self._known = known
        self._ghosts: set[str] = set()
        for metric in CATALOGUE:
            if not metric.name.startswith("cachepilot_ghost_"):
                self._open(metric)

    def _open(self, metric: Metric, **fixed: str) -> None:
        if metric.kind == "counter":
            values = ([fixed[label]] if label in fixed else self._known[label] for label in metric.labels)
            for labels in product(*values):
                self._sink.add(metric, labels, 0.0)

    def open_hits(self, tier: str) -> None:
        """Let the hits of a tier appear, at 0, that not every gateway has."""
        self._open(BY_NAME["cachepilot_hits_total"], tier=tier)

    def open_ghost(self, arm: str) -> None:
        """Let an arm's ghost counters appear, at 0; only where they are exported, since there are hundreds of them."""
        if arm not in self._ghosts:
            self._ghosts.add(arm)
            for metric in CATALOGUE:
                if metric.name.startswith("cachepilot_ghost_"):
                    self._open(metric, arm=arm)

    def count(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        self._counts[name, labels] += amount

    def level(self, name: str, *labels: str, total: float) -> None:
        """Bring a counter up to a total that is kept elsewhere; a lower total (it was reset) starts anew."""
        before = self._levels.get((name, labels), 0.0)
        self._levels[name, labels] = total
        if (grown := total - before if total >= before else total) > 0:
            self._counts[name, labels] += grown

    def gauge(self, name: str, *labels: str, value: float) -> None:
        """Set a gauge; a value that is not finite leaves it as it was."""
        if math.isfinite(value):
            self._gauges[name, labels] = value

    def request(self, arm: str, outcome: str, latency: float) -> None:
        """Count one answered request and its latency in seconds."""
        self._counts["cachepilot_requests_total", (arm, outcome)] += 1.0
        self._counts["cachepilot_latency_seconds_total", (arm, outcome)] += latency
        self._latencies[arm, outcome].append(latency)

    def tokens(self, arm: str, cause: str, input_tokens: int, output_tokens: int) -> None:
        """Count tokens billed by the upstream; ``cause`` is ``miss`` or ``refresh``."""
        self._counts["cachepilot_upstream_tokens_total", (arm, "input", cause)] += input_tokens
        self._counts["cachepilot_upstream_tokens_total", (arm, "output", cause)] += output_tokens

    def knobs(self, arm: str, knobs: Knobs) -> None:
        """Export the applied knobs; an infinite TTL is exported as such only by not being set."""
        self.gauge("cachepilot_knob_cache_size_bytes", arm, value=float(knobs.cache_size))
        self.gauge("cachepilot_knob_ttl_seconds", arm, value=knobs.ttl)
        self.gauge("cachepilot_knob_warmup_ratio", arm, value=knobs.warmup_ratio)

    def ghost(self, arm: str, window: GhostWindow) -> None:
        """Add what one window's ghost says."""
        self.open_ghost(arm)
        curve = window.curve
        self._counts["cachepilot_ghost_requests_total", (arm,)] += curve.requests
        for name, values in (
            ("cachepilot_ghost_hits_total", curve.hits),
            ("cachepilot_ghost_stale_hits_total", curve.stale_hits),
        ):
            for size, row in zip(self._sizes, values.tolist(), strict=True):
                for ttl, value in zip(self._ttls, row, strict=True):
                    if value > 0:
                        self._counts[name, (arm, size, ttl)] += value
        self.gauge("cachepilot_window_entropy_bits", arm, value=window.entropy)
        self.gauge("cachepilot_window_drift", arm, value=window.drift)

    def flush(self) -> None:
        """Hand everything gathered since the last flush to the sink."""
        for _ in self.flushing():
            pass

    def flushing(self) -> Iterator[None]:
        """:meth:`flush` in steps of about half a millisecond: Ray takes some 10 us for each value of a histogram."""
        counts, self._counts = self._counts, defaultdict(float)
        gauges, self._gauges = self._gauges, {}
        latencies, self._latencies = self._latencies, defaultdict(list)
        for number, ((name, labels), amount) in enumerate(counts.items()):
            if amount > 0:
                self._sink.add(BY_NAME[name], labels, amount)
            if number % _STEP == _STEP - 1:
                yield
        for (name, labels), value in gauges.items():
            self._sink.set(BY_NAME[name], labels, value)
        histogram = BY_NAME["cachepilot_request_latency_seconds"]
        for pair, values in latencies.items():
            for start in range(0, len(values), _STEP):
                self._sink.observe(histogram, pair, values[start : start + _STEP])
                yield
