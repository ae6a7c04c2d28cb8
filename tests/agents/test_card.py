"""The card for people says everything that the card for programs says, also where the policy does not win."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agents.artifact import FORMAT, load
from agents.card import lost, readme
from agents.ppo import PRETRAINED
from envs.action import ActionMap
from tests.agents.observations import network, recurrent, store

COMPARISONS = [
    {"suite": "steady", "against": "curve", "relative": 1.012, "low": 1.004, "high": 1.02},
    {"suite": "steady", "against": "static", "relative": 0.9991, "low": 0.99, "high": 1.01},
    {"suite": "non-stationary", "against": "curve", "relative": 0.96, "low": 0.95, "high": 0.97},
]


def page(directory: Path, **changes: Any) -> str:
    store(directory, **changes)
    text = (directory / "README.md").read_text()
    assert text == readme(json.loads((directory / "card.json").read_text()))
    return text


def section(text: str, title: str) -> str:
    """The text under a title, up to the next one of its rank or above."""
    rank = title.split(" ")[0]
    lines = text.split(f"{title}\n", 1)[1].splitlines()
    ends = [n for n, line in enumerate(lines) if line.startswith("#") and len(line.split(" ")[0]) <= len(rank)]
    return "\n".join(lines[: ends[0]] if ends else lines)


def test_it_says_what_the_policy_is(tmp_path: Path) -> None:
    text = page(tmp_path, network=network(1, 0.1), actions=ActionMap("residual", (3.0, 1.5, 0.0)))
    what = section(text, "## What it is")
    assert "a multilayer perceptron (64 > 64 > 3, tanh" in what
    assert "cache_size 3, ttl 1.5, warmup_ratio not at all" in what
    assert "Nothing of the observation is hidden from it." in what
    other = section(page(tmp_path, network=recurrent(1), actions=ActionMap("absolute"), hidden=("curve",)), "## What it is")
    assert "LSTM of 32 units > 16 > 3" in other
    assert "a position on the whole grid" in other
    assert "Hidden from it: curve." in other


def test_it_says_what_it_is_for_and_what_not(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert "cachepilot tune" in section(text, "## Intended use")
    assert "without the guard" in section(text, "## Not for")
    assert "15% of what it sees" in section(text, "## Limits")
    assert load(tmp_path).card["weights"]["sha256"] in section(text, "## Files")


def test_it_says_how_the_policy_was_trained(tmp_path: Path) -> None:
    training = {"command": "cachepilot train", "seed": 3, "settings": {"ppo": {"learning_rate": 1e-3}, "traces": ["a", "b"]}}
    text = section(page(tmp_path, training=training), "## How it was trained")
    assert "- command: cachepilot train\n- seed: 3" in text
    assert "### settings" in text
    assert "- traces: a, b" in text
    assert "#### ppo\n\n- learning rate: 0.001" in text


def test_the_evaluation_is_shown_with_the_rows_where_it_does_not_win(tmp_path: Path) -> None:
    evaluation = {
        "verdict": "loses on steady traffic",
        "command": "cachepilot evaluate --seeds 5",
        "comparisons": COMPARISONS,
        "seeds": 5,
        "ablations": [{"without": "curve", "terms": {"tokens": 1.5}}, {"without": "warm-up", "note": "a | b"}],
    }
    text = section(page(tmp_path, evaluation=evaluation), "## Evaluation")
    assert text.strip().startswith("loses on steady traffic\n\n    cachepilot evaluate --seeds 5")
    assert "| suite | against | relative | low | high |" in text
    for row in COMPARISONS:
        assert f"| {row['suite']} | {row['against']} | {row['relative']:.4g} |" in text
    losses = section(text, "### Where it does not win")
    assert "2 of 3 comparisons" in losses
    assert "- suite steady, against curve: 1.012 (1.004 to 1.02): worse" in losses
    assert "- suite steady, against static: 0.9991 (0.99 to 1.01): no difference shown" in losses
    assert "non-stationary" not in losses
    assert "| without | terms tokens | note |\n|---|---|---|\n| curve | 1.5 |  |\n| warm-up |  | a \\| b |" in text
    assert "- seeds: 5" in text


def test_where_it_always_wins_that_is_said_too(tmp_path: Path) -> None:
    text = page(tmp_path, evaluation={"comparisons": COMPARISONS[2:]})
    assert "None of the 1 comparisons" in section(text, "### Where it does not win")


@pytest.mark.parametrize("evaluation", [{}, {"verdict": "ties"}, {"comparisons": []}])
def test_what_is_not_known_is_said_not_to_be(tmp_path: Path, evaluation: dict[str, Any]) -> None:
    text = section(page(tmp_path, evaluation=evaluation), "## Evaluation")
    assert "nothing is known" in text or "where it does not win is not known" in text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"relative": 0.99}, None),
        ({"relative": 1.0}, "the same"),
        ({"relative": 1.2}, "worse"),
        ({"relative": 0.9, "low": 0.8, "high": 0.9999}, None),
        ({"relative": 0.9, "low": 0.8, "high": 1.0}, "no difference shown"),
        ({"relative": 1.1, "low": 1.01, "high": 1.2}, "worse"),
    ],
)
def test_winning_is_an_interval_wholly_below_one(row: dict[str, float], words: str | None) -> None:
    assert [said for _, said in lost([row])] == ([] if words is None else [words])


def test_text_cannot_break_the_page(tmp_path: Path) -> None:
    broken = "one\n## Evaluation\n<script>alert(1)</script>"
    text = page(tmp_path, name=broken, evaluation={"verdict": broken, "command": "a\nb", "note": broken})
    assert text.count("\n## Evaluation\n") == 1
    assert "<script>" not in text


def test_the_cards_of_shipped_policies_are_as_written() -> None:
    cards = {path: json.loads(path.read_text()) for path in PRETRAINED.glob("*/card.json")}
    current = {path: card for path, card in cards.items() if card["format"] == FORMAT}
    assert [path for path, card in current.items() if path.with_name("README.md").read_text() != readme(card)] == []
