"""The trained policy is a bounded residual around the curve's optimum, and holds when it cannot know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents.artifact import Artifact, Network
from agents.ppo import PPOPolicy
from envs.observation import DIM, ObservationBuilder
from tests.agents.observations import KNOBS, PRICES, SPACE, network, signals


def constant(*action: float) -> PPOPolicy:
    """A policy that always takes one action."""
    layers = Network([(np.zeros((3, DIM), np.float32), np.array(action, np.float32))])
    return PPOPolicy(Artifact("constant", layers, (3.0, 2.0, 2.0), {}))


def test_zero_is_the_curves_optimum() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(signals(), KNOBS)
    assert constant(0.0, 0.0, 0.0).decide(observation).knobs == observation.anchor


def test_an_action_moves_by_grid_steps_and_no_farther_than_the_radius() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(signals(), KNOBS)
    assert observation.anchor is not None
    start = SPACE.to_steps(observation.anchor)
    proposal = constant(-0.5, -7.0, 0.5).decide(observation)
    assert SPACE.to_steps(proposal.knobs) - start == pytest.approx([-1.5, -2.0, 1.0], abs=1e-3)
    assert proposal.details["action_ttl"] == -1.0
    assert "-1.50 size, -2.00 ttl and +1.00 warm-up steps" in proposal.reason


def test_without_a_curve_it_holds() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(signals(ghost=None), KNOBS)
    assert constant(1.0, 1.0, 1.0).decide(observation).knobs == KNOBS


def test_a_network_that_overflows_holds() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(signals(), KNOBS)
    proposal = constant(float("nan"), 0.0, 0.0).decide(observation)
    assert proposal.knobs == KNOBS
    assert "not finite" in proposal.reason


def test_inference_needs_neither_torch_nor_ray() -> None:
    import subprocess
    import sys

    code = "import sys, envs, agents.registry; print(sorted({'torch', 'ray', 'stable_baselines3'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).resolve().parents[2]
    )
    assert done.stdout.strip() == "[]"


def test_the_numpy_network_is_tanh_layers() -> None:
    net = network(5, 0.1)
    vector = np.linspace(-1, 1, DIM).astype(np.float32)
    value = vector.astype(np.float64)
    for weight, bias in net.layers[:-1]:
        value = np.tanh(weight.astype(np.float64) @ value + bias)
    expected = net.layers[-1][0] @ value + net.layers[-1][1]
    assert net(vector) == pytest.approx(expected, abs=1e-4)
