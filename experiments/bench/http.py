"""Exact hits over HTTP: our gateway (Ray Serve, HAProxy) beside the litellm proxy, same model, same load, taking turns."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.bench.load import Load, drive, generator
from experiments.bench.result import BenchResult
from serving.app import start
from serving.llm_sim import LlmSimProcess
from serving.redis_server import RedisServer
from serving.settings import GatewaySettings, LlmSimSettings

GOAL = 5.0
"""How many times litellm's requests/s an exact hit should reach."""

LITELLM = Path(".peers/litellm/bin/litellm")
_START_SECONDS = 120.0
_QUESTION = {"model": "llm-sim", "messages": [{"role": "user", "content": "What makes a cache hit exact?"}]}
_BODY = json.dumps(_QUESTION).encode()


def run(
    seconds: float = 12.0,
    litellm: Path | None = LITELLM,
    *,
    connections: int = 8,
    rounds: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Measure requests/s and latency of exact hits.

    Args:
        seconds: Measured time of each system, over all rounds.
        litellm: The proxy's executable (``scripts/install-peers.sh`` makes it); None, or none there, measures ours alone.
        connections: Connections of the load generator.
        rounds: How often the systems take turns; a rate is the median over the rounds.
        say: Told what happens.

    Raises:
        RuntimeError: If a system did not start, or what was measured were not hits.
    """
    peer = litellm if litellm is not None and litellm.is_file() else None
    turn = max(1.0, seconds / rounds)
    loads: dict[str, list[Load]] = {}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(LlmSimProcess(LlmSimSettings(port=0)))
        say("starting the gateway on Ray Serve")
        systems = {"cachepilot": (stack.enter_context(_cachepilot(model.base_url)), "x-cache-tier")}
        if peer is not None:
            say("starting the litellm proxy")
            systems["litellm"] = (stack.enter_context(_litellm(peer, model.base_url)), "x-litellm-cache-key")
        for name, (url, header) in systems.items():
            _warm(name, url, header)
        asked = dict.fromkeys(systems, 0)
        for number in range(rounds):
            for name, (url, _) in systems.items():
                say(f"round {number + 1} of {rounds}: {name}")
                before = _model_calls(model.metrics_url)
                loads.setdefault(name, []).append(drive(url, _BODY, seconds=turn, connections=connections))
                asked[name] += _model_calls(model.metrics_url) - before
        if asked["cachepilot"]:
            raise RuntimeError(f"http bench: expected exact hits only, but the model was asked {asked['cachepilot']} times")
    rows = [{**_row(name, measured), "model calls": asked[name]} for name, measured in loads.items()]
    rates = {name: statistics.median(load.rate for load in measured) for name, measured in loads.items()}
    note = f"{generator()}, {connections} connections, {rounds} rounds of {turn:g} s each in turn; one replica, one worker."
    note += f" Goal: a ratio of {GOAL:g}."
    if peer is None:
        note += f" litellm was not measured: no executable at {litellm}; run scripts/install-peers.sh."
    return BenchResult(
        "http",
        rows,
        rates["cachepilot"] / rates["litellm"] if "litellm" in rates else None,
        f"cachepilot bench http --seconds {seconds:g}",
        note,
    )


def _row(system: str, loads: list[Load]) -> dict[str, Any]:
    return {
        "system": system,
        "requests/s": round(statistics.median(load.rate for load in loads), 1),
        "p50 ms": round(1000 * statistics.median(load.p50 for load in loads), 3),
        "p99 ms": round(1000 * statistics.median(load.p99 for load in loads), 3),
        "failed": sum(load.failed for load in loads),
    }


def _warm(name: str, url: str, header: str) -> None:
    """Ask twice and look that the second answer is a hit."""
    for _ in range(2):
        request = urllib.request.Request(url, _BODY, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            found = answer.headers.get(header)
            answer.read()
    if found is None:
        raise RuntimeError(f"http bench: expected {name} to answer a repeated question from its cache (header {header})")


def _model_calls(metrics_url: str) -> int:
    with urllib.request.urlopen(metrics_url, timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    return sum(round(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("vllm:request_success_total"))


@contextlib.contextmanager
def _cachepilot(base_url: str) -> Iterator[str]:
    with RedisServer() as redis:
        settings = GatewaySettings.model_validate(
            {"redis_url": redis.url, "port": 0, "metrics_port": 0, "upstream": {"base_url": base_url}}
        )
        with start(settings) as running:
            yield f"{running.url}/v1/chat/completions"


@contextlib.contextmanager
def _litellm(executable: Path, base_url: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    upstream = {"model": "openai/llm-sim", "api_base": base_url, "api_key": "none"}
    config = {
        "model_list": [{"model_name": "llm-sim", "litellm_params": upstream}],
        "litellm_settings": {"cache": True, "cache_params": {"type": "local", "ttl": 3600.0}},
    }
    # No key: ours asks for none either, and checking one would only slow it down. It listens on loopback alone.
    env = {
        **os.environ,
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "PYTHONPATH": "",
    }
    with tempfile.TemporaryDirectory(prefix="cp-litellm-") as directory:
        file, log = Path(directory, "config.yaml"), Path(directory, "log")
        file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        command = [str(executable.absolute()), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=directory)
        try:
            _wait_for_litellm(process, f"http://127.0.0.1:{port}/health/liveliness", log)
            yield f"http://127.0.0.1:{port}/v1/chat/completions"
        finally:
            process.terminate()
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_litellm(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2.0):
            return
        time.sleep(0.1)
    tail = log.read_text(errors="replace")[-500:]
    raise RuntimeError(f"http bench: the litellm proxy did not start within {_START_SECONDS:g} s; it printed: {tail}")
