"""What a replica warns of is found in its log: on Ray Serve it would be lost by itself."""

from __future__ import annotations

import json
import multiprocessing
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving.app import start
from serving.settings import GatewaySettings

pytestmark = pytest.mark.e2e


def _start(memory: str) -> tuple[str, str]:
    """Start a gateway, with nothing behind it, and end it; what it says of its memory, and what its replica has logged."""
    values: dict[str, Any] = {
        "port": 0, "metrics_port": 0, "upstream": {"base_url": "http://127.0.0.1:9/v1"}, "memory": {"path": memory},
    }  # fmt: skip
    with start(GatewaySettings.model_validate(values), deadline=120.0) as running:
        with urllib.request.urlopen(f"{running.url}/readyz", timeout=10.0) as answer:
            said = str(json.load(answer)["memory"])
        return said, "".join(log.read_text() for log in running.logs.glob("replica_*.log"))


def test_why_an_arena_cannot_be_opened_is_in_the_replicas_log(tmp_path: Path) -> None:
    planted = tmp_path / "arena"
    planted.write_bytes(b"something else" * 1000)
    planted.chmod(0o600)
    # In a process of its own: the session's may have a Ray already.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        said, logged = pool.submit(_start, str(planted)).result()
    assert said == "refused"
    assert [line for line in logged.splitlines() if "WARNING" in line and f"arena {planted}: the file is not an arena" in line]
    assert planted.read_bytes() == b"something else" * 1000
