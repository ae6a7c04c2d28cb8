"""The soak, as a user runs it, for seconds instead of minutes: everything around the gateway fails once, and it passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_with_redis_killed_the_embedder_hung_and_the_model_failing_no_answer_is_wrong_and_nothing_is_left(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    # A process of its own: Ray may run in this one.
    command = [sys.executable, "-m", "tuner.cli", "soak", "--minutes", "0.33", "--clients", "8", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(output.read_text())
    assert seen["passed"]
    assert seen["violations"] == {}
    assert seen["leaks"] == {}
    assert seen["events"]["Redis killed"] == 2
    assert seen["events"]["embedder hung"] == 2
    assert {"HIT", "MISS", "SEMANTIC", "left"} <= set(seen["answers"])
    assert seen["upstream"]["ok"] > 0
    assert seen["upstream"]["error"] > 0
    assert len(seen["memory"]) == 2
