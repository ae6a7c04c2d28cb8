"""A training as a Ray job: what is killed on the way leaves no trace in the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.registry import load_policy
from experiments.kill_and_resume import kill_and_resume

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = """
name: small
seeds: [1]
intervals: [6, 8]
held_out: 1
ppo: {total_steps: 4096, n_envs: 4, n_steps: 32, segment: 2, batch_size: 128, n_epochs: 2, hidden: [8]}
"""


def test_a_job_whose_actor_learner_and_driver_are_killed_gives_the_weights_of_an_undisturbed_training(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    sent.mkdir()
    config = sent / "small.yaml"
    config.write_text(SETTINGS)
    lines: list[str] = []
    found = kill_and_resume(config, tmp_path / "out", working_dir=sent, say=lines.append)

    ((name, (disturbed, undisturbed)),) = found.items()
    assert (name, disturbed) == ("small", undisturbed)
    log = "\n".join(lines)
    assert log.count("kill -9") == 3
    assert "the rollout actor of lanes" in log
    assert log.count("small: goes on from its checkpoint") >= 2  # the learner's and the driver's
    artifact = tmp_path / "out" / "disturbed" / "small"
    assert load_policy(str(artifact)).name == "ppo:small"
    curves = [json.loads((tmp_path / "out" / kind / "small" / "card.json").read_text()) for kind in ("disturbed", "undisturbed")]
    assert curves[0]["training"]["learning_curve"] == curves[1]["training"]["learning_curve"]
    assert list((tmp_path / "out" / "disturbed" / ".training" / "small" / "tensorboard").iterdir())
