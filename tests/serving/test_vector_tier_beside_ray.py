"""The index and Ray in one process: whichever is used first, the other still works."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
from serving.tiers.vector import VectorTier
assert "usearch" not in sys.modules, "usearch is loaded at import: Ray's core could not come before it"
tier = VectorTier(dim=8)
tier.add("a", b"k" * 32, b"c" * 32, bytes(range(8)))
loaded = list(sys.modules)
assert loaded.index("ray._raylet") < loaded.index("usearch.compiled"), loaded
"""


def test_the_index_loads_rays_core_before_its_own() -> None:
    # ray.init() in a process where usearch was loaded first aborts: only another process can show that.
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr
