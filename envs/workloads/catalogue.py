"""Made workloads by name: a base stream of sessions with one pattern or several laid over it.

``make("made:flash-crowd?seed=3&share=0.6")`` makes one from a text, as the command line takes it. None is a real workload, and
each says so in its note.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import unquote_plus

import numpy as np

from envs.workloads.compose import mix
from envs.workloads.errors import TraceError, require
from envs.workloads.generators import DAY, MOST, sessions, zipf_ranks
from envs.workloads.patterns import (
    add_documents,
    add_flash_crowd,
    add_releases,
    add_scan,
    alternate,
    crowd_mass,
    day_and_night,
    of_tenant,
)
from envs.workloads.trace import Trace

SCHEME = "made:"
"""What the spec of a made workload begins with, where files could be meant too."""

_DIGITS = 1_000
"""Most digits of a whole number: a short text such as 1e999999999 would take all memory."""

_MADE = "Made by a generator ({}): not a real workload."


def diurnal(
    n_requests: int = 20_000,
    n_keys: int = 2_000,
    *,
    days: float = 3.0,
    peak_to_trough: float = 4.0,
    contrast: float = 0.8,
    share: float = 0.7,
    alpha: float = 0.9,
    drift: float = 0.2,
    repeat: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Make days whose load and popularity follow the hour, and come back the next day.

    Imitates an interactive service: the traces of ServeGen (Xiang et al., 2025) and Azure (Stojkovic et al., HPCA'25) swing by a
    factor of 2 to 8 within a day.

    Args:
        n_requests: Requests.
        n_keys: Meanings that are asked for at any one time, in their day or their night form.
        days: Length, days.
        peak_to_trough: Load at noon over load at midnight, >= 1.
        contrast: How far the population changes with the hour, 0..1.
        share: Share of the keys that have a day and a night form, 0..1.
        alpha: Zipf exponent of popularity.
        drift: How often each popular place is taken by a new key over the whole trace.
        repeat: Probability that a request asks the same as the one before it in its session.
        seed: Of everything random.
    """
    require(
        "diurnal",
        ("days", days, "a finite number > 0", 0 < days < math.inf),
        ("peak_to_trough", peak_to_trough, "a finite ratio >= 1", 1 <= peak_to_trough < math.inf),
    )
    swing = (peak_to_trough - 1.0) / (peak_to_trough + 1.0)
    base = sessions(
        n_requests, n_keys, alpha=alpha, drift=drift, duration=days * DAY, diurnal=swing, day=DAY, repeat=repeat, seed=seed
    )  # fmt: skip
    made = day_and_night(base, day=DAY, contrast=contrast, share=share, seed=seed)
    return replace(made, name=f"diurnal-{seed}", note=_MADE.format("days with their own load and popularity by the hour"))


def flash_crowd(
    n_requests: int = 20_000,
    n_keys: int = 2_000,
    *,
    share: float = 0.6,
    start: float | None = None,
    half_life: float = 1_800.0,
    ramp: float = 120.0,
    crowd_keys: int = 5,
    alpha: float = 0.9,
    drift: float = 0.5,
    duration: float = DAY / 2,
    repeat: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Make a flash crowd over steady traffic (Jung et al., WWW'02).

    Args:
        n_requests: Requests, with those of the crowd.
        n_keys: Meanings that the steady traffic asks for at any one time.
        share: The crowd's share of all requests until its rate has halved once, 0 to below 1.
        start: When it begins, seconds; None for 0.4 of the trace.
        half_life: Seconds in which its rate halves.
        ramp: Seconds in which its rate rises.
        crowd_keys: Number of its keys.
        alpha: Zipf exponent of the steady traffic's popularity.
        drift: How often each popular place is taken by a new key over the whole trace.
        duration: Length, seconds.
        repeat: Probability that a request asks the same as the one before it in its session.
        seed: Of everything random.
    """
    start = 0.4 * duration if start is None else start
    require(
        "flash-crowd",
        ("share", share, "a share from 0 to below 1", 0 <= share < 1),
        ("start", start, f"seconds before the end ({duration:g})", 0 <= start < duration),
        ("half_life", half_life, "finite seconds > 0", 0 < half_life < math.inf),
        ("ramp", ramp, "finite seconds >= 0", 0 <= ramp < math.inf),
    )
    window = min(ramp + half_life, duration - start)
    until, whole = crowd_mass(np.array([window, duration - start]), half_life, ramp)
    # Requests of the crowd for each request of the steady traffic.
    relative = share / (1.0 - share) * window / duration * whole / until
    crowd = round(n_requests * relative / (1.0 + relative))
    base = sessions(
        max(1, n_requests - crowd), n_keys, alpha=alpha, drift=drift, duration=duration, diurnal=0.0, repeat=repeat, seed=seed
    )  # fmt: skip
    made = add_flash_crowd(
        base, crowd, start=min(start, base.duration), half_life=half_life, ramp=ramp, keys=crowd_keys, seed=seed
    )
    return replace(made, name=f"flash-crowd-{seed}", note=_MADE.format("a flash crowd over steady sessions"))


def hot_set_swap(
    n_requests: int = 20_000,
    n_keys: int = 2_000,
    *,
    period: float = 7_200.0,
    sets: int = 2,
    share: float = 0.8,
    alpha: float = 1.0,
    drift: float = 0.2,
    duration: float = DAY / 2,
    repeat: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Make hot sets that take turns: A, B, A, B (Denning's phases and transitions, 1980).

    Args:
        n_requests: Requests.
        n_keys: Meanings that are asked for at any one time.
        period: Seconds between two swaps; half the duration or more for a swap without a return.
        sets: Number of hot sets.
        share: Share of the keys that are swapped.
        alpha: Zipf exponent of popularity.
        drift: How often each popular place is taken by a new key over the whole trace.
        duration: Length, seconds.
        repeat: Probability that a request asks the same as the one before it in its session.
        seed: Of everything random.
    """
    base = sessions(n_requests, n_keys, alpha=alpha, drift=drift, duration=duration, diurnal=0.0, repeat=repeat, seed=seed)
    made = alternate(base, period=period, sets=sets, share=share, seed=seed)
    return replace(made, name=f"hot-set-swap-{seed}", note=_MADE.format("hot sets that take turns"))


def scan(
    n_requests: int = 20_000,
    n_keys: int = 1_000,
    *,
    share: float = 0.3,
    scans: int = 3,
    length: float | None = None,
    again: bool = False,
    alpha: float = 1.0,
    drift: float = 0.2,
    duration: float = DAY / 2,
    repeat: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Make scans over steady traffic: crawlers, evaluations, batch jobs that ask everything once (LRU-K '93, ARC '03).

    Args:
        n_requests: Requests, with those of the scans.
        n_keys: Meanings that the steady traffic asks for at any one time.
        share: The scans' share of all requests, 0 to below 1.
        scans: How many, evenly over the trace.
        length: Seconds that each takes; None for a quarter of the time between two.
        again: Whether every scan asks for the same keys again.
        alpha: Zipf exponent of the steady traffic's popularity.
        drift: How often each popular place is taken by a new key over the whole trace.
        duration: Length, seconds.
        repeat: Probability that a request asks the same as the one before it in its session.
        seed: Of everything random.
    """
    require(
        "scan",
        ("share", share, "a share from 0 to below 1", 0 <= share < 1),
        ("scans", scans, "at least 1", scans >= 1),
    )
    scanned = min(round(share * n_requests), n_requests - 1)
    base = sessions(
        n_requests - scanned, n_keys, alpha=alpha, drift=drift, duration=duration, diurnal=0.0, repeat=repeat, seed=seed
    )
    gap = base.duration / scans
    starts = [gap * (number + 0.375) for number in range(scans)]
    made = add_scan(base, scanned, starts=starts, length=0.25 * gap if length is None else length, again=again, seed=seed)
    return replace(made, name=f"scan-{seed}", note=_MADE.format("scans of once-only keys over steady sessions"))


def model_release(
    n_requests: int = 20_000,
    n_keys: int = 2_000,
    *,
    releases: int = 2,
    keys: Literal["stay", "change"] = "stay",
    flush: bool = True,
    alpha: float = 0.9,
    drift: float = 0.5,
    duration: float = DAY,
    diurnal: float = 0.3,
    repeat: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Make releases of the model at random times, after each of which every cached answer is worthless.

    Args:
        n_requests: Requests.
        n_keys: Meanings that are asked for at any one time.
        releases: How many.
        keys: Whether keys stay as they are or change with the release.
        flush: Whether the cache is emptied (``flush_time``); if not, old entries stay as dead weight, which needs ``change``.
        alpha: Zipf exponent of popularity.
        drift: How often each popular place is taken by a new key over the whole trace.
        duration: Length, seconds.
        diurnal: Amplitude of the load's daily swing.
        repeat: Probability that a request asks the same as the one before it in its session.
        seed: Of everything random.
    """
    require("model-release", ("releases", releases, "at least 0", releases >= 0))
    base = sessions(n_requests, n_keys, alpha=alpha, drift=drift, duration=duration, diurnal=diurnal, repeat=repeat, seed=seed)
    times = np.random.default_rng(seed).uniform(0.1, 0.9, releases) * base.duration
    made = add_releases(base, times.tolist(), keys=keys, flush=flush, seed=seed)
    return replace(made, name=f"model-release-{seed}", note=_MADE.format("sessions across releases of the model"))


def document_storm(
    n_requests: int = 20_000,
    n_keys: int = 3_000,
    *,
    documents: int = 300,
    document_alpha: float = 0.8,
    updates: float = 0.5,
    storms: int = 2,
    storm_share: float = 0.3,
    storm_length: float = 300.0,
    alpha: float = 0.9,
    drift: float = 0.3,
    duration: float = DAY,
    diurnal: float = 0.3,
    repeat: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Make answers that rest on documents, which change one by one and in storms (retrieval; Cho and Garcia-Molina, VLDB'00).

    Args:
        n_requests: Requests.
        n_keys: Questions that are asked at any one time.
        documents: Number of documents.
        document_alpha: Zipf exponent of the questions per document.
        updates: Updates per document over the whole trace on average, outside the storms.
        storms: How many storms, at random times.
        storm_share: Share of the documents that a storm updates.
        storm_length: Seconds that a storm takes.
        alpha: Zipf exponent of the questions' popularity.
        drift: How often each popular place is taken by a new key over the whole trace.
        duration: Length, seconds.
        diurnal: Amplitude of the load's daily swing.
        repeat: Probability that a request asks the same as the one before it in its session.
        seed: Of everything random.
    """
    require("document-storm", ("storms", storms, "at least 0", storms >= 0))
    base = sessions(n_requests, n_keys, alpha=alpha, drift=drift, duration=duration, diurnal=diurnal, repeat=repeat, seed=seed)
    times = np.random.default_rng(seed).uniform(0.1, 0.9, storms) * base.duration
    made = add_documents(
        base, documents=documents, alpha=document_alpha, updates=updates, storms=times.tolist(), storm_share=storm_share,
        storm_length=storm_length, seed=seed,
    )  # fmt: skip
    return replace(
        made, name=f"document-storm-{seed}", note=_MADE.format("questions on documents that change, also many at once")
    )


def multi_tenant(
    n_requests: int = 20_000,
    n_keys: int = 2_000,
    *,
    tenants: int = 5,
    noisy: float = 0.25,
    noisy_start: float = 0.5,
    noisy_length: float = 0.15,
    duration: float = DAY,
    diurnal: float = 0.3,
    seed: int = 0,
) -> Trace:
    """Make tenants that share one cache, of whom one may be noisy for a while.

    Imitates a shared gateway: a few clients make most of the load (ServeGen, Xiang et al., 2025), and tenants differ in
    popularity, entry size and reuse, so that a budget split by recency favours the loud (Memshare, Cidon et al., ATC'17).

    Args:
        n_requests: Requests, with the noisy tenant's.
        n_keys: Meanings that the largest population has at any one time; others have down to a tenth.
        tenants: How many, without the noisy one; their rates follow Zipf(1).
        noisy: The noisy tenant's share of all requests, 0 to below 1: keys that are asked for once, with answers 4 times as long.
        noisy_start: When it begins, as a share of the duration.
        noisy_length: How long it goes on, as a share of the duration.
        duration: Length, seconds.
        diurnal: Amplitude of the load's daily swing, of each tenant.
        seed: Of everything random.
    """
    require(
        "multi-tenant",
        ("n_requests", n_requests, f"from 1 to {MOST:,}", 1 <= n_requests <= MOST),
        ("n_keys", n_keys, "at least 1", n_keys >= 1),
        ("tenants", tenants, "at least 1", tenants >= 1),
        ("noisy", noisy, "a share from 0 to below 1", 0 <= noisy < 1),
        ("noisy_start", noisy_start, "a share from 0 to below 1", 0 <= noisy_start < 1),
        ("noisy_length", noisy_length, "a share above 0, up to 1", 0 < noisy_length <= 1),
    )
    random = np.random.default_rng(seed)
    loud = min(round(noisy * n_requests), n_requests - 1)
    counts = np.bincount(zipf_ranks(random, tenants, 1.0, n_requests - loud), minlength=tenants)
    parts = []
    for tenant, count in enumerate(counts.tolist()):
        population = max(1, round(n_keys * 10.0 ** -random.random()))
        drawn: dict[str, Any] = {
            "alpha": random.uniform(0.5, 1.2),
            "drift": random.uniform(0.0, 1.0),
            "repeat": random.uniform(0.0, 0.3),
        }
        factor, own = 4.0 ** random.uniform(-0.5, 1.0), int(random.integers(1 << 31))
        if count:
            asked = sessions(count, population, duration=duration, diurnal=diurnal, seed=own, **drawn)
            parts.append(of_tenant(asked, tenant, answer_factor=factor))
    made = mix(parts)
    if loud:
        start = min(noisy_start * duration, made.duration)
        length = min(noisy_length * duration, duration - start)
        scans = add_scan(made, loud, starts=[start], length=length, tenant=tenants, seed=seed)
        own_rows = scans.tenant == tenants
        made = mix([made, of_tenant(scans.take(own_rows), tenants, answer_factor=4.0)])
    return replace(made, name=f"multi-tenant-{seed}", note=_MADE.format("tenants that share one cache"))


def paraphrases(
    n_requests: int = 10_000,
    n_keys: int = 1_000,
    *,
    match_probability: float = 0.8,
    alpha: float = 0.9,
    drift: float = 0.3,
    duration: float = DAY / 2,
    diurnal: float = 0.3,
    repeat: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Make questions in up to four wordings each, with texts: the base of a semantic cache (GPTCache, Bang, NLP-OSS'23).

    Args:
        n_requests: Requests.
        n_keys: Meanings that are asked for at any one time.
        match_probability: Probability that a live entry of another wording answers, in the simulator.
        alpha: Zipf exponent of popularity.
        drift: How often each popular place is taken by a new meaning over the whole trace.
        duration: Length, seconds.
        diurnal: Amplitude of the load's daily swing.
        repeat: Probability that a request asks the same as the one before it in its session.
        seed: Of everything random.
    """
    base = sessions(
        n_requests, n_keys, alpha=alpha, drift=drift, duration=duration, diurnal=diurnal, repeat=repeat, text=True, seed=seed
    )
    return replace(base, name=f"paraphrases-{seed}", match_probability=match_probability)


def plain_sessions(
    n_requests: int = 20_000,
    n_keys: int = 2_000,
    *,
    alpha: float = 0.9,
    drift: float = 0.5,
    duration: float = DAY,
    diurnal: float = 0.5,
    day: float | None = None,
    hot_swaps: Sequence[float] = (),
    repeat: float = 0.1,
    session_length: float = 4.0,
    think_time: float = 20.0,
    text: bool = False,
    seed: int = 0,
) -> Trace:
    """Make sessions with Zipf popularity that drifts: :func:`envs.workloads.generators.sessions`, with a size to begin with."""
    return sessions(
        n_requests, n_keys, alpha=alpha, drift=drift, duration=duration, diurnal=diurnal, day=day, hot_swaps=hot_swaps,
        repeat=repeat, session_length=session_length, think_time=think_time, text=text, seed=seed,
    )  # fmt: skip


WORKLOADS: Mapping[str, Callable[..., Trace]] = MappingProxyType(
    {
        "sessions": plain_sessions,
        "paraphrases": paraphrases,
        "diurnal": diurnal,
        "flash-crowd": flash_crowd,
        "hot-set-swap": hot_set_swap,
        "scan": scan,
        "model-release": model_release,
        "document-storm": document_storm,
        "multi-tenant": multi_tenant,
    }
)
"""Made workloads by name. All take keyword arguments with defaults, ``seed`` among them."""


def make(spec: str) -> Trace:
    """Make a workload from a text.

    Args:
        spec: ``made:`` (may be left out), a name of :data:`WORKLOADS`, and after a ``?`` parameters as in a URL:
            ``made:scan?share=0.4&seed=2``. Lists are separated by commas; ``none`` stands for a default that depends on others.

    Raises:
        TraceError: If the name or a parameter is not known, or a value is not as expected; the text names what is.
    """
    maker, arguments = find(spec)
    try:
        return maker(**arguments)
    except TraceError:
        raise
    except (ValueError, OverflowError) as error:
        raise TraceError(spec, f"arguments in their ranges: {error}") from None


def find(spec: str) -> tuple[Callable[..., Trace], dict[str, Any]]:
    """Return the maker that a spec names, and its arguments, without making anything.

    Args:
        spec: As :func:`make` takes it.

    Raises:
        TraceError: If the name or a parameter is not known, or a value cannot be read.
    """
    name, _, query = spec.removeprefix(SCHEME).partition("?")
    if name not in WORKLOADS:
        raise TraceError(spec, f"a made workload, one of {', '.join(WORKLOADS)}{_close(name, list(WORKLOADS))}", excerpt=name)
    maker = WORKLOADS[name]
    types = get_type_hints(maker)
    known = list(inspect.signature(maker).parameters)
    arguments: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        parameter, equals, text = (unquote_plus(piece) for piece in part.partition("="))
        if parameter not in known:
            expected = f"a parameter of {name}, one of {', '.join(known)}{_close(parameter, known)}"
            raise TraceError(spec, expected, excerpt=parameter)
        if not equals or parameter in arguments:
            raise TraceError(spec, f"{parameter}=<value> once", excerpt=part)
        try:
            value = _parse(text, types[parameter])
            if types[parameter] is int and parameter != "seed" and value > MOST:
                # All others count something that is made.
                raise ValueError(f"a whole number of at most {MOST:,}")
            arguments[parameter] = value
        except ValueError as error:
            raise TraceError(spec, f"{parameter}: {error}", excerpt=text) from None
    return maker, arguments


def _close(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _parse(text: str, annotation: Any) -> Any:
    """Read a value as a parameter's annotation wants it."""
    if get_origin(annotation) is Literal:
        if text not in get_args(annotation):
            raise ValueError(" or ".join(get_args(annotation)))
        return text
    if get_origin(annotation) is Sequence:
        return [_number(piece) for piece in filter(None, text.split(","))]
    if type(None) in get_args(annotation) and text.lower() in ("none", "null"):
        return None
    if annotation is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError("true or false")
        return text.lower() in ("true", "1", "yes")
    return _whole(text) if annotation is int else _number(text)


def _whole(text: str) -> int:
    """Read a whole number, all its digits: a float would take 53 bits of them."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ValueError("a number") from None
    if not value.is_finite():
        raise ValueError("a finite number")
    if value.adjusted() >= _DIGITS:
        raise ValueError(f"a whole number of at most {_DIGITS:,} digits")
    if value != value.to_integral_value():
        raise ValueError("a whole number")
    return int(value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number") from None
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value
