"""A trained policy comes back as it was saved, and anything that would make it act differently is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.artifact import ArtifactError, load, save
from envs.observation import DIM, schema_hash
from tests.agents.observations import network


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    probe = np.random.default_rng(0).uniform(-1, 1, DIM).astype(np.float32)
    return save(
        tmp_path / "policy", name="one", network=network(1, 0.1), radius=(3.0, 2.0, 1.0), probe=probe,
        training={"seed": 1}, evaluation={"cost": 0.5},
    )  # fmt: skip


def edit(directory: Path, change: Any) -> None:
    path = directory / "card.json"
    card = json.loads(path.read_text())
    change(card)
    path.write_text(json.dumps(card))


def test_it_comes_back_as_it_was_saved(directory: Path) -> None:
    artifact = load(directory)
    vector = np.random.default_rng(3).uniform(-1, 1, DIM).astype(np.float32)
    assert np.array_equal(artifact.network(vector), network(1, 0.1)(vector))
    assert (artifact.name, artifact.radius) == ("one", (3.0, 2.0, 1.0))
    assert artifact.card["training"] == {"seed": 1}
    assert artifact.card["evaluation"] == {"cost": 0.5}
    assert artifact.card["schema_hash"] == schema_hash()


def test_there_is_no_pickle_in_it(directory: Path) -> None:
    assert sorted(path.name for path in directory.iterdir()) == ["card.json", "policy.safetensors"]
    raw = (directory / "policy.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert (header["layer0.weight"]["dtype"], header["layer0.weight"]["shape"]) == ("F32", [64, DIM])


def test_another_schema_is_refused_with_the_difference(directory: Path) -> None:
    def change(card: dict[str, Any]) -> None:
        components = card["schema"]["components"]
        components[0]["name"] = "requests_per_minute"
        components[3]["normalisation"] = "clip(x, 0, 1)"
        card["schema_hash"] = schema_hash(card["schema"])

    edit(directory, change)
    with pytest.raises(ArtifactError) as caught:
        load(directory)
    text = str(caught.value)
    assert "no longer there: requests_per_minute" in text
    assert "new: qps" in text
    assert "hit_gap: normalisation was 'clip(x, 0, 1)', is 'clip(x / 0.5, -1, 1)'" in text
    assert "cachepilot train" in text


def test_components_in_another_order_are_another_schema(directory: Path) -> None:
    def change(card: dict[str, Any]) -> None:
        card["schema"]["components"].reverse()
        card["schema_hash"] = schema_hash(card["schema"])

    edit(directory, change)
    with pytest.raises(ArtifactError, match="order"):
        load(directory)


def test_weights_of_another_policy_are_refused_by_the_probe(directory: Path, tmp_path: Path) -> None:
    other = save(
        tmp_path / "other", name="two", network=network(2, 0.1), radius=(3.0, 2.0, 2.0), probe=np.zeros(DIM, np.float32),
        training={}, evaluation={},
    )  # fmt: skip
    (directory / "policy.safetensors").write_bytes((other / "policy.safetensors").read_bytes())
    with pytest.raises(ArtifactError, match="do not belong together"):
        load(directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda card: card.update(format=99), "expected format 1, got 99"),
        (lambda card: card.update(schema_hash="0" * 64), "was edited"),
        (lambda card: card.pop("probe"), "probe"),
        (lambda card: card["action"].update(radius_steps=[1, 2]), "radius_steps"),
        (lambda card: card["action"].update(radius_steps=[1, 2, -1]), "radius_steps"),
        (lambda card: card["probe"].update(observation=[0.0]), "probe"),
        (lambda card: card.pop("schema"), "schema"),
    ],
)
def test_a_damaged_card_is_refused_and_the_file_named(directory: Path, change: Any, words: str) -> None:
    edit(directory, change)
    with pytest.raises(ArtifactError, match=words) as caught:
        load(directory)
    assert str(directory) in str(caught.value)


def test_missing_or_unreadable_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"card\.json: not found"):
        load(tmp_path / "nowhere")
    (directory / "policy.safetensors").write_bytes(b"\x80\x04 not tensors")
    with pytest.raises(ArtifactError, match="expected a safetensors file"):
        load(directory)
    (directory / "policy.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"policy\.safetensors: not found"):
        load(directory)
    (directory / "card.json").write_text("{")
    with pytest.raises(ArtifactError, match="expected a JSON card"):
        load(directory)


def test_weights_that_are_not_finite_are_refused(directory: Path) -> None:
    broken = network(1, 0.1)
    broken.layers[1][0][0, 0] = np.nan
    from safetensors.numpy import save_file

    save_file(broken.tensors(), directory / "policy.safetensors")
    with pytest.raises(ArtifactError, match="layer1: weights are not finite"):
        load(directory)
