"""A ghost whose windows are kept with the trace tells the same as one that runs along."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.action import RESIDUAL
from envs.simulator import CacheSimulator, SimConfig
from envs.simulator.tape import TAPES, GhostTape, tape_of
from envs.task import FIXED, Randomisation, Scenario, Task
from envs.vec_env import CacheTuningVecEnv
from envs.workloads import sessions
from envs.workloads.patterns import add_releases
from serving.knobs import Knobs, KnobSpace

SPACE = KnobSpace(min_size=1 << 14, max_size=1 << 20, min_ttl=60.0, max_ttl=36_000.0)
CONFIG = SimConfig(space=SPACE, staleness_half_life=3600.0, ghost_keys=256)
TRACE = add_releases(sessions(4_000, 400, duration=6 * 3600.0, seed=3), [7_000.0], seed=1)
KNOBS = Knobs(1 << 18, 3600.0, 0.2)


def test_each_window_is_that_of_a_ghost_that_runs_along_with_any_cache() -> None:
    tape = GhostTape(TRACE, CONFIG, 600.0, seed=5)
    beside = CacheSimulator(TRACE, CONFIG, KNOBS, seed=5)
    for number in range(1, 37):
        signals = beside.step(600.0).signals
        seen = tape.seen_at(600.0 * number)
        assert signals.ghost is not None
        assert np.array_equal(seen.curve.hits, signals.ghost.hits)
        assert np.array_equal(seen.curve.stale_hits, signals.ghost.stale_hits)
        assert (repr(seen.entropy), repr(seen.drift)) == (repr(signals.entropy), repr(signals.drift))


def test_windows_can_be_asked_for_in_any_order_but_only_where_one_ends() -> None:
    tape = GhostTape(TRACE, CONFIG, 600.0, seed=5)
    late = tape.seen_at(6_000.0)
    assert tape.seen_at(3_000.0) is not late
    assert tape.seen_at(6_000.0) is late
    for time in (0.0, 650.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="multiple of 600"):
            tape.seen_at(time)


def test_who_asks_for_the_same_ghost_gets_the_same_tape() -> None:
    assert tape_of(TRACE, CONFIG, 600.0, 0) is tape_of(TRACE, replace(CONFIG, l1_share=0.5), 600.0, 0)
    assert tape_of(TRACE, CONFIG, 600.0, 0) is not tape_of(TRACE, replace(CONFIG, staleness_half_life=60.0), 600.0, 0)


def test_a_trace_keeps_the_tapes_that_were_asked_for_last() -> None:
    trace = replace(TRACE)
    first = tape_of(trace, CONFIG, 600.0, 0)
    for seed in range(1, TAPES):
        tape_of(trace, CONFIG, 600.0, seed)
    assert tape_of(trace, CONFIG, 600.0, 0) is first
    second = tape_of(trace, CONFIG, 600.0, 1)
    for seed in range(TAPES, 2 * TAPES - 1):
        tape_of(trace, CONFIG, 600.0, seed)
    assert tape_of(trace, CONFIG, 600.0, 1) is second
    assert tape_of(trace, CONFIG, 600.0, 0) is not first


def test_an_episode_from_the_start_is_the_same_with_a_tape_as_without() -> None:
    def play(taped: bool) -> list[bytes]:
        task = Task(lambda rng: Scenario(TRACE, replace(CONFIG), 600.0, KNOBS), 20, randomise=FIXED, taped=taped)
        # Without a tape each episode draws a sample of its own; one that tracks all keys has none.
        everything = replace(CONFIG, ghost_keys=4096)
        task = replace(task, scenarios=lambda rng: Scenario(TRACE, everything, 600.0, KNOBS))
        environment = CacheTuningVecEnv(task, 2)
        environment.seed(1)
        seen = [environment.reset().tobytes()]
        actions = np.full((2, 3), 0.4, np.float32)
        for _ in range(20):
            vectors, rewards, _, _ = environment.step(actions)
            seen += [vectors.tobytes(), rewards.tobytes()]
        return seen

    assert play(True) == play(False)


def test_episodes_start_at_multiples_of_the_interval() -> None:
    task = Task(
        lambda rng: Scenario(TRACE, CONFIG, 600.0, KNOBS), 8, randomise=Randomisation(prices=1.0), actions=RESIDUAL, taped=True
    )
    clocks = {task.draw(np.random.default_rng(seed)).clock for seed in range(20)}
    assert len(clocks) > 5
    assert all(clock is not None and clock % 600.0 == 0.0 for clock in clocks)


def test_a_clock_that_is_not_between_two_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="clock: expected finite seconds"):
        CacheSimulator(TRACE, CONFIG, KNOBS, start=100, clock=float(TRACE.time[100]) + 1.0)
