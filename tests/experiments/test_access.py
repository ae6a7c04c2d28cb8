from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.access import COLUMNS, AccessLogError, read_access_log
from serving.access_log import AccessRecord


def record(at, **changes):
    values = {
        "key": (1 << 64) - 1,
        "arm": "control",
        "outcome": "hit",
        "tier": "memory",
        "latency": 0.01,
        "size": 10,
        "input_tokens": 1,
        "output_tokens": 2,
        "age": 1.0,
        "stale": 0.1,
        "version": 1,
        "status": 200,
    }
    return AccessRecord(at=at, **{**values, **changes})


def write(path, *records, tail=b""):
    path.write_bytes(b"".join(orjson.dumps(asdict(item)) + b"\n" for item in records) + tail)


def test_the_logs_of_all_replicas_are_merged_in_order_of_time(tmp_path):
    write(tmp_path / "access-a.jsonl", record(1.0), record(4.0, arm="treatment", outcome="miss", tier=""))
    write(tmp_path / "access-b.jsonl", record(2.0), record(3.0))
    (tmp_path / "other.txt").write_text("not a log")
    frame = read_access_log(tmp_path)
    assert list(frame["at"]) == [1.0, 2.0, 3.0, 4.0]
    assert tuple(frame.columns) == COLUMNS
    assert frame["key"].dtype == np.uint64
    assert int(frame["key"].iloc[0]) == (1 << 64) - 1
    assert frame["arm"].iloc[3] == "treatment"
    assert list(read_access_log(tmp_path, since=2.0, until=3.0)["at"]) == [2.0, 3.0]


def test_requests_whose_clients_left_are_left_out(tmp_path):
    write(tmp_path / "access-a.jsonl", record(1.0), record(2.0, outcome="left", status=499), record(3.0, outcome="miss"))
    assert list(read_access_log(tmp_path)["outcome"]) == ["hit", "miss"]


def test_a_torn_last_line_of_a_live_log_is_left_out_and_counted(tmp_path):
    write(tmp_path / "access-a.jsonl", record(1.0), tail=b'{"at":2.0,"key":12,"ar')
    frame = read_access_log(tmp_path)
    assert len(frame) == 1
    assert frame.attrs["torn_lines"] == 1


def test_a_complete_last_line_without_its_newline_counts(tmp_path):
    write(tmp_path / "access-a.jsonl", record(1.0), tail=orjson.dumps(asdict(record(2.0))))
    assert list(read_access_log(tmp_path)["at"]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"at":2.0,"key"\n', "expected one JSON object"),
        (b'{"at":2.0}\n', "no field 'key'"),
        (b"[1, 2]\n", "expected one JSON object"),
        (orjson.dumps({**asdict(record(2.0)), "latency": "slow"}) + b"\n", "latency: expected a number"),
        (orjson.dumps({**asdict(record(2.0)), "key": -1}) + b"\n", "key: expected a number"),
        (orjson.dumps({**asdict(record(2.0)), "at": None}) + b"\n", "expected one JSON object"),
    ],
)
def test_a_broken_line_elsewhere_is_named(tmp_path, line, words):
    whole = orjson.dumps(asdict(record(3.0))) + b"\n"
    write(tmp_path / "access-a.jsonl", record(1.0), tail=line + whole)
    with pytest.raises(AccessLogError, match=words) as caught:
        read_access_log(tmp_path)
    assert "access-a.jsonl, line 2" in str(caught.value)


def test_no_log_yet_is_an_empty_table_with_the_same_columns(tmp_path):
    frame = read_access_log(tmp_path)
    assert len(frame) == 0
    assert tuple(frame.columns) == COLUMNS
    assert frame["key"].dtype == np.uint64


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(AccessLogError, match="nowhere is not a directory"):
        read_access_log(tmp_path / "nowhere")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_log_cut_anywhere_gives_its_complete_lines(data):
    lines = [orjson.dumps(asdict(record(float(number)))) + b"\n" for number in range(4)]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    with TemporaryDirectory() as folder:
        (Path(folder) / "access-a.jsonl").write_bytes(whole[:cut])
        frame = read_access_log(folder)
    complete = whole[:cut].count(b"\n")
    assert len(frame) in (complete, complete + 1)  # a last line that lacks nothing but its end counts
    assert list(frame["at"]) == [float(number) for number in range(len(frame))]
    assert frame.attrs["torn_lines"] == (cut > 0 and not whole[:cut].endswith(b"\n") and len(frame) == complete)
