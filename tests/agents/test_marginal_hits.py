"""Marginal hits: the cache grows while the next step of memory earns its cost, and shrinks while the last one does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from agents.marginal_hits import MarginalHitsPolicy
from agents.policy import Proposal
from envs.objective import Prices
from envs.observation import ObservationBuilder
from envs.smoothing import CurveSmoother
from serving.knobs import Knobs
from tests.agents.observations import PRICES, SPACE, ghost, nothing, signals

FREE = replace(PRICES, memory_gib_hour=0.0)
PRICED = replace(PRICES, memory_gib_hour=200.0)


def follow(policy: MarginalHitsPolicy, prices: Prices, start: Knobs, windows: int, best_row: int = 8) -> list[Proposal]:
    """Let the policy have its way on a cache that is always full, with a curve that stays as it is."""
    builder, knobs, proposals = ObservationBuilder(SPACE, prices), start, []
    for _ in range(windows):
        window = signals(ghost=ghost(best_row), resident_bytes=float(knobs.cache_size))
        proposals.append(policy.decide(builder.build(window, knobs)))
        knobs = proposals[-1].knobs
    return proposals


def at(row: float) -> Knobs:
    return SPACE.from_steps([row, 4.0, 2.0])


def rows(proposals: list[Proposal]) -> list[float]:
    return [float(SPACE.to_steps(proposal.knobs)[0]) for proposal in proposals]


def test_it_grows_step_by_step_while_memory_is_free_and_brings_hits() -> None:
    proposals = follow(MarginalHitsPolicy(), FREE, at(3.0), 9, best_row=8)
    assert rows(proposals) == pytest.approx([4, 5, 6, 7, 8, 8, 8, 8, 8], abs=0.01)
    assert proposals[0].reason.startswith("grows: ")
    assert proposals[-1].reason.startswith("held: ")


def test_it_shrinks_step_by_step_where_memory_earns_nothing() -> None:
    proposals = follow(MarginalHitsPolicy(), PRICED, at(15.0), 4, best_row=8)
    assert rows(proposals) == pytest.approx([14, 13, 12, 11], abs=0.01)
    assert proposals[0].reason.startswith("shrinks: ")


@pytest.mark.parametrize("start", [0.0, 15.0])
@pytest.mark.parametrize("price", [600.0, 3000.0])
def test_from_below_and_from_above_it_settles_where_the_curve_is_cheapest(start: float, price: float) -> None:
    prices = replace(PRICES, memory_gib_hour=price)
    smoother = CurveSmoother(prices, 1.0, 5)
    smoother.update(signals(ghost=ghost(14)))
    reading = smoother.read()
    assert reading is not None
    cheapest = int(np.argmin(reading.costs[:, 4]))
    assert 2 <= cheapest <= 13, "the optimum is within the grid"
    settled = rows(follow(MarginalHitsPolicy(), prices, at(start), 25, best_row=14))[-5:]
    assert max(settled) == min(settled)
    assert settled[0] == pytest.approx(cheapest, abs=1.01)


def test_it_leaves_ttl_and_warm_up_alone() -> None:
    for proposal in follow(MarginalHitsPolicy(), FREE, at(3.0), 4) + follow(MarginalHitsPolicy(), PRICED, at(15.0), 4):
        assert SPACE.to_steps(proposal.knobs)[1:] == pytest.approx([4.0, 2.0])


def test_what_is_not_full_does_not_grow() -> None:
    builder, policy = ObservationBuilder(SPACE, FREE), MarginalHitsPolicy()
    size = float(at(3.0).cache_size)
    empty = policy.decide(builder.build(signals(resident_bytes=0.5 * size), at(3.0)))
    assert empty.knobs == at(3.0)
    assert "stands empty" in empty.reason
    nearly_full = policy.decide(builder.build(signals(resident_bytes=0.95 * size), at(3.0)))
    assert rows([nearly_full]) == pytest.approx([4.0], abs=0.01)
    unknown = policy.decide(builder.build(signals(resident_bytes=math.nan), at(3.0)))
    assert rows([unknown]) == pytest.approx([4.0], abs=0.01)


def test_the_dead_band_holds_what_earns_about_its_cost() -> None:
    first = follow(MarginalHitsPolicy(band=0.0), PRICED, at(4.0), 1)[0].details
    ratio = first["earned_above"] / first["cost_above"]
    assert ratio > 1.0
    narrow, wide = MarginalHitsPolicy(band=0.5 * (ratio - 1.0) / ratio), MarginalHitsPolicy(band=0.99)
    assert rows(follow(narrow, PRICED, at(4.0), 1)) == pytest.approx([5.0], abs=0.01)
    dear = replace(PRICES, memory_gib_hour=PRICED.memory_gib_hour * ratio / 1.5)
    assert rows(follow(wide, dear, at(4.0), 1)) == pytest.approx([4.0], abs=0.01)


def test_the_average_outlasts_one_odd_window() -> None:
    def after_an_odd_window(policy: MarginalHitsPolicy) -> Proposal:
        builder = ObservationBuilder(SPACE, PRICED)
        full = float(at(4.0).cache_size)
        for _ in range(8):
            policy.decide(builder.build(signals(ghost=ghost(12), resident_bytes=full), at(4.0)))
        return policy.decide(builder.build(signals(ghost=ghost(1), resident_bytes=full), at(4.0)))

    assert after_an_odd_window(MarginalHitsPolicy(average=0.0)).reason.startswith("shrinks: ")
    assert not after_an_odd_window(MarginalHitsPolicy(average=0.9)).reason.startswith("shrinks: ")


def test_without_a_curve_in_the_last_window_it_holds() -> None:
    builder, policy = ObservationBuilder(SPACE, FREE), MarginalHitsPolicy()
    policy.decide(builder.build(signals(), at(3.0)))
    for window in (signals(ghost=None), nothing()):
        proposal = policy.decide(builder.build(window, at(3.0)))
        assert proposal.knobs == at(3.0)
        assert proposal.reason.startswith("held: the last window had no ghost curve")
