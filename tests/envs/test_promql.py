"""Our increase and histogram_quantile against Prometheus' own on made samples, and against values worked out by hand."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_api_client import PrometheusConnect

from envs.promql import histogram_quantile, increase
from tests.prometheus import prometheus_server

SERIES = 150
HISTOGRAMS = 60
WINDOWS = ((61.001, 30.001), (61.001, 61.001), (47.501, 20.001), (80.003, 45.001), (35.001, 8.003))
"""End (seconds after the first possible sample) and length; the odd millisecond keeps samples off the edges."""


def limit_at_zero_was_corrected(times: np.ndarray, values: np.ndarray, start: float, end: float) -> bool:
    """Whether this is the case in which Prometheus before 2.52 extrapolated a counter further back than it does now."""
    inside = (times >= start) & (times <= end)
    t, v = times[inside], values[inside]
    if len(t) < 2:
        return False
    grown = v[-1] - v[0] + v[:-1][np.diff(v) < 0].sum()
    spacing = (t[-1] - t[0]) / (len(t) - 1)
    to_start = t[0] - start
    to_zero = (t[-1] - t[0]) * v[0] / grown if grown > 0 else math.inf
    return bool(to_start >= 1.1 * spacing and spacing / 2 < to_zero < to_start)


def test_increase_and_quantile_equal_prometheus_on_random_samples(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    origin = math.floor(time.time()) - 6 * 3600
    counters = []
    for _ in range(SERIES):
        count = int(random.integers(1, 40))
        times = np.sort(random.choice(np.arange(0, 80_000, 2), count, replace=False)) / 1000.0
        steps = random.choice([0.0, 1.0, 3.5, 20.0], count) * random.random(count)
        values = np.cumsum(steps) + random.choice([0.0, 0.0, 5.0, 1e6])
        if count > 3 and random.random() < 0.5:  # a restart
            cut = int(random.integers(1, count))
            values[cut:] -= values[cut - 1]
            values = np.maximum(values, 0.0)
        counters.append((times, values))
    histograms = []
    for _ in range(HISTOGRAMS):
        bounds = np.sort(random.choice([-1.0, 0.0, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0], int(random.integers(1, 7)), replace=False))
        counts = np.cumsum(random.integers(0, 4, len(bounds) + 1)).astype(float)
        histograms.append([*zip(bounds.tolist(), counts.tolist(), strict=False), (math.inf, float(counts[-1]))])

    lines = ["# TYPE made unknown"]
    for number, (times, values) in enumerate(counters):
        lines += [f'made{{s="{number}"}} {v!r} {origin + t:.3f}' for t, v in zip(times.tolist(), values.tolist(), strict=True)]
    lines.append("# TYPE made_bucket unknown")
    for number, buckets in enumerate(histograms):
        for bound, value in buckets:
            shown = "+Inf" if math.isinf(bound) else repr(bound)
            lines.append(f'made_bucket{{h="{number}",le="{shown}"}} {value!r} {origin}.000')
    compared = 0
    with prometheus_server(tmp_path, openmetrics="\n".join([*lines, "# EOF\n"])) as url:
        client = PrometheusConnect(url=url)
        for end, length in WINDOWS:
            query = f"increase(made[{round(length * 1000)}ms])"
            rows = client.custom_query(query, params={"time": f"{origin + end:.3f}"})
            theirs = {int(row["metric"]["s"]): float(row["value"][1]) for row in rows}
            for number, (times, values) in enumerate(counters):
                (ours,) = increase(times, values[:, None], end - length, end)
                if limit_at_zero_was_corrected(times, values, end - length, end):
                    continue
                assert ours == pytest.approx(theirs.get(number, math.nan), rel=1e-9, abs=1e-9, nan_ok=True), (number, end, length)
                compared += not math.isnan(ours)
        for q in (-0.1, 0.0, 0.3, 0.5, 0.99, 1.0, 1.5):
            rows = client.custom_query(f"histogram_quantile({q}, made_bucket)", params={"time": f"{origin + 1}"})
            theirs = {int(row["metric"]["h"]): float(row["value"][1]) for row in rows}
            for number, buckets in enumerate(histograms):
                expected = pytest.approx(theirs[number], rel=1e-12, nan_ok=True)
                assert histogram_quantile(q, buckets) == expected, (q, buckets)
    assert compared > SERIES


def test_a_counter_is_not_extrapolated_to_before_it_was_zero() -> None:
    # Four samples 1 s apart from 10 s on: the window's start is too far away, half a second is assumed.
    times = np.array([10.0, 11.0, 12.0, 13.0])
    rising = np.array([[8.0], [9.0], [10.0], [11.0]])
    assert increase(times, rising, 0.0, 13.0) == pytest.approx([3.0 * 3.5 / 3.0])
    # A counter that was 0.25 above zero was zero a quarter of a second before.
    young = rising - 7.75
    assert increase(times, young, 0.0, 13.0) == pytest.approx([3.0 * 3.25 / 3.0])
    # 0.8 s before its first sample it was zero: later than the window's start, earlier than the half second.
    assert increase(times, rising - 7.2, 0.0, 13.0) == pytest.approx([3.0 * 3.5 / 3.0])


def test_absent_samples_are_passed_over_and_one_sample_is_too_few() -> None:
    nan = math.nan
    times = np.array([0.0, 1.0, 2.0, 3.0])
    values = np.array([[0.0, nan, nan], [nan, 5.0, nan], [4.0, nan, nan], [1.0, nan, nan]])
    assert increase(times, values, 0.0, 3.0) == pytest.approx([5.0, nan, nan], nan_ok=True)
    assert np.isnan(increase(times, values, 2.5, 3.0)).all()


@given(
    steps=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=30),
    factor=st.floats(0.1, 1e3),
)
def test_increase_on_full_windows_is_exact_and_scales(steps: list[float], factor: float) -> None:
    values = np.concatenate([[0.0], np.cumsum(steps)])
    times = np.arange(len(values), dtype=np.float64)
    grown = increase(times, np.stack([values, factor * values], axis=1), 0.0, times[-1])
    assert grown == pytest.approx([values[-1], factor * values[-1]], rel=1e-9, abs=1e-12)


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_stay_within_the_bounds_and_rise_with_q(counts: list[int], low: float, high: float) -> None:
    bounds = [*(float(bound) for bound in range(1, len(counts))), math.inf]
    buckets = list(zip(bounds, np.cumsum(counts).astype(float).tolist(), strict=True))
    low, high = sorted((low, high))
    first, second = histogram_quantile(low, buckets), histogram_quantile(high, buckets)
    if math.isnan(first) or math.isnan(second):
        assert sum(counts) == 0 or low * sum(counts) == 0
    else:
        assert 0.0 <= first <= second <= bounds[-2]
