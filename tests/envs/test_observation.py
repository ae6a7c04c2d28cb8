"""The observation is fixed, documented, finite and honest about what is missing."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.knob_batch import Grid, SpaceBatch, to_array
from envs.objective import PriceBatch, Prices, grid_cost
from envs.observation import ObservationBatch, ObservationBuilder
from envs.observation_vector import COMPONENTS, DIM, HIGH, LOW, VALIDITY, schema, schema_hash
from envs.signal_batch import SignalBatch
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace

SPACE = KnobSpace(min_size=1 << 18, max_size=1 << 26, min_ttl=2.0, max_ttl=600.0)
PRICES = Prices()
KNOBS = Knobs(1 << 20, 30.0, 0.0)
INDEX = {component.name: i for i, component in enumerate(COMPONENTS)}


def curve(best_row: int = 8, requests: float = 300.0, space: KnobSpace = SPACE) -> GhostCurve:
    """Hits grow with the size up to ``best_row`` and with the TTL up to the middle; staleness grows with the TTL throughout."""
    rows = np.minimum(np.arange(space.size_steps), best_row) / best_row
    columns = np.minimum(np.arange(space.ttl_steps), space.ttl_steps // 2) / (space.ttl_steps // 2)
    hits = (requests if math.isfinite(requests) else 1.0) * 0.8 * rows[:, None] * columns[None, :]
    return GhostCurve(space.sizes, space.ttls, hits, 0.01 * hits * (1.0 + 0.1 * np.arange(space.ttl_steps)), requests)


def window(**changes: Any) -> ArmSignals:
    values: dict[str, Any] = {
        "arm": "treatment", "at": 100.0, "window": 5.0, "requests": 300.0, "qps": 60.0, "hit_ratio": 0.4, "p50": 0.01, "p99": 1.0,
        "latency_sum": 60.0, "hit_latency": 0.003, "miss_latency": 0.3, "resident_bytes": 5e5, "evictions": 10.0,
        "expirations": 5.0, "stale_hits": 1.0, "input_tokens": 9e3, "output_tokens": 5e4, "refresh_input_tokens": 0.0,
        "refresh_output_tokens": 0.0, "upstream_running": 4.0, "upstream_waiting": 0.0, "gpu_cache_usage": 0.5, "entropy": 8.0,
        "drift": 0.2, "regret": 0.3, "ghost": curve(),
    }  # fmt: skip
    return ArmSignals(**{**values, **changes})


def test_every_component_has_a_name_of_its_own_and_a_place_in_the_bounds() -> None:
    assert len(INDEX) == len(COMPONENTS)
    assert DIM == len(COMPONENTS) + len(VALIDITY) == len(LOW) == len(HIGH)
    assert np.all(LOW < HIGH)


def test_whole_signals_leave_only_cells_beyond_the_grid_invalid() -> None:
    builder = ObservationBuilder(SPACE, PRICES)
    observation = builder.build(window(), KNOBS)
    invalid = {name for name in VALIDITY if not observation.valid(name)}
    assert {name for name in invalid if not name.startswith("season_")} == set()
    assert observation.vector.shape == (DIM,)
    assert observation.vector.dtype == np.float32


def test_components_follow_their_documented_normalisation() -> None:
    vector = ObservationBuilder(SPACE, PRICES).build(window(), KNOBS).vector
    expected = {
        "qps": math.log1p(60) / math.log1p(1e4),
        "qps_trend": 0.0,
        "hit_ratio": 2 * 0.4 - 1,
        "p99": math.log(1.0 / PRICES.slo_p99) / math.log(4),
        "fill": 2 * 5e5 / (1 << 20) - 1,
        "evictions": 10 / 300,
        "stale": 1 / 120,
        "gpu_cache": 0.5,
        "entropy": 0.5,
        "warmup": 0.0,
    }
    for name, value in expected.items():
        assert vector[INDEX[name]] == pytest.approx(value, abs=1e-6), name


def test_the_anchor_is_the_cheapest_setting_of_the_grid_and_the_smallest_of_equals() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(window(), KNOBS)
    ghost = curve()
    costs = grid_cost(
        ghost.hits, ghost.stale_hits, ghost.sizes, requests=300.0, duration=5.0, input_tokens_per_miss=9e3 / 180,
        output_tokens_per_miss=5e4 / 180, miss_latency=0.3, hit_latency=0.003, prices=PRICES,
    )  # fmt: skip
    row, column = np.unravel_index(np.argmin(costs), costs.shape)
    assert observation.anchor == Knobs(int(SPACE.sizes[row]), float(SPACE.ttls[column]), 0.0)
    assert observation.anchor_cost == pytest.approx(costs.min())

    free_memory = replace(PRICES, memory_gib_hour=0.0)
    tied = ObservationBuilder(SPACE, free_memory).build(window(), KNOBS)
    assert tied.anchor is not None
    assert tied.anchor.cache_size == SPACE.sizes[8]  # every larger size has the same hits and, without a price, the same cost


def test_of_equal_ttls_the_longest_is_the_anchor() -> None:
    ghost = curve()
    nothing_grew_old = replace(ghost, hits=np.repeat(ghost.hits[:, -1:], SPACE.ttl_steps, axis=1), stale_hits=0.0 * ghost.hits)
    observation = ObservationBuilder(SPACE, PRICES).build(window(ghost=nothing_grew_old), KNOBS)
    assert observation.anchor is not None
    assert observation.anchor.ttl == SPACE.max_ttl


def test_smoothing_keeps_the_anchor_where_one_odd_window_would_move_it() -> None:
    smooth, jumpy = ObservationBuilder(SPACE, PRICES, 0.3), ObservationBuilder(SPACE, PRICES, 1.0)
    for _ in range(6):
        steady = smooth.build(window(), KNOBS)
        jumpy.build(window(), KNOBS)
    odd = window(ghost=curve(best_row=2))
    assert smooth.build(odd, KNOBS).anchor == steady.anchor
    assert jumpy.build(odd, KNOBS).anchor != steady.anchor


def test_a_window_weighs_by_its_requests() -> None:
    builder = ObservationBuilder(SPACE, PRICES, 0.5)
    builder.build(window(ghost=curve(requests=300.0)), KNOBS)
    empty = curve(requests=100.0)
    none = GhostCurve(empty.sizes, empty.ttls, 0 * empty.hits, 0 * empty.hits, 100.0)
    observation = builder.build(window(ghost=none), KNOBS)
    assert observation.curve is not None
    assert observation.curve.hit_ratio.max() == pytest.approx(0.8 * 0.25 * 300 / (0.25 * 300 + 0.5 * 100))


def test_missing_signals_are_zero_with_their_bit_down_and_never_zero_as_a_value() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(window(p99=math.nan, upstream_running=math.inf, ghost=None), KNOBS)
    for name in ("p99", "upstream_running", "anchor_size", "cost_size+1", "predicted_regret"):
        assert not observation.valid(name)
        assert observation.vector[INDEX[name]] == 0.0
        assert math.isnan(observation.raw[name])
    assert observation.anchor is None
    assert observation.curve is None
    assert observation.valid("hit_ratio")


def test_a_curve_is_kept_over_a_gap_and_given_up_after_a_long_one() -> None:
    builder = ObservationBuilder(SPACE, PRICES, patience=2)
    before = builder.build(window(), KNOBS).anchor
    kept = [builder.build(window(ghost=None), KNOBS).anchor for _ in range(3)]
    assert kept == [before, before, None]
    assert builder.build(window(), KNOBS).anchor == before


def test_another_grid_restarts_the_smoothed_curve() -> None:
    builder = ObservationBuilder(SPACE, PRICES)
    builder.build(window(), KNOBS)
    other = replace(SPACE, size_steps=12)
    observation = builder.build(window(ghost=curve(space=other)), KNOBS)
    assert observation.curve is not None
    assert observation.curve.hits.shape == (12, 8)


@pytest.mark.parametrize(
    "bad",
    [
        GhostCurve(SPACE.sizes, SPACE.ttls, np.full((16, 8), math.nan), np.zeros((16, 8)), 300.0),
        GhostCurve(SPACE.sizes, SPACE.ttls, -np.ones((16, 8)), np.zeros((16, 8)), 300.0),
        GhostCurve(SPACE.sizes, SPACE.ttls, np.ones((3, 8)), np.zeros((3, 8)), 300.0),
        GhostCurve(SPACE.sizes[::-1], SPACE.ttls, np.ones((16, 8)), np.zeros((16, 8)), 300.0),
        GhostCurve(SPACE.sizes, SPACE.ttls, np.ones((16, 8)), np.zeros((16, 8)), 0.0),
    ],
    ids=["nan", "negative", "shape", "order", "no requests"],
)
def test_a_malformed_curve_is_no_curve(bad: GhostCurve) -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(window(ghost=bad), KNOBS)
    assert observation.anchor is None


def test_the_hour_is_the_workloads_own() -> None:
    builder = ObservationBuilder(SPACE, replace(PRICES, time_scale=3600.0), clock_origin=1000.0)
    vector = builder.build(window(at=1006.0), KNOBS).vector
    assert vector[INDEX["hour_sin"]] == pytest.approx(1.0)
    assert vector[INDEX["hour_cos"]] == pytest.approx(0.0, abs=1e-6)


def test_the_cost_of_a_change_shows_in_the_window_after_it() -> None:
    builder = ObservationBuilder(SPACE, PRICES)
    assert builder.build(window(), KNOBS).cost.change == 0.0
    moved = Knobs(int(SPACE.sizes[8]), 30.0, 0.0)
    changed = builder.build(window(), moved)
    steps = abs(SPACE.to_steps(moved)[0] - SPACE.to_steps(KNOBS)[0])
    assert changed.cost.change == pytest.approx(steps * PRICES.change_step)
    assert changed.raw["since_change"] == 0.0
    assert builder.build(window(), moved).raw["since_change"] == 1.0


_ANY = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308, 5e-324, -1.0]),
)
_NUMBERS = [f.name for f in fields(ArmSignals) if f.name not in ("arm", "hit_ratio_by_tier", "age", "ghost")]


@st.composite
def _signals(draw: st.DrawFn) -> ArmSignals:
    values: dict[str, Any] = {name: draw(_ANY) for name in draw(st.sets(st.sampled_from(_NUMBERS)))}
    if draw(st.booleans()):
        cells = np.array([draw(_ANY) for _ in range(4)])
        broken = curve(requests=draw(st.sampled_from([0.0, 1.0, 300.0, math.nan, math.inf])))
        hits, stale = broken.hits.copy(), broken.stale_hits.copy()
        hits[::5, ::3], stale[1::5, 1::3] = cells[0], cells[1]
        values["ghost"] = replace(broken, hits=hits, stale_hits=stale)
    return window(**values)


@settings(max_examples=150, deadline=None)
@given(
    windows=st.lists(_signals(), min_size=1, max_size=4),
    size=st.integers(0, 1 << 62),
    ttl=st.one_of(st.floats(min_value=5e-324, allow_nan=False), st.just(math.inf)),
    prices=st.sampled_from([PRICES, Prices(0, 0, 0, 0, 0, 0, 0, 0), Prices(1e12, 1e12, 1e12, 1e12, 1e12, 1e-9, 1e12, 1e12)]),
)
def test_the_vector_is_finite_and_bounded_whatever_the_signals_hold(
    windows: list[ArmSignals], size: int, ttl: float, prices: Prices
) -> None:
    builder = ObservationBuilder(SPACE, prices)
    for signals in windows:
        observation = builder.build(signals, Knobs(size, ttl, 0.3))
        assert np.all(np.isfinite(observation.vector))
        assert np.all(observation.vector >= LOW)
        assert np.all(observation.vector <= HIGH)
        bits = observation.vector[len(COMPONENTS) :]
        assert set(np.unique(bits)) <= {0.0, 1.0}
        for name in VALIDITY:
            if not observation.valid(name):
                assert observation.vector[INDEX[name]] == 0.0
        if observation.anchor is not None:
            assert SPACE.contains(observation.anchor)
            assert math.isfinite(observation.anchor_cost)


@settings(max_examples=40, deadline=None)
@given(
    windows=st.lists(st.lists(_signals(), min_size=3, max_size=3), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 1 << 40), min_size=3, max_size=3),
)
def test_arms_observed_together_see_what_each_would_see_alone_to_the_last_bit(
    windows: list[list[ArmSignals]], sizes: list[int]
) -> None:
    spaces = [SPACE, replace(SPACE, max_size=1 << 24), replace(SPACE, min_ttl=0.5)]
    prices = [PRICES, replace(PRICES, memory_gib_hour=5.0, time_scale=300.0), replace(PRICES, stale_answer=0.1)]
    each = [ObservationBuilder(space, price) for space, price in zip(spaces, prices, strict=True)]
    grid = Grid.of(np.array([SPACE.sizes] * 3), np.array([SPACE.ttls] * 3))
    together = ObservationBatch(SpaceBatch.of(spaces), PriceBatch.of(prices))
    knobs = [Knobs(size, 30.0, 0.1) for size in sizes]
    for step in windows:
        alone = [SignalBatch.alone(signals, Grid.of([SPACE.sizes], [SPACE.ttls])) for signals in step]
        batch = SignalBatch(
            np.concatenate([lane.values for lane in alone], axis=1),
            grid,
            np.concatenate([lane.hits for lane in alone]),
            np.concatenate([lane.stale_hits for lane in alone]),
            np.concatenate([lane.ghost_requests for lane in alone]),
        )
        seen = together.build(batch, to_array(knobs))
        for lane, (builder, signals) in enumerate(zip(each, step, strict=True)):
            expected = builder.build(signals, knobs[lane])
            assert seen.vectors[lane].tobytes() == expected.vector.tobytes()
            observation = seen.lane(lane, spaces[lane], PRICES, signals)
            assert (observation.anchor, observation.last_anchor) == (expected.anchor, expected.last_anchor)
            assert repr((observation.cost, observation.anchor_cost, observation.current_cost, observation.raw)) == repr(
                (expected.cost, expected.anchor_cost, expected.current_cost, expected.raw)
            )


def test_one_absurd_window_does_not_spoil_the_ones_after_it() -> None:
    clean, hit = ObservationBuilder(SPACE, PRICES), ObservationBuilder(SPACE, PRICES)
    clean.build(window(), KNOBS)
    hit.build(window(), KNOBS)
    hit.build(window(qps=1e300, input_tokens=math.inf, miss_latency=-1.0, latency_sum=1e299, ghost=None), KNOBS)
    after, reference = hit.build(window(), KNOBS), clean.build(window(), KNOBS)
    changed = {
        c.name for c in COMPONENTS if after.vector[INDEX[c.name]] != pytest.approx(reference.vector[INDEX[c.name]], abs=1e-6)
    }
    assert changed <= {"since_change", "since_flush", "age"}


def test_the_schema_hash_changes_with_any_name_or_normalisation() -> None:
    assert schema_hash() == schema_hash(schema())
    other = schema()
    other["components"][0]["normalisation"] = "x"
    assert schema_hash(other) != schema_hash()
    other = schema()
    other["version"] += 1
    assert schema_hash(other) != schema_hash()


def test_bad_arguments_are_refused_with_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"smoothing: expected a weight in \(0, 1\]"):
        ObservationBuilder(SPACE, PRICES, 0.0)
    with pytest.raises(ValueError, match="patience"):
        ObservationBuilder(SPACE, PRICES, patience=-1)
