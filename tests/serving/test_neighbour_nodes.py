"""Which nodes there are, and a node from its settings."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from serving.ending import end
from serving.neighbours.membership import RedisMembership, StaticMembership
from serving.neighbours.node import Neighbours, choose
from serving.ports import free_port
from serving.redis_server import RedisServer
from serving.settings import NeighbourSettings
from serving.tiers.arena import ArenaTier
from tests.serving.arenas import ARM, MIB, answer, check, key
from tests.serving.neighbours import NAMESPACE, SECRET
from tests.waiting import until


def test_a_list_of_nodes_has_this_one_once() -> None:
    assert StaticMembership("b:1", ["c:1", "a:1", "b:1"]).nodes == ("a:1", "b:1", "c:1")
    with pytest.raises(ValueError, match="peers: expected host:port, got 'a'"):
        StaticMembership("b:1", ["a"])


async def test_nodes_find_each_other_in_redis_and_the_dead_are_gone(redis_server: RedisServer) -> None:
    namespace = f"nodes-{os.getpid()}-{time.monotonic_ns()}"

    def member(own: str, serving: bool = True) -> RedisMembership:
        return RedisMembership(redis_server.url, namespace, own, serving=lambda: serving, refresh=0.05, lives=2.0)

    first, second, silent = member("a:1"), member("b:1"), member("c:1", serving=False)
    for each in (first, second, silent):
        await each.start()
    await until(lambda: first.nodes == ("a:1", "b:1"), "the two that serve")
    assert silent.nodes == ("a:1", "b:1", "c:1"), "itself it knows"
    assert second._task is not None
    await end([second._task])  # it dies without a word
    await until(lambda: first.nodes == ("a:1",), "that it is gone")
    third = member("d:1")
    await third.start()
    await until(lambda: first.nodes == ("a:1", "d:1"), "another one")
    await third.close()
    await first.ask()
    assert first.nodes == ("a:1", "d:1"), "another process of it may go on"
    await until(lambda: first.nodes == ("a:1",), "that none does")
    for each in (first, second, silent):
        await each.close()


async def test_what_is_no_address_is_no_node(redis_server: RedisServer) -> None:
    namespace = f"nodes-{os.getpid()}-{time.monotonic_ns()}"
    one = RedisMembership(redis_server.url, namespace, "a:1", serving=lambda: True)
    other = RedisMembership(redis_server.url, namespace, "rubbish", serving=lambda: True)
    await other.ask()
    await one.ask()
    assert one.nodes == ("a:1",)
    for each in (one, other):
        await each.close()


async def test_who_is_gone_is_no_node_though_the_clock_of_redis_went_back(redis_server: RedisServer) -> None:
    namespace = f"nodes-{os.getpid()}-{time.monotonic_ns()}"
    redis = Redis.from_url(redis_server.url)
    at = f"cachepilot:{{{namespace}}}:neighbours"
    await redis.zadd(at, {b"gone:1": (time.time() + 86_400) * 1000})
    one = RedisMembership(redis_server.url, namespace, "a:1", serving=lambda: True, lives=0.2)
    await one.ask()
    assert one.nodes == ("a:1", "gone:1")

    async def alone() -> bool:
        await one.ask()
        return one.nodes == ("a:1",)

    await until(alone, "the one that says nothing to be forgotten")
    await one.close()
    await redis.aclose()


async def test_the_nodes_stay_while_redis_is_away() -> None:
    with RedisServer() as own:
        one = RedisMembership(own.url, NAMESPACE, "a:1", serving=lambda: True)
        other = RedisMembership(own.url, NAMESPACE, "b:1", serving=lambda: True)
        await other.ask()
        await one.ask()
        assert one.nodes == ("a:1", "b:1")
    await one.ask()
    assert one.nodes == ("a:1", "b:1")
    for each in (one, other):
        await each.close()


async def test_a_node_is_made_from_its_settings(tmp_path: Path, redis_server: RedisServer) -> None:
    namespace = f"nodes-{os.getpid()}-{time.monotonic_ns()}"
    arenas, nodes = [], []
    for name in ("a", "b"):
        arena = ArenaTier(tmp_path / name, 4 * MIB)
        arena.resize_now(ARM, MIB)
        given = NeighbourSettings(listen=f"127.0.0.1:{free_port()}", secret=SECRET, transport="tcp", deadline=5.0)
        nodes.append(Neighbours(given, arena, namespace=namespace, redis_url=redis_server.url))
        arenas.append(arena)
    for node in nodes:
        await node.start()
    await nodes[0].tier.membership.ask()  # type: ignore[attr-defined]
    one, two = (node.tier for node in nodes)
    await until(lambda: one.links() == {two.own: "tcp"} and two.links() == {one.own: "tcp"}, "both links")
    for number in range(40):
        holder, asking = (0, two) if one.owner(key(number)) == one.own else (1, one)
        nodes[1 - holder].tier.offer(ARM, answer(number, 1, 700))
        await until(lambda holder=holder, number=number: arenas[holder].get_now(ARM, key(number)) is not None, "it")  # type: ignore[misc]
        entry = await asking.get(ARM, key(number))
        assert entry is not None
        assert check(number, entry) == 1
    nodes[0].outdated(ARM)
    for node, arena in zip(nodes, arenas, strict=True):
        await node.close()
        arena.close_now()


def test_settings_without_a_way_to_find_each_other_are_refused(tmp_path: Path) -> None:
    arena = ArenaTier(tmp_path / "arena", MIB)
    with pytest.raises(ValueError, match="expected peers in the settings, or a Redis"):
        Neighbours(
            NeighbourSettings(listen="127.0.0.1:7", secret=SECRET, transport="tcp"),
            arena,
            namespace=NAMESPACE,
            redis_url=None,
        )
    with pytest.raises(ValueError, match="expected listen and secret"):
        Neighbours(NeighbourSettings(), arena, namespace=NAMESPACE, redis_url=None)
    arena.close_now()


def test_without_a_device_neighbours_are_read_by_tcp_and_it_is_said_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("serving.neighbours.verbs.available", lambda *_: "no device here")
    clients, offers = choose("auto", None)
    assert ([client.name for client in clients], offers) == (["tcp"], [])
    assert "by TCP, since RDMA cannot be had: no device here" in caplog.text
    assert choose("rdma", None) == ([], [])
    assert "RDMA is demanded and cannot be had: no device here" in caplog.text
