"""What to train and how: the settings of a training, read from YAML, and the single runs that they ask for."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agents.settings import PPOSettings
from envs.action import RADIUS, ActionMap
from envs.observation_vector import mask_of
from envs.task import Randomisation
from experiments.units import InputError

Workload = Literal["sessions", "traces", "suites"]
Variant = Literal[
    "default",
    "no-curve",
    "absolute",
    "no-randomisation",
    "no-warmup",
    "recurrent",
    "article",
    "imitation",
    "no-imitation",
    "no-foresight",
]
Seed = Annotated[int, Field(ge=0, lt=1 << 31)]

RANDOMISATION: Mapping[Workload, Randomisation] = {
    "sessions": Randomisation(start=False, clock=True, absent=0.2),
    "traces": Randomisation(start=False, clock=True, absent=0.2),
    "suites": Randomisation(start=False, knobs=False, prices=1.5, clock=True, absent=0.1),
}
"""What differs between the episodes of a workload, where the settings do not say otherwise."""

EPISODE = 600
"""Most steps of an episode of ``workload: suites``: its traces are shorter, so an episode is a whole trace."""

TRACES = Path("../shared/traces")
"""Where the real traces are looked for, from the working directory, if neither settings nor environment say."""


class RaySettings(BaseModel):
    """How a training is spread over a Ray cluster. Nothing in here changes what comes out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    actors: int = Field(default=2, ge=1, le=256, description="rollout actors of each training; the lanes are split among them")
    training_cpus: float = Field(default=0.5, gt=0, description="CPUs reserved for the learner of each training")
    actor_cpus: float = Field(default=0.25, gt=0, description="CPUs reserved for each rollout actor")
    retries: int = Field(default=5, ge=0, description="how often a learner, and in one segment an actor, may die")


class TrainSettings(BaseModel):
    """What to train and how.

    ``workload: sessions`` makes its traces; with ``traces``, training draws stretches from the first ``train_share`` of each file
    and the held-out ones come from the rest; ``suites`` trains on the training part of :mod:`experiments.suites`.

    Each variant and seed gives an artifact: ``<output>/<name>[-<variant>][-seed<seed>]``, the seed only where there are several.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="mine", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    output: Path = Field(default=Path("policies"), description="the artifacts become folders in here")
    seeds: tuple[Seed, ...] = Field(default=(0,), min_length=1)
    variants: tuple[Variant, ...] = Field(default=("default",), min_length=1, description="ablations, each trained by itself")
    workload: Workload = "sessions"
    traces: tuple[Path, ...] = Field(default=(), description="files that envs.workloads reads, for workload: traces")
    traces_dir: Path | None = Field(
        default=None,
        description="folder of the real traces, for workload: suites; default: CACHEPILOT_TRACES, else ../shared/traces",
    )
    stretch: tuple[int, int] = Field(default=(4_000, 12_000), description="fewest and most requests of a stretch of a trace")
    train_share: float = Field(default=0.7, gt=0, lt=1)
    interval: float = Field(default=5.0, gt=0, description="seconds between two decisions (suites have their own)")
    intervals: tuple[int, int] = Field(default=(24, 40), description="fewest and most intervals of an episode (not of suites)")
    episode: int = Field(default=EPISODE, ge=1, description="steps of an episode of suites")
    randomise: Randomisation = Field(default=Randomisation(), validate_default=False)
    radius: tuple[float, float, float] = Field(default=RADIUS, description="grid steps of an action of 1; 0: not moved at all")
    hidden: tuple[str, ...] = Field(default=(), description="components of the observation that the policy is not shown")
    absolute: bool = Field(
        default=False, description="actions are positions on the grid instead of steps from the curve's optimum"
    )
    pool: int = Field(default=140, ge=1, le=10_000, description="different training scenarios of suites")
    imitate: bool = Field(
        default=False, description="begin with imitation of what was best in hindsight on each scenario (of suites)"
    )
    jobs: int | None = Field(
        default=None,
        ge=1,
        description="processes that look for what was best in hindsight; null: one for each CPU. Nothing depends on it",
    )
    warm_start: Path | None = Field(default=None, description="demonstrations to imitate first (agents.imitation)")
    held_out: int = Field(default=32, ge=1, le=10_000, description="scenarios to evaluate on (not of suites)")
    held_out_seed: int = Field(default=0, ge=0, description="draws them; a set that choices were made by is no longer held out")
    ppo: PPOSettings = PPOSettings()
    ray: RaySettings = RaySettings()

    @model_validator(mode="before")
    @classmethod
    def _randomisation(cls, values: Any) -> Any:
        """Fill what ``randomise`` does not say from the workload's own."""
        if not isinstance(values, Mapping):
            return values
        given, base = values.get("randomise", {}), RANDOMISATION.get(values.get("workload", "sessions"))
        if isinstance(given, Randomisation) or base is None:
            return values
        known = [field.name for field in fields(Randomisation)]
        if not isinstance(given, Mapping) or (unknown := sorted(set(map(str, given)) - set(known))):
            raise ValueError(
                f"randomise: expected some of {', '.join(known)}, got {unknown if isinstance(given, Mapping) else given!r}"
            )
        try:
            return {**values, "randomise": replace(base, **given)}
        except TypeError as error:
            raise ValueError(f"randomise: {error}") from error

    @model_validator(mode="after")
    def _consistent(self) -> TrainSettings:
        if (self.workload == "traces") != bool(self.traces):
            raise ValueError("traces: expected at least one file with workload: traces, and none without")
        for name in ("stretch", "intervals"):
            low, high = getattr(self, name)
            if not 2 <= low <= high:
                raise ValueError(f"{name}: expected 2 <= fewest <= most, got {low} and {high}")
        for name in ("seeds", "variants"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name}: expected each once, got {list(getattr(self, name))}")
        mask_of(self.hidden)
        if self.imitate and (self.workload != "suites" or self.warm_start is not None):
            raise ValueError("imitate: expected workload: suites, and no warm_start of its own")
        if not any(self.actions.radius):
            raise ValueError("radius: expected at least one knob that may be moved")
        return self

    @property
    def actions(self) -> ActionMap:
        """What an action means."""
        return ActionMap("absolute" if self.absolute else "residual", self.radius)

    @property
    def traces_folder(self) -> Path:
        """Folder of the real traces, absolute."""
        return (self.traces_dir or Path(os.environ.get("CACHEPILOT_TRACES") or TRACES)).resolve()

    def portable(self) -> dict[str, Any]:
        """Return what the result depends on, JSON-ready, without this machine's folders."""
        values = self.model_dump(mode="json", exclude={"output", "traces_dir", "jobs", "ray"})
        values["traces"] = [path.name for path in self.traces]
        values["warm_start"] = self.warm_start.name if self.warm_start is not None else None
        return values

    def located(self) -> TrainSettings:
        """Return the settings with absolute folders: they mean the same in another process."""
        warm_start = self.warm_start.resolve() if self.warm_start is not None else None
        return self.model_copy(
            update={
                "output": self.output.resolve(),
                "traces": tuple(path.resolve() for path in self.traces),
                "traces_dir": self.traces_folder,
                "warm_start": warm_start,
            }
        )


@dataclass(frozen=True)
class Run:
    """One training: one variant, one seed.

    Attributes:
        name: The artifact's name.
        variant: What is left out or changed.
        seed: The seed.
        settings: With the variant's changes.
    """

    name: str
    variant: Variant
    seed: int
    settings: TrainSettings

    @property
    def directory(self) -> Path:
        """The artifact's directory."""
        return self.settings.output / self.name

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints while it is trained."""
        return self.settings.output / ".training" / self.name / "checkpoints"

    @property
    def log(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.settings.output / ".training" / self.name / "tensorboard"

    @property
    def identity(self) -> dict[str, Any]:
        """What the weights depend on beside seed and hyperparameters: task, code."""
        settings = self.settings.portable()
        task = {key: settings[key] for key in settings if key not in _NOT_THE_TASK}
        return {"task": task, "files": _sizes(self.settings), "code": code_digest()}

    @property
    def digest(self) -> str:
        """Of everything that the artifact depends on: one that has it need not be trained again."""
        whole = {"identity": self.identity, "settings": self.settings.portable(), "seed": self.seed, "name": self.name}
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


_NOT_THE_TASK = ("name", "seeds", "variants", "held_out", "held_out_seed", "ppo")


def runs(settings: TrainSettings) -> list[Run]:
    """Return the single trainings that the settings ask for, seeds within variants."""
    found = []
    for variant in settings.variants:
        for seed in settings.seeds:
            parts = [settings.name]
            parts += [variant] if variant != "default" else []
            parts += [f"seed{seed}"] if len(settings.seeds) > 1 else []
            found.append(Run("-".join(parts), variant, seed, _varied(settings, variant)))
    return found


_SCRATCH = {
    "beat": "task", "hold_noise": 0, "log_std_init": -1.5, "learning_rate": 1e-3, "clip_range": 0.2, "gamma": 0.97,
    "batch_size": 512, "n_epochs": 10, "total_steps": 307_200,
}  # fmt: skip
"""Of a policy that has imitated nobody: it has to take larger steps, and more of them; the recipe that did best from nothing."""


def _varied(settings: TrainSettings, variant: Variant) -> TrainSettings:
    ppo, update = settings.ppo, dict[str, Any]()
    if variant == "no-curve":
        update = {"hidden": tuple(dict.fromkeys([*settings.hidden, "curve"]))}
    elif variant == "absolute":
        # A start that was chosen as an offset from the curve's optimum means nothing on the whole grid.
        update = {"absolute": True, "ppo": ppo.model_copy(update={"initial_action": (0.0, 0.0, 0.0)})}
    elif variant == "no-randomisation":
        # Where in the trace an episode starts stays drawn: else most of the trace would never be seen.
        update = {"randomise": Randomisation(start=settings.randomise.start, knobs=False, prices=1.0)}
    elif variant == "no-warmup":
        update = {"radius": (*settings.radius[:2], 0.0)}
    elif variant == "recurrent":
        update = {"ppo": ppo.model_copy(update={**_SCRATCH, "recurrent": True}), "warm_start": None, "imitate": False}
    elif variant == "imitation":
        update = {"ppo": ppo.model_copy(update={"total_steps": 1, "critic_rollouts": 1})}
    elif variant == "no-imitation":
        update = {"imitate": False, "ppo": ppo.model_copy(update=_SCRATCH)}
    elif variant == "no-foresight":
        update = {"hidden": tuple(dict.fromkeys([*settings.hidden, "foresight"]))}
    elif variant == "article":
        update = {"ppo": ppo.with_profile("article")}
    return settings.model_copy(update=update)


def load_train_settings(path: Path) -> TrainSettings:
    """Read the settings from a YAML file.

    Raises:
        InputError: If it cannot be read, or a key or value is not as expected; the text names it.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"training settings {path}: expected a readable YAML file: {error}") from error
    if not isinstance(tree, dict | None):
        raise InputError(f"training settings {path}: expected a mapping at the top, got {type(tree).__name__}")
    try:
        return TrainSettings.model_validate(tree or {})
    except ValidationError as error:
        raise InputError(f"training settings {path}: {_said(error)}") from error


def changed(settings: TrainSettings, **values: Any) -> TrainSettings:
    """Return settings with what a command line says in place of what the file says.

    Args:
        settings: The file's.
        values: By name; None and empty lists change nothing.

    Raises:
        InputError: If a value is out of its range.
    """
    given = {name: value for name, value in values.items() if value not in (None, [])}
    try:
        return TrainSettings.model_validate({**settings.model_dump(exclude_unset=True), **given}) if given else settings
    except ValidationError as error:
        raise InputError(f"training: {_said(error)}") from error


def _said(error: ValidationError) -> str:
    found = []
    for item in error.errors():
        place = ".".join(map(str, item["loc"])) or "settings"
        known = _known_keys(item["loc"][:-1]) if item["type"] == "extra_forbidden" else []
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1) if known else []
        hint = f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; expected one of: {', '.join(known)}"
        found.append(f"{place} = {item['input']!r}: {hint if known else item['msg']}")
    return "; ".join(found)


def _known_keys(section: tuple[int | str, ...]) -> list[str]:
    """Return the keys that a section of the settings has; none where it is not a section of them."""
    model: Any = TrainSettings
    for key in section:
        field = model.model_fields.get(key)
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if model is None:
            return []
    return sorted(model.model_fields)


def code_digest() -> str:
    """Return a digest of the code that a training depends on: it is not resumed under another."""
    return _digest([*_world(), *(ROOT / "agents" / name for name in _LEARNER), ROOT / "experiments" / "training_task.py"])


def world_digest() -> str:
    """Return a digest of the code that the workloads, the caches and what was best in hindsight depend on."""
    return _digest(_world())


ROOT = Path(__file__).parent.parent
_LEARNER = ("training.py", "imitation.py")


def _world() -> Iterator[Path]:
    for package in ("serving", "envs"):
        yield from (ROOT / package).rglob("*.py")
    yield from (ROOT / "experiments" / name for name in ("scenarios.py", "suites.py", "demonstrations.py", "walks.py"))
    yield from (ROOT / "agents" / name for name in ("hindsight.py", "schedules.py"))


def _digest(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _sizes(settings: TrainSettings) -> dict[str, int]:
    """Sizes of the files that are read, by name."""
    files = [*settings.traces, *([settings.warm_start] if settings.warm_start is not None else [])]
    if settings.workload == "suites":
        files += sorted(settings.traces_folder.glob("servegen_m_large*"))
    return {path.name: path.stat().st_size for path in files if path.is_file()}
