"""How policies do against each other on the same simulated scenarios, paired scenario by scenario."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from agents.policy import Policy
from envs.action import MAX_STEPS
from envs.cache_env import FIXED, CacheTuningEnv, Scenario

TERMS = ("tokens", "refresh", "latency", "memory", "staleness", "slo", "change")


@dataclass(frozen=True)
class Outcome:
    """One policy on one scenario, the first interval (which runs on the initial knobs) left out.

    Attributes:
        policy: The policy's name.
        dollars: What the episode cost, US dollars.
        requests: Requests in it.
        hits: Requests answered from the cache.
        terms: Dollars by term of the objective.
    """

    policy: str
    dollars: float
    requests: float
    hits: float
    terms: Mapping[str, float]


@dataclass(frozen=True)
class Standing:
    """One policy over all scenarios.

    Attributes:
        policy: The policy's name.
        cost: US dollars per 1,000 requests.
        terms: The same by term.
        hit_ratio: Hits over requests.
        relative: Cost over the baseline's on the same requests.
        typical: Geometric mean of the same by scenario: no scenario weighs more for being expensive.
        low: Lower end of the 95 % interval of ``relative``: bootstrap over the scenarios, paired.
        high: Upper end.
        wins: Scenarios on which it was cheaper than the baseline.
        scenarios: Scenarios in all.
    """

    policy: str
    cost: float
    terms: Mapping[str, float]
    hit_ratio: float
    relative: float
    typical: float
    low: float
    high: float
    wins: int
    scenarios: int

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return asdict(self)


def play(
    policy: Policy,
    scenario: Scenario,
    *,
    length: int,
    seed: int = 0,
    max_steps: tuple[float, float, float] = MAX_STEPS,
) -> Outcome:
    """Run a policy through a scenario from its first request.

    Args:
        policy: The policy; it is reset first.
        scenario: Trace, cache and interval.
        length: Most intervals to run.
        seed: Chooses the ghost's sample, and initial knobs where the scenario gives none (then the grid's middle).
        max_steps: Most that one interval may move each knob, grid steps.
    """
    env = CacheTuningEnv(
        scenarios=lambda rng: scenario, episode_length=length, reference="hold", randomise=FIXED, max_steps=max_steps
    )
    policy.reset()
    env.reset(seed=seed)
    dollars = requests = hits = 0.0
    terms = dict.fromkeys(TERMS, 0.0)
    over = False
    while not over:
        _, _, _, over, info = env.step_knobs(policy.decide(env.observation).knobs)
        dollars += info["dollars"]
        requests += info["requests"]
        hits += info["requests"] * info.get("hit_ratio", 0.0)
        for name in TERMS:
            terms[name] += info["cost"].get(name, 0.0) * info["requests"] / 1000.0
    return Outcome(policy.name, dollars, requests, hits, terms)


def compare(
    policies: Sequence[Policy],
    scenarios: Sequence[Scenario],
    *,
    length: int,
    baseline: str = "curve",
    progress: Callable[[int, int], None] | None = None,
    replicates: int = 2000,
) -> list[Standing]:
    """Run every policy on every scenario.

    Args:
        policies: The policies, the baseline among them.
        scenarios: The scenarios; held out from any training.
        length: Most intervals of a scenario.
        baseline: Name of the policy that costs are relative to.
        progress: Called with the episodes done and all of them.
        replicates: Bootstrap replicates.

    Returns:
        One standing per policy, in their order.

    Raises:
        ValueError: If the baseline is not among the policies, or there is no scenario.
    """
    names = [policy.name for policy in policies]
    if baseline not in names or not scenarios:
        raise ValueError(f"evaluate: expected at least one scenario, and {baseline!r} among the policies; got {names}")
    table: list[list[Outcome]] = []
    for policy in policies:
        row = []
        for number, scenario in enumerate(scenarios):
            row.append(play(policy, scenario, length=length, seed=number))
            if progress is not None:
                progress(len(table) * len(scenarios) + len(row), len(policies) * len(scenarios))
        table.append(row)
    reference = np.array([outcome.dollars for outcome in table[names.index(baseline)]])
    picks = np.random.default_rng(0).integers(0, len(scenarios), (replicates, len(scenarios)))
    return [_standing(row, reference, picks) for row in table]


def _standing(row: Sequence[Outcome], reference: np.ndarray[Any, np.dtype[np.float64]], picks: Any) -> Standing:
    dollars = np.array([outcome.dollars for outcome in row])
    requests = sum(outcome.requests for outcome in row)
    scale = 1000.0 / requests if requests else math.nan
    total = reference.sum()
    draws = dollars[picks].sum(axis=1) / np.maximum(reference[picks].sum(axis=1), 1e-300)
    low, high = np.quantile(draws, (0.025, 0.975))
    return Standing(
        policy=row[0].policy,
        cost=float(dollars.sum()) * scale,
        terms={name: sum(outcome.terms[name] for outcome in row) * scale for name in TERMS},
        hit_ratio=sum(outcome.hits for outcome in row) / requests if requests else math.nan,
        relative=float(dollars.sum() / total) if total > 0 else math.nan,
        typical=float(np.exp(np.mean(np.log(np.maximum(dollars, 1e-300) / np.maximum(reference, 1e-300))))),
        low=float(low),
        high=float(high),
        wins=int(np.sum(dollars < reference)),
        scenarios=len(row),
    )
