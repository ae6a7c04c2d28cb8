"""Exact hits over HTTP: our gateway (Ray Serve, HAProxy) beside the litellm proxy, same model, same load, taking turns."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.bench.load import Load, drive, generator
from experiments.bench.result import BenchResult
from experiments.bench.systems import CACHEPILOT, LITELLM, LITELLM_EXECUTABLE, cachepilot, litellm_proxy, model_calls, warm
from serving.llm_sim import LlmSimProcess
from serving.settings import LlmSimSettings

GOAL = 5.0
"""How many times litellm's requests/s an exact hit should reach."""

_QUESTION = {"model": "llm-sim", "messages": [{"role": "user", "content": "What makes a cache hit exact?"}]}
_BODY = json.dumps(_QUESTION).encode()


def run(
    seconds: float = 12.0,
    litellm: Path | None = LITELLM_EXECUTABLE,
    *,
    connections: int = 8,
    rounds: int = 3,
    say: Callable[[str], None] = lambda text: None,
) -> BenchResult:
    """Measure requests/s and latency of exact hits.

    Args:
        seconds: Measured time of each system, over all rounds.
        litellm: The proxy's executable (``scripts/install-peers.sh`` makes it); None, or none there, measures ours alone.
        connections: Connections of the load generator.
        rounds: How often the systems take turns; a rate is the median over the rounds.
        say: Told what happens.

    Raises:
        RuntimeError: If a system did not start, or what was measured were not hits.
    """
    peer = litellm if litellm is not None and litellm.is_file() else None
    turn = max(1.0, seconds / rounds)
    loads: dict[str, list[Load]] = {}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(LlmSimProcess(LlmSimSettings(port=0)))
        say("starting the gateway on Ray Serve")
        systems = {CACHEPILOT: stack.enter_context(cachepilot(model.base_url))}
        if peer is not None:
            say("starting the litellm proxy")
            systems[LITELLM] = stack.enter_context(litellm_proxy(peer, model.base_url))
        for name, url in systems.items():
            warm(name, url, _BODY)
        asked = dict.fromkeys(systems, 0)
        for number in range(rounds):
            for name, url in systems.items():
                say(f"round {number + 1} of {rounds}: {name}")
                before = model_calls(model.metrics_url)
                loads.setdefault(name, []).append(drive(url, _BODY, seconds=turn, connections=connections))
                asked[name] += model_calls(model.metrics_url) - before
        if asked[CACHEPILOT]:
            raise RuntimeError(f"http bench: expected exact hits only, but the model was asked {asked[CACHEPILOT]} times")
    rows = [{**_row(name, measured), "model calls": asked[name]} for name, measured in loads.items()]
    rates = {name: statistics.median(load.rate for load in measured) for name, measured in loads.items()}
    note = f"{generator()}, {connections} connections, {rounds} rounds of {turn:g} s each in turn; one replica, one worker."
    note += f" Goal: a ratio of {GOAL:g}."
    if peer is None:
        note += f" litellm was not measured: no executable at {litellm}; run scripts/install-peers.sh."
    return BenchResult(
        "http",
        rows,
        rates[CACHEPILOT] / rates[LITELLM] if LITELLM in rates else None,
        f"cachepilot bench http --seconds {seconds:g}",
        note,
    )


def _row(system: str, loads: list[Load]) -> dict[str, Any]:
    return {
        "system": system,
        "requests/s": round(statistics.median(load.rate for load in loads), 1),
        "p50 ms": round(1000 * statistics.median(load.p50 for load in loads), 3),
        "p99 ms": round(1000 * statistics.median(load.p99 for load in loads), 3),
        "failed": sum(load.failed for load in loads),
    }
