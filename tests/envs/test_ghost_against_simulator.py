"""The ghost's curve against the simulator run with each setting, on real traces and a made one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import Trace, load, sessions
from serving.ghost import Ghost
from serving.knobs import MIB, Knobs, KnobSpace
from tests.requirements import trace as trace_file


def errors(
    trace: Trace, *, min_size: int, size: int, ttl: float, max_keys: int, steps: tuple[int, int]
) -> tuple[np.ndarray, float]:
    """Absolute error in hit ratio of every setting of a grid, and the sampling rate at the end."""
    space = KnobSpace(min_size=min_size, max_size=size, min_ttl=ttl / 100, max_ttl=ttl, size_steps=steps[0], ttl_steps=steps[1])
    # The ghost knows keys, not chains of prefix blocks or meanings.
    config = replace(SimConfig(), space=space, ghost_keys=0, prefix=False, semantic=False)
    ghost = Ghost(space.sizes, space.ttls, max_keys=max_keys, ttl_jitter=config.ttl_jitter, salt=1)
    ghost.access_many(trace.key, trace.size, trace.time)
    ratio = ghost.take().curve.hit_ratio
    exact = [
        [
            CacheSimulator(trace, config, Knobs(int(size), float(ttl))).step(trace.duration + 1.0).signals.hit_ratio
            for ttl in space.ttls
        ]
        for size in space.sizes
    ]
    return np.abs(ratio - exact), ghost.rate


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    return load(trace_file("mooncake_conversation.jsonl.gz"), limit=100_000)


@pytest.fixture(scope="module")
def apache() -> Trace:
    return load(trace_file("elastic_apache.csv.gz"))


@pytest.fixture(scope="module")
def made() -> Trace:
    return sessions(60_000, 20_000, duration=3600.0, drift=1.0, seed=7)


def test_apache_at_rate_one(apache: Trace) -> None:
    # Not exact: a path's answers differ in size, and a hit leaves the size that the entry has.
    error, rate = errors(apache, min_size=MIB // 4, size=8 * MIB, ttl=200_000.0, max_keys=4096, steps=(8, 4))
    assert rate == 1.0
    assert error.mean() <= 0.005


def test_mooncake_at_rate_one_is_exact(mooncake: Trace) -> None:
    head = mooncake.slice(0, 20_000)
    error, rate = errors(head, min_size=MIB // 8, size=32 * MIB, ttl=300.0, max_keys=1 << 15, steps=(8, 4))
    assert rate == 1.0
    assert error.max() == 0.0


def test_made_at_rate_one_is_exact_down_to_sizes_that_turn_entries_away(made: Trace) -> None:
    assert made.size.max() > 4 * made.size.min()
    head = made.slice(0, 20_000)
    error, rate = errors(head, min_size=int(made.size.min()), size=16 * MIB, ttl=3000.0, max_keys=1 << 16, steps=(10, 4))
    assert rate == 1.0
    assert error.max() == 0.0


def test_mooncake_sampled(mooncake: Trace) -> None:
    error, rate = errors(mooncake, min_size=MIB, size=256 * MIB, ttl=1000.0, max_keys=8000, steps=(4, 4))
    assert rate < 1 / 8
    assert error.mean() <= 0.01


def test_made_sampled(made: Trace) -> None:
    error, rate = errors(made, min_size=MIB // 16, size=16 * MIB, ttl=3000.0, max_keys=2048, steps=(4, 4))
    assert rate < 0.5
    assert error.mean() <= 0.02


def test_a_flush_in_the_middle_is_a_flush_of_every_setting(made: Trace) -> None:
    knobs = Knobs(4 * MIB, 3600.0)
    space = KnobSpace(min_size=MIB, max_size=4 * MIB, min_ttl=60.0, max_ttl=3600.0, size_steps=2, ttl_steps=2)
    simulator = CacheSimulator(made, SimConfig(space=space, ghost_keys=1 << 16), knobs)
    for flush in (False, True, False):
        if flush:
            simulator.flush()
        signals = simulator.step(600.0).signals
        assert signals.ghost is not None
        assert signals.ghost.hit_ratio[1, 1] == pytest.approx(signals.hit_ratio)
