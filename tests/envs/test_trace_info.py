"""What is said of a trace: against the plain definitions, on known cases, in one pass over any chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workloads import Trace, info_parts, load, sessions, stream
from envs.workloads.info import MOST_WINDOWS, trace_info
from envs.workloads.info_kernel import BINS, bin_of
from envs.workloads.info_parts import Quantiles, zipf_exponent
from tests.envs import trace_files as files
from tests.requirements import trace as trace_file


def make_trace(
    keys: list[int], *, times: list[float] | None = None, sizes: list[int] | None = None, **columns: list[int]
) -> Trace:
    count = len(keys)
    return Trace(
        name="made",
        time=np.array(times if times is not None else range(count), np.float64),
        key=np.array(keys, np.uint64),
        size=np.array(sizes if sizes is not None else [100] * count, np.int64),
        group=np.array(columns.get("group", [-1] * count), np.int64),
        input_tokens=np.full(count, 3, np.int32),
        output_tokens=np.full(count, 5, np.int32),
        tenant=np.array(columns.get("tenant", [0] * count), np.int32),
        document=np.array(columns.get("document", [-1] * count), np.int64),
        chain=np.array(columns.get("chain", [0] * count), np.int32),
    )


def in_chunks(trace: Trace, width: int) -> list[Trace]:
    return [trace.take(np.arange(start, min(start + width, len(trace)))) for start in range(0, len(trace), width)]


def test_mooncake_has_the_documented_figures() -> None:
    info = trace_info(stream(trace_file("mooncake_conversation.jsonl.gz")))
    assert (info.requests, info.arrivals, info.keys) == (288_500, 12_031, 182_790)
    assert info.infinite_hit_ratio == pytest.approx(0.366, abs=5e-4)
    # Its ids are chained: where a block was met before, so were those before it.
    assert info.infinite_prefix_hit_ratio == info.infinite_hit_ratio
    assert info.chained
    assert info.duration == pytest.approx(59 * 60, abs=60)
    assert info.reuse_sample == 1.0
    assert info.new_share is not None
    assert info.new_share > 0.5


def test_elastic_has_the_documented_figures() -> None:
    info = trace_info(stream(trace_file("elastic_apache.csv.gz")))
    assert (info.requests, info.arrivals, info.keys) == (9_952, 9_952, 1_486)
    assert info.infinite_hit_ratio == pytest.approx(1 - 1_486 / 9_952)
    assert info.duration / 3600 == pytest.approx(83, abs=0.5)
    assert not info.chained


@pytest.mark.parametrize("name", ["elastic_apache.csv.gz", "mooncake_conversation.jsonl.gz"])
def test_any_chunks_say_the_same(name: str) -> None:
    whole = trace_info(load(trace_file(name)), window=600.0).to_dict()
    parts = trace_info(stream(trace_file(name), chunk=1_234), window=600.0).to_dict()
    assert parts.pop("format")
    assert whole.pop("format") == ""
    assert parts.pop("gap_variation") == pytest.approx(whole.pop("gap_variation"))
    assert parts == whole


def plain_distances(keys: list[int], sizes: list[int]) -> tuple[list[int], list[int]]:
    """Reuse distances by their definition: distinct others in between, and the bytes of these and of the entry itself."""
    stack: list[int] = []
    held: dict[int, int] = {}
    others, space = [], []
    for key, size in zip(keys, sizes, strict=True):
        if key in held:
            place = stack.index(key)
            others.append(len(stack) - 1 - place)
            space.append(sum(held[other] for other in stack[place + 1 :]) + size)
            stack.remove(key)
        stack.append(key)
        held[key] = size
    return others, space


def expect_quantiles(found: Quantiles, values: list[int] | list[float]) -> None:
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("most", 1.0)):
        value = getattr(found, name)
        if not values:
            assert value is None
        else:
            ordered = sorted(values)
            assert value == pytest.approx(ordered[max(0, int(np.ceil(share * len(ordered))) - 1)], rel=0.01, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(0, 12), min_size=1, max_size=120),
    chunk=st.integers(1, 50),
    data=st.data(),
)
def test_reuse_and_an_infinite_cache_are_as_defined(keys: list[int], chunk: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 10_000), min_size=len(keys), max_size=len(keys)))
    info = trace_info(in_chunks(make_trace(keys, sizes=sizes), chunk))
    others, space = plain_distances(keys, sizes)
    expect_quantiles(info.reuse_keys, others)
    expect_quantiles(info.reuse_bytes, space)
    last: dict[int, int] = {}
    ages, hit_bytes = [], 0
    for row, key in enumerate(keys):
        if key in last:
            ages.append(float(row - last[key]))
            hit_bytes += sizes[row]
        last[key] = row
    expect_quantiles(info.reuse_age, ages)
    assert info.infinite_hit_ratio == pytest.approx(len(ages) / len(keys))
    assert info.infinite_byte_hit_ratio == pytest.approx(hit_bytes / sum(sizes))
    assert info.keys == len(set(keys))
    assert info.footprint == sum(sizes[row] for row in last.values())
    assert info.one_hit_share == pytest.approx(np.mean([keys.count(key) == 1 for key in set(keys)]))


@given(value=st.integers(0, 2**62))
def test_bins_hold_numbers_to_within_a_hundredth(value: int) -> None:
    place = bin_of(value)
    assert 0 <= place < BINS
    if value < 128:
        assert place == value
    else:
        assert bin_of(int(value * 1.02)) > place or value * 1.02 >= 2**62
        assert bin_of(value + 1) in (place, place + 1)


def test_many_keys_outlast_the_first_positions() -> None:
    # More requests than there are positions at first: they are given out anew, several times over.
    info = trace_info(make_trace(list(range(40_000)) * 7))
    for found, distance in ((info.reuse_keys, 39_999), (info.reuse_bytes, 40_000 * 100)):
        assert found.p10 == found.p50 == found.most == pytest.approx(distance, rel=0.01)
    assert info.reuse_sample == 1.0


def test_a_sample_of_keys_says_nearly_the_same() -> None:
    trace = sessions(200_000, 20_000, alpha=0.4, seed=3)
    exact = trace_info(in_chunks(trace, 10_000))
    sample = trace_info(in_chunks(trace, 10_000), exact_requests=40_000)
    assert exact.reuse_sample == 1.0
    assert sample.reuse_sample == 1 / 8
    assert sample.infinite_hit_ratio == exact.infinite_hit_ratio
    # 2,500 keys are followed: shares are off by a few hundredths, and with them the distances, which reach over all keys.
    for share in ("p25", "p50", "p75", "p90"):
        off = 0.03 * exact.keys
        assert getattr(sample.reuse_keys, share) == pytest.approx(getattr(exact.reuse_keys, share), abs=off)
        off = 0.03 * exact.footprint
        assert getattr(sample.reuse_bytes, share) == pytest.approx(getattr(exact.reuse_bytes, share), abs=off)


def test_a_block_needs_those_before_it() -> None:
    # Request 2 begins anew, so its second block is of no use though it was met before; request 3 repeats request 1.
    trace = make_trace([1, 2, 3, 9, 2, 1, 2, 3], times=[0, 0, 0, 1, 1, 2, 2, 2], chain=[0, 1, 2, 0, 1, 0, 1, 2])
    for chunks in (in_chunks(trace, 8), [trace.take(np.arange(3)), trace.take(np.arange(3, 5)), trace.take(np.arange(5, 8))]):
        info = trace_info(chunks)
        assert info.infinite_hit_ratio == pytest.approx(4 / 8)
        assert info.infinite_prefix_hit_ratio == pytest.approx(3 / 8)
        assert info.infinite_prefix_byte_hit_ratio == pytest.approx(3 / 8)
        assert (info.arrivals, info.chained) == (3, True)


def test_windows_hold_working_set_entropy_and_what_is_new() -> None:
    trace = make_trace([1, 1, 2, 2, 1, 1, 3, 3, 7], times=[0, 1, 2, 3, 10, 11, 12, 13, 40], sizes=[10, 10, 5, 5, 10, 10, 7, 7, 1])
    info = trace_info(trace, window=10.0)
    first, second, last = info.windows
    assert (first.start, first.requests, first.keys, first.bytes) == (0, 4, 2, 15)
    assert (second.start, second.requests, second.keys, second.bytes) == (10, 4, 2, 17)
    assert last.start == 40
    assert first.entropy == pytest.approx(1.0)
    assert first.divergence is None
    assert second.divergence == pytest.approx(np.sqrt(0.5))  # half of each is of keys that the other has not
    assert last.divergence == pytest.approx(1.0)
    assert (first.new_share, second.new_share, last.new_share) == (1.0, 0.5, 1.0)
    assert info.window_count == 3
    assert info.working_set_keys.most == 2


def test_drift_stands_out_of_chance() -> None:
    random = np.random.default_rng(1)
    still = random.integers(0, 50, 20_000)
    moving = still + np.arange(20_000) // 2_000 * 25
    for keys, drifts in ((still, False), (moving, True)):
        info = trace_info(make_trace(keys.tolist()), window=2_000.0)
        assert info.divergence is not None
        assert info.noise is not None
        assert (info.divergence > 2 * info.noise) == drifts
        assert info.new_share == pytest.approx(0.5 if drifts else 0.0, abs=0.05)


def test_entropy_that_rises_has_a_slope() -> None:
    random = np.random.default_rng(2)
    keys = np.concatenate([random.integers(0, 4 * 2**hour, 2_000) for hour in range(6)])
    times = (np.arange(len(keys)) * 1.8).tolist()  # 2,000 requests an hour
    info = trace_info(make_trace(keys.tolist(), times=times), window=3_600.0)
    assert info.entropy_slope == pytest.approx(1.0, rel=0.1)  # twice the keys each hour is one bit an hour


def test_poisson_arrivals_are_not_bursty_and_bursts_are() -> None:
    random = np.random.default_rng(3)
    poisson = np.cumsum(random.exponential(0.1, 50_000))
    bursts = np.sort(np.repeat(np.cumsum(random.exponential(1.0, 5_000)), 10) + random.random(50_000) * 0.01)
    even = trace_info(make_trace([1] * 50_000, times=poisson.tolist()), window=100.0)
    bursty = trace_info(make_trace([1] * 50_000, times=bursts.tolist()), window=100.0)
    assert [scale.seconds for scale in even.scales] == [1.0, 10.0, 100.0]
    assert even.gap_variation == pytest.approx(1.0, rel=0.05)
    assert even.scales[0].dispersion == pytest.approx(1.0, rel=0.1)
    assert bursty.scales[0].dispersion == pytest.approx(10.0, rel=0.15)
    assert bursty.gap_variation is not None
    assert bursty.gap_variation > 2
    assert bursty.scales[0].peak_to_mean is not None
    assert even.scales[0].peak_to_mean is not None
    assert bursty.scales[0].peak_to_mean > even.scales[0].peak_to_mean


@pytest.mark.parametrize("alpha", [0.6, 0.9, 1.2])
def test_a_zipf_law_is_found_again(alpha: float) -> None:
    trace = sessions(300_000, 3_000, alpha=alpha, drift=0.0, repeat=0.0, seed=5)
    info = trace_info(trace)
    assert info.zipf_exponent == pytest.approx(alpha, abs=0.06)
    assert info.zipf_fit is not None
    assert info.zipf_fit > 0.95
    assert zipf_exponent(np.array([7, 7, 7])) == (None, None)


def test_tenants_groups_documents_and_events_are_counted() -> None:
    trace = replace(
        make_trace([1, 2, 3, 4], tenant=[0, 2, 2, 2], document=[5, 5, 6, -1], group=[0, 0, 1, 1]),
        update_time=np.array([1.0, 2.0]),
        update_document=np.array([5, 6]),
        flush_time=np.array([3.0]),
        kind="semantic",
    )
    info = trace_info(trace)
    assert [(tenant.tenant, tenant.requests, tenant.share) for tenant in info.tenants] == [(2, 3, 0.75), (0, 1, 0.25)]
    assert (info.groups, info.documents, info.updates, info.flushes) == (2, 2, 2, 1)
    assert (info.input_tokens, info.output_tokens, info.kind) == (12, 20, "semantic")


def test_tenants_of_a_file_have_their_names(tmp_path: Path) -> None:
    info = trace_info(stream(files.write(tmp_path, "b.csv", files.BURSTGPT)))
    assert [(tenant.name, tenant.requests) for tenant in info.tenants] == [("GPT-4", 2), ("ChatGPT", 1)]
    assert info.format == "burstgpt"
    assert "BurstGPT" in info.note


@pytest.mark.parametrize("keys", [[5], [5, 5, 5, 5], [1, 2, 3]])
def test_the_smallest_traces_say_what_they_can_and_nothing_that_is_not_a_number(keys: list[int]) -> None:
    info = trace_info(make_trace(keys, times=[0.0] * len(keys)))
    assert info.requests == len(keys)
    assert info.rate is None
    assert info.gap_variation is None
    assert info.infinite_hit_ratio == pytest.approx(1 - len(set(keys)) / len(keys))
    assert json.loads(json.dumps(info.to_dict(), allow_nan=False))["requests"] == len(keys)


def test_no_request_and_no_window_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one request"):
        trace_info([])
    with pytest.raises(ValueError, match="window"):
        trace_info(make_trace([1]), window=0.0)


def test_many_windows_are_told_in_part() -> None:
    info = trace_info(make_trace(list(range(3_000))), window=1.0)
    assert info.window_count == 3_000
    assert len(info.windows) <= MOST_WINDOWS
    assert info.windows[0].start == 0


def test_of_very_many_windows_a_sample_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_parts, "KEPT_WINDOWS", 64)
    info = trace_info(make_trace([1, 2] * 500), window=2.0)
    assert info.window_count == 500
    assert 32 <= len(info.windows) <= 64
    assert np.ptp(np.diff([item.start for item in info.windows])) == 0
    assert info.working_set_keys.p50 == 2


def test_progress_ends_at_all_of_the_file() -> None:
    told: list[tuple[int, float]] = []
    trace_info(
        stream(trace_file("elastic_apache.csv.gz"), chunk=2_000), progress=lambda requests, share: told.append((requests, share))
    )
    assert [requests for requests, _ in told] == [2_000, 4_000, 6_000, 8_000, 9_952]
    assert told[-1][1] == 1.0


def test_what_was_left_out_is_told(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.csv", "time,key,size\n1,a,10\n2,b,0\n3,c,-1\n4,a,10\n")
    info = trace_info(stream(path, skip_bad_lines=True))
    assert (info.requests, info.skipped, info.zero_sized) == (2, 1, 1)
