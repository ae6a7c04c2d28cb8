"""Observations for the tests of policies: whole ones, and ones in which things are missing or broken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agents.artifact import save
from agents.familiarity import ObservationStatistics
from agents.network import Network, RecurrentNetwork
from envs.action import ActionMap
from envs.objective import Prices
from envs.observation_vector import DIM, HIGH, LOW
from envs.signals import ArmSignals
from serving.ghost import GhostCurve
from serving.knobs import Knobs, KnobSpace

SPACE = KnobSpace(min_size=1 << 18, max_size=1 << 26, min_ttl=2.0, max_ttl=600.0)
PRICES = Prices()
KNOBS = Knobs(1 << 20, 30.0, 0.0)


def ghost(best_row: int = 8, requests: float = 300.0) -> GhostCurve:
    """Hits grow with the size up to ``best_row``, and with the TTL."""
    rows = np.minimum(np.arange(SPACE.size_steps), best_row) / best_row
    columns = np.sqrt(np.arange(1, SPACE.ttl_steps + 1) / SPACE.ttl_steps)
    hits = requests * 0.8 * rows[:, None] * columns[None, :]
    return GhostCurve(SPACE.sizes, SPACE.ttls, hits, 0.05 * hits * columns[None, :], requests)


def signals(**changes: Any) -> ArmSignals:
    """A window of 300 requests in 5 s."""
    values: dict[str, Any] = {
        "arm": "treatment", "at": 100.0, "window": 5.0, "requests": 300.0, "qps": 60.0, "hit_ratio": 0.4, "p50": 0.01, "p99": 1.0,
        "latency_sum": 60.0, "hit_latency": 0.003, "miss_latency": 0.3, "resident_bytes": 5e5, "evictions": 10.0,
        "expirations": 5.0, "stale_hits": 1.0, "input_tokens": 9e3, "output_tokens": 5e4, "refresh_input_tokens": 0.0,
        "refresh_output_tokens": 0.0, "upstream_running": 4.0, "upstream_waiting": 0.0, "gpu_cache_usage": 0.5, "entropy": 8.0,
        "drift": 0.2, "regret": 0.3, "ghost": ghost(),
    }  # fmt: skip
    return ArmSignals(**{**values, **changes})


def nothing() -> ArmSignals:
    """A window in which every signal is missing."""
    return ArmSignals("treatment", math.nan, math.nan)


def network(seed: int, scale: float = 0.5) -> Network:
    """An untrained network of the usual shape."""
    return perceptron(seed, (DIM, 64, 64, 3), scale)


def perceptron(seed: int, widths: Sequence[int], scale: float = 0.5) -> Network:
    """An untrained perceptron, from its inputs to its outputs."""
    rng = np.random.default_rng(seed)
    shapes = [(outputs, inputs) for inputs, outputs in pairwise(widths)]
    return Network([((scale * rng.normal(size=s)).astype(np.float32), rng.normal(size=s[0]).astype(np.float32)) for s in shapes])


def recurrent(seed: int, units: int = 32, scale: float = 0.3) -> RecurrentNetwork:
    """An untrained network with a memory."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> npt.NDArray[np.float32]:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    gates = 4 * units
    return RecurrentNetwork(
        weight_ih=draw(gates, DIM),
        weight_hh=draw(gates, units),
        bias_ih=draw(gates),
        bias_hh=draw(gates),
        head=perceptron(seed, (units, 16, 3), scale),
    )


def vectors(count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Vectors from anywhere in the observation's range, shape (count, DIM)."""
    return np.random.default_rng(seed).uniform(LOW, HIGH, (count, DIM)).astype(np.float32)


def store(directory: Path, **changes: Any) -> Path:
    """Save a policy; everything about it can be given."""
    values: dict[str, Any] = {
        "name": "one", "network": network(1, 0.1), "actions": ActionMap(), "hidden": (),
        "statistics": ObservationStatistics.anything(), "probes": vectors(5),
        "training": {"seed": 1, "command": "cachepilot train"}, "evaluation": {"verdict": "not evaluated"},
    }  # fmt: skip
    return save(directory, **{**values, **changes})
