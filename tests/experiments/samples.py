"""Small experiments with known answers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from envs.objective import Prices
from envs.signals import ArmSignals
from experiments.access import COLUMNS
from experiments.design import Experiment
from experiments.records import DecisionRecord, signals_to_dict
from serving.ghost import GhostCurve
from serving.knobs import MIB, Knobs, KnobSpace

START = 1_700_000_000.0
SPACE = KnobSpace(min_size=MIB, max_size=256 * MIB, min_ttl=2.0, max_ttl=720.0)
STATIC = Knobs(16 * MIB, 360.0, 0.0)


def frame(rows):
    """An access log from dictionaries; what is not given has a default."""
    defaults = {
        "key": 1,
        "arm": "control",
        "outcome": "miss",
        "tier": "",
        "latency": 0.1,
        "size": 100,
        "input_tokens": 10,
        "output_tokens": 100,
        "age": 0.0,
        "stale": 0.0,
        "version": 1,
        "status": 200,
    }
    table = pd.DataFrame([{**defaults, **row} for row in rows], columns=list(COLUMNS))
    return table.astype({"at": np.float64, "key": np.uint64, "latency": np.float64, "stale": np.float64})


def traffic(seed=0, *, requests=4000, seconds=120.0, keys=800, memory=(8.0, 8.0), exponent=0.7, names=("control", "treatment")):
    """Zipf traffic on two arms split by key; an arm hits if the key was answered within its ``memory`` seconds."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, keys + 1) ** exponent
    key = rng.choice(keys, size=requests, p=weights / weights.sum())
    at = np.sort(rng.uniform(0.0, seconds, requests))
    side = (rng.random(keys) < 0.5).astype(int)
    tokens = rng.integers(50, 1000, keys)
    written = np.full(keys, -np.inf)
    rows = []
    for number, when in zip(key, at, strict=True):
        age = when - written[number]
        hit = age <= memory[side[number]]
        if not hit:
            written[number] = when
        rows.append(
            {
                "at": START + when,
                "key": int(number) * 0x9E3779B97F4A7C15 % (1 << 64),
                "arm": names[side[number]],
                "outcome": "hit" if hit else "miss",
                "tier": "memory" if hit else "",
                "latency": rng.lognormal(-5, 0.4) if hit else 0.08 + tokens[number] * 5e-4,
                "output_tokens": int(tokens[number]),
                "age": float(age) if hit else 0.0,
                "stale": 0.01 if hit else 0.0,
            }
        )
    return frame(rows)


def curve(requests=200.0, best=0.9):
    """A ghost curve whose hit ratio grows with the row of the size grid, whatever the ttl."""
    ratio = np.repeat(np.linspace(0.0, best, SPACE.size_steps)[:, None], SPACE.ttl_steps, axis=1)
    return GhostCurve(SPACE.sizes, SPACE.ttls, ratio * requests, ratio * 0.0, requests)


def decision(
    at, arm="treatment", *, current=STATIC, applied=None, verdict="apply", window=6.0, namespace="demo", ghost=None, **signals
):
    """A decision ``at`` seconds after the start."""
    seen = ArmSignals(arm, START + at, window, **{"requests": 100.0, "hit_ratio": 0.5, "ghost": ghost, **signals})
    return DecisionRecord(
        at=START + at,
        namespace=namespace,
        arm=arm,
        policy="ppo" if arm == "treatment" else "static",
        signals=signals_to_dict(seen),
        current=current,
        proposal=applied,
        verdict=verdict,
        reason="applied as proposed" if verdict == "apply" else f"{verdict}: because",
        applied=applied or current,
        version=3,
        replicas_expected=2,
        replicas_confirmed=2,
        cost={"total": 0.4},
    )


def experiment(**changes):
    """An experiment of two minutes with knobs known for both arms."""
    values = {
        "started_at": START,
        "ended_at": START + 120.0,
        "prices": Prices(slo_p99=1.0),
        "knobs": {"control": STATIC, "treatment": STATIC},
        "space": SPACE,
        "note": "a made-up workload",
    }
    return Experiment("sample", "demo", **{**values, **changes})


def finite(value):
    """Whether nothing within JSON-ready values is NaN or infinite."""
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    if isinstance(value, list):
        return all(finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)
