"""The audit: what operators changed is kept in order, bounded, and survives a Redis that is away."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from serving import audit as module
from serving.audit import AuditEvent, AuditUnavailable, FileAudit, LogAudit, RedisAudit
from serving.redis_server import RedisServer

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def event(number: int) -> AuditEvent:
    return AuditEvent(1_800_000_000.0 + number, "0a1b2c3d", "flush", {"where": {"tag": "prices"}, "removed": number})


@given(
    st.floats(0, 1e10), st.text(max_size=8), st.text(max_size=8), st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3)
)
def test_an_event_is_read_back_as_written(at: float, actor: str, action: str, detail: dict[str, object]) -> None:
    written = AuditEvent(at, actor, action, detail)
    assert AuditEvent.from_json(written.to_json()) == written


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"at": "then", "actor": "a", "action": "b", "detail": {}}', b"\xff"])
def test_what_is_no_event_is_refused_by_what_it_is(raw: bytes) -> None:
    with pytest.raises(ValueError, match="audit: expected at, actor, action and detail as JSON"):
        AuditEvent.from_json(raw)


async def test_events_of_all_replicas_are_read_in_order_and_on_from_a_position(redis_url: str, namespace: str) -> None:
    first, second = RedisAudit(redis_url, namespace), RedisAudit(redis_url, namespace)
    assert await first.read() == []
    for number, writer in enumerate((first, second, first)):
        await writer.record(event(number))
    read = await second.read()
    assert [item for _, item in read] == [event(0), event(1), event(2)]
    assert await second.read(read[0][0]) == read[1:]
    assert await second.read(limit=2) == read[:2]
    assert await second.read(read[-1][0]) == []
    other = RedisAudit(redis_url, namespace + "-other")
    assert await other.read() == []
    for opened in (first, second, other):
        await opened.close()


async def test_the_stream_is_bounded(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 10)
    audit = RedisAudit(redis_url, namespace)
    for number in range(500):
        await audit.record(event(number))
    kept = [item for _, item in await audit.read()]
    await audit.close()
    assert kept[-1] == event(499)
    assert 10 <= len(kept) < 500


async def test_an_event_that_cannot_be_read_does_not_hide_the_others(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    audit = RedisAudit(redis_url, namespace)
    await audit.record(event(0))
    with Redis.from_url(redis_url) as redis:
        redis.xadd(audit.stream, {"event": "{"})
        redis.xadd(audit.stream, {"other": "1"})
    await audit.record(event(1))
    read = await audit.read()
    assert [item for _, item in read] == [event(0), event(1)]
    assert await audit.read(read[0][0], limit=1) == read[1:]
    assert caplog.text.count("ignored an event that cannot be read") == 4
    await audit.close()


async def test_events_wait_for_a_redis_that_is_away_and_are_in_the_log_meanwhile(
    tmp_path: Path, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    socket = tmp_path / "redis.sock"
    audit = RedisAudit(f"unix://{socket}", namespace, deadline=5.0, pause=0.01)
    await audit.record(event(0))
    await audit.record(event(1))
    assert caplog.text.count("Redis is away") == 2
    assert '"removed":1' in caplog.text
    with pytest.raises(AuditUnavailable, match=r"redis\.sock did not answer within 5 s or refused"):
        await audit.read()
    with RedisServer() as server:
        socket.symlink_to(server.url.removeprefix("unix://").partition("?")[0])
        while len(read := await audit.read()) < 2:
            await asyncio.sleep(0.01)
        await audit.record(event(2))
        assert [item for _, item in read] == [event(0), event(1)]
        assert [item for _, item in await audit.read()] == [event(0), event(1), event(2)]
        await audit.close()


async def test_what_is_never_sent_is_said_at_the_end(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    audit = RedisAudit("redis://somebody:secret@127.0.0.1:1/0", namespace)
    await audit.record(event(0))
    with pytest.raises(AuditUnavailable) as refused:
        await audit.read()
    await audit.close()
    assert "1 events were not recorded" in caplog.text
    assert "secret" not in caplog.text + str(refused.value)


async def test_without_redis_events_are_appended_to_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):  # a second start goes on where the first ended
        audit = FileAudit(tmp_path / "logs" / "audit.jsonl")
        await audit.record(event(number))
        await audit.close()
    lines = (tmp_path / "logs" / "audit.jsonl").read_bytes().splitlines()
    assert [AuditEvent.from_json(line) for line in lines] == [event(0), event(1)]
    await audit.record(event(2))
    assert "cannot be written" in caplog.text
    assert '"removed":2' in caplog.text


async def test_without_either_events_are_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    audit = LogAudit()
    with caplog.at_level(logging.WARNING):
        await audit.record(event(7))
    await audit.close()
    assert json.loads(caplog.messages[0].removeprefix("audit: "))["detail"]["removed"] == 7
