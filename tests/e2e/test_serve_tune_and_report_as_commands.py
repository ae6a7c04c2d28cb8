"""The README's second and third use, as commands in processes of their own: serve, tune beside it, and report an experiment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.workloads.generators import sessions
from experiments.replay import replay
from serving.llm_sim import LlmSimProcess
from serving.ports import free_port
from serving.settings import LlmSimSettings

pytestmark = pytest.mark.e2e

INTERVALS = 3


def command(settings: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tuner.cli", *arguments, "--config", str(settings)]


def output(settings: Path, *arguments: str) -> str:
    done = subprocess.run(command(settings, *arguments), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    with LlmSimProcess(LlmSimSettings(port=0, slots=32, ttft=0.02, tpot=0.0001)) as model:
        port = free_port()
        path = tmp_path / "settings.yaml"
        path.write_text(
            json.dumps(  # JSON is YAML
                {
                    "gateway": {
                        "namespace": f"commands-{os.getpid()}",
                        "upstream": {"base_url": model.base_url},
                        "arms": {
                            arm: {"share": 0.5, "knobs": {"cache_size": 65536, "ttl": 600}} for arm in ("control", "treatment")
                        },
                        "space": {"min_size": 65536, "max_size": 8388608},
                        "port": port,
                        "metrics_port": free_port(),
                        "access_log": str(tmp_path / "access"),
                    },
                    "tuner": {
                        "interval": 4,
                        "policy": "curve",
                        "signals": {"model_metrics": model.metrics_url},
                        "guard": {"min_requests": 5},
                    },
                    "experiments": {"ledger": {"url": f"sqlite:///{tmp_path / 'ledger.db'}"}},
                }
            )
        )
        yield path, port


@contextlib.contextmanager
def serving(settings: Path) -> Iterator[None]:
    """Run `cachepilot serve` until the block ends, then end it as Ctrl-C does, and expect it to end well."""
    process = subprocess.Popen(command(settings, "serve"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    printed = []
    try:
        for line in process.stdout:
            printed.append(line)
            if "Ctrl-C ends it" in line:
                break
        else:
            pytest.fail("".join(printed))
        yield
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0, "".join(printed) + rest


def test_serve_tune_and_report(settings: tuple[Path, int], tmp_path: Path) -> None:
    path, port = settings
    with serving(path):
        started = json.loads(output(path, "experiment", "start", "commands", "--json"))
        assert started["state"] == "running"
        stop = threading.Event()
        sent: list[int] = []

        async def traffic() -> None:
            ended = asyncio.Event()

            async def watch() -> None:
                await asyncio.to_thread(stop.wait)
                ended.set()

            watching = asyncio.create_task(watch())
            workload = sessions(6000, 300, duration=240.0, session_length=1.0, diurnal=0.0, seed=4)
            result = await replay(workload, f"http://127.0.0.1:{port}", model="llm-sim", stop=ended)
            sent.append(len(result.requests) - result.failed)
            await watching

        client = threading.Thread(target=lambda: asyncio.run(traffic()))
        client.start()
        try:
            lines = output(path, "tune", "--intervals", str(INTERVALS), "--json").splitlines()
        finally:
            stop.set()
            client.join()
        turns = [json.loads(line) for line in lines if "interval" in json.loads(line)]
        assert [turn["interval"] for turn in turns] == [1, 2, 3]
        assert turns[-1]["version"] > 1, "the tuner changed nothing"
        assert turns[-1]["confirmed"] == turns[-1]["expected"] == 1
        first = {"cache_size": 65536, "ttl": 600.0, "warmup_ratio": 0.0}
        assert turns[-1]["arms"]["control"]["knobs"] == first
        assert turns[-1]["arms"]["treatment"]["knobs"] != first
        status = json.loads(output(path, "experiment", "status", "commands", "--json"))
        assert status["decisions"] == 2 * INTERVALS
        assert sent
        assert sent[0] > 50
        assert json.loads(output(path, "experiment", "stop", "commands", "--json"))["state"] == "ended"
    page = tmp_path / "report.html"
    summary = json.loads(output(path, "experiment", "report", "commands", "--json", "--output", str(page)))
    assert sum(figures["requests"] for figures in summary["arms"].values()) > 50
    assert "clustered by key" in page.read_text()
