"""Patterns that are laid over a stream of requests: each takes a trace and returns a trace. Pure; equal seeds give equal traces.

They can be laid over each other, and over a real trace as well. Two kinds: a pattern that *renames* keys changes what is popular
when, and leaves times and the number of requests as they are; a pattern that *adds* puts more requests or events on the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from envs.workloads.compose import mix
from envs.workloads.entry import entry_bytes
from envs.workloads.errors import require
from envs.workloads.generators import answer_tokens, question_tokens, zipf_ranks
from envs.workloads.trace import Trace
from serving.keys import mix64, mix64_array

_BLOCKS = 48
"""A day has this many stretches within which a key is asked for in its day or its night form, so that repeats stay repeats."""


def day_and_night(trace: Trace, *, day: float, contrast: float = 0.8, share: float = 0.7, seed: int = 0) -> Trace:
    """Let popularity follow the hour and come back: by day other keys are asked for than at night, the same ones every day.

    Imitates people who ask about their work by day, and other people and jobs at night. The traces of ServeGen (Xiang et al.,
    2025) and Azure (Stojkovic et al., HPCA'25) show the daily load; that popularity changes with the hour is our assumption.

    Args:
        trace: The base; it begins at midnight.
        day: Length of a day, seconds.
        contrast: How far the population changes, 0..1: at 1 noon knows only day keys and midnight only night keys.
        share: Share of the keys that have a day and a night form, 0..1; the others are asked for at any time.
        seed: Chooses them.

    Raises:
        ValueError: If an argument is out of range, or the trace has prefix blocks.
    """
    require(
        "day_and_night",
        ("day", day, "finite seconds > 0", 0 < day < math.inf),
        ("contrast", contrast, "a share between 0 and 1", 0 <= contrast <= 1),
        ("share", share, "a share between 0 and 1", 0 <= share <= 1),
    )
    block = np.floor(trace.time / day * _BLOCKS)
    by_day = 0.5 - 0.5 * contrast * np.cos(2.0 * math.pi * (block + 0.5) / _BLOCKS)
    drawn = _uniform(trace.key ^ mix64_array(block.astype(np.uint64)), seed)
    chosen = _uniform(trace.key, seed + 1) < share
    return _rename(trace, np.where(chosen & (drawn < by_day), 1, 0), seed)


def alternate(trace: Trace, *, period: float, sets: int = 2, share: float = 0.8, seed: int = 0) -> Trace:
    """Swap the hot set at once, again and again: A, B, A, B for two sets, A, B, C, A for three.

    Imitates work that takes turns on one gateway (the batch of one customer after that of another), the phases and transitions of
    working sets (Denning, 1980). Whoever keeps all sets gains at every swap.

    Args:
        trace: The base.
        period: Seconds between two swaps.
        sets: Number of hot sets, at least 2.
        share: Share of the keys that are swapped, 0..1; the others stay.
        seed: Chooses them.

    Raises:
        ValueError: If an argument is out of range, or the trace has prefix blocks.
    """
    require(
        "alternate",
        ("period", period, "finite seconds > 0", 0 < period < math.inf),
        ("sets", sets, "at least 2", sets >= 2),
        ("share", share, "a share between 0 and 1", 0 <= share <= 1),
    )
    turn = np.floor(trace.time / period).astype(np.int64) % sets
    return _rename(trace, np.where(_uniform(trace.key, seed) < share, turn, 0), seed)


def add_flash_crowd(
    trace: Trace, requests: int, *, start: float, half_life: float, ramp: float = 0.0, keys: int = 5, seed: int = 0
) -> Trace:
    """Add a flash crowd: a few keys that nobody asked for before take much of the traffic at once, and then fade.

    Imitates news, an outage, a link that spreads. Jung, Krishnamurthy and Rabinovich (WWW'02): the rate rises within minutes,
    most of what is asked for was not asked for before, and under a tenth of the keys take over 90 % of the requests.

    Args:
        trace: The base.
        requests: Requests of the crowd until the end of the trace.
        start: When it begins, seconds.
        half_life: Seconds in which its rate halves.
        ramp: Seconds in which its rate rises from nothing to its peak.
        keys: Number of its keys, by Zipf(1).
        seed: Of everything random.

    Raises:
        ValueError: If an argument is out of range.
    """
    require(
        "flash_crowd",
        ("requests", requests, "at least 0", requests >= 0),
        ("start", start, f"seconds within the trace (0 to {trace.duration:g})", 0 <= start <= trace.duration),
        ("half_life", half_life, "finite seconds > 0", 0 < half_life < math.inf),
        ("ramp", ramp, "finite seconds >= 0", 0 <= ramp < math.inf),
        ("keys", keys, "at least 1", keys >= 1),
    )
    random = np.random.default_rng(seed)
    since = np.linspace(0.0, trace.duration - start, 4097)
    mass = crowd_mass(since, half_life, ramp)
    time = start + np.interp(random.random(requests) * mass[-1], mass, since)
    own = _new_keys(keys, seed, "crowd")
    return mix(
        [trace, _requests(trace, np.sort(time), own[zipf_ranks(random, keys, 1.0, requests)])],
        name=trace.name,
        note=trace.note,
    )


def crowd_mass(since: npt.NDArray[np.float64], half_life: float, ramp: float) -> npt.NDArray[np.float64]:
    """Return how much of a flash crowd came within so many seconds of its start, in seconds at its peak rate; same shape.

    Args:
        since: Seconds since its start, >= 0.
        half_life: Seconds in which its rate halves after the peak.
        ramp: Seconds to the peak.
    """
    rising = np.minimum(since, ramp)
    falling = np.maximum(since - ramp, 0.0)
    fell = half_life / math.log(2.0) * (1.0 - 0.5 ** (falling / half_life))
    mass: npt.NDArray[np.float64] = (rising**2 / (2.0 * ramp) if ramp > 0 else 0.0) + fell
    return mass


def add_scan(
    trace: Trace, requests: int, *, starts: Sequence[float], length: float, again: bool = False, tenant: int = 0, seed: int = 0
) -> Trace:
    """Add scans: steady runs of keys in sequence, each asked for once.

    Imitates a crawler, an evaluation over a whole data set, a nightly batch job. The classic enemy of LRU (LRU-K, O'Neil et al.,
    SIGMOD'93; ARC, Megiddo and Modha, FAST'03): it fills the cache with what is never asked for again.

    Args:
        trace: The base.
        requests: Requests of all scans together.
        starts: When each scan begins, seconds; at least one.
        length: Seconds that a scan takes.
        again: Whether every scan asks for the same keys in the same order (the same evaluation every night), instead of new ones.
        tenant: Who scans.
        seed: Of the keys.

    Raises:
        ValueError: If an argument is out of range.
    """
    require(
        "scan",
        ("requests", requests, "at least 0", requests >= 0),
        ("starts", starts, f"at least one time, within the trace (0 to {trace.duration:g})",
         len(starts) > 0 and all(0 <= start <= trace.duration for start in starts)),
        ("length", length, "finite seconds > 0", 0 < length < math.inf),
    )  # fmt: skip
    runs = []
    for number, count in enumerate(len(part) for part in np.array_split(np.arange(requests), len(starts))):
        time = starts[number] + length * (np.arange(count) + 0.5) / max(count, 1)
        keys = _new_keys(count, seed if again else seed + number, "scan")
        runs.append(_requests(trace, np.minimum(time, trace.duration), keys, tenant=tenant))
    return mix([trace, *runs], name=trace.name, note=trace.note)


def add_releases(
    trace: Trace, times: Sequence[float], *, keys: Literal["stay", "change"] = "stay", flush: bool = True, seed: int = 0
) -> Trace:
    """Add releases of the model: at each, every answer that is cached becomes worthless, and the cache starts anew.

    Imitates the switch to a new model or prompt. A gateway that has the model's version in its keys asks for new keys from then
    on (``change``); one that has not must empty its cache (``stay``). With ``flush`` the trace says when, in ``flush_time``.

    Args:
        trace: The base.
        times: Seconds of each release.
        keys: Whether keys stay as they are or change with the release.
        flush: Whether the cache is emptied; if not, old entries stay until they are evicted or expire, which needs ``change``.
        seed: Of the keys after each release.

    Raises:
        ValueError: If a time is outside the trace, or nothing would happen.
    """
    require(
        "releases",
        ("times", times, f"seconds within the trace (0 to {trace.duration:g})",
         all(0 <= time <= trace.duration for time in times)),
        ("keys", keys, "stay or change", keys in ("stay", "change")),
        ("flush", flush, "true where keys stay: without either a release changes nothing", flush or keys == "change"),
    )  # fmt: skip
    moments = np.sort(np.asarray(times, np.float64))
    if keys == "change":
        trace = _rename(trace, np.searchsorted(moments, trace.time, side="right"), seed)
    if flush:
        trace = replace(trace, flush_time=np.sort(np.concatenate([trace.flush_time, moments])))
    return trace


def add_documents(
    trace: Trace,
    *,
    documents: int = 200,
    alpha: float = 0.8,
    updates: float = 0.5,
    storms: Sequence[float] = (),
    storm_share: float = 0.3,
    storm_length: float = 60.0,
    seed: int = 0,
) -> Trace:
    """Let answers rest on documents, and let documents change: each at moments of its own, and many at once in storms.

    Imitates answers from retrieved documents (RAG). Single pages change by Poisson processes (Cho and Garcia-Molina, VLDB'00); a
    storm is an import, a price list, a new edition of a handbook. An update makes every cached answer that rests on it stale.

    Args:
        trace: The base; documents and updates that it has are replaced. Each key rests on one document, drawn by Zipf: popular
            documents answer many questions.
        documents: Number of documents.
        alpha: Zipf exponent of the questions per document, >= 0.
        updates: Updates per document over the whole trace on average, outside the storms.
        storms: When each storm begins, seconds.
        storm_share: Share of the documents that a storm updates, 0..1.
        storm_length: Seconds that a storm takes.
        seed: Of everything random.

    Only documents that are asked for in the trace are updated: no other update can be seen.

    Raises:
        ValueError: If an argument is out of range.
    """
    require(
        "documents",
        ("documents", documents, "at least 1", documents >= 1),
        ("alpha", alpha, "a finite number >= 0", 0 <= alpha < math.inf),
        ("updates", updates, "a finite number >= 0", 0 <= updates < math.inf),
        ("storms", storms, f"seconds within the trace (0 to {trace.duration:g})",
         all(0 <= storm <= trace.duration for storm in storms)),
        ("storm_share", storm_share, "a share between 0 and 1", 0 <= storm_share <= 1),
        ("storm_length", storm_length, "finite seconds >= 0", 0 <= storm_length < math.inf),
    )  # fmt: skip
    random = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, documents + 1, dtype=np.float64) ** -alpha)
    # A document is a function of the key and the seed, however often the key is asked for.
    place = np.searchsorted(cumulative, _uniform(trace.key, seed) * cumulative[-1], side="right")
    document = np.minimum(place, documents - 1).astype(np.int64)
    asked = np.unique(document)
    steady = int(random.poisson(updates * len(asked)))
    time = [random.random(steady) * trace.duration]
    changed = [random.choice(asked, steady)]
    for storm in storms:
        hit = random.choice(asked, round(storm_share * len(asked)), replace=False)
        time.append(np.minimum(storm + random.random(len(hit)) * storm_length, trace.duration))
        changed.append(hit)
    moments = np.concatenate(time)
    order = np.argsort(moments, kind="stable")
    return replace(
        trace, document=document, update_time=moments[order], update_document=np.concatenate(changed).astype(np.int64)[order]
    )


def of_tenant(trace: Trace, tenant: int, *, answer_factor: float = 1.0) -> Trace:
    """Return the requests as one tenant's, with answers ``answer_factor`` times as long (and entries accordingly).

    Args:
        trace: The base.
        tenant: Number of the tenant, >= 0.
        answer_factor: By which completion tokens are multiplied; each answer keeps at least one token.

    Raises:
        ValueError: If an argument is out of range.
    """
    require(
        "of_tenant",
        ("tenant", tenant, "at least 0", tenant >= 0),
        ("answer_factor", answer_factor, "a finite number > 0", 0 < answer_factor < math.inf),
    )
    output = np.maximum(np.round(trace.output_tokens * answer_factor), 1).astype(np.int32)
    return replace(
        trace,
        tenant=np.full(len(trace), tenant, np.int32),
        output_tokens=output,
        size=trace.size - entry_bytes(trace.output_tokens, False) + entry_bytes(output, False),
    )


def _uniform(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.float64]:
    """Return a number 0..1 for each value, the same for equal values."""
    hashed: npt.NDArray[np.float64] = mix64_array(values ^ np.uint64(mix64(seed + 1))) / 2.0**64
    return hashed


def _rename(trace: Trace, variant: npt.NDArray[np.int64], seed: int) -> Trace:
    """Return the trace with other keys (and meanings) where the variant is not 0; equal key and variant give an equal key.

    A renamed request has no text: the text says the same as that of the key it was made of.
    """
    if np.any(trace.chain):
        raise ValueError(f"trace {trace.name}: expected requests without prefix blocks: renaming parts of a chain breaks it")
    other = variant != 0
    salt = mix64_array(variant.astype(np.uint64) ^ np.uint64(mix64(seed)))
    group = (mix64_array(trace.group.astype(np.uint64) ^ salt) >> np.uint64(1)).astype(np.int64)
    return replace(
        trace,
        key=np.where(other, mix64_array(trace.key ^ salt), trace.key),
        group=np.where(other & (trace.group >= 0), group, trace.group),
        prompt_id=np.where(other, -1, trace.prompt_id),
    )


def _new_keys(count: int, seed: int, what: str) -> npt.NDArray[np.uint64]:
    salt = mix64(seed ^ int.from_bytes(what.encode(), "big"))
    keys: npt.NDArray[np.uint64] = mix64_array(np.arange(count, dtype=np.uint64) ^ np.uint64(salt))
    return keys


def _requests(trace: Trace, time: npt.NDArray[np.float64], keys: npt.NDArray[np.uint64], *, tenant: int = 0) -> Trace:
    """Return requests for new keys, with answers as long as those of sessions."""
    output = answer_tokens(_uniform(keys, 1))
    return Trace(
        name=trace.name,
        time=time,
        key=keys,
        size=entry_bytes(output, trace.kind == "semantic"),
        group=np.full(len(time), -1, np.int64),
        input_tokens=question_tokens(_uniform(keys, 2)),
        output_tokens=output.astype(np.int32),
        tenant=np.full(len(time), tenant, np.int32),
        kind=trace.kind,
        match_probability=trace.match_probability,
    )
