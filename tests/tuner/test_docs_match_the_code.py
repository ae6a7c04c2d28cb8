"""Pages that are made from the code, and examples that a reader copies, are held to it."""

from __future__ import annotations

import re
from pathlib import Path

from serving.metrics import CATALOGUE
from tests.requirements import ROOT
from tuner.config import load_settings


def test_every_metric_is_in_the_docs_as_the_catalogue_has_it() -> None:
    rows = {
        cells[0].strip("` "): [cell.strip() for cell in cells[1:]]
        for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()
        if line.startswith("| `") and (cells := re.split(r"(?<!\\)\|", line.strip("|")))
    }
    assert set(rows) == {metric.name for metric in CATALOGUE}
    for metric in CATALOGUE:
        kind, labels, text = rows[metric.name]
        assert kind == metric.kind
        assert re.findall(r"`(\w+)`", labels) == list(metric.labels)
        assert text == metric.help


def test_the_examples_settings_are_valid_and_name_two_arms() -> None:
    settings = load_settings(ROOT / "examples" / "two-arms.yaml", {})
    assert set(settings.gateway.arms) == {"control", "treatment"}
    assert settings.tuner.arm in settings.gateway.arms
    assert settings.gateway.access_log is not None


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / Path(target)).exists(), f"{page.name}: {target}"


def test_files_that_the_pages_name_in_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"(?:examples|experiments/configs)/[\w.-]+\.yaml", text):
        assert (ROOT / path).is_file(), path
