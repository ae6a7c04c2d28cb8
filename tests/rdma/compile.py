"""Compile on the host, for the guest's processor, what the guest runs."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

from serving.compiled import cache_folder

MODULES = ("serving.tiers.arena", "serving.tiers.rdma", "serving.neighbours.server", "tests.rdma.guest")


def main() -> int:
    """Import all, and throw away what was compiled from what is no more."""
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    sources = Path(importlib.import_module("serving").__file__ or "").parent
    current = {cache_folder(each, str(folder)).name for each in (sources, sources / "arena", sources / "neighbours")}
    for other in folder.glob("numba-*"):
        if other.name not in current:
            shutil.rmtree(other, ignore_errors=True)
    for name in MODULES:
        importlib.import_module(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
