"""banking77: real questions, asked at the times of an Azure trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from envs.workloads.entry import entry_bytes, prompt_tokens, text_key
from envs.workloads.errors import TraceError
from envs.workloads.generators import zipf_ranks
from envs.workloads.lines import Source
from envs.workloads.readers.batch import Batch, Input, join, take
from envs.workloads.readers.llm_csv import Azure
from envs.workloads.readers.tables import CsvTable
from envs.workloads.trace import Trace


def read_questions(texts: Path, *, arrivals: Path | None = None, limit: int | None = None, seed: int = 0) -> Trace:
    """Read real questions at real times; which question comes when is drawn.

    Args:
        texts: The questions (banking77).
        arrivals: The arrivals (Azure); None for a file ``azure2023_conv.csv(.gz)`` beside the questions.
        limit: Requests at most, from the start.
        seed: Chooses the questions.

    Raises:
        TraceError: If a file is missing, damaged or not what it should be.
    """
    arrivals = _beside(texts) if arrivals is None else arrivals
    batch = _arrivals(arrivals, limit)
    time, output = batch["time"] - batch["time"][0], batch["output_tokens"].astype(np.int64)
    intent_of = _questions(texts)
    prompts = list(intent_of)
    by_intent: dict[str, list[int]] = {}
    for number, intent in enumerate(intent_of.values()):
        by_intent.setdefault(intent, []).append(number)
    random = np.random.default_rng(seed)
    intents = list(by_intent)
    popular = random.permutation(len(intents))[zipf_ranks(random, len(intents), 1.0, len(time))]
    place = np.empty(len(time), np.int64)
    for number, intent in enumerate(intents):
        rows = np.flatnonzero(popular == number)
        questions = random.permutation(np.array(by_intent[intent]))
        place[rows] = questions[zipf_ranks(random, len(questions), 0.8, len(rows))]
    # One question has one answer: as long as the real one at the question's first arrival.
    _, first, again = np.unique(place, return_index=True, return_inverse=True)
    tokens = output[first][again]
    number_of = {intent: number for number, intent in enumerate(intents)}
    groups = np.array([number_of[intent] for intent in intent_of.values()], np.int64)
    keys = np.array([text_key(text) for text in prompts], np.uint64)
    return Trace(
        name=f"{texts.name.split('.')[0]} on {arrivals.name.split('.')[0]}",
        time=time,
        key=keys[place],
        size=entry_bytes(tokens, True),
        group=groups[place],
        input_tokens=prompt_tokens(prompts)[place],
        output_tokens=tokens.astype(np.int32),
        prompts=prompts,
        prompt_id=place,
        kind="semantic",
        note="Semi-synthetic: real bank customers' questions (banking77) at real arrival times with real answer lengths (Azure, "
        "2023); which question comes when is drawn (Zipf over intents and over the questions of one). A group is an intent "
        "category: far coarser than 'the same answer would do', so a semantic hit within a group need not be a right one.",
    )


def _arrivals(path: Path, limit: int | None) -> Batch:
    """Return the first ``limit`` arrivals of the file, in order of time."""
    with Source(path) as source:
        batches = list(_first(Azure(Input(source)).batches(), limit))
    if not batches:
        raise TraceError(path, "at least one request after the header")
    batch = join(batches)
    order: npt.NDArray[np.intp] = np.argsort(batch["time"], kind="stable")
    return take(batch, order)


def _first(batches: Iterator[Batch], limit: int | None) -> Iterator[Batch]:
    left = limit
    for batch in batches:
        part = batch if left is None else take(batch, slice(0, left))
        if len(part["time"]):
            yield part
        if left is not None:
            left -= len(part["time"])
            if left == 0:
                return


def _questions(path: Path) -> dict[str, str]:
    """Return the intent of each distinct question, in the order of the file."""
    intent_of: dict[str, str] = {}
    with Source(path) as source:
        given = Input(source)
        for frame in CsvTable(given, ["text", "category"], []):
            for row, (text, category) in enumerate(zip(frame.texts["text"], frame.texts["category"], strict=True)):
                question = text.strip()
                if not question or not category:
                    raise given.error("a question and its category", int(frame.line[row]), f"{text},{category}")
                intent_of.setdefault(question, category)
    if not intent_of:
        raise TraceError(path, "at least one question after the header")
    return intent_of


def _beside(path: Path) -> Path:
    for name in ("azure2023_conv.csv.gz", "azure2023_conv.csv"):
        if (path.parent / name).is_file():
            return path.parent / name
    raise TraceError(
        path,
        f"arrivals for its questions: an azure2023_conv.csv(.gz) in {path.parent}, or load the arrivals with banking77={path}",
    )
