"""The networks of trained policies, in numpy: a multilayer perceptron, and one LSTM layer with a perceptron after it.

Both compute what torch computes with the same weights, but for the rounding of float32. They keep own, contiguous copies of their
weights that cannot be written to: a network computes the same bits whether its weights come from training or from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats32 = npt.NDArray[np.float32]
State = tuple[Floats32, ...]
"""What a network remembers from one decision to the next: nothing, or the LSTM's hidden and cell state, shape (units,) each."""

Kind = Literal["feedforward", "recurrent"]


@dataclass(frozen=True, eq=False)
class Network:
    """A multilayer perceptron with tanh between its layers, evaluated in float32.

    Attributes:
        layers: Weights, shape (outputs, inputs), and biases, shape (outputs,), first to last.

    Raises:
        ValueError: If there is no layer, or the shapes do not fit each other.
    """

    layers: Sequence[tuple[Floats32, Floats32]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple((_own(weight), _own(bias)) for weight, bias in self.layers))
        if not self.layers:
            raise ValueError("network: expected at least one layer")
        inputs = self.layers[0][0].shape[-1:]
        for index, (weight, bias) in enumerate(self.layers):
            if weight.ndim != 2 or weight.shape[1:] != inputs or bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"layer{index}: expected a weight of shape (outputs, {inputs[0] if inputs else 'inputs'}) and a bias of "
                    f"shape (outputs,), got {weight.shape} and {bias.shape}"
                )
            inputs = weight.shape[:1]

    @property
    def kind(self) -> Kind:
        """``feedforward``."""
        return "feedforward"

    @property
    def inputs(self) -> int:
        """Length of an input."""
        return int(self.layers[0][0].shape[1])

    @property
    def outputs(self) -> int:
        """Length of an output."""
        return int(self.layers[-1][0].shape[0])

    def __call__(self, vector: Floats32) -> Floats32:
        """Return the output for one input of shape (inputs,), shape (outputs,)."""
        value = vector
        for weight, bias in self.layers[:-1]:
            value = np.tanh(weight @ value + bias)
        weight, bias = self.layers[-1]
        result: Floats32 = weight @ value + bias
        return result

    def initial(self) -> State:
        """Return the state before the first decision: none."""
        return ()

    def step(self, vector: Floats32, state: State) -> tuple[Floats32, State]:
        """Return the output for one input, and the state as it was."""
        return self(vector), state

    def tensors(self) -> dict[str, Floats32]:
        """Return the weights by name, as they are stored: ``layer0.weight``, ``layer0.bias``, ..."""
        return {
            f"layer{index}.{part}": value
            for index, layer in enumerate(self.layers)
            for part, value in zip(("weight", "bias"), layer, strict=True)
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Floats32]) -> Network:
        """Build from :meth:`tensors`' form.

        Raises:
            ValueError: If a tensor is missing, is there without need, or has the wrong shape or type.
        """
        count = max(1, len(tensors) // 2)
        _expect(tensors, {f"layer{index}.{part}" for index in range(count) for part in ("weight", "bias")})
        return cls([(tensors[f"layer{index}.weight"], tensors[f"layer{index}.bias"]) for index in range(count)])


@dataclass(frozen=True, eq=False)
class RecurrentNetwork:
    """One LSTM layer (Hochreiter and Schmidhuber, 1997) and a perceptron on its output, evaluated in float32.

    The gates are stacked in torch's order: input, forget, cell, output.

    Attributes:
        weight_ih: Weights on the input, shape (4 x units, inputs).
        weight_hh: Weights on the hidden state, shape (4 x units, units).
        bias_ih: Biases, shape (4 x units,).
        bias_hh: Further biases, shape (4 x units,): torch keeps two.
        head: Hidden state, shape (units,), to output.

    Raises:
        ValueError: If the shapes do not fit each other.
    """

    weight_ih: Floats32
    weight_hh: Floats32
    bias_ih: Floats32
    bias_hh: Floats32
    head: Network

    def __post_init__(self) -> None:
        for name in _LSTM:
            object.__setattr__(self, name, _own(getattr(self, name)))
        gates = 4 * self.units
        shapes = {name: getattr(self, name).shape for name in _LSTM}
        fits = (
            self.weight_ih.ndim == 2
            and shapes == {
                "weight_ih": (gates, shapes["weight_ih"][-1]),
                "weight_hh": (gates, self.units),
                "bias_ih": (gates,),
                "bias_hh": (gates,),
            }
        )  # fmt: skip
        if not fits:
            raise ValueError(
                f"lstm: expected weights of shape (4 x units, inputs) and (4 x units, units) and two biases of shape "
                f"(4 x units,), got {', '.join(f'{name} {shape}' for name, shape in shapes.items())}"
            )
        if self.head.inputs != self.units:
            raise ValueError(f"layer0: expected {self.units} inputs, one for each unit of the LSTM, got {self.head.inputs}")
        # One product instead of two, and one sum; neither is stored.
        object.__setattr__(self, "_weight", _own(np.hstack([self.weight_ih, self.weight_hh])))
        object.__setattr__(self, "_bias", _own(self.bias_ih + self.bias_hh))

    @property
    def kind(self) -> Kind:
        """``recurrent``."""
        return "recurrent"

    @property
    def inputs(self) -> int:
        """Length of an input."""
        return int(self.weight_ih.shape[1])

    @property
    def units(self) -> int:
        """Length of the hidden and of the cell state."""
        return int(self.weight_hh.shape[-1]) if self.weight_hh.ndim else 0

    @property
    def outputs(self) -> int:
        """Length of an output."""
        return self.head.outputs

    def initial(self) -> State:
        """Return the state before the first decision: hidden and cell state, zeros."""
        return np.zeros(self.units, np.float32), np.zeros(self.units, np.float32)

    def step(self, vector: Floats32, state: State) -> tuple[Floats32, State]:
        """Take in one input.

        Args:
            vector: Shape (inputs,).
            state: What :meth:`initial` or the last step returned; it is not changed.

        Returns:
            The output, shape (outputs,), and the state after it.
        """
        hidden, cell = state
        weight: Floats32 = self._weight  # type: ignore[attr-defined]
        bias: Floats32 = self._bias  # type: ignore[attr-defined]
        enters, keeps, value, shows = (weight @ np.concatenate((vector, hidden)) + bias).reshape(4, -1)
        cell = _sigmoid(keeps) * cell + _sigmoid(enters) * np.tanh(value)
        hidden = _sigmoid(shows) * np.tanh(cell)
        return self.head(hidden), (hidden, cell)

    def tensors(self) -> dict[str, Floats32]:
        """Return the weights by name, as they are stored: ``lstm.weight_ih``, ..., then those of the head."""
        return {**{f"lstm.{name}": getattr(self, name) for name in _LSTM}, **self.head.tensors()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Floats32]) -> RecurrentNetwork:
        """Build from :meth:`tensors`' form.

        Raises:
            ValueError: If a tensor is missing, is there without need, or has the wrong shape or type.
        """
        lstm = {name: value for name, value in tensors.items() if name.startswith("lstm.")}
        _expect(lstm, {f"lstm.{name}" for name in _LSTM})
        head = Network.from_tensors({name: value for name, value in tensors.items() if name not in lstm})
        return cls(**{name: lstm[f"lstm.{name}"] for name in _LSTM}, head=head)


PolicyNetwork = Network | RecurrentNetwork
"""What a trained policy computes its action with."""


def from_tensors(kind: str, tensors: Mapping[str, Floats32]) -> PolicyNetwork:
    """Return the network of a kind from its weights by name.

    Raises:
        ValueError: If there is no such kind, or the weights are not a network of it.
    """
    if kind == "feedforward":
        return Network.from_tensors(tensors)
    if kind == "recurrent":
        return RecurrentNetwork.from_tensors(tensors)
    raise ValueError(f"network: kind: expected feedforward or recurrent, got {kind!r}")


_LSTM = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _own(values: npt.ArrayLike) -> Floats32:
    """Return a copy of our own: its memory layout, and with it the order of every sum, does not depend on where it came from."""
    copy = np.array(values, np.float32, order="C", copy=True)
    copy.flags.writeable = False
    return copy


def _expect(tensors: Mapping[str, Floats32], names: set[str]) -> None:
    if missing := sorted(names - set(tensors)):
        raise ValueError(f"expected tensors {', '.join(sorted(names))}; missing: {', '.join(missing)}")
    if extra := sorted(set(tensors) - names):
        raise ValueError(f"expected tensors {', '.join(sorted(names))}; not expected: {', '.join(extra)}")
    for name, value in tensors.items():
        if value.dtype != np.float32:
            raise ValueError(f"{name}: expected float32, got {value.dtype}")


def _sigmoid(values: Floats32) -> Floats32:
    """Return 1 / (1 + exp(-x)), written so that nothing overflows."""
    half = np.float32(0.5)
    result: Floats32 = half * np.tanh(half * values) + half
    return result
