"""The ghost's benchmark compares with the exact curve, trace by trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from experiments.bench import ghost


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ghost.BenchResult:
    folder: Path = tmp_path_factory.mktemp("traces")
    lines = [json.dumps({"timestamp": 1000 * turn, "hash_ids": [turn % 7, turn % 11, turn % 40]}) for turn in range(200)]
    with gzip.open(folder / "mooncake_conversation.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    return ghost.run(folder, max_keys=600, windows=4, salts=2, requests=5_000, singles=100)


def test_every_trace_has_a_row_per_variant(result: ghost.BenchResult) -> None:
    measured = [(row["trace"], row["variant"]) for row in result.rows[:-1]]
    assert len(measured) == 9 == len({(row["trace"], row["keys"], row["variant"]) for row in result.rows[:-1]})
    assert {variant for _, variant in measured} == set(ghost.VARIANTS)
    assert result.rows[-1]["requests"] == 100
    assert all(row["ns_per_request_gateway_grid"] > 0 and row["memory_bytes"] > 0 for row in result.rows)


def test_a_trace_whose_keys_fit_has_no_error(result: ghost.BenchResult) -> None:
    for row in result.rows[:3]:
        assert row["rate"] == 1.0
        assert row["max_error"] == row["window_error"] == 0.0


def test_sampled_traces_have_an_error_and_hot_keys_lower_it(result: ghost.BenchResult) -> None:
    sampled = [row for row in result.rows[3:-1] if row["rate"] < 1.0]
    assert len(sampled) == 6
    assert all(0.0 < row["mean_error"] <= row["worst_mean_error"] <= row["max_error"] <= 1.0 for row in sampled)
    assert result.ratio is not None
    assert result.ratio > 1.0


def test_the_report_is_plain_json(result: ghost.BenchResult) -> None:
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["command"] == "cachepilot bench ghost"
