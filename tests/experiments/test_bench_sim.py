"""The simulator's benchmark measures what it says."""

from __future__ import annotations

import importlib.util
import json

import pytest

from experiments.bench import environment, sim


def test_every_contestant_runs_the_same_requests_under_the_same_budget() -> None:
    result = sim.run(requests=20_000, keys=50_000, rounds=1)
    assert all(row["cpu_s"] > 0 and row["mreq_s"] > 0 for row in result.rows)
    # Without a TTL all are the same cache: byte-weighted LRU.
    same = {
        row["what"]: row["hit_ratio"] for row in result.rows if "TTL 1 h" not in row["what"] and "by 1,000" not in row["what"]
    }
    assert len({round(hits * 20_000) for hits in same.values()}) == 1, same
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["command"] == "cachepilot bench sim"


def test_the_ratio_is_that_of_the_whole_simulator_over_the_faster_libcachesim() -> None:
    result = sim.run(requests=20_000, keys=2_000, rounds=1)
    speed = {row["what"]: row["mreq_s"] for row in result.rows}
    peers = [value for name, value in speed.items() if name.startswith("libcachesim")]
    assert (result.ratio is None) == (not peers)
    assert bool(peers) == (importlib.util.find_spec("libcachesim") is not None)
    if peers:
        assert result.ratio is not None
        assert abs(result.ratio - speed[sim.GOAL_ROW] / max(peers)) < 1e-9


def test_the_parts_of_an_environments_step_are_the_whole_of_it() -> None:
    before = {name: getattr(owner, name) for owner, name in environment.PARTS.values()}
    result = environment.run(lanes=2, requests_per_step=50, steps=environment.EPISODE + 2, rounds=1)
    vector, single, blind, cold, *parts = result.rows
    assert min(row["steps_per_second"] for row in (vector, single, blind, cold)) > 0
    assert sum(row["us_per_step"] for row in parts) == pytest.approx(vector["us_per_step"])
    assert all(row["us_per_step"] > 0 for row in parts)
    assert {row["what"].removeprefix("of a step: ") for row in parts} == {*environment.PARTS, environment.REST}
    assert before == {name: getattr(owner, name) for owner, name in environment.PARTS.values()}
