"""One settings tree: a YAML file and ``CACHEPILOT_*`` variables over each package's own settings. Unknown keys are refused.

A variable names its key with double underscores: ``CACHEPILOT_GATEWAY__REDIS_URL``, ``CACHEPILOT_TUNER__INTERVAL``.
Order of precedence: what the command line sets, then variables, then the file, then the defaults.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agents.supervised import Supervision
from envs.objective import Prices
from envs.settings import EnvsSettings
from envs.smoothing import SMOOTHING
from experiments.settings import ExperimentsSettings
from serving.settings import GatewaySettings, LlmSimSettings
from tuner.guard import GuardLimits

PREFIX = "CACHEPILOT_"
FILE_VARIABLE = "CACHEPILOT_CONFIG"
Steps = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NOT_SETTINGS = frozenset({FILE_VARIABLE, "CACHEPILOT_TRACES", "CACHEPILOT_REQUIRE_ALL", "CACHEPILOT_API_KEY"})
"""Variables with the prefix that are no settings."""


class SettingsError(ValueError):
    """Settings that cannot be used; the text names the key, the value and what was expected."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SignalSettings(_Section):
    """Where the tuner reads signals."""

    kind: Literal["scrape", "prometheus"] = "scrape"
    prometheus_url: str = "http://127.0.0.1:9090"
    targets: list[str] = Field(
        default_factory=list, description="URLs to scrape, or a Prometheus file_sd JSON file, when kind is scrape"
    )
    scrape_interval: float = Field(1.0, gt=0, description="seconds between two scrapes, ours or Prometheus'")
    model_metrics: str | None = Field(None, description="URL of the model server's metrics, scraped as well")


class GuardSettings(_Section):
    """Limits of the guard; see :class:`tuner.guard.GuardLimits`."""

    max_steps: tuple[Steps, Steps, Steps] = (2.0, 2.0, 2.0)
    dead_band: float = Field(0.25, ge=0)
    max_age: float = Field(60.0, gt=0)
    min_requests: float = Field(20.0, ge=0)

    def limits(self) -> GuardLimits:
        """Return the guard's own form."""
        return GuardLimits(**self.model_dump())


_SUPERVISION = Supervision()


class SupervisionSettings(_Section):
    """When a policy is benched in favour of the curve and for how long; see :class:`agents.supervised.Supervision`."""

    window: int = Field(_SUPERVISION.window, ge=3, le=10_000, description="most intervals that it is judged by")
    least: int = Field(_SUPERVISION.least, ge=3, description="fewest intervals that it is judged by")
    margin: float = Field(_SUPERVISION.margin, ge=0, allow_inf_nan=False, description="share of the curve's cost it may exceed")
    certainty: float = Field(_SUPERVISION.certainty, ge=0, allow_inf_nan=False, description="t statistic at which it is benched")
    rest: int = Field(_SUPERVISION.rest, ge=1, description="intervals benched the first time; doubled with each failed try")
    longest_rest: int = Field(_SUPERVISION.longest_rest, ge=1, description="most intervals benched")
    probation: int = Field(_SUPERVISION.probation, ge=1, description="intervals of good conduct after which rests begin anew")

    def supervision(self) -> Supervision:
        """Return the supervisor's own form."""
        return Supervision(**self.model_dump())

    @model_validator(mode="after")
    def _consistent(self) -> SupervisionSettings:
        self.supervision()
        return self


class TunerSettings(_Section):
    """The control loop."""

    arm: str = Field("treatment", description="the arm that is tuned; others are observed")
    policy: str = Field("ppo", description="ppo, curve, static:<size>,<ttl>,<warmup>, or the directory of an artifact")
    supervise: bool = Field(True, description="bench a policy that does worse than the curve would have")
    supervision: SupervisionSettings = SupervisionSettings()
    smoothing: float = Field(
        SMOOTHING, gt=0, le=1, description="weight of the newest window in what a policy sees; policies are trained so"
    )
    interval: float = Field(30.0, gt=0, allow_inf_nan=False, description="seconds between two decisions")
    window: float | None = Field(None, gt=0, description="seconds of signals per decision; default: the interval")
    confirm_timeout: float = Field(10.0, gt=0)
    signals: SignalSettings = SignalSettings()
    guard: GuardSettings = GuardSettings()


class Settings(_Section):
    """Everything."""

    gateway: GatewaySettings = GatewaySettings()
    llm_sim: LlmSimSettings = LlmSimSettings()
    envs: EnvsSettings = EnvsSettings()
    experiments: ExperimentsSettings = ExperimentsSettings()
    tuner: TunerSettings = TunerSettings()

    @property
    def prices(self) -> Prices:
        """What things cost."""
        return self.envs.prices.to_prices()


def load_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        path: A YAML file; else the one that ``CACHEPILOT_CONFIG`` names; else none.
        environ: The environment; default: the process's own.

    Raises:
        SettingsError: If the file cannot be read or parsed, or a key or value is not as expected.
    """
    variables = os.environ if environ is None else environ
    if path is None:
        path = _file_of(variables)
    tree = _read_file(path) if path is not None else {}
    origin: dict[tuple[str, ...], str] = {}
    for name in _names_of(variables):
        keys = tuple(name[len(PREFIX) :].lower().split("__"))
        _insert(tree, keys, _parse(name, variables[name]), name)
        origin[keys] = name
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError(_explain(error, path, origin)) from None


def origin_of_settings(path: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Say in words where :func:`load_settings` takes the settings from: the file, who named it, and the variables over it.

    Args:
        path: As there.
        environ: As there.
    """
    variables = os.environ if environ is None else environ
    named = _file_of(variables)
    if path is not None:
        found = f"{path}, by --config"
    else:
        found = f"{named}, by ${FILE_VARIABLE}" if named is not None else f"the defaults, without --config or ${FILE_VARIABLE}"
    names = _names_of(variables)
    return f"{found}; over it: {', '.join(names)}" if names else found


def _file_of(variables: Mapping[str, str]) -> Path | None:
    given = variables.get(FILE_VARIABLE)
    return Path(given) if given else None


def _names_of(variables: Mapping[str, str]) -> list[str]:
    return sorted(name for name in variables if name.startswith(PREFIX) and name not in NOT_SETTINGS)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path}: {error}; expected a readable YAML file") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        raise SettingsError(f"settings file {path}{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError(f"settings file {path}: expected a mapping of sections at the top, got {type(tree).__name__}")
    return tree


def _parse(name: str, raw: str) -> Any:
    """A variable's value is YAML, so that numbers, lists and null mean what they do in the file."""
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError:
        raise SettingsError(f"variable {name}: value {raw!r} is not YAML; quote it") from None


def _insert(tree: dict[str, Any], keys: tuple[str, ...], value: Any, name: str) -> None:
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise SettingsError(f"variable {name}: {key!r} is a value, not a section")
        node = child
    node[keys[-1]] = value


def _explain(error: ValidationError, path: Path | None, origin: Mapping[tuple[str, ...], str]) -> str:
    lines = []
    for item in error.errors():
        keys = tuple(str(part) for part in item["loc"])
        variable = next((name for key, name in origin.items() if keys[: len(key)] == key), None)
        where = f"variable {variable}" if variable else f"settings file {path}" if path else "settings"
        dotted = ".".join(keys)
        if item["type"] == "extra_forbidden":
            known = _known_keys(keys[:-1])
            close = difflib.get_close_matches(keys[-1], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of: {', '.join(known)}"
            lines.append(f"{where}: {dotted}{_shown(keys, item['input'])}: unknown key; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {dotted}{_shown(keys, item['input'])}: {message[0].lower() + message[1:]}")
    return re.sub(r"://[^/@\s'\"]*@", "://***@", "\n".join(lines))


_SECRETS = frozenset({"auth", "token", "encryption_key"})
"""Keys, or sections, whose values are not shown: a key may have been written where its hash belongs."""


def _shown(keys: tuple[str, ...], value: object) -> str:
    """The value as a message may show it: logs are read by many. A section is not shown, since it may hold a secret."""
    if isinstance(value, dict):
        return ""
    secret = any(key in _SECRETS or word in key.lower() for key in keys for word in ("api_key", "password", "secret", "token_"))
    return " = ***" if secret else f" = {value!r}"


def _known_keys(keys: tuple[str, ...]) -> list[str]:
    """Names that a section has, following ``keys`` down the tree of models."""
    model: Any = Settings
    for key in keys:
        field = model.model_fields.get(key) if isinstance(model, type) and issubclass(model, BaseModel) else None
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())] if field is not None else []
        # A mapping of sections (arms) is passed through by the name in it.
        model = next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), model)
    return sorted(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
