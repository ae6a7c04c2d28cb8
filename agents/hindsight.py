"""What static settings would have cost, known only afterwards: the best of them, and the least of all in each interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.schedules import Replays, grid_positions, replay_settings
from envs.knob_batch import Floats, SpaceBatch, to_array, to_knobs
from envs.task import Scenario
from serving.knobs import Knobs, KnobSpace

WARMUPS: tuple[float, ...] = (0.0, 0.2, 0.5)
"""Warm-up ratios of the grid, as shares of the greatest."""

_FIRST_MOVE, _LAST_MOVE = 0.5, 0.25
"""Grid steps by which the best setting of the grid is moved to refine it: at first, and at last."""


def grid_settings(space: KnobSpace, warmups: Sequence[float] = WARMUPS) -> Floats:
    """Return every setting of the grid of sizes and TTLs, each with some warm-up ratios.

    Args:
        space: The knob space.
        warmups: Warm-up ratios, as shares of the space's greatest.

    Returns:
        Knobs (bytes, seconds, share), shape (sizes * TTLs * warm-ups, 3), the warm-up running fastest.

    Raises:
        ValueError: If there is no warm-up ratio, or one is not within 0..1.
    """
    if not len(warmups) or not all(0.0 <= share <= 1.0 for share in warmups):
        raise ValueError(f"grid settings: warmups: expected at least one share of the greatest ratio, 0 to 1, got {warmups!r}")
    ratios = sorted({share * space.max_warmup for share in warmups})
    return grid_positions(space.sizes, space.ttls, ratios)


def static_replays(scenario: Scenario, settings: Floats) -> Replays:
    """Run settings over a whole scenario, each from an empty cache at the trace's start: dollars, terms, hits, P99.

    Args:
        scenario: Trace, cache and interval; its initial knobs do not matter, since each setting is in force from the start.
        settings: Knobs, shape (N, 3).

    Raises:
        ValueError: If the shape is another, or the trace does not last longer than one interval.
    """
    return replay_settings(scenario, settings)


def static_dollars(scenario: Scenario, settings: Floats) -> Floats:
    """Return what each setting costs in each interval but the first, US dollars, shape (N, W); see :func:`static_replays`."""
    return static_replays(scenario, settings).dollars


def best_static(scenario: Scenario, *, warmups: Sequence[float] = WARMUPS, refine: bool = True) -> tuple[Knobs, Floats]:
    """Return the static setting that would have been the cheapest on this very scenario, which nobody can know beforehand.

    Exact over the grid; then refined between its points by coordinate descent, which may miss a still better one far off.

    Args:
        scenario: Trace, cache and interval.
        warmups: As in :func:`grid_settings`.
        refine: Whether to look between the points of the grid as well.

    Returns:
        The setting, and what it costs in each interval but the first, US dollars, shape (W,).
    """
    settings = grid_settings(scenario.config.space, warmups)
    return best_of(scenario, settings, static_dollars(scenario, settings), refine=refine)


def best_of(scenario: Scenario, settings: Floats, dollars: Floats, *, refine: bool = True) -> tuple[Knobs, Floats]:
    """Return the cheapest of settings that have been run, refined between them: :func:`best_static` where they are at hand.

    Args:
        scenario: What they were run on.
        settings: Knobs, shape (N, 3).
        dollars: What each cost in each interval, shape (N, W).
        refine: As in :func:`best_static`.
    """
    row = int(np.argmin(dollars.sum(axis=1)))
    best, least = settings[row], dollars[row]
    if not refine:
        return to_knobs(best), least
    space = SpaceBatch.of([scenario.config.space])
    steps, move = space.to_steps(best[None])[0], _FIRST_MOVE
    while move >= _LAST_MOVE:
        around = space.from_steps(steps + move * np.concatenate([np.eye(3), -np.eye(3)]))
        tried = static_dollars(scenario, around)
        row = int(np.argmin(tried.sum(axis=1)))
        if tried[row].sum() < least.sum():
            best, least = around[row], tried[row]
            steps = space.to_steps(best[None])[0]
        else:
            move /= 2.0
    return to_knobs(best), least


def window_minimum(dollars: Floats) -> Floats:
    """Return what the cheapest static setting of each interval by itself cost: a yardstick that looks ahead and moves free.

    It changes at no cost, and finds the cache as full as if the interval's setting had been in force from the start. Where the
    size is what matters it is nearly a lower bound, since no cache of that size is much warmer than one that always had it.

    It is not a strict one. Each interval's state comes from one static run, and a policy that moves can hold what no static
    setting holds: a TTL that is short for an interval after documents changed renews what is stale, and a long one afterwards
    keeps what was renewed, where a static TTL has either the misses or the stale answers throughout. On such workloads a causal
    policy has been below it in most intervals. Settings between the points of the grid are left out, too.

    Args:
        dollars: What each static setting cost in each interval, shape (N, W).

    Returns:
        US dollars, shape (W,).
    """
    least: Floats = dollars.min(axis=0)
    return least


def optuna_static(scenarios: Scenario | Sequence[Scenario], *, trials: int = 60, seed: int = 0) -> Knobs:
    """Return the static setting that Optuna finds on training scenarios, to be held from then on: how an operator tunes offline.

    Each trial runs one setting over all scenarios; the sum of the dollars is minimised by the tree-structured Parzen estimator
    over the positions on the three grids, in memory.

    Args:
        scenarios: What to tune on; all with one knob space. Never what the setting is judged on.
        trials: Settings that are tried.
        seed: Of the sampler.

    Raises:
        ValueError: If there is no scenario or no trial, or knob spaces differ.
    """
    import optuna  # here: it takes half a second, and few need it

    tuned = [scenarios] if isinstance(scenarios, Scenario) else list(scenarios)
    if not tuned or trials < 1:
        raise ValueError(f"optuna: expected at least one scenario and one trial, got {len(tuned)} and {trials}")
    space = tuned[0].config.space
    for scenario in tuned:
        if scenario.config.space != space:
            raise ValueError(f"optuna: expected one knob space in all scenarios, got {space} and {scenario.config.space}")

    def setting(trial: optuna.trial.BaseTrial) -> Knobs:
        return space.from_steps(
            [
                trial.suggest_float("size", 0.0, space.size_steps - 1.0),
                trial.suggest_float("ttl", 0.0, space.ttl_steps - 1.0),
                trial.suggest_float("warmup", 0.0, space.warmup_steps - 1.0),
            ]
        )

    def cost(trial: optuna.trial.Trial) -> float:
        knobs = to_array([setting(trial)])
        return float(sum(static_dollars(scenario, knobs).sum() for scenario in tuned))

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        study.optimize(cost, n_trials=trials)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return setting(optuna.trial.FixedTrial(study.best_params))
