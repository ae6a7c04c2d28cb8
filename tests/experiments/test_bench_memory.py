from __future__ import annotations

import json

import numpy as np
import pytest

from envs.workloads import Trace
from experiments.bench import memory
from experiments.bench.memory_eviction import LRU, POLICIES, Policy, hit_ratio
from experiments.bench.memory_processes import kills

MIB = 1 << 20


def trace(keys: list[int], size: int = 100) -> Trace:
    count = len(keys)
    return Trace(
        name="made",
        time=np.arange(count, dtype=np.float64),
        key=np.array(keys, np.uint64),
        size=np.full(count, size, np.int64),
        group=np.full(count, -1, np.int64),
        input_tokens=np.ones(count, np.int32),
        output_tokens=np.ones(count, np.int32),
    )


def test_it_measures_the_arena_beside_its_peers() -> None:
    result = memory.latency(entries=300, size=16 * MIB, rounds=1)
    rows = {row["what"]: row for row in result.rows}
    assert next(iter(rows)) == memory.OURS
    assert memory.REDIS in rows
    assert rows[memory.HANDED]["get_p50_us"] is None
    for name, row in rows.items():
        assert 0.0 < row["put_p50_us"] <= row["put_p99_us"]
        assert name == memory.HANDED or 0.0 < row["get_p50_us"] <= row["get_p99_us"]
    assert result.ratio is not None
    assert result.ratio > 1.0, "slower than a server in another process"
    assert json.loads(json.dumps(result.to_dict()))["command"] == "cachepilot bench memory"


def test_it_counts_what_several_readers_read() -> None:
    result = memory.throughput(entries=300, size=16 * MIB, seconds=0.1)
    assert [row["readers"] for row in result.rows] == [1, 2, 4]
    assert all(row["gets_per_s"] > 0 for row in result.rows)


def test_recovery_finds_no_wrong_answer() -> None:
    result = memory.recovery(size=4 * MIB, killed=3)
    values = {row["what"]: row["value"] for row in result.rows}
    assert (values["kills"], values["wrong"], values["hangs"]) == (3, 0, 0)
    assert values["answers checked"] > 0


def test_writers_that_are_killed_are_told_apart_by_where_they_were_hit() -> None:
    summary = kills(5, seed=3)
    assert 0 <= summary["repairs"] <= 5
    assert summary["wrong"] == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_keeps_to_its_budget_and_knows_what_it_holds(name: str) -> None:
    dice = np.random.default_rng(1)
    policy: Policy = POLICIES[name](1000)
    asked: set[int] = set()
    for key in dice.zipf(1.3, 3000).tolist():
        hit = policy.ask(key, 10 + key % 200)
        assert not hit or key in asked
        asked.add(key)
        held = policy.held  # type: ignore[attr-defined]
        assert sum(held.values()) <= 1000
        assert key in held
    assert not policy.ask(-1, 1001)
    assert -1 not in policy.held  # type: ignore[attr-defined]


def test_hit_ratios_are_those_of_the_papers_examples() -> None:
    scan = trace([1, 2, *range(10, 14), 1, 2, *range(20, 24), 1, 2])
    assert hit_ratio(scan, LRU(400)) == 0.0
    assert hit_ratio(trace([1, 2, 3, 1, 2, 3]), LRU(300)) == 0.5
    looped = trace([1, 1, 2, 3, 1, 4, 1, 5, 1])
    assert hit_ratio(looped, POLICIES["CLOCK"](200)) >= hit_ratio(looped, LRU(200))
