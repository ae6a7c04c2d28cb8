"""What answers over HTTP in the benchmarks: our gateway on Ray Serve, and the litellm proxy, in front of the same model."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.app import start
from serving.ports import free_port
from serving.redis_server import RedisServer
from serving.settings import GatewaySettings

CACHEPILOT, LITELLM = "cachepilot", "litellm"
HIT_HEADERS = {CACHEPILOT: "x-cache-tier", LITELLM: "x-litellm-cache-key"}
"""The header by which each says that an answer came from its cache."""

LITELLM_EXECUTABLE = Path(".peers/litellm/bin/litellm")
_PATH = "/v1/chat/completions"
_START_SECONDS = 120.0


@contextlib.contextmanager
def cachepilot(base_url: str, **changes: Any) -> Iterator[str]:
    """Run our gateway, one replica with a Redis of its own; yields the URL of its chat completions.

    Args:
        base_url: The model.
        changes: Settings that are not the defaults (:class:`serving.settings.GatewaySettings`).
    """
    with RedisServer() as redis:
        settings = GatewaySettings.model_validate(
            {"redis_url": redis.url, "port": 0, "metrics_port": 0, "upstream": {"base_url": base_url}, **changes}
        )
        with start(settings) as running:
            yield f"{running.url}{_PATH}"


@contextlib.contextmanager
def litellm_proxy(executable: Path, base_url: str) -> Iterator[str]:
    """Run the litellm proxy, one worker with its in-memory cache; yields the URL of its chat completions.

    Args:
        executable: Its executable (``scripts/install-peers.sh`` makes it).
        base_url: The model.

    Raises:
        RuntimeError: If it does not start; the message ends with what it printed.
    """
    port = free_port()
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
            yield f"http://127.0.0.1:{port}{_PATH}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def warm(name: str, url: str, body: bytes) -> None:
    """Ask twice and look that the second answer is a hit.

    Args:
        name: The system, a key of :data:`HIT_HEADERS`.
        url: Its chat completions.
        body: The question.

    Raises:
        RuntimeError: If it is not.
    """
    for _ in range(2):
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            found = answer.headers.get(HIT_HEADERS[name])
            answer.read()
    if found is None:
        raise RuntimeError(f"bench: expected {name} to answer a repeated question from its cache (header {HIT_HEADERS[name]})")


def model_calls(metrics_url: str) -> int:
    """Return how many completions the simulated model has answered since its start.

    Args:
        metrics_url: :attr:`serving.llm_sim.LlmSimProcess.metrics_url`.
    """
    with urllib.request.urlopen(metrics_url, timeout=10.0) as answer:
        lines = answer.read().decode().splitlines()
    return sum(round(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("vllm:request_success_total"))


def _wait_for_litellm(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2.0):
            return
        time.sleep(0.1)
    tail = log.read_text(errors="replace")[-500:]
    raise RuntimeError(f"bench: the litellm proxy did not start within {_START_SECONDS:g} s; it printed: {tail}")
