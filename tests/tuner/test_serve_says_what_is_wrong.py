"""`cachepilot serve` tells of what keeps it from starting, and of what it goes on without."""

from __future__ import annotations

import contextlib
import json
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
from tuner.errors import CommandError


class Told(Exception):
    """The last line was said."""


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return f"serve-{uuid.uuid4().hex[:8]}"


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
        running = Running(url, 1, None, lambda: [], lambda: None, lambda *_: 0, tmp_path)
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


def test_what_the_parts_said_is_pointed_to_where_the_gateway_does_not_start(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fails(*_: object, logs: Path, **__: object) -> None:
        (logs / "replica_a.log").write_text("ERROR it cannot\n")
        raise GatewayNotStarted("the gateway did not become ready")

    monkeypatch.setattr(serving_commands, "start", fails)
    settings = Settings.model_validate({"gateway": {"namespace": namespace}})
    with pytest.raises(GatewayNotStarted, match=r"did not become ready\. What its parts said is in ") as ended:
        serving_commands.serve_gateway(settings, port=None, dashboard=False, say=said.append)
    folder = Path(str(ended.value).rpartition(" is in ")[2])
    assert folder.parent == tmp_path / "state" / "cachepilot" / "logs"
    assert said[0] == f"logs: {folder}/replica_*.log; those of the last 20 runs are kept"
    assert sorted(log.name for log in folder.glob("*.log")) == ["redis.log", "replica_a.log"]


def test_without_a_place_for_logs_the_folder_of_ray_is_named(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if text.startswith("Ctrl-C"):
            raise Told

    with ready("own") as url:
        running = Running(url, 1, None, lambda: [], lambda: None, lambda *_: 0, tmp_path / "ray")
        monkeypatch.setattr(serving_commands, "start", lambda *_, **__: contextlib.nullcontext(running))
        settings = Settings.model_validate({"gateway": {"namespace": namespace}})
        with pytest.raises(Told):
            serving_commands.serve_gateway(settings, port=None, dashboard=False, say=say)
    assert [line for line in lines if line.startswith("logs: ")] == [
        f"logs: {tmp_path}/ray/replica_*.log, until it ends, since {tmp_path}/file/cachepilot/logs cannot be written to"
    ]


def test_a_vector_store_whose_package_is_missing_is_told_before_ray_is_started(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    semantic = {"enabled": True, "vectors": {"kind": "faiss"}}
    settings = Settings.model_validate({"gateway": {"namespace": namespace, "rules": {"semantic": semantic}}})
    with pytest.raises(CommandError) as told:
        serving_commands.check_vectors(settings.gateway)
    assert str(told.value) == (
        "serve: gateway.rules.semantic.vectors.kind = 'faiss': faiss is not installed: pip install 'cachepilot[faiss]'"
    )
    semantic["enabled"] = False
    serving_commands.check_vectors(Settings.model_validate({"gateway": {"rules": {"semantic": semantic}}}).gateway)
