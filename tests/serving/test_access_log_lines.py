"""The access log: whole lines, everything back, no text."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.access_log import AccessLogWriter, AccessRecord, DetailedRecord, read_records
from tests.serving.gateways import Model, gateway

RECORD = AccessRecord(1.5, 2**64 - 1, "control", "hit", "memory", 0.25, 100, 3, 4, 9.0, 0.1, 7, 200)

records = st.builds(
    AccessRecord,
    at=st.floats(0, 2e9),
    key=st.integers(0, 2**64 - 1),
    arm=st.text(max_size=10),
    outcome=st.sampled_from(["hit", "semantic_hit", "miss", "bypass", "error"]),
    tier=st.sampled_from(["memory", "redis", "vector", ""]),
    latency=st.floats(0, 100),
    size=st.integers(0, 2**40),
    input_tokens=st.integers(0, 10**6),
    output_tokens=st.integers(0, 10**6),
    age=st.floats(0, 1e6),
    stale=st.floats(0, 1),
    version=st.integers(0, 10**6),
    status=st.integers(100, 599),
)


@given(st.lists(records, max_size=20))
def test_what_was_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, written: list[AccessRecord]) -> None:
    writer = AccessLogWriter(tmp_path_factory.mktemp("log"), "r0", limit=3)
    for record in written:
        writer.write(record)
    writer.close()
    assert list(read_records(writer.path)) == written


def test_records_appear_at_a_flush_or_when_the_buffer_is_full(tmp_path: Path) -> None:
    writer = AccessLogWriter(tmp_path / "made" / "for it", "r0", limit=2)
    writer.write(RECORD)
    assert list(read_records(writer.path)) == []
    writer.flush()
    assert list(read_records(writer.path)) == [RECORD]
    for _ in range(2):
        writer.write(RECORD)
    assert len(list(read_records(writer.path))) == 3
    writer.close()
    writer.close()


def test_a_restarted_replica_goes_on_in_its_file(tmp_path: Path) -> None:
    for _ in range(2):
        writer = AccessLogWriter(tmp_path, "r0")
        writer.write(RECORD)
        writer.close()
    assert list(read_records(tmp_path / "access-r0.jsonl")) == [RECORD, RECORD]


def test_a_line_still_being_written_is_left_out_and_a_broken_one_is_named(tmp_path: Path) -> None:
    writer = AccessLogWriter(tmp_path, "r0")
    writer.write(RECORD)
    writer.close()
    whole = writer.path.read_bytes()
    writer.path.write_bytes(whole + whole[:20])
    assert list(read_records(writer.path)) == [RECORD]
    writer.path.write_bytes(whole + b'{"at": 1}\n')
    with pytest.raises(ValueError, match=r"access-r0\.jsonl, line 2: expected a JSON object with at, key, arm"):
        list(read_records(writer.path))


def test_a_record_has_no_field_for_text() -> None:
    texts = {item.name for item in fields(DetailedRecord) if item.type in ("str", "Outcome")}
    assert texts == {"arm", "outcome", "tier", "rule", "endpoint", "tenant", "key_hex"}


def test_details_are_written_and_do_not_disturb_those_who_read_records(tmp_path: Path) -> None:
    writer = AccessLogWriter(tmp_path, "r0")
    writer.write(DetailedRecord(**asdict(RECORD), rule="exact_hit", similarity=1.0, endpoint="chat", tenant="acme"))
    writer.close()
    assert list(read_records(writer.path)) == [RECORD]
    line = writer.path.read_bytes()
    assert b'"rule":"exact_hit","similarity":1.0,"endpoint":"chat","tenant":"acme","key_hex":"ffffffffffffffff"}' in line
    # A log that was written before keys were told in both ways is read as ever.
    writer.path.write_bytes(line.replace(b',"key_hex":"ffffffffffffffff"', b""))
    assert list(read_records(writer.path)) == [RECORD]


async def test_a_line_is_found_by_what_headers_and_the_admin_api_call_the_entry(tmp_path: Path) -> None:
    async with gateway(Model(), access_log=str(tmp_path)) as client:
        replies = [await client.ask("hello") for _ in range(2)]
    lines = [json.loads(line) for path in tmp_path.glob("access-*.jsonl") for line in path.read_bytes().splitlines()]
    assert [line["key_hex"] for line in lines] == [reply.headers["x-cache-entry"] for reply in replies]
    assert replies[0].headers["x-litellm-cache-key"].startswith(lines[0]["key_hex"])
    assert int(lines[0]["key_hex"], 16) == lines[0]["key"]


def test_a_full_disk_is_no_error_and_is_caught_up_with_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = AccessLogWriter(tmp_path, "r0", limit=2)
    room = [10]  # bytes of the first line that still fit
    real = os.write

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr("serving.access_log.os.write", write)
    for _ in range(5):
        writer.write(RECORD)
    writer.flush()
    assert list(read_records(writer.path)) == []
    room[0] = 1 << 20
    writer.close()
    assert list(read_records(writer.path)) == [RECORD] * 5
