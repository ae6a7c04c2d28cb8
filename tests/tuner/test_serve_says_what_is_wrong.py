"""`cachepilot serve` tells of what keeps it from starting, and of what it goes on without."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving.app import GatewayNotStarted, Running
from tuner import cli, serving_commands
from tuner.config import Settings
from tuner.local import run_directory


class Told(Exception):
    """The last line was said."""


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"serve-{uuid.uuid4().hex[:8]}"
    yield name
    shutil.rmtree(run_directory(name), ignore_errors=True)


@contextlib.contextmanager
def ready(memory: str) -> Iterator[str]:
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"ready": True, "memory": memory}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(("memory", "told"), [("refused", True), ("shared", False), ("own", False)])
def test_an_arena_that_cannot_be_used_is_told_of(
    memory: str, told: bool, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if text.startswith("Ctrl-C"):
            raise Told

    with ready(memory) as url:
        running = Running(url, 1, None, lambda: [], lambda: None, tmp_path)
        monkeypatch.setattr(serving_commands, "start", lambda *_, **__: contextlib.nullcontext(running))
        settings = Settings.model_validate({"gateway": {"namespace": namespace}})
        with pytest.raises(Told):
            serving_commands.serve_gateway(settings, port=None, dashboard=False, say=say)
    assert [line for line in lines if line.startswith("memory: ")] == (
        ["memory: the arena cannot be used, so each replica has memory of its own; the log says why"] if told else []
    )


def test_a_ray_that_does_not_start_is_a_message_and_an_exit_code(
    namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise GatewayNotStarted("Ray did not start on this machine: it timed out")

    monkeypatch.setattr(serving_commands, "start", fails)
    monkeypatch.setenv("CACHEPILOT_GATEWAY__NAMESPACE", namespace)
    monkeypatch.setattr("sys.argv", ["cachepilot", "serve"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "error: Ray did not start on this machine: it timed out" in " ".join(said.split())
