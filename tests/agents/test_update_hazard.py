"""When answers were updated, learned from one setting's stale hits, and what that makes of another's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.update_hazard import MOST_UPDATES, UpdateMeter, Updates, oldest_age
from envs.signals import ArmSignals
from serving.ghost import Ghost, GhostCurve
from serving.knobs import Knobs

WINDOW = 600.0
SIZES = np.array([1 << 20, 1 << 24])
TTLS = np.array([600.0 * 3.0**power for power in range(8)], np.float64)
BRIEF, LONG = Knobs(1 << 24, 6_000.0, 0.0), Knobs(1 << 24, 1e6, 0.0)


def curve(requests: float = 3000.0) -> GhostCurve:
    """Keys that are always asked for again: nothing but expiry ends an entry, once per TTL."""
    hits = np.broadcast_to(requests * (0.9 - 30.0 / TTLS), (2, len(TTLS))).copy()
    return GhostCurve(SIZES, TTLS, hits, np.zeros(hits.shape), requests)


def window(number: int, stale: float, hit_ratio: float = 0.9, requests: float = 3000.0) -> ArmSignals:
    return ArmSignals(
        arm="a", at=(number + 1) * WINDOW, window=WINDOW, requests=requests, hit_ratio=hit_ratio, stale_hits=stale * requests
    )


def storm(share: float, at: int, now: int, ttl: float) -> float:
    """Stale hits per request in a window, of ages uniform to the TTL, after a share of the answers was updated in another."""
    since = (now - at + 0.5) * WINDOW
    return 0.0 if now < at else 0.9 * share * max(0.0, 1.0 - since / ttl)


def watch(meter: UpdateMeter, share: float, at: int, until: int, knobs: Knobs = BRIEF) -> None:
    for number in range(until):
        meter.update(window(number, storm(share, at, number, knobs.ttl)), curve(), knobs, 0.0, math.inf)


def test_without_stale_hits_nothing_is_outdated() -> None:
    meter = UpdateMeter()
    watch(meter, 0.0, 5, 20)
    assert len(meter.updates.ages) == 0
    assert meter.updates.outdated(BRIEF) == meter.updates.outdated(LONG) == Updates().outdated(LONG) == 0.0


def test_a_storm_that_a_short_ttl_has_forgotten_still_outdates_what_a_long_one_keeps() -> None:
    meter = UpdateMeter()
    watch(meter, 0.5, 5, 30)
    assert meter.updates.outdated(BRIEF) == 0.0
    assert meter.updates.outdated(LONG) == pytest.approx(0.5, abs=0.02)
    assert 0.5 * meter.updates.outdated(LONG) < meter.updates.outdated(replace(LONG, ttl=30_000.0)) < 0.5


def test_the_window_that_sees_an_update_is_explained_by_it() -> None:
    meter = UpdateMeter()
    watch(meter, 0.5, 5, 6)
    assert 0.9 * meter.updates.outdated(BRIEF) == pytest.approx(storm(0.5, 5, 5, BRIEF.ttl))


def test_two_storms_outdate_what_either_has_outdated() -> None:
    meter = UpdateMeter()
    watch(meter, 0.5, 5, 30)
    for number in range(30, 32):
        meter.update(window(number, storm(0.5, 30, number, BRIEF.ttl)), curve(), BRIEF, 0.0, math.inf)
    assert meter.updates.outdated(LONG) == pytest.approx(0.75, abs=0.03)


def test_what_chance_or_age_explains_is_no_update() -> None:
    meter, rng = UpdateMeter(), np.random.default_rng(0)
    for number in range(60):
        aged = 0.2 + float(rng.normal(0.0, 0.003))
        meter.update(window(number, aged), curve(), BRIEF, 0.2, math.inf)
    assert meter.updates.outdated(LONG) < 0.02


def test_entries_that_nobody_asks_for_any_more_are_not_served_stale_for_ever() -> None:
    # Beyond the third TTL a longer one adds no hits: entries do not live so long.
    hits = np.broadcast_to(3000.0 * (0.9 - 30.0 / TTLS), (2, len(TTLS))).copy()
    hits[:, 3:] = 3000.0 * 0.9
    ended = Updates(np.array([30_000.0]), np.array([1.0]), SIZES, TTLS, hits / 3000.0)
    going_on = replace(ended, hit_shares=curve().hits / 3000.0)
    assert ended.outdated(LONG) < 0.01 < 0.5 < going_on.outdated(LONG)


def test_the_ages_of_hits_are_near_those_in_a_real_cache() -> None:
    rng = np.random.default_rng(3)
    count, ttl = 60_000, TTLS[3]
    rank = np.minimum(rng.zipf(1.3, count), 5_000).astype(np.uint64)
    times = np.sort(rng.uniform(0.0, 4e5, count))
    ghost = Ghost(np.array([1 << 20, 1 << 24]), TTLS)
    ghost.access_many(rank, np.full(count, 1000, np.int64), times)
    taken = ghost.take().curve
    ages: list[float] = []
    written: dict[int, float] = {}
    for key, now in zip(rank.tolist(), times.tolist(), strict=True):
        age = now - written.get(key, -math.inf)
        if age <= ttl:
            ages.append(age)
        else:
            written[key] = now
    known = Updates(np.zeros(0), np.zeros(0), np.asarray(taken.sizes, np.float64), TTLS, taken.hits / taken.requests)
    at = np.array([0.1, 0.25, 0.5, 0.75, 0.9]) * ttl
    real = [float(np.mean(np.array(ages) > age)) for age in at]
    assert known.older(at, Knobs(1 << 24, ttl, 0.0)) == pytest.approx(real, abs=0.06)


def test_a_longer_ttl_waits_for_entries_to_become_old_and_a_shorter_one_ends_them_at_once() -> None:
    assert oldest_age(0.0, LONG, WINDOW) == WINDOW
    assert oldest_age(9_000.0, LONG, WINDOW) == 9_600.0
    assert oldest_age(9_000.0, BRIEF, WINDOW) == BRIEF.ttl
    assert oldest_age(9_000.0, replace(BRIEF, warmup_ratio=0.2), WINDOW) == pytest.approx(0.8 * BRIEF.ttl)
    assert oldest_age(9_000.0, LONG, math.nan) == 9_000.0
    young = Updates(np.array([3_000.0]), np.array([1.0]), SIZES, TTLS, curve().hits / 3000.0)
    assert young.outdated(LONG, oldest=2_000.0) == 0.0 < young.outdated(LONG, oldest=9_000.0) < young.outdated(LONG)


@pytest.mark.parametrize("at", [math.nan, -5.0, 1e300, 600.0])
def test_a_clock_that_is_broken_or_put_back_dates_nothing(at: float) -> None:
    meter = UpdateMeter()
    watch(meter, 0.5, 5, 10)
    before = meter.updates
    meter.update(replace(window(10, 0.9), at=at), curve(), BRIEF, 0.0, math.inf)
    assert meter.updates is before


def test_another_grid_begins_the_mean_hits_anew_and_keeps_the_updates() -> None:
    meter = UpdateMeter()
    watch(meter, 0.5, 5, 10)
    other = GhostCurve(SIZES[1:], TTLS[::2], curve().hits[1:, ::2], curve().stale_hits[1:, ::2], 3000.0)
    meter.update(window(10, 0.0), other, BRIEF, 0.0, math.inf)
    assert meter.updates.hit_shares == pytest.approx(other.hits / 3000.0)
    assert meter.updates.outdated(LONG) == pytest.approx(0.5, abs=0.02)


def test_a_reset_forgets_and_what_is_remembered_is_bounded() -> None:
    meter = UpdateMeter()
    endless = replace(BRIEF, ttl=math.inf)
    for number in range(MOST_UPDATES + 50):
        meter.update(window(number, 0.9 * (1.0 - 0.9 ** (number + 1))), curve(1e12), endless, 0.0, math.inf)
    assert len(meter.updates.ages) <= MOST_UPDATES + 1
    meter.reset()
    assert meter.updates.outdated(LONG) == 0.0
    watch(meter, 0.5, 5, 10)
    assert meter.updates.outdated(LONG) > 0.4


@settings(max_examples=60, deadline=None)
@given(
    stale=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    cells=st.lists(st.floats(0.0, 1.0), min_size=16, max_size=16),
    hit_ratio=st.floats(0.0, 1.0),
    ttl=st.floats(1e-3, 1e9),
    size=st.integers(1, 1 << 40),
    oldest=st.floats(0.0, math.inf),
)
def test_shares_are_shares_and_fewer_hits_are_older_than_a_greater_age(
    stale: list[float], cells: list[float], hit_ratio: float, ttl: float, size: int, oldest: float
) -> None:
    meter, knobs = UpdateMeter(), Knobs(size, ttl, 0.0)
    ghost = GhostCurve(SIZES, TTLS, 500.0 * np.array(cells).reshape(2, 8), np.zeros((2, 8)), 500.0)
    for number, share in enumerate(stale):
        meter.update(window(number, share, hit_ratio, 500.0), ghost, knobs, 0.0, oldest)
    assert 0.0 <= meter.updates.outdated(knobs, oldest) <= 1.0 + 1e-9
    older = meter.updates.older(np.geomspace(1.0, 1e7, 40), knobs, oldest)
    assert np.all((older >= 0.0) & (older <= 1.0))
    assert np.all(np.diff(older) <= 1e-12)
