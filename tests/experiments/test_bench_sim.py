"""The simulator's benchmark measures what it says."""

from __future__ import annotations

import importlib.util
import json

from experiments.bench import sim


def test_every_contestant_runs_the_same_requests_under_the_same_budget() -> None:
    result = sim.run(requests=20_000, keys=50_000, rounds=1)
    assert all(row["cpu_seconds"] > 0 and row["mreq_per_cpu_s"] > 0 for row in result.rows)
    # Without a TTL all are the same cache: byte-weighted LRU.
    same = {
        row["what"]: row["hit_ratio"] for row in result.rows if "TTL 1 h" not in row["what"] and "by 1,000" not in row["what"]
    }
    assert len({round(hits * 20_000) for hits in same.values()}) == 1, same
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["command"] == "cachepilot bench sim"


def test_the_ratio_is_that_of_the_whole_simulator_over_the_faster_libcachesim() -> None:
    result = sim.run(requests=20_000, keys=2_000, rounds=1)
    speed = {row["what"]: row["mreq_per_cpu_s"] for row in result.rows}
    peers = [value for name, value in speed.items() if name.startswith("libcachesim")]
    assert (result.ratio is None) == (not peers)
    assert bool(peers) == (importlib.util.find_spec("libcachesim") is not None)
    if peers:
        assert result.ratio is not None
        assert abs(result.ratio - speed[sim.GOAL_ROW] / max(peers)) < 1e-9
