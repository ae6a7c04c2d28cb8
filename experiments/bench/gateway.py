"""What the gateway costs and saves over HTTP, beside the litellm proxy and the bare model: the issue's numbers in one table.

Everything runs on the real gateway (Ray Serve, HAProxy, Redis) in front of the simulated model. Who is compared takes turns,
question by question or round by round within one run: what else the machine does falls on all alike.

The time of a semantic hit without its embedding is measured in process by :mod:`experiments.bench.semantic_lookup`; here is the
whole of it, HTTP and embedding included.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.bench.forwarding import forwarding
from experiments.bench.load import Load, drive, generator
from experiments.bench.probe import Connection, Reply, burst
from experiments.bench.result import BenchResult
from experiments.bench.systems import CACHEPILOT, LITELLM, LITELLM_EXECUTABLE, cachepilot, litellm_proxy, model_calls, warm
from serving import sse
from serving.llm_sim import LlmSimProcess
from serving.settings import LlmSimSettings

GOAL_RATE, GOAL_P50 = 10.0, 0.2
"""Exact hits: times litellm's requests/s, and share of its P50."""

GOAL_MISS, GOAL_FIRST = 0.003, 0.005
"""Seconds that a miss may add to the model's own time, and to the first byte of a replayed stream."""

MODEL = "model"
IDENTICAL = 20
"""Concurrent identical misses."""

OUTPUT_TOKENS = 31
"""So long that a stream has 34 events: the role, the tokens, the finish reason and ``[DONE]``."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        seconds: Measured time of each system's exact hits, over all rounds.
        connections: Connections of the load generator.
        rounds: How often the systems take turns at exact hits.
        misses: Questions that nobody has asked before; the same for all systems.
        replays: Times that one stream is replayed.
        bursts: Times that identical misses arrive at once.
        meanings: Pairs of questions that mean the same; 0 leaves answers by meaning out.
    """

    seconds: float = 12.0
    connections: int = 8
    rounds: int = 3
    misses: int = 100
    replays: int = 100
    bursts: int = 5
    meanings: int = 100


def run(scale: Scale | None = None, litellm: Path | None = LITELLM_EXECUTABLE, *, say: Say = lambda text: None) -> BenchResult:
    """Measure exact hits, misses, replayed streams, identical misses and hits by meaning.

    Args:
        scale: How much is measured; None for the default.
        litellm: The proxy's executable (``scripts/install-peers.sh`` makes it); None, or none there, measures ours alone.
        say: Told what happens.

    Returns:
        Rows with ``what``, ``unit``, the value of each system, ``ratio`` (us over litellm), ``goal`` and ``met``; a goal that
        needs a system which did not run has no ``met``. The ratio is that of the requests/s of exact hits.

    Raises:
        RuntimeError: If a system did not start, or did not answer as what is measured has to be answered.
    """
    scale = scale if scale is not None else Scale()
    peer = litellm if litellm is not None and litellm.is_file() else None
    sim = LlmSimSettings(
        port=0, slots=64, ttft=0.05, tpot=0.001, contention=0.0, min_output_tokens=OUTPUT_TOKENS, max_output_tokens=OUTPUT_TOKENS
    )
    load = [os.getloadavg()[0]]
    rows: list[dict[str, Any]] = []
    with LlmSimProcess(sim) as model, contextlib.ExitStack() as stack:
        say("starting the gateway on Ray Serve")
        urls = {CACHEPILOT: stack.enter_context(cachepilot(model.base_url))}
        if peer is not None:
            say("starting the litellm proxy")
            urls[LITELLM] = stack.enter_context(litellm_proxy(peer, model.base_url))
        bare = f"{model.base_url}/chat/completions"
        say("exact hits")
        rows += _exact_hits(urls, scale, model.metrics_url)
        with _connected({MODEL: bare, **urls}) as systems:
            say("misses")
            rows += _misses(systems, scale.misses)
            say("replayed streams")
            rows += _replays(systems, scale.replays, model.metrics_url)
        say(f"{IDENTICAL} identical misses at once")
        rows += _identical(urls, scale.bursts, model.metrics_url)
        load.append(os.getloadavg()[0])
    note = (
        f"{generator()}, {scale.connections} connections and {scale.rounds} rounds for exact hits; everything else one question "
        f"at a time ({scale.misses} misses, {scale.replays} replays, {scale.bursts} bursts), the systems in turn. One replica, "
        "one worker; ours keeps answers in memory and Redis, litellm in memory alone. Added: median of the differences to the "
        "model asked the same directly. "
    )
    say("misses that are forwarded and nothing else")
    with LlmSimProcess(sim) as model, forwarding(model.base_url) as url:
        bare = f"{model.base_url}/chat/completions"
        with _connected({MODEL: bare, CACHEPILOT: url}) as systems:
            rows.append(_forwarded(systems, scale.misses))
    load.append(os.getloadavg()[0])
    if scale.meanings:
        with LlmSimProcess(sim) as model, _semantic(model.base_url, say) as url:
            bare = f"{model.base_url}/chat/completions"
            with _connected({MODEL: bare, CACHEPILOT: url}) as systems:
                say("hits by meaning")
                found, said = _meanings(systems, scale.meanings)
                rows += found
                note += said
        load.append(os.getloadavg()[0])
    note += "The lookup by meaning alone, at 100,000 entries: cachepilot bench semantic-lookup. "
    note += f"Load average of the machine ({os.cpu_count()} CPUs): {', '.join(f'{value:.1f}' for value in load)}."
    if peer is None:
        note += f" litellm was not measured: no executable at {litellm}; run scripts/install-peers.sh."
    ratio = rows[0]["ratio"]
    return BenchResult("gateway", rows, ratio, f"cachepilot bench gateway --seconds {scale.seconds:g}", note)


# -- what is measured ------------------------------------------------------------------------------------------------------------


def _exact_hits(urls: Mapping[str, str], scale: Scale, metrics_url: str) -> list[dict[str, Any]]:
    body = question("What makes a cache hit exact?")
    for name, url in urls.items():
        warm(name, url, body)
    turn = max(1.0, scale.seconds / scale.rounds)
    loads: dict[str, list[Load]] = {name: [] for name in urls}
    for number in range(-1, scale.rounds):  # the first is to warm up
        for name in _turned(urls, number):
            before = model_calls(metrics_url)
            loads[name].append(drive(urls[name], body, seconds=turn if number >= 0 else 1.0, connections=scale.connections))
            asked = model_calls(metrics_url) - before
            if name == CACHEPILOT and (asked or loads[name][-1].failed):
                raise RuntimeError(
                    f"bench gateway: expected exact hits only, got {asked} misses and {loads[name][-1].failed} failures"
                )
    kept = {name: measured[1:] for name, measured in loads.items()}
    rate = {name: statistics.median(load.rate for load in measured) for name, measured in kept.items()}
    p50 = {name: 1e3 * statistics.median(load.p50 for load in measured) for name, measured in kept.items()}
    p99 = {name: 1e3 * statistics.median(load.p99 for load in measured) for name, measured in kept.items()}
    return [
        row("exact hits", "requests/s", rate, f">= {GOAL_RATE:g} x litellm", lambda ratio: ratio >= GOAL_RATE),
        row("exact hit, P50", "ms", p50, f"<= {GOAL_P50:g} x litellm", lambda ratio: ratio <= GOAL_P50),
        row("exact hit, P99", "ms", p99),
    ]


def _misses(systems: Mapping[str, Connection], count: int) -> list[dict[str, Any]]:
    for stream in (False, True):  # connections to the model are opened before anything is timed
        _ask_all(systems, question("Is anybody there?", stream=stream), 0)
    rows = []
    for stream in (False, True):
        times: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(count):
            asked = f"What has nobody asked before, {'streamed' if stream else 'whole'}, number {number}?"
            body = question(asked, stream=stream)
            for name, reply in _ask_all(systems, body, number).items():
                times[name].append(1e3 * (reply.first if stream else reply.total))
                if name == CACHEPILOT and reply.headers.get("x-cache") != "MISS":
                    raise RuntimeError(f"bench gateway: expected a miss, got {reply.headers.get('x-cache')}")
        what = "streamed miss, first byte" if stream else "miss"
        rows.append(row(f"{what}, P50", "ms", {name: statistics.median(values) for name, values in times.items()}))
        goal = f"< {1e3 * GOAL_MISS:g} ms"
        rows.append(row(f"{what}, added P50", "ms", _added(times), goal, met=_added(times)[CACHEPILOT] < 1e3 * GOAL_MISS))
    return rows


def _forwarded(systems: Mapping[str, Connection], count: int) -> dict[str, Any]:
    """What is left of a miss where nothing is looked up, kept or counted: Ray Serve, HAProxy and the way to the model."""
    _ask_all(systems, question("Is anybody there?"), 0)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(count):
        for name, reply in _ask_all(systems, question(f"What is only passed on, number {number}?"), number).items():
            times[name].append(1e3 * reply.total)
    return row("forwarded by Ray Serve and nothing else, added P50", "ms", _added(times))


def _replays(systems: Mapping[str, Connection], count: int, metrics_url: str) -> list[dict[str, Any]]:
    body = question("Which words follow each other?", stream=True)
    original = systems[MODEL].ask(body).body
    replaying = {name: connection for name, connection in systems.items() if name != MODEL}
    for name, connection in replaying.items():
        _keep(name, connection, body, metrics_url)
    before = model_calls(metrics_url)
    replies: dict[str, list[Reply]] = {name: [] for name in replaying}
    for number in range(count):
        for name, reply in _ask_all(replaying, body, number).items():
            replies[name].append(reply)
    if model_calls(metrics_url) != before:
        raise RuntimeError("bench gateway: replays: expected the model not to be asked")
    events: dict[str, float] = {name: max(sse.count(reply.body) for reply in given) for name, given in replies.items()}
    same = all(reply.body == original for reply in replies[CACHEPILOT])
    first = {name: 1e3 * statistics.median(reply.first for reply in given) for name, given in replies.items()}
    total = {name: 1e3 * statistics.median(reply.total for reply in given) for name, given in replies.items()}
    return [
        row("replayed stream", "events", {MODEL: sse.count(original), **events}, "the model's bytes", met=same),
        row("replayed stream, first byte P50", "ms", first, f"< {1e3 * GOAL_FIRST:g} ms",
            met=first[CACHEPILOT] < 1e3 * GOAL_FIRST),
        row("replayed stream, last byte P50", "ms", total),
    ]  # fmt: skip


def _keep(name: str, connection: Connection, body: bytes, metrics_url: str) -> None:
    """Ask until the model is not asked any more: litellm keeps a stream some time after its end."""
    for _ in range(20):
        before = model_calls(metrics_url)
        connection.ask(body)
        if model_calls(metrics_url) == before:
            return
    raise RuntimeError(f"bench gateway: expected {name} to replay a stream that it had been asked for 20 times")


def _identical(urls: Mapping[str, str], count: int, metrics_url: str) -> list[dict[str, Any]]:
    calls: dict[str, list[int]] = {name: [] for name in urls}
    for number in range(count):
        body = question(f"What do {IDENTICAL} of us want to know, number {number}?")
        for name in _turned(urls, number):
            before = model_calls(metrics_url)
            replies = burst(urls[name], body, IDENTICAL)
            calls[name].append(model_calls(metrics_url) - before)
            wrong = [status for status, _ in replies if status != 200]
            if wrong or (name == CACHEPILOT and len({answer for _, answer in replies}) != 1):
                raise RuntimeError(f"bench gateway: expected {IDENTICAL} answers alike of {name}, got status {wrong or 200}")
    means = {name: statistics.mean(values) for name, values in calls.items()}
    return [row(f"{IDENTICAL} identical misses", "model calls", means, "1", met=set(calls[CACHEPILOT]) == {1})]


def _meanings(systems: Mapping[str, Connection], count: int) -> tuple[list[dict[str, Any]], str]:
    """Each question is asked anew of the model and the gateway, then in other words of the gateway, then once more."""
    ours = systems[CACHEPILOT]
    asked, other = zip(*pairs(count), strict=True)
    _ask_all(systems, question("Is anybody there?"), 0)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number, text in enumerate(asked):
        replies = _ask_all(systems, question(text), number)
        if replies[CACHEPILOT].headers.get("x-cache") == "MISS":
            for name, reply in replies.items():
                times[name].append(1e3 * reply.total)
    semantic, exact = [], []
    for text, known in zip(other, asked, strict=True):
        reply = ours.ask(question(text))
        if reply.headers.get("x-cache") == "SEMANTIC":
            semantic.append(1e3 * reply.total)
        exact.append(1e3 * ours.ask(question(known)).total)
    if not semantic or not times[CACHEPILOT]:
        raise RuntimeError("bench gateway: expected answers by meaning, and misses before them; there were none")
    rows = [
        row("hit by meaning, embedding included, P50", "ms", {CACHEPILOT: statistics.median(semantic)}),
        row("the exact hit beside it, P50", "ms", {CACHEPILOT: statistics.median(exact)}),
        row("miss looked up by meaning, added P50", "ms", _added(times)),
    ]
    return rows, f"{len(semantic)} of {count} questions in other words were answered by meaning. "


# -- how -------------------------------------------------------------------------------------------------------------------------


def question(text: str, *, stream: bool = False) -> bytes:
    """Return the body of a chat completion.

    Args:
        text: What is asked.
        stream: Whether the answer shall be streamed.
    """
    asked: dict[str, Any] = {"model": "llm-sim", "messages": [{"role": "user", "content": text}]}
    return json.dumps({**asked, "stream": True} if stream else asked).encode()


_ACTIONS = ("reset", "find", "replace", "share", "print", "export", "check", "order", "repair", "update", "store", "measure")
_THINGS = (
    "card PIN", "phone charger", "invoice", "garden map", "train ticket", "family photo", "tax form", "kitchen recipe",
    "door key", "bank statement", "weather report", "bicycle light", "travel plan", "music library", "heating schedule",
)  # fmt: skip


def pairs(count: int) -> list[tuple[str, str]]:
    """Return so many questions, each with one that means the same; no text occurs twice.

    Args:
        count: At most 180.

    Raises:
        ValueError: If it is more.
    """
    if count > len(_ACTIONS) * len(_THINGS):
        raise ValueError(f"bench gateway: meanings: expected at most {len(_ACTIONS) * len(_THINGS)}, got {count}")
    # all things before the next action: neighbours in the list differ as much as they can
    asked = [f"{action} my {thing}?" for action in _ACTIONS for thing in _THINGS][:count]
    return [(f"How do I {rest}", f"How can I {rest}") for rest in asked]


def row(
    what: str,
    unit: str,
    values: Mapping[str, float],
    goal: str = "",
    holds: Callable[[float], bool] | None = None,
    *,
    met: bool | None = None,
) -> dict[str, Any]:
    """Return one row of the table.

    Args:
        what: What was measured.
        unit: Its unit.
        values: By system; what did not run is left out.
        goal: What is wanted, in words.
        holds: Tells from our value over litellm's whether the goal is met.
        met: Whether it is, where litellm's value does not matter.
    """
    ratio = values[CACHEPILOT] / values[LITELLM] if LITELLM in values else None
    if holds is not None and ratio is not None:
        met = holds(ratio)
    return {
        "what": what,
        "unit": unit,
        **{name: round(values[name], 3) if name in values else None for name in (MODEL, CACHEPILOT, LITELLM)},
        "ratio": ratio,
        "goal": goal,
        "met": None if met is None else "yes" if met else "no",
    }


def _added(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median, by system, of what each question took longer than the model itself."""
    return {
        name: statistics.median(ours - bare for ours, bare in zip(values, times[MODEL], strict=True))
        for name, values in times.items()
        if name != MODEL
    }


def _ask_all(systems: Mapping[str, Connection], body: bytes, number: int) -> dict[str, Reply]:
    replies = {}
    for name in _turned(systems, number):
        try:
            reply = systems[name].ask(body)
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"bench gateway: expected {name} to answer, got {type(error).__name__}: {error}") from error
        if reply.status != 200:
            raise RuntimeError(f"bench gateway: expected {name} to answer, got status {reply.status}: {reply.body[:200]!r}")
        replies[name] = reply
    return replies


def _turned(names: Iterable[str], number: int) -> list[str]:
    """The names, beginning with another one each time."""
    order = list(names)
    first = number % len(order)
    return order[first:] + order[:first]


@contextlib.contextmanager
def _connected(urls: Mapping[str, str]) -> Iterator[dict[str, Connection]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Connection(url)) for name, url in urls.items()}


@contextlib.contextmanager
def _semantic(base_url: str, say: Say) -> Iterator[str]:
    say("starting the gateway with answers by meaning")
    rules = {"semantic": {"enabled": True, "threshold": 0.85}}
    with cachepilot(base_url, rules=rules) as url:
        yield url
