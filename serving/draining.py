"""The end of a gateway behind HAProxy: it takes no more requests, and those under way get their answers."""

from __future__ import annotations

import contextlib
import csv
import io
import signal
import socket
import threading
import time
from pathlib import Path

import psutil

FRONTEND = "http_frontend"
"""What Ray Serve calls the part of HAProxy that takes requests."""

CONFIGURATION = "haproxy.cfg"
"""What Ray Serve is told to call HAProxy's configuration."""

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 2.0


def drain(admin: Path, port: int, seconds: float, hurry: threading.Event) -> int:
    """Stop listening, and wait until no request is under way.

    Clients that come find the port closed, as if the gateway had ended already; connections that are kept alive are closed after
    the answer under way.

    Args:
        admin: HAProxy's socket for administration, of level ``admin``, in the folder of its configuration.
        port: Where it listens for clients.
        seconds: How long to wait at most.
        hurry: Ends the waiting.

    Returns:
        How many requests are still under way.

    Raises:
        OSError: If HAProxy does not answer.
    """
    deadline, closed = time.monotonic() + seconds, ""
    while True:
        worker = _worker(_ask(admin, "show info"))
        if worker != closed:  # the first, or one that has taken its place since
            _ask(admin, f"disable frontend {FRONTEND}")  # else the port would stay open for a successor, and who came would hang
            _ask(admin, f"shutdown frontend {FRONTEND}")  # which closes connections after their answers as well
            closed = worker
        left = under_way(_ask(admin, "show stat")) + _at_former_workers(admin.parent / CONFIGURATION, worker, port)
        if not left or time.monotonic() >= deadline or hurry.wait(_POLL_SECONDS):
            return left


def under_way(statistics: str) -> int:
    """Return the number of requests under way, over all backends, from what HAProxy answers to ``show stat``.

    Raises:
        OSError: If that is something else.
    """
    rows = csv.DictReader(io.StringIO(statistics.removeprefix("# ")))
    if not {"pxname", "svname", "scur"} <= set(rows.fieldnames or ()):
        raise OSError(f"HAProxy: show stat: expected a table with pxname, svname and scur, got {statistics[:80]!r}")
    backends = [row for row in rows if row["svname"] == "BACKEND" and row["pxname"].startswith("http-")]
    try:
        return sum(int(row["scur"]) for row in backends)
    except ValueError as error:
        raise OSError(f"HAProxy: show stat: scur: expected numbers, but {error}") from error


def _worker(information: str) -> str:
    """The process id, of what HAProxy answers to ``show info``."""
    for line in information.splitlines():
        name, _, value = line.partition(": ")
        if name == "Pid":
            return value.strip()
    raise OSError(f"HAProxy: show info: expected a line with Pid, got {information[:80]!r}")


def _at_former_workers(configuration: Path, worker: str, port: int) -> int:
    """How many requests are under way at processes whose place another has taken.

    Whenever its configuration changes, as where a replica starts, Ray puts another process in HAProxy's place. The one before it
    ends once its requests have their answers; it has closed its idle connections, and nothing tells of those that are left.
    """
    count = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(process.pid) != worker and str(configuration) in process.cmdline():
                process.send_signal(signal.SIGUSR1)  # it may not have heard of its successor, and listen beside that
                connections = process.net_connections("tcp")
                count += sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in connections)
    return count


def _ask(admin: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(str(admin))
        connection.sendall(command.encode() + b"\n")
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return answer.decode()
