"""What every config store promises the tuner and the gateways. Redis is the one there is; it must outlive a restart."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from serving.config_store import AppliedState, ConfigStore, ConfigStoreUnavailable, DesiredState, VersionConflict
from serving.knobs import Knobs
from serving.redis_config_store import RedisConfigStore
from serving.redis_server import RedisServer
from tests.waiting import until

ARMS = {"control": Knobs(1000, 60.0), "treatment": Knobs(2000, math.inf, 0.25)}


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[ConfigStore]:
    opened = RedisConfigStore(redis_url, namespace)
    yield opened
    await opened.close()


async def write(store: ConfigStore, version: int, size: int = 1000) -> DesiredState:
    return await store.write({"a": Knobs(size, 60.0)}, expected_version=version, author="test", reason="why", now=5.0)


@contextlib.asynccontextmanager
async def watching(store: ConfigStore) -> AsyncIterator[list[DesiredState]]:
    """Collects what :meth:`watch` yields."""
    seen: list[DesiredState] = []

    async def collect() -> None:
        async for state in store.watch():
            seen.append(state)  # noqa: PERF401 (never ends)

    task = asyncio.create_task(collect())
    try:
        yield seen
        assert not task.done(), "watching never ends"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_desired_before_the_first_write(store: ConfigStore) -> None:
    assert await store.read() is None


async def test_what_was_written_is_read(store: ConfigStore) -> None:
    written = await store.write(ARMS, expected_version=0, author="tuner", reason="the curve says so", now=12.5)
    assert written == DesiredState(1, ARMS, 12.5, "tuner", "the curve says so")
    assert await store.read() == written


async def test_the_version_grows_by_one(store: ConfigStore) -> None:
    for version in range(12):
        assert (await write(store, version)).version == version + 1


async def test_a_write_on_an_old_version_changes_nothing(store: ConfigStore) -> None:
    await write(store, 0)
    kept = await write(store, 1, size=2000)
    for outdated in (0, 1, 3):
        with pytest.raises(VersionConflict, match="found 2"):
            await write(store, outdated, size=3000)
    assert await store.read() == kept


async def test_of_simultaneous_writers_exactly_one_wins(store: ConfigStore, redis_url: str, namespace: str) -> None:
    other = RedisConfigStore(redis_url, namespace)
    results = await asyncio.gather(
        *(write(writer, 0, size) for writer, size in ((store, 1), (other, 2), (store, 3), (other, 4))), return_exceptions=True
    )
    await other.close()
    winners = [result for result in results if isinstance(result, DesiredState)]
    assert len(winners) == 1
    assert sum(isinstance(result, VersionConflict) for result in results) == 3
    assert await store.read() == winners[0]


async def test_namespaces_are_apart(store: ConfigStore, redis_url: str, namespace: str) -> None:
    other = RedisConfigStore(redis_url, namespace + "-other")
    await write(store, 0)
    assert await other.read() is None
    await other.close()


async def test_a_watcher_sees_the_current_state_and_every_later_one(store: ConfigStore, redis_url: str, namespace: str) -> None:
    first = await write(store, 0)
    watcher = RedisConfigStore(redis_url, namespace, poll=60.0)  # so that only the publication can tell it
    async with watching(watcher) as seen:
        await until(lambda: seen == [first], "the current state")
        second = await write(store, 1)
        await until(lambda: seen == [first, second], "the change")
        third = await write(store, 2)
        await until(lambda: seen == [first, second, third], "the next change")
    await watcher.close()


async def test_a_watcher_that_misses_the_publication_finds_the_change_by_looking(
    store: ConfigStore, redis_url: str, namespace: str
) -> None:
    watcher = RedisConfigStore(redis_url, namespace, poll=0.01)
    async with watching(watcher) as seen, Redis.from_url(redis_url) as raw:
        silent = DesiredState(7, ARMS, 1.0)
        await raw.hset(f"cachepilot:{{{namespace}}}:desired", mapping={"version": 7, "document": silent.to_json()})
        await until(lambda: seen == [silent], "the change that nobody published")
    await watcher.close()


async def test_a_state_that_cannot_be_read_is_skipped_by_watchers_and_named_to_readers(
    store: ConfigStore, redis_url: str, namespace: str
) -> None:
    async with Redis.from_url(redis_url) as raw:
        await raw.hset(f"cachepilot:{{{namespace}}}:desired", mapping={"version": 1, "document": b"{}"})
    with pytest.raises(ValueError, match="expected a document with version"):
        await store.read()
    async with watching(store) as seen:
        good = await write(store, 1)
        await until(lambda: seen == [good], "the next good state")


async def test_a_watcher_outlives_a_restart_and_a_loss_of_the_data(tmp_path: Path, namespace: str) -> None:
    store = RedisConfigStore(f"unix://{tmp_path}/redis.sock", namespace, poll=0.05)
    async with watching(store) as seen:  # begins before there is a server
        with pytest.raises(ConfigStoreUnavailable, match="check that it runs"):
            await store.read()
        with RedisServer(tmp_path):
            await write(store, 0)
            last = await write(store, 1)
            await until(lambda: seen[-1:] == [last], "the state before the restart")
            before = len(seen)
        with pytest.raises(ConfigStoreUnavailable, match="check that it runs"):
            await store.read()
        with RedisServer(tmp_path):
            assert await store.read() is None
            again = await write(store, 0, size=77)
            await until(lambda: seen[-1] == again, "the state after the restart")
            assert len(seen) == before + 1, "the loss of the data is not a change"
    await store.close()


async def test_replicas_that_report_are_listed_by_name_with_their_last_report(store: ConfigStore) -> None:
    assert await store.applied() == []
    await store.report(AppliedState("replica-2", 4, 10.0))
    await store.report(AppliedState("replica-1 #a b", 3, 10.0))
    await store.report(AppliedState("replica-2", 5, 11.25))
    assert await store.applied() == [AppliedState("replica-1 #a b", 3, 10.0), AppliedState("replica-2", 5, 11.25)]


async def test_a_report_that_is_not_renewed_is_forgotten(redis_url: str, namespace: str) -> None:
    store = RedisConfigStore(redis_url, namespace, report_ttl=0.5)  # Redis' clock is read in whole seconds
    await store.report(AppliedState("gone", 1, 0.0))

    async def only_the_living() -> bool:
        await store.report(AppliedState("living", 1, 0.0))
        return [state.replica for state in await store.applied()] == ["living"]

    await until(only_the_living, "the report to be forgotten")
    await store.close()


async def test_reports_do_not_stay_in_redis_when_nobody_reads_them(redis_url: str, namespace: str) -> None:
    patient, store = (RedisConfigStore(redis_url, namespace, report_ttl=seconds) for seconds in (3.0, 0.05))
    kept = f"cachepilot:{{{namespace}}}:applied"
    await patient.report(AppliedState("gone", 1, 0.0))
    await patient.close()
    async with Redis.from_url(redis_url) as redis:
        assert 0 < await redis.ttl(kept) <= 60

        async def only_the_living() -> bool:
            await store.report(AppliedState("living", 1, 0.0))
            return bool(await redis.hkeys(kept) == [b"living"])

        await until(only_the_living, "the report of a replica that has gone to go as well")

        async def nothing() -> bool:
            return not await redis.exists(kept)

        await until(nothing, "the last report to expire")
    await store.close()


async def test_an_unreachable_store_says_where_it_was_looked_for(tmp_path: Path) -> None:
    store = RedisConfigStore(f"unix://{tmp_path}/nothing.sock", "x")
    for call in (store.read, store.applied, lambda: store.report(AppliedState("r", 1, 0.0)), lambda: write(store, 0)):
        with pytest.raises(ConfigStoreUnavailable, match=r"nothing\.sock"):
            await call()
    await store.close()


@pytest.mark.parametrize("namespace", ["", "a:b", "{a}", "a*", "x" * 65])
def test_a_namespace_that_does_not_fit_into_keys_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace: expected 1 to 64 letters"):
        RedisConfigStore("redis://127.0.0.1:1", namespace)


async def test_the_password_of_an_unreachable_store_is_not_told(tmp_path: Path) -> None:
    store = RedisConfigStore(f"unix://user:secret@{tmp_path / 'none.sock'}", "ns")
    try:
        with pytest.raises(ConfigStoreUnavailable) as caught:
            await store.read()
    finally:
        await store.close()
    assert "none.sock" in str(caught.value)
    assert "secret" not in str(caught.value)
