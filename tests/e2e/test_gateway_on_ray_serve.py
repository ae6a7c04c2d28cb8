"""The gateway as it is deployed: behind HAProxy, on Ray Serve, two replicas, two arms, one Redis."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from serving.access_log import AccessRecord, read_records
from serving.app import PortInUse, start
from serving.keys import fingerprint, key64
from serving.knobs import Knobs
from serving.llm_sim import answer_size
from serving.redis_config_store import RedisConfigStore
from serving.tiers.base import EntryMeta
from serving.tiers.redis import RedisTier
from tests.e2e.stack import MODEL, Stack, chat, fetch, samples
from tests.family import family
from tests.waiting import until

META = len(EntryMeta(model=MODEL).dump())
"""Bytes of what every entry says of itself."""

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")]


def test_an_identical_question_is_answered_from_the_cache_by_whichever_replica(stack: Stack) -> None:
    question = stack.question()
    first = stack.ask(question)
    assert (first.status, first.cache) == (200, "MISS")
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda _: stack.ask(question), range(16)))
    assert {reply.cache for reply in again} == {"HIT"}
    assert {reply.body for reply in again} == {first.body}
    assert {reply.headers["x-cache-tier"] for reply in again} <= {"memory", "redis"}
    assert all(int(reply.headers["age"]) >= 0 for reply in again)


async def test_a_question_belongs_to_one_arm_and_counts_against_that_arms_budget_alone(stack: Stack) -> None:
    tier = RedisTier(stack.redis.url, stack.settings.namespace)
    try:
        before = {arm: (await tier.stats(arm)).bytes for arm in ("control", "treatment")}
        for _ in range(5):
            assert stack.ask(stack.question("control"), {"x-llm-sim-output-tokens": "500"}).headers["x-cache-arm"] == "control"
        after = {arm: (await tier.stats(arm)).bytes for arm in ("control", "treatment")}
    finally:
        await tier.close()
    assert after["control"] == before["control"] + 5 * (32 + answer_size(500, MODEL) + META)
    assert after["treatment"] == before["treatment"]
    await until(lambda: _shared_bytes(stack) == after, "the exported bytes")


async def test_desired_knobs_are_applied_and_reported_by_both_replicas(stack: Stack) -> None:
    store = RedisConfigStore(stack.redis.url, stack.settings.namespace)
    try:
        found = await store.read()
        wanted = {"control": Knobs(1 << 20, 600.0, 0.0), "treatment": Knobs(2 << 20, 300.0, 0.25)}
        version = 0 if found is None else found.version
        written = await store.write(wanted, expected_version=version, author="test", reason="to see it applied", now=0.0)

        async def everywhere() -> bool:
            applied = await store.applied()
            return len(applied) == 2 and all(state.version == written.version for state in applied)

        await until(everywhere, "both replicas to report the version")
        assert len({state.replica for state in await store.applied()}) == 2
    finally:
        await store.close()

    def shown() -> bool:
        series = _series(stack, "ray_cachepilot_knob_cache_size_bytes")
        return len(series) == 4 and all(value == wanted[labels["arm"]].cache_size for labels, value in series)

    await until(shown, "both replicas to export the knobs")
    assert stack.ask(stack.question()).headers["x-cachepilot-version"] == str(written.version)


async def test_the_nodes_metrics_port_counts_what_the_access_log_tells(stack: Stack) -> None:
    question = stack.question()
    for _ in range(4):
        stack.ask(question)

    def told() -> dict[tuple[str, str], int]:
        return dict(Counter((record.arm, str(record.outcome)) for record in _records(stack)))

    def counted(metric: str) -> dict[tuple[str, str], float]:
        sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        for labels, value in _series(stack, metric):
            sums[labels["arm"], labels["outcome"]] += value
        return {pair: value for pair, value in sums.items() if value}

    arm = stack.arm_of(question)
    await until(lambda: _asked(stack, [question]) == 4, "the access log")
    await until(lambda: counted("ray_cachepilot_requests_total") == told(), "the counters to catch up with the log", 60.0)
    assert told()[arm, "hit"] >= 3
    assert told()[arm, "miss"] >= 1
    await until(lambda: counted("ray_cachepilot_request_latency_seconds_count") == told(), "the histogram to do so", 60.0)
    seconds = sum(record.latency for record in _records(stack) if (record.arm, record.outcome) == (arm, "hit"))
    assert counted("ray_cachepilot_latency_seconds_total")[arm, "hit"] == pytest.approx(seconds)


async def test_counters_start_at_zero_for_every_known_label(stack: Stack) -> None:
    found = {
        (labels["arm"], labels["outcome"])
        for name, labels, _ in samples(stack.exposition())
        if name == "ray_cachepilot_requests_total"
    }
    outcomes = ("hit", "semantic_hit", "miss", "bypass", "error")
    assert found == {(arm, outcome) for arm in ("control", "treatment") for outcome in outcomes}


async def test_the_ghosts_of_two_replicas_count_each_request_once(stack: Stack) -> None:
    questions = [stack.question("control") for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            list(pool.map(stack.ask, questions))
    space = stack.settings.space.space()
    largest = {"arm": "control", "size": str(space.sizes[-1]), "ttl": repr(float(space.ttls[-1]))}

    def predicted() -> tuple[float, float]:
        return (
            stack.total("ray_cachepilot_ghost_requests_total", arm="control"),
            stack.total("ray_cachepilot_ghost_hits_total", **largest),
        )

    def answered() -> tuple[float, float]:
        keys = [record.key for record in _records(stack) if record.arm == "control" and record.size > 0]
        return len(keys), len(keys) - len(set(keys))  # the largest cache would have missed the first of each only

    await until(lambda: _asked(stack, questions) == 24, "the access log")
    await until(lambda: predicted() == pytest.approx(answered()), "the ghost to see what was answered", 60.0)
    assert answered()[1] >= 18


async def test_every_request_leaves_one_line_without_its_text(stack: Stack) -> None:
    question = stack.question()
    key = _key(stack, question)
    for _ in range(3):
        stack.ask(question)

    def lines() -> list[AccessRecord]:
        return [record for record in _records(stack) if record.key == key]

    await until(lambda: len(lines()) == 3, "the access log")
    records = sorted(lines(), key=lambda record: record.at)
    assert [record.outcome for record in records] == ["miss", "hit", "hit"]
    assert {record.size for record in records} == {32 + len(stack.ask(question).body) + META}
    assert all(record.latency > 0 and record.status == 200 and record.output_tokens > 0 for record in records)
    assert not any(question.encode() in file.read_bytes() for file in stack.access_log.iterdir())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_missed_behind_the_ingress(stream: bool, stack: Stack) -> None:
    def running() -> float:
        lines = fetch(stack.model.metrics_url).body.decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_running"))

    parts = urlsplit(stack.gateway.url)
    questions = [stack.question() for _ in range(3)]
    for question in questions:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30.0)
        body = json.dumps(chat(question, stream=stream)).encode()
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(body)))
        connection.putheader("x-llm-sim-output-tokens", "1000000")  # which takes the model 20 seconds
        connection.endheaders()
        await asyncio.sleep(0.002)  # head and body come apart: HAProxy did not notice most of those who then left
        connection.send(body)
        if stream:
            connection.getresponse().read(1)
        await until(lambda: running() == 1, "the model to be asked")
        connection.close()
        await until(lambda: running() == 0, "the model to be given up")
    for question in questions:
        key = _key(stack, question)
        await until(lambda key=key: any(record.key == key for record in _records(stack)), "the access log")  # type: ignore[misc]
        assert [(record.outcome, record.status) for record in _records(stack) if record.key == key] == [("left", 499)]


def test_errors_pass_through_the_ingress_with_their_status_and_shape(stack: Stack) -> None:
    malformed = stack.post(b'{"model": ')
    assert malformed.status == 400
    assert set(malformed.json["error"]) == {"message", "type", "param", "code"}
    unknown = stack.post(json.dumps({**chat("hello"), "model": "no-such-model"}).encode())
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
    assert stack.get("/v1/models").json["data"][0]["id"] == MODEL
    assert stack.get("/readyz").json["ready"] is True


def test_the_ingress_listens_on_loopback_alone(stack: Stack) -> None:
    port = urlsplit(stack.gateway.url).port
    listening = [
        (item.pid, item.laddr.ip, item.laddr.port)
        for item in psutil.net_connections("tcp")
        if item.status == psutil.CONN_LISTEN and item.laddr
    ]
    assert {address for _, address, number in listening if number == port} == {"127.0.0.1"}
    proxies = {pid for pid, words in family().items() if Path(words[0]).name == "haproxy"}
    assert proxies
    assert {address for pid, address, _ in listening if pid in proxies} <= {"127.0.0.1"}


def test_the_ingress_takes_as_long_headers_as_operators_may_name_things(stack: Stack) -> None:
    names = {name: ",".join(f"{name}-{number:0{255 - len(name)}}" for number in range(32)) for name in ("tag", "document")}
    parts = urlsplit(stack.gateway.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30.0)
    headers = {"content-type": "application/json", "x-cache-tags": names["tag"], "x-cache-documents": names["document"]}
    connection.request("POST", "/v1/chat/completions", json.dumps(chat(stack.question())).encode(), headers)
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("x-cache")) == (200, "MISS"), answer.read()
    connection.close()


def test_an_ingress_that_another_one_replaces_lets_its_requests_last(stack: Stack) -> None:
    upstream, stops = stack.settings.upstream, []
    for words in family().values():
        if Path(words[0]).name == "haproxy":
            lines = Path(words[words.index("-f") + 1]).read_text(encoding="utf-8").splitlines()
            stops += [line.split()[1] for line in lines if line.strip().startswith("hard-stop-after")]
    assert stops
    assert all(int(stop.removesuffix("s")) > max(upstream.timeout + upstream.max_wait, stack.settings.drain) for stop in stops)


def test_a_port_in_use_is_named(stack: Stack) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
            with start(stack.settings.model_copy(update={"port": port})):
                pytest.fail("it started on a port that was taken")


def _records(stack: Stack) -> list[AccessRecord]:
    return [record for file in sorted(stack.access_log.glob("access-*.jsonl")) for record in read_records(file)]


def _key(stack: Stack, question: str) -> int:
    return key64(fingerprint(chat(question), namespace=stack.settings.namespace).key)


def _asked(stack: Stack, questions: list[str]) -> int:
    """How many requests for these questions the access log has."""
    keys = {_key(stack, question) for question in questions}
    return sum(record.key in keys for record in _records(stack))


def _series(stack: Stack, metric: str) -> list[tuple[dict[str, str], float]]:
    return [(labels, value) for name, labels, value in samples(stack.exposition()) if name == metric]


def _shared_bytes(stack: Stack) -> dict[str, float]:
    """What each arm holds in Redis, as the replicas export it: each of them says the whole."""
    held: dict[str, float] = {}
    for labels, value in _series(stack, "ray_cachepilot_resident_bytes"):
        if labels["tier"] == "redis":
            held[labels["arm"]] = max(value, held.get(labels["arm"], 0.0))
    return held
