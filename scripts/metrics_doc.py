"""Write docs/metrics.md from the catalogue in serving/metrics.py: python scripts/metrics_doc.py > docs/metrics.md"""

from __future__ import annotations

import sys

from serving.metrics import CATALOGUE


def page() -> str:
    """Return the page."""
    lines = [
        "# Metrics",
        "",
        "Written by `python scripts/metrics_doc.py > docs/metrics.md` from the catalogue in `serving/metrics.py`.",
        "",
        "On Ray every name has the prefix `ray_`, and beside these labels Ray's own (`replica`, `deployment`, ...).",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
