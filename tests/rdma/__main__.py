"""The checks of the guest, as a program."""

from __future__ import annotations

import importlib
import sys

from .host import compiled

# Numba would load it, if it could, for what is not used here: that takes seconds in the guest.
sys.modules["scipy"] = None  # type: ignore[assignment]

# What takes longest and does not depend on what the host compiles meanwhile.
for name in ("numba", "pydantic", "redis.asyncio"):
    importlib.import_module(name)
if not compiled(sys.stdin):
    sys.exit("the host could not compile what is checked")
sys.exit(importlib.import_module("tests.rdma.guest").run())
