"""Two tuners on one arm, on a real Redis: one writes while both live; the other takes over when it has ended or was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.baselines import StaticPolicy
from serving.config_store import ConfigStoreUnavailable, DesiredState
from serving.knobs import Knobs
from serving.redis_config_store import RedisConfigStore
from tests.exporter import Exporter
from tests.tuner.test_loop_observes_decides_applies_and_records import INITIAL, REPORTS_LIVE, SPACE, Bench, Clock, traffic
from tests.waiting import PATIENCE
from tuner.config import Settings
from tuner.lease import LASTS_INTERVALS
from tuner.loop import Interval
from tuner.tune_command import line_of, tune_gateway

LOW, HIGH = SPACE.from_steps([0, 0, 0]), SPACE.from_steps([3, 2, 1])
WRITTEN = ("apply", "limit")
LASTS = LASTS_INTERVALS * (10.0 + 1.0)
"""Of the benches' leases, seconds."""


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter() as running:
        for arm in INITIAL:
            traffic(running, arm, 0, 0)
        yield running


class Pair:
    """Two tuners that want opposite knobs, each with a connection and a ledger of its own, and one clock."""

    def __init__(
        self, redis_url: str, exporter: Exporter, directory: Path, namespace: str, arms: tuple[str, str] = ("treatment",) * 2
    ) -> None:
        self.clock = Clock()
        self.exporter = exporter
        self.benches = []
        for name, wanted, arm in zip(("first", "second"), (LOW, HIGH), arms, strict=True):
            (directory / name).mkdir()
            store = RedisConfigStore(redis_url, namespace, REPORTS_LIVE)
            bench = Bench(
                store, exporter, directory / name, StaticPolicy(wanted), namespace, clock=self.clock, owner=name, arm=arm
            )
            self.benches.append(bench)
        self.first, self.second = self.benches

    async def start(self) -> None:
        for bench in self.benches:
            await bench.tuner.start(INITIAL)

    async def close(self) -> None:
        for bench in self.benches:
            bench.source.close()
            bench.ledger.close()
            await bench.store.close()

    async def desired(self) -> DesiredState:
        state = await self.first.store.read()
        assert state is not None
        return state

    def serve(self) -> None:
        """Serve traffic for an interval that every source sees."""
        for _ in range(2):
            for arm in INITIAL:
                traffic(self.exporter, arm, 30, 20)
            self.clock.now += 5.0
            for bench in self.benches:
                bench.source.refresh()

    async def step(self, bench: Bench) -> Interval:
        self.serve()
        return await bench.tuner.step()


@pytest.fixture
async def pair(redis_url: str, exporter: Exporter, tmp_path: Path, namespace: str) -> AsyncIterator[Pair]:
    made = Pair(redis_url, exporter, tmp_path, namespace)
    yield made
    await made.close()


def verdict(turn: Interval) -> tuple[str, str]:
    found = turn.arms["treatment"].verdict
    assert found is not None
    return found.action, found.reason


async def test_while_both_live_only_the_owner_writes_though_it_keeps_its_knobs_for_long(pair: Pair) -> None:
    await pair.start()
    kept, news = 0, []
    for _ in range(12):
        kept += verdict(await pair.step(pair.first))[0] == "keep"
        before = await pair.desired()
        turn = await pair.step(pair.second)
        assert verdict(turn) == ("hold", "standing by: first has the lease")
        assert turn.fault == ""
        assert await pair.desired() == before
        news.append(turn.news)
    assert kept >= 10  # the one that has the lease was where it wants to be, and wrote nothing
    assert (await pair.desired()).arms["treatment"] == LOW
    assert "another tuner, first" in news[0]
    assert set(news[1:]) == {""}
    records = [record for record in pair.second.ledger.decisions(namespace=pair.second.namespace) if record.arm == "treatment"]
    assert {record.verdict for record in records} == {"hold"}
    assert all(record.reason == "standing by: first has the lease (static setting)" for record in records)
    assert all(record.proposal == HIGH and record.applied == record.current for record in records)


async def test_the_one_that_looks_on_takes_over_in_its_next_turn_when_the_owner_has_ended(pair: Pair) -> None:
    await pair.start()
    await pair.step(pair.first)
    await pair.step(pair.second)
    pair.clock.ended = True
    assert await pair.first.tuner.run() == 0
    pair.clock.ended = False
    turn = await pair.step(pair.second)
    assert turn.news == "this tuner has the lease of arm 'treatment' now, which first had: it tunes from here on"
    assert verdict(turn)[0] in WRITTEN
    assert (await pair.desired()).arms["treatment"].cache_size > LOW.cache_size


async def test_an_owner_that_ends_by_a_fault_gives_the_lease_back_too(pair: Pair) -> None:
    await pair.start()

    def fail(turn: Interval) -> None:
        raise RuntimeError("nobody reads what it prints")

    with pytest.raises(RuntimeError, match="nobody reads"):
        await pair.first.tuner.run(on_interval=fail)
    assert verdict(await pair.step(pair.second))[0] in WRITTEN


async def test_a_killed_owner_is_followed_when_its_lease_has_lapsed_and_not_before(pair: Pair) -> None:
    await pair.start()
    seen = pair.clock()  # the first is never heard of again
    while True:
        before = await pair.desired()
        pair.serve()
        at = pair.clock()
        turn = await pair.second.tuner.step()
        if at - seen >= LASTS:
            break
        assert verdict(turn)[0] == "hold"
        assert await pair.desired() == before
    assert at - seen < LASTS + 2 * 10.0
    assert verdict(turn)[0] in WRITTEN
    assert "which first had" in turn.news


async def test_an_owner_that_slept_between_its_look_and_its_write_writes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.start()
    await pair.step(pair.second)
    write = pair.first.store.write
    taken: list[DesiredState] = []

    async def late(*args: Any, **named: Any) -> DesiredState:
        await pair.step(pair.second)
        pair.clock.now += LASTS
        await pair.step(pair.second)
        taken.append(await pair.desired())
        # Whatever version it believes to be the newest: the lease alone keeps it off.
        return await write(*args, **{**named, "expected_version": taken[0].version})

    monkeypatch.setattr(pair.first.store, "write", late)
    turn = await pair.step(pair.first)
    assert turn.fault == "another tuner took the lease meanwhile; held"
    assert verdict(turn) == ("hold", "not applied")
    assert await pair.desired() == taken[0]
    monkeypatch.undo()
    turn = await pair.step(pair.first)
    assert turn.news.startswith("this tuner lost the lease: arm 'treatment' is tuned by another tuner, second")
    assert verdict(turn) == ("hold", "standing by: second has the lease")


async def test_what_an_operator_writes_meanwhile_is_taken_over_by_the_owner_and_seen_by_the_other(pair: Pair) -> None:
    await pair.start()
    for _ in range(3):
        await pair.step(pair.first)
    state = await pair.desired()
    by_hand = Knobs(SPACE.max_size, LOW.ttl)
    await pair.second.store.write(
        {**state.arms, "treatment": by_hand}, expected_version=state.version, author="a person", reason="by hand", now=0.0
    )
    turn = await pair.step(pair.second)
    assert turn.arms["treatment"].knobs == by_hand
    assert verdict(turn)[0] == "hold"
    turn = await pair.step(pair.first)
    assert turn.arms["treatment"].knobs == by_hand
    assert verdict(turn)[0] in WRITTEN
    assert turn.state.version == state.version + 2


async def test_tuners_of_two_arms_write_side_by_side(redis_url: str, exporter: Exporter, tmp_path: Path, namespace: str) -> None:
    pair = Pair(redis_url, exporter, tmp_path, namespace, ("treatment", "control"))
    await pair.start()
    for _ in range(4):
        for bench in pair.benches:
            turn = await pair.step(bench)
            assert turn.news == ""
            assert "another tuner" not in turn.fault
    assert dict((await pair.desired()).arms) == {"treatment": LOW, "control": HIGH}
    await pair.close()


async def test_knobs_that_redis_lost_are_put_back_by_the_one_that_has_the_lease(pair: Pair) -> None:
    await pair.start()
    for _ in range(2):
        await pair.step(pair.first)
    lost = await pair.desired()
    await pair.second.store._redis.delete(pair.second.store._desired)
    turn = await pair.step(pair.second)
    assert "the tuner that has the lease writes it again" in turn.fault
    assert await pair.second.store.read() is None
    await pair.step(pair.first)
    assert (await pair.desired()).arms == lost.arms


async def test_a_store_that_fails_at_the_lease_holds_and_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.start()
    before = await pair.desired()

    async def fail(*_: Any, **__: Any) -> bool:
        raise ConfigStoreUnavailable("config store: no answer to the lease")

    with monkeypatch.context() as patch:
        patch.setattr(pair.first.store, "put_lease", fail)
        turn = await pair.step(pair.first)
        assert "no answer to the lease" in turn.fault
        assert verdict(turn) == ("hold", "not applied")
        assert await pair.desired() == before
    await pair.step(pair.first)
    assert (await pair.desired()).version == before.version + 1


async def test_replicas_are_counted_by_the_one_that_looks_on_and_not_waited_for(pair: Pair) -> None:
    await pair.start()
    await pair.second.report(7, "quick")
    at = pair.clock()
    turn = await pair.step(pair.second)
    assert (turn.expected, turn.confirmed, turn.fault) == (1, 0, "")
    assert pair.clock() - at == 10.0
    assert "0/1 replicas on version 1" in line_of(turn)["text"]
    assert "standing by: first has the lease" in line_of(turn)["text"]


def settings_of(url: str, namespace: str, exporter: Exporter, directory: Path) -> dict[str, Any]:
    return {
        "gateway": {
            "namespace": namespace,
            "redis_url": url,
            "arms": {"control": {"share": 0.5}, "treatment": {"share": 0.5}},
        },
        "tuner": {
            "arm": "treatment",
            "policy": "curve",
            "interval": 0.5,
            "confirm_timeout": 0.1,
            "signals": {"targets": [exporter.url], "scrape_interval": 0.1},
        },
        "experiments": {"ledger": {"url": f"sqlite:///{directory / 'ledger.db'}"}},
    }


async def test_the_command_says_once_who_tunes_the_arm_and_gives_its_own_lease_back(
    pair: Pair, redis_url: str, namespace: str, exporter: Exporter, tmp_path: Path
) -> None:
    settings = Settings.model_validate(settings_of(redis_url, namespace, exporter, tmp_path))
    await pair.first.tuner.start(INITIAL)
    shown: list[dict[str, Any]] = []
    await tune_gateway(settings, intervals=2, show=shown.append)
    (warning,) = [line["warning"] for line in shown if "warning" in line]
    assert "arm 'treatment' is tuned by another tuner, first" in warning
    assert [line["arms"]["treatment"]["reason"] for line in shown if "interval" in line] == [
        "standing by: first has the lease"
    ] * 2
    await pair.first.tuner.end()
    shown.clear()
    await tune_gateway(settings, intervals=1, show=shown.append)
    assert not [line for line in shown if "warning" in line]
    assert (await pair.first.store.leases())["treatment"].owner == ""


class Command:
    """`cachepilot tune` in a process of its own."""

    def __init__(self, settings: Path) -> None:
        arguments = ["-m", "tuner.cli", "tune", "--json", "--config", str(settings)]
        self.run = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env={**os.environ})
        self._overdue = threading.Timer(2 * PATIENCE, self.run.kill)
        self._overdue.start()

    def line(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line of such a kind."""
        assert self.run.stdout is not None
        for text in self.run.stdout:
            line: dict[str, Any] = json.loads(text)
            if wanted(line):
                return line
        pytest.fail("it ended before it said so")

    def end(self, number: int) -> int:
        self.run.send_signal(number)
        status = self.run.wait(PATIENCE)
        self._overdue.cancel()
        if self.run.stdout is not None:
            self.run.stdout.close()
        return status


def test_of_two_commands_the_standby_takes_over_from_one_that_is_killed_and_from_one_that_ends(
    redis_url: str, namespace: str, exporter: Exporter, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(settings_of(redis_url, namespace, exporter, tmp_path)))  # JSON is YAML

    def turned(line: dict[str, Any]) -> bool:
        return "interval" in line

    def owned(line: dict[str, Any]) -> bool:
        return "this tuner has the lease of arm 'treatment' now" in str(line.get("warning"))

    with contextlib.ExitStack() as stack:
        commands = []

        def start() -> Command:
            command = Command(path)
            commands.append(command)
            stack.callback(lambda: command.end(signal.SIGKILL) if command.run.poll() is None else None)
            return command

        owner = start()
        owner.line(turned)
        standby = start()
        said = standby.line(lambda line: "warning" in line)["warning"]
        assert f":{owner.run.pid}:" in said
        owner.end(signal.SIGKILL)
        assert f":{owner.run.pid}:" in standby.line(owned)["warning"]
        third = start()
        assert f":{standby.run.pid}:" in third.line(lambda line: "warning" in line)["warning"]
        assert standby.end(signal.SIGTERM) == 0
        assert f":{standby.run.pid}:" in third.line(owned)["warning"]
        assert third.end(signal.SIGINT) == 0
