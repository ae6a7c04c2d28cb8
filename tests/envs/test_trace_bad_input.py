"""Files that are not what they should be: each is named by file, line and what was expected, or counted on request."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.workloads import TraceError, load, stream
from envs.workloads.readers.batch import KEPT_ERRORS
from envs.workloads.readers.known import KNOWN
from tests.envs import trace_files as files

TABLE = "time,key,size\n1,a,10\n2,b,20\n3,c,30\n4,a,10\n"
BLOCKS = files.bailian_lines(*((float(at), "text", [at, at + 1]) for at in range(2_000)))


def test_an_error_crosses_processes_whole(tmp_path: Path) -> None:
    error = TraceError(tmp_path / "x.csv", "a number", line=7, excerpt="y" * 500, unit="record")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, TraceError)
    assert str(again) == str(error)
    assert (again.path, again.line, again.excerpt, again.unit) == (error.path, 7, error.excerpt, "record")


@pytest.mark.parametrize("ending", files.PACKERS)
@pytest.mark.parametrize("skip", [False, True])
def test_a_packed_file_that_ends_early_says_so_after_what_is_whole(tmp_path: Path, ending: str, skip: bool) -> None:
    random = np.random.default_rng(0)
    lines = "".join(f"{at},{random.integers(2**60)},{random.integers(2**30)}\n" for at in range(20_000))
    path = files.write(tmp_path, f"t.csv.{ending}", "time,key,size\n" + lines)
    path.write_bytes(path.read_bytes()[:-20_000])
    opened = stream(path, skip_bad_lines=skip, chunk=100, lateness=0.0)
    with pytest.raises(TraceError, match=r"line \d+: expected a complete .* it ends early: copy or download it again") as caught:
        list(opened)
    assert caught.value.line is not None
    # All whole lines but those that still waited for a later one were handed on.
    assert caught.value.line - 300 <= opened.requests <= caught.value.line
    # What is before the damage can be had.
    assert len(load(path, limit=100)) == 100


@pytest.mark.parametrize("ending", files.PACKERS)
def test_a_packed_file_that_is_damaged_says_so(tmp_path: Path, ending: str) -> None:
    path = files.write(tmp_path, f"q.jsonl.{ending}", BLOCKS)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 40] = bytes(40)
    path.write_bytes(bytes(raw))
    with pytest.raises(TraceError, match=r"copy or download it again|JSON object"):
        load(path)


def test_a_binary_file_that_ends_within_a_record_says_so(tmp_path: Path) -> None:
    data = files.oracle_records([1, 2, 3], [1, 2, 1], [5, 5, 5])
    with pytest.raises(TraceError, match=r"record 3: expected whole records of 24 bytes, but the last has 20"):
        load(files.write(tmp_path, "t.bin", data[:-4]))


@pytest.mark.parametrize(
    ("name", "text", "line", "says"),
    [
        ("t.csv", TABLE.replace("2,b,20", "2,b"), 3, "3 fields"),
        ("t.csv", TABLE.replace("2,b,20", "2,b,20,9"), 3, "3 fields"),
        ("t.csv", TABLE.replace("2,b,20", "2,b,-20"), 3, "size: a size from 0 to below 2 GiB"),
        ("t.csv", TABLE.replace("2,b,20", "2,b,2147483648"), 3, "2 GiB"),
        ("t.csv", TABLE.replace("2,b,20", "2,b,nan"), 3, "2 GiB"),
        ("t.csv", TABLE.replace("2,b,20", "2,b,inf"), 3, "2 GiB"),
        ("t.csv", TABLE.replace("2,b,20", "2,b,True"), 3, "2 GiB"),
        ("t.csv", TABLE.replace("2,b,20", "nan,b,20"), 3, "time: a finite time"),
        ("t.csv", TABLE.replace("2,b,20", "inf,b,20"), 3, "time: a finite time"),
        ("t.csv", TABLE.replace("2,b,20", "1e300,b,20"), 3, "time: a finite time"),
        ("t.csv", TABLE.replace("2,b,20", "yesterday,b,20"), 3, "time: a finite time"),
        ("t.csv", TABLE.replace("2,b,20", "2,,20"), 3, "key: a key"),
        ("a.csv", files.AZURE_2024.replace("2399", "-1"), 3, "ContextTokens"),
        ("a.csv", files.AZURE_2024.replace("2399", "nan"), 3, "ContextTokens"),
        ("b.csv", files.BURSTGPT.replace("1087", "inf"), 3, "Request tokens"),
        ("s.csv", files.SERVEGEN.replace("600,2.0,2,1.0,0.0", "600,2.0,2,1.0,-1"), 3, "rate_c61"),
        ("c.csv", files.CACHESIM.replace("6656", "-5"), 3, "2 GiB"),
        (
            "l.log",
            files.COMMON_LOG.replace("127.0.0.1 - - [10/Oct/2000:13:55:38 -0700]", "what"),
            3,
            "a line of a web server's log",
        ),
        ("l.log", files.COMMON_LOG.replace("2326", "99999999999"), 1, "2 GiB"),
        ("l.log", files.COMMON_LOG.replace("10/Oct/2000:13:55:36", "99/Oct/2000:13:55:36"), 1, "a time like"),
        ("q.jsonl", BLOCKS.replace('"timestamp":7.0', '"timestamp":-7.0'), 8, "timestamp (seconds)"),
        ("q.jsonl", BLOCKS.replace('"timestamp":7.0', '"timestamp":null'), 8, "timestamp (seconds)"),
        ("q.jsonl", BLOCKS.replace("[7,8]", "[7,8.5]"), 8, "whole numbers"),
        ("q.jsonl", BLOCKS.replace("[7,8]", "[7,true]"), 8, "whole numbers"),
        ("q.jsonl", BLOCKS.replace("[7,8]", "7"), 8, "whole numbers"),
        ("q.jsonl", BLOCKS.replace("[7,8]", "[7,18446744073709551615]"), 8, "whole numbers"),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, name: str, text: str, line: int, says: str) -> None:
    path = files.write(tmp_path, name, text)
    with pytest.raises(TraceError) as caught:
        load(path)
    assert caught.value.line == line
    assert says in str(caught.value)
    assert caught.value.excerpt or says == "key: a key"
    with stream(path, skip_bad_lines=True) as opened:
        rest = sum(len(chunk) for chunk in opened)
    assert opened.skipped == 1
    assert [error.line for error in opened.first_skipped] == [line]
    assert rest > 0
    if name == "t.csv":
        assert rest == 3


def test_what_comes_before_a_bad_line_can_be_read(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.csv", TABLE + "bad\n")
    assert len(load(path, limit=4)) == 4
    with pytest.raises(TraceError, match="line 6"):
        load(path, limit=5)


def test_of_many_bad_lines_all_are_counted_and_a_few_are_kept(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.csv", TABLE + "".join(f"{at},x,-1\n" for at in range(5, 500)))
    with stream(path, skip_bad_lines=True) as opened:
        assert sum(len(chunk) for chunk in opened) == 4
    assert opened.skipped == 495
    assert [error.line for error in opened.first_skipped] == list(range(6, 6 + KEPT_ERRORS))
    assert len(load(path, skip_bad_lines=True)) == 4


def test_nothing_but_bad_lines_is_an_error_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"at least one request.*2 bad lines were skipped"):
        load(files.write(tmp_path, "t.csv", "time,key,size\nx,a,1\ny,a,1\n"), skip_bad_lines=True)


def test_too_large_a_record_of_a_binary_file_is_named_by_its_number(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.bin", files.oracle_records([1, 2, 3], [1, 2, 3], [5, 2**31, 5]))
    with pytest.raises(TraceError, match=r"record 2: expected a size from 0 to below 2 GiB.*2147483648"):
        load(path, format="oracle_general")
    assert len(load(path, format="oracle_general", skip_bad_lines=True)) == 2


def test_a_bad_line_within_quotes_is_named_by_its_last_line(tmp_path: Path) -> None:
    text = 'time,key,size\n1,"a\nb",10\n2,"c\nd",x\n'
    with pytest.raises(TraceError) as caught:
        load(files.write(tmp_path, "t.csv", text))
    assert caught.value.line == 5
    (key,) = set(load(files.write(tmp_path, "u.csv", text), skip_bad_lines=True).key.tolist())
    assert key


ODD_LINES = (
    "1,a,10", "2.5,b,0", "1e1,c,7", " 3,d, 8", "4,e", "5,f,1,1", "", "nan,g,1", "6,,1", "7,h,-1", "8,i,1e3", "9,j,x", "True,k,1",
    "10,007,1", "11,7,1", "12,NA,5", "13,nan,5", "14,l,99999999999999999999", "15,m,1.5", "-16,n,1",
    "2023-11-16 18:15:46,o,2", ",,", "inf,p,1",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(st.sampled_from(ODD_LINES), max_size=25))
def test_a_line_means_the_same_whether_read_alone_or_among_many(
    lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("odd")
    said = []
    # A quote anywhere makes the table be read a row at a time.
    for name, last in (("many.csv", "99,z,1"), ("alone.csv", '99,"z",1')):
        path = files.write(folder, name, "\n".join(["time,key,size", *lines, last]) + "\n")
        with stream(path, skip_bad_lines=True, lateness=1e12) as opened:
            chunks = list(opened)
        rows = [
            (float(at), int(key), int(size))
            for part in chunks
            for at, key, size in zip(part.time, part.key, part.size, strict=True)
        ]
        bad = {(error.line, error.expected) for error in opened.first_skipped} if opened.skipped <= KEPT_ERRORS else set()
        try:
            first = len(load(path))
        except TraceError as error:
            first = -(error.line or 0)
        said.append((rows, opened.skipped, opened.zero_sized, bad, first))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.mkdir(), "it is a directory"),
        (lambda path: None, "No such file"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("time,key,size\n"), "at least one request"),
        (lambda path: path.write_text(files.AZURE_2024.splitlines()[0]), "at least one request"),
        (lambda path: path.write_text(TABLE, encoding="utf-16"), "UTF-8"),
        (lambda path: path.write_bytes(bytes(range(256)) * 40), "one of the known formats"),
        (lambda path: path.write_bytes(bytes(4096)), "one of the known formats"),
        (lambda path: path.write_text("{}\n"), "one of the known formats"),
        (lambda path: path.write_text("hello, world\n"), "one of the known formats"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(TraceError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_an_unknown_format_names_all_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        load(files.write(tmp_path, "t.txt", "what is this\n"))
    assert all(name in str(caught.value) for name in KNOWN)


def test_a_format_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="oracle_general"):
        load(files.write(tmp_path, "t.csv", TABLE), format="lru")


def test_a_forced_format_is_read_as_such_and_fails_as_such(tmp_path: Path) -> None:
    path = files.write(tmp_path, "t.csv", TABLE)
    with pytest.raises(TraceError, match="ContextTokens"):
        load(path, format="azure")
    with pytest.raises(TraceError, match="Parquet"):
        load(path, format="parquet")
    with pytest.raises(TraceError, match="JSON object"):
        load(path, format="mooncake")
    assert len(load(path, format="csv")) == 4


@pytest.mark.parametrize("name", ["t.csv", "l.log"])
def test_a_line_in_another_encoding_is_a_bad_line(tmp_path: Path, name: str) -> None:
    text = TABLE.replace("2,b", "2,caf\xe9") if name == "t.csv" else files.COMMON_LOG.replace("/gone", "/caf\xe9")
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=r"line 3: expected text in UTF-8") as caught:
        load(path)
    assert caught.value.line == 3
    assert len(load(path, skip_bad_lines=True)) == (3 if name == "t.csv" else 2)


def test_requests_of_no_bytes_are_left_out_and_counted(tmp_path: Path) -> None:
    with stream(files.write(tmp_path, "t.csv", TABLE.replace(",20", ",0"))) as opened:
        (trace,) = opened
    assert (len(trace), opened.zero_sized, opened.skipped) == (3, 1, 0)
    with stream(files.write(tmp_path, "t.bin", files.oracle_records([1, 2], [1, 2], [0, 5]))) as opened:
        (trace,) = opened
    assert (len(trace), opened.zero_sized) == (1, 1)


def test_an_answer_of_no_tokens_still_is_an_entry(tmp_path: Path) -> None:
    trace = load(files.write(tmp_path, "t.csv", "time,key,output_tokens\n1,a,0\n"))
    assert trace.size[0] > 0


@pytest.mark.parametrize("text", ["time,key,size\n5,a,10\n", "time,key,size\n" + "".join(f"{at},a,10\n" for at in range(50))])
def test_one_request_and_one_key_are_traces(tmp_path: Path, text: str) -> None:
    trace = load(files.write(tmp_path, "t.csv", text))
    assert len(trace) == text.count("a")
    assert len(np.unique(trace.key)) == 1
    assert trace.time[0] == 0


def test_blank_lines_and_line_ends_of_other_systems_are_no_bad_lines(tmp_path: Path) -> None:
    trace = load(files.write(tmp_path, "t.csv", TABLE.replace("\n", "\r\n") + "\r\n\r\n5,e,1"))
    assert trace.time.tolist() == [0, 1, 2, 3, 4]
    assert trace.size[-1] == 1
    assert len(load(files.write(tmp_path, "q.jsonl", "\n" + BLOCKS.replace("\n", "\r\n\n")))) == 4_000


@pytest.mark.parametrize(
    ("argument", "value"), [("chunk", 0), ("lateness", -1.0), ("lateness", float("nan")), ("limit", 0), ("rate_scale", 0.0)]
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        stream(files.write(tmp_path, "t.csv", TABLE), **{argument: value})  # type: ignore[arg-type]


def test_rates_that_make_too_many_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="smaller rate_scale"):
        load(files.write(tmp_path, "s.csv", files.SERVEGEN), rate_scale=1e6)
