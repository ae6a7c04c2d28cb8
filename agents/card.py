"""The model card for people: ``README.md`` of a policy, written from its ``card.json`` and from nothing else.

The evaluation is shown as it is: text and numbers as lines, mappings as sections, lists of mappings as tables, in their order.
Three keys have a meaning of their own:

- ``verdict``: a sentence, shown first.
- ``command``: what makes the evaluation again.
- ``comparisons``: a list of mappings, one for each thing this policy was compared with on one suite or case: ``relative`` (this
  policy's cost over that of ``against``; below 1 is better), its interval's ``low`` and ``high`` where there is one, and whatever
  names the row (``suite``, ``case``, ``against``, ``seed``, ...). The rows in which the policy did not win are listed once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agents.familiarity import TOLERANCE, UNFAMILIAR_SHARE

_OWN = ("verdict", "command", "comparisons")
_MEASURES = ("relative", "low", "high")


def readme(card: Mapping[str, Any]) -> str:
    """Return the card for people, Markdown.

    Args:
        card: What ``card.json`` holds.
    """
    parts = [
        f"# Model card: {_cell(card['name'])}\n",
        "Written by cachepilot from `card.json` beside it. Do not edit it: evaluating or training again writes it anew.\n",
        "## What it is\n",
        *_description(card),
        "## Intended use\n",
        "Setting `cache_size`, `ttl` and `warmup_ratio` of cachepilot's cache in front of a large language model, once per "
        "interval, behind the tuner's guard (`cachepilot tune`), and in simulation. Use it where the traffic is like what it was "
        "trained on; an A/B experiment (`cachepilot experiment`) says whether it helps on yours.\n",
        "## Not for\n",
        "- Other caches, other knobs, or knobs of another meaning: the ghost curves and the guard are part of what was trained.\n"
        "- Running without the guard: the policy knows no service level, no rate limit and no last-known-good setting.\n"
        "- A claim about savings on your traffic. The figures below hold for the workloads that they name.\n"
        "- Deciding anything about people. It sees counts, latencies and prices; no prompt, no answer, no user.\n",
        "## How it was trained\n",
        *_section(card["training"], level=3),
        "## Evaluation\n",
        *_evaluation(card["evaluation"]),
        "## Limits\n",
        f"- It stands back for the curve's optimum, and says so, when more than {UNFAMILIAR_SHARE:.0%} of what it sees lies "
        f"outside of the range that training saw (by more than {TOLERANCE:g}, in normalised units). A change within those ranges "
        "that training never saw in combination is not noticed.\n"
        "- It holds the knobs while there is no trustworthy ghost curve, when an observation is not finite, and when its own "
        "output is not.\n"
        "- It is deterministic and does not learn in service.\n"
        "- Probes in `card.json` are checked whenever it is loaded: at most 1e-4 of difference in an action.\n",
        "## Files\n",
        f"- `{card['weights']['file']}`: weights and observation statistics, safetensors, {card['weights']['bytes']:,} bytes, "
        f"sha256 `{card['weights']['sha256']}`\n"
        f"- `card.json`: format {card['format']}, digest `{card['digest']}`\n",
    ]
    return "\n".join(parts)


def lost(comparisons: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    """Return the comparisons in which the policy did not win, each with what can be said of it.

    Args:
        comparisons: As in the evaluation. With an interval, winning is an interval wholly below 1.
    """
    rows = []
    for row in comparisons:
        low, high = row.get("low"), row.get("high")
        if low is not None and high is not None:
            if high >= 1.0:
                rows.append((row, "worse" if low > 1.0 else "no difference shown"))
        elif row["relative"] >= 1.0:
            rows.append((row, "worse" if row["relative"] > 1.0 else "the same"))
    return rows


def _description(card: Mapping[str, Any]) -> Iterator[str]:
    network, action, hidden = card["network"], card["action"], card["hidden"]
    weights = sum(_product(shape) for shape in network["shapes"].values())
    layers = " > ".join(str(shape[0]) for name, shape in network["shapes"].items() if name.endswith("weight"))
    kind = {"feedforward": "a multilayer perceptron", "recurrent": "one LSTM layer with a multilayer perceptron after it"}
    if network["kind"] == "recurrent":
        layers = f"LSTM of {network['shapes']['lstm.weight_hh'][1]} units > {layers}"
    yield (
        f"A policy trained with PPO: {kind.get(network['kind'], network['kind'])} ({layers}, {network['activation']}; "
        f"{weights:,} numbers) that sees {len(card['schema']['components'])} components of signals and ghost curves.\n"
    )
    steps = ", ".join(
        f"{knob} {radius:g}" if radius else f"{knob} not at all"
        for knob, radius in zip(action["knobs"], action["radius_steps"], strict=True)
    )
    if action["kind"] == "residual":
        yield f"Its action is a residual around the optimum of the smoothed ghost curve, at most so many grid steps: {steps}.\n"
    else:
        yield f"Its action is a position on the whole grid ({action['kind']}), not bound to the ghost curve's optimum.\n"
    yield f"Hidden from it: {', '.join(hidden)}.\n" if hidden else "Nothing of the observation is hidden from it.\n"


def _product(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _evaluation(evaluation: Mapping[str, Any]) -> Iterator[str]:
    if not evaluation:
        yield "There is none on record: nothing is known of how it does.\n"
        return
    if "verdict" in evaluation:
        yield f"{_cell(evaluation['verdict'])}\n"
    if "command" in evaluation:
        yield f"    {' '.join(str(evaluation['command']).split())}\n"
    comparisons = evaluation.get("comparisons")
    if comparisons:
        yield "Cost relative to what it was compared with; below 1 is better.\n"
        yield _table(comparisons)
        yield "### Where it does not win\n"
        losses = lost(comparisons)
        if losses:
            yield f"{len(losses)} of {len(comparisons)} comparisons:\n"
            yield "\n".join(f"- {_row_words(row)}: {words}" for row, words in losses) + "\n"
        else:
            yield f"None of the {len(comparisons)} comparisons above.\n"
    yield from _section({key: value for key, value in evaluation.items() if key not in _OWN}, level=3)
    if not comparisons:
        yield "No comparisons case by case are on record: where it does not win is not known.\n"


def _row_words(row: Mapping[str, Any]) -> str:
    names = ", ".join(f"{key} {_cell(value)}" for key, value in row.items() if key not in _MEASURES)
    interval = f" ({_cell(row['low'])} to {_cell(row['high'])})" if row.get("low") is not None else ""
    return f"{names}: {_cell(row['relative'])}{interval}"


def _section(values: Mapping[str, Any], level: int) -> Iterator[str]:
    """Yield a mapping's plain values as lines, then its lists of mappings as tables and its mappings as sections."""
    if not values:
        return
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping) and not _is_table(value)}
    if plain:
        yield "\n".join(f"- {_words(key)}: {_cell(value)}" for key, value in plain.items()) + "\n"
    for key, value in values.items():
        if key in plain:
            continue
        yield f"{'#' * min(level, 6)} {_words(key)}\n"
        if isinstance(value, Mapping):
            yield from _section(value, level + 1)
        else:
            yield _table(value)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    flat = [dict(_flat(row)) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    lines = [
        "| " + " | ".join(_words(column) for column in columns) + " |",
        "|" + "|".join("---" for _ in columns) + "|",
        *("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in flat),
    ]
    return "\n".join(lines) + "\n"


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield prefix + key, value


def _words(key: str) -> str:
    return _escaped(key.replace("_", " "))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "none"
    return _escaped(str(value))


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
