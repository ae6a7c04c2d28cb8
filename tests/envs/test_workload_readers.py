"""Reading real traces: what the columns mean, and what is said about a file that is not what it should be."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.workloads import TraceError, entry_bytes, load
from envs.workloads.entry import metadata_bytes
from serving.llm_sim import Answer, answer_size
from serving.tiers.base import Entry, EntryMeta
from tests.requirements import trace as trace_file

APACHE = "t_s,method,path,status,bytes\n0,GET,/a,200,100\n1,POST,/a,200,100\n2,GET,/b,200,4000\n2,GET,/a,304,99999\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1805900,396,109\n"
    "2023-11-16 18:15:48.6805900,10,7\n"
)
QUESTIONS = 'text,category,split\nWhere is my card?,card,train\n"Is it late,\nmy card?",card,test\nWhat is the fee?,fee,train\n'
MOONCAKE = (
    '{"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 900, "output_length": 5, "hash_ids": [0, 2, 3]}\n'
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["apache.csv", "apache.csv.gz"])
def test_apache_keeps_gets_and_makes_paths_prompts(tmp_path: Path, name: str) -> None:
    trace = load(write(tmp_path, name, APACHE))
    assert [trace.prompt(row) for row in range(3)] == ["/a", "/b", "/a"]
    assert trace.time.tolist() == [0, 2, 2]
    assert trace.key[0] == trace.key[2] != trace.key[1]
    assert trace.output_tokens.tolist() == [25, 1000, 2048]  # bytes over 4, at most 2048
    assert trace.kind == "exact"


def test_mooncake_makes_every_block_reference_a_request(tmp_path: Path) -> None:
    trace = load(write(tmp_path, "m.jsonl", MOONCAKE))
    assert trace.time.tolist() == [0, 0, 1.5, 1.5, 1.5]
    assert [trace.prompt(row) for row in range(5)] == [f"block {number}" for number in (0, 1, 0, 2, 3)]
    assert len(set(trace.key.tolist())) == 4
    assert set(trace.output_tokens.tolist()) == {512}
    assert len(load(tmp_path / "m.jsonl", limit=3)) == 3


def test_azure_alone_has_nothing_to_hit(tmp_path: Path) -> None:
    trace = load(write(tmp_path, "azure2023_conv.csv", AZURE))
    assert trace.time.tolist() == pytest.approx([0, 0.5, 2.0])
    assert len(set(trace.key.tolist())) == 3
    assert trace.input_tokens.tolist() == [374, 396, 10]


def test_questions_are_asked_at_real_times(tmp_path: Path) -> None:
    arrivals = write(tmp_path, "azure2023_conv.csv.gz", AZURE)
    texts = write(tmp_path, "banking77.csv", QUESTIONS)
    trace = load(arrivals, banking77=texts, seed=3)
    assert trace.kind == "semantic"
    assert "semi-synthetic" in trace.note.lower()
    assert set(trace.group.tolist()) <= {0, 1}
    assert {trace.prompt(row) for row in range(3)} <= {"Where is my card?", "Is it late,\nmy card?", "What is the fee?"}
    # The questions alone find the arrivals beside them.
    again = load(texts, seed=3)
    assert np.array_equal(again.key, trace.key)
    assert again.name == "banking77 on azure2023_conv"


def test_one_question_has_one_answer() -> None:
    trace = load(trace_file("azure2023_conv.csv.gz"), banking77=trace_file("banking77.csv.gz"), limit=5_000)
    for column in (trace.size, trace.output_tokens, trace.group):
        _, first, inverse = np.unique(trace.key, return_index=True, return_inverse=True)
        assert np.array_equal(column, column[first][inverse])
    assert 0.3 < 1 - len(np.unique(trace.key)) / len(trace) < 0.8


@pytest.mark.parametrize(
    ("name", "requests", "keys"),
    [
        ("elastic_apache.csv.gz", 9_952, 1_486),
        ("mooncake_conversation.jsonl.gz", 288_500, 182_790),
        ("azure2023_conv.csv.gz", 19_366, 19_366),
    ],
)
def test_real_traces_have_the_documented_requests_and_keys(name: str, requests: int, keys: int) -> None:
    trace = load(trace_file(name))
    assert (len(trace), len(np.unique(trace.key))) == (requests, keys)


@pytest.mark.parametrize("tokens", [0, 1, 77, 2048])
@pytest.mark.parametrize("vector", [False, True])
def test_entry_bytes_are_those_of_the_stored_answer(tokens: int, vector: bool) -> None:
    body = Answer("0" * 64, "x" * 4 * tokens, 10, tokens, "stop").to_json("llm-sim", "1")
    entry = Entry(bytes(32), body, 0.0, context=bytes(32) if vector else b"", vector=bytes(384) if vector else b"")
    assert entry_bytes(tokens, vector) == entry.size
    described = replace(entry, meta=EntryMeta(model="llm-sim").dump())
    assert entry_bytes(tokens, vector) + metadata_bytes("llm-sim") == described.size
    assert len(body) == answer_size(tokens)


@pytest.mark.parametrize(
    ("name", "text", "line", "says"),
    [
        ("empty.csv", "", 1, "the file is empty"),
        ("unknown.csv", "a,b\n1,2\n", 1, "oracle_general"),
        ("apache.csv", APACHE.replace("2,GET,/b", "x,GET,/b"), 4, "t_s"),
        ("apache.csv", APACHE.replace(",4000", ",-1"), 4, "bytes"),
        ("apache.csv", APACHE.replace("/b,200,4000", "/b"), 4, "5 fields"),
        ("apache.csv", "t_s,path,bytes\n0,/a,1\n", 1, "method"),
        ("header.csv", "t_s,method,path,status,bytes\n", None, "at least one request"),
        ("azure.csv", AZURE.replace("2023-11-16 18:15:47.1805900", "yesterday"), 3, "TIMESTAMP"),
        ("m.jsonl", MOONCAKE + '{"timestamp": 2000, "hash_ids": [1, 2\n', 3, "JSON object"),
        ("m.jsonl", MOONCAKE + '{"timestamp": 2000}\n', 3, "hash_ids"),
        ("m.jsonl", '{"timestamp": 0, "hash_ids": ["a"]}\n', 1, "whole numbers"),
        ("banking77.csv", QUESTIONS, None, "azure2023_conv.csv"),
    ],
)
def test_bad_files_are_named_by_file_line_and_expectation(
    tmp_path: Path, name: str, text: str, line: int | None, says: str
) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(TraceError) as caught:
        load(path)
    assert caught.value.line == line
    assert str(path) in str(caught.value)
    assert says in str(caught.value)
    if line is not None:
        assert f"line {line}" in str(caught.value)


def test_a_truncated_gzip_names_the_line_it_ends_at(tmp_path: Path) -> None:
    path = write(tmp_path, "m.jsonl.gz", MOONCAKE * 2000)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceError, match=r"line \d+: expected a complete gzip file"):
        load(path)


def test_a_damaged_gzip_is_said_to_be_damaged(tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 10**9, 3000)
    path = write(tmp_path, "apache.csv.gz", APACHE + "".join(f"3,GET,/{number},200,1\n" for number in random))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 50] = bytes(50)
    path.write_bytes(bytes(raw))
    with pytest.raises(TraceError, match=r"copy or download it again|UTF-8|fields|finite number"):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv.*No such file"):
        load(tmp_path / "nowhere.csv")


def test_questions_need_arrivals_of_the_right_kind(tmp_path: Path) -> None:
    apache, texts = write(tmp_path, "apache.csv", APACHE), write(tmp_path, "banking77.csv", QUESTIONS)
    with pytest.raises(TraceError, match="TIMESTAMP, ContextTokens, GeneratedTokens"):
        load(apache, banking77=texts)


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit"):
        load(write(tmp_path, "apache.csv", APACHE), limit=0)


@pytest.mark.parametrize("tokens", ["3000000000", "1e300"])
def test_tokens_that_do_not_fit_are_named_by_line(tmp_path: Path, tokens: str) -> None:
    with pytest.raises(TraceError, match=r"line 5.*at most"):
        load(write(tmp_path, "a.csv", AZURE + f"2023-11-16 18:15:49.0,{tokens},7\n"))


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    assert len(load(write(tmp_path, "apache.csv", "\ufeff" + APACHE))) == 3


def test_a_header_without_an_end_is_no_csv(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1.*CSV"):
        load(write(tmp_path, "apache.csv", "t_s,path,bytes," + "a" * 200_000))
