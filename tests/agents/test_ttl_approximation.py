"""The stochastic approximation goes to the cheapest TTL of the traffic, and the size covers what that TTL keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from agents.policy import Proposal
from agents.ttl_approximation import Ridge, TTLApproximationPolicy
from envs.observation import ObservationBuilder
from envs.smoothing import CurveReading, CurveSmoother
from serving.ghost import GhostCurve
from serving.knobs import Knobs
from tests.agents.observations import PRICES, SPACE, nothing, signals

STALE = replace(PRICES, stale_answer=0.01, memory_gib_hour=5.0)
REQUESTS = 300.0


def filling(noise: float = 0.0, rng: np.random.Generator | None = None) -> GhostCurve:
    """Each TTL fills two sizes more than the one before, hits grow with its logarithm and stale hits with itself."""
    rows, columns = np.arange(SPACE.size_steps)[:, None], np.arange(SPACE.ttl_steps)[None, :]
    kept = np.minimum(1.0, (rows + 1.0) / (2.0 * columns + 2.0))
    hits = REQUESTS * 0.8 * (columns + 1.0) / SPACE.ttl_steps * kept
    if rng is not None:
        hits = np.clip(hits * (1.0 + noise * rng.normal(size=(1, SPACE.ttl_steps))), 0.0, REQUESTS)
    stale = hits * np.minimum(SPACE.ttls / 400.0, 1.0)[None, :]
    return GhostCurve(SPACE.sizes, SPACE.ttls, hits, stale, REQUESTS)


def reading_of(curve: GhostCurve) -> CurveReading:
    smoother = CurveSmoother(STALE, 1.0, 5)
    smoother.update(signals(ghost=curve))
    reading = smoother.read()
    assert reading is not None
    return reading


def cheapest_ttl(coverage: float = 0.999) -> float:
    """Where on the TTL's grid the setting whose size covers it is cheapest, by looking everywhere."""
    reading = reading_of(filling())
    ridge = Ridge.of(reading, reading.costs, coverage)
    return float(np.argmin(ridge.costs))


def follow(policy: TTLApproximationPolicy, start: Knobs, windows: int, noise: float = 0.0) -> list[Proposal]:
    builder, knobs, rng, proposals = ObservationBuilder(SPACE, STALE), start, np.random.default_rng(0), []
    for _ in range(windows):
        proposals.append(policy.decide(builder.build(signals(ghost=filling(noise, rng)), knobs)))
        knobs = proposals[-1].knobs
    return proposals


def positions(proposals: list[Proposal]) -> npt.NDArray[np.float64]:
    return np.array([SPACE.to_steps(proposal.knobs) for proposal in proposals])


def test_the_fixture_has_its_optimum_between_the_bounds() -> None:
    assert 2 <= cheapest_ttl() <= 5


@pytest.mark.parametrize("start", [0.0, 7.0])
def test_it_converges_to_the_cheapest_ttl_from_both_sides(start: float) -> None:
    proposals = follow(TTLApproximationPolicy(), SPACE.from_steps([7.0, start, 1.0]), 60)
    assert positions(proposals)[-5:, 1] == pytest.approx(cheapest_ttl(), abs=0.75)
    assert abs(proposals[-1].details["move"]) < 0.02


def test_with_noise_it_stays_around_it_and_a_smaller_gain_stays_nearer() -> None:
    start = SPACE.from_steps([7.0, 4.0, 0.0])
    quiet = positions(follow(TTLApproximationPolicy(gain=1.0), start, 120, noise=0.1))[40:, 1]
    lively = positions(follow(TTLApproximationPolicy(gain=10.0), start, 120, noise=0.1))[40:, 1]
    assert quiet.mean() == pytest.approx(cheapest_ttl(), abs=1.0)
    assert lively.mean() == pytest.approx(cheapest_ttl(), abs=1.0)
    assert quiet.std() < lively.std()


def test_the_size_is_the_smallest_that_keeps_the_hits_of_the_ttl() -> None:
    proposal = follow(TTLApproximationPolicy(coverage=0.99), SPACE.from_steps([0.0, 3.0, 0.0]), 1)[0]
    size, ttl, _ = SPACE.to_steps(proposal.knobs)
    # The TTL at position t fills 2 t + 2 rows, the last of which is 2 t + 1; 1 % of the hits may be lost.
    assert size == pytest.approx((2 * ttl + 2) * 0.99 - 1, abs=0.3)


def test_no_move_is_longer_than_a_grid_step() -> None:
    proposals = follow(TTLApproximationPolicy(gain=1e9), SPACE.from_steps([7.0, 0.0, 0.0]), 12)
    path = np.concatenate([[0.0], positions(proposals)[:, 1]])
    assert np.abs(np.diff(path)).max() <= 1.0 + 1e-6
    assert path[1] == pytest.approx(1.0)


def test_it_leaves_warm_up_alone() -> None:
    assert positions(follow(TTLApproximationPolicy(), SPACE.from_steps([7.0, 0.0, 3.0]), 5))[:, 2] == pytest.approx(3.0)


def test_without_a_curve_in_the_last_window_it_holds() -> None:
    builder, policy, knobs = ObservationBuilder(SPACE, STALE), TTLApproximationPolicy(), Knobs(1 << 20, 30.0, 0.1)
    policy.decide(builder.build(signals(), knobs))
    for window in (signals(ghost=None), nothing()):
        proposal = policy.decide(builder.build(window, knobs))
        assert proposal.knobs == knobs
        assert proposal.reason.startswith("held: the last window had no ghost curve")


def test_a_free_cache_has_no_slope_to_follow() -> None:
    free = replace(PRICES, input_mtok=0.0, output_mtok=0.0, memory_gib_hour=0.0, latency_second=0.0, stale_answer=0.0)
    knobs = Knobs(1 << 20, 30.0, 0.1)
    proposal = TTLApproximationPolicy().decide(ObservationBuilder(SPACE, free).build(signals(), knobs))
    assert (proposal.knobs, proposal.reason) == (knobs, "held: the slope of the cost along the ttl is not known")


def test_the_ridge_reads_covering_sizes_between_the_grids_rows() -> None:
    reading = reading_of(filling())
    whole, most = Ridge.of(reading, reading.costs, 1.0), Ridge.of(reading, reading.costs, 0.5)
    step = math.log(SPACE.max_size / SPACE.min_size) / (SPACE.size_steps - 1)
    columns = np.arange(SPACE.ttl_steps)
    assert (whole.log_sizes - math.log(SPACE.min_size)) / step == pytest.approx(2.0 * columns + 1.0, abs=1e-3)
    assert (most.log_sizes - math.log(SPACE.min_size)) / step == pytest.approx(1.0 * columns, abs=1e-3)
    assert math.log(whole.size(math.log(SPACE.ttls[2]))) == pytest.approx(whole.log_sizes[2])
    inner = 0.5 * (whole.costs[4] - whole.costs[2]) / whole.costs[3]
    one = math.log(SPACE.ttls[1] / SPACE.ttls[0])
    assert whole.slope(whole.log_ttls[3], one) == pytest.approx(inner)
    edge = (whole.costs[1] - whole.costs[0]) / whole.costs[0]
    assert whole.slope(whole.log_ttls[0], one) == pytest.approx(edge)
