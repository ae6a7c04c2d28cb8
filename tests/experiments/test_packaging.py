"""What is counted is what Ray would pack; the project itself is small, and too much is refused by name."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private import ray_constants
from ray._private.runtime_env.packaging import create_package

from experiments.packaging import LIMIT, PackageTooLarge, check, main, measure
from tests.requirements import ROOT


def packed(directory: Path, target: Path) -> dict[Path, int]:
    """What Ray packs."""
    create_package(str(directory), target, include_gitignore=True, excludes=ray_constants.get_runtime_env_default_excludes())
    with ZipFile(target) as archive:
        return {Path(item.filename): item.file_size for item in archive.infolist() if not item.is_dir()}


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_it_counts_what_ray_packs(tmp_path: Path) -> None:
    folder = tree(
        tmp_path / "project",
        {
            ".gitignore": "*.log\nruns/\n", ".rayignore": "traces/\n", "a.py": "12345", "x.log": "no", "runs/r": "no",
            "traces/t.csv": "no", ".git/objects/o": "no", ".venv/lib/l": "no", "sub/b.py": "1", "sub/.gitignore": "c.*\n",
            "sub/c.txt": "no", "sub/deep/d.py": "123", "__pycache__/a.pyc": "no",
        },
    )  # fmt: skip
    found = measure(folder)
    assert found.files == packed(folder, tmp_path / "package.zip")
    assert {Path("a.py"), Path("sub/b.py"), Path("sub/deep/d.py")} <= set(found.files)
    assert not any((folder / path).read_text() == "no" for path in found.files)


def test_the_project_is_packed_small_and_whole() -> None:
    package = check(ROOT)
    assert package.size < LIMIT / 10
    parts = {path.parts[0] for path in package.files}
    assert {"serving", "envs", "agents", "experiments", "tuner"} <= parts
    assert not parts & {".git", ".venv", ".peers", "tests", "runs", "policies", "traces"}
    assert Path("experiments/configs/sessions.yaml") in package.files


def test_too_much_is_refused_and_the_largest_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tree(tmp_path, {"small": "1", "large.bin": "x" * 3000, "larger.bin": "x" * 4000})
    with pytest.raises(PackageTooLarge, match=r"larger\.bin 3\.91 KiB, large\.bin 2\.93 KiB.*\.rayignore"):
        check(folder, 5000)
    assert main([str(folder), "--limit", "5000"]) == 1
    assert "larger.bin" in capsys.readouterr().err
    assert main([str(folder)]) == 0
    assert "in 3 files; the largest: larger.bin" in capsys.readouterr().out
    assert main([str(folder / "absent")]) == 2
