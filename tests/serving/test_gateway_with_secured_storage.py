"""A gateway whose Redis is behind TLS and holds nothing in the clear."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from serving.redis_url import secured
from tests.serving.certificates import Authority, redis_behind_tls
from tests.serving.gateways import Model, before
from tests.waiting import until

LOOKUPS = 'cachepilot_cacheable_lookups_total{arm="control"}'
KEYS = [base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2)]


@pytest.fixture(scope="module")
def secured_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of a Redis behind TLS and the settings that reach it."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "authority")
    server, client = authority.issue("server"), authority.issue("client")
    with redis_behind_tls(folder, authority, server, client) as url:
        yield url, {"tls_ca": str(authority.cert), "tls_cert": str(client.cert), "tls_key": str(client.key)}


async def everything(url: str, files: dict[str, Any]) -> bytes:
    """All that Redis holds, names included."""
    certified = secured(url, ca=Path(files["tls_ca"]), cert=Path(files["tls_cert"]), key=Path(files["tls_key"]))
    async with Redis.from_url(certified) as raw:
        held: list[object] = []
        async for name in raw.scan_iter():
            kind = await raw.type(name)
            if kind == b"hash":
                held.append(await raw.hgetall(name))
            elif kind == b"stream":
                held.append(await raw.xrange(name))
            elif kind == b"string":
                held.append(await raw.get(name))
            held.append(name)
        return repr(held).encode()


async def test_replicas_share_answers_that_redis_cannot_read(secured_redis: tuple[str, dict[str, Any]], namespace: str) -> None:
    url, files = secured_redis
    model = Model()
    settings: dict[str, Any] = {"redis_url": url, "namespace": namespace, "redis_deadline": 10.0}
    storage = {**files, "encryption_key": KEYS[0]}
    async with before(model, replicas=2, storage=storage, memory={"shared": False}, **settings) as (first, second):
        asked = await first.ask("a private question", headers={"x-cache-tags": "secret-tag"})
        again = await second.ask("a private question")
        assert (asked.cache, again.cache, again.headers["x-cache-tier"]) == ("MISS", "HIT", "redis")
        assert json.loads(again.body) == json.loads(asked.body)
        async with second.stream("a private stream") as (_, events):
            streamed = [event async for event in events]
        async with first.stream("a private stream") as (answer, events):
            assert [event async for event in events] == streamed
            assert answer.headers["x-cache"] == "HIT"
        held = await everything(url, files)
        assert namespace.encode() in held
        for secret in (b"private", b"this is answer", b"secret-tag", b"chatcmpl"):
            assert secret not in held
    async with before(model, storage={**files, "encryption_key": KEYS[1]}, **settings) as (other,):
        assert (await other.ask("a private question")).cache == "MISS", "what another key sealed is as if it were not there"
        assert (await other.ask("a private question")).cache == "HIT"
    async with before(model, storage=files, **settings) as (plain,):
        assert (await plain.ask("a private question")).cache == "MISS"
    assert len(model.asked) == 4


async def test_what_is_in_the_arena_is_sealed_as_it_is_in_redis(tmp_path: Path) -> None:
    model, arena = Model(), tmp_path / "arena"
    for key, calls in ((KEYS[0], 1), (KEYS[0], 1), (KEYS[1], 2)):
        async with before(model, storage={"encryption_key": key}, memory={"path": str(arena)}) as (client,):
            asked = [await client.ask("a private question", headers={"x-cache-tags": "secret-tag"}) for _ in range(2)]
            assert asked[1].headers["x-cache-tier"] == "memory"
            assert len(model.asked) == calls, "it outlives the gateway, for those who have the key"
            held = arena.read_bytes()
            for secret in (b"private", b"this is answer", b"secret-tag", b"chatcmpl"):
                assert secret not in held


async def test_an_answer_that_another_replica_keeps_counts_for_as_much_as_the_entry_that_it_became(
    redis_url: str, namespace: str, tmp_path: Path
) -> None:
    model = Model()
    settings: dict[str, Any] = {"redis_url": redis_url, "namespace": namespace, "memory": {"shared": False}}
    storage = {"encryption_key": KEYS[0]}
    async with before(model, replicas=2, storage=storage, access_log=str(tmp_path), **settings) as clients:
        for form in (False, True):
            model.hold.clear()
            model.pause.clear()
            asking = [asyncio.create_task(client.ask(f"hello {form}", stream=form)) for client in clients]

            async def come(wanted: int = 1 + form) -> bool:
                return all([await client.metric(LOOKUPS) >= wanted for client in clients])

            await until(come, "both to have asked")
            model.hold.set()
            model.pause.set()
            assert sorted(str(reply.cache) for reply in await asyncio.gather(*asking)) == ["COLLAPSED", "MISS"]
    assert len(model.asked) == 2
    lines = [json.loads(line) for path in tmp_path.glob("access-*.jsonl") for line in path.read_bytes().splitlines()]
    for key in {line["key"] for line in lines}:
        assert len({(line["size"], line["input_tokens"], line["output_tokens"]) for line in lines if line["key"] == key}) == 1
    assert len({line["size"] for line in lines}) == 2
