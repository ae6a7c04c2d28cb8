"""One setting on one trace: what is summed, what is priced, what is refused, and that chunks change nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.objective import Prices, Usage, price
from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import Trace, make
from experiments.simulate import (
    MOST_WINDOWS,
    Load,
    checked_knobs,
    cost_of,
    default_window,
    gathered,
    model_words,
    simulate,
)
from experiments.trace_source import MadeReading, TraceSource, joined
from experiments.units import InputError, parse_duration, parse_size
from serving.knobs import MIB, Knobs
from serving.latency import UpstreamModel
from tests.requirements import trace

CONFIG = SimConfig(ghost_keys=0)
SPEC = "made:sessions?n_requests=3000&n_keys=400&seed=5"
KNOBS = Knobs(200_000, 600.0, 0.1)


def written(tmp_path, rows, name="requests.csv"):
    """A file that the mapped reader knows."""
    path = tmp_path / name
    path.write_text("time,key,size\n" + "".join(f"{at},{key},{size}\n" for at, key, size in rows))
    return str(path)


def test_sizes_are_read_as_people_write_them():
    for text, size in (
        ("0", 0), ("64MiB", 64 * MIB), ("64m", 64 * MIB), ("1.5 GiB", 3 << 29), ("500kB", 500_000), (" 7 b ", 7), ("1e3", 1000),
    ):  # fmt: skip
        assert parse_size(text) == size


def test_durations_are_read_as_people_write_them():
    for text, value in (
        ("90", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("250 ms", 0.25), ("2d", 172_800.0), ("1d 6h", 108_000.0), ("0", 0.0),
        ("never", math.inf), ("inf", math.inf),
    ):  # fmt: skip
        assert parse_duration(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "-1MiB", "64 parsecs", "MiB", "1..5GiB", "nan", "inf", "9e30"])
def test_what_is_no_size_is_named_with_what_was_expected(text):
    with pytest.raises(InputError, match=r"--cache-size: .*expected"):
        parse_size(text, "--cache-size")


@pytest.mark.parametrize("text", ["", "-5m", "5 fortnights", "1h30", "5m1h", "nan", "5m5m", "1e999"])
def test_what_is_no_duration_is_named_with_what_was_expected(text):
    with pytest.raises(InputError, match=r"--ttl: .*expected"):
        parse_duration(text, "--ttl")


@given(st.integers(0, 10**6), st.sampled_from(["", "ms", "s", "m", "h", "d"]))
@settings(max_examples=40, deadline=None)
def test_any_whole_number_of_a_unit_is_that_many_seconds(count, unit):
    factor = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}[unit]
    assert parse_duration(f"{count}{unit}") == pytest.approx(count * factor)


def test_a_ttl_of_0_says_what_to_do_instead():
    with pytest.raises(InputError, match="set the cache size to 0"):
        checked_knobs(MIB, 0.0, 0.0)
    with pytest.raises(InputError, match="warmup_ratio"):
        checked_knobs(MIB, 60.0, 2.0)


def test_the_figures_are_those_of_the_simulator():
    made = make(SPEC)
    result = simulate(TraceSource(SPEC), KNOBS, config=CONFIG, sized=False, window=60.0)
    alone = CacheSimulator(made, CONFIG, KNOBS).step(made.duration + 1e-6)
    figures = result.totals
    assert figures.requests == len(made)
    assert figures.hit_ratio == pytest.approx(alone.signals.hit_ratio)
    assert figures.hit_ratio_by_tier["memory"] == pytest.approx(alone.signals.hit_ratio_by_tier["memory"])
    assert figures.byte_hit_ratio == pytest.approx(alone.byte_hit_ratio)
    assert (figures.p50, figures.p99) == (alone.signals.p50, alone.signals.p99)
    assert figures.evictions == alone.signals.evictions > 0
    assert figures.expirations == alone.signals.expirations > 0
    assert figures.refreshes == alone.refreshes > 0
    assert figures.output_tokens == alone.signals.output_tokens + alone.signals.refresh_output_tokens
    assert figures.resident_bytes == alone.signals.resident_bytes <= KNOBS.cache_size
    expected = price(alone.usage, CONFIG.prices)
    assert figures.cost.tokens == pytest.approx(expected.tokens)
    assert figures.cost.memory == pytest.approx(expected.memory)
    assert figures.cost.latency == pytest.approx(expected.latency)


def test_windows_follow_each_other_to_the_end_of_the_trace():
    result = simulate(TraceSource(SPEC), KNOBS, config=CONFIG, window=100.0)
    assert [row.start for row in result.rows[1:]] == [row.end for row in result.rows[:-1]]
    assert result.rows[0].start == 0.0
    assert result.rows[-1].end == pytest.approx(make(SPEC).duration, abs=1e-3)
    assert {round(row.end - row.start, 6) for row in result.rows[:-1]} == {100.0}
    told = result.to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert len(told["windows"]) == len(result.rows)
    assert sum(window["requests"] for window in told["windows"]) == told["totals"]["requests"]


@given(st.lists(st.sampled_from([0.0, 0.0, 0.5, 3.0]), min_size=2, max_size=120), st.integers(1, 30), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_chunks_change_nothing(gaps, chunk, seed):
    random = np.random.default_rng(seed)
    count = len(gaps)
    whole = Trace(
        name="t", time=np.cumsum(gaps), key=random.integers(1, 12, count).astype(np.uint64),
        size=random.integers(100, 400, count), group=np.full(count, -1, np.int64),
        input_tokens=np.full(count, 10, np.int32), output_tokens=np.full(count, 20, np.int32),
    )  # fmt: skip
    whole = replace(whole, time=whole.time - whole.time[0])

    class Cut(TraceSource):
        def open(self):
            reading = MadeReading(whole)
            parts = [whole.take(np.arange(at, min(at + chunk, count))) for at in range(0, count, chunk)]
            reading.__class__ = type("Chunks", (MadeReading,), {"__iter__": lambda self: iter(parts)})
            return reading

    class Whole(TraceSource):
        def open(self):
            return MadeReading(whole)

    knobs = Knobs(1500, 8.0)
    one = simulate(Whole("t"), knobs, config=CONFIG, sized=False, window=2.0)
    other = simulate(Cut("t"), knobs, config=CONFIG, sized=False, window=2.0)
    assert [row.end for row in one.rows] == pytest.approx([row.end for row in other.rows])
    for name in ("requests", "hit_ratio", "byte_hit_ratio", "evictions", "expirations", "output_tokens", "resident_bytes"):
        assert getattr(one.totals, name) == pytest.approx(getattr(other.totals, name), nan_ok=True), name


def test_a_real_trace_in_chunks_is_the_same_as_in_one():
    path = str(trace("mooncake_conversation.jsonl.gz"))
    knobs = Knobs(16 * MIB, 600.0)
    one = simulate(TraceSource(path, limit=60_000), knobs, config=CONFIG, sized=False, window=60.0).totals
    other = simulate(TraceSource(path, limit=60_000, chunk=7_000), knobs, config=CONFIG, sized=False, window=60.0).totals
    assert one.evictions == other.evictions > 0
    assert one.hit_ratio == other.hit_ratio > 0
    assert one.output_tokens == other.output_tokens


def test_an_empty_cache_keeps_nothing_and_says_so():
    result = simulate(TraceSource(SPEC), Knobs(0, math.inf), config=CONFIG)
    assert result.totals.hit_ratio == 0.0
    assert result.totals.resident_bytes == 0
    assert result.totals.cost.memory == 0.0
    assert any("nothing is kept" in text for text in result.warnings)


def test_entries_larger_than_the_whole_cache_are_counted():
    made = make(SPEC)
    result = simulate(TraceSource(SPEC), Knobs(int(np.median(made.size)), math.inf), config=CONFIG)
    assert result.oversized == int((made.size > np.median(made.size)).sum())
    assert any("larger than the whole cache" in text for text in result.warnings)


def test_one_request_is_a_run(tmp_path):
    result = simulate(TraceSource(written(tmp_path, [(5, "a", 100)])), KNOBS, config=CONFIG)
    assert result.totals.requests == 1
    assert result.totals.hit_ratio == 0.0
    assert len(result.rows) == 1


def test_the_memory_of_a_silence_is_paid_for():
    quiet = Usage(0, 0, 0, 0, math.nan, 0, 1 << 30, 3600.0)
    busy = Usage(1000, 0, 0, 0, 1.0, 0, 1 << 30, 3600.0)
    prices = Prices(memory_gib_hour=0.5)

    class Row:
        def __init__(self, usage):
            self.figures = type("Figures", (), {"usage": usage})

    assert cost_of(gathered([Row(busy)]), prices).memory == pytest.approx(0.5)
    assert cost_of(gathered([Row(busy), Row(quiet)]), prices).memory == pytest.approx(1.0)
    assert math.isnan(cost_of(gathered([Row(quiet)]), prices).total)


def test_p99_above_its_objective_is_priced_by_window():
    class Row:
        def __init__(self, requests, p99):
            self.figures = type("Figures", (), {"usage": Usage(requests, 0, 0, 0, p99, 0, 0, 1.0)})

    prices = Prices(slo_p99=1.0, slo_second=0.1)
    assert cost_of(gathered([Row(100, 3.0), Row(300, 0.5)]), prices).slo == pytest.approx(0.25 * 0.2)


def test_the_model_is_sized_for_the_load_or_taken_as_given():
    made = make(SPEC)
    sized = simulate(TraceSource(SPEC), KNOBS, config=CONFIG)
    assert sized.load == Load.of(made)
    assert sized.config.upstream == Load.of(made).model()
    assert "sized for" in model_words(sized.config.upstream, sized.load)
    model = UpstreamModel(slots=3, ttft=0.5)
    given_one = simulate(TraceSource(SPEC), KNOBS, config=replace(CONFIG, upstream=model), sized=False)
    assert given_one.config.upstream == model
    assert "as given" in model_words(model, given_one.load)


def test_a_window_that_makes_too_many_is_refused():
    with pytest.raises(InputError, match=f"at most {MOST_WINDOWS:,} windows"):
        simulate(TraceSource(SPEC), KNOBS, config=CONFIG, window=1e-4)


@pytest.mark.parametrize(("seconds", "window"), [(10.0, 1.0), (3600.0, 60.0), (86_400.0, 600.0), (10 * 86_400.0, 21_600.0)])
def test_the_default_window_makes_at_most_200(seconds, window):
    assert default_window(seconds) == window
    assert seconds / default_window(seconds) <= 200


def test_joined_chunks_are_the_trace():
    made = make(SPEC)
    parts = [made.take(np.arange(at, min(at + 700, len(made)))) for at in range(0, len(made), 700)]
    again = joined(parts)
    assert np.array_equal(again.key, made.key)
    assert np.array_equal(again.time, made.time)
    with pytest.raises(ValueError, match="at least one chunk"):
        joined([])


def test_bad_lines_that_were_left_out_are_told(tmp_path):
    path = written(tmp_path, [(0, "a", 100), (1, "a", -5), (2, "a", 100), (3, "a", "x")])
    result = simulate(TraceSource(path, skip_bad_lines=True), KNOBS, config=CONFIG)
    assert result.totals.requests == 2
    assert any("2 bad lines left out" in text for text in result.warnings)


def test_progress_is_told_to_the_end():
    seen = []
    simulate(TraceSource(SPEC), KNOBS, config=CONFIG, progress=lambda *what: seen.append(what))
    assert seen[-1] == ("simulating", 1.0, 3000)
