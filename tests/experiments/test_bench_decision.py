"""The decision benchmark times real decisions on recorded signals and says how to repeat it."""

from __future__ import annotations

import json

import numpy as np

from experiments.bench.decision import record, run


def test_recorded_signals_are_those_of_a_cache_whose_knobs_wander() -> None:
    recorded = record(12, seed=3)
    assert len(recorded) == 12
    assert len({knobs for _, knobs in recorded}) == 12
    assert all(signals.ghost is not None and signals.requests > 0 for signals, _ in recorded)
    again = record(12, seed=3)
    assert all(np.array_equal(one.ghost.hits, two.ghost.hits) for (one, _), (two, _) in zip(recorded, again, strict=True))


def test_each_policy_is_timed_on_the_same_windows() -> None:
    result = run(("curve", "static:64MiB,3600"), windows=40)
    assert [row["policy"] for row in result.rows] == ["curve", "static:67108864,3600,0"]
    for row in result.rows:
        assert row["decisions"] == 36
        assert 0 < row["p50"] <= row["p99"] <= row["worst"]
        assert row["cpu_p99"] >= 0
    assert json.loads(json.dumps(result.to_dict()))["command"] == "cachepilot bench decision"
