"""Workloads drawn at random, to train and to evaluate on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from envs.workloads.catalogue import (
    WORKLOADS,
    diurnal,
    document_storm,
    flash_crowd,
    hot_set_swap,
    model_release,
    multi_tenant,
    paraphrases,
    plain_sessions,
    scan,
)
from envs.workloads.patterns import add_documents, add_releases, alternate
from envs.workloads.trace import Trace


def draw_workload(rng: np.random.Generator) -> Trace:
    """Draw a workload: any pattern, with 2,000 to 6,000 requests over an hour to four days, everything else at random.

    Half of those that are more than sessions get a second pattern, which leaves the number of requests as it is: a release,
    updates of documents, hot sets that take turns.

    Args:
        rng: Draws everything; equal states give equal workloads.
    """
    name = str(rng.choice(list(WORKLOADS)))
    duration = 3600.0 * _log_uniform(rng, 1.0, 96.0)
    size: dict[str, Any] = {
        "n_requests": int(rng.integers(2_000, 6_000)),
        "n_keys": round(_log_uniform(rng, 150.0, 4_000.0)),
        "seed": int(rng.integers(1 << 31)),
    }
    stream: dict[str, Any] = {"alpha": rng.uniform(0.6, 1.2), "drift": rng.uniform(0.0, 2.0), "repeat": rng.uniform(0.0, 0.3)}
    swing: dict[str, Any] = {"duration": duration, "diurnal": rng.uniform(0.0, 0.9)}
    if name == "sessions":
        swaps = np.sort(rng.uniform(0.1, 0.95, int(rng.integers(0, 4)))) * duration
        return plain_sessions(**size, **stream, **swing, day=duration / rng.uniform(0.5, 4.0), hot_swaps=swaps.tolist())
    if name == "paraphrases":
        made = paraphrases(**size, **stream, **swing, match_probability=rng.uniform(0.5, 0.95))
    elif name == "diurnal":
        made = diurnal(
            **size, **stream, days=rng.uniform(1.0, 4.0), peak_to_trough=_log_uniform(rng, 1.5, 8.0),
            contrast=rng.uniform(0.3, 1.0), share=rng.uniform(0.4, 1.0),
        )  # fmt: skip
    elif name == "flash-crowd":
        made = flash_crowd(
            **size, **stream, duration=duration, share=rng.uniform(0.3, 0.8), start=duration * rng.uniform(0.1, 0.8),
            half_life=duration * _log_uniform(rng, 0.01, 0.1), ramp=duration * rng.uniform(0.0, 0.01),
            crowd_keys=int(rng.integers(1, 20)),
        )  # fmt: skip
    elif name == "hot-set-swap":
        made = hot_set_swap(
            **size, **stream, duration=duration, period=duration / rng.uniform(1.5, 8.0), sets=int(rng.integers(2, 4)),
            share=rng.uniform(0.5, 1.0),
        )  # fmt: skip
    elif name == "scan":
        made = scan(
            **size, **stream, duration=duration, share=rng.uniform(0.1, 0.6), scans=int(rng.integers(1, 5)),
            again=bool(rng.random() < 0.5),
        )  # fmt: skip
    elif name == "model-release":
        made = model_release(
            **size,
            **stream,
            **swing,
            releases=int(rng.integers(1, 4)),
            **({}, {"keys": "change"}, {"keys": "change", "flush": False})[int(rng.integers(3))],
        )
    elif name == "document-storm":
        made = document_storm(
            **size, **stream, **swing, documents=round(_log_uniform(rng, 20.0, 500.0)), document_alpha=rng.uniform(0.3, 1.1),
            updates=_log_uniform(rng, 0.05, 4.0), storms=int(rng.integers(0, 4)), storm_share=rng.uniform(0.1, 0.8),
            storm_length=duration * _log_uniform(rng, 0.001, 0.05),
        )  # fmt: skip
    else:
        made = multi_tenant(
            **size, **swing, tenants=int(rng.integers(2, 8)), noisy=float(rng.choice([0.0, rng.uniform(0.1, 0.5)])),
            noisy_start=rng.uniform(0.1, 0.8), noisy_length=rng.uniform(0.05, 0.3),
        )  # fmt: skip
    return _second_pattern(made, rng) if rng.random() < 0.5 else made


def _second_pattern(trace: Trace, rng: np.random.Generator) -> Trace:
    seed, second = int(rng.integers(1 << 31)), int(rng.integers(3))
    moment = float(rng.uniform(0.1, 0.9)) * trace.duration
    if second == 0:
        return add_releases(trace, [moment], seed=seed)
    if second == 1 and not len(trace.update_time):
        return add_documents(
            trace, documents=round(_log_uniform(rng, 20.0, 500.0)), updates=_log_uniform(rng, 0.05, 2.0), storms=[moment],
            storm_share=rng.uniform(0.1, 0.8), storm_length=0.01 * trace.duration, seed=seed,
        )  # fmt: skip
    return alternate(trace, period=trace.duration / rng.uniform(1.5, 6.0), share=rng.uniform(0.4, 1.0), seed=seed)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))
