"""A trained policy comes back as it was saved, to the last bit, and anything that would make it act differently is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from safetensors.numpy import save as save_tensors

from agents.artifact import Artifact, ArtifactError, load, save, with_evaluation
from agents.familiarity import ObservationStatistics
from agents.network import PolicyNetwork, RecurrentNetwork
from envs.action import ActionMap
from envs.observation_vector import COMPONENTS, DIM, schema_hash
from tests.agents.observations import network, perceptron, recurrent, store, vectors
from tests.requirements import ROOT

NESTED = '{"format": 2, "name": ' + "[" * 990 + "]" * 990 + "}"
FILES = ("README.md", "card.json", "policy.safetensors")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return store(tmp_path / "policy")


@pytest.fixture(params=["feedforward", "recurrent"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return store(tmp_path / "policy", network=network(1, 0.1) if request.param == "feedforward" else recurrent(1))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def edit(directory: Path, change: Callable[[dict[str, Any]], Any], *, sign: bool = True) -> None:
    """Change a card; signed, as a program would, or unsigned, as somebody with an editor would."""
    path = directory / "card.json"
    card = json.loads(path.read_text())
    change(card)
    if sign:
        rest = {key: value for key, value in card.items() if key != "digest"}
        card["digest"] = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(card))


def put_weights(directory: Path, data: bytes) -> None:
    """Replace the weights' file and let the card vouch for it, so that only what is in it can give it away."""
    (directory / "policy.safetensors").write_bytes(data)
    edit(directory, lambda card: card["weights"].update(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data)))


def put_tensors(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = dict(load_file(directory / "policy.safetensors"))
    change(tensors)
    put_weights(directory, save_tensors(tensors))


def refused(directory: Path, words: str) -> None:
    with pytest.raises(ArtifactError, match=words) as caught:
        load(directory)
    assert str(directory) in str(caught.value)


def same_bits(one: Any, two: Any) -> bool:
    return bool(one.dtype == two.dtype and one.tobytes() == two.tobytes())


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    statistics = ObservationStatistics.of(vectors(50, seed=3))
    directory = store(
        tmp_path / "policy",
        actions=ActionMap("residual", (3.0, 2.0, 0.0)),
        hidden=("curve", "qps"),
        statistics=statistics,
        training={"seed": 7, "settings": {"radius": (1, 2)}},
        evaluation={"verdict": "ties"},
    )
    found = load(directory)
    assert (found.name, found.actions, found.hidden) == ("one", ActionMap("residual", (3.0, 2.0, 0.0)), ("curve", "qps"))
    assert not found.recurrent
    assert all(same_bits(getattr(found.statistics, name), getattr(statistics, name)) for name in ("mean", "std", "min", "max"))
    assert same_bits(found.probes, vectors(5))
    assert found.card["training"] == {"seed": 7, "settings": {"radius": [1, 2]}}
    assert found.card["evaluation"] == {"verdict": "ties"}
    assert found.card["schema_hash"] == schema_hash()


def test_it_is_three_files_none_of_them_a_pickle(either: Path) -> None:
    assert sorted(contents(either)) == sorted(FILES)
    raw = (either / "policy.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    assert header["observation.mean"]["shape"] == [DIM]


@st.composite
def networks(draw: st.DrawFn) -> PolicyNetwork:
    seed, scale = draw(st.integers(0, 1 << 16)), draw(st.sampled_from([1e-30, 1e-3, 0.1, 1.0, 30.0]))
    if draw(st.booleans()):
        return recurrent(seed, draw(st.integers(1, 40)), scale)
    return perceptron(seed, [DIM, *draw(st.lists(st.integers(1, 40), max_size=3)), 3], scale)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(net=networks(), seed=st.integers(0, 1 << 16), hidden=st.sets(st.sampled_from([c.name for c in COMPONENTS]), max_size=5))
def test_actions_are_the_same_to_the_last_bit_and_saving_again_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, net: PolicyNetwork, seed: int, hidden: set[str]
) -> None:
    place = tmp_path_factory.mktemp("policies")
    given_up = Artifact("one", net, ActionMap(), sorted(hidden))
    first = store(place / "first", network=net, hidden=sorted(hidden), probes=vectors(4, seed + 1))
    found = load(first)
    sequence = vectors(12, seed)
    assert same_bits(given_up.outputs(sequence), found.outputs(sequence))
    second = save(
        place / "second",
        name=found.name,
        network=found.network,
        actions=found.actions,
        hidden=found.hidden,
        statistics=found.statistics,
        probes=found.probes,
        training=found.card["training"],
        evaluation=found.card["evaluation"],
    )
    assert contents(first) == contents(second)


def test_another_process_computes_the_same_bits(either: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agents.artifact import load; from tests.agents.observations import vectors; "
        "sys.stdout.write(load(Path(sys.argv[1])).outputs(vectors(20)).tobytes().hex())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(either)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == load(either).outputs(vectors(20)).tobytes().hex()


def test_weights_in_another_memory_layout_give_the_same_bits() -> None:
    net = network(4, 0.1)
    layers = [(np.asfortranarray(weight), bias.astype(np.float64)) for weight, bias in net.layers]
    other = type(net)(layers)  # type: ignore[arg-type]
    assert all(same_bits(net(vector), other(vector)) for vector in vectors(8))


def test_a_memory_is_probed_as_a_sequence(tmp_path: Path) -> None:
    directory = store(tmp_path / "policy", network=recurrent(2), probes=np.repeat(vectors(1), 4, axis=0))
    found = load(directory)
    assert found.recurrent
    outputs = np.asarray(found.card["probes"]["outputs"], np.float32)
    assert outputs.shape == (4, 3)
    assert len(np.unique(outputs, axis=0)) == 4
    edit(directory, lambda card: card["probes"]["outputs"].reverse())
    refused(directory, "probe 0 gives the output")


def test_an_evaluation_is_replaced_and_nothing_else(either: Path) -> None:
    before = contents(either)
    with_evaluation(either, {"verdict": "ties with the curve"})
    after = contents(either)
    assert after["policy.safetensors"] == before["policy.safetensors"]
    changed = {"evaluation", "digest"}
    old, new = (json.loads(files["card.json"]) for files in (before, after))
    assert {key for key in new if new[key] != old[key]} == changed
    assert list(new) == list(old)
    assert b"ties with the curve" in after["README.md"]
    with_evaluation(either, old["evaluation"])
    assert contents(either) == before


def test_an_evaluation_is_not_added_to_a_policy_that_cannot_be_used(directory: Path) -> None:
    edit(directory, lambda card: card.update(name="other"), sign=False)
    before = contents(directory)
    with pytest.raises(ArtifactError, match="was edited"):
        with_evaluation(directory, {})
    assert contents(directory) == before


def test_another_observation_is_refused_with_the_difference(directory: Path) -> None:
    first, fourth = COMPONENTS[0].name, COMPONENTS[3]

    def change(card: dict[str, Any]) -> None:
        components = card["schema"]["components"]
        components[0]["name"] = "requests_per_minute"
        components[3]["normalisation"] = "clip(x, 0, 7)"
        card["schema_hash"] = schema_hash(card["schema"])

    edit(directory, change)
    refused(directory, "no longer there: requests_per_minute; ")
    refused(directory, f"new: {first}")
    with pytest.raises(ArtifactError) as caught:
        load(directory)
    assert f"{fourth.name}: normalisation was 'clip(x, 0, 7)', is {fourth.normalisation!r}" in str(caught.value)
    assert "cachepilot train" in str(caught.value)


def test_components_in_another_order_are_another_observation(directory: Path) -> None:
    def change(card: dict[str, Any]) -> None:
        card["schema"]["components"].reverse()
        card["schema_hash"] = schema_hash(card["schema"])

    edit(directory, change)
    refused(directory, "order")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 0}, "version was 0, is 1"),
        ({"knobs": ["ttl", "cache_size", "warmup_ratio"]}, "knobs was "),
        ({"resolution_steps": 0.5}, "resolution_steps: expected 0.25, got 0.5"),
        ({"kind": "relative"}, "expected residual or absolute, got 'relative'"),
        ({"radius_steps": [1, 2]}, "radius: expected three"),
        ({"radius_steps": [1, 2, -1]}, "radius: expected three"),
        ({"radius_steps": None}, "trained for other actions"),
        ({"temperature": 1}, "temperature was 1, is None"),
    ],
)
def test_another_meaning_of_the_action_is_refused_with_the_difference(
    directory: Path, change: Mapping[str, Any], words: str
) -> None:
    def apply(card: dict[str, Any]) -> None:
        card["action"].update(change)
        card["action_hash"] = schema_hash(card["action"])

    edit(directory, apply)
    refused(directory, words)


def test_an_earlier_format_is_refused_with_what_to_do(directory: Path) -> None:
    edit(directory, lambda card: card.update(format=1))
    refused(directory, r"format 1 is an earlier version's.*Train it anew \(cachepilot train\)")


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card.update(name="better"),
        lambda card: card["evaluation"].update(verdict="beats everything"),
        lambda card: card["probes"]["outputs"][0].__setitem__(0, 0.5),
        lambda card: card["action"].update(radius_steps=[9.0, 9.0, 9.0]),
        lambda card: card.pop("digest"),
    ],
)
def test_a_card_edited_by_hand_is_refused(directory: Path, change: Any) -> None:
    edit(directory, change, sign=False)
    refused(directory, "the card was edited or damaged")


def test_a_card_laid_out_in_another_way_is_the_same_card(directory: Path) -> None:
    edit(directory, lambda card: card.update(sorted(card.items())), sign=False)
    assert load(directory).name == "one"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda card: card.update(format=99), "expected format 2, got 99"),
        (lambda card: card.update(schema_hash="0" * 64), "was edited"),
        (lambda card: card.update(action_hash="0" * 64), "was edited"),
        (lambda card: card.pop("action"), "expected the action's schema"),
        (lambda card: card.pop("schema"), "expected the observation's schema"),
        (lambda card: card["schema"].update(components=[1, 2]), "expected the observation's schema"),
        (lambda card: card.pop("weights"), "do not belong together"),
        (lambda card: card.pop("network"), "network: expected its kind"),
        (lambda card: card["network"].update(activation="relu"), "the activation tanh"),
        (lambda card: card["network"].update(kind="transformer"), "expected feedforward or recurrent"),
        (lambda card: card["network"].update(kind="recurrent"), "missing: lstm.bias_hh"),
        (lambda card: card["network"]["shapes"].update({"layer0.weight": [1, 1]}), "expected tensors of the shapes"),
        (lambda card: card.update(hidden=["qps", 3]), "the names of hidden components"),
        (lambda card: card.update(hidden=["weather"]), "weather"),
        (lambda card: card.pop("name"), "expected a name"),
        (lambda card: card.pop("probes"), "probes: expected observations and outputs"),
        (lambda card: card["probes"].update(observations=[[0.0]]), "probes.observations: expected at least one row"),
        (lambda card: card["probes"].update(observations=[], outputs=[]), "expected at least one row"),
        (lambda card: card["probes"].update(observations=[["a"] * DIM]), f"expected rows of {DIM} numbers"),
        (lambda card: card["probes"]["outputs"].pop(), "expected an output for each"),
    ],
)
def test_a_malformed_card_is_refused_and_the_file_named(directory: Path, change: Any, words: str) -> None:
    edit(directory, change)
    refused(directory, words)


@pytest.mark.parametrize("text", ["{", "[]", "3", '"card"', '{"format": NaN}', "[" * 100_000, NESTED, "\ufffe"])
def test_a_card_that_is_no_card_is_refused(directory: Path, text: str) -> None:
    (directory / "card.json").write_text(text, encoding="utf-16" if text == "\ufffe" else "utf-8")
    refused(directory, "expected a JSON card|expected format 2|was edited")


def test_missing_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"card\.json: not found"):
        load(tmp_path / "nowhere")
    (directory / "policy.safetensors").unlink()
    refused(directory, r"policy\.safetensors: not found")
    (directory / "policy.safetensors").mkdir()
    refused(directory, "expected a safetensors file")


def test_swapped_files_are_refused(directory: Path, tmp_path: Path) -> None:
    other = store(tmp_path / "other", network=network(2, 0.1))
    (directory / "policy.safetensors").write_bytes((other / "policy.safetensors").read_bytes())
    refused(directory, "do not belong together")


def test_weights_that_the_card_vouches_for_but_act_otherwise_are_refused(directory: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["layer2.bias"] = tensors["layer2.bias"] + np.float32(0.01)

    put_tensors(directory, change)
    refused(directory, "probe 0 gives the output")


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(directory: Path, kept: int) -> None:
    whole = (directory / "policy.safetensors").read_bytes()
    (directory / "policy.safetensors").write_bytes(whole[:kept])
    refused(directory, "do not belong together")
    put_weights(directory, whole[:kept])
    refused(directory, "expected a safetensors file")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_any_byte_changed_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = store(tmp_path_factory.mktemp("policy"))
    name = data.draw(st.sampled_from(["card.json", "policy.safetensors"]))
    raw = bytearray((directory / name).read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    (directory / name).write_bytes(raw)
    before = json.loads((store(tmp_path_factory.mktemp("whole")) / "card.json").read_text())
    try:
        found = load(directory)
    except ArtifactError:
        return
    # Only what does not count: the layout of the card, between its values.
    assert name == "card.json"
    assert found.card == before


def test_numbers_of_another_type_are_refused(directory: Path) -> None:
    put_tensors(directory, lambda tensors: tensors.update({"layer1.bias": tensors["layer1.bias"].astype(np.float64)}))
    refused(directory, "layer1.bias: expected float32, got float64")


def test_a_type_that_numpy_does_not_know_is_refused(directory: Path) -> None:
    raw = (directory / "policy.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b'"F32"', b'"I32"', 1)
    put_weights(directory, raw[:8] + header + raw[8 + length :])
    refused(directory, "expected float32, got int32")
    half = raw[8 : 8 + length].replace(b'"F32"', b'"F6X"', 1)
    put_weights(directory, raw[:8] + half + raw[8 + length :])
    refused(directory, "expected a safetensors file")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["layer1.weight", "observation.mean"])
def test_weights_that_are_not_finite_are_refused(directory: Path, name: str, value: float) -> None:
    put_tensors(directory, lambda tensors: tensors[name].__setitem__(Ellipsis, np.float32(value)))
    refused(directory, f"{name} is not finite")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update({"layer9.weight": np.zeros((1, 1), np.float32)}), "expected tensors of the shapes"),
        (lambda tensors: tensors.update({"observation.median": np.zeros(DIM, np.float32)}), "observation.median"),
        (lambda tensors: tensors.pop("observation.std"), "expected observation.mean"),
        (lambda tensors: tensors.update({"observation.std": np.zeros(2, np.float32)}), f"std: expected {DIM}"),
        (lambda tensors: tensors.update({"observation.std": -tensors["observation.std"]}), "std >= 0"),
        (lambda tensors: tensors.update({"observation.min": tensors["observation.max"] + 1}), "min <= mean <= max"),
        (lambda tensors: tensors.update({"layer0.bias": np.zeros(3, np.float32)}), "expected tensors of the shapes"),
    ],
)
def test_tensors_that_do_not_belong_there_are_refused(directory: Path, change: Any, words: str) -> None:
    put_tensors(directory, change)
    refused(directory, words)


@pytest.mark.parametrize("change", [{"extra.weight": [1]}, {"layer0.weight": [64, 64]}])
def test_shapes_that_are_no_network_are_refused_even_if_the_card_says_so(directory: Path, change: dict[str, list[int]]) -> None:
    def shapes(card: dict[str, Any]) -> None:
        card["network"]["shapes"].update(change)

    put_tensors(directory, lambda tensors: tensors.update({name: np.zeros(shape, np.float32) for name, shape in change.items()}))
    edit(directory, shapes)
    refused(directory, "not expected: extra.weight|expected a network of")


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_is_refused_and_not_run(directory: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    data = pickle.dumps(_Trap(trap))
    (directory / "policy.safetensors").write_bytes(data)
    refused(directory, "do not belong together")
    put_weights(directory, data)
    refused(directory, "expected a safetensors file")
    (directory / "card.json").write_bytes(data)
    refused(directory, "expected a JSON card")
    assert not trap.exists()
    pickle.loads(data)
    assert trap.exists()  # it would have


def test_a_crash_between_the_files_is_noticed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def crash(source: Path, target: Path) -> None:
        if target.name == "card.json":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        store(directory, network=network(9, 0.1))
    assert sorted(contents(directory)) == sorted(FILES)
    refused(directory, "do not belong together.*interrupted")
    monkeypatch.undo()
    store(directory, network=network(9, 0.1))
    assert load(directory).name == "one"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": perceptron(1, [DIM, 4])}, f"expected a network of {DIM} inputs and 3 outputs, got {DIM} and 4"),
        ({"network": perceptron(1, [7, 3])}, "got 7 and 3"),
        ({"hidden": ["weather"]}, "weather"),
        ({"probes": vectors(0)}, "probes: expected at least one row"),
        ({"probes": np.full((1, DIM), np.nan)}, "probes: expected at least one row"),
        ({"probes": vectors(1)[0]}, "probes: expected at least one row"),
        ({"training": {"reward": float("nan")}}, "expected text, finite numbers"),
        ({"evaluation": {"cost": np.float32(1)}}, "expected text, finite numbers"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(directory: Path, changes: dict[str, Any], words: str) -> None:
    before = contents(directory)
    with pytest.raises(ArtifactError, match=words):
        store(directory, **changes)
    assert contents(directory) == before


def test_weights_that_diverged_are_not_saved(tmp_path: Path) -> None:
    broken = network(1, 0.1).tensors()
    broken["layer1.weight"] = np.full((64, 64), np.nan, np.float32)
    with pytest.raises(ArtifactError, match=r"layer1\.weight is not finite"):
        store(tmp_path / "policy", network=type(network(1)).from_tensors(broken))
    assert not (tmp_path / "policy").exists()


def test_a_memory_of_the_wrong_shape_is_no_network() -> None:
    whole = recurrent(1)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        parts = {key: getattr(whole, key) for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "head")}
        parts[name] = parts[name][:-1]
        with pytest.raises(ValueError, match="lstm: expected weights"):
            RecurrentNetwork(**parts)
