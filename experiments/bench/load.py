"""Closed-loop HTTP load: one request body, a fixed number of connections, for a fixed time."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

_WRK = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local file = io.open("{body}", "rb")
wrk.body = file:read("*a")
file:close()
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {{"requests": %.0f, "seconds": %.6f, "p50": %.9f, "p99": %.9f, "failed": %.0f}}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""


@dataclass(frozen=True)
class Load:
    """What a load generator saw.

    Attributes:
        requests: Requests answered.
        seconds: How long it ran.
        p50: Median latency, seconds.
        p99: 99th percentile of latency, seconds.
        failed: Errors of connections, timeouts, and answers that were not 2xx.
    """

    requests: int
    seconds: float
    p50: float
    p99: float
    failed: int

    @property
    def rate(self) -> float:
        """Answered requests per second."""
        return self.requests / self.seconds


def generator() -> str:
    """Return the load generator that :func:`drive` uses here: ``wrk`` if it is on PATH, else ``aiohttp``."""
    return "wrk" if shutil.which("wrk") else "aiohttp"


def drive(url: str, body: bytes, *, seconds: float, connections: int) -> Load:
    """Send the same POST over and over.

    Args:
        url: Where to.
        body: The JSON body.
        seconds: For how long (whole seconds with wrk, at least 1).
        connections: How many at the same time.
    """
    if generator() == "wrk":
        return _wrk(url, body, seconds, connections)
    return asyncio.run(_aiohttp(url, body, seconds, connections))


def _wrk(url: str, body: bytes, seconds: float, connections: int) -> Load:
    with tempfile.TemporaryDirectory(prefix="cp-wrk-") as directory:
        stored, script = Path(directory, "body"), Path(directory, "post.lua")
        stored.write_bytes(body)
        script.write_text(_WRK.format(body=stored), encoding="utf-8")
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s", "-s", str(script), url]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in printed.splitlines() if line.startswith("RESULT "))
    return Load(**{name: int(v) if name in ("requests", "failed") else v for name, v in json.loads(line[7:]).items()})


async def _aiohttp(url: str, body: bytes, seconds: float, connections: int) -> Load:
    latencies: list[float] = []
    failed = 0
    began = time.perf_counter()

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal failed
        while time.perf_counter() - began < seconds:
            sent = time.perf_counter()
            try:
                async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
                    await answer.read()
                    failed += answer.status >= 300
            except aiohttp.ClientError:
                failed += 1
            else:
                latencies.append(time.perf_counter() - sent)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as session:
        await asyncio.gather(*(client(session) for _ in range(connections)))
    p50, p99 = np.quantile(latencies, [0.5, 0.99]) if latencies else (float("nan"), float("nan"))
    return Load(len(latencies), time.perf_counter() - began, float(p50), float(p99), failed)
