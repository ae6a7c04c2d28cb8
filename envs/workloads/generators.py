"""The base of every made workload: sessions with Zipf popularity that drifts, load by the hour, hot sets that are swapped.

What is laid over such a stream is in :mod:`envs.workloads.patterns`, whole workloads by name in :mod:`envs.workloads.catalogue`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from envs.workloads.entry import entry_bytes, prompt_tokens, text_key
from envs.workloads.errors import require
from envs.workloads.trace import Trace
from serving.keys import mix64_array

DAY = 86_400.0

MOST = 100_000_000
"""More requests or keys than a machine's memory holds are refused before they are drawn."""

LONGEST = 1e11
"""Seconds of the longest workload, some 3,000 years: beyond it a clock in seconds no longer tells milliseconds apart."""

_TOPICS = (
    "password", "invoice", "delivery", "refund", "subscription", "account", "card", "order", "voucher", "contract",
    "address", "appointment", "warranty", "router", "ticket", "transfer", "balance", "receipt", "profile", "booking",
)  # fmt: skip
_ACTIONS = (
    "change", "cancel", "find", "renew", "check", "share", "delete", "confirm", "correct", "download", "track", "pause",
)  # fmt: skip
_WAYS = (
    "How do I {action} my {topic} number {number}?",
    "How can I {action} my {topic} number {number}?",
    "What do I have to do to {action} my {topic} number {number}?",
    "I want to {action} my {topic} number {number}, how do I do that?",
)


def zipf_ranks(random: np.random.Generator, count: int, alpha: float, draws: int) -> npt.NDArray[np.int64]:
    """Draw ranks 0..count-1 with probability proportional to ``1 / (rank + 1) ** alpha``, shape (draws,)."""
    cumulative = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -alpha)
    ranks = np.searchsorted(cumulative, random.random(draws) * cumulative[-1], side="right")
    drawn: npt.NDArray[np.int64] = np.minimum(ranks, count - 1)
    return drawn


def answer_tokens(uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return completion tokens for uniform numbers 0..1: a Pareto tail from 120 tokens, mean about 200, at most 2,048."""
    tokens: npt.NDArray[np.int64] = np.clip(np.round(120.0 * (1.0 - uniform) ** -0.4), 16, 2048).astype(np.int64)
    return tokens


def question_tokens(uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    """Return prompt tokens for uniform numbers 0..1: a Pareto tail from 200 tokens, mean about 330, at most 4,096."""
    tokens: npt.NDArray[np.int32] = np.clip(np.round(200.0 * (1.0 - uniform) ** -0.4), 16, 4096).astype(np.int32)
    return tokens


def sessions(
    n_requests: int,
    n_keys: int,
    *,
    alpha: float = 0.9,
    drift: float = 0.5,
    duration: float = 3600.0,
    diurnal: float = 0.5,
    day: float | None = None,
    hot_swaps: Sequence[float] = (),
    repeat: float = 0.1,
    session_length: float = 4.0,
    think_time: float = 20.0,
    text: bool = False,
    seed: int = 0,
) -> Trace:
    """Make a workload of user sessions.

    Sessions start by a Poisson process whose rate follows the hour; each asks a few things, mostly what is popular, sometimes the
    same again. Equal arguments give equal traces.

    Args:
        n_requests: Requests.
        n_keys: Meanings that are asked for at any one time.
        alpha: Zipf exponent of their popularity, >= 0.
        drift: How often each popular place is taken by a new key over the whole trace, on average.
        duration: Length, seconds.
        diurnal: Amplitude of the load's daily swing, 0..1.
        day: Length of the swing's period, seconds; None for one day, or for the whole of a shorter trace.
        hot_swaps: Times, seconds, at which popularity is dealt anew among the keys.
        repeat: Probability that a request asks the same as the one before it in its session, 0..1.
        session_length: Requests per session on average, >= 1.
        think_time: Seconds between two requests of a session on average.
        text: Whether requests have texts, of which up to four mean the same: a semantic trace, whose groups are those meanings.
        seed: Of everything random.

    Raises:
        ValueError: If an argument is out of its range.
    """
    require(
        "sessions",
        ("n_requests", n_requests, f"from 1 to {MOST:,}", 1 <= n_requests <= MOST),
        ("n_keys", n_keys, f"from 1 to {MOST:,}", 1 <= n_keys <= MOST),
        ("alpha", alpha, "a finite number >= 0", 0 <= alpha < math.inf),
        ("drift", drift, "a finite number >= 0", 0 <= drift < math.inf),
        ("duration", duration, f"seconds > 0, at most {LONGEST:g}", 0 < duration <= LONGEST),
        ("diurnal", diurnal, "a share between 0 and 1", 0 <= diurnal <= 1),
        ("day", day, "finite seconds > 0, or None", day is None or 0 < day < math.inf),
        ("repeat", repeat, "a probability from 0 to below 1", 0 <= repeat < 1),
        ("session_length", session_length, "a finite number >= 1", 1 <= session_length < math.inf),
        ("think_time", think_time, "finite seconds >= 0", 0 <= think_time < math.inf),
    )
    random = np.random.default_rng(seed)
    time, session = _arrivals(
        random, n_requests, duration, diurnal, min(duration, DAY) if day is None else day, session_length, think_time
    )
    slot = zipf_ranks(random, n_keys, alpha, n_requests)
    deals = np.sort(np.asarray(hot_swaps, dtype=np.float64))
    dealt = np.stack([random.permutation(n_keys) for _ in range(len(deals) + 1)])
    slot = dealt[np.searchsorted(deals, time, side="right"), slot]
    # Each place is renewed ``drift`` times over the trace, at its own moments.
    renewed = np.floor(drift * time / duration + random.random(n_keys)[slot]).astype(np.int64)
    meaning = renewed * n_keys + slot
    way = zipf_ranks(random, len(_WAYS), 1.0, n_requests) if text else np.zeros(n_requests, np.int64)
    again = random.random(n_requests) < repeat
    meaning, way = _repeat(session, again, meaning, way)

    names, place = np.unique(meaning * len(_WAYS) + way, return_inverse=True)
    answers = names // len(_WAYS)
    # One meaning has one answer, however it is asked: its length is a function of the meaning and the seed.
    tokens = answer_tokens(mix64_array(answers.astype(np.uint64) ^ np.uint64(seed & 0xFFFFFFFF)) / 2.0**64)
    if text:
        prompts = [_ask(int(name)) for name in names]
        keys = np.array([text_key(prompt) for prompt in prompts], np.uint64)
        asked = prompt_tokens(prompts)
    else:
        prompts = []
        keys = mix64_array(names.astype(np.uint64) * np.uint64(0x1_0001) + np.uint64(seed & 0xFFFFFFFF))
        asked = question_tokens(mix64_array(keys) / 2.0**64)
    return Trace(
        name=f"sessions-{seed}",
        time=time,
        key=keys[place],
        size=entry_bytes(tokens, text)[place],
        group=meaning if text else np.full(n_requests, -1, np.int64),
        input_tokens=asked[place],
        output_tokens=tokens[place].astype(np.int32),
        prompts=prompts,
        prompt_id=place.astype(np.int64) if text else np.full(n_requests, -1, np.int64),
        kind="semantic" if text else "exact",
        note="Made by a generator (sessions, Zipf popularity with drift"
        + (", up to four wordings per meaning; a group is a meaning" if text else "")
        + "): not a real workload.",
    )


def _arrivals(
    random: np.random.Generator, count: int, duration: float, diurnal: float, day: float, length: float, think: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return arrival times, ascending within 0..duration, and the session that each belongs to."""
    lengths = random.geometric(1.0 / length, size=count)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), count)) + 1]
    session = np.repeat(np.arange(len(lengths)), lengths)[:count]
    grid = np.linspace(0.0, duration, 2049)
    swing = day / (2.0 * math.pi)
    # Integral of 1 + diurnal * sin(2 pi t / day - pi / 2): the day begins at its quietest hour.
    load = grid + diurnal * swing * -np.sin(2.0 * math.pi * grid / day)
    starts = np.interp(random.random(len(lengths)) * load[-1], load, grid)
    gaps = random.exponential(1.0, size=count) * think
    first = np.r_[True, session[1:] != session[:-1]]
    gaps[first] = 0.0
    since = np.cumsum(gaps)
    time = starts[session] + since - since[first][session]
    # What would come after the end comes at the same distance from the start: the load stays as it was asked for.
    time = np.mod(time, duration)
    order = np.argsort(time, kind="stable")
    return time[order], session[order]


def _repeat(
    session: npt.NDArray[np.int64], again: npt.NDArray[np.bool_], meaning: npt.NDArray[np.int64], way: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Let marked requests ask the same as the one before them in their session."""
    order = np.argsort(session, kind="stable")
    inside = np.r_[False, session[order][1:] == session[order][:-1]]
    copies = again[order] & inside
    source = np.maximum.accumulate(np.where(copies, 0, np.arange(len(order))))
    repeated = np.empty_like(order)
    repeated[order] = order[source]
    return meaning[repeated], way[repeated]


def _ask(name: int) -> str:
    meaning, way = divmod(name, len(_WAYS))
    topic, rest = meaning % len(_TOPICS), meaning // len(_TOPICS)
    action, number = rest % len(_ACTIONS), rest // len(_ACTIONS)
    return _WAYS[way].format(action=_ACTIONS[action], topic=_TOPICS[topic], number=number + 1)
