"""How long a decision takes: signals in, observation, policy, knobs out; the guard and all input and output left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from agents.policy import Policy
from agents.registry import load_policy
from envs.observation import ObservationBuilder
from envs.signals import ArmSignals
from envs.simulator import CacheSimulator, SimConfig
from envs.workloads import sessions
from experiments.bench.result import BenchResult
from serving.knobs import Knobs

GOAL_P99 = 0.020
"""Seconds."""


def record(windows: int, *, config: SimConfig | None = None, seed: int = 0) -> list[tuple[ArmSignals, Knobs]]:
    """Record the signals of a simulated arm whose knobs wander, so that every part of an observation changes.

    Args:
        windows: Windows of 60 s, at about 80 requests each.
        config: The cache.
        seed: Of the workload and of the wandering.
    """
    config = config or SimConfig()
    trace = sessions(80 * windows, 5_000, duration=60.0 * windows, seed=seed)
    rng = np.random.default_rng(seed)
    space = config.space
    knobs = space.from_steps([(space.size_steps - 1) / 2, (space.ttl_steps - 1) / 2, 0.0])
    simulator = CacheSimulator(trace, config, knobs, seed=seed)
    recorded = []
    for _ in range(windows):
        recorded.append((simulator.step(60.0).signals, knobs))
        knobs = space.from_steps(space.to_steps(knobs) + rng.normal(0.0, 0.5, 3))
        simulator.apply(knobs)
    return recorded


def time_decisions(
    policy: Policy, recorded: Sequence[tuple[ArmSignals, Knobs]], *, config: SimConfig | None = None
) -> dict[str, Any]:
    """Time a policy on recorded signals, after a first tenth that is not counted.

    Args:
        policy: The policy.
        recorded: What :func:`record` returned.
        config: The cache that it was recorded from.

    Returns:
        ``policy``, ``decisions`` (counted), ``p50``, ``p99`` and ``worst`` by the clock, and ``cpu_p99`` by this thread's own CPU
        time (which other processes on the machine do not lengthen), all in seconds.
    """
    config = config or SimConfig()
    builder = ObservationBuilder(config.space, config.prices)
    policy.reset()
    times = []
    for signals, knobs in recorded:
        wall, cpu = time.perf_counter(), time.thread_time()
        policy.decide(builder.build(signals, knobs))
        times.append((time.perf_counter() - wall, time.thread_time() - cpu))
    walls, cpus = np.array(times[len(times) // 10 :]).T
    return {
        "policy": policy.name,
        "decisions": len(walls),
        "p50": float(np.quantile(walls, 0.5)),
        "p99": float(np.quantile(walls, 0.99)),
        "worst": float(walls.max()),
        "cpu_p99": float(np.quantile(cpus, 0.99)),
    }


def run(policies: Sequence[str] = ("ppo", "curve"), *, windows: int = 4_000, seed: int = 0) -> BenchResult:
    """Record signals once and time each policy on them.

    Args:
        policies: Names that :func:`agents.registry.load_policy` knows.
        windows: Windows to record; nine tenths of them are timed.
        seed: Of the recording.
    """
    recorded = record(windows, seed=seed)
    return BenchResult(
        "decision",
        [time_decisions(load_policy(name), recorded) for name in policies],
        None,
        "cachepilot bench decision",
        f"Signals in, knobs out: observation and policy; the guard and all input and output are left out. Goal: p99 below "
        f"{GOAL_P99:g} s. p99 by the clock includes what other processes took of the machine, cpu_p99 does not.",
    )
