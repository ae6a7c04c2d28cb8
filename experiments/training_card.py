"""How a freshly trained policy does on what was held out from its training: for its card, whichever wins."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from rich.table import Table

from agents.baselines import HoldPolicy, MiddlePolicy
from agents.curve import CurvePolicy, LastCurvePolicy, OffsetPolicy
from agents.policy import Policy
from agents.ppo import PPOPolicy
from experiments import suites
from experiments.play import play_all
from experiments.standings import Standing, compare
from experiments.train_settings import TrainSettings
from experiments.training_task import held_out_scenarios

OFFSETS = ((1.0, 0.0, 0.0), (2.0, 0.0, 0.0), (2.0, 0.5, 0.0))
"""Constant offsets that are evaluated beside a trained residual, which has to be worth more than a constant."""

PACKAGES = ("cachepilot", "torch", "stable-baselines3", "sb3-contrib", "gymnasium", "numpy")

EvaluationProgress = Callable[[int, int], None]
"""Called with what is done and all that there is."""


def evaluation(settings: TrainSettings, policy: PPOPolicy, progress: EvaluationProgress | None = None) -> dict[str, Any]:
    """Compare a policy with the baselines on held-out scenarios of its own workload.

    Returns:
        ``verdict`` in words, ``comparisons`` and what they were made from, JSON-ready.
    """
    return _on_suites(settings, policy, progress) if settings.workload == "suites" else _on_scenarios(settings, policy, progress)


def evaluation_table(found: Mapping[str, Any]) -> Table:
    """Return the comparisons of an evaluation as a table, its verdict beneath."""
    rows = found["comparisons"]
    table = Table(title="held out; cost relative to the policy named, below 1 is better", caption=found["verdict"])
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, justify="right" if column in ("relative", "low", "high") else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            *(f"{row[column]:.3f}" if isinstance(row.get(column), float) else str(row.get(column, "")) for column in columns)
        )
    return table


def versions() -> dict[str, str]:
    """Return the versions that a training depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _on_scenarios(settings: TrainSettings, policy: PPOPolicy, progress: EvaluationProgress | None) -> dict[str, Any]:
    policies: list[Policy] = [HoldPolicy(), MiddlePolicy(), LastCurvePolicy(), CurvePolicy(), *map(OffsetPolicy, OFFSETS), policy]
    standings = compare(policies, held_out_scenarios(settings), length=settings.intervals[1], progress=progress)
    last = standings[-1]
    comparisons = []
    for row in standings[:-1]:
        entry: dict[str, Any] = {"against": row.policy, "relative": last.relative / row.relative}
        comparisons.append(entry | ({"low": last.low, "high": last.high} if row.policy == "curve" else {}))
    return {
        "verdict": _verdict(standings),
        "held_out_scenarios": last.scenarios,
        "held_out_seed": settings.held_out_seed,
        "comparisons": _rounded(comparisons),
        "standings": [_rounded(standing.to_dict()) for standing in standings],
    }


def _verdict(standings: Sequence[Standing]) -> str:
    last = standings[-1]
    if last.high < 1.0:
        verdict = f"beats the smoothed curve: {last.relative:.3f} of its cost, 95 % interval {last.low:.3f} to {last.high:.3f}"
    elif last.low > 1.0:
        verdict = f"is worse than the smoothed curve: {last.relative:.3f} of its cost, interval {last.low:.3f} to {last.high:.3f}"
    else:
        verdict = f"ties with the smoothed curve: {last.relative:.3f} of its cost, interval {last.low:.3f} to {last.high:.3f}"
    constants = [row for row in standings[:-1] if row.policy.startswith("curve+")]
    best = min(constants, key=lambda row: row.relative)
    verdict += f"; the best constant offset of the {len(constants)} tried, {best.policy}, is at {best.relative:.3f}"
    return verdict + f"; scenario by scenario (geometric mean) it is {last.typical:.3f} against {best.typical:.3f}"


def _on_suites(settings: TrainSettings, policy: PPOPolicy, progress: EvaluationProgress | None) -> dict[str, Any]:
    cases = suites.held_out(settings.traces_folder)
    comparisons: list[dict[str, Any]] = []
    for number, case in enumerate(cases):
        *others, mine = play_all([MiddlePolicy(), CurvePolicy(), policy], case.scenario)
        for other in others:
            relative = float(mine.dollars.sum() / other.dollars.sum())
            comparisons.append({"suite": case.suite, "case": case.name, "against": other.policy, "relative": relative})
        if progress is not None:
            progress(number + 1, len(cases))
    words = []
    for suite in dict.fromkeys(case.suite for case in cases):
        found = [row["relative"] for row in comparisons if row["suite"] == suite and row["against"] == "curve"]
        mean = float(np.exp(np.mean(np.log(found))))
        words.append(f"{suite}: {mean:.3f} of the smoothed curve's cost over {len(found)} cases (worst {max(found):.3f})")
    return {
        "verdict": "; ".join(words) + "; one seed, geometric means: cachepilot evaluate has the intervals",
        "comparisons": _rounded(comparisons),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
