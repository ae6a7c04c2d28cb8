"""What a task on a Ray cluster could not do is told as it is told without Ray."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import RayTaskError

from agents.training import TrainingDiverged
from experiments.training_job import _results


def test_a_training_that_diverged_in_a_task_says_so_without_the_tasks_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = TrainingDiverged("training diverged in update 1 of 2")

    def get(task: object) -> object:
        raise RayTaskError("_train", "Traceback\n" * 100, cause).as_instanceof_cause()

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(TrainingDiverged) as caught:
        _results(["a task"])
    assert str(caught.value) == "training diverged in update 1 of 2"
