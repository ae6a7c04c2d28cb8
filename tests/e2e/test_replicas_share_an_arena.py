"""Two replicas on Ray Serve and one arena: what one stored both have in memory, and one that is killed takes nothing along."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import pytest

from tests.e2e.stack import Stack, samples
from tests.family import family
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")]


def replicas() -> set[int]:
    """The processes of the gateway's replicas."""
    return {pid for pid, words in family().items() if "ServeReplica:cachepilot" in " ".join(words)}


def hits(stack: Stack) -> Counter[tuple[str, str]]:
    """Hits by replica and tier."""
    counted: Counter[tuple[str, str]] = Counter()
    for name, labels, value in samples(stack.exposition()):
        if name == "ray_cachepilot_hits_total":
            counted[labels["replica"], labels["tier"]] += int(value)
    return counted


async def test_what_one_replica_stored_is_in_the_memory_of_the_other_while_redis_is_frozen(stack: Stack) -> None:
    question = stack.question()
    before = hits(stack)
    assert stack.ask(question).cache == "MISS"
    assert stack.redis.pid is not None
    os.kill(stack.redis.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(8) as pool:
            again = list(pool.map(lambda _: stack.ask(question), range(32)))
    finally:
        os.kill(stack.redis.pid, signal.SIGCONT)
    assert {(reply.cache, reply.headers["x-cache-tier"]) for reply in again} == {("HIT", "memory")}

    def both() -> bool:
        grown = hits(stack) - before
        return len({replica for replica, tier in grown if tier == "memory"}) == 2

    await until(both, "both replicas to have answered from memory", seconds=60)


async def test_a_replica_killed_in_traffic_takes_nothing_along_and_its_successor_starts_warm(stack: Stack) -> None:
    questions = [stack.question() for _ in range(10)]
    first = {question: stack.ask(question).body for question in questions}
    before = replicas()
    assert len(before) == 2
    over, wrong, statuses = threading.Event(), [], Counter[int]()

    def ask() -> None:
        number = 0
        while not over.is_set():
            question = questions[number % len(questions)]
            try:
                reply = stack.ask(question)
            except (OSError, HTTPException):
                statuses[0] += 1
                continue
            statuses[reply.status] += 1
            if reply.status == 200 and (reply.body != first[question] or reply.cache != "HIT"):
                wrong.append(reply)
            number += 1

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            await until(lambda: statuses[200] > 50, "traffic")
            os.kill(min(before), signal.SIGKILL)
            answered = statuses[200]
            await until(lambda: statuses[200] > answered + 50, "the other replica to go on answering", seconds=60)
            await until(lambda: len(replicas() - before) == 1 and len(replicas()) == 2, "its successor", seconds=60)
            known = {replica for replica, _ in hits(stack)}
            await until(lambda: {replica for replica, _ in hits(stack)} > known, "the successor's metrics", seconds=60)
            successor = next(iter({replica for replica, _ in hits(stack)} - known))
            await until(lambda: hits(stack)[successor, "memory"] > 20, "the successor to answer", seconds=60)
        finally:
            over.set()
        for each in asking:
            each.result()
    assert wrong == []
    assert hits(stack)[successor, "redis"] == 0, "it found all of it in the memory of its node"
    assert statuses.total() - statuses[200] <= 20, f"more than what was under way at the one that was killed: {statuses}"
