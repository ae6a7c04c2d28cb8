from __future__ import annotations

import json

import numpy as np

from experiments.bench import semantic_lookup
from serving.embedding import quantise
from tests.requirements import module


def test_it_measures_ours_beside_the_peers_on_questions_that_have_an_answer() -> None:
    module("faiss")
    result = semantic_lookup.run(entries=1_500, questions=400, rounds=2)
    rows = {row["what"]: row for row in result.rows}
    assert next(iter(rows)) == semantic_lookup.OURS
    assert rows[semantic_lookup.FLAT]["recall@1"] == 1.0
    assert rows[semantic_lookup.OURS]["recall@1"] >= 0.98
    for row in result.rows:
        assert 0.0 < row["p50_ms"] <= row["p99_ms"]
        assert row["entries"] == 1_500
    assert result.ratio is not None
    assert result.ratio > 0.0
    assert json.loads(json.dumps(result.to_dict()))["command"] == "cachepilot bench semantic-lookup"


def test_the_truth_is_the_greatest_exact_cosine() -> None:
    random = np.random.default_rng(0)
    known, asked = quantise(random.normal(size=(30, 384))), quantise(random.normal(size=(5, 384)))
    stored = semantic_lookup.mixed(known, 100, seed=1)
    assert stored.shape == (100, 384)
    assert (stored[:30] == known).all()
    assert (stored == semantic_lookup.mixed(known, 100, seed=1)).all()
    floats = [vectors.astype(float) for vectors in (asked, stored)]
    exact = floats[0] @ floats[1].T / np.outer(*(np.linalg.norm(each, axis=1) for each in floats))
    np.testing.assert_allclose(semantic_lookup.nearest(stored, asked), exact.max(axis=1), atol=1e-6)
