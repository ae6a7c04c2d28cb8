"""A gateway that does not start says why, and one that runs keeps no port from others that only one process can have."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.app import GatewayNotStarted, start
from serving.settings import GatewaySettings

pytestmark = pytest.mark.e2e
AGENT_PORT = 52365
"""Of Ray's agent, by default: that of the machine's own cluster has to have it, or no job can be submitted there."""


def settings(**rules: Any) -> GatewaySettings:
    values = {"port": 0, "metrics_port": 0, "upstream": {"base_url": "http://127.0.0.1:9/v1"}, "memory": {"shared": False}}
    return GatewaySettings.model_validate({**values, "rules": rules})


def refused(packages: str) -> str:
    """What is said where the vector store's package cannot be imported."""
    os.environ["PYTHONPATH"] = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        with start(settings(semantic={"enabled": True, "vectors": {"kind": "faiss"}}), deadline=120.0):
            return "it runs"
    except GatewayNotStarted as error:
        return str(error)


def ports() -> set[int]:
    """The ports on which the processes of a gateway that runs listen."""
    with start(settings(), deadline=120.0):
        family = psutil.Process().children(recursive=True)
        return {each.laddr.port for child in family for each in child.net_connections("inet") if each.status == "LISTEN"}


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


def test_the_agents_port_is_left_to_a_cluster_that_takes_jobs() -> None:
    found = apart(ports)
    assert len(found) > 5
    assert AGENT_PORT not in found
