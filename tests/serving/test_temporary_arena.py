"""The arena of a gateway that is started for a while goes with it, and those of killed ones go with the next."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving import app, memory
from serving.tiers.arena import ArenaTier


def test_it_goes_with_its_context_and_takes_along_what_killed_processes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    dead = f"cachepilot-of-{gone.pid}"
    left, used, other, kept = (tmp_path / name for name in (f"{dead}-a", f"{dead}-b", "cachepilot-shop-0", "cachepilot-of-1-a"))
    for folder in (left, other, kept):
        folder.mkdir()
        (folder / "arena").write_bytes(b"x")
    used.mkdir()
    tier = ArenaTier(used / "arena", 1 << 20)  # by a process that has its number from elsewhere
    with app._temporary_arena(tmp_path / "scratch") as path:
        path.write_bytes(b"x")
        assert path.parent.parent == tmp_path
        assert path.parent.name.startswith(f"cachepilot-of-{os.getpid()}-")
        assert [folder.exists() for folder in (left, used, other, kept)] == [False, True, True, True]
    assert not path.parent.exists()
    tier.close_now()


def test_it_is_in_the_scratch_folder_where_there_is_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "nowhere")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with app._temporary_arena(scratch) as path:
        assert path == scratch / "arena"
    assert not scratch.exists()
