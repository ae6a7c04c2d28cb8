"""Who waits for the simulator to be compiled is told so; who has it compiled already is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_RUN = "from probe.kernel import double; double(1)"


def test_it_is_told_until_compiled_code_is_kept(tmp_path: Path) -> None:
    package = tmp_path / "probe"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text(
        "from serving.compiled import compiled\n\n\n@compiled()\ndef double(value):\n    return 2 * value\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{_ROOT}"}
    ask = "import pathlib, sys; from envs.simulator.compiling import compiling; print(compiling(pathlib.Path(sys.argv[1])))"

    def told() -> str:
        return subprocess.run(
            [sys.executable, "-c", ask, str(package)], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert told().startswith("compiling the simulator first")
    subprocess.run([sys.executable, "-c", _RUN], env=environment, check=True)
    assert told() == "None"
