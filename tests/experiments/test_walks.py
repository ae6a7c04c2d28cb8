"""Walks that are played alone, in places that are used again, and given up early, tell what the plain way tells."""

from __future__ import annotations

import numpy as np
import pytest

from envs.action import ActionMap
from envs.knob_batch import Floats
from envs.simulator import SimConfig
from envs.task import Scenario, Task
from envs.workloads import sessions
from envs.workloads.patterns import add_documents, add_releases
from experiments import walks
from experiments.demonstrations import best_paths, look_back
from experiments.walks import Walk, play_walks
from serving.knobs import KnobSpace
from tests.experiments.plain_hindsight import plain_hindsight, plain_paths, plain_walk

SPACE = KnobSpace(min_size=1 << 14, max_size=1 << 20, min_ttl=60.0, max_ttl=36_000.0)
TASK = Task(lambda rng: scenario(0, 3), actions=ActionMap(radius=(4.0, 4.0, 5.0)))


def scenario(seed: int, hours: int) -> Scenario:
    """A scenario with a release in it if the seed is even, else with documents that are updated."""
    trace = sessions(500 * hours, 200, duration=hours * 3600.0, seed=seed)
    if seed % 2:
        trace = add_documents(trace, documents=20, alpha=0.5, updates=0.3, storms=[4_000.0], storm_length=300.0, seed=seed)
    else:
        trace = add_releases(trace, [6_000.0], seed=1)
    config = SimConfig(space=SPACE, staleness_half_life=7_200.0, ghost_keys=256, memory_eviction="lru")
    return Scenario(trace, config, 600.0, SPACE.from_steps([4, 3, 0]))


@pytest.fixture(scope="module")
def scenarios() -> list[Scenario]:
    return [scenario(0, 3), scenario(1, 5), scenario(2, 2), scenario(3, 4)]


@pytest.mark.parametrize("lanes", [3, 32])
def test_labels_and_states_are_those_of_the_plain_way_to_the_last_bit(
    scenarios: list[Scenario], lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walks, "LANES", lanes)
    found = look_back(scenarios, TASK, seed=5)
    vectors, wanted, anchors = plain_hindsight(scenarios, TASK, seed=5)
    assert len(vectors) > 200
    assert np.array_equal(found.vectors, vectors)
    assert np.array_equal(found.wanted, wanted)
    assert np.array_equal(found.anchors, anchors)


def test_the_paths_are_those_that_are_cheapest_when_each_is_played_to_its_end(scenarios: list[Scenario]) -> None:
    found, expected = best_paths(scenarios, TASK), plain_paths(scenarios, TASK)
    assert all(np.array_equal(path, other) for path, other in zip(found, expected, strict=True))
    # Warm-up is worth something on some of them: else the second round would not be tested.
    assert len({tuple(np.unique(path[:, 2])) for path in found}) > 1


def somewhere(seed: int) -> Floats:
    """A path that jumps about."""
    return np.random.default_rng(seed).uniform(0.0, 7.0, (40, 3))


def test_a_walk_that_has_reached_its_limit_is_given_up_and_changes_no_other(scenarios: list[Scenario]) -> None:
    paths = [somewhere(number) for number in range(len(scenarios))]
    expected = plain_walk(scenarios, paths, TASK, random=np.random.default_rng(0))[1]
    dear = [Walk(number, path, limit=float(expected[number]) / 2) for number, path in enumerate(paths)]
    whole = [Walk(number, path) for number, path in enumerate(paths)]
    played = play_walks(scenarios, [*dear, *whole], TASK)
    count = len(scenarios)
    assert np.array_equal(played.dollars[count:], expected)
    assert np.all(played.dollars[:count] >= expected / 2)
    assert np.all(played.dollars[:count] < expected)
    assert np.all(played.intervals[:count] < played.intervals[count:])


def test_what_was_seen_tells_of_which_walk_and_interval_it_is(scenarios: list[Scenario]) -> None:
    paths = [somewhere(number) for number in range(len(scenarios))]
    played = play_walks(scenarios, [Walk(number, path) for number, path in enumerate(paths)], TASK, observed=True)
    assert len(played.vectors) == len(played.wanted) == len(played.anchors) == len(played.walk) == len(played.interval)
    for walk, interval, wanted in zip(played.walk, played.interval, played.wanted, strict=True):
        assert np.array_equal(wanted, paths[walk][interval])
    assert [int(played.interval[played.walk == number].max()) + 1 for number in range(4)] == played.intervals.tolist()


def test_no_walk_is_refused(scenarios: list[Scenario]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        play_walks(scenarios, [], TASK)
