"""Reading in chunks: the same requests as reading at once, in order, chains whole, in memory that does not grow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workloads import Trace, TraceError, load, stream
from envs.workloads.readers.cachesim import RECORD
from tests.envs import trace_files as files
from tests.requirements import ROOT
from tests.requirements import trace as trace_file

COLUMNS = ("time", "key", "size", "group", "input_tokens", "output_tokens", "tenant", "document", "chain")


def joined(chunks: list[Trace]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in COLUMNS}


@pytest.mark.parametrize(
    "name",
    [
        "elastic_apache.csv.gz",
        "mooncake_conversation.jsonl.gz",
        "azure2023_conv.csv.gz",
        "servegen_m_large.csv.gz",
        "banking77.csv.gz",
    ],
)
def test_chunks_are_the_whole_trace(name: str) -> None:
    path = trace_file(name)
    whole = load(path, rate_scale=1e-4)
    with stream(path, chunk=7_000, rate_scale=1e-4) as opened:
        chunks = list(opened)
    for column, values in joined(chunks).items():
        assert np.array_equal(values, getattr(whole, column)), column
    assert all(chunk.chain[0] == 0 for chunk in chunks)
    assert all(chunk.note == whole.note and chunk.kind == whole.kind and not len(chunk.prompts) for chunk in chunks)
    assert opened.requests == len(whole)
    assert opened.bytes_read == opened.total_bytes == path.stat().st_size
    assert max(len(chunk) for chunk in chunks) <= 7_000


def test_a_limit_is_of_requests_not_of_lines() -> None:
    with stream(trace_file("mooncake_conversation.jsonl.gz"), limit=5_001, chunk=1_000) as opened:
        assert sum(len(chunk) for chunk in opened) == 5_001
    assert opened.bytes_read < opened.total_bytes


def test_a_chain_longer_than_a_chunk_is_one_chunk(tmp_path: Path) -> None:
    lines = files.bailian_lines((0.0, "text", [1]), (1.0, "text", list(range(50))), (2.0, "text", [1, 2]))
    with stream(files.write(tmp_path, "q.jsonl", lines), chunk=10) as opened:
        chunks = list(opened)
    assert [len(chunk) for chunk in chunks] == [1, 50, 2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_of_any_size_are_in_order_and_split_no_chain(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lateness = 40.0
    drawn = data.draw(
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.integers(1, 6)), min_size=1, max_size=60),
        label="gap, lateness and blocks of each request",
    )
    bases = np.cumsum([gap for gap, _, _ in drawn]).tolist()
    requests = [(base + late, blocks) for base, (_, late, blocks) in zip(bases, drawn, strict=True)]
    chunk = data.draw(st.integers(1, 30), label="chunk")
    lines = files.bailian_lines(
        *((float(at), "text", [100 * row + block for block in range(n)]) for row, (at, n) in enumerate(requests))
    )
    path = files.write(tmp_path_factory.mktemp("stream"), "q.jsonl", lines)
    with stream(path, chunk=chunk, lateness=lateness) as opened:
        chunks = list(opened)
    whole = load(path)
    together = joined(chunks)
    for column in COLUMNS:
        assert np.array_equal(together[column], getattr(whole, column)), column
    assert all(part.chain[0] == 0 for part in chunks)
    longest = max(n for _, n in requests)
    assert all(len(part) <= max(chunk, longest) for part in chunks)
    ordered = sorted(range(len(requests)), key=lambda row: requests[row][0])
    assert whole.time.tolist() == [requests[row][0] - requests[ordered[0]][0] for row in ordered for _ in range(requests[row][1])]


def late_table(times: list[float]) -> str:
    return "time,key,size\n" + "".join(f"{at},k{row},1\n" for row, at in enumerate(times))


def test_a_little_disorder_is_put_in_order(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.csv", late_table([0, 100, 40, 160, 100, 220]))
    with stream(path, chunk=1) as opened:
        times = np.concatenate([chunk.time for chunk in opened])
    assert times.tolist() == [0, 40, 100, 100, 160, 220]


def test_time_that_goes_back_further_is_a_bad_line(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.csv", late_table([0, 100, 39, 160, 20, 170]))
    with pytest.raises(TraceError, match=r"line 4: expected a time at most 60 s before the latest so far.*goes back by 61 s"):
        list(stream(path))
    with stream(path, skip_bad_lines=True) as opened:
        assert np.concatenate([chunk.time for chunk in opened]).tolist() == [0, 100, 160, 170]
    assert opened.skipped == 2
    assert [error.line for error in opened.first_skipped] == [4, 6]
    # A whole trace in memory is sorted, however far its time goes back.
    assert load(path).time.tolist() == [0, 20, 39, 100, 160, 170]
    with stream(path, lateness=1e9) as opened:
        assert sum(len(chunk) for chunk in opened) == 6


def test_a_late_chain_is_one_bad_line(tmp_path: Path) -> None:
    lines = files.bailian_lines((0.0, "text", [1]), (500.0, "text", [1, 2]), (9.0, "text", [1, 2, 3]), (501.0, "text", [4]))
    with stream(files.write(tmp_path, "q.jsonl", lines), skip_bad_lines=True) as opened:
        assert sum(len(chunk) for chunk in opened) == 4
    assert opened.skipped == 1


def test_a_stream_is_read_once(tmp_path: Path) -> None:
    opened = stream(files.write(tmp_path, "t.csv", late_table([0, 1])))
    assert sum(len(chunk) for chunk in opened) == 2
    with pytest.raises(RuntimeError, match="read once"):
        next(iter(opened))
    opened.close()


def test_a_stream_that_is_left_early_lets_go_of_its_file(tmp_path: Path) -> None:
    with stream(files.write(tmp_path, "t.csv.gz", late_table(list(range(5_000)))), chunk=10) as opened:
        first = next(iter(opened))
    assert len(first) == 10
    assert opened.requests == 10


@pytest.mark.parametrize("ending", ["bin", "bin.zst"])
def test_memory_does_not_grow_with_the_trace(tmp_path: Path, ending: str) -> None:
    script = """
import resource, sys
from envs.workloads import stream
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for chunk in stream(path, chunk=65_536):
        pass
    print(peak())
"""
    paths = []
    for name, count in (("warm", 200_000), ("long", 2_500_000)):
        records = np.zeros(count, RECORD)
        records["time"] = np.arange(count) // 5_000
        records["object"], records["size"], records["next"] = np.arange(count) % 1_000, 100, -1
        paths.append(files.write(tmp_path, f"{name}.{ending}", records.tobytes()))
    answer = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    warm, long = (int(line) for line in answer.stdout.split())
    # A trace that is long (60 MB of records, 170 MB of columns) takes little more: what waits for its order.
    assert long - warm < 60_000
