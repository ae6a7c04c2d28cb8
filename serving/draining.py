"""The end of a gateway behind HAProxy: it takes no more requests, and those under way get their answers."""

from __future__ import annotations

import csv
import io
import socket
import threading
import time
from pathlib import Path

FRONTEND = "http_frontend"
"""What Ray Serve calls the part of HAProxy that takes requests."""

_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 2.0


def drain(admin: Path, seconds: float, hurry: threading.Event) -> int:
    """Stop listening, and wait until no request is under way.

    Clients that come find the port closed, as if the gateway had ended already; connections that are kept alive are closed after
    the answer under way.

    Args:
        admin: HAProxy's socket for administration, of level ``admin``.
        seconds: How long to wait at most.
        hurry: Ends the waiting.

    Returns:
        How many requests are still under way.

    Raises:
        OSError: If HAProxy does not answer.
    """
    deadline = time.monotonic() + seconds
    _ask(admin, f"disable frontend {FRONTEND}")  # else the port would stay open for a successor, and who came would hang
    _ask(admin, f"shutdown frontend {FRONTEND}")  # which closes connections after their answers as well
    while (left := under_way(_ask(admin, "show stat"))) and time.monotonic() < deadline and not hurry.wait(_POLL_SECONDS):
        pass
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


def _ask(admin: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(str(admin))
        connection.sendall(command.encode() + b"\n")
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return answer.decode()
