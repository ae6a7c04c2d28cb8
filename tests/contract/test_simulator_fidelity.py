"""The simulator and the live tiers give the knobs the same meaning: one trace through both, window by window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from envs.simulator import MemoryEviction, SimConfig
from envs.workloads import Trace, load, sessions
from experiments.fidelity import Stage, compare
from serving import writing
from serving.hotset import WarmupRules
from serving.knobs import MIB, Knobs
from serving.tiers.redis import RedisTier
from tests.requirements import trace as trace_file

POINT = 0.01
both_evictions = pytest.mark.parametrize("eviction", ["clock", "lru"])
MEASURES = ("hit_ratio", "memory", "redis", "evictions", "expirations", "refreshes", "resident_bytes")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine under load the store is slow: the gateway would put answers into memory first, and those evict others."""
    monkeypatch.setattr(writing, "STORE_FIRST_SECONDS", 60.0)


def store(url: str, namespace: str, connections: int = 16) -> RedisTier:
    # For a machine under load: a timeout would be a miss, and touches that a timer sends may overtake an operation.
    return RedisTier(url, namespace, read_deadline=20.0, write_deadline=20.0, touch_interval=3600.0, max_connections=connections)


def assert_same(table: pd.DataFrame) -> None:
    for measure in MEASURES:
        simulated, measured = table[f"{measure}_simulator"], table[f"{measure}_tiers"]
        assert simulated.tolist() == pytest.approx(measured.tolist(), abs=1e-12, nan_ok=True), measure


@pytest.mark.parametrize(("prefix", "eviction"), [(True, "clock"), (False, "lru")])
async def test_mooncake_hits_by_tier_agree_through_shrink_ttl_change_and_flush(
    redis_url: str, namespace: str, prefix: bool, eviction: MemoryEviction
) -> None:
    trace = load(trace_file("mooncake_conversation.jsonl.gz"), limit=10_000)
    assert trace.chain.max() > 0
    window = trace.duration / 12
    schedule = [
        Stage(4, window, Knobs(24 * MIB, 3600.0)),
        Stage(2, window, Knobs(6 * MIB, 3600.0)),
        Stage(3, window, Knobs(24 * MIB, window / 2)),
        Stage(4, window, flush=True),
    ]
    table = await compare(trace, SimConfig(prefix=prefix, memory_eviction=eviction), schedule, store(redis_url, namespace))
    assert table["requests"].sum() == len(trace)
    for measure in ("hit_ratio", "memory", "redis"):
        apart = (table[f"{measure}_simulator"] - table[f"{measure}_tiers"]).abs()
        assert apart.max() <= POINT, f"{measure}: {apart.max():.4f} apart"
    assert_same(table)
    # The replay went through what it is about: hits in both tiers, evictions, expired entries.
    assert table[["memory_tiers", "redis_tiers", "evictions_tiers", "expirations_tiers"]].max().min() > 0


@both_evictions
async def test_warm_up_refreshes_the_same_entries(redis_url: str, namespace: str, eviction: MemoryEviction) -> None:
    trace = sessions(4_000, 400, duration=400.0, seed=3)
    rules = WarmupRules(capacity=64, half_life=60.0, refreshes_per_second=2.0, burst=10)
    config = SimConfig(warmup=rules, memory_eviction=eviction)
    schedule = [
        Stage(3, 50.0, Knobs(MIB // 8, 40.0, 0.5)),
        Stage(2, 50.0, flush=True),
        Stage(4, 50.0, Knobs(MIB // 4, 80.0, 0.2)),
    ]
    table = await compare(trace, config, schedule, store(redis_url, namespace))
    assert table["refreshes_tiers"].min() > 0
    assert_same(table)


# One connection is what refreshes that run side by side contend for most.
@pytest.mark.parametrize(("seed", "connections"), [(0, 1), (1, 1), (2, 16), (3, 16)])
async def test_warm_up_in_a_budget_that_its_refreshes_overrun(
    redis_url: str, namespace: str, seed: int, connections: int
) -> None:
    # Refreshes evict other planned entries, so their order and the moment at which liveness is asked decide what stays. Windows
    # as short as the warm-up's rounds, and entries of all sizes: one entry more or less is seen at once.
    made = sessions(1_200, 150, duration=120.0, seed=seed)
    trace: Trace = replace(made, size=np.random.default_rng(seed).integers(200, 8_000, len(made)))
    config = SimConfig(warmup=WarmupRules(capacity=48, half_life=60.0, refreshes_per_second=4.0, burst=12))
    schedule = [
        Stage(60, 1.0, Knobs(96 * 1024, 15.0, 1.0)),
        Stage(30, 1.0, Knobs(48 * 1024, 15.0, 0.5), flush=True),
        Stage(40, 1.0, Knobs(64 * 1024, 40.0, 1.0)),
    ]
    table = await compare(trace, config, schedule, store(redis_url, namespace, connections))
    assert ((table["refreshes_tiers"] > 1) & (table["evictions_tiers"] > 1)).sum() > 10
    assert_same(table)


@both_evictions
async def test_entries_of_one_key_that_change_their_size(redis_url: str, namespace: str, eviction: MemoryEviction) -> None:
    made = sessions(3_000, 200, duration=300.0, seed=5)
    trace: Trace = replace(made, size=np.random.default_rng(0).integers(33, 40_000, len(made)))
    # 0.1 of the budget is less than many entries are large: those are never resident in memory.
    schedule = [Stage(3, 50.0, Knobs(MIB // 8, 30.0)), Stage(4, 50.0, Knobs(32 * 1024, 30.0))]
    table = await compare(trace, SimConfig(l1_share=0.1, memory_eviction=eviction), schedule, store(redis_url, namespace))
    assert_same(table)


async def test_a_block_whose_predecessor_was_evicted_is_made_anew(redis_url: str, namespace: str) -> None:
    # Chains of four over few keys under a budget that cuts them: some are broken in their middle, some after their TTL.
    made = sessions(4_000, 60, duration=400.0, seed=7)
    place = np.arange(len(made), dtype=np.int32) % 4
    head = np.arange(len(made)) - place
    chained = replace(made, time=made.time[head], key=made.key[head] + place.astype(np.uint64), chain=place)
    schedule = [Stage(4, 50.0, Knobs(MIB // 16, 20.0)), Stage(4, 50.0, Knobs(MIB // 32, 60.0))]
    table = await compare(chained, SimConfig(), schedule, store(redis_url, namespace))
    assert_same(table)
    apart = await compare(chained, SimConfig(prefix=False), schedule, store(redis_url, f"{namespace}-apart"))
    assert_same(apart)
    assert (table["hit_ratio_tiers"] < apart["hit_ratio_tiers"]).any()


@both_evictions
async def test_without_a_store_the_memory_tier_is_the_whole_cache(eviction: MemoryEviction) -> None:
    trace = sessions(4_000, 400, duration=400.0, seed=3)
    rules = WarmupRules(capacity=64, half_life=60.0, refreshes_per_second=2.0, burst=10)
    schedule = [
        Stage(3, 50.0, Knobs(MIB // 8, 40.0, 0.5)),
        Stage(2, 50.0, Knobs(MIB // 16, 40.0, 0.5), flush=True),
        Stage(4, 50.0, Knobs(MIB // 4, 80.0, 0.2)),
    ]
    table = await compare(trace, SimConfig(warmup=rules, memory_eviction=eviction), schedule, None)
    # All hits are memory's; the gateway has no other tier.
    assert table["memory_simulator"].equals(table["hit_ratio_simulator"])
    assert table["redis_simulator"].sum() == 0
    assert_same(table)
    assert table["evictions_tiers"].max() > 0


async def test_a_trace_that_flushes_by_itself_is_refused(redis_url: str, namespace: str) -> None:
    trace = replace(sessions(10, 5, duration=10.0, seed=1), flush_time=np.array([5.0]))
    tier = store(redis_url, namespace)
    with pytest.raises(ValueError, match="put flushes into the schedule"):
        await compare(trace, SimConfig(), [Stage(1, 10.0, Knobs(MIB, 60.0))], tier)
    await tier.close()
