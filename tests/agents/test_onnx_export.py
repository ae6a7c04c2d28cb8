"""An exported policy computes the same actions in another runtime, and says what it is for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.artifact import Artifact, load
from agents.network import PolicyNetwork
from agents.onnx_export import TOLERANCE, ExportError, export, to_onnx
from envs.action import ActionMap
from envs.observation_vector import DIM, mask_of, schema_hash
from tests.agents.observations import network, perceptron, recurrent, store, vectors
from tests.requirements import module

onnx = module("onnx")
onnxruntime = module("onnxruntime")


def session(model: Path | bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"]
    )


def played(runtime: Any, trained: Artifact, sequence: Any) -> Any:
    """Actions of a sequence, one decision after the other, with the memory carried along."""
    memory = {}
    if trained.recurrent:
        units = runtime.get_inputs()[1].shape[1]
        memory = {name: np.zeros((1, units), np.float32) for name in ("hidden", "cell")}
    actions = []
    for row in sequence:
        found = dict(
            zip(
                [output.name for output in runtime.get_outputs()],
                runtime.run(None, {"observation": row[None], **memory}),
                strict=True,
            )
        )
        memory = {name: found[f"{name}_out"] for name in memory}
        actions.append(found["action"][0])
    return np.stack(actions)


@st.composite
def networks(draw: st.DrawFn) -> PolicyNetwork:
    seed, scale = draw(st.integers(0, 1 << 16)), draw(st.sampled_from([0.01, 0.1, 0.5]))
    if draw(st.booleans()):
        return recurrent(seed, draw(st.integers(1, 40)), scale)
    return perceptron(seed, [DIM, *draw(st.lists(st.integers(1, 40), max_size=3)), 3], scale)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(net=networks(), seed=st.integers(0, 1 << 16), hidden=st.sampled_from([(), ("curve",), ("qps", "p99")]))
def test_another_runtime_computes_the_same_actions(net: PolicyNetwork, seed: int, hidden: tuple[str, ...]) -> None:
    trained = Artifact("one", net, hidden=hidden)
    sequence = vectors(12, seed)
    theirs = played(session(to_onnx(trained).SerializeToString()), trained, sequence)
    assert theirs == pytest.approx(np.clip(trained.outputs(sequence), -1, 1), abs=TOLERANCE)
    assert np.abs(theirs).max() <= 1.0


def test_many_observations_are_taken_at_once(tmp_path: Path) -> None:
    trained = Artifact("one", network(1, 0.05))
    batch = vectors(9)
    [actions] = session(export(trained, tmp_path / "new" / "policy.onnx")).run(None, {"observation": batch})
    assert actions == pytest.approx(np.clip(trained.outputs(batch), -1, 1), abs=TOLERANCE)


def test_what_is_hidden_is_hidden_in_the_graph() -> None:
    trained = Artifact("blind", network(1, 0.05), hidden=("curve",))
    runtime = session(to_onnx(trained).SerializeToString())
    vector = vectors(1)
    other = np.where(mask_of(("curve",)) == 0, np.float32(1), vector)
    assert not np.array_equal(vector, other)
    assert np.array_equal(runtime.run(None, {"observation": vector})[0], runtime.run(None, {"observation": other})[0])


@pytest.mark.parametrize("net", [network(1, 0.1), recurrent(1)], ids=["feedforward", "recurrent"])
def test_the_file_says_what_it_is_for_and_onnx_finds_nothing_wrong(net: PolicyNetwork, tmp_path: Path) -> None:
    trained = load(store(tmp_path / "policy", network=net, actions=ActionMap("residual", (3.0, 2.0, 0.0)), hidden=("curve",)))
    path = export(trained, tmp_path / "policy.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    said = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert (said["name"], said["kind"], said["schema_hash"]) == ("one", net.kind, schema_hash())
    assert json.loads(said["radius_steps"]) == [3.0, 2.0, 0.0]
    assert json.loads(said["hidden"]) == ["curve"]
    assert json.loads(said["action"]) == trained.card["action"]
    assert said["action_hash"] == trained.card["action_hash"]
    assert said["card_digest"] == trained.card["digest"]
    first = path.read_bytes()
    assert export(trained, path).read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []


def test_without_onnx_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ExportError, match=r"pip install 'cachepilot\[onnx\]'"):
        export(Artifact("one", network(1)), tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []
