from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from experiments.bench import gateway
from experiments.bench.result import BenchResult
from experiments.bench.systems import CACHEPILOT, LITELLM
from tests.requirements import module


@pytest.fixture(scope="module")
def measured() -> BenchResult:
    """Our gateway alone, on Ray Serve, with and without answers by meaning."""
    module("ray.serve")
    # In a process of its own, as the command runs it: this one may have a Ray already, of other tests.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure).result()


def measure() -> BenchResult:
    scale = gateway.Scale(seconds=1.0, connections=2, rounds=1, misses=4, replays=4, bursts=1, meanings=4)
    return gateway.run(scale, litellm=None)


def test_every_number_of_the_gateway_is_measured_and_held_to_its_goal(measured: BenchResult) -> None:
    rows = {row["what"]: row for row in measured.rows}
    assert len(rows) == len(measured.rows)
    for row in measured.rows:
        assert row[CACHEPILOT] is not None
        assert row[LITELLM] is None
        assert row["met"] in (("yes", "no") if row["goal"] and "litellm" not in row["goal"] else (None,))
    assert rows["exact hits"][CACHEPILOT] > 0
    assert rows["miss, P50"][gateway.MODEL] > 50.0  # the model's first token alone takes that long
    assert rows["forwarded by Ray Serve and nothing else, added P50"][CACHEPILOT] > 0
    assert json.loads(json.dumps(measured.to_dict()))["ratio"] is None
    assert "litellm was not measured" in measured.note


def test_a_stream_is_replayed_to_the_byte_and_identical_misses_are_one_call(measured: BenchResult) -> None:
    rows = {row["what"]: row for row in measured.rows}
    replayed, identical = rows["replayed stream"], rows["20 identical misses"]
    assert (replayed[gateway.MODEL], replayed[CACHEPILOT], replayed["met"]) == (34, 34, "yes")
    assert (identical[CACHEPILOT], identical["met"]) == (1, "yes")


def test_questions_in_other_words_are_answered_by_meaning(measured: BenchResult) -> None:
    assert "4 of 4 questions in other words were answered by meaning" in measured.note


def test_the_pairs_of_questions_are_all_different() -> None:
    texts = [text for pair in gateway.pairs(180) for text in pair]
    assert len(set(texts)) == 360
    with pytest.raises(ValueError, match="at most 180, got 181"):
        gateway.pairs(181)


def test_a_goal_over_litellm_is_met_or_missed_by_the_ratio() -> None:
    values = {CACHEPILOT: 1000.0, LITELLM: 90.0}
    row = gateway.row("exact hits", "requests/s", values, ">= 10 x litellm", lambda ratio: ratio >= 10)
    assert (row["met"], row[gateway.MODEL]) == ("yes", None)
    assert row["ratio"] == pytest.approx(11.1, abs=0.1)
    slower = gateway.row("exact hits", "requests/s", {**values, LITELLM: 110.0}, ">= 10 x litellm", lambda ratio: ratio >= 10)
    assert slower["met"] == "no"
    alone = gateway.row("exact hits", "requests/s", {CACHEPILOT: 1.0}, ">= 10 x litellm", lambda ratio: ratio >= 10)
    assert (alone["ratio"], alone["met"]) == (None, None)
