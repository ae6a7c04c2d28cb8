"""`cachepilot serve` in a process of its own: ended whenever, it says so in words and leaves nothing running."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from serving.llm_sim import LlmSimProcess
from serving.settings import LlmSimSettings
from tests.waiting import until
from tuner.local import run_directory

pytestmark = pytest.mark.e2e
MARK = "SERVE_TEST_RUN"

Serve = Callable[..., subprocess.Popen[str]]


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
    runs: list[subprocess.Popen[str]] = []

    def go(**more: Any) -> subprocess.Popen[str]:
        settings.write_text(json.dumps({"gateway": {**gateway, **more}}))
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


def line_of(run: subprocess.Popen[str], start: str) -> str:
    """The next line with that start."""
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith(start):
            return line
    pytest.fail(f"{start!r} was not printed: {run.communicate()[1]}")


def ended(run: subprocess.Popen[str], *, after: str, end: Callable[[], None]) -> tuple[int, list[str], str]:
    """End a run once it has printed a line; its status, what it printed from then on, and what it complained of."""
    line_of(run, after)
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


@pytest.fixture
def model() -> Iterator[LlmSimProcess]:
    # 200 tokens a second: what is asked for below takes it seconds.
    with LlmSimProcess(LlmSimSettings(port=0, ttft=0.0, tpot=0.005, contention=0.0)) as process:
        yield process


def asked(url: str, text: str, tokens: int) -> tuple[int, bytes]:
    """Ask for so many tokens on a connection of its own; the status and the body, as far as they come."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60.0)
    body = json.dumps({"model": "llm-sim", "messages": [{"role": "user", "content": text}]})
    connection.request("POST", "/v1/chat/completions", body, {"x-llm-sim-output-tokens": str(tokens)})
    answer = connection.getresponse()
    return answer.status, answer.read()


def under_way(model: LlmSimProcess) -> int:
    """How many calls the model works at."""
    with urllib.request.urlopen(model.metrics_url) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running")))


@pytest.mark.parametrize("end", [os.kill, os.killpg], ids=["the process", "its group"])  # a shell's `kill %1` does the latter
def test_what_is_under_way_when_a_gateway_is_ended_gets_its_answer_and_nothing_else_does(
    end: Callable[[int, int], None], serve: Serve, model: LlmSimProcess
) -> None:
    run = serve(upstream={"base_url": model.base_url}, drain=60.0)
    url = line_of(run, "gateway: ").split()[1].removesuffix("/v1,")
    line_of(run, "Ctrl-C ends it")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asked, url, "hello", 1_000)
        asyncio.run(until(lambda: under_way(model) == 1, "the model to be asked"))
        end(run.pid, signal.SIGTERM)
        assert run.stdout is not None
        assert run.stdout.readline() == "ending\n"
        asyncio.run(until(lambda: refused(url), "the port to be closed"))
        assert not answer.done()
        status, body = answer.result()
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 1_000)
    assert (*run.communicate(timeout=120), run.returncode) == ("", "", 0)


@pytest.mark.parametrize("drain", [0.5, 600.0])
def test_what_takes_longer_than_the_gateway_waits_is_cut_off_as_by_a_second_signal(
    drain: float, serve: Serve, model: LlmSimProcess
) -> None:
    run = serve(upstream={"base_url": model.base_url}, drain=drain)
    url = line_of(run, "gateway: ").split()[1].removesuffix("/v1,")
    line_of(run, "Ctrl-C ends it")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(asked, url, "hello", 100_000)
        asyncio.run(until(lambda: under_way(model) == 1, "the model to be asked"))
        os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C does
        if drain > 1.0:
            line_of(run, "ending")
            os.killpg(run.pid, signal.SIGINT)
        printed, complained = run.communicate(timeout=120)
        try:
            status, _ = answer.result()
        except (OSError, http.client.HTTPException):
            status = None
    assert status != 200
    assert [line for line in printed.splitlines() if line != "ending"] == [
        f"1 request(s) cut off: no answer within gateway.drain, {drain:g} s, or before the second signal"
    ]
    assert (complained, run.returncode) == ("", 0)


def refused(url: str) -> bool:
    """Whether nobody listens."""
    try:
        socket.create_connection((urlsplit(url).hostname or "", urlsplit(url).port or 0), timeout=5.0).close()
    except ConnectionRefusedError:
        return True
    return False
