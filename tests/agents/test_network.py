"""The numpy networks compute what torch computes, keep their weights to themselves, and refuse what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.network import Floats32, Network, PolicyNetwork, RecurrentNetwork, from_tensors
from envs.observation_vector import DIM
from tests.agents.observations import network, perceptron, recurrent, vectors


def test_a_perceptron_is_tanh_layers() -> None:
    net = network(5, 0.1)
    vector = np.linspace(-1, 1, DIM).astype(np.float32)
    value = vector.astype(np.float64)
    for weight, bias in net.layers[:-1]:
        value = np.tanh(weight.astype(np.float64) @ value + bias)
    expected = net.layers[-1][0] @ value + net.layers[-1][1]
    assert net(vector) == pytest.approx(expected, abs=1e-4)
    assert (net.kind, net.inputs, net.outputs) == ("feedforward", DIM, 3)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 16), units=st.integers(1, 48), scale=st.sampled_from([0.01, 0.1, 1.0]))
def test_a_memory_is_torchs_lstm(seed: int, units: int, scale: float) -> None:
    import torch

    torch.set_num_threads(1)
    net = recurrent(seed, units, scale)
    lstm = torch.nn.LSTM(DIM, units)
    linears = [torch.nn.Linear(units, 16), torch.nn.Linear(16, 3)]
    head = torch.nn.Sequential(linears[0], torch.nn.Tanh(), linears[1])
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(lstm, f"{name}_l0").copy_(torch.tensor(getattr(net, name)))
        for linear, (weight, bias) in zip(linears, net.head.layers, strict=True):
            linear.weight.copy_(torch.tensor(weight))
            assert linear.bias is not None
            linear.bias.copy_(torch.tensor(bias))
        sequence = vectors(20, seed)
        theirs = head(lstm(torch.tensor(sequence)[:, None])[0]).numpy()[:, 0]
    state, ours = net.initial(), []
    for row in sequence:
        output, state = net.step(row, state)
        ours.append(output)
    assert np.stack(ours) == pytest.approx(theirs, abs=1e-4, rel=1e-4)
    assert (net.kind, net.inputs, net.outputs, net.units) == ("recurrent", DIM, 3, units)


def test_a_step_leaves_the_state_it_was_given_as_it_was() -> None:
    net = recurrent(1)
    state = net.initial()
    first, after = net.step(vectors(1)[0], state)
    assert all(not part.any() for part in state)
    assert all(part.any() for part in after)
    again, _ = net.step(vectors(1)[0], net.initial())
    assert np.array_equal(first, again)
    assert not np.array_equal(net.step(vectors(1)[0], after)[0], first)


def test_a_perceptron_has_nothing_to_remember() -> None:
    net = network(1)
    output, state = net.step(vectors(1)[0], net.initial())
    assert state == ()
    assert np.array_equal(output, net(vectors(1)[0]))


def test_gates_far_out_do_not_overflow() -> None:
    net = recurrent(1, scale=1e4)
    with np.errstate(over="raise", invalid="raise"):
        output, state = net.step(vectors(1)[0], net.initial())
    assert np.all(np.isfinite(output))
    assert all(np.abs(part).max() <= 1 for part in state)


@pytest.mark.parametrize("net", [network(2), recurrent(2)], ids=["feedforward", "recurrent"])
def test_a_network_is_its_tensors(net: PolicyNetwork) -> None:
    again = from_tensors(net.kind, net.tensors())
    assert list(again.tensors()) == list(net.tensors())
    for name, value in net.tensors().items():
        assert value.tobytes() == again.tensors()[name].tobytes()
        assert not value.flags.writeable
    vector = vectors(1)[0]
    assert np.array_equal(net.step(vector, net.initial())[0], again.step(vector, again.initial())[0])


def test_weights_that_are_changed_afterwards_do_not_change_the_network() -> None:
    weight, bias = np.ones((3, 4), np.float32), np.zeros(3, np.float32)
    net = Network([(weight, bias)])
    weight[:] = 9
    assert net(np.ones(4, np.float32)).tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([], "at least one layer"),
        ([((3, 4), (2,))], "layer0: expected"),
        ([((3,), (3,))], "layer0: expected"),
        ([((5, 4), (5,)), ((3, 4), (3,))], r"layer1: expected a weight of shape \(outputs, 5\)"),
        ([((5, 4, 1), (5,))], "layer0: expected"),
        ([((), ())], "layer0: expected"),
    ],
)
def test_layers_that_do_not_fit_are_refused(shapes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Network([(np.zeros(weight, np.float32), np.zeros(bias, np.float32)) for weight, bias in shapes])


@pytest.mark.parametrize("name", ["weight_ih", "weight_hh", "bias_ih", "bias_hh"])
def test_an_lstm_that_does_not_fit_is_refused(name: str) -> None:
    whole = recurrent(1)
    parts = {part: getattr(whole, part) for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "head")}
    for wrong in (parts[name][:-1], parts[name][None], np.float32(1)):
        with pytest.raises(ValueError, match="lstm: expected weights"):
            RecurrentNetwork(**{**parts, name: wrong})
    with pytest.raises(ValueError, match="layer0: expected 32 inputs"):
        RecurrentNetwork(**{**parts, "head": perceptron(1, (31, 3))})


def _without(tensors: dict[str, Floats32], name: str) -> dict[str, Floats32]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("kind", "tensors", "words"),
    [
        ("attention", network(1).tensors(), "expected feedforward or recurrent"),
        ("feedforward", {}, "missing: layer0.bias, layer0.weight"),
        ("feedforward", recurrent(1).tensors(), "missing: "),
        ("feedforward", _without(network(1).tensors(), "layer1.bias"), "not expected|missing"),
        ("feedforward", {**network(1).tensors(), "layer0.gain": np.zeros(3, np.float32)}, "not expected: layer0.gain"),
        ("feedforward", {"layer0.weight": np.zeros((3, 4)), "layer0.bias": np.zeros(3)}, "expected float32, got float64"),
        ("recurrent", network(1).tensors(), "missing: lstm.bias_hh"),
        ("recurrent", {**recurrent(1).tensors(), "lstm.peephole": np.zeros(3, np.float32)}, "not expected: lstm.peephole"),
    ],
)
def test_tensors_that_are_no_network_are_refused(kind: str, tensors: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_tensors(kind, tensors)
