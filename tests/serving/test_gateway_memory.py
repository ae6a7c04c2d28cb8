"""A gateway's memory tier: one arena for all replicas of a node, or memory of its own where that cannot be had."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

import serving.runtime
from serving.arena.layout import ArenaError
from serving.cache import CacheRules, TieredCache
from serving.knobs import MIB, Knobs
from serving.memory import arena_path, arena_size, describe_arena, open_memory
from serving.presence import Presence
from serving.redis_config_store import RedisConfigStore
from serving.redis_server import RedisServer
from serving.roll_call import LIVES_SECONDS
from serving.settings import GatewaySettings
from serving.tiers.arena import ArenaTier
from tests.serving.arenas import Worker
from tests.serving.entries import entry, request
from tests.serving.gateways import Client, Model, before, running
from tests.waiting import until


def budget(client: Client, arm: str = "control") -> int:
    return client.gateway.runtime.cache.memory.stats_now(arm).budget


async def test_what_one_replica_stored_is_a_memory_hit_at_another_without_redis_being_asked(
    redis_url: str, namespace: str
) -> None:
    model = Model()
    async with before(model, replicas=2, redis_url=redis_url, namespace=namespace) as (first, second):
        assert (await first.ask("a question")).cache == "MISS"
        store = second.gateway.runtime.cache.store
        assert store is not None
        store._read_deadline = 0.0  # type: ignore[attr-defined]
        found = await second.ask("a question")
        assert (found.cache, found.headers["x-cache-tier"]) == ("HIT", "memory")


async def test_entries_outlive_a_gateway_without_redis(tmp_path: Path) -> None:
    model = Model()
    for turn in range(2):
        async with before(model, memory={"path": str(tmp_path / "arena")}) as (client,):
            assert (await client.ask("a question")).cache == ("HIT" if turn else "MISS")
    async with before(model, memory={"path": str(tmp_path / "arena"), "shared": False}) as (client,):
        assert (await client.ask("a question")).cache == "MISS", "memory of its own is empty at the start"


async def test_an_arena_that_cannot_be_opened_costs_nobody_an_answer_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "arena").write_bytes(b"something else" * 1000)
    (tmp_path / "arena").chmod(0o600)
    with caplog.at_level(logging.WARNING):
        async with before(Model(), memory={"path": str(tmp_path / "arena")}) as (client,):
            assert [(await client.ask("a question")).cache for _ in range(2)] == ["MISS", "HIT"]
            assert (await client.request("GET", "/readyz")).json["memory"] == "refused"
            assert await client.metric("cachepilot_memory_refused") == 1.0
            assert await client.metric("cachepilot_memory_shared") == 0.0
    said = [record.getMessage() for record in caplog.records if "memory of its own" in record.getMessage()]
    assert len(said) == 1
    assert "the file is not an arena; remove it, or set another path" in said[0]


async def test_a_replica_that_starts_while_redis_is_away_leaves_the_budgets_of_the_others(tmp_path: Path, namespace: str) -> None:
    memory = {"path": str(tmp_path / "arena")}
    settings: dict[str, Any] = {
        "redis_url": f"unix://{tmp_path}/redis.sock", "namespace": namespace, "memory": memory,
        "arms": {"control": {"knobs": {"cache_size": 1 * MIB}}}, "upstream": {"base_url": "http://127.0.0.1:9/v1"},
    }  # fmt: skip
    async with running(settings, replica="r0") as first:
        with RedisServer(tmp_path) as server:
            config = RedisConfigStore(server.url, namespace)
            await config.write({"control": Knobs(8 * MIB, 60.0)}, expected_version=0, author="test", reason="", now=0.0)
            await config.close()
            await until(lambda: budget(first) == 2 * MIB, "the knobs to be applied")
        async with running(settings, replica="r1") as second:
            assert second.gateway.runtime.cache.knobs("control").cache_size == 1 * MIB
            assert (budget(first), budget(second)) == (2 * MIB, 2 * MIB)
            with RedisServer(tmp_path):  # which has nothing: then the settings are what there is
                await until(lambda: budget(second) == MIB // 4, "the knobs to be known", seconds=30)


async def test_nodes_divide_the_memory_part_of_the_budget_and_replicas_of_one_do_not(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.runtime, "PRESENCE_SECONDS", 0.05)
    common: dict[str, Any] = {
        "redis_url": redis_url, "namespace": namespace, "arms": {"control": {"knobs": {"cache_size": 8 * MIB}}}
    }  # fmt: skip
    async with before(Model(), replicas=2, **common) as (one, sibling):
        assert (budget(one), budget(sibling)) == (2 * MIB, 2 * MIB)
        async with running({**common, "replicas": 3}, replica="elsewhere") as other:
            assert budget(other) == 1 * MIB, "from its start: it has asked who else there is"
            await until(lambda: budget(one) == budget(sibling) == 1 * MIB, "the others to hear of it")
        await until(lambda: budget(one) == 2 * MIB, "the others to hear that it is gone")


async def test_of_the_replicas_of_one_arena_one_reports_what_it_holds(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.runtime, "PRESENCE_SECONDS", 0.02)
    async with before(Model(), replicas=3, redis_url=redis_url, namespace=namespace) as clients:
        await clients[0].ask("a question")
        held = clients[0].gateway.runtime.cache.memory.stats_now("control").bytes
        assert held > 0

        async def once() -> bool:
            series = 'cachepilot_resident_bytes{arm="control",tier="memory"}'
            return sorted([await client.metric(series) for client in clients]) == [0.0, 0.0, float(held)]

        await until(once, "one to report it")


def hold_the_lease(connection: Any, path: str) -> None:
    """Be in the middle of a write until the next message."""
    tier = ArenaTier(path, 4 * MIB)
    assert tier.lease.acquire() is not False
    connection.send("held")
    connection.recv()
    tier.lease.release()
    connection.send("released")
    connection.recv()


async def test_knobs_are_applied_though_another_process_is_stuck_in_a_write(tmp_path: Path) -> None:
    tier = ArenaTier(tmp_path / "arena", 4 * MIB, firm=0.01)
    cache = TieredCache(memory=tier, store=None, vectors=None, rules=CacheRules(ttl_jitter=0.0))
    await cache.apply({"a": Knobs(100_000, 100.0)})
    worker = Worker(hold_the_lease, str(tmp_path / "arena"))
    assert worker.answer() == "held"
    await cache.apply({"a": Knobs(50_000, 100.0)})
    assert cache.knobs("a").cache_size == 50_000
    began = asyncio.get_running_loop().time()
    for number in range(100):
        await cache.put("a", entry(number), now=0.0)
    assert asyncio.get_running_loop().time() - began < 100 * 0.02, "one who is stuck is not waited for by each write"
    assert tier.dropped >= 100
    assert worker.ask("release") == "released"
    await until(lambda: tier.stats_now("a").budget == 50_000, "the budget to be set")
    await cache.put("a", entry(1), now=0.0)
    assert cache.lookup_now("a", request(1), now=1.0) is not None
    worker.close()
    await cache.close()


def test_one_who_is_stuck_in_a_write_is_not_waited_for_by_each_arms_budget(tmp_path: Path) -> None:
    tier, stuck = (ArenaTier(tmp_path / "arena", 4 * MIB, firm=0.1) for _ in range(2))
    assert stuck.lease.acquire() is True
    began = time.monotonic()
    for number in range(32):
        with pytest.raises(ArenaError, match="is one of its users stopped"):
            tier.resize_now(f"arm-{number}", 1000)
    assert time.monotonic() - began < 32 * 0.1 / 2
    stuck.lease.release()
    for each in (tier, stuck):
        each.close_now()


async def test_without_redis_what_means_the_same_is_found_again_after_a_restart(tmp_path: Path) -> None:
    from serving.tiers.vector import VectorTier
    from tests.serving.entries import int8, unit

    async def embed(text: str) -> bytes:
        return int8(unit(1))

    for turn in range(2):
        tier = ArenaTier(tmp_path / "arena", 4 * MIB)
        cache = TieredCache(memory=tier, store=None, vectors=VectorTier(), rules=CacheRules(ttl_jitter=0.0))
        await cache.apply({"a": Knobs(100_000, 100.0)})
        if turn == 0:
            await cache.put("a", entry(1, vector=int8(unit(1))), now=0.0)

        async def found(cache: TieredCache = cache) -> bool:
            return (await cache.lookup("a", request(2, "text"), now=1.0, embed=embed)).outcome == "semantic_hit"

        await until(found, "an answer by meaning")
        await cache.close()


def test_the_arena_is_the_namespaces_and_large_enough_for_what_the_tuner_may_set() -> None:
    settings = GatewaySettings.model_validate(
        {"namespace": "n", "redis_url": "redis://r", "space": {"max_size": 64 * MIB}, "memory": {"path": "/dev/shm/arena"}}
    )
    assert arena_path(settings) == Path("/dev/shm/arena")
    assert arena_size(settings) == 20 * MIB
    alone = GatewaySettings.model_validate({"namespace": "n", "space": {"max_size": 4 * MIB}})
    assert arena_path(alone) == Path(f"/dev/shm/cachepilot-n-{os.geteuid()}")
    assert arena_size(alone) == 80 * MIB, "without Redis it holds everything; this arm begins above the tuner's bounds"


def test_an_arena_takes_no_more_than_half_of_its_file_system(tmp_path: Path) -> None:
    huge = {"space": {"max_size": 1 << 50}, "memory": {"path": str(tmp_path / "arena")}}
    system = os.statvfs(tmp_path)
    assert arena_size(GatewaySettings.model_validate(huge)) <= system.f_frsize * system.f_blocks // 2


def test_more_arms_than_an_arena_has_room_for_are_refused_before_there_is_anything_to_lose(tmp_path: Path) -> None:
    memory = {"path": str(tmp_path / "arena"), "size": 4 * MIB}
    names = [f"arm-{number}" for number in range(33)]
    settings = GatewaySettings.model_validate({"memory": memory, "arms": {name: {"share": 1 / 33} for name in names}})
    opened = open_memory(settings, replica="r0")
    assert (opened.state, opened.name) == ("refused", "r0")
    assert "expected at most 32 arms" in opened.refused


def of_redis(tmp_path: Path, url: str | None, *arms: str, namespace: str = "shop") -> GatewaySettings:
    names = arms or ("control",)
    return GatewaySettings.model_validate(
        {
            "memory": {"path": str(tmp_path / "arena"), "size": 1 * MIB}, "redis_url": url, "namespace": namespace,
            "arms": {name: {"share": 1 / len(names)} for name in names},
        }
    )  # fmt: skip


def test_an_arena_is_of_one_redis_and_one_namespace_at_a_time(tmp_path: Path) -> None:
    opened = open_memory(of_redis(tmp_path, "redis://:password@a:6379/0"), replica="r0")
    assert opened.state == "shared"
    same = open_memory(of_redis(tmp_path, "redis://:another@a:6379/0"), replica="r1")
    assert (same.state, same.name) == ("shared", opened.name)
    for other in (
        of_redis(tmp_path, "redis://b:6379/0"),
        of_redis(tmp_path, "redis://a:6379/1"),
        of_redis(tmp_path, "redis://a:6379/0?db=1"),
        of_redis(tmp_path, "redis://a:6379/0", namespace="other"),
        of_redis(tmp_path, None),
    ):
        refused = open_memory(other, replica="r2")
        assert (refused.state, refused.name) == ("refused", "r2")
        assert "others use it with another Redis" in refused.refused
    for each in (opened, same):
        assert isinstance(each.tier, ArenaTier)
        each.tier.close_now()
    moved = open_memory(of_redis(tmp_path, "redis://b:6379/0"), replica="r3")
    assert (moved.state, moved.name) == ("shared", opened.name), "with nobody else there it is compared with what the other has"
    assert isinstance(moved.tier, ArenaTier)
    moved.tier.close_now()


def test_arms_that_the_settings_name_no_more_leave_their_room_to_others(tmp_path: Path) -> None:
    for turn in range(40):
        opened = open_memory(of_redis(tmp_path, None, f"arm-{turn}", "stays"), replica="r0")
        assert opened.state == "shared", opened.refused
        tier = opened.tier
        assert isinstance(tier, ArenaTier)
        tier.resize_now(f"arm-{turn}", 10 * MIB)
        tier.resize_now("stays", 10_000)
        if turn == 0:
            tier.put_now("stays", entry(1))
        for number in range(2, 600):
            tier.put_now(f"arm-{turn}", entry(number, size=3000))
        assert tier.stats_now(f"arm-{turn}").bytes > MIB // 2
        assert tier.get_now("stays", entry(1).key) is not None
        assert tier.get_now(f"arm-{turn - 1}", entry(599).key) is None
        tier.close_now()


def test_arms_of_others_that_use_the_arena_stay(tmp_path: Path) -> None:
    one = open_memory(of_redis(tmp_path, None, "before"), replica="r0").tier
    one.resize_now("before", 10_000)
    one.put_now("before", entry(1))
    two = open_memory(of_redis(tmp_path, None, "after"), replica="r1").tier
    assert one.get_now("before", entry(1).key) is not None
    for each in (one, two):
        assert isinstance(each, ArenaTier)
        each.close_now()


def test_what_is_at_an_arenas_path_is_told_without_changing_it(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    assert describe_arena(path) == "not made yet"
    tier = ArenaTier(path, 4 * MIB)
    before = path.read_bytes()
    assert describe_arena(path).startswith("4 MiB, of which")
    assert describe_arena(path).endswith("in use")
    tier.close_now()
    assert describe_arena(path).endswith("used by nobody")
    assert path.read_bytes() == before
    path.chmod(0o644)
    with pytest.raises(ArenaError, match="expected a file of this user alone, mode 0600"):
        describe_arena(path)
    path.chmod(0o600)
    path.write_bytes(bytes(1000))
    with pytest.raises(ArenaError, match="the file is not an arena"):
        describe_arena(path)
    with pytest.raises(ArenaError, match="is not there or cannot be written to"):
        describe_arena(tmp_path / "nowhere" / "arena")


async def test_who_is_gone_without_a_word_is_forgotten(redis_url: str, namespace: str) -> None:
    names = (("m", "a"), ("m", "b"), ("n", "c"))
    one, sibling, other = (Presence(redis_url, namespace, memory, name) for memory, name in names)
    for each in (other, sibling, one):
        await each.exchange()
    assert (one.memories, one.speaks, sibling.speaks, other.speaks) == (2, True, True, True)
    await sibling.exchange()
    assert (sibling.memories, sibling.speaks) == (2, False)
    redis = Redis.from_url(redis_url)
    at = f"cachepilot:{{{namespace}}}:memories"
    now = int((await redis.time())[0])
    for member in (b"m a", b"n c"):
        ends = (await redis.zscore(at, member) or 0.0) / 1000
        assert 0 < ends - now <= LIVES_SECONDS + 1, "it is there for so long after it has said so"
        await redis.zadd(at, {member: 1000.0 * (now - 1)})  # as if that were over
    await sibling.exchange()
    assert (sibling.memories, sibling.speaks) == (1, True)
    for each in (one, sibling, other):
        await each.close()
    await redis.aclose()


async def test_who_is_gone_is_forgotten_though_the_clock_of_redis_went_back(redis_url: str, namespace: str) -> None:
    presence = Presence(redis_url, namespace, "m", "a")
    redis = Redis.from_url(redis_url)
    at = f"cachepilot:{{{namespace}}}:memories"
    await redis.zadd(at, {b"n long-gone": (time.time() + 86_400) * 1000})
    await presence.exchange()
    assert presence.memories == 2
    assert (await redis.zscore(at, b"n long-gone") or 0.0) <= (time.time() + 60) * 1000
    await presence.close()
    await redis.aclose()


@pytest.mark.parametrize("redis", [True, False], ids=["with redis", "alone"])
async def test_a_replica_that_was_refused_the_arena_has_it_when_those_with_another_redis_are_gone(
    tmp_path: Path, redis_url: str, namespace: str, redis: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving.runtime, "ARENA_SECONDS", 0.02)
    monkeypatch.setattr(serving.runtime, "PRESENCE_SECONDS", 0.05)
    path = tmp_path / "arena"
    before_the_roll = GatewaySettings.model_validate(
        {"memory": {"path": str(path)}, "redis_url": "redis://old", "namespace": namespace}
    )
    other = open_memory(before_the_roll, replica="old")
    assert other.state == "shared"
    other.tier.resize_now("control", MIB)
    other.tier.update_mark_now("control", lambda _: 7)
    other.tier.put_now("control", entry(1))
    settings: dict[str, Any] = {"namespace": namespace, "memory": {"path": str(path)}, "redis_url": redis_url if redis else None}
    async with before(Model(), replicas=2 if redis else 1, **settings) as clients:
        runtimes = [client.gateway.runtime for client in clients]
        assert [runtime.memory.state for runtime in runtimes] == ["refused"] * len(runtimes)
        assert (await clients[0].ask("a question")).cache == "MISS"
        assert isinstance(other.tier, ArenaTier)
        other.tier.close_now()
        await until(lambda: all(runtime.memory.state == "shared" for runtime in runtimes), "the arena to be opened")
        await until(lambda: all(runtime.cache.memory is runtime.memory.tier for runtime in runtimes), "it to be used")
        for client in clients:
            assert (await client.request("GET", "/readyz")).json["memory"] == "shared"
            assert (await client.ask("a question")).cache == "HIT", "from Redis, or what its own memory had"
            assert await client.metric("cachepilot_memory_refused") == 0.0
        assert (await clients[0].ask("a question")).headers["x-cache-tier"] == "memory"
        assert (await clients[0].ask("another")).cache == "MISS"
        assert (await clients[-1].ask("another")).headers["x-cache-tier"] == "memory", "they share it"
        assert all(runtime.cache.lookup_now("control", request(1), now=1.0) is None for runtime in runtimes), "of another Redis"
        share = clients[0].gateway.runtime.cache.knobs("control").cache_size // (4 if redis else 1)
        await until(lambda: all(budget(client) == share for client in clients), "one memory to have the whole part of the budget")
    said = [record.getMessage() for record in caplog.records if "memory of its own" in record.getMessage()]
    assert len(said) == len(clients), "once by each"


async def test_a_replica_that_has_the_arena_at_last_is_a_neighbour(
    tmp_path: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.runtime, "ARENA_SECONDS", 0.02)
    path = tmp_path / "arena"
    path.write_bytes(b"something else" * 1000)
    path.chmod(0o600)
    settings: dict[str, Any] = {
        "namespace": namespace, "memory": {"path": str(path)}, "redis_url": redis_url,
        "neighbours": {"listen": "127.0.0.1:0", "advertise": "127.0.0.1:9", "secret": "s" * 16, "transport": "tcp"},
    }  # fmt: skip
    async with before(Model(), **settings) as (client,):
        runtime = client.gateway.runtime
        assert runtime.cache.neighbours is None
        path.unlink()

        def serves() -> bool:
            return runtime.cache.neighbours is not None and runtime._neighbours is not None and runtime._neighbours.server.serving

        await until(serves, "it to read its neighbours and to serve its arena")
