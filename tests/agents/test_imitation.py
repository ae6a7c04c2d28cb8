"""Demonstrations are checked, and come back from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents.imitation import Demonstrations


def some(count: int = 5) -> Demonstrations:
    rng = np.random.default_rng(0)
    return Demonstrations(
        rng.normal(size=(count, 4)).astype(np.float32),
        rng.uniform(-1, 1, (count, 3)).astype(np.float32),
        np.ones(count, np.float32),
    )


def test_they_come_back_from_a_file(tmp_path: Path) -> None:
    some().save(tmp_path / "shown.safetensors")
    assert Demonstrations.load(tmp_path / "shown.safetensors").digest == some().digest != some(6).digest


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    for name in ("x", "absent"):
        with pytest.raises(ValueError, match=rf"{name}\.safetensors: expected a safetensors file of observations"):
            Demonstrations.load(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("observations", "actions", "weights", "words"),
    [
        (np.zeros((2, 4)), np.zeros((3, 3)), np.ones(2), "as many observations and actions as weights"),
        (np.zeros(4), np.zeros((1, 3)), np.ones(1), "expected observations"),
        (np.zeros((0, 4)), np.zeros((0, 3)), np.ones(0), "N >= 1"),
        (np.full((1, 4), np.nan), np.zeros((1, 3)), np.ones(1), "observations: expected finite"),
        (np.zeros((1, 4)), np.full((1, 3), 1.5), np.ones(1), r"within \[-1, 1\]"),
        (np.zeros((1, 4)), np.zeros((1, 3)), np.zeros(1), "not all of them 0"),
    ],
)
def test_what_does_not_fit_is_refused(observations: object, actions: object, weights: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Demonstrations(observations, actions, weights)  # type: ignore[arg-type]
