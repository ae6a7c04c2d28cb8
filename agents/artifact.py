"""Trained policies on disk: weights as safetensors, everything else as a JSON card; nothing is ever unpickled.

A directory holds ``policy.safetensors`` (the network's weights and the statistics of the observations it was trained on),
``card.json`` (what the weights mean, where they come from, how the policy did, and probes: observations and what the network must
answer) and ``README.md``, the card for people, written from the other (:mod:`agents.card`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from agents.card import readme
from agents.familiarity import STATISTICS, ObservationStatistics
from agents.network import Floats32, Network, PolicyNetwork, RecurrentNetwork, from_tensors
from agents.output_file import write_output
from envs.action import ActionMap
from envs.observation_vector import DIM, mask_of, schema, schema_hash

__all__ = [
    "ACTIONS", "CARD", "FORMAT", "README", "TOLERANCE", "WEIGHTS", "Artifact", "ArtifactError", "Network", "RecurrentNetwork",
    "action_schema", "load", "save", "schema_difference", "with_evaluation",
]  # fmt: skip

FORMAT = 2
WEIGHTS = "policy.safetensors"
CARD = "card.json"
README = "README.md"
ACTIONS = 3
ACTION_VERSION = 1
"""Grows whenever an action changes its meaning in a way that :meth:`envs.action.ActionMap.to_dict` does not show."""
TOLERANCE = 1e-4
"""Most by which a probe's output may differ, in an action within [-1, 1]: float32 rounding on another processor, no more."""

_PREFIX = "observation."
_AGAIN = "Train it anew (cachepilot train), or use the policy 'curve'."


class ArtifactError(ValueError):
    """A policy that cannot be used; the text says which file, what was expected and what to do."""


@dataclass(frozen=True, eq=False)
class Artifact:
    """A trained policy.

    Attributes:
        name: Its name.
        network: Observation, shape (DIM,), to action, shape (3,), not clipped.
        actions: What an action means.
        hidden: Components, or groups of them, that the network does not see; see :func:`envs.observation_vector.mask_of`.
        statistics: What training saw of each component.
        card: The whole card; empty for a policy that was not loaded.

    Raises:
        ArtifactError: If the network does not fit observation and action, or something hidden is unknown.
    """

    name: str
    network: PolicyNetwork
    actions: ActionMap = field(default_factory=ActionMap)
    hidden: Sequence[str] = ()
    statistics: ObservationStatistics = field(default_factory=ObservationStatistics.anything)
    card: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.network.inputs, self.network.outputs) != (DIM, ACTIONS):
            raise ArtifactError(
                f"policy {self.name}: expected a network of {DIM} inputs and {ACTIONS} outputs, "
                f"got {self.network.inputs} and {self.network.outputs}"
            )
        try:
            mask = mask_of(self.hidden)
        except ValueError as error:
            raise ArtifactError(f"policy {self.name}: {error}. {_AGAIN}") from error
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "_mask", mask)

    @property
    def recurrent(self) -> bool:
        """Whether the network remembers what it saw before."""
        return self.network.kind == "recurrent"

    @property
    def mask(self) -> Floats32:
        """What to multiply an observation with before the network sees it: zeros and ones, shape (DIM,)."""
        mask: Floats32 = self._mask  # type: ignore[attr-defined]
        return mask

    @property
    def probes(self) -> Floats32:
        """The observations of the card's probes, in the order of time, shape (N, DIM)."""
        return np.asarray(self.card["probes"]["observations"], np.float32)

    def outputs(self, observations: npt.ArrayLike) -> Floats32:
        """Play a sequence from the initial state.

        Args:
            observations: In the order of time, shape (N, DIM); hidden components and all.

        Returns:
            The network's outputs, not clipped, shape (N, 3).
        """
        values, state, outputs = np.asarray(observations, np.float32), self.network.initial(), []
        for row in values:
            output, state = self.network.step(row * self.mask, state)
            outputs.append(output)
        return np.stack(outputs)


def action_schema(actions: ActionMap) -> dict[str, Any]:
    """Return what the meaning of a policy's action depends on."""
    return {"version": ACTION_VERSION, "knobs": ["cache_size", "ttl", "warmup_ratio"], "range": [-1, 1], **actions.to_dict()}


def save(
    directory: Path,
    *,
    name: str,
    network: PolicyNetwork,
    actions: ActionMap,
    hidden: Sequence[str],
    statistics: ObservationStatistics,
    probes: npt.ArrayLike,
    training: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> Path:
    """Write a policy, after checking that it could be read; the same arguments give the same bytes.

    Each file is replaced in one step, the weights first. Whoever loads in between, or after a crash in between, is told.

    Args:
        directory: Where to; made if need be.
        name: The policy's name.
        network: The policy.
        actions: What an action means.
        hidden: Components, or groups of them, that the network was not shown.
        statistics: What training saw.
        probes: Observations to record the outputs of, shape (N, DIM), N >= 1; a stretch of one episode in the order of time, so
            that a recurrent network's memory is covered.
        training: What reproduces the training: ``command``, ``seed``, ``settings``, ``versions``, and what else is of note;
            plain numbers and text.
        evaluation: How the policy did; :mod:`agents.card` says how it is shown.

    Returns:
        ``directory``.

    Raises:
        ArtifactError: If the parts do not fit each other, or the card could not be written as JSON.
    """
    trained = Artifact(name, network, actions, hidden, statistics)
    observed = _numbers(probes, f"policy {name}: probes", DIM)
    for tensor, value in network.tensors().items():
        if not np.all(np.isfinite(value)):
            raise ArtifactError(f"policy {name}: {tensor} is not finite: the training diverged. {_AGAIN}")
    with np.errstate(all="ignore"):
        outputs = _numbers(trained.outputs(observed), f"policy {name}: outputs of the probes", ACTIONS)
    weights = save_tensors({**network.tensors(), **{_PREFIX + part: getattr(statistics, part) for part in STATISTICS}})
    shapes = {tensor: list(value.shape) for tensor, value in network.tensors().items()}
    card: dict[str, Any] = {
        "format": FORMAT,
        "name": name,
        "weights": {"file": WEIGHTS, "sha256": hashlib.sha256(weights).hexdigest(), "bytes": len(weights)},
        "network": {"kind": network.kind, "activation": "tanh", "shapes": shapes},
        "action_hash": schema_hash(action_schema(actions)),
        "action": action_schema(actions),
        "hidden": list(trained.hidden),
        "schema_hash": schema_hash(),
        "schema": schema(),
        "probes": {"observations": _plain(observed), "outputs": _plain(outputs)},
        "training": dict(training),
        "evaluation": dict(evaluation),
    }
    text = _written(card)
    _artifact(json.loads(text), weights, directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_output(directory / WEIGHTS, weights)
    _write_card(directory, text)
    return directory


def with_evaluation(directory: Path, evaluation: Mapping[str, Any]) -> Path:
    """Replace the evaluation in a policy's card, and the card for people with it; nothing else changes.

    Args:
        directory: The policy.
        evaluation: How it did.

    Returns:
        ``directory``.

    Raises:
        ArtifactError: If the policy cannot be used, or the evaluation cannot be written as JSON.
    """
    _write_card(directory, _written({**load(directory).card, "evaluation": dict(evaluation)}))
    return directory


def load(directory: Path) -> Artifact:
    """Read a policy and check that it fits this version and computes what it did when it was saved.

    Raises:
        ArtifactError: If a file is missing, malformed, edited or of another policy, the meaning of the observation or of the
            action has changed, or a probe's output differs.
    """
    card = _read_card(directory)
    path = directory / WEIGHTS
    try:
        weights = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not found; the card is there without its weights. Copy both again.") from None
    except OSError as error:
        raise ArtifactError(f"{path}: expected a safetensors file: {error}") from error
    return _artifact(card, weights, directory)


def _artifact(card: Mapping[str, Any], weights: bytes, directory: Path) -> Artifact:
    """Return the policy that a card and its weights are, checked in full."""
    path = directory / CARD
    _check_schema(card, directory)
    actions = _actions(card, path)
    _check_weights(card, weights, directory)
    network, statistics = _read_tensors(card, weights, directory / WEIGHTS)
    hidden = card.get("hidden")
    if not isinstance(card.get("name"), str) or not isinstance(hidden, list) or not all(isinstance(one, str) for one in hidden):
        raise ArtifactError(f"{path}: expected a name, and hidden: the names of hidden components. {_AGAIN}")
    try:
        trained = Artifact(card["name"], network, actions, hidden, statistics, card)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    _check_probes(trained, directory)
    return trained


def _read_card(directory: Path) -> dict[str, Any]:
    path = directory / CARD
    try:
        card = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        digest = _digest(card) if isinstance(card, dict) else ""
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not found; expected the directory of a trained policy ({CARD} and {WEIGHTS})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: expected a JSON card: {error}") from error
    found = card.get("format") if isinstance(card, dict) else type(card).__name__
    if found == 1:
        raise ArtifactError(f"{path}: format 1 is an earlier version's, expected format {FORMAT}. {_AGAIN}")
    if not isinstance(card, dict) or found != FORMAT:
        raise ArtifactError(f"{path}: expected format {FORMAT}, got {found!r}. Train the policy with this version.")
    if card.get("digest") != digest:
        raise ArtifactError(
            f"{path}: digest does not match the rest: the card was edited or damaged. Copy it again; an evaluation is "
            "replaced by evaluating again, never by hand."
        )
    return card


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _check_schema(card: Mapping[str, Any], directory: Path) -> None:
    stored = card.get("schema")
    components = stored.get("components") if isinstance(stored, dict) else None
    if not isinstance(components, list) or not all(isinstance(item, dict) for item in components):
        raise ArtifactError(f"{directory / CARD}: expected the observation's schema. {_AGAIN}")
    assert isinstance(stored, dict)
    if schema_hash(stored) != card.get("schema_hash"):
        raise ArtifactError(f"{directory / CARD}: schema_hash does not match the schema beside it: the card was edited")
    if card["schema_hash"] == schema_hash():
        return
    difference = "; ".join(schema_difference(stored, schema()))
    raise ArtifactError(f"{directory}: trained for another observation: {difference}. {_AGAIN}")


def schema_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return how two schemas of the observation differ, in words, most telling first."""
    then = {str(item.get("name")): item for item in stored["components"]}
    now = {str(item["name"]): item for item in current["components"]}
    words = []
    if stored.get("version") != current["version"]:
        words.append(f"normalisation version {stored.get('version')}, now {current['version']}")
    if gone := [name for name in then if name not in now]:
        words.append(f"no longer there: {', '.join(gone)}")
    if new := [name for name in now if name not in then]:
        words.append(f"new: {', '.join(new)}")
    words += [f"{name}: {_changes(then[name], now[name])}" for name in then if name in now and then[name] != now[name]]
    if not words:
        words.append("the components' order")
    return words


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    keys = [*now, *(key for key in then if key not in now)]
    return ", ".join(f"{key} was {then.get(key)!r}, is {now.get(key)!r}" for key in keys if then.get(key) != now.get(key))


def _actions(card: Mapping[str, Any], path: Path) -> ActionMap:
    stored = card.get("action")
    if not isinstance(stored, dict) or schema_hash(stored) != card.get("action_hash"):
        raise ArtifactError(f"{path}: expected the action's schema and its hash, which match: the card was edited")
    own = ActionMap().to_dict()
    try:
        actions = ActionMap.from_dict({key: value for key, value in stored.items() if key in own})
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: trained for other actions: {error}. {_AGAIN}") from error
    if action_schema(actions) != stored:
        raise ArtifactError(f"{path}: trained for other actions: {_changes(stored, action_schema(actions))}. {_AGAIN}")
    return actions


def _check_weights(card: Mapping[str, Any], weights: bytes, directory: Path) -> None:
    stored = card.get("weights")
    expected = stored.get("sha256") if isinstance(stored, dict) else None
    found = hashlib.sha256(weights).hexdigest()
    if found != expected:
        raise ArtifactError(
            f"{directory}: {WEIGHTS} and {CARD} do not belong together: expected weights with sha256 {expected}, got {found} "
            f"({len(weights)} bytes). A save or a copy was interrupted, or files were swapped: copy both again, or train anew."
        )


def _read_tensors(card: Mapping[str, Any], weights: bytes, path: Path) -> tuple[PolicyNetwork, ObservationStatistics]:
    stored = card.get("network")
    if not isinstance(stored, dict) or stored.get("activation") != "tanh":
        raise ArtifactError(f"{path.with_name(CARD)}: network: expected its kind, the activation tanh, and the shapes")
    try:
        tensors = load_tensors(weights)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: expected a safetensors file of float32 tensors: {error}. Copy it again.") from error
    for name, value in tensors.items():
        if value.dtype != np.float32:
            raise ArtifactError(f"{path}: {name}: expected float32, got {value.dtype}")
        if not np.all(np.isfinite(value)):
            raise ArtifactError(f"{path}: {name} is not finite; the training diverged or the file is damaged")
    observed = {name: value for name, value in tensors.items() if name.startswith(_PREFIX)}
    layers = {name: value for name, value in tensors.items() if name not in observed}
    if set(observed) != {_PREFIX + part for part in STATISTICS}:
        raise ArtifactError(
            f"{path}: expected {', '.join(_PREFIX + part for part in STATISTICS)}; got {', '.join(sorted(observed)) or 'none'}"
        )
    shapes = {name: list(value.shape) for name, value in layers.items()}
    if shapes != stored.get("shapes"):
        raise ArtifactError(f"{path}: expected tensors of the shapes {stored.get('shapes')}, got {shapes}")
    try:
        network = from_tensors(str(stored.get("kind")), layers)
        return network, ObservationStatistics(**{name.removeprefix(_PREFIX): value for name, value in observed.items()})
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from error


def _check_probes(trained: Artifact, directory: Path) -> None:
    where = f"{directory / CARD}: probes"
    stored = trained.card.get("probes")
    if not isinstance(stored, dict):
        raise ArtifactError(f"{where}: expected observations and outputs. {_AGAIN}")
    observations = _numbers(stored.get("observations"), f"{where}.observations", DIM)
    expected = _numbers(stored.get("outputs"), f"{where}.outputs", ACTIONS)
    if len(observations) != len(expected):
        raise ArtifactError(f"{where}: expected an output for each of {len(observations)} observations, got {len(expected)}")
    with np.errstate(all="ignore"):
        outputs = trained.outputs(observations)
    for number, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if not np.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            raise ArtifactError(
                f"{directory}: probe {number} gives the output {found.tolist()}, expected {wanted.tolist()}: numpy computes "
                "something else here than where the policy was saved. Train anew, and report this with numpy's version."
            )


def _numbers(values: Any, where: str, columns: int) -> Floats32:
    """Return finite numbers of shape (N, columns), N >= 1.

    Raises:
        ArtifactError: If they are something else.
    """
    try:
        array = np.asarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{where}: expected rows of {columns} numbers: {error}") from error
    if array.ndim != 2 or not len(array) or array.shape[1] != columns or not np.all(np.isfinite(array)):
        raise ArtifactError(f"{where}: expected at least one row of {columns} finite numbers, got shape {array.shape}")
    return array


def _plain(values: Floats32) -> list[list[float]]:
    """Return float32 numbers as the shortest decimals that read back as the same float32."""
    return [[float(str(value)) for value in row] for row in values]


def _digest(card: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in a card but its digest, however it is laid out."""
    rest = {key: value for key, value in card.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_ROW = re.compile(r"\[\n[^\[\]{}\"]*\]")


def _written(card: Mapping[str, Any]) -> str:
    """Return a card as it is stored, with its digest; rows of numbers take one line each.

    Raises:
        ArtifactError: If something in it is not JSON.
    """
    try:
        rest = json.loads(json.dumps({key: value for key, value in card.items() if key != "digest"}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"policy {card.get('name')}: training and evaluation: expected text, finite numbers, lists and mappings: {error}"
        ) from error
    text = json.dumps({**rest, "digest": _digest(rest)}, indent=1, allow_nan=False)
    # A line break within a string is escaped, so whatever matches is a list.
    return _ROW.sub(lambda match: re.sub(r"\s+", " ", match[0]).replace("[ ", "[").replace(" ]", "]"), text) + "\n"


def _write_card(directory: Path, text: str) -> None:
    page = readme(json.loads(text))
    write_output(directory / CARD, text)
    write_output(directory / README, page)
