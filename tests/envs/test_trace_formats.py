"""Every format that is read: what its columns become, however it is packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workloads import TraceError, entry_bytes, load, stream
from envs.workloads.entry import text_key
from envs.workloads.readers.llm_csv import moments
from envs.workloads.readers.servegen import renewals
from serving.access_log import AccessLogWriter, AccessRecord
from serving.keys import mix64
from tests.envs import trace_files as files
from tests.requirements import module
from tests.requirements import trace as trace_file


@pytest.mark.parametrize("ending", ["", *(f".{packer}" for packer in files.PACKERS)])
def test_a_packed_file_reads_like_a_plain_one(tmp_path: Path, ending: str) -> None:
    text = files.bailian_lines((0.5, "text", [1, 2]), (61.25, "file", [1, 3]))
    with stream(files.write(tmp_path, f"q.jsonl{ending}", text)) as opened:
        (chunk,) = opened
    assert opened.format == "bailian"
    assert chunk.time.tolist() == [0, 0, 60.75, 60.75]
    assert opened.bytes_read == opened.total_bytes > 0


@pytest.mark.parametrize("ending", ["gz", "zst", "bz2", "xz"])
def test_a_file_of_several_packed_parts_is_read_to_its_end(tmp_path: Path, ending: str) -> None:
    packer = files.PACKERS[ending]
    path = tmp_path / f"a.csv.{ending}"
    path.write_bytes(packer(files.CACHESIM.encode()) + packer(b"1,33900,2a,100,5\n"))
    assert len(load(path)) == 4


def test_bailian_makes_chains_of_blocks_and_tenants_of_types(tmp_path: Path) -> None:
    path = files.write(
        tmp_path, "q.jsonl", files.bailian_lines((3.0, "text", [7, 8, 9]), (4.0, "search", [7]), (5.0, "text", []))
    )
    trace = load(path)
    assert trace.chain.tolist() == [0, 1, 2, 0]
    assert trace.tenant.tolist() == [0, 0, 0, 1]
    assert trace.key[0] == trace.key[3] == mix64(7)
    assert set(trace.output_tokens.tolist()) == {16}
    assert stream(path).format == "bailian"


def test_mooncake_blocks_know_their_place_in_their_request() -> None:
    trace = load(trace_file("mooncake_conversation.jsonl.gz"))
    starts = np.flatnonzero(trace.chain == 0)
    assert len(starts) == 12_031
    follows = np.flatnonzero(trace.chain > 0)
    assert np.array_equal(trace.chain[follows], trace.chain[follows - 1] + 1)
    assert np.array_equal(trace.time[follows], trace.time[follows - 1])


def test_azure_of_2024_has_offsets_in_its_times(tmp_path: Path) -> None:
    trace = load(files.write(tmp_path, "azure2024.csv", files.AZURE_2024))
    assert trace.time.tolist() == pytest.approx([0, 0.007405, 0.99007], abs=1e-6)
    assert trace.input_tokens.tolist() == [2162, 2399, 76]
    assert "Azure, 2024" in trace.note


def test_times_are_read_alike_at_any_offset_and_precision() -> None:
    texts = [
        "1970-01-01 00:00:01",
        "1970-01-01T01:00:01.5+01:00",
        "1970-01-01 00:00:02.123456789Z",
        "today",
        "1970-01-01 00:00:03.",
    ]
    together = moments(np.array(texts, dtype=object))
    alone = [float(moments(np.array([text], dtype=object))[0]) for text in texts]
    assert together[:3].tolist() == pytest.approx([1, 1.5, 2.123456789])
    assert np.isnan(together[3:4]).all()
    assert np.array_equal(together, alone, equal_nan=True)


@pytest.mark.parametrize("text", [files.BURSTGPT, files.BURSTGPT_SESSIONS])
def test_burstgpt_makes_models_tenants_and_leaves_failures_out(tmp_path: Path, text: str) -> None:
    with stream(files.write(tmp_path, "b.csv", text)) as opened:
        trace = next(iter(opened))
    assert opened.format == "burstgpt"
    assert opened.tenants == ["ChatGPT", "GPT-4"]
    assert trace.tenant[:2].tolist() == [0, 1]
    assert 0 not in trace.output_tokens
    assert len(np.unique(trace.key)) == len(trace) == text.count("\n") - 1 - text.count(",0,")


def test_servegen_draws_requests_at_the_rates_of_its_clients(tmp_path: Path) -> None:
    path = files.write(tmp_path, "s.csv", files.SERVEGEN)
    trace = load(path, rate_scale=10.0, seed=4)
    with stream(path, rate_scale=10.0, seed=4) as opened:
        assert sum(len(chunk) for chunk in opened) == len(trace)
        assert opened.tenants == ["c61", "c142", "others"]
    first = trace.time < 600
    counts = np.bincount(trace.tenant[first], minlength=3)
    assert counts.tolist() == pytest.approx([12_000, 3_000, 3_000], rel=0.15)
    assert 0 not in trace.tenant[~first]
    assert trace.duration < 1200
    assert "semi-synthetic" in trace.note.lower()
    # A client has keys of its own, and one key one answer.
    owner = {int(key): int(tenant) for key, tenant in zip(trace.key, trace.tenant, strict=True)}
    assert all(owner[int(key)] == tenant for key, tenant in zip(trace.key, trace.tenant, strict=True))
    _, place, again = np.unique(trace.key, return_index=True, return_inverse=True)
    assert np.array_equal(trace.size, trace.size[place][again])
    assert np.array_equal(load(path, rate_scale=10.0, seed=4).key, trace.key)
    assert not np.array_equal(load(path, rate_scale=10.0, seed=5).key[:100], trace.key[:100])


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0])
def test_drawn_arrivals_have_the_rate_and_the_variation_asked_for(variation: float) -> None:
    times = renewals(np.random.default_rng(1), 5.0, variation, 20_000.0)
    gaps = np.diff(times)
    assert len(times) / 20_000 == pytest.approx(5.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert times.min() >= 0
    assert times.max() < 20_000


def test_oracle_general_keeps_sizes_and_mixes_ids(tmp_path: Path) -> None:
    data = files.oracle_records([10, 10, 12, 99], [5, 2**63 + 1, 5, 0], [100, 2**31 - 1, 100, 7])
    with stream(files.write(tmp_path, "t.oracleGeneral.bin.zst", data)) as opened:
        (trace,) = opened
    assert opened.format == "oracle_general"
    assert trace.time.tolist() == [0, 0, 2, 89]
    assert trace.size.tolist() == [100, 2**31 - 1, 100, 7]
    assert trace.key.tolist() == [mix64(5), mix64(2**63 + 1), mix64(5), mix64(0)]


def test_oracle_general_and_csv_of_the_same_requests_are_the_same_trace(tmp_path: Path) -> None:
    binary = load(
        files.write(
            tmp_path, "a.bin", files.oracle_records([33898, 33898, 33899], [42932745, 40409911, 42932745], [512, 6656, 512])
        )
    )
    text = load(files.write(tmp_path, "a.csv", files.CACHESIM))
    for column in ("time", "key", "size", "output_tokens"):
        assert np.array_equal(getattr(binary, column), getattr(text, column))
    bare = "33898;42932745;512\n33898;40409911;6656\n33899;42932745;512\n"
    unnamed = load(files.write(tmp_path, "b.csv", bare), format="libcachesim_csv")
    assert np.array_equal(unnamed.key, text.key)


def test_libcachesim_itself_reads_the_same_requests(tmp_path: Path) -> None:
    libcachesim = module("libcachesim")
    random = np.random.default_rng(2)
    time, objects = np.sort(random.integers(0, 500, 3_000)), random.zipf(1.3, 3_000) % 400
    path = files.write(tmp_path, "t.oracleGeneral.bin", files.oracle_records(time, objects, 10 + objects))
    reader = libcachesim.TraceReader(str(path), trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    theirs = [(request.clock_time, request.obj_id, request.obj_size) for request in reader]
    trace = load(path)
    assert len(theirs) == len(trace)
    assert [mix64(name) for _, name, _ in theirs] == trace.key.tolist()
    assert [size for _, _, size in theirs] == trace.size.tolist()


def test_a_web_servers_log_gives_answered_gets(tmp_path: Path) -> None:
    trace = load(files.write(tmp_path, "access.log", files.COMMON_LOG))
    assert [trace.prompt(row) for row in range(len(trace))] == ["/a?x=1", "/a?x=1"]
    assert trace.time.tolist() == [0, 4]  # the same clock in two zones
    # What was not modified is as long as it was.
    assert trace.output_tokens.tolist() == [581, 581]
    assert trace.key[0] == text_key("/a?x=1")


def test_the_combined_format_may_hold_quotes_and_brackets(tmp_path: Path) -> None:
    trace = load(files.write(tmp_path, "access.log.gz", files.COMBINED_LOG))
    assert [trace.prompt(row) for row in range(len(trace))] == ["/a", "/b"]
    assert trace.output_tokens.tolist() == [2000, 25]


def test_the_gateways_own_log_is_a_workload(tmp_path: Path) -> None:
    writer = AccessLogWriter(tmp_path, "r1")
    for at, key, outcome, size in (
        (100.0, 7, "miss", 900), (101.0, 7, "hit", 900), (102.0, 8, "bypass", 0), (103.0, 9, "error", 0),
        (104.5, 10, "semantic_hit", 50), (105.0, 11, "miss", 0),
    ):  # fmt: skip
        writer.write(AccessRecord(at, key, "a", outcome, "", 0.1, size, 30, 40, 0.0, 0.0, 1, 200))  # type: ignore[arg-type]
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b'{"at": 106.0, "key": 12')  # a line that is still being written
    with stream(writer.path) as opened:
        (trace,) = opened
    assert opened.format == "gateway"
    assert (trace.time.tolist(), trace.key.tolist(), trace.size.tolist()) == ([0, 1, 4.5], [7, 7, 10], [900, 900, 50])
    assert trace.input_tokens.tolist() == [30, 30, 30]


def test_a_column_map_reads_any_table(tmp_path: Path) -> None:
    text = "when|what|bytes|who|doc\n2000|a|10|x|d1\n1500|b|20|y|\n2500|a|10|x|d1\n"
    columns = {
        "time": "when",
        "key": "what",
        "size": "bytes",
        "tenant": "who",
        "document": "doc",
        "time_unit": "ms",
        "delimiter": "|",
    }
    trace = load(files.write(tmp_path, "t.csv", text), columns=columns)
    assert trace.time.tolist() == [0, 0.5, 1.0]
    assert trace.key.tolist() == [text_key("b"), text_key("a"), text_key("a")]
    assert trace.tenant.tolist() == [1, 0, 0]
    assert trace.document[0] == -1
    assert trace.document[1] == trace.document[2] >= 0
    assert trace.size.tolist() == [20, 10, 10]


def test_a_map_may_give_sizes_by_tokens_or_one_for_all(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.csv", "t,k,n\n2023-11-16 18:15:46.5,1,10\n2023-11-16 18:15:47,01,20\n")
    by_tokens = load(path, columns={"time": "t", "key": "k", "output_tokens": "n"})
    assert by_tokens.time.tolist() == [0, 0.5]
    assert by_tokens.size.tolist() == entry_bytes([10, 20], False).tolist()
    assert by_tokens.key.tolist() == [mix64(1), text_key("01")]  # 01 is no number: it would be one with 1
    fixed = load(path, columns={"time": "t", "key": "k", "size_bytes": "4096"})
    assert fixed.size.tolist() == [4096, 4096]
    headless = load(
        files.write(tmp_path, "h.csv", "1,k,5\n2,k,5\n"), columns={"time": "1", "key": "2", "size": "3", "header": "no"}
    )
    assert headless.time.tolist() == [0, 1]


def test_columns_named_by_what_they_are_need_no_map(tmp_path: Path) -> None:
    assert len(load(files.write(tmp_path, "t.csv", "time\tkey\toutput_tokens\n1\ta\t5\n"))) == 1


def test_parquet_reads_as_csv_does(tmp_path: Path) -> None:
    ids = [3, 4, 3]
    table = pa.table(
        {"ts": pa.array([1_000, 2_500, 4_000], pa.timestamp("ms")), "id": ids, "bytes": [10, 20, 30], "extra": ["", "", ""]}
    )
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(table, path)
    columns = {"time": "ts", "key": "id", "size": "bytes"}
    trace = load(path, columns=columns)
    text = load(files.write(tmp_path, "t.csv", "ts,id,bytes\n1,3,10\n2.5,4,20\n4,3,30\n"), columns=columns)
    for column in ("time", "key", "size"):
        assert np.array_equal(getattr(trace, column), getattr(text, column))
    pyarrow.parquet.write_table(pa.table({"time": [1.0], "key": ["a"], "size": [5]}), path)
    assert stream(path).format == "parquet"
    with pytest.raises(TraceError, match="missing: nope"):
        load(path, columns={"time": "time", "key": "nope", "size": "size"})


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match="pip install pyarrow"):
        load(files.write(tmp_path, "t.parquet", b"PAR1 and so on"))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"time": "t", "key": "k"}, "size"),
        ({"time": "t", "size": "s"}, "missing: key"),
        ({"time": "t", "key": "k", "size": "s", "colour": "c"}, "colour"),
        ({"time": "t", "key": "k", "size": "s", "time_unit": "h"}, "time_unit"),
        ({"time": "t", "key": "k", "size_bytes": "-1"}, "size_bytes"),
        ({"time": "t", "key": "k", "size": "s", "delimiter": ", "}, "delimiter"),
        ({"time": "t", "key": "k", "size": "s", "header": "maybe"}, "header"),
    ],
)
def test_a_map_that_cannot_be_is_refused(tmp_path: Path, columns: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load(files.write(tmp_path, "t.csv", "t,k,s\n1,a,5\n"), columns=columns)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 1e9, allow_nan=False),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12),
            st.integers(1, 2**31 - 1),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_csv_can_hold_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, str, int]]) -> None:
    import csv

    path = tmp_path_factory.mktemp("csv") / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "key", "size"])
        writer.writerows((repr(at), key, size) for at, key, size in rows)
    trace = load(path)
    ordered = sorted(rows, key=lambda row: row[0])
    assert trace.size.tolist() == [size for _, _, size in ordered]
    assert trace.time.tolist() == [at - ordered[0][0] for at, _, _ in ordered]
    keys = {int(key) for key in trace.key}
    assert len(keys) == len({key for _, key, _ in rows})


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 2**64 - 1), st.integers(1, 2**31 - 1)), min_size=1, max_size=60)
)
def test_whatever_oracle_general_can_hold_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    rows.sort(key=lambda row: row[0])
    time, objects, size = (list(column) for column in zip(*rows, strict=True))
    path = files.write(tmp_path_factory.mktemp("oracle"), "t.bin", files.oracle_records(time, np.array(objects, np.uint64), size))
    trace = load(path, format="oracle_general")
    assert trace.key.tolist() == [mix64(name) for name in objects]
    assert trace.size.tolist() == size
    assert trace.time.tolist() == [at - time[0] for at in time]
