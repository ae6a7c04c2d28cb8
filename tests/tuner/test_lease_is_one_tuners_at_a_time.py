"""An arm's lease: one tuner at a time, back at once when its owner ends, in a while when it was killed; and people are told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config_store import ConfigStoreUnavailable, Lease, LeaseLost, VersionConflict
from serving.knobs import Knobs
from tests.memory_config_store import MemoryConfigStore
from tuner.lease import LASTS_INTERVALS, LeaseKeeper, Sighting, claim, lasts_for, owner_name, sight

LASTS = 30.0
THEIRS = Lease("control", "theirs", 1_800_000_000.0, LASTS, 7)


@dataclass
class Time:
    """Seconds of one machine."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def keeper(store: MemoryConfigStore, owner: str, clock: Time, lasts: float = LASTS) -> LeaseKeeper:
    return LeaseKeeper(store, ["control"], owner=owner, lasts=lasts, clock=clock)


def test_what_nobody_has_is_taken_and_what_is_ours_is_renewed() -> None:
    assert claim("control", None, owner="ours", lasts=LASTS, now=5.0) == Lease("control", "ours", 5.0, LASTS, 1)
    free = Sighting(replace(THEIRS, owner=""), 5.0)
    assert claim("control", free, owner="ours", lasts=LASTS, now=5.0) == Lease("control", "ours", 5.0, LASTS, 8)
    ours = Lease("control", "ours", 1.0, 10.0, 3)
    late = claim("control", Sighting(ours, 0.0), owner="ours", lasts=LASTS, now=1e6)
    assert late == Lease("control", "ours", 1.0, LASTS, 4)


@given(st.floats(0, 1e6), st.floats(0.001, 1e4), st.floats(0, 1e5))
def test_what_is_anothers_is_taken_when_it_was_not_renewed_for_as_long_as_its_owner_said(
    since: float, lasts: float, passed: float
) -> None:
    seen = Sighting(replace(THEIRS, lasts=lasts), since)
    taken = claim("control", seen, owner="ours", lasts=LASTS, now=since + passed)
    assert (taken is not None) == ((since + passed) - since >= lasts)


def test_a_lease_counts_as_unchanged_only_from_when_it_was_seen_and_by_a_clock_that_goes_on() -> None:
    first = sight(None, THEIRS, 100.0)
    assert first == Sighting(THEIRS, 100.0)
    assert sight(first, THEIRS, 120.0) == first
    renewed = replace(THEIRS, revision=8)
    assert sight(first, renewed, 120.0) == Sighting(renewed, 120.0)
    assert sight(first, THEIRS, 40.0) == Sighting(THEIRS, 40.0)  # the clock was set back


def test_names_are_one_word_and_each_start_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a strange host")
    names = {owner_name() for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("a-strange-host:") and " " not in name for name in names)


async def test_the_one_that_keeps_its_lease_has_it_for_ever_and_the_other_is_told_once_whose_it_is() -> None:
    store, clock = MemoryConfigStore(), Time()
    owner, standby = keeper(store, "first", clock), keeper(store, "second", clock)
    said = []
    for _ in range(100):
        await owner.renew()
        await standby.renew()
        clock.now += 10.0
        assert set(owner.held) == {"control"}
        assert not standby.held
        assert standby.others["control"].owner == "first"
        said.append(standby.told())
    assert owner.told() == ""
    assert "first" in said[0]
    assert "since 2027-01-15 08:00:00 UTC" in said[0]
    assert "end one of the two" in said[0]
    assert set(said[1:]) == {""}


async def test_a_lease_that_is_given_back_is_taken_at_the_next_look_and_that_is_said() -> None:
    store, clock = MemoryConfigStore(), Time()
    owner, standby = keeper(store, "first", clock), keeper(store, "second", clock)
    await owner.renew()
    await standby.renew()
    standby.told()
    await owner.give_back()
    assert not owner.held
    await standby.renew()
    assert standby.held["control"].owner == "second"
    assert "which first had" in standby.told()
    await owner.give_back()  # what it has no more it cannot give back
    assert (await store.leases())["control"].owner == "second"


async def test_a_killed_owners_lease_is_taken_when_it_has_lapsed_and_not_before() -> None:
    store, clock = MemoryConfigStore(), Time()
    await keeper(store, "killed", clock).renew()
    restarted = keeper(store, "restarted", clock, lasts=1.0)  # the owner's word counts, not that of who waits
    for _ in range(int(LASTS / 10.0)):
        await restarted.renew()
        assert not restarted.held
        clock.now += 10.0
    await restarted.renew()
    assert restarted.held["control"].owner == "restarted"


async def test_an_owner_that_slept_is_told_that_it_lost_its_lease_to_whom() -> None:
    store, clock = MemoryConfigStore(), Time()
    sleeper, standby = keeper(store, "sleeper", clock), keeper(store, "standby", clock)
    await sleeper.renew()
    await standby.renew()
    clock.now += LASTS
    await standby.renew()
    await sleeper.renew()
    assert not sleeper.held
    told = sleeper.told()
    assert "this tuner lost the lease" in told
    assert "standby" in told


async def test_a_store_that_was_away_gives_the_owner_its_whole_time_to_renew() -> None:
    store, clock = MemoryConfigStore(), Time()
    owner, standby = keeper(store, "first", clock), keeper(store, "second", clock)
    await owner.renew()
    await standby.renew()
    store.away = True
    for one in (owner, standby):
        with pytest.raises(ConfigStoreUnavailable):
            await one.renew()
        assert not one.held
    clock.now += 100 * LASTS
    store.away = False
    await standby.renew()
    assert not standby.held
    await owner.renew()
    assert set(owner.held) == {"control"}
    store.away = True
    await owner.give_back()  # nowhere to give it back to: it lapses


async def test_leases_that_the_store_lost_are_taken_by_one() -> None:
    store, clock = MemoryConfigStore(), Time()
    owner, standby = keeper(store, "first", clock), keeper(store, "second", clock)
    await owner.renew()
    await standby.renew()
    store.kept.clear()
    await standby.renew()
    await owner.renew()
    assert set(standby.held) == {"control"}
    assert not owner.held


def test_a_lease_lasts_some_intervals() -> None:
    assert lasts_for(30.0, 10.0) == LASTS_INTERVALS * 40.0


@dataclass
class Tuner:
    """One of those that compete, with a clock of its own; it may sleep at any time, also between its look and its write."""

    keeper: LeaseKeeper
    clock: Time
    version: int = 0
    wrote: list[int] = field(default_factory=list)


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["renew", "write", "end", "pass", "short", "jump", "lose", "away"]),
        st.floats(-50.0, 50.0),
    ),
    max_size=60,
)


@given(ACTIONS)
@settings(max_examples=150, deadline=None)
def test_whatever_clocks_stores_and_tuners_do_only_the_owner_in_the_store_writes(actions: list[tuple[int, str, float]]) -> None:
    asyncio.run(_compete(actions))


async def _compete(actions: list[tuple[int, str, float]]) -> None:
    store = MemoryConfigStore()
    clocks = [Time(1_800_000_000.0 + 1000.0 * number) for number in range(3)]
    tuners = [Tuner(keeper(store, f"tuner-{number}", clock), clock) for number, clock in enumerate(clocks)]
    for number, action, by in actions:
        tuner = tuners[number]
        try:
            if action == "renew":
                await tuner.keeper.renew()
                state = await store.read()
                tuner.version = state.version if state else 0
                stored = (await store.leases())["control"]
                # Who thinks that it has the lease has just put it; who does not knows who has.
                assert dict(tuner.keeper.held) == ({"control": stored} if stored.owner == f"tuner-{number}" else {})
            elif action == "write" and tuner.keeper.held:
                lease = tuner.keeper.held["control"]
                arms = {"control": Knobs(1000 + number, 60.0)}
                try:
                    await store.write(
                        arms, expected_version=tuner.version, author="tuner", reason="", now=tuner.clock(), leases=[lease]
                    )
                    assert store.kept["control"] == lease
                    tuner.version += 1
                except (LeaseLost, VersionConflict):
                    assert store.kept.get("control") != lease or (store.state.version if store.state else 0) != tuner.version
            elif action == "end":
                await tuner.keeper.give_back()
        except ConfigStoreUnavailable:
            assert store.away
        if action in ("pass", "short"):
            for clock in clocks:
                clock.now += LASTS if action == "pass" else LASTS / 3
        elif action == "jump":
            tuner.clock.now += by
        elif action == "lose":
            store.kept.clear()
            store.state = None
        elif action == "away":
            store.away = not store.away
