"""Workloads: one columnar trace, readers for real ones, generators for made ones."""

from envs.workloads.catalogue import WORKLOADS, make
from envs.workloads.compose import concat, mix
from envs.workloads.draw import draw_workload
from envs.workloads.entry import entry_bytes
from envs.workloads.errors import TraceError
from envs.workloads.generators import sessions, zipf_ranks
from envs.workloads.readers import TraceStream, load, stream
from envs.workloads.trace import Trace

__all__ = [
    "WORKLOADS",
    "Trace",
    "TraceError",
    "TraceStream",
    "concat",
    "draw_workload",
    "entry_bytes",
    "load",
    "make",
    "mix",
    "sessions",
    "stream",
    "zipf_ranks",
]
