"""Two gateways on one machine, each on a Ray of its own: neither answers for the other, not even while it starts."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import time
import urllib.request
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from serving.app import start
from serving.ports import free_port
from serving.settings import GatewaySettings
from tests.e2e.stack import Stack

pytestmark = pytest.mark.e2e


def _replica(url: str) -> str | None:
    """The replica that answers there, if one does."""
    with suppress(OSError, http.client.HTTPException), urllib.request.urlopen(f"{url}/readyz", timeout=5.0) as answer:
        return str(json.load(answer)["replica"])
    return None


def _replicas(url: str, count: int) -> set[str]:
    """The replicas that answer there; there are that many."""
    seen: set[str] = set()
    end = time.monotonic() + 60.0
    while len(seen) < count and time.monotonic() < end:
        seen |= {replica} if (replica := _replica(url)) else set()
    return seen


def _start_another(port: int) -> set[str]:
    """Start a gateway, with nothing behind it, and end it; returns its replicas."""
    values: dict[str, Any] = {"port": port, "metrics_port": 0, "upstream": {"base_url": "http://127.0.0.1:9/v1"}}
    with start(GatewaySettings.model_validate(values), deadline=120.0) as running:
        return _replicas(running.url, running.replicas)


def test_a_gateway_that_starts_beside_another_is_never_answered_for_by_it(stack: Stack) -> None:
    others = _replicas(stack.gateway.url, stack.gateway.replicas)
    port = free_port()
    answered: set[str] = set()
    # In a process of its own: this one has a Ray already.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        starting: Future[set[str]] = pool.submit(_start_another, port)
        while not starting.done():
            answered |= {replica} if (replica := _replica(f"http://127.0.0.1:{port}")) else set()
        own = starting.result()
    assert len(others) == 2
    assert len(own) == 1
    assert answered <= own
    assert own.isdisjoint(others)
