"""The benchmark of wrong answers replays what it says, tunes on the training split alone and reports honest intervals."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from experiments.bench.semantic_errors import (
    THRESHOLDS,
    Questions,
    Stream,
    Tally,
    embed,
    read_questions,
    replay_acceptance,
    replay_threshold,
    run,
    tuned_threshold,
    wilson,
)
from serving.meaning.acceptance import Acceptance
from tests.requirements import trace


def on_circle(degrees: Sequence[float]) -> npt.NDArray[np.float32]:
    angles = np.deg2rad(np.asarray(degrees))
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def questions(degrees: Sequence[float], labels: Sequence[int]) -> Questions:
    return Questions([f"question at {angle}" for angle in degrees], np.asarray(labels, np.int64), on_circle(degrees))


def test_a_stream_is_answered_from_what_was_asked_before_and_not_answered() -> None:
    # 0 is asked; 10 is a right hit; 20 is nearest to 0 too, since 10 was never cached: a wrong hit; 90 is new
    stream = Stream(questions([0, 10, 20, 90], [1, 1, 2, 3]))
    assert replay_threshold(stream, math.cos(math.radians(25))) == Tally(4, 2, 1)
    assert replay_threshold(stream, math.cos(math.radians(15))) == Tally(4, 1, 0)
    assert replay_threshold(stream, 1.0) == Tally(4, 0, 0)
    assert replay_threshold(stream, math.inf) == Tally(4, 0, 0)


def test_guards_send_a_question_on_to_the_next_candidate() -> None:
    asked = questions([0, 8, 10], [1, 2, 1])
    learnt: list[tuple[int, bool]] = []

    def never(place: int, similarity: float) -> bool:
        return False

    Stream(asked).replay(never, lambda place, similarity, right: learnt.append((place, right)))
    assert learnt == [(0, False), (1, False)]
    learnt.clear()
    guarded = Stream(asked).guarded(lambda one, two: "numbers" if {one, two} == {"question at 10", "question at 8"} else "")
    guarded.replay(never, lambda place, similarity, right: learnt.append((place, right)))
    assert learnt == [(0, False), (0, True)]
    assert Stream(asked, lambda one, two: "all").replay(lambda *_: True) == Tally(3, 0, 0)


def test_a_question_without_a_vector_is_never_looked_up_by_meaning() -> None:
    known = questions([0, 0, 0], [1, 1, 1])
    known.vectors[1] = 0
    assert replay_threshold(Stream(known), 0.9) == Tally(3, 1, 0)


def test_a_threshold_is_tuned_to_keep_the_bound_at_all_higher_ones_too() -> None:
    tallies = [Tally(100, 50, 0)] * len(THRESHOLDS)
    assert tuned_threshold(tallies, 0.01, "lookups") == THRESHOLDS[0]
    tallies[10] = Tally(100, 40, 2)
    assert tuned_threshold(tallies, 0.01, "lookups") == THRESHOLDS[11]
    assert tuned_threshold(tallies, 0.02, "lookups") == THRESHOLDS[0]
    assert tuned_threshold(tallies, 0.02, "answers") == THRESHOLDS[11]
    tallies[-1] = Tally(100, 1, 1)
    assert tuned_threshold(tallies, 0.001, "answers") == math.inf


def test_intervals_are_wilsons() -> None:
    assert wilson(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_acceptance_learns_on_the_stream() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(20, size=800)
    stream = Stream(questions((labels * 18 + random.normal(0, 1, 800)).tolist(), labels.tolist()))
    acceptance = Acceptance(0.05)
    tally = replay_acceptance(stream, acceptance, random)
    assert tally.hits > 0.3 * tally.lookups
    assert tally.wrong <= 0.05 * tally.lookups
    assert acceptance.stats().outcomes >= 30


def test_the_splits_are_apart_and_draws_repeat() -> None:
    path = trace("banking77.csv.gz")
    held_out, labels = read_questions(path, "test")
    training, _ = read_questions(path, "train")
    assert (len(held_out), len(training), len(set(labels.tolist()))) == (3080, 10003, 77)
    some, numbers = read_questions(path, "test", limit=50, seed=3)
    again, same = read_questions(path, "test", limit=50, seed=3)
    assert some == again
    assert np.array_equal(numbers, same)
    number_of = dict(zip(held_out, labels.tolist(), strict=True))
    assert all(number_of[text] == number for text, number in zip(some, numbers.tolist(), strict=True))


def test_what_is_not_banking77_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv.gz"
    path.write_bytes(gzip.compress(b"question,answer\na,b\n"))
    with pytest.raises(ValueError, match="expected the columns text, category and split"):
        read_questions(path, "test")
    path.write_bytes(gzip.compress(b"text,category,split\na,b,train\n"))
    with pytest.raises(ValueError, match="expected questions of the split 'test', found none"):
        read_questions(path, "test")


def test_a_slice_of_banking77_gives_a_row_for_each_bound_reading_guard_and_method() -> None:
    result = run(trace("banking77.csv.gz"), bounds=(0.02, 0.1), orders=2, training=1, limit=150, vectors=embed)
    assert len(result.rows) == 2 * 2 * 2 * 3
    for row in result.rows:
        assert row["over"] in ("lookups", "answers")
        assert 0 <= row["lookups_low"] <= row["wrong_of_lookups"] <= row["lookups_high"] <= 1
        assert 0 <= row["hits_low"] <= row["wrong_of_hits"] <= row["hits_high"] <= 1
        assert row["wrong_of_lookups"] <= row["hit_ratio"] <= 1
        share = row["wrong_of_lookups"] if row["over"] == "lookups" else row["wrong_of_hits"]
        assert row["kept"] == ("yes" if share <= row["bound"] else "no")
    fixed = [row for row in result.rows if row["method"].startswith("threshold") and row["over"] == "lookups"]
    assert max(row["hit_ratio"] for row in fixed) > 0.05
    assert json.loads(json.dumps(result.to_dict()))["command"] == "cachepilot bench semantic-errors"
