"""What a test needs from its machine. Missing: the test is skipped by name, or fails where nothing may be skipped."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

EVERYTHING_REQUIRED = os.environ.get("CACHEPILOT_REQUIRE_ALL") == "1"
ROOT = Path(__file__).resolve().parent.parent
TRACES = Path(os.environ.get("CACHEPILOT_TRACES", ROOT.parent / "shared" / "traces"))


def _missing(reason: str) -> None:
    if EVERYTHING_REQUIRED:
        pytest.fail(f"{reason} (CACHEPILOT_REQUIRE_ALL=1: nothing may be skipped)", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def program(name: str) -> str:
    """Path of a program from a system package (installed by scripts/install-system-packages.sh)."""
    path = shutil.which(name)
    if path is None:
        _missing(f"needs the program {name}: run scripts/install-system-packages.sh as root, or install it")
    assert path is not None
    return path


def module(name: str) -> Any:
    """A module that only tests and benchmarks need (installed by ``make test``)."""
    try:
        return importlib.import_module(name)
    except ImportError:
        _missing(f"needs the module {name}: run make setup-dev")


def trace(name: str) -> Path:
    """Path of a real trace; set CACHEPILOT_TRACES to the folder that holds them."""
    path = TRACES / name
    if not path.is_file():
        _missing(f"needs the trace {name} in {TRACES}: set CACHEPILOT_TRACES to the folder of the real traces")
    return path
