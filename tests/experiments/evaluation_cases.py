"""Small cases of the suites' shape, made anew wherever they are asked for; processes of their own import this module."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envs.task import Scenario
from envs.workloads import sessions
from experiments.scenarios import Scale, scale_to
from experiments.suites import Case, middle

INTERVALS = 20


def scenario(seed: int) -> Scenario:
    rng = np.random.default_rng(5)
    trace = sessions(1_200, 150, duration=6 * 3600.0, diurnal=0.6, day=2 * 3600.0, seed=seed)
    made = scale_to(trace, rng, scale=Scale(intervals=(INTERVALS, INTERVALS)))
    return replace(made, initial=middle(made.config.space))


def small_cases() -> list[Case]:
    """One steady case and two that recur; the steady one has no other realisation."""
    steady = scenario(1)
    cases = [Case("calm", "calm", "steady", steady, None, lambda seed: steady)]
    for number in (2, 3):
        made = scenario(number)
        period = made.trace.duration * made.config.prices.time_scale / 3.0
        cases.append(Case(f"tide-{number}", "tide", "non-stationary", made, period, lambda seed: scenario(100 + seed)))
    return cases
