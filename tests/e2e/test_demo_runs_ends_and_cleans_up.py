"""The demo, as a user runs it: a process that does the whole line, and leaves nothing behind whichever way it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
MARK = "DEMO_TEST_RUN"


@dataclass
class Run:
    """A demo in a session of its own, whose processes can all be found by a variable that they inherit."""

    process: subprocess.Popen[str]
    mark: str

    def left_over(self) -> list[str]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120])
                except OSError:  # it has ended meanwhile
                    continue
        return found

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 20.0
        while self.left_over() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.left_over() == []


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    runs: list[Run] = []

    def go(*arguments: str) -> Run:
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "tuner.cli", "demo", "--headless", "--output", str(tmp_path / "run"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, MARK: mark},
            start_new_session=True,  # its own process group, so that a Ctrl-C can be sent to all of it as a terminal does
        )
        runs.append(Run(process, mark))
        return runs[-1]

    yield go
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


def test_a_run_ends_with_a_report_a_summary_and_nothing_left(start: object, tmp_path: Path) -> None:
    summary_file = tmp_path / "summary.json"
    run = start("--minutes", "1.4", "--json", str(summary_file))  # type: ignore[operator]
    printed, _ = run.process.communicate(timeout=280)
    assert run.process.returncode == 0, printed
    summary = json.loads(summary_file.read_text())
    assert summary["complete"] is True
    assert set(summary["arms"]) == {"control", "treatment"}
    for figures in summary["arms"].values():
        assert figures["requests"] > 200
        assert 0.0 < figures["hit_ratio"]["value"] < 1.0
        assert figures["p99"]["value"] > 0
        assert figures["cost"]["value"] > 0
        assert figures["decisions"] >= 3
    assert summary["arms"]["control"]["knobs_first"] == summary["arms"]["control"]["knobs_last"], "the static arm was moved"
    assert summary["arms"]["treatment"]["knobs_first"] != summary["arms"]["treatment"]["knobs_last"], (
        "the tuned arm was not tuned"
    )
    assert summary["policy"].startswith("ppo")
    assert summary["replay"]["failed"] == 0
    page = Path(summary["report"]).read_text()
    assert "clustered by key" in page
    assert f"report: {summary['report']}" in printed
    run.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running_and_says_where_the_partial_report_is(
    start: object, tmp_path: Path, number: signal.Signals
) -> None:
    summary_file = tmp_path / "summary.json"
    run = start("--minutes", "5", "--policy", "curve", "--json", str(summary_file))  # type: ignore[operator]
    assert run.process.stdout is not None
    printed = []
    for line in run.process.stdout:
        printed.append(line)
        if line.lstrip().startswith("2 v"):  # the second turn of the tuner
            break
    else:
        pytest.fail("".join(printed))
    if number is signal.SIGINT:
        os.killpg(run.process.pid, number)
    else:
        run.process.send_signal(number)
    rest, _ = run.process.communicate(timeout=120)
    assert run.process.returncode == 130, rest
    summary = json.loads(summary_file.read_text())
    assert summary["complete"] is False
    assert Path(summary["report"]).is_file()
    assert "partial" in rest
    assert "report.html" in rest
    run.assert_nothing_left()


def test_an_interrupt_while_starting_leaves_nothing_running(start: object) -> None:
    run = start("--minutes", "5", "--policy", "curve")  # type: ignore[operator]
    assert run.process.stdout is not None
    for line in run.process.stdout:
        if "gateway on Ray Serve" in line:
            break
    os.killpg(run.process.pid, signal.SIGINT)
    rest, _ = run.process.communicate(timeout=120)
    assert run.process.returncode == 130, rest
    run.assert_nothing_left()
