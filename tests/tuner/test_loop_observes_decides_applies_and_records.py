"""The control loop on a real Redis, a real endpoint that is scraped, and a real SQLite ledger; only time is made up."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from agents.baselines import StaticPolicy
from agents.policy import Policy
from agents.registry import load_policy
from envs.objective import Prices
from envs.scrape_source import ScrapeSource
from experiments.ledger import Ledger
from serving.config_store import AppliedState, ConfigStoreUnavailable, DesiredState
from serving.knobs import MIB, Knobs, KnobSpace
from serving.metrics import LATENCY_BUCKETS
from serving.redis_config_store import RedisConfigStore
from serving.redis_server import RedisServer
from tests.exporter import Exporter
from tuner.guard import GuardLimits
from tuner.loop import LoopSettings, Tuner

SPACE = KnobSpace(size_steps=4, ttl_steps=3)
INITIAL = {"control": SPACE.from_steps([1, 1, 0]), "treatment": SPACE.from_steps([1, 1, 0])}
WANTED = SPACE.from_steps([2, 1, 0])
REPORTS_LIVE = 600.0
"""Seconds that a replica's report counts, by Redis' clock, which is not the test's: a turn may take a busy machine long."""


class Clock:
    """Seconds that pass only when somebody waits."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.ended = False

    def __call__(self) -> float:
        return self.now

    async def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.ended


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter() as running:
        for arm in INITIAL:
            traffic(running, arm, 0, 0)
        yield running


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[RedisConfigStore]:
    opened = RedisConfigStore(redis_url, namespace, REPORTS_LIVE)
    yield opened
    await opened.close()


def traffic(exporter: Exporter, arm: str, hits: int, misses: int) -> None:
    """Let an arm have served so many more hits and misses."""
    for outcome, count, seconds in (("hit", hits, 0.002), ("semantic_hit", 0, 0.01), ("miss", misses, 0.4)):
        exporter.add("ray_cachepilot_requests_total", count, arm=arm, outcome=outcome)
        exporter.add("ray_cachepilot_latency_seconds_total", count * seconds, arm=arm, outcome=outcome)
        exporter.observe("ray_cachepilot_request_latency_seconds", [seconds] * count, LATENCY_BUCKETS, arm=arm, outcome=outcome)
    exporter.add("ray_cachepilot_hits_total", hits, arm=arm, tier="memory")
    exporter.add("ray_cachepilot_cacheable_lookups_total", hits + misses, arm=arm)
    exporter.add("ray_cachepilot_expected_stale_hits_total", 0, arm=arm)
    for cause in ("miss", "refresh"):
        for kind, tokens in (("input", 100), ("output", 300)):
            exporter.add(
                "ray_cachepilot_upstream_tokens_total", misses * tokens if cause == "miss" else 0, arm=arm, kind=kind, cause=cause
            )


class Bench:
    """A tuner over one arm with everything around it."""

    def __init__(
        self,
        store: RedisConfigStore,
        exporter: Exporter,
        directory: Path,
        policy: Policy,
        namespace: str,
        *,
        clock: Clock | None = None,
        owner: str | None = None,
        arm: str = "treatment",
    ) -> None:
        self.clock = clock or Clock()
        self.store = store
        self.exporter = exporter
        self.ledger = Ledger(f"sqlite:///{directory / 'ledger.db'}", timeout=0.05)
        self.source = ScrapeSource([exporter.url], clock=self.clock)
        self.tuner = Tuner(
            store=store,
            source=self.source,
            policies={arm: policy},
            recorder=self.ledger,
            settings=LoopSettings(
                namespace=namespace,
                interval=10.0,
                window=10.0,
                confirm_timeout=1.0,
                space=SPACE,
                prices=Prices(),
                limits=GuardLimits(),
            ),
            clock=self.clock,
            wait=self.clock.wait,
            owner=owner,
        )
        self.namespace = namespace

    async def report(self, version: int, *replicas: str) -> None:
        for replica in replicas:
            await self.store.report(AppliedState(replica, version, self.clock()))

    def serve(self, hits: int = 60, misses: int = 40) -> None:
        """Serve traffic over the 10 seconds to come, seen by a scrape in their middle and by the loop's own at their end."""
        for arm in INITIAL:
            traffic(self.exporter, arm, hits // 2, misses // 2)
        self.clock.now += 5.0
        self.source.refresh()
        for arm in INITIAL:
            traffic(self.exporter, arm, hits - hits // 2, misses - misses // 2)
        self.clock.now += 5.0


@pytest.fixture
async def bench(store: RedisConfigStore, exporter: Exporter, tmp_path: Path, namespace: str) -> AsyncIterator[Bench]:
    made = Bench(store, exporter, tmp_path, StaticPolicy(WANTED), namespace)
    yield made
    made.source.close()
    made.ledger.close()


async def test_a_turn_writes_a_version_confirms_it_and_records_signals_verdict_and_cost(bench: Bench) -> None:
    first = await bench.tuner.start(INITIAL)
    assert (first.version, dict(first.arms)) == (1, INITIAL)
    bench.serve()
    await bench.report(2, "a", "b")
    turn = await bench.tuner.step()
    assert turn.fault == ""
    assert (turn.state.version, turn.expected, turn.confirmed) == (2, 2, 2)
    desired = await bench.store.read()
    assert isinstance(desired, DesiredState)
    assert desired.arms["treatment"] == WANTED
    assert desired.arms["control"] == INITIAL["control"]
    records = {record.arm: record for record in bench.ledger.decisions(namespace=bench.namespace)}
    assert records["treatment"].verdict == "apply"
    assert records["treatment"].applied == WANTED
    assert records["treatment"].signals["hit_ratio"] == pytest.approx(0.6)
    tokens = 100 * Prices().input_mtok + 300 * Prices().output_mtok
    assert records["treatment"].cost["tokens"] == pytest.approx(0.4 * tokens * 1e-6 * 1000, rel=1e-6)
    assert records["control"].verdict == "observe"
    json.dumps(records["treatment"].signals, allow_nan=False)


async def test_replicas_that_do_not_report_the_version_are_named(bench: Bench) -> None:
    await bench.tuner.start(INITIAL)
    bench.serve()
    await bench.report(2, "quick")
    await bench.report(1, "slow")
    turn = await bench.tuner.step()
    assert (turn.expected, turn.confirmed) == (2, 1)
    assert "slow" in turn.fault


async def test_a_gateway_that_reports_nothing_is_said(bench: Bench) -> None:
    await bench.tuner.start(INITIAL)
    bench.serve()
    turn = await bench.tuner.step()
    assert "no replica reports" in turn.fault


async def test_a_dead_endpoint_holds_the_knobs_and_says_so(bench: Bench) -> None:
    await bench.tuner.start(INITIAL)
    await bench.report(1, "a")
    bench.exporter.kill()
    bench.clock.now += 3600.0
    turn = await bench.tuner.step()
    assert turn.state.version == 1
    verdict = turn.arms["treatment"].verdict
    assert verdict is not None
    assert verdict.action == "hold"
    recorded = bench.ledger.decisions(namespace=bench.namespace)
    assert {record.arm for record in recorded} == {"control", "treatment"}
    assert all(record.applied == INITIAL[record.arm] for record in recorded)


async def test_no_traffic_holds_the_knobs(bench: Bench) -> None:
    await bench.tuner.start(INITIAL)
    await bench.report(1, "a")
    bench.serve(0, 0)
    turn = await bench.tuner.step()
    assert turn.state.version == 1
    verdict = turn.arms["treatment"].verdict
    assert verdict is not None
    assert verdict.action == "hold"


async def test_newer_knobs_of_somebody_else_are_taken_over_and_not_overwritten_blindly(bench: Bench) -> None:
    state = await bench.tuner.start(INITIAL)
    by_hand = replace(INITIAL["treatment"], cache_size=SPACE.max_size)
    await bench.store.write(
        {**INITIAL, "treatment": by_hand}, expected_version=state.version, author="a person", reason="by hand", now=bench.clock()
    )
    bench.serve()
    await bench.report(3, "a")
    turn = await bench.tuner.step()
    assert turn.arms["treatment"].knobs == by_hand
    assert turn.state.version == 3
    limited = turn.arms["treatment"].verdict
    assert limited is not None
    assert limited.action == "apply"


async def test_the_loop_takes_over_what_it_finds(bench: Bench) -> None:
    found = {"control": Knobs(MIB, 60.0), "treatment": Knobs(2 * MIB, 60.0)}
    await bench.store.write(found, expected_version=0, author="a person", reason="before", now=bench.clock())
    assert dict((await bench.tuner.start(INITIAL)).arms) == found


async def test_an_arm_that_the_store_does_not_have_is_refused_by_name(bench: Bench) -> None:
    await bench.store.write({"control": Knobs(MIB, 60.0)}, expected_version=0, author="a person", reason="before", now=0.0)
    with pytest.raises(ValueError, match="treatment"):
        await bench.tuner.start(INITIAL)


async def test_a_redis_that_dies_holds_and_one_that_comes_back_is_used_again(
    exporter: Exporter, tmp_path: Path, namespace: str
) -> None:
    with RedisServer() as server:
        store = RedisConfigStore(server.url, namespace, REPORTS_LIVE)
        bench = Bench(store, exporter, tmp_path, load_policy("curve"), namespace)
        await bench.tuner.start(INITIAL)
        bench.serve()
        await bench.report(1, "a")
        assert (await bench.tuner.step()).fault == ""
    bench.serve()
    turn = await bench.tuner.step()
    assert "config store" in turn.fault
    assert turn.state.version == 1
    assert bench.ledger.decisions(namespace=namespace)[-1].reason.count("config store")
    bench.source.close()
    bench.ledger.close()
    await store.close()


async def test_the_loop_ends_when_told(bench: Bench) -> None:
    await bench.tuner.start(INITIAL)
    bench.clock.ended = True
    assert await bench.tuner.run() == 0


async def test_knobs_that_redis_lost_are_put_back_and_the_loop_goes_on(
    exporter: Exporter, tmp_path: Path, namespace: str
) -> None:
    with RedisServer(tcp=True) as first:
        store = RedisConfigStore(first.url, namespace, REPORTS_LIVE)
        bench = Bench(store, exporter, tmp_path, StaticPolicy(WANTED), namespace)
        await bench.tuner.start(INITIAL)
        bench.serve()
        await bench.report(2, "a")
        assert (await bench.tuner.step()).state.version == 2
        port = int(first.url.rsplit(":", 1)[1])
    with RedisServer(port=port):
        await bench.report(2, "a")
        bench.serve(0, 0)
        turn = await bench.tuner.step()
        assert "not confirmed by a" in turn.fault  # version 2 of before is not version 1 of now
        found = await store.read()
        assert found is not None
        assert (found.version, found.arms["treatment"]) == (1, WANTED)
        await bench.report(1, "a")
        bench.serve(0, 0)
        assert (await bench.tuner.step()).fault == ""
    bench.source.close()
    bench.ledger.close()
    await store.close()


async def test_a_clock_that_is_set_back_does_not_stop_the_loop(bench: Bench) -> None:
    await bench.tuner.start(INITIAL)
    await bench.report(1, "a")
    times: list[float] = []

    def turned(turn: object) -> None:
        times.append(bench.clock())
        if len(times) == 1:
            bench.clock.now -= 3600.0

    await bench.tuner.run(max_intervals=3, on_interval=turned)
    assert times[1] - (times[0] - 3600.0) <= 2 * 10.0


@pytest.mark.parametrize(
    "document",
    ["not JSON", '{"version": 9, "arms": {}, "written_at": 0}', '{"version": 1e30, "arms": {}, "written_at": 0}'],
    ids=["junk", "no arm", "huge"],
)
async def test_a_desired_state_that_cannot_be_used_holds_and_is_said(bench: Bench, redis_url: str, document: str) -> None:
    await bench.tuner.start(INITIAL)
    bench.serve()
    await bench.report(1, "a")
    with Redis.from_url(redis_url) as client:
        client.hset(f"cachepilot:{{{bench.namespace}}}:desired", "document", document)
        turn = await bench.tuner.step()
        assert "config store" in turn.fault
        assert client.hget(f"cachepilot:{{{bench.namespace}}}:desired", "document") == document.encode()


async def test_a_report_that_cannot_be_read_is_left_out(bench: Bench, redis_url: str) -> None:
    await bench.report(1, "a")
    with Redis.from_url(redis_url) as client:
        client.hset(f"cachepilot:{{{bench.namespace}}}:applied", "b", f"{client.time()[0]} junk")
    assert [item.replica for item in await bench.store.applied()] == ["a"]


async def test_a_write_over_a_version_that_is_no_number_holds_and_is_said(bench: Bench, redis_url: str) -> None:
    await bench.tuner.start(INITIAL)
    bench.serve()
    with Redis.from_url(redis_url) as client:
        client.hset(f"cachepilot:{{{bench.namespace}}}:desired", "version", "junk")
    turn = await bench.tuner.step()
    assert "somebody else wrote" in turn.fault
    verdict = turn.arms["treatment"].verdict
    assert verdict is not None
    assert verdict.action == "hold"


async def test_a_locked_ledger_holds_and_what_it_missed_is_recorded_once_it_is_free(bench: Bench, tmp_path: Path) -> None:
    await bench.tuner.start(INITIAL)
    await bench.report(1, "a")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    try:
        bench.serve(0, 0)
        other.execute("BEGIN EXCLUSIVE")
        first = await bench.tuner.step()
        assert first.fault.startswith("ledger: ")
        assert "locked" in first.fault
        bench.serve()
        held = await bench.tuner.step()
        assert "ledger: " in held.fault
        assert "2 decisions wait" in held.fault  # those of the turn before
        assert held.state.version == 1
        assert bench.ledger.decisions(namespace=bench.namespace) == []
        other.execute("ROLLBACK")
    finally:
        other.close()
    bench.serve()
    await bench.report(2, "a")
    turn = await bench.tuner.step()
    assert (turn.fault, turn.state.version) == ("", 2)
    records = [record for record in bench.ledger.decisions(namespace=bench.namespace) if record.arm == "treatment"]
    assert [record.at for record in records] == [first.at, held.at, turn.at]
    assert [record.verdict for record in records] == ["hold", "hold", "apply"]
    assert "ledger: " in records[1].reason


async def test_a_ledger_that_blocks_does_not_block_the_event_loop(bench: Bench, tmp_path: Path) -> None:
    slow = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", timeout=60.0)
    bench.tuner._recorder = slow
    await bench.tuner.start(INITIAL)
    await bench.report(1, "a")
    bench.serve(0, 0)
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    step = asyncio.create_task(bench.tuner.step())
    try:
        # Were the loop blocked, nothing could free the ledger, and the step would end with a fault.
        while not bench.tuner._waiting:
            await asyncio.sleep(0.005)
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert (await step).fault == ""
    assert len(bench.ledger.decisions(namespace=bench.namespace)) == 2
    slow.close()


async def test_the_oldest_of_too_many_waiting_decisions_are_given_up_and_counted(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.loop.MOST_WAITING", 4)
    bench.tuner._waiting = deque(maxlen=4)
    await bench.tuner.start(INITIAL)
    await bench.report(1, "a")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    turns = []
    for _ in range(4):
        bench.serve(0, 0)
        turns.append(await bench.tuner.step())
    assert "4 decisions wait, 2 older ones are given up" in turns[-1].fault
    other.execute("ROLLBACK")
    other.close()
    bench.clock.ended = True
    await bench.tuner.run()  # the end of the loop writes what waits
    recorded = bench.ledger.decisions(namespace=bench.namespace)
    assert [record.at for record in recorded] == [turn.at for turn in turns[2:] for _ in range(2)]


async def test_a_tuner_that_knows_no_leases_is_said_and_held_for_though_it_is_still_for_a_while(bench: Bench) -> None:
    state = await bench.tuner.start(INITIAL)
    other = {**INITIAL, "treatment": replace(INITIAL["treatment"], cache_size=SPACE.max_size)}
    await bench.store.write(other, expected_version=state.version, author="tuner", reason="other", now=bench.clock() + 1.0)
    bench.serve()
    await bench.report(2, "a")
    turn = await bench.tuner.step()
    assert "another tuner writes here too" in turn.fault
    assert (turn.state.version, turn.arms["treatment"].knobs) == (2, other["treatment"])
    verdict = turn.arms["treatment"].verdict
    assert verdict is not None
    assert verdict.action == "hold"
    for _ in range(3):  # the other one is still, and may go on at any time
        bench.serve()
        turn = await bench.tuner.step()
        assert "another tuner writes here too" in turn.fault
        assert turn.state.version == 2
    bench.serve()
    await bench.report(3, "a")
    turn = await bench.tuner.step()
    assert (turn.fault, turn.state.version) == ("", 3)


async def test_a_write_of_its_own_whose_answer_was_lost_is_not_another_tuner(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.tuner.start(INITIAL)
    bench.serve()
    write = bench.store.write

    async def lossy(*args: Any, **named: Any) -> DesiredState:
        await write(*args, **named)
        raise ConfigStoreUnavailable("config store: the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "write", lossy)
        assert (await bench.tuner.step()).fault == "config store: the answer was lost"
    bench.serve()
    await bench.report(2, "a")
    turn = await bench.tuner.step()
    assert (turn.fault, turn.state.version) == ("", 2)
