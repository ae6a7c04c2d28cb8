"""The metrics of the gateway: one catalogue, from which the instruments are made and the docs are checked.

Ray exports them through its own agent with the prefix ``ray_``; the names follow Prometheus' conventions (base units, ``_total`` on
counters). Every metric carries the label ``arm`` but for those of the whole process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
           "Requests by outcome: hit, semantic_hit, miss, bypass (not cacheable), error (the upstream failed)."),
    Metric("cachepilot_hits_total", "counter", ("arm", "tier"), "Hits by the tier that answered: memory, redis, vector."),
    Metric("cachepilot_cacheable_lookups_total", "counter", ("arm",), "Requests that were looked up in the cache."),
    Metric("cachepilot_request_latency_seconds", "histogram", ("arm", "outcome"),
           "Time from a request's arrival at the replica to its complete answer."),
    Metric("cachepilot_resident_bytes", "gauge", ("arm", "tier"),
           "Bytes held. The redis tier is shared: each replica reports the same number (take the max); sum over memory tiers."),
    Metric("cachepilot_evictions_total", "counter", ("arm", "tier"), "Entries dropped for want of room."),
    Metric("cachepilot_expirations_total", "counter", ("arm",), "Lookups that found an entry past its TTL."),
    Metric("cachepilot_expected_stale_hits_total", "counter", ("arm",),
           "Each hit adds 1 - 0.5^(age / staleness half-life): the expected number of hits on outdated answers."),
    Metric("cachepilot_upstream_tokens_total", "counter", ("arm", "kind", "cause"),
           "Tokens billed by the upstream; kind: input, output; cause: miss, refresh."),
    Metric("cachepilot_upstream_errors_total", "counter", ("arm",), "Upstream answers that were not 2xx, and failed connections."),
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
