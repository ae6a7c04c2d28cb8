"""What a demo run does with a workload: which requests, how fast, in what knob space, beside what model. A pure function."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from envs.workloads.trace import Trace
from serving.knobs import Knobs, KnobSpace

HALF_LIFE = 24 * 3600.0
"""Assumed half-life of an answer's truth, in the workload's own seconds."""

EXACT_RATE = 66.0
SEMANTIC_RATE = 20.0
"""Mean requests per second that two busy cores carry beside everything else of the demo; embedding is the dearest part."""

STATIC_MISS_RATIO = 0.5
HEADROOM = 1.5
MEAN_SERVICE = 0.30
TTFT_SHARE = 0.25
CONTENTION = 0.5
"""The simulated model is sized as an operator would size it: for half the traffic at full contention, with 50 % headroom; a
request takes 0.3 s when it runs alone, a quarter of it to the first token."""


@dataclass(frozen=True)
class DemoPlan:
    """A demo run, decided before it starts.

    Attributes:
        trace: The requests, times compressed to the run.
        compression: Seconds of the workload's own time per second of the run.
        seconds: Length of the traffic, seconds.
        space: Knob space, scaled to the slice's footprint and length.
        static: Knobs of the static-LRU arm, and of the tuned arm at the start: 1/16 of the footprint, no expiry within the run.
        staleness_half_life: Half-life of an answer's truth in seconds of the run.
        slots: Parallel requests of the simulated model.
        ttft: Its time to the first token, seconds.
        tpot: Its time per output token of a request that runs alone, seconds.
        note: What was cut and compressed, in words.
    """

    trace: Trace
    compression: float
    seconds: float
    space: KnobSpace
    static: Knobs
    staleness_half_life: float
    slots: int
    ttft: float
    tpot: float
    note: str


def plan(trace: Trace, seconds: float) -> DemoPlan:
    """Plan a run of so many seconds of traffic.

    Args:
        trace: The workload, in its own time.
        seconds: Length of the traffic, > 0.

    Raises:
        ValueError: If the trace has fewer than two requests or no duration.
    """
    if len(trace) < 2 or trace.duration <= 0:
        raise ValueError(f"demo: trace {trace.name}: expected at least two requests at different times, got {len(trace)}")
    if not seconds > 0:
        raise ValueError(f"demo: expected a traffic time > 0 s, got {seconds!r}")
    rate = EXACT_RATE if trace.kind == "exact" else SEMANTIC_RATE
    count = min(len(trace), max(2, int(rate * seconds)))
    part = trace.slice(0, count)
    if part.duration <= 0:
        part = trace.slice(0, int(np.searchsorted(trace.time, trace.time[0], side="right")) + 1)
    compression = part.duration / seconds
    _, first = np.unique(part.key, return_index=True)
    footprint = int(part.size[first].sum()) // 2
    largest = 1 << max(16, math.ceil(math.log2(max(footprint, 2))))
    space = KnobSpace(
        min_size=largest >> 8,
        max_size=largest,
        min_ttl=seconds / 100,
        max_ttl=seconds * 2,
        max_warmup=0.5,
    )
    slots = max(4, math.ceil(count / seconds * STATIC_MISS_RATIO * MEAN_SERVICE * (1 + CONTENTION) * HEADROOM))
    tokens = max(1.0, float(part.output_tokens.mean()))
    cut = "all" if count == len(trace) else f"the first {count:,} of {len(trace):,}"
    note = (
        f"{cut} requests of {trace.name} ({part.duration / 3600:.1f} h) in {seconds:.0f} s: "
        f"time runs {compression:,.1f} times faster, memory is priced by the workload's own time. {trace.note}"
    ).strip()
    return DemoPlan(
        trace=part.compress(compression),
        compression=compression,
        seconds=seconds,
        space=space,
        static=Knobs(largest >> 4, space.max_ttl, 0.0),
        staleness_half_life=HALF_LIFE / compression,
        slots=slots,
        ttft=MEAN_SERVICE * TTFT_SHARE,
        tpot=MEAN_SERVICE * (1 - TTFT_SHARE) / tokens,
        note=note,
    )
