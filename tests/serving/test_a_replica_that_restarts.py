"""The budget in Redis is shared: a replica that comes back must not shrink it, with its initial knobs, for the others."""

from __future__ import annotations

from redis import Redis

from serving.knobs import MIB, Knobs
from serving.redis_config_store import RedisConfigStore
from serving.tiers.redis import RedisTier
from tests.serving.entries import entry
from tests.serving.gateways import running


async def test_it_evicts_nothing_when_its_initial_knobs_are_smaller_than_the_tuners(redis_url: str, namespace: str) -> None:
    settings = {
        "redis_url": redis_url,
        "namespace": namespace,
        "upstream": {"base_url": "http://127.0.0.1:9/v1"},
        "rules": {"semantic": {"enabled": False}},
        "arms": {"only": {"knobs": {"cache_size": 1 * MIB}}},
    }
    config = RedisConfigStore(redis_url, namespace)
    store = RedisTier(redis_url, namespace, read_deadline=5, write_deadline=5)
    await config.write({"only": Knobs(4 * MIB, 600.0)}, expected_version=0, author="test", reason="", now=0.0)
    await store.resize("only", 4 * MIB)
    for number in range(30):
        await store.put("only", entry(number, size=100_000))
    async with running(settings) as client:
        runtime = client.gateway.runtime
        assert (runtime.version, runtime.cache.knobs("only")) == (1, Knobs(4 * MIB, 600.0))
        stats = await store.stats("only")
        assert (stats.entries, stats.budget) == (30, 4 * MIB)
    await store.close()
    await config.close()


async def test_a_desired_state_that_cannot_be_read_does_not_keep_a_replica_from_starting(redis_url: str, namespace: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.hset(f"cachepilot:{{{namespace}}}:desired", mapping={"version": "3", "document": "not JSON"})
    async with running({"redis_url": redis_url, "namespace": namespace}) as started:
        assert (await started.request("GET", "/readyz")).json["version"] == 0
