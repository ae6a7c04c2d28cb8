"""Workloads: one columnar trace, readers for real ones, generators for made ones."""

from envs.workloads.entry import entry_bytes
from envs.workloads.errors import TraceError
from envs.workloads.generators import sessions, zipf_ranks
from envs.workloads.readers import load
from envs.workloads.trace import Trace

__all__ = ["Trace", "TraceError", "entry_bytes", "load", "sessions", "zipf_ranks"]
