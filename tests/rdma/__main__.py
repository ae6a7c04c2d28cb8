"""The checks of the guest, as a program."""

from __future__ import annotations

import importlib
import sys

# Numba would load it, if it could, for what is not used here: that takes seconds in the guest.
sys.modules["scipy"] = None  # type: ignore[assignment]

sys.exit(importlib.import_module("tests.rdma.guest").run())
