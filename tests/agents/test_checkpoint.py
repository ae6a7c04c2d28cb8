"""A checkpoint comes back to the last bit, a damaged one is passed over, and another training's is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import checkpoint as checkpoints
from agents.checkpoint import Checkpoint, CheckpointError, identity_difference, load_checkpoint, save_checkpoint

WHO = {"seed": 3, "ppo": {"gamma": 0.97}}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def at(segments: int, value: float = 0.1) -> Checkpoint:
    return Checkpoint(segments, {"seconds": value}, {"w": np.full(3, value, np.float32), "step": np.array(segments, np.int64)})


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.lists(st.floats(width=32), max_size=5))
def test_it_comes_back_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object], row: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    tensor = np.array(row, np.float32)
    save_checkpoint(folder, Checkpoint(5, values, {"w": tensor, "wide": np.array(row, np.float64)}), WHO)
    found = load_checkpoint(folder, WHO)
    assert found is not None
    assert (found.segments, json.dumps(found.values)) == (5, json.dumps(values))
    assert found.tensors["w"].tobytes() == tensor.tobytes()
    assert found.tensors["wide"].dtype == np.float64


def test_the_last_two_are_kept_and_the_last_is_taken(tmp_path: Path) -> None:
    for segments in (8, 9, 10, 11):
        save_checkpoint(tmp_path, at(segments), WHO)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000010", "000011"]
    found = load_checkpoint(tmp_path, WHO)
    assert found is not None
    assert found.segments == 11


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "nowhere", WHO) is None
    (tmp_path / ".partial-x").mkdir()
    assert load_checkpoint(tmp_path, WHO) is None


def test_a_death_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, at(1), WHO)

    def die(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_write", die)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, at(2), WHO)
    found = load_checkpoint(tmp_path, WHO)
    assert found is not None
    assert found.segments == 1
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


@pytest.mark.parametrize("name", ["state.safetensors", "progress.json"])
def test_a_damaged_one_is_passed_over_and_can_be_written_again(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, at(1), WHO)
    path = save_checkpoint(tmp_path, at(2), WHO) / name
    path.write_bytes(path.read_bytes()[:-9])
    found = load_checkpoint(tmp_path, WHO)
    assert found is not None
    assert found.segments == 1
    save_checkpoint(tmp_path, at(2), WHO)
    again = load_checkpoint(tmp_path, WHO)
    assert again is not None
    assert again.segments == 2


def test_where_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    (save_checkpoint(tmp_path, at(1), WHO) / "progress.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read: 000001.*--fresh"):
        load_checkpoint(tmp_path, WHO)


def test_another_trainings_is_refused_with_the_difference(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, at(1), WHO)
    with pytest.raises(CheckpointError, match=r"seed was 3, is 4; ppo\.gamma was 0\.97, is absent; ppo\.lambda was absent, is 1"):
        load_checkpoint(tmp_path, {"seed": 4, "ppo": {"lambda": 1}})


def test_what_json_makes_of_an_identity_is_no_difference() -> None:
    assert identity_difference({"radius": [1, 2], "none": {}}, {"radius": (1, 2), "none": {}}) == []
