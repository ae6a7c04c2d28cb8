"""Readers of the traces that are known, one module per family, and how to use them: :func:`load` and :func:`stream`."""

from envs.workloads.readers.blocks import BLOCK_TOKENS
from envs.workloads.readers.known import KNOWN
from envs.workloads.readers.load import load
from envs.workloads.readers.streaming import TraceStream, stream

__all__ = ["BLOCK_TOKENS", "KNOWN", "TraceStream", "load", "stream"]
