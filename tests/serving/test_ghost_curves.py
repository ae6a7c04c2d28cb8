"""Ghost curves say what other settings would have done: exactly at rate 1, closely when sampled."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.ghost import Ghost, GhostCurve
from serving.keys import ttl_jitter

SIZES = np.array([1_000, 4_000, 16_000, 64_000])
TTLS = np.array([5.0, 50.0, 1e6])


def lru(
    keys: np.ndarray,
    entry: np.ndarray,
    times: np.ndarray,
    size: int,
    ttl: float,
    half_life: float = math.inf,
    jitter: float = 0.0,
    flush_at: int = -1,
) -> tuple[int, float]:
    """Hits and expected stale hits of one plain LRU with a TTL, flushed before request ``flush_at``."""
    cache: OrderedDict[int, tuple[int, float]] = OrderedDict()
    hits, stale = 0, 0.0
    for row, (key, bytes_, now) in enumerate(zip(keys.tolist(), entry.tolist(), times.tolist(), strict=True)):
        if row == flush_at:
            cache.clear()
        written = now
        if key in cache:
            age = now - cache.pop(key)[1]
            if age <= ttl * ttl_jitter(key, jitter):
                hits += 1
                stale += 1.0 - 0.5 ** (age / half_life)
                written = now - age
        if bytes_ <= size:
            cache[key] = (bytes_, written)
            while sum(held for held, _ in cache.values()) > size:
                cache.popitem(last=False)
    return hits, stale


def zipf(requests: int, keys: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    weights = np.arange(1, keys + 1) ** -0.9
    key = random.choice(keys, requests, p=weights / weights.sum()).astype(np.uint64)
    return key, (100 + (key * 37) % 400).astype(np.int64), np.cumsum(random.exponential(0.01, requests))


def plain_hits(keys: np.ndarray, entry: np.ndarray, times: np.ndarray, size: int, ttl: float) -> int:
    """:func:`lru` for many requests: the same, but the bytes held are counted along."""
    cache: OrderedDict[int, tuple[int, float]] = OrderedDict()
    hits, held = 0, 0
    for key, bytes_, now in zip(keys.tolist(), entry.tolist(), times.tolist(), strict=True):
        if key in cache:
            cache.move_to_end(key)
            if now - cache[key][1] <= ttl:
                hits += 1
                continue
            held -= cache.pop(key)[0]
        cache[key] = (bytes_, now)
        held += bytes_
        while held > size:
            held -= cache.popitem(last=False)[1][0]
    return hits


def assert_exact(
    keys: np.ndarray,
    entry: np.ndarray,
    gaps: np.ndarray,
    *,
    sizes: np.ndarray,
    jitter: float = 0.0,
    half_life: float = math.inf,
    flush_at: int = -1,
) -> None:
    # Eighths of a second: sums and differences of times are exact, so that reference and ghost see the same ages.
    times = np.cumsum(gaps) / 8
    # At most 12 keys with at most 12 write times each: there is room for all of them.
    ghost = Ghost(sizes, TTLS, max_keys=48, ttl_jitter=jitter, staleness_half_life=half_life)
    head = max(flush_at, 0)
    ghost.access_many(keys[:head], entry[:head], times[:head])
    if flush_at >= 0:
        ghost.flush()
    ghost.access_many(keys[head:], entry[head:], times[head:])
    curve = ghost.take().curve
    assert ghost.rate == 1.0
    assert curve.requests == len(keys)
    for row, size in enumerate(sizes):
        for column, ttl in enumerate(TTLS):
            hits, stale = lru(keys, entry, times, size, ttl, half_life, jitter, flush_at)
            assert curve.hits[row, column] == hits
            assert curve.stale_hits[row, column] == pytest.approx(stale)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.integers(0, 1200), st.sampled_from([0, 0, 1, 7, 39, 400])), min_size=1, max_size=60
    ),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([3.0, math.inf]),
    st.integers(-1, 60),
)
def test_at_rate_one_every_setting_is_exact(
    accesses: list[tuple[int, int, int]], jitter: float, half_life: float, flush_at: int
) -> None:
    keys, entry, gaps = (np.array(column) for column in zip(*accesses, strict=True))
    assert_exact(
        keys.astype(np.uint64),
        entry,
        gaps,
        sizes=np.array([300, 1_000, 2_500, 9_000]),  # entries may be larger than the first two, and change between accesses
        jitter=jitter,
        half_life=half_life,
        flush_at=min(flush_at, len(keys)),
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_exact_while_the_log_is_compacted_again_and_again(seed: int, change: bool) -> None:
    random = np.random.default_rng(seed)
    keys = random.integers(0, 12, 700).astype(np.uint64)
    entry = random.integers(1, 900, 700) if change else (50 + 161 * keys).astype(np.int64)
    assert_exact(keys, entry, random.integers(0, 30, 700), sizes=np.array([400, 1_500, 2_600, 5_000]), jitter=0.2)


def test_a_grid_of_many_settings_is_exact() -> None:
    random = np.random.default_rng(11)
    keys = random.integers(0, 60, 4_000).astype(np.uint64)
    entry, times = (50 + 13 * keys).astype(np.int64), np.cumsum(random.integers(0, 9, 4_000)) / 8
    sizes, ttls = np.arange(1, 21) * 1_300, np.geomspace(0.5, 4_000.0, 13)
    ghost = Ghost(sizes, ttls, max_keys=2_000, staleness_half_life=20.0, ttl_jitter=0.1)
    ghost.access_many(keys, entry, times)
    curve = ghost.take().curve
    for row, column in [(0, 0), (1, 11), (4, 12), (9, 4), (12, 12), (13, 0), (19, 7), (19, 12)]:
        hits, stale = lru(keys, entry, times, int(sizes[row]), float(ttls[column]), 20.0, 0.1)
        assert curve.hits[row, column] == hits
        assert curve.stale_hits[row, column] == pytest.approx(stale)


def test_dropping_what_no_setting_can_hit_keeps_every_window_exact() -> None:
    random = np.random.default_rng(3)
    new = np.arange(1_000, 5_000)
    keys = np.where(random.random(4_000) < 0.6, random.integers(0, 40, 4_000), new).astype(np.uint64)
    entry, times = (20 + keys % 60).astype(np.int64), np.arange(4_000) / 8
    ghost = Ghost(np.array([500, 3_000]), TTLS[:2], max_keys=256)
    hits = np.zeros((2, 2))
    for start in range(0, 4_000, 100):
        part = slice(start, start + 100)
        ghost.access_many(keys[part], entry[part], times[part])
        hits += ghost.take().curve.hits
    assert ghost.rate == 1.0
    assert np.array_equal(hits, [[lru(keys, entry, times, size, ttl)[0] for ttl in TTLS[:2]] for size in (500, 3_000)])


def test_an_entry_larger_than_a_budget_pushes_nobody_out_of_it() -> None:
    ghost = Ghost(np.array([100, 1_000]), TTLS)
    for key, size in ((1, 60), (2, 1_000), (1, 60), (2, 1_000)):
        ghost.access(key, size, 0.0)
    hits = ghost.take().curve.hits
    # The small size turns key 2 away and keeps key 1; the large one can hold only one of them at a time.
    assert hits[0, 0] == 1
    assert hits[1, 0] == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_sampled_curve_is_close_to_exact_simulation(seed: int) -> None:
    keys, entry, times = zipf(60_000, 20_000, seed)
    sizes = np.array([50_000, 200_000, 800_000, 3_000_000])
    ghost = Ghost(sizes, TTLS, max_keys=1_024, salt=seed)
    ghost.access_many(keys, entry, times)
    assert ghost.rate <= 1 / 8
    ratio = ghost.take().curve.hit_ratio
    exact = [[plain_hits(keys, entry, times, size, ttl) / len(keys) for ttl in TTLS] for size in sizes]
    assert np.abs(ratio - exact).mean() <= 0.03


def test_hot_keys_are_counted_whatever_the_sample_misses() -> None:
    random = np.random.default_rng(0)
    # One key is half of the traffic, the rest never comes again: any one hash sample is likely to miss the one.
    keys = np.where(random.random(40_000) < 0.5, 7, np.arange(100, 40_100)).astype(np.uint64)
    for salt in range(5):
        ghost = Ghost(np.array([10_000, 10**8]), TTLS, max_keys=256, salt=salt)
        ghost.access_many(keys, np.full(40_000, 100), np.arange(40_000) / 1000)
        ghost.take()
        ghost.access_many(keys, np.full(40_000, 100), np.arange(40_000) / 1000 + 40)
        assert ghost.take().curve.hit_ratio[0, 2] == pytest.approx(0.5, abs=0.02)


def test_keys_that_cooled_make_room_for_new_hot_ones() -> None:
    random = np.random.default_rng(1)
    ghost = Ghost(np.array([40_000, 10**6]), TTLS, max_keys=256)
    for epoch in range(8):
        hot = 1_000_000 * (epoch + 1) + random.integers(0, 60, 20_000)
        new = 10**9 + 20_000 * epoch + np.arange(20_000)
        keys = np.where(random.random(20_000) < 0.7, hot, new).astype(np.uint64)
        times = 20.0 * epoch + np.arange(20_000) / 1000
        for half in (slice(0, 10_000), slice(10_000, 20_000)):
            ghost.access_many(keys[half], np.full(10_000, 100), times[half])
            window = ghost.take()
        # By the second half the new hot set is known: what is not of the sample is counted exactly.
        assert window.curve.hit_ratio[0, 2] == pytest.approx(0.7, abs=0.05)
    assert window.rate < 0.1


def test_single_accesses_do_what_many_at_once_do() -> None:
    keys, entry, times = zipf(3_000, 600, 4)
    one, many = Ghost(SIZES, TTLS, max_keys=128, salt=9), Ghost(SIZES, TTLS, max_keys=128, salt=9)
    many.access_many(keys, entry, times)
    for key, size, now in zip(keys[:2_500].tolist(), entry[:2_500].tolist(), times[:2_500].tolist(), strict=True):
        one.access(key, size, now)
    one.access_many(keys[2_500:], entry[2_500:], times[2_500:])
    assert np.array_equal(one.take().curve.hits, many.take().curve.hits)


def test_keys_above_the_signed_range_are_counted() -> None:
    ghost = Ghost(SIZES, TTLS)
    for now in (0.0, 1.0):
        ghost.access(2**64 - 1, 100, now)
        ghost.access(2**63, 100, now)
    assert ghost.take().curve.hits[0, 0] == 2


def test_a_new_window_starts_from_zero_but_remembers_reuse() -> None:
    ghost = Ghost(SIZES, TTLS)
    ghost.access(1, 100, 0.0)
    assert ghost.take().curve.hits.max() == 0
    ghost.access(1, 100, 1.0)
    window = ghost.take()
    assert window.curve.requests == 1
    assert window.curve.hits.min() == 1


def test_after_a_flush_the_first_access_misses_everywhere() -> None:
    ghost = Ghost(SIZES, TTLS)
    ghost.access(1, 100, 0.0)
    ghost.flush()
    ghost.access(1, 100, 1.0)
    ghost.access(1, 100, 2.0)
    curve = ghost.take().curve
    assert curve.requests == 3
    assert np.all(curve.hits == 1)


def test_keys_that_no_setting_can_hit_do_not_cost_the_sampling_rate() -> None:
    ghost = Ghost(SIZES, TTLS, max_keys=1024)
    for start in range(0, 200_000, 500):
        keys = np.arange(start, start + 500, dtype=np.uint64)
        ghost.access_many(keys, np.full(500, 200), np.full(500, start / 10))
        ghost.take()
    # 64,000 bytes hold 320 of these entries, and 1,000 keys are counted in the last two windows.
    assert ghost.rate == 1.0


def test_rate_falls_and_requests_still_add_up() -> None:
    keys, entry, times = zipf(20_000, 10_000, 5)
    ghost = Ghost(np.array([10**6, 10**9]), TTLS, max_keys=256)
    ghost.access_many(keys, entry, times)
    window = ghost.take()
    assert window.rate == ghost.rate < 0.1
    assert window.curve.requests == len(keys)
    assert np.all((window.curve.hits >= 0) & (window.curve.hits <= len(keys)))
    assert np.all(np.diff(window.curve.hits, axis=0) >= 0)
    assert np.all(np.diff(window.curve.hits, axis=1) >= 0)


def test_a_window_without_requests_has_no_ratio() -> None:
    window = Ghost(SIZES, TTLS).take()
    assert window.curve.requests == 0
    assert np.all(np.isnan(window.curve.hit_ratio))
    assert math.isnan(window.entropy)
    assert math.isnan(window.drift)


def test_a_clone_goes_its_own_way() -> None:
    ghost = Ghost(SIZES, TTLS)
    ghost.access(1, 100, 0.0)
    twin = ghost.clone()
    ghost.access(1, 100, 1.0)
    twin.access(2, 100, 1.0)
    twin.access(1, 100, 100.0)
    assert ghost.take().curve.hits[0].tolist() == [1, 1, 1]
    assert twin.take().curve.hits[0].tolist() == [0, 0, 1]


def test_curve_clips_its_ratio() -> None:
    curve = GhostCurve(SIZES, TTLS, np.full((4, 3), 12.0), np.zeros((4, 3)), 10.0)
    assert np.all(curve.hit_ratio == 1.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sizes": np.array([4, 2])}, "sizes"),
        ({"ttls": np.array([])}, "ttls"),
        ({"max_keys": 3}, "max_keys"),
        ({"ttl_jitter": 1.5}, "ttl_jitter"),
        ({"staleness_half_life": 0.0}, "staleness_half_life"),
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.5}, "rate"),
        ({"decay": 1.0}, "decay"),
        ({"rotate_every": 0.0}, "rotate_every"),
        ({"hot_share": 1.0}, "hot_share"),
        ({"ttl_jitter": math.nan}, "ttl_jitter"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Ghost(**{"sizes": SIZES, "ttls": TTLS, **arguments})  # type: ignore[arg-type]
