"""The rows of an evaluation: policies by name, groups of trained policies that differ in their seed, and what is computed.

A row is asked for in a YAML file or as ``label=source``. What can be wrong with it is found before anything is run.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agents import artifact
from agents.hindsight import best_of, grid_settings, optuna_static, static_replays, window_minimum
from agents.oracle import build_oracle
from agents.policy import Policy
from agents.registry import load_policy
from agents.schedules import Replays
from envs.knob_batch import Floats, to_array
from envs.task import Scenario
from experiments.play import Run
from experiments.suites import Case
from experiments.units import InputError
from serving.knobs import Knobs

Group = Literal["policy", "bound", "ablation"]
Computed = Literal["best-static", "window-minimum", "optuna", "oracle"]
T = TypeVar("T")

CONFIG = Path(__file__).parent / "configs" / "evaluation.yaml"
"""The rows and suites that are evaluated unless told otherwise."""


class RowSettings(BaseModel):
    """One row; exactly one of ``policy``, ``artifacts`` and ``computed`` says what it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str = Field(min_length=1, max_length=60)
    policy: str | None = Field(None, description="a policy's name, as agents.registry reads it")
    artifacts: str | None = Field(None, description="directories of trained policies, a pattern: one for each training seed")
    computed: Computed | None = None
    group: Group = "policy"
    optional: bool = Field(False, description="left out, and said so, where no directory matches")

    @model_validator(mode="after")
    def _one(self) -> RowSettings:
        if sum(each is not None for each in (self.policy, self.artifacts, self.computed)) != 1:
            raise ValueError("expected exactly one of policy, artifacts and computed")
        return self

    @property
    def source(self) -> str:
        """What the row is made from, as one would type it."""
        return self.policy or self.artifacts or str(self.computed)


class Roles(BaseModel):
    """Which row is what others are compared with; labels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reference: str = Field("smoothed curve", description="costs are relative to it")
    middle: str = "mid-grid static"
    best_static: str = "best static in hindsight"
    oracle: str = "causal oracle"
    learned: tuple[str, ...] = Field(("ppo",), min_length=1, description="the targets are about the first of these that is there")


class EvaluationSettings(BaseModel):
    """What is evaluated on what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: tuple[RowSettings, ...] = Field(min_length=1)
    roles: Roles = Roles()
    suites: tuple[str, ...] = Field(("all",), min_length=1, description="all, steady, non-stationary, or names of cases")
    seeds: int = Field(5, ge=1, le=100, description="of the ghost's sample; a group of n trained policies has n of its own")
    seed: int = Field(0, ge=0, lt=1 << 31, description="of the bootstrap, and the first of the ghost's seeds")
    length: int | None = Field(None, ge=1, description="most intervals of a case")
    recover_intervals: int = Field(10, ge=1, description="decisions that a policy has to recover from a bad start")
    optuna_trials: int = Field(60, ge=1, le=10_000)

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSettings:
        labels = [row.label for row in self.rows]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"rows: label {label!r} is there {labels.count(label)} times; expected different labels")
        if self.roles.reference not in labels:
            raise ValueError(f"roles.reference: {self.roles.reference!r}: expected the label of a row; there are: {labels}")
        return self


def load_evaluation_settings(path: Path) -> EvaluationSettings:
    """Read rows and suites from a YAML file.

    Raises:
        InputError: If it cannot be read, or a key or value is not as expected; the text names it.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"evaluation settings {path}: expected a readable YAML file: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"evaluation settings {path}: expected a mapping at the top, got {type(tree).__name__}")
    try:
        return EvaluationSettings.model_validate(tree)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc'])) or 'settings'} = {item['input']!r}: {item['msg']}" for item in error.errors()]
        raise InputError(f"evaluation settings {path}: " + "; ".join(lines)) from error


def chosen_rows(settings: EvaluationSettings, wanted: Sequence[str]) -> EvaluationSettings:
    """Return the settings with the rows that were asked for, and those that the columns are relative to.

    Args:
        settings: The rows that are known.
        wanted: Labels of rows, names of policies, or ``label=source`` with the name of a policy, a directory of a trained one or
            a pattern of such directories, one for each training seed. None: all rows.

    Raises:
        InputError: If what was asked for is given twice.
    """
    if not wanted:
        return settings
    known = {row.label: row for row in settings.rows}
    roles = settings.roles
    always = [label for label in (roles.reference, roles.middle, roles.best_static, roles.oracle) if label in known]
    rows = {label: known[label] for label in always}
    asked: list[str] = []
    for text in wanted:
        row = known.get(text) or _typed(text)
        if row.label in asked:
            raise InputError(f"row {row.label!r} is given twice: expected different labels")
        asked.append(row.label)
        rows[row.label] = row.model_copy(update={"optional": False})
    learned = tuple(label for label in roles.learned if label in rows)
    if not learned:
        # What was asked for first and is no yardstick is what the targets are about.
        learned = tuple(label for label in asked if label not in always)[:1] or (asked[0],)
    return settings.model_copy(update={"rows": tuple(rows.values()), "roles": roles.model_copy(update={"learned": learned})})


def _typed(text: str) -> RowSettings:
    label, equals, source = text.partition("=")
    if not equals or label.partition(":")[0] in ("curve", "hill-climbing", "marginal-hits", "ttl-rule", "ttl-approximation"):
        label, source = text, text  # a policy's name may hold parameters
    if not label or not source:
        raise InputError(f"row {text!r}: expected label=source, the name of a policy, or the label of a row of the configuration")
    if label == text and Path(source).is_dir():
        label = Path(source).name
    directories = glob.has_magic(source) or Path(source).is_dir()
    return RowSettings(label=label, artifacts=source) if directories else RowSettings(label=label, policy=source)


@dataclass(frozen=True)
class Training:
    """How one of a row's policies was made, by its card.

    Attributes:
        directory: Its directory, as it was given.
        command: What makes it again.
        seed: Its training seed.
        seconds: How long the training took.
    """

    directory: str
    command: str
    seed: str
    seconds: float | None


@dataclass(frozen=True)
class Row:
    """One row, ready to be run.

    Attributes:
        label: Its name.
        group: Policy, bound or ablation.
        source: What it was made from.
        seeds: Names of its seeds. A row that does not depend on any has none; a policy by name has those of the ghost's sample,
            a group of trained policies one for each of them.
        training: How its policies were trained.
        make: Makes its policy for a case and the number of a seed; None if the row is computed.
        compute: Computes its run on a case.
        applies: Whether it can be run on a case.
    """

    label: str
    group: Group
    source: str
    seeds: tuple[str, ...]
    training: tuple[Training, ...] = ()
    make: Callable[[Bench, int], Policy] | None = None
    compute: Callable[[Bench], Run] | None = None
    applies: Callable[[Bench], bool] = lambda bench: True


class Bench:
    """A case, and what several rows need of it, which is worked out once.

    Args:
        case: The case.
        settings: The evaluation's.
    """

    def __init__(self, case: Case, settings: EvaluationSettings) -> None:
        self.case = case
        self.settings = settings
        self._kept: dict[str, Any] = {}

    @cached_property
    def grid(self) -> Floats:
        """Every setting of the grid, shape (N, 3)."""
        return grid_settings(self.case.scenario.config.space)

    @cached_property
    def replays(self) -> Replays:
        """What each of them came to."""
        return static_replays(self.case.scenario, self.grid)

    @cached_property
    def other(self) -> Scenario | None:
        """Another realisation of the case's regime; None where there is none."""
        drawn = self.case.draw(self.settings.seed)
        return None if drawn is self.case.scenario else drawn

    def once(self, name: str, build: Callable[[], T]) -> T:
        """Return what ``build`` made when it was first asked for under this name."""
        if name not in self._kept:
            self._kept[name] = build()
        kept: T = self._kept[name]
        return kept

    def static_run(self, name: str, knobs: Knobs) -> Run:
        """Return the run of a setting that is in force from the start, from an empty cache."""
        settings = to_array([knobs])
        replays = static_replays(self.case.scenario, settings)
        return _static_run(name, replays, np.zeros(len(replays.requests), np.intp), settings)


def resolve_rows(settings: EvaluationSettings) -> tuple[list[Row], list[str]]:
    """Return the rows ready to be run, in their order, and what was left out, in words.

    Raises:
        InputError: If a policy's name means nothing, or no directory matches.
        agents.artifact.ArtifactError: If a trained policy does not load.
    """
    count = max([settings.seeds, *(len(_matches(row)) for row in settings.rows if row.artifacts is not None)])
    rows, left_out = [], []
    for row in settings.rows:
        if row.artifacts is not None:
            directories = _matches(row)
            if not directories:
                words = f"row {row.label!r}: no directory matches {row.artifacts!r}"
                if not row.optional:
                    raise InputError(
                        f"{words}: train the policies there (cachepilot train), or name others: label=directory, or ppo:suites, "
                        "the policy that comes with cachepilot"
                    )
                left_out.append(words)
                continue
            rows.append(_trained(row, directories))
        elif row.policy is not None:
            rows.append(_named(row, row.policy, range(settings.seed, settings.seed + count)))
        elif row.computed is not None:
            rows.append(_COMPUTED[row.computed](row, range(settings.seed, settings.seed + count)))
    return rows, left_out


def row_command(row: RowSettings, settings: EvaluationSettings, options: str = "") -> str:
    """Return the command that makes a row (and those that it is compared with) again."""
    own = row.label if row.computed is not None or row.policy is None or row.label == row.source else f"{row.label}={row.source}"
    if row.artifacts is not None:
        own = f"{row.label}={row.artifacts}"
    return f"cachepilot evaluate {shlex.quote(own)} --seed {settings.seed}{options}"


def _matches(row: RowSettings) -> list[Path]:
    return sorted(Path(name) for name in glob.glob(row.artifacts or "") if Path(name).is_dir())


def _trained(row: RowSettings, directories: Sequence[Path]) -> Row:
    training = []
    policies = []
    for directory in directories:
        policies.append(load_policy(str(directory)))
        card = artifact.load(directory).card
        made = card.get("training", {})
        seconds = made.get("seconds")
        seed = str(made.get("seed", directory.name))
        told = directory.name if directory.is_absolute() else directory.as_posix()
        training.append(
            Training(
                told,
                str(made.get("command", "the card does not say")),
                seed,
                float(seconds) if isinstance(seconds, (int, float)) else None,
            )
        )
    return Row(
        row.label,
        row.group,
        row.source,
        tuple(item.seed for item in training),
        tuple(training),
        make=lambda bench, number: policies[number],
    )


def _named(row: RowSettings, name: str, seeds: Sequence[int]) -> Row:
    try:
        policy = load_policy(name)
    except artifact.ArtifactError:
        raise
    except ValueError as error:
        raise InputError(f"row {row.label!r}: {error}") from error
    training: tuple[Training, ...] = ()
    card: Mapping[str, Any] | None = getattr(getattr(policy, "artifact", None), "card", None)
    if card is not None:
        made = card.get("training", {})
        seconds = made.get("seconds")
        training = (
            Training(
                name,
                str(made.get("command", "the card does not say")),
                str(made.get("seed", "")),
                float(seconds) if isinstance(seconds, (int, float)) else None,
            ),
        )
    return Row(row.label, row.group, row.source, _ghosts(seeds), training, make=lambda bench, number: policy)


def _ghosts(seeds: Sequence[int]) -> tuple[str, ...]:
    return tuple(str(seed) for seed in seeds)


def _best_static(row: RowSettings, seeds: Sequence[int]) -> Row:
    def compute(bench: Bench) -> Run:
        knobs, _ = best_of(bench.case.scenario, bench.grid, bench.replays.dollars)
        return bench.static_run(row.label, knobs)

    return Row(row.label, row.group, row.source, (), compute=compute)


def _window_minimum(row: RowSettings, seeds: Sequence[int]) -> Row:
    def compute(bench: Bench) -> Run:
        replays = bench.replays
        run = _static_run(row.label, replays, replays.dollars.argmin(axis=0), bench.grid)
        return replace(run, dollars=window_minimum(replays.dollars))

    return Row(row.label, row.group, row.source, (), compute=compute)


def _optuna(row: RowSettings, seeds: Sequence[int]) -> Row:
    def compute(bench: Bench) -> Run:
        settings = bench.settings
        found = optuna_static(_tuning(bench), trials=settings.optuna_trials, seed=settings.seed)
        return bench.static_run(row.label, bench.case.scenario.config.space.clip(found))

    return Row(row.label, row.group, row.source, (), compute=compute)


def _tuning(bench: Bench) -> Scenario:
    """Return what a setting is tuned on beforehand: another realisation of the case; where there is none, its first half."""
    if bench.other is not None:
        return bench.other
    scenario = bench.case.scenario
    return replace(scenario, trace=scenario.trace.slice(0, max(2, len(scenario.trace) // 2)))


def _oracle(row: RowSettings, seeds: Sequence[int]) -> Row:
    def make(bench: Bench, number: int) -> Policy:
        return bench.once(f"oracle {row.label}", lambda: build_oracle(bench.case.draw, period=bench.case.period))

    # Where there is no other realisation, it would be built on the very requests that it is judged on.
    return Row(row.label, row.group, row.source, _ghosts(seeds), make=make, applies=lambda bench: bench.other is not None)


_COMPUTED: Mapping[Computed, Callable[[RowSettings, Sequence[int]], Row]] = {
    "best-static": _best_static,
    "window-minimum": _window_minimum,
    "optuna": _optuna,
    "oracle": _oracle,
}


def _static_run(name: str, replays: Replays, rows: npt.NDArray[np.intp], settings: Floats) -> Run:
    """Return the run that goes through the settings ``rows``, one for each interval, shape (W,)."""
    at = (rows, np.arange(len(rows)))
    return Run(
        policy=name,
        dollars=replays.dollars[at].copy(),
        requests=replays.requests.copy(),
        hits=replays.hits[at].copy(),
        terms={term: values[at].copy() for term, values in replays.terms.items()},
        p99=replays.p99[at].copy(),
        knobs=settings[rows].copy(),
    )
