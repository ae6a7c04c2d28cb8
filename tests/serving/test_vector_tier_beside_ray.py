"""A vector store and Ray in one process: whichever is used first, the other still works."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.requirements import module

_USEARCH = """
import sys
from serving.tiers.vector import VectorTier
assert "usearch" not in sys.modules, "usearch is loaded at import: Ray's core could not come before it"
tier = VectorTier(dim=8)
tier.add("a", b"k" * 32, b"c" * 32, bytes(range(8)))
loaded = list(sys.modules)
assert loaded.index("ray._raylet") < loaded.index("usearch.compiled"), loaded
"""

_OTHERS = """
import sys
from serving.settings import VectorSettings
from serving.tiers import vector_chroma, vector_faiss, vector_milvus
from serving.tiers.vector_store import open_store
heavy = {"faiss", "pymilvus", "chromadb"} & set(sys.modules)
assert not heavy, f"loaded at import: {heavy}"
kind, package, url = sys.argv[1:]
open_store(VectorSettings(kind=kind, url=url or None), dim=8, namespace="n")
loaded = list(sys.modules)
assert loaded.index("ray._raylet") < loaded.index(package), loaded
"""


def test_the_index_loads_rays_core_before_its_own() -> None:
    # ray.init() in a process where usearch was loaded first aborts: only another process can show that.
    done = subprocess.run([sys.executable, "-c", _USEARCH], capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "package", "url"),
    [("faiss", "faiss", ""), ("milvus", "pymilvus", "http://127.0.0.1:1"), ("chroma", "chromadb", "http://127.0.0.1:1")],
)
def test_the_other_stores_load_their_packages_when_opened_and_after_rays_core(kind: str, package: str, url: str) -> None:
    module(package)
    done = subprocess.run([sys.executable, "-c", _OTHERS, kind, package, url], capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr
