"""What was best in hindsight becomes actions that lead there, for policies of any action and any view."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.hindsight import grid_settings, static_dollars
from envs.action import ActionMap
from envs.knob_batch import SpaceBatch
from envs.observation_vector import COMPONENTS, DIM, mask_of
from envs.simulator import SimConfig
from envs.task import Scenario, Task
from envs.workloads import sessions
from envs.workloads.patterns import add_releases
from experiments.demonstrations import DemonstrationError, Hindsight, best_paths, file_of, look_back
from experiments.train_settings import TrainSettings
from experiments.walks import Walk, play_walks
from serving.knobs import KnobSpace

SPACE = KnobSpace(min_size=1 << 14, max_size=1 << 20, min_ttl=60.0, max_ttl=36_000.0)
SPACES = SpaceBatch.of([SPACE])


def scenario(seed: int) -> Scenario:
    trace = add_releases(sessions(3_000, 300, duration=6 * 3600.0, seed=seed), [9_000.0], seed=1)
    return Scenario(
        trace, SimConfig(space=SPACE, staleness_half_life=7_200.0, ghost_keys=256), 600.0, SPACE.from_steps([4, 3, 0])
    )


TASK = Task(lambda rng: scenario(0), actions=ActionMap(radius=(4.0, 4.0, 5.0)))


@pytest.fixture(scope="module")
def seen() -> Hindsight:
    return look_back([scenario(0), scenario(1)], TASK)


def killed(settings: TrainSettings, first: int) -> Hindsight:
    """What a process of the pool does in place of its work."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("jobs", "remedy"), [(2, "try fewer jobs than 2 (jobs in the training settings)"), (1, "free memory and try again")]
)
def test_a_process_that_was_killed_is_told_with_what_to_do(
    jobs: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.demonstrations._look_back_on_some", killed)
    asked = TrainSettings(name="killed", output=tmp_path, workload="suites", imitate=True, pool=24, jobs=jobs)
    with pytest.raises(DemonstrationError) as caught:
        file_of(asked)
    told = "a process ended before its part of the training scenarios was done (out of memory?): "
    assert str(caught.value) == told + remedy
    assert not list((tmp_path / ".training").iterdir())


positions = st.tuples(
    st.floats(0, SPACE.size_steps - 1), st.floats(0, SPACE.ttl_steps - 1), st.floats(0, SPACE.warmup_steps - 1)
).map(lambda steps: np.array([steps]))


@given(positions, positions, st.sampled_from(["residual", "absolute"]))
@settings(max_examples=60, deadline=None)
def test_the_action_of_a_label_leads_where_the_knobs_should_be_or_as_near_as_it_reaches(wanted, anchors, kind) -> None:  # type: ignore[no-untyped-def]
    actions = ActionMap(kind, (4.0, 4.0, 5.0))
    chosen = actions.inverse(wanted, anchors, SPACES.scale)
    assert np.all(np.abs(chosen) <= 1.0)
    reached = SPACES.to_steps(actions.batch(chosen, SPACES.from_steps(anchors), SPACES))
    nearest = wanted if kind == "absolute" else anchors + np.clip(wanted - anchors, -np.array([4, 4, 5]), np.array([4, 4, 5]))
    assert np.all(np.abs(reached - nearest) <= 0.13)


def test_a_knob_that_is_not_to_be_moved_has_no_label() -> None:
    chosen = ActionMap(radius=(4.0, 4.0, 0.0)).inverse(np.full((2, 3), 4.0), np.full((2, 3), 1.0), SPACES.scale)
    assert np.all(chosen == [[0.75, 0.75, 0.0]] * 2)


def test_the_path_is_played_no_dearer_than_the_best_static_setting() -> None:
    each = scenario(2)
    path = best_paths([each], TASK)[0]
    choices = grid_settings(SPACE, warmups=(0.0,))
    dollars = static_dollars(each, choices)
    static = SPACES.to_steps(choices[dollars.sum(axis=1).argmin()][None])
    assert path.shape == (dollars.shape[1], 3)
    assert np.all((path >= 0) & (path <= SPACES.scale + 1e-9))
    paid = play_walks([each], [Walk(0, path), Walk(0, static)], TASK).dollars
    assert 0 < paid[0] <= paid[1]


def test_states_come_with_where_the_knobs_should_have_been(seen: Hindsight) -> None:
    count = len(seen.vectors)
    assert count > 100
    assert seen.vectors.shape == (count, DIM)
    assert seen.wanted.shape == seen.anchors.shape == (count, 3)
    assert np.isfinite(seen.vectors).all()
    assert np.isfinite(seen.wanted).all()
    # Three walks: the same positions are wanted along the curve as along the path.
    assert len(np.unique(seen.wanted.round(3), axis=0)) < count / 2


def test_hidden_components_are_not_shown_to_the_imitator(seen: Hindsight) -> None:
    shown = seen.demonstrations(TASK.actions, ("curve",))
    whole = seen.demonstrations(TASK.actions, ())
    mask = mask_of(("curve",)) == 0
    assert np.all(shown.observations[:, mask] == 0)
    assert np.array_equal(shown.observations[:, ~mask], whole.observations[:, ~mask])
    assert np.any(whole.observations[:, [c.name for c in COMPONENTS].index("anchor_size")] != 0)
    assert np.array_equal(shown.actions, whole.actions)


def test_what_was_kept_is_read_again_to_the_last_bit(seen: Hindsight, tmp_path: Path) -> None:
    seen.save(tmp_path / "hindsight.safetensors")
    again = Hindsight.load(tmp_path / "hindsight.safetensors")
    for name in ("vectors", "wanted", "anchors", "scale"):
        assert np.array_equal(getattr(again, name), getattr(seen, name))
    assert list(tmp_path.iterdir()) == [tmp_path / "hindsight.safetensors"]


def test_looking_back_twice_gives_the_same(seen: Hindsight) -> None:
    again = look_back([scenario(0), scenario(1)], TASK)
    assert again.vectors.tobytes() == seen.vectors.tobytes()
    assert again.wanted.tobytes() == seen.wanted.tobytes()
