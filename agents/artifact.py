"""Trained policies on disk: weights as safetensors, everything else as a JSON card; nothing is ever unpickled.

A directory holds ``policy.safetensors`` (the policy's layers only) and ``card.json`` (schema of the observation, meaning of the
action, how it was trained, how it did on held-out workloads, and a probe: one observation and the action it must give).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from envs.observation import DIM, schema, schema_hash

FORMAT = 1
WEIGHTS = "policy.safetensors"
CARD = "card.json"
ACTIONS = 3
TOLERANCE = 1e-4
"""Most by which the probe's action may differ, in an action within [-1, 1]: float32 rounding, no more."""


class ArtifactError(ValueError):
    """A policy that cannot be used; the text says which file, what was expected and what to do."""


@dataclass(frozen=True)
class Network:
    """A multilayer perceptron with tanh between its layers, evaluated in float32.

    Attributes:
        layers: Weights, shape (outputs, inputs), and biases, shape (outputs,), first to last.
    """

    layers: Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]

    def __call__(self, vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the output for one input, shape (outputs,)."""
        value = vector
        for weight, bias in self.layers[:-1]:
            value = np.tanh(weight @ value + bias)
        weight, bias = self.layers[-1]
        result: npt.NDArray[np.float32] = weight @ value + bias
        return result

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the weights by name, as they are stored."""
        return {
            f"layer{index}.{kind}": np.ascontiguousarray(value, np.float32)
            for index, layer in enumerate(self.layers)
            for kind, value in zip(("weight", "bias"), layer, strict=True)
        }


@dataclass(frozen=True)
class Artifact:
    """A trained policy.

    Attributes:
        name: Its name.
        network: Observation, shape (DIM,), to action, shape (3,).
        radius: Grid steps that an action of 1 stands for: size, TTL, warm-up ratio.
        card: The whole card.
    """

    name: str
    network: Network
    radius: tuple[float, float, float]
    card: Mapping[str, Any]


def save(
    directory: Path,
    *,
    name: str,
    network: Network,
    radius: tuple[float, float, float],
    probe: npt.NDArray[np.float32],
    training: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> Path:
    """Write a policy; each file is replaced in one step.

    Args:
        directory: Where to; made if need be.
        name: The policy's name.
        network: The policy.
        radius: Grid steps that an action of 1 stands for.
        probe: An observation to record the action of, shape (DIM,).
        training: Settings, seed, command and versions that reproduce the training.
        evaluation: How the policy did against its baselines.

    Returns:
        ``directory``.
    """
    card = {
        "format": FORMAT,
        "name": name,
        "schema_hash": schema_hash(),
        "schema": schema(),
        "action": {"kind": "residual around the optimum of the smoothed ghost curve", "radius_steps": list(radius)},
        "network": {"activation": "tanh", "shapes": [list(weight.shape) for weight, _ in network.layers]},
        "probe": {"observation": probe.astype(float).tolist(), "action": network(probe).astype(float).tolist()},
        "training": dict(training),
        "evaluation": dict(evaluation),
    }
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / WEIGHTS, save_tensors(network.tensors()))
    _replace(directory / CARD, (json.dumps(card, indent=1, sort_keys=False, allow_nan=False) + "\n").encode())
    return directory


def load(directory: Path) -> Artifact:
    """Read a policy and check that it fits this version and computes what it did when it was saved.

    Raises:
        ArtifactError: If a file is missing or malformed, the observation's schema has changed, or the probe's action differs.
    """
    card = _read_card(directory)
    _check_schema(card, directory)
    network = _read_network(directory, card)
    try:
        radius = tuple(float(step) for step in card["action"]["radius_steps"])
        probe = np.asarray(card["probe"]["observation"], np.float32)
        expected = np.asarray(card["probe"]["action"], np.float32)
        name = str(card["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{directory / CARD}: expected name, action.radius_steps and probe; {error!r}. Train it anew."
        ) from error
    if len(radius) != ACTIONS or not all(0 < step < 100 for step in radius):
        raise ArtifactError(f"{directory / CARD}: action.radius_steps: expected three numbers > 0, got {list(radius)}")
    if probe.shape != (DIM,) or expected.shape != (ACTIONS,):
        raise ArtifactError(
            f"{directory / CARD}: probe: expected {DIM} and {ACTIONS} numbers, got {probe.shape}, {expected.shape}"
        )
    action = network(probe)
    if not np.allclose(action, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise ArtifactError(
            f"{directory}: the recorded observation gives the action {action.tolist()}, expected {expected.tolist()}: "
            f"{WEIGHTS} and {CARD} do not belong together. Copy both files again, or train anew."
        )
    return Artifact(name, network, (radius[0], radius[1], radius[2]), card)


def _read_card(directory: Path) -> dict[str, Any]:
    path = directory / CARD
    try:
        card = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not found; expected the directory of a trained policy ({CARD} and {WEIGHTS})") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: expected a JSON card: {error}") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        found = card.get("format") if isinstance(card, dict) else type(card).__name__
        raise ArtifactError(f"{path}: expected format {FORMAT}, got {found!r}. Train the policy with this version.")
    return card


def _check_schema(card: Mapping[str, Any], directory: Path) -> None:
    stored = card.get("schema")
    if not isinstance(stored, dict) or not isinstance(stored.get("components"), list):
        raise ArtifactError(f"{directory / CARD}: expected the observation's schema")
    if schema_hash(stored) != card.get("schema_hash"):
        raise ArtifactError(f"{directory / CARD}: schema_hash does not match the schema beside it: the card was edited")
    if card["schema_hash"] == schema_hash():
        return
    difference = "; ".join(schema_difference(stored, schema()))
    raise ArtifactError(
        f"{directory}: trained for another observation: {difference}. "
        "Train it anew (cachepilot train), or use the policy 'curve'."
    )


def schema_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return how two schemas differ, in words, most telling first."""
    then = {str(item.get("name")): item for item in stored["components"]}
    now = {str(item["name"]): item for item in current["components"]}
    words = []
    if stored.get("version") != current["version"]:
        words.append(f"normalisation version {stored.get('version')}, now {current['version']}")
    if gone := [name for name in then if name not in now]:
        words.append(f"no longer there: {', '.join(gone)}")
    if new := [name for name in now if name not in then]:
        words.append(f"new: {', '.join(new)}")
    for name in then:
        if name in now and then[name] != now[name]:
            fields = [key for key in now[name] if then[name].get(key) != now[name][key]]
            words.append(f"{name}: " + ", ".join(f"{key} was {then[name].get(key)!r}, is {now[name][key]!r}" for key in fields))
    if not words:
        words.append("the components' order")
    return words


def _read_network(directory: Path, card: Mapping[str, Any]) -> Network:
    path = directory / WEIGHTS
    try:
        tensors = load_tensors(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not found; the card is there without its weights") from None
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: expected a safetensors file: {error}") from error
    count = len(tensors) // 2
    names = {f"layer{index}.{kind}" for index in range(count) for kind in ("weight", "bias")}
    if not tensors or set(tensors) != names:
        raise ArtifactError(f"{path}: expected layer0.weight, layer0.bias, ...; got {sorted(tensors)}")
    network = Network([(tensors[f"layer{index}.weight"], tensors[f"layer{index}.bias"]) for index in range(count)])
    inputs = DIM
    for index, (weight, bias) in enumerate(network.layers):
        if weight.ndim != 2 or bias.shape != weight.shape[:1] or weight.shape[1] != inputs or weight.dtype != np.float32:
            raise ArtifactError(
                f"{path}: layer{index}: expected float32 weights for {inputs} inputs, got {weight.dtype} {weight.shape}"
            )
        if not (np.all(np.isfinite(weight)) and np.all(np.isfinite(bias))):
            raise ArtifactError(f"{path}: layer{index}: weights are not finite; the training diverged or the file is damaged")
        inputs = weight.shape[0]
    if inputs != ACTIONS:
        raise ArtifactError(f"{path}: expected {ACTIONS} outputs, got {inputs}")
    return network


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
