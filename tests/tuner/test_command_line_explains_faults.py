"""The command line: bad input gets one clear message and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from experiments.ledger import Ledger
from serving.audit import AuditEvent
from tests.envs.trace_files import AZURE_2024
from tuner import cli, demo
from tuner.config import SettingsError, load_settings
from tuner.errors import CommandError
from tuner.serving_commands import check_access_log


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


Cachepilot = Callable[..., Result]


@pytest.fixture
def cachepilot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cachepilot:
    """Run a command line in this process, from the entry point that the console script has."""

    def run(*arguments: str, environ: dict[str, str] | None = None) -> Result:
        monkeypatch.setattr("sys.argv", ["cachepilot", *arguments])
        for name, value in (environ or {}).items():
            monkeypatch.setenv(name, value)
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def failed(result: Result, code: int, *parts: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    said = " ".join(result.stderr.split())
    for part in parts:
        assert part in said, said


def test_an_unknown_setting_is_named_with_what_was_meant(cachepilot: Cachepilot, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("gateway:\n  namspace: x\n")
    failed(cachepilot("tune", "--config", str(path)), 2, "gateway.namspace", "'x'", "did you mean 'namespace'", str(path))


def test_an_unreadable_trace_is_named_with_its_line(cachepilot: Cachepilot, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n{"timestamp": oops\n')
    failed(cachepilot("demo", "--trace", str(path), "--headless"), 1, str(path), "line 2", "oops")


def test_a_missing_trace_is_named(cachepilot: Cachepilot, tmp_path: Path) -> None:
    failed(cachepilot("demo", "--trace", str(tmp_path / "absent.csv"), "--headless"), 1, "absent.csv")


def test_too_short_a_demo_says_how_long_it_needs(cachepilot: Cachepilot) -> None:
    needed = (demo.START_UP + demo.REPORT_TIME + demo.SHORTEST) / 60.0
    least = math.ceil(10.0 * needed) / 10.0
    failed(cachepilot("demo", "--minutes", "1", "--headless"), 2, "--minutes", "greater than or equal to", str(least))


def test_a_redis_that_does_not_answer_is_named_with_what_to_do(cachepilot: Cachepilot, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: refused
        url = f"redis://user:secret@127.0.0.1:{taken.getsockname()[1]}"
        for command in ("serve", "tune"):
            settings = {"CACHEPILOT_GATEWAY__REDIS_URL": url, "CACHEPILOT_TUNER__ARM": "control"}
            result = cachepilot(command, environ=settings)
            failed(result, 1, "nothing answers PING", "gateway.redis_url")
            assert "secret" not in result.stderr + result.stdout


def test_an_arm_that_is_not_there_is_named_with_both_ways_out(cachepilot: Cachepilot) -> None:
    ways = ("set tuner.arm to one of them", "add that arm to gateway.arms", "examples/two-arms.yaml")
    failed(cachepilot("tune", environ={"CACHEPILOT_TUNER__ARM": "canary"}), 1, "tuner.arm = 'canary'", "['control']", *ways)


def test_a_port_in_use_is_named(cachepilot: Cachepilot, redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed(cachepilot("llm-sim", "--port", str(port)), 1, str(port))
        failed(cachepilot("serve", "--port", str(port), environ={"CACHEPILOT_GATEWAY__REDIS_URL": redis_url}), 1, str(port))


def test_a_prometheus_that_does_not_answer_is_named(cachepilot: Cachepilot, redis_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        settings = {
            "CACHEPILOT_GATEWAY__REDIS_URL": redis_url,
            "CACHEPILOT_TUNER__ARM": "control",
            "CACHEPILOT_TUNER__SIGNALS__KIND": "prometheus",
            "CACHEPILOT_TUNER__SIGNALS__PROMETHEUS_URL": url,
            "CACHEPILOT_EXPERIMENTS__LEDGER__URL": f"sqlite:///{tmp_path / 'ledger.db'}",
        }
        failed(cachepilot("tune", environ=settings), 1, url)


def test_a_policy_that_means_nothing_is_named(cachepilot: Cachepilot) -> None:
    failed(cachepilot("tune", "--policy", "magic", environ={"CACHEPILOT_TUNER__ARM": "control"}), 1, "magic", "curve")


@contextlib.contextmanager
def _model(key: str) -> Iterator[str]:
    """A server that answers who has the key; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            known = self.headers["authorization"] == f"Bearer {key}"
            self._answer(200 if known else 401, b"{}")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_replay_is_let_in_by_its_key_and_says_so_where_it_is_not(cachepilot: Cachepilot, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE_2024)
    with _model("sesame") as url:
        ask = ("replay", str(path), "--url", url, "--speed", "1000", "--json")
        failed(cachepilot(*ask), 1, "all of 3 requests with 401", "--api-key or CACHEPILOT_API_KEY")
        for result in (cachepilot(*ask, "--api-key", "sesame"), cachepilot(*ask, environ={"CACHEPILOT_API_KEY": "sesame"})):
            assert result.returncode == 0, result.stderr
            assert json.loads(result.stdout)["statuses"] == {"200": 3}
            assert "sesame" not in result.stdout + result.stderr


def test_a_made_workload_is_replayed_as_a_file_is(cachepilot: Cachepilot) -> None:
    with _model("sesame") as url:
        ask = ("--url", url, "--speed", "1000000", "--api-key", "sesame", "--json")
        result = cachepilot("replay", "made:flash-crowd?seed=3", "--limit", "5", *ask)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["statuses"] == {"200": 5}
        failed(cachepilot("replay", "made:flash-mob", *ask), 1, "made:flash-mob", "flash-crowd")
        failed(cachepilot("replay", "made:flash-crowd?crowd=3", *ask), 1, "made:flash-crowd?crowd=3")


def test_doctor_reports_every_part_as_json(cachepilot: Cachepilot) -> None:
    result = cachepilot("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.returncode == 0, checks
    assert {"python", "torch", "redis-server", "embedder weights", "pretrained policy", "RDMA"} <= set(checks)


@pytest.mark.parametrize("command", ["demo", "serve", "llm-sim", "tune", "train", "replay", "bench", "doctor", "experiment"])
def test_every_command_has_a_help_text(cachepilot: Cachepilot, command: str) -> None:
    result = cachepilot(command, "--help")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) > 5


def test_an_experiment_is_started_watched_ended_and_reported(cachepilot: Cachepilot, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    log = tmp_path / "access"
    log.mkdir()
    settings.write_text(
        f"gateway:\n  access_log: {log}\n  arms: {{control: {{share: 0.5}}, treatment: {{share: 0.5}}}}\n"
        f"experiments: {{ledger: {{url: 'sqlite:///{tmp_path}/ledger.db'}}}}\n"
    )
    (log / "access-r1.jsonl").write_text("")
    config = ("--config", str(settings))
    started = cachepilot("experiment", "start", "first", "--json", *config)
    assert json.loads(started.stdout)["state"] == "running", started.stderr
    failed(cachepilot("experiment", "start", "second", *config), 2, "first", "still running")
    assert json.loads(cachepilot("experiment", "status", "first", "--json", *config).stdout)["state"] == "running"
    assert "running, 20" in cachepilot("experiment", "status", "first", *config).stdout
    page = tmp_path / "report.html"
    report = cachepilot("experiment", "report", "first", "--json", "--output", str(page), *config)
    assert json.loads(report.stdout)["verdict"] == "not enough data", report.stderr
    assert page.read_text().lower().startswith("<!doctype html>")
    assert json.loads(cachepilot("experiment", "stop", "first", "--json", *config).stdout)["state"] == "ended"
    failed(cachepilot("experiment", "report", "absent", *config), 1, "absent")


def test_without_a_name_the_status_lists_the_experiments_and_what_operators_changed(
    cachepilot: Cachepilot, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"gateway: {{namespace: mine}}\nexperiments: {{ledger: {{url: '{url}'}}}}\n")
    config = ("--config", str(settings))
    Ledger(url).close()
    assert "none" in cachepilot("experiment", "status", *config).stdout
    with Ledger(url) as ledger:
        for namespace, count in (("mine", 22), ("another", 1)):
            flushes = [
                AuditEvent(1_800_000_000.0 + number, "0a1b2c3d", "flush", {"where": {"tag": namespace}, "removed": number})
                for number in range(count)
            ]
            ledger.record_audit(namespace, [(f"{number}-0", item) for number, item in enumerate(flushes, start=1)])
    told = json.loads(cachepilot("experiment", "status", "--json", *config).stdout)
    assert told["experiments"] == []
    assert (len(told["changes"]), told["earlier_changes"]) == (20, 2)
    assert told["changes"][-1]["at"] == 1_800_000_021.0
    assert "0a1b2c3d" in told["changes"][-1]["message"]
    shown = cachepilot("experiment", "status", *config).stdout
    assert "changed by operators (the latest 20, and 2 earlier ones):" in shown
    assert shown.count("0a1b2c3d") == 20


@pytest.mark.parametrize("words", [("status",), ("status", "first"), ("stop", "first"), ("report", "first")])
def test_a_command_that_needs_a_ledger_makes_none_and_says_what_does(
    cachepilot: Cachepilot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cachepilot("experiment", *words, environ={"CACHEPILOT_GATEWAY__ACCESS_LOG": str(tmp_path / "access")})
    failed(result, 1, "ledger sqlite:///cachepilot.db: there is none yet", "`cachepilot experiment start` or `cachepilot tune`")
    assert not list(tmp_path.iterdir())


def test_a_key_where_its_hash_belongs_is_not_shown_and_the_way_to_the_hash_is(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("gateway: {auth: {tenants: {acme: [my-own-key]}, admin: operator-key}}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(config)
    told = str(caught.value)
    assert "sha256sum" in told
    assert "my-own-key" not in told
    assert "operator-key" not in told


def test_an_access_log_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/nope")):
        with pytest.raises(CommandError, match=r"gateway.access_log = .*expected a folder that can be written"):
            check_access_log(folder)
    check_access_log(tmp_path / "new")
    check_access_log(None)


class _Answers(BaseHTTPRequestHandler):
    """Answers whatever it is asked."""

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_replay_to_where_nothing_answers_says_so_alone(cachepilot: Cachepilot, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: refused
        result = cachepilot("replay", str(path), "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    failed(result, 1, "nothing answers at")
    assert "sending" not in result.stderr


def test_one_request_is_replayed_at_no_rate(cachepilot: Cachepilot, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n')
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = cachepilot("replay", str(path), "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "sending 2 requests in 0 s" in result.stderr
    assert "a second" not in result.stderr
