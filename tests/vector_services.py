"""Real vector services for tests, on loopback, with their data in a temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.ports import free_port
from tests.requirements import module


@contextmanager
def chroma_server(folder: Path) -> Iterator[str]:
    """A Chroma server of our own; gives its URL."""
    module("chromadb")
    program = Path(sys.executable).parent / "chroma"
    command = str(program) if program.is_file() else shutil.which("chroma") or "chroma"
    port = free_port()
    arguments = [command, "run", "--path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "ANONYMIZED_TELEMETRY": "False"}
    )
    try:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                assert server.poll() is None, f"chroma ended with {server.returncode}"
                assert time.monotonic() < deadline, "chroma did not listen within 60 s"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=20.0)


@contextmanager
def silent_server() -> Iterator[int]:
    """A server that accepts connections and never says a word; gives its port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield int(server.getsockname()[1])
