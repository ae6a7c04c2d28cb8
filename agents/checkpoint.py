"""Checkpoints of a training: tensors as safetensors, everything else as JSON; nothing is ever unpickled.

A folder holds the last two checkpoints, each a directory ``<segments done>`` that appears in one step: a process that is killed
while it writes leaves the ones before as they were. A checkpoint belongs to an identity (settings, seed, versions, ...), and is
not resumed under another.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from agents.output_file import failed

FORMAT = 1
TENSORS = "state.safetensors"
PROGRESS = "progress.json"
KEPT = 2
"""Checkpoints that are kept: should the last be damaged, the one before leads to the same result."""

_PARTIAL = ".partial-"


class CheckpointError(ValueError):
    """A training that cannot be resumed; the text says why, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a training stands after a whole number of segments.

    Attributes:
        segments: Segments done.
        values: What fits into JSON: counters, learning curve; floats come back to the last bit.
        tensors: Weights, the optimiser's state and whatever else is made of numbers, by name.
    """

    segments: int
    values: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, identity: Mapping[str, Any]) -> Path:
    """Write a checkpoint, in one step, and remove all but the last :data:`KEPT`.

    Args:
        folder: Where all checkpoints of one training are; made if need be.
        checkpoint: Where the training stands.
        identity: What the training depends on; fits into JSON.

    Returns:
        The checkpoint's directory.

    Raises:
        agents.output_file.OutputError: If it cannot be written; those before it are left as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = save_tensors({name: np.ascontiguousarray(value) for name, value in checkpoint.tensors.items()})
    progress = {
        "format": FORMAT,
        "segments": checkpoint.segments,
        "identity": dict(identity),
        "values": dict(checkpoint.values),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    target = folder / f"{checkpoint.segments:06d}"
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
    try:
        _write(partial / TENSORS, data)
        _write(partial / PROGRESS, json.dumps(progress, indent=1, allow_nan=False).encode())
        if target.is_dir():
            # A damaged one of an earlier attempt, or the whole one of a twin that was thought dead: the content is the same.
            shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    except OSError as error:
        raise failed(target, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for path in _directories(folder)[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def load_checkpoint(folder: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """Return the last whole checkpoint of a folder, or None where there is none.

    Args:
        folder: Where all checkpoints of one training are.
        identity: What the training that wants to go on depends on.

    Raises:
        CheckpointError: If the checkpoint is another training's (the text shows the difference), or all are damaged.
    """
    faults = []
    for path in _directories(folder):
        try:
            progress, data = json.loads((path / PROGRESS).read_bytes()), (path / TENSORS).read_bytes()
            if progress["format"] != FORMAT or progress["sha256"] != hashlib.sha256(data).hexdigest():
                raise ValueError(f"expected format {FORMAT} and tensors with the recorded sha256")
            found = Checkpoint(int(progress["segments"]), dict(progress["values"]), load_tensors(data))
            stored = dict(progress["identity"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            faults.append(f"{path.name}: {error!r}")
            continue
        if difference := identity_difference(stored, identity):
            raise CheckpointError(
                f"{path}: begun by another training: {'; '.join(difference)}. Give it back what it was begun with, "
                "train under another name, or begin anew (--fresh)."
            )
        return found
    if faults:
        raise CheckpointError(f"{folder}: no checkpoint can be read: {'; '.join(faults)}. Begin anew (--fresh).")
    return None


def discard_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a training."""
    shutil.rmtree(folder, ignore_errors=True)


def identity_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return in words how two identities differ, one entry per value; empty if they do not."""
    then, now = _flat(stored), _flat(json.loads(json.dumps(current)))
    absent = "absent"
    return [
        f"{name} was {then.get(name, absent)}, is {now.get(name, absent)}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name, absent) != now.get(name, absent)
    ]


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {key: text for part, item in value.items() for key, text in _flat(item, f"{name}.{part}".lstrip(".")).items()}
    return {name: json.dumps(value)}


def _directories(folder: Path) -> list[Path]:
    """The checkpoints, last first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name), reverse=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
