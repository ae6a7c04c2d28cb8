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

CELLS = [(0, 3), (2, 0), (2, 1), (3, 2), (4, 3)]


def mean_error(trace: Trace, *, size: int, ttl: float, max_keys: int) -> tuple[float, float]:
    """Mean absolute error in hit ratio over a few settings, and the sampling rate at the end."""
    space = KnobSpace(min_size=size // 256, max_size=size, min_ttl=ttl / 100, max_ttl=ttl, size_steps=5, ttl_steps=4)
    config = replace(SimConfig(), space=space, ghost_keys=0)
    ghost = Ghost(space.sizes, space.ttls, max_keys=max_keys, ttl_jitter=config.ttl_jitter, salt=1)
    ghost.access_many(trace.key, trace.size, trace.time)
    ratio = ghost.take().curve.hit_ratio
    errors = []
    for row, column in CELLS:
        knobs = Knobs(int(space.sizes[row]), float(space.ttls[column]))
        exact = CacheSimulator(trace, config, knobs).step(trace.duration + 1.0).signals.hit_ratio
        errors.append(abs(exact - ratio[row, column]))
    return float(np.mean(errors)), ghost.rate


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
    # Not exact: a path's answers differ in size.
    error, rate = mean_error(apache, size=8 * MIB, ttl=200_000.0, max_keys=4096)
    assert rate == 1.0
    assert error <= 0.005


def test_mooncake_at_rate_one_is_exact(mooncake: Trace) -> None:
    assert mean_error(mooncake.slice(0, 20_000), size=32 * MIB, ttl=300.0, max_keys=1 << 15) == (pytest.approx(0.0), 1.0)


def test_made_at_rate_one_is_exact(made: Trace) -> None:
    assert mean_error(made, size=16 * MIB, ttl=3000.0, max_keys=1 << 16) == (pytest.approx(0.0), 1.0)


def test_mooncake_sampled(mooncake: Trace) -> None:
    error, rate = mean_error(mooncake, size=256 * MIB, ttl=1000.0, max_keys=4096)
    assert rate < 1 / 8
    assert error <= 0.03


def test_made_sampled(made: Trace) -> None:
    error, rate = mean_error(made, size=16 * MIB, ttl=3000.0, max_keys=2048)
    assert rate < 0.5
    assert error <= 0.03


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
