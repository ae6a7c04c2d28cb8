"""Traces put together: beside each other, as clients of one gateway, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envs.workloads.trace import Trace


def mix(traces: Sequence[Trace], *, name: str = "", note: str = "") -> Trace:
    """Return all requests of several traces on one time axis, as one gateway would see them.

    Requests at the same time keep the order of the traces, so chains of prefix blocks stay whole. Keys, groups, tenants and
    documents are kept as they are: equal ones are one and the same.

    Args:
        traces: At least one.
        name: Name of the result; made of the traces' names if empty.
        note: What the result is and is not; made of the traces' notes if empty.

    Raises:
        ValueError: If there is no trace, or semantic ones have different match probabilities.
    """
    if not traces:
        raise ValueError("mix: traces: expected at least one, got none")
    semantic = [trace for trace in traces if trace.kind == "semantic"]
    probabilities = {trace.match_probability for trace in semantic}
    if len(probabilities) > 1:
        raise ValueError(f"mix: match_probability: expected one for all semantic traces, got {sorted(probabilities)}")
    time = np.concatenate([trace.time for trace in traces])
    order = np.argsort(time, kind="stable")
    prompts: list[str] = []
    prompt_ids = []
    for trace in traces:
        prompt_ids.append(np.where(trace.prompt_id >= 0, trace.prompt_id + len(prompts), -1))
        prompts.extend(trace.prompts)
    update_time = np.concatenate([trace.update_time for trace in traces])
    updates = np.argsort(update_time, kind="stable")
    columns = {
        column: np.concatenate([getattr(trace, column) for trace in traces])[order]
        for column in ("key", "size", "group", "input_tokens", "output_tokens", "tenant", "document", "chain")
    }
    return Trace(
        name=name or "+".join(trace.name for trace in traces),
        time=time[order],
        prompts=prompts,
        prompt_id=np.concatenate(prompt_ids)[order],
        update_time=update_time[updates],
        update_document=np.concatenate([trace.update_document for trace in traces])[updates],
        flush_time=np.sort(np.concatenate([trace.flush_time for trace in traces])),
        match_probability=probabilities.pop() if probabilities else 0.0,
        kind="semantic" if semantic else "exact",
        note=note or " ".join(dict.fromkeys(trace.note for trace in traces if trace.note)),
        **columns,
    )


def concat(traces: Sequence[Trace], *, gap: float = 0.0, name: str = "", note: str = "") -> Trace:
    """Return traces one after the other: each begins ``gap`` seconds after the last request of the one before it.

    Args:
        traces: At least one.
        gap: Seconds of silence between two traces, >= 0.
        name: As in :func:`mix`.
        note: As in :func:`mix`.

    Raises:
        ValueError: As :func:`mix`, or if the gap is negative.
    """
    if not gap >= 0:
        raise ValueError(f"concat: gap: expected seconds >= 0, got {gap!r}")
    placed, start = [], 0.0
    for trace in traces:
        placed.append(shift(trace, start))
        start += trace.duration + gap
    return mix(placed, name=name, note=note)


def shift(trace: Trace, seconds: float) -> Trace:
    """Return the same requests and events, ``seconds`` later."""
    return replace(
        trace, time=trace.time + seconds, update_time=trace.update_time + seconds, flush_time=trace.flush_time + seconds
    )
