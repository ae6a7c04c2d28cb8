"""Compiled code is kept under the content of all sources that are part of it: a changed one is never run as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.compiled import cache_folder

_ASK = "from probe.caller import answer; print(answer(1))"


def test_a_change_in_another_module_is_seen(tmp_path: Path) -> None:
    package = tmp_path / "probe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "caller.py").write_text(
        "from probe.callee import CONSTANT, callee\n"
        "from serving.compiled import compiled\n\n\n"
        "@compiled()\ndef answer(value):\n    return callee(value) + CONSTANT\n"
    )
    for constant in (10, 20):
        (package / "callee.py").write_text(
            "from serving.compiled import compiled\n\n"
            f"CONSTANT = {constant}\n\n\n@compiled()\ndef callee(value):\n    return value * {constant}\n"
        )
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
        environment.pop("NUMBA_CACHE_DIR", None)
        ran = subprocess.run([sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == str(2 * constant)
        kept = list((package / "__pycache__").glob("numba-*"))
        assert len(kept) == 1  # what is outdated goes
        assert list(kept[0].rglob("*.nbi"))


def test_a_folder_that_was_asked_for_is_kept_to(tmp_path: Path) -> None:
    sources = tmp_path / "modules"
    sources.mkdir()
    assert cache_folder(sources, str(tmp_path / "asked")).parent == tmp_path / "asked"


def test_a_package_that_cannot_be_written_to_is_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "modules"
    sources.mkdir()
    (sources / "__pycache__").write_text("a file: nobody can make a folder of it")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert (tmp_path / "home") in cache_folder(sources).parents
