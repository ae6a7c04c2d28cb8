"""Redis, the embedder or a neighbour goes away: the gateway answers on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.access_log import read_records
from serving.embedding import EmbeddingUnavailable
from serving.knobs import Knobs
from serving.llm_sim import LlmSimProcess
from serving.redis_config_store import RedisConfigStore
from serving.redis_server import RedisServer
from serving.runtime import Runtime
from serving.settings import LlmSimSettings
from tests.serving.gateways import running
from tests.waiting import until


@pytest.fixture(scope="module")
def model() -> Iterator[LlmSimProcess]:
    with LlmSimProcess(LlmSimSettings(port=0, ttft=0.0, tpot=0.0)) as process:
        yield process


async def test_it_starts_and_answers_without_redis(model: LlmSimProcess) -> None:
    settings = {"redis_url": "redis://127.0.0.1:1/0", "upstream": {"base_url": model.base_url}}
    async with running(settings) as client:
        assert (await client.request("GET", "/readyz")).json["config_store"] == "unreachable"
        first, second = await client.ask("hello"), await client.ask("hello")
        assert (first.status, first.cache, second.status) == (200, "MISS", 200)
        assert second.cache == "HIT"  # the memory tier has it still


async def test_redis_that_dies_costs_hits_and_no_errors(model: LlmSimProcess) -> None:
    settings = {"upstream": {"base_url": model.base_url}, "rules": {"l1_share": 0.0}}
    with RedisServer() as redis:
        async with running({**settings, "redis_url": redis.url}) as client:
            await client.ask("hello")
            assert (await client.ask("hello")).headers["x-cache-tier"] == "redis"
            redis.__exit__(None, None, None)
            reply = await client.ask("hello")
            assert (reply.status, reply.cache) == (200, "MISS")
            await client.gateway.runtime.flush()


async def test_knobs_stay_as_they_were_when_the_config_store_dies(model: LlmSimProcess) -> None:
    with RedisServer() as redis:
        async with running({"redis_url": redis.url, "upstream": {"base_url": model.base_url}}) as client:
            store = RedisConfigStore(redis.url, "cachepilot")
            wanted = Knobs(4 << 20, 120.0, 0.0)
            await store.write({"control": wanted}, expected_version=0, author="test", reason="", now=time.time())
            await until(lambda: client.gateway.runtime.version == 1, "the knobs to be applied")
            await until(lambda: _reported(store), "the version to be reported")
            await store.close()
            redis.__exit__(None, None, None)
            assert client.gateway.runtime.cache.knobs("control") == wanted
            reply = await client.ask("hello")
            assert (reply.status, reply.headers["x-cachepilot-version"]) == (200, "1")


async def _reported(store: RedisConfigStore) -> bool:
    return [(state.replica, state.version) for state in await store.applied()] == [("r0", 1)]


async def test_a_replica_that_starts_late_begins_with_the_tuners_knobs(
    model: LlmSimProcess, redis_url: str, namespace: str
) -> None:
    store = RedisConfigStore(redis_url, namespace)
    wanted = Knobs(4 << 20, 120.0, 0.5)
    arms = {"control": wanted, "removed": wanted}
    await store.write(arms, expected_version=0, author="test", reason="", now=time.time())
    await store.close()
    settings = {"redis_url": redis_url, "namespace": namespace, "upstream": {"base_url": model.base_url}}
    async with running(settings) as client:
        state = (await client.request("GET", "/readyz")).json
        assert (state["version"], state["arms"]) == (1, {"control": wanted.to_dict()})


async def test_an_embedder_that_fails_is_a_miss(model: LlmSimProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"upstream": {"base_url": model.base_url}, "rules": {"semantic": {"enabled": True}}}

    async def fail(text: str) -> bytes:
        raise EmbeddingUnavailable("no embedding within 0 s")

    async with running(settings) as client:
        embedder = client.gateway.runtime.meaning.embedder
        assert embedder is not None
        monkeypatch.setattr(embedder, "embed", fail)
        assert (await client.ask("hello")).cache == "MISS"
        assert (await client.ask("hello")).cache == "HIT"
        assert await client.metric("cachepilot_embedding_failures_total") == 1


async def test_two_replicas_share_one_cache_and_one_budget(model: LlmSimProcess, redis_url: str, namespace: str) -> None:
    settings = {
        "redis_url": redis_url,
        "namespace": namespace,
        "replicas": 2,
        "upstream": {"base_url": model.base_url},
        "arms": {"control": {"knobs": {"cache_size": 10_000}}},
    }
    wide = {"x-llm-sim-output-tokens": "1000"}  # an entry of about 4.4 kB: two fit
    async with running(settings, replica="a") as one, running(settings, replica="b") as other:
        await one.ask("first", wide)
        assert (await other.ask("first", wide)).headers["x-cache-tier"] == "redis"
        await other.ask("second", wide)
        await one.ask("third", wide)
        assert (await other.ask("first", wide)).cache == "MISS"


async def test_either_replicas_ghost_sees_what_both_answered_and_one_exports_it(
    model: LlmSimProcess, redis_url: str, namespace: str
) -> None:
    settings = {
        "redis_url": redis_url,
        "namespace": namespace,
        "replicas": 2,
        "upstream": {"base_url": model.base_url},
        "flush_interval": 0.02,
    }
    async with running(settings, replica="a") as one, running(settings, replica="b") as other:
        for text in ("x", "y"):
            for client in (one, other, one):
                await client.ask(text)
        largest = one.gateway.runtime.space
        size, ttl = largest.sizes[-1], float(largest.ttls[-1])

        async def exported(metric: str) -> float:
            values = []
            for client in (one, other):
                lines = (await client.request("GET", "/metrics")).body.decode().splitlines()
                values += [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric + " ")]
            return sum(values)

        async def complete() -> bool:
            return await exported('cachepilot_ghost_requests_total{arm="control"}') == 6

        await until(complete, "the ghosts to be exported")
        assert await exported(f'cachepilot_ghost_hits_total{{arm="control",size="{size}",ttl="{ttl!r}"}}') == 4


async def test_metrics_that_hang_do_not_hold_up_the_access_log(
    model: LlmSimProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = asyncio.Event()

    async def hang(runtime: Runtime) -> None:
        stuck.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Runtime, "_digest", hang)
    settings = {"upstream": {"base_url": model.base_url}, "access_log": str(tmp_path), "flush_interval": 0.02}
    async with running(settings) as client:
        await stuck.wait()
        await client.ask("hello")
        log = tmp_path / "access-r0.jsonl"
        await until(lambda: len(list(read_records(log))) == 1, "the request's line in the log")
