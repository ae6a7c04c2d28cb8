"""What every config store promises of leases: compared and set in one instant, and no write without the lease it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from serving.config_store import ConfigStore, ConfigStoreUnavailable, DesiredState, Lease, LeaseLost, VersionConflict
from serving.knobs import Knobs
from serving.redis_config_store import RedisConfigStore
from tests.memory_config_store import MemoryConfigStore

FIRST = Lease("control", "host-a:1:x", 1_800_000_000.25, 90.0, 1)
NEXT = replace(FIRST, revision=2)
OTHERS = Lease("control", "host-b:1:y", 1_800_000_100.0, 30.0, 3)


@pytest.fixture(params=["redis", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ConfigStore]:
    opened: ConfigStore = (
        RedisConfigStore(request.getfixturevalue("redis_url"), request.getfixturevalue("namespace"))
        if request.param == "redis"
        else MemoryConfigStore()
    )
    yield opened
    await opened.close()


async def write(store: ConfigStore, version: int, *leases: Lease) -> DesiredState:
    return await store.write(
        {"control": Knobs(1000 + version, 60.0)}, expected_version=version, author="tuner", reason="", now=5.0, leases=leases
    )


async def test_a_lease_that_was_put_is_found_and_there_is_none_before(store: ConfigStore) -> None:
    assert await store.leases() == {}
    assert await store.put_lease(FIRST, found=None)
    other_arm = replace(FIRST, arm="treatment")
    assert await store.put_lease(other_arm, found=None)
    assert await store.leases() == {"control": FIRST, "treatment": other_arm}


async def test_a_lease_is_put_only_over_the_one_that_was_found(store: ConfigStore) -> None:
    assert not await store.put_lease(NEXT, found=FIRST)
    assert await store.put_lease(FIRST, found=None)
    assert not await store.put_lease(OTHERS, found=None)
    assert await store.put_lease(NEXT, found=FIRST)
    assert not await store.put_lease(OTHERS, found=FIRST)
    assert not await store.put_lease(OTHERS, found=replace(OTHERS, revision=2))
    assert await store.leases() == {"control": NEXT}


async def test_a_lease_that_was_given_back_is_found_so_and_can_be_taken(store: ConfigStore) -> None:
    free = replace(NEXT, owner="")
    assert await store.put_lease(FIRST, found=None)
    assert await store.put_lease(free, found=FIRST)
    assert await store.leases() == {"control": free}
    assert await store.put_lease(OTHERS, found=free)


async def test_of_many_who_take_a_lease_at_once_exactly_one_gets_it(store: ConfigStore) -> None:
    leases = [replace(FIRST, owner=f"host:{number}:x") for number in range(8)]
    got = await asyncio.gather(*(store.put_lease(lease, found=None) for lease in leases))
    assert sum(got) == 1
    assert (await store.leases())["control"] == leases[got.index(True)]


async def test_a_write_needs_the_leases_that_it_names_and_changes_nothing_without(store: ConfigStore) -> None:
    with pytest.raises(LeaseLost, match="control"):
        await write(store, 0, FIRST)
    assert await store.read() is None
    await store.put_lease(FIRST, found=None)
    assert (await write(store, 0, FIRST)).version == 1
    await store.put_lease(NEXT, found=FIRST)
    await store.put_lease(OTHERS, found=NEXT)
    kept = await store.read()
    for late in (FIRST, NEXT, replace(OTHERS, revision=2), replace(NEXT, revision=3), replace(OTHERS, arm="treatment")):
        with pytest.raises(LeaseLost):
            await write(store, 1, late)
        with pytest.raises(LeaseLost):
            await write(store, 1, OTHERS, late)
    assert await store.read() == kept
    assert (await write(store, 1, OTHERS)).version == 2


async def test_a_lease_does_not_stand_for_the_version_nor_keeps_it_anybody_else_from_writing(store: ConfigStore) -> None:
    await store.put_lease(FIRST, found=None)
    assert (await write(store, 0)).version == 1  # an operator, an experiment
    with pytest.raises(VersionConflict):
        await write(store, 0, FIRST)
    assert (await write(store, 1, FIRST)).version == 2


@pytest.mark.parametrize(
    "value",
    [b"junk", b"1 a {}", b"2 " + FIRST.owner.encode() + b" " + FIRST.to_json(), b"1 x " + FIRST.to_json(), b"\xff {"],
    ids=["junk", "no fields", "another revision", "another owner", "no text"],
)
async def test_a_lease_that_cannot_be_read_is_named_and_nobody_writes_by_it(redis_url: str, namespace: str, value: bytes) -> None:
    store, key = RedisConfigStore(redis_url, namespace), f"cachepilot:{{{namespace}}}:leases"
    async with Redis.from_url(redis_url) as raw:
        await raw.hset(key, "control", value)
        with pytest.raises(ValueError, match=f"HDEL cachepilot:{{{namespace}}}:leases control"):
            await store.leases()
        with pytest.raises(LeaseLost):
            await write(store, 0, FIRST)
        await raw.hdel(key, "control")
    assert await store.leases() == {}
    await store.close()


@pytest.mark.parametrize(
    "fields",
    [{"owner": "a b"}, {"lasts": 0.0}, {"lasts": float("inf")}, {"since": float("nan")}, {"since": 1e300}, {"revision": 0}],
)
def test_a_lease_without_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="lease: "):
        replace(FIRST, **fields)  # type: ignore[arg-type]


async def test_an_unreachable_store_says_where_it_was_looked_for(tmp_path: Path) -> None:
    store = RedisConfigStore(f"unix://{tmp_path}/nothing.sock", "x")
    for call in (store.leases, lambda: store.put_lease(FIRST, found=None)):
        with pytest.raises(ConfigStoreUnavailable, match=r"nothing\.sock"):
            await call()
    await store.close()
