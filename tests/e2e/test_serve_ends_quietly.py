"""`cachepilot serve` in a process of its own: ended whenever, it says so in words and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tuner.local import run_directory

pytestmark = pytest.mark.e2e
MARK = "SERVE_TEST_RUN"

Serve = Callable[[], subprocess.Popen[str]]


def marked(mark: str) -> list[str]:
    """Command lines of the processes that have the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
            except OSError:  # it has ended meanwhile
                continue
    return found


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    mark = uuid.uuid4().hex
    settings = tmp_path / "settings.yaml"
    planted = tmp_path / "planted"
    planted.write_text("no arena")
    planted.chmod(0o600)
    gateway: dict[str, Any] = {"namespace": f"quiet-{mark[:8]}", "port": 0, "metrics_port": 0, "memory": {"path": str(planted)}}
    settings.write_text(json.dumps({"gateway": gateway}))
    runs: list[subprocess.Popen[str]] = []

    def go() -> subprocess.Popen[str]:
        runs.append(
            subprocess.Popen(
                [sys.executable, "-m", "tuner.cli", "serve", "--config", str(settings)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, MARK: mark, "XDG_STATE_HOME": str(tmp_path / "state")},
                start_new_session=True,  # its own process group, as a terminal gives it
            )
        )
        return runs[-1]

    yield go
    for run in runs:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        # What it started ends with it, though some of it takes a moment.
        deadline = time.monotonic() + 20.0
        while (left := marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []
    assert not run_directory(gateway["namespace"]).exists()


def ended(run: subprocess.Popen[str], *, after: str, end: Callable[[], None]) -> tuple[int, list[str], str]:
    """End a run once it has printed a line; its status, what it printed from then on, and what it complained of."""
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith(after):
            break
    else:
        pytest.fail(f"{after!r} was not printed: {run.communicate()[1]}")
    end()
    printed, complained = run.communicate(timeout=120)
    return run.returncode, printed.splitlines(), complained


def test_a_gateway_that_is_ended_ends_in_order_says_nothing_but_that_and_leaves_its_logs(serve: Serve, tmp_path: Path) -> None:
    run = serve()
    assert ended(run, after="Ctrl-C ends it", end=run.terminate) == (0, ["ending"], "")
    (log,) = (tmp_path / "state" / "cachepilot" / "logs").glob("quiet-*/replica_*.log")
    assert [line for line in log.read_text().splitlines() if "WARNING" in line and f"arena {tmp_path}/planted" in line]


def test_a_gateway_that_is_ended_while_it_starts_ends_as_well(serve: Serve) -> None:
    run = serve()

    def interrupt() -> None:
        os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C does

    assert ended(run, after="redis: ", end=interrupt) == (0, ["ended before the gateway was up"], "")
