"""docs/environment.md says what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

from envs.lanes import INFO_KEYS
from envs.objective import COST_TERMS

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_one_that_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "environment_doc.py"))
    written = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert written == script["page"](), "run: python scripts/environment_doc.py > docs/environment.md"
    assert set(script["TERMS"]) == set(COST_TERMS)
    assert set(script["INFO"]) == set(INFO_KEYS)
