"""A trained policy as an ONNX graph, for runtimes other than ours. Needs the package ``onnx`` (the extra ``onnx``), not torch.

The graph takes in an observation and gives out the action within [-1, 1]; what the action means (:class:`envs.action.ActionMap`),
when to hold and when to stand back (:class:`agents.ppo.PPOPolicy`) are the caller's. Its metadata say which observation it needs.

- ``observation``, float32, (batch, DIM): :attr:`envs.observation.Observation.vector`, which must be finite; what is hidden from
  the policy is masked in the graph.
- ``action``, float32, (batch, 3).
- A recurrent policy also takes in ``hidden`` and ``cell``, float32, (batch, units), zeros at the start, and gives out
  ``hidden_out`` and ``cell_out``, which are the next decision's.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.artifact import ACTIONS, Artifact, action_schema
from agents.network import Floats32, Network, RecurrentNetwork
from agents.output_file import write_output
from envs.observation_vector import DIM, schema, schema_hash

if TYPE_CHECKING:
    import onnx

OPSET = 17
"""Version of ONNX' operators that the graph uses."""
IR_VERSION = 8
"""Version of the file format that comes with it: readable for runtimes since 2022."""
TOLERANCE = 1e-5
"""Most by which an action may differ from ours: the order of float32 sums, no more."""

_GATES = (0, 3, 1, 2)
"""Where ONNX' gates (input, output, forget, cell) are in torch's order (input, forget, cell, output)."""


class ExportError(RuntimeError):
    """The policy cannot be exported; the text says what is missing."""


def export(artifact: Artifact, path: Path) -> Path:
    """Write a policy as an ONNX graph, checked by ONNX' own checker; the file is replaced in one step.

    Args:
        artifact: The policy.
        path: Where to; its folder is made if need be.

    Returns:
        ``path``.

    Raises:
        ExportError: If ``onnx`` is not installed.
        agents.output_file.OutputError: If the file cannot be written.
    """
    model = to_onnx(artifact)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, model.SerializeToString(deterministic=True))
    return path


def to_onnx(artifact: Artifact) -> onnx.ModelProto:
    """Return a policy as an ONNX model, checked by ONNX' own checker.

    Raises:
        ExportError: If ``onnx`` is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise ExportError(f"ONNX export needs the package onnx: pip install 'cachepilot[onnx]' ({error})") from error
    graph = _Graph(onnx)
    graph.input("observation", DIM)
    seen = graph.node("Mul", ["observation", graph.constant("mask", artifact.mask)])
    network = artifact.network
    if isinstance(network, RecurrentNetwork):
        raw = graph.perceptron(graph.lstm(seen, network), network.head)
    else:
        raw = graph.perceptron(seen, network)
    limits = [graph.constant(name, np.float32(value)) for name, value in (("low", -1), ("high", 1))]
    graph.node("Clip", [raw, *limits], "action")
    graph.output("action", ACTIONS)
    model = graph.model(artifact.name, _metadata(artifact))
    onnx.checker.check_model(model, full_check=True)
    return model


def _metadata(artifact: Artifact) -> dict[str, str]:
    actions = action_schema(artifact.actions)
    return {
        "name": artifact.name,
        "kind": artifact.network.kind,
        "schema_hash": schema_hash(),
        "schema": json.dumps(schema()),
        "hidden": json.dumps(list(artifact.hidden)),
        "action_hash": schema_hash(actions),
        "action": json.dumps(actions),
        "radius_steps": json.dumps(list(artifact.actions.radius)),
        "card_digest": str(artifact.card.get("digest", "")),
    }


class _Graph:
    """Gathers the parts of a graph; every value is named after the operation that makes it."""

    def __init__(self, onnx: Any) -> None:
        self._onnx = onnx
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def _batch(self, name: str, width: int) -> Any:
        return self._onnx.helper.make_tensor_value_info(name, self._onnx.TensorProto.FLOAT, ["batch", width])

    def input(self, name: str, width: int) -> str:
        self._inputs.append(self._batch(name, width))
        return name

    def output(self, name: str, width: int) -> None:
        self._outputs.append(self._batch(name, width))

    def constant(self, name: str, value: Any) -> str:
        self._constants.append(self._onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, operator: str, inputs: list[str], name: str | None = None, **attributes: Any) -> str:
        name = name or f"{operator.lower()}{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def perceptron(self, value: str, network: Network) -> str:
        last = len(network.layers) - 1
        for index, (weight, bias) in enumerate(network.layers):
            names = [self.constant(f"layer{index}.weight", weight), self.constant(f"layer{index}.bias", bias)]
            value = self.node("Gemm", [value, *names], transB=1)
            if index < last:
                value = self.node("Tanh", [value])
        return value

    def lstm(self, value: str, network: RecurrentNetwork) -> str:
        """Add one step of the LSTM; return the hidden state after it, (batch, units)."""
        axis = self.constant("time", np.array([0], np.int64))
        direction = [
            self.constant("lstm.weight_ih", _in_gate_order(network.weight_ih)[None]),
            self.constant("lstm.weight_hh", _in_gate_order(network.weight_hh)[None]),
            self.constant("lstm.bias", np.concatenate([_in_gate_order(network.bias_ih), _in_gate_order(network.bias_hh)])[None]),
        ]
        states = [
            self.node("Unsqueeze", [self.input(name, network.units), axis], f"{name}_before") for name in ("hidden", "cell")
        ]
        sequence = self.node("Unsqueeze", [value, axis])
        self._nodes.append(
            self._onnx.helper.make_node(
                "LSTM",
                [sequence, *direction, "", *states],
                ["", "hidden_after", "cell_after"],
                name="lstm",
                hidden_size=network.units,
            )
        )
        for name in ("hidden", "cell"):
            self.node("Squeeze", [f"{name}_after", axis], f"{name}_out")
        self.output("hidden_out", network.units)
        self.output("cell_out", network.units)
        return "hidden_out"

    def model(self, name: str, metadata: dict[str, str]) -> onnx.ModelProto:
        helper = self._onnx.helper
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._constants)
        model = helper.make_model(
            graph,
            producer_name="cachepilot",
            producer_version=_own_version(),
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )
        helper.set_model_props(model, metadata)
        made: onnx.ModelProto = model
        return made


def _in_gate_order(stacked: Floats32) -> Floats32:
    gates = np.split(stacked, 4)
    ordered: Floats32 = np.concatenate([gates[gate] for gate in _GATES])
    return ordered


def _own_version() -> str:
    try:
        return version("cachepilot")
    except PackageNotFoundError:
        return "0"
