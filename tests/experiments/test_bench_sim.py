"""The simulator's benchmark measures what it says."""

from __future__ import annotations

import json

from experiments.bench import sim


def test_every_contestant_is_timed_on_the_same_requests() -> None:
    result = sim.run(intervals=3, requests_per_interval=200)
    assert [row["what"] for row in result.rows][:3] == ["simulator, ghost and warm-up", "simulator, ghost", "simulator alone"]
    assert all(row["seconds"] > 0 and row["requests_per_second"] > 0 for row in result.rows)
    assert (result.ratio is None) == (len(result.rows) == 3)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["command"] == "cachepilot bench sim"
