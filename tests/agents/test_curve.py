"""The curve policy goes where the smoothed curve is cheapest, and stays where moving is not worth it."""

from __future__ import annotations

import numpy as np
import pytest

from agents.curve import CurvePolicy
from agents.words import knob_words, size_words
from envs.observation import ObservationBuilder
from serving.knobs import Knobs
from tests.agents.observations import KNOBS, PRICES, SPACE, signals


def test_it_goes_to_the_optimum_and_says_why() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(signals(), KNOBS)
    proposal = CurvePolicy().decide(observation)
    assert proposal.knobs == observation.anchor
    assert knob_words(proposal.knobs) in proposal.reason
    assert proposal.details["anchor_cost"] < proposal.details["current_cost"]


def test_hysteresis_keeps_a_setting_that_is_nearly_as_good() -> None:
    optimum = ObservationBuilder(SPACE, PRICES).build(signals(), KNOBS).anchor
    assert optimum is not None
    near = SPACE.from_steps(SPACE.to_steps(optimum) + np.array([0.2, 0.0, 0.0]))
    observation = ObservationBuilder(SPACE, PRICES).build(signals(), near)
    assert CurvePolicy(0.05).decide(observation).knobs == near
    assert CurvePolicy(0.0).decide(observation).knobs == optimum
    far = ObservationBuilder(SPACE, PRICES).build(signals(), KNOBS)
    assert CurvePolicy(0.05).decide(far).knobs == optimum


def test_hysteresis_does_not_keep_a_setting_outside_the_space() -> None:
    outside = Knobs(1 << 40, 1e6, 0.0)
    observation = ObservationBuilder(SPACE, PRICES).build(signals(), outside)
    assert SPACE.contains(CurvePolicy(0.99).decide(observation).knobs)


def test_without_a_curve_it_holds() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(signals(ghost=None), KNOBS)
    proposal = CurvePolicy().decide(observation)
    assert proposal.knobs == KNOBS
    assert "no trustworthy ghost curve" in proposal.reason


@pytest.mark.parametrize(("size", "words"), [(512, "512 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"), (1023 << 10, "1023 KiB")])
def test_sizes_read_well(size: int, words: str) -> None:
    assert size_words(size) == words
