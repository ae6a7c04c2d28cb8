"""A trace as the kernel reads it, made once per trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.simulator.kernel import Columns
from envs.workloads.trace import Trace
from serving.ghost_kernel import jitter_units

_SLOT = "_prepared_for_simulation"


@dataclass(frozen=True)
class PreparedTrace:
    """A trace with dense keys.

    Attributes:
        columns: What the kernel reads.
        key: 64-bit name of each request's key, (N,).
        keys: Number of different keys.
    """

    columns: Columns
    key: npt.NDArray[np.uint64]
    keys: int


def prepare(trace: Trace) -> PreparedTrace:
    """Return the prepared form of a trace; computed at the first call and kept with the trace.

    O(N log N) once, about 10 ms per 100,000 requests.
    """
    known = trace.__dict__.get(_SLOT)
    if isinstance(known, PreparedTrace):
        return known
    # Dense keys ascend with the 64-bit names: ties in the hot set are broken the same way as on the names themselves.
    names, dense = np.unique(trace.key, return_inverse=True)
    # Copies: the kernel is compiled for writable, contiguous columns.
    columns = Columns(
        time=np.array(trace.time, np.float64),
        key=(dense + 1).astype(np.int32),
        size=np.array(trace.size, np.int64),
        input_tokens=np.array(trace.input_tokens, np.int32),
        output_tokens=np.array(trace.output_tokens, np.int32),
        unit=np.concatenate([[0.0], jitter_units(np.array(names, np.uint64))]),
    )
    prepared = PreparedTrace(columns, np.array(trace.key, np.uint64), len(names))
    trace.__dict__[_SLOT] = prepared
    return prepared
