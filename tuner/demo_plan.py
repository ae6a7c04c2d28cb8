"""What a demo run does with a workload: which requests, how fast, in what knob space, beside what model. A pure function."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envs.workloads.trace import Trace
from experiments.scenarios import model_for, space_for, static_knobs
from serving.keys import mix64
from serving.knobs import Knobs, KnobSpace
from serving.latency import UpstreamModel

HALF_LIFE = 24 * 3600.0
"""Assumed half-life of an answer's truth, in the workload's own seconds."""

EXACT_RATE = 66.0
SEMANTIC_RATE = 20.0
"""Mean requests per second that two busy cores carry beside everything else of the demo; embedding is the dearest part."""

HOTTEST = 0.05
"""Share of a run above which one key is too hot to be part of a sample."""


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
        model: The simulated model, sized as an operator would: for a cache that gets half of the hits there are to get.
        note: What was cut and compressed, in words.
    """

    trace: Trace
    compression: float
    seconds: float
    space: KnobSpace
    static: Knobs
    staleness_half_life: float
    model: UpstreamModel
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
    part, cut = _cut(trace, seconds)
    compression = part.duration / seconds
    _, first = np.unique(part.key, return_index=True)
    misses = len(part) - 0.5 * (len(part) - len(first))
    footprint = int(part.size[first].sum()) // 2
    space = space_for(footprint, seconds)
    model = model_for(misses / seconds, float(part.output_tokens.mean()))
    note = (
        f"{cut} of {trace.name} ({part.duration / 3600:.1f} h) in {seconds:.0f} s: "
        f"time runs {compression:,.1f} times faster, memory is priced by the workload's own time. {trace.note}"
    ).strip()
    return DemoPlan(
        trace=part.compress(compression),
        compression=compression,
        seconds=seconds,
        space=space,
        static=static_knobs(space),
        staleness_half_life=HALF_LIFE / compression,
        model=model,
        note=note,
    )


def _cut(trace: Trace, seconds: float) -> tuple[Trace, str]:
    """Return as many requests as the run carries, and what they are, in words."""
    count = max(2, int((EXACT_RATE if trace.kind == "exact" else SEMANTIC_RATE) * seconds))
    if len(trace) <= count:
        return trace.slice(0, len(trace)), f"all {len(trace):,} requests"
    if trace.kind == "exact":
        keys, inverse, uses = np.unique(trace.key, return_inverse=True, return_counts=True)
        # All requests of a sample of keys keep their reuse, over the trace's whole time (SHARDS, Waldspurger et al., FAST'15);
        # the first requests would be a cold start. A key that fills the run by itself would leave nothing to sample.
        hot = uses > HOTTEST * count
        order = np.argsort(np.array([mix64(int(key)) for key in keys], np.uint64))
        order = order[~hot[order]]
        chosen = np.zeros(len(keys), bool)
        chosen[order[: int(np.searchsorted(np.cumsum(uses[order]), count, side="right"))]] = True
        part = trace.take(np.flatnonzero(chosen[inverse]))
        if len(part) >= 2 and part.duration > part.time[0]:
            words = f"{len(part):,} of {len(trace):,} requests, all those of {chosen.sum():,} of {len(keys):,} keys,"
            if hot.any():
                words += f" none of the {hot.sum()} hottest,"
            return part.slice(0, len(part)), words
    part = trace.slice(0, count)
    if part.duration <= 0:
        part = trace.slice(0, int(np.searchsorted(trace.time, trace.time[0], side="right")) + 1)
    return part, f"the first {len(part):,} of {len(trace):,} requests"
