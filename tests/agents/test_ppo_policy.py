"""The trained policy acts as it was trained, holds when it cannot know, and stands back where it was not trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import ppo
from agents.artifact import Artifact, ArtifactError, Network
from agents.familiarity import UNFAMILIAR_SHARE, ObservationStatistics
from agents.network import Floats32, RecurrentNetwork
from agents.ppo import PPOPolicy, artifact_directory
from agents.registry import load_policy
from envs.action import ActionMap
from envs.observation import Observation, ObservationBuilder
from envs.observation_vector import COMPONENTS, DIM, mask_of
from tests.agents.observations import KNOBS, PRICES, SPACE, network, nothing, recurrent, signals, store


def constant(*action: float, actions: ActionMap | None = None) -> PPOPolicy:
    """A policy that always takes one action."""
    layers = Network([(np.zeros((3, DIM), np.float32), np.array(action, np.float32))])
    return PPOPolicy(Artifact("constant", layers, actions or ActionMap("residual", (3.0, 2.0, 2.0))))


def observe() -> Observation:
    return ObservationBuilder(SPACE, PRICES).build(signals(), KNOBS)


def seen_only(observation: Observation, *, but: int = 0) -> ObservationStatistics:
    """Statistics of a training that saw nothing but this observation, with the first ``but`` elements far away."""
    vector = observation.vector.copy()
    vector[:but] += 0.5
    return ObservationStatistics.of(vector[None])


def test_zero_is_the_curves_optimum() -> None:
    observation = observe()
    assert constant(0.0, 0.0, 0.0).decide(observation).knobs == observation.anchor


def test_an_action_moves_by_grid_steps_and_no_farther_than_the_radius() -> None:
    observation = observe()
    assert observation.anchor is not None
    start = SPACE.to_steps(observation.anchor)
    proposal = constant(-0.5, -7.0, 0.5).decide(observation)
    assert SPACE.to_steps(proposal.knobs) - start == pytest.approx([-1.5, -2.0, 1.0], abs=1e-3)
    assert proposal.details["action_ttl"] == -1.0
    assert "-1.50 size, -2.00 ttl and +1.00 warm-up steps" in proposal.reason


def test_absolute_actions_are_positions_on_the_whole_grid() -> None:
    observation = observe()
    proposal = constant(-1.0, 1.0, -1.0, actions=ActionMap("absolute", (3.0, 2.0, 2.0))).decide(observation)
    assert (proposal.knobs.cache_size, proposal.knobs.ttl) == (SPACE.min_size, SPACE.max_ttl)


def test_without_a_curve_it_holds() -> None:
    observation = ObservationBuilder(SPACE, PRICES).build(signals(ghost=None), KNOBS)
    assert constant(1.0, 1.0, 1.0).decide(observation).knobs == KNOBS


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_network_that_overflows_holds(value: float) -> None:
    proposal = constant(value, 0.0, 0.0).decide(observe())
    assert proposal.knobs == KNOBS
    assert proposal.reason == "held: the policy's action is not finite"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, DIM - 1), st.sampled_from([np.nan, np.inf, -np.inf]), st.booleans())
def test_what_is_not_finite_never_reaches_the_network(element: int, value: float, remembers: bool) -> None:
    seen: list[bool] = []

    class Watched(Network):
        def __call__(self, vector: Floats32) -> Floats32:
            seen.append(bool(np.isfinite(vector).all()))
            return super().__call__(vector)

    net = Watched(network(1, 0.1).layers)
    policy = PPOPolicy(Artifact("watched", net) if not remembers else Artifact("watched", recurrent(1)))
    observation = observe()
    policy.decide(observation)
    state = policy._state
    broken = observation.vector.copy()
    broken[element] = value
    proposal = policy.decide(replace(observation, vector=broken))
    assert (proposal.knobs, proposal.reason) == (KNOBS, "held: the observation is not finite")
    assert all(seen)
    assert all(map(np.array_equal, policy._state, state))


def test_hidden_components_do_not_reach_the_network() -> None:
    hidden = (COMPONENTS[0].name, "curve")
    policy = PPOPolicy(Artifact("blind", network(1, 0.1), hidden=hidden))
    observation = observe()
    other = observation.vector.copy()
    covered = mask_of(hidden) == 0
    other[covered] = 0.5
    proposals = [policy.decide(observation), policy.decide(replace(observation, vector=other))]
    assert proposals[0].details["action_size"] == proposals[1].details["action_size"]
    open_eyed = PPOPolicy(Artifact("open-eyed", network(1, 0.1)))
    assert open_eyed.decide(observation).details["action_size"] != proposals[0].details["action_size"]


def test_a_memory_is_kept_and_forgotten_at_a_reset() -> None:
    policy = PPOPolicy(Artifact("remembers", recurrent(3)))
    observation = observe()
    first, second = (policy.decide(observation).details for _ in range(2))
    assert first != second
    policy.reset()
    assert policy.decide(observation).details == first
    assert PPOPolicy(policy.artifact).decide(observation).details == first


def test_a_memory_sees_the_intervals_in_which_it_holds() -> None:
    builder = ObservationBuilder(SPACE, PRICES)
    without_curve = builder.build(signals(ghost=None), KNOBS)
    policy = PPOPolicy(Artifact("remembers", recurrent(3)))
    assert policy.decide(without_curve).reason.startswith("held")
    after_one = policy.decide(observe()).details
    policy.reset()
    assert policy.decide(observe()).details != after_one


def test_a_memory_that_overflows_is_cleared() -> None:
    whole = recurrent(3)
    huge = Network([(np.full((3, whole.units), 3e38, np.float32), np.full(3, 3e38, np.float32))])
    parts = {name: getattr(whole, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    policy = PPOPolicy(Artifact("overflows", RecurrentNetwork(**parts, head=huge)))
    assert policy.decide(observe()).reason == "held: the policy's action is not finite"
    assert all(map(np.array_equal, policy._state, whole.initial()))


def test_an_observation_like_those_of_the_training_is_familiar() -> None:
    observation = observe()
    policy = PPOPolicy(Artifact("trained", network(1, 0.1), statistics=seen_only(observation)))
    proposal = policy.decide(observation)
    assert proposal.details["unfamiliar"] == 0.0
    assert proposal.reason.startswith("policy goes")


def test_where_too_much_is_unfamiliar_it_proposes_the_curves_optimum_and_says_what() -> None:
    observation = observe()
    policy = PPOPolicy(
        Artifact("trained", network(1, 0.3), statistics=seen_only(observation, but=10)), unfamiliar_share=9.5 / DIM
    )
    proposal = policy.decide(observation)
    assert proposal.details["unfamiliar"] == 10 / DIM
    assert proposal.knobs == observation.anchor
    assert (
        f"({COMPONENTS[0].name}, {COMPONENTS[1].name}, {COMPONENTS[2].name} and 7 more): the curve's optimum" in proposal.reason
    )
    patient = PPOPolicy(policy.artifact, unfamiliar_share=10.5 / DIM).decide(observation)
    assert patient.knobs != observation.anchor
    assert patient.details["unfamiliar"] == 10 / DIM


def test_what_is_hidden_is_not_unfamiliar() -> None:
    observation = observe()
    statistics = seen_only(observation, but=2)
    hidden = (COMPONENTS[0].name,)
    policy = PPOPolicy(Artifact("blind", network(1, 0.1), hidden=hidden, statistics=statistics))
    assert policy.decide(observation).details["unfamiliar"] == 1 / mask_of(hidden).sum()


def test_a_window_in_which_nothing_is_known_is_not_acted_upon() -> None:
    observation = observe()
    policy = PPOPolicy(Artifact("trained", network(1, 0.1), statistics=seen_only(observation)))
    builder = ObservationBuilder(SPACE, PRICES)
    builder.build(signals(), KNOBS)
    proposal = policy.decide(builder.build(nothing(), KNOBS))
    assert proposal.details["unfamiliar"] > UNFAMILIAR_SHARE
    assert "curve's optimum instead" in proposal.reason


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"unfamiliar_share: expected a share in \[0, 1\]"):
        PPOPolicy(Artifact("trained", network(1)), unfamiliar_share=share)


def test_a_policy_is_found_by_its_directory_or_its_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo, "PRETRAINED", tmp_path / "shipped")
    shipped = store(tmp_path / "shipped" / ppo.DEFAULT)
    mine = store(tmp_path / "mine")
    assert artifact_directory(str(mine)) == mine
    assert {artifact_directory(name) for name in ("ppo", ppo.DEFAULT, f"ppo:{ppo.DEFAULT}")} == {shipped}
    with pytest.raises(ArtifactError, match=f"'nobody': expected the directory .* shipped: {ppo.DEFAULT}"):
        artifact_directory("nobody")


def test_without_a_shipped_policy_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppo, "PRETRAINED", tmp_path)
    monkeypatch.setattr("agents.registry.PRETRAINED", tmp_path)
    with pytest.raises(ArtifactError, match="no such shipped policy; there are: none"):
        load_policy("ppo")
    with pytest.raises(ArtifactError, match="shipped: none"):
        artifact_directory("ppo")


def test_inference_needs_neither_torch_nor_ray() -> None:
    import subprocess
    import sys

    absent = {"torch", "ray", "stable_baselines3", "sb3_contrib", "onnx", "optuna"}
    code = f"import sys, envs, agents.registry; print(sorted({absent} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).resolve().parents[2]
    )
    assert done.stdout.strip() == "[]"
