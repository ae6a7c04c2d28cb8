"""A gateway that does not start says why; one that runs leaves others their port, and tells of one request by one name."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.app import GatewayNotStarted, start
from serving.settings import GatewaySettings
from tests.family import family

pytestmark = pytest.mark.e2e
AGENT_PORT = 52365
"""Of Ray's agent, by default: that of the machine's own cluster has to have it, or no job can be submitted there."""


class Model(BaseHTTPRequestHandler):
    """Answers whatever it is asked, and names the request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({
            "object": "chat.completion", "model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
        }).encode()  # fmt: skip
        self.send_response(200)
        for name, value in (("content-type", "application/json"), ("x-request-id", "the-models"), ("content-length", len(body))):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def settings(model: int = 9, **rules: Any) -> GatewaySettings:
    values = {"port": 0, "metrics_port": 0, "upstream": {"base_url": f"http://127.0.0.1:{model}/v1"}, "memory": {"shared": False}}
    return GatewaySettings.model_validate({**values, "rules": rules})


def refused(packages: str) -> str:
    """What is said where the vector store's package cannot be imported."""
    os.environ["PYTHONPATH"] = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with start(settings(semantic={"enabled": True, "vectors": {"kind": "faiss"}}), deadline=120.0):
            return "it runs"
    except GatewayNotStarted as error:
        return str(error)


def running() -> tuple[set[int], list[tuple[str, list[str]]]]:
    """The ports on which the processes of a gateway listen; ``x-cache`` and all ``x-request-id`` of three answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as model:
        threading.Thread(target=model.serve_forever, daemon=True).start()
        with start(settings(model.server_port), deadline=120.0) as gateway:
            answers = []
            for named in ({}, {}, {"x-request-id": "mine"}):
                body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
                headers = {"content-type": "application/json", **named}
                request = urllib.request.Request(f"{gateway.url}/v1/chat/completions", body, headers)
                with urllib.request.urlopen(request, timeout=30.0) as answer:
                    answers.append((answer.headers["x-cache"], answer.headers.get_all("x-request-id")))
            ours = family()
            listening = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
            ports = {each.laddr.port for each in listening if each.pid in ours}
        model.shutdown()
    return ports, answers


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """What it returns in a process of its own: the session's may have a Ray already."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def test_what_the_replicas_failed_with_is_said(tmp_path: Path) -> None:
    (tmp_path / "faiss").mkdir()
    (tmp_path / "faiss" / "__init__.py").write_text("raise ImportError('planted')")
    assert apart(refused, str(tmp_path)) == (
        "the gateway did not start: faiss cannot be imported: planted; pip install 'cachepilot[faiss]'"
    )


def test_one_that_runs_leaves_others_the_agents_port_and_names_each_request_once() -> None:
    ports, answers = apart(running)
    assert len(ports) > 5
    assert AGENT_PORT not in ports, "a cluster to which jobs are submitted has to have it"
    (missed, models), (hit, own), (again, callers) = answers
    assert (missed, models) == ("MISS", ["the-models"])
    assert hit == again == "HIT"
    assert len(own) == 1
    assert own != models, "the model had no part in it"
    assert callers == ["mine"]
