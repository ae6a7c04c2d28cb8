"""Readers of the real traces that are known, told apart by their first line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from envs.workloads.entry import entry_bytes, prompt_tokens, text_key
from envs.workloads.errors import TraceError
from envs.workloads.generators import zipf_ranks
from envs.workloads.lines import Table, read_lines
from envs.workloads.trace import Trace
from serving.keys import mix64_array

BLOCK_TOKENS = 512
"""Tokens of one prefix block of the Mooncake trace."""

MOST_TOKENS = 2**31 - 1
"""A trace keeps tokens as 32-bit numbers."""

KNOWN = {
    "elastic_apache": "CSV with the columns t_s, method, path, status, bytes",
    "mooncake_conversation": "JSON lines with timestamp, input_length, output_length, hash_ids",
    "azure2023_conv": "CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens",
    "banking77": "CSV with the columns text, category, split; needs arrivals: an azure2023_conv file beside it",
}
"""Formats that :func:`load` reads, by the name of the public trace."""


def load(path: Path | str, *, limit: int | None = None, banking77: Path | str | None = None, seed: int = 0) -> Trace:
    """Read a real trace; its format is told by its first line. Plain text or gzip.

    Args:
        path: The file.
        limit: Requests to read at most, from the start; None for all.
        banking77: For arrivals of ``azure2023_conv``: the questions to ask at those times. Without it every arrival is a key of
            its own (the arrivals have no text), so nothing can hit.
        seed: Chooses the questions.

    Raises:
        TraceError: If the file is missing, empty, damaged, of an unknown format, or a line is not what the format says.
    """
    path = Path(path)
    if limit is not None and limit < 1:
        raise ValueError(f"load: limit: expected at least 1 request or None for all, got {limit!r}")
    first = next(read_lines(path), None)
    if first is None:
        raise TraceError(path, "a trace, but the file is empty", line=1)
    columns = set(first.strip().lstrip("\ufeff").split(","))
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        return _azure(path, limit) if banking77 is None else _questions(path, Path(banking77), limit, seed)
    if banking77 is not None:
        expected = f"{KNOWN['azure2023_conv']}, to ask the questions of {banking77} at its times"
        raise TraceError(path, expected, line=1, excerpt=first.strip())
    if {"t_s", "path", "bytes"} <= columns:
        return _elastic(path, limit)
    if {"text", "category"} <= columns:
        return _questions(_arrivals_beside(path), path, limit, seed)
    if first.lstrip().startswith("{"):
        return _mooncake(path, limit)
    known = "; ".join(f"{name}: {form}" for name, form in KNOWN.items())
    raise TraceError(path, f"one of the known formats ({known})", line=1, excerpt=first.strip())


def _elastic(path: Path, limit: int | None) -> Trace:
    table = Table(path, ["t_s", "method", "path", "bytes"])
    times, places, tokens = [], [], []
    numbers: dict[str, int] = {}
    for at, method, page, size in table:
        moment, length = table.number(at, "t_s"), table.number(size, "bytes")
        if not page:
            raise table.error("path: a path", page)
        if method != "GET":
            continue
        times.append(moment)
        places.append(numbers.setdefault(page, len(numbers)))
        tokens.append(min(max(int(length) // 4, 16), 2048))
        if len(times) == limit:
            break
    return _with_text(
        path,
        times,
        list(numbers),
        np.array(places, np.int64),
        np.array(tokens, np.int64),
        kind="exact",
        note="GET requests of a web server (elastic/examples): a path stands for a prompt, its bytes over 4 for the answer's "
        "tokens (16 to 2048). Real arrivals and repeats, but not of a language model.",
    )


class BlockNames(Sequence[str]):
    """Prompts of the Mooncake trace, made when asked for: ``block <id>``."""

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return BlockNames(self._ids[index])
        return f"block {int(self._ids[index])}"


def _mooncake(path: Path, limit: int | None) -> Trace:
    form = "a JSON object with timestamp (milliseconds) and hash_ids (a list of whole numbers >= 0)"
    times: list[npt.NDArray[np.float64]] = []
    blocks: list[npt.NDArray[np.int64]] = []
    count = 0
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
            moment, ids = float(row["timestamp"]), np.array(row["hash_ids"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(path, f"{form} ({type(error).__name__}: {error})", line=number, excerpt=line.strip()) from error
        whole = ids.ndim == 1 and (not ids.size or (ids.dtype.kind in "iu" and ids.min() >= 0))
        if not (0.0 <= moment < float("inf") and whole):
            raise TraceError(path, form, line=number, excerpt=line.strip())
        times.append(np.full(len(ids), moment / 1000.0))
        blocks.append(ids.astype(np.int64))
        count += len(ids)
        if limit is not None and count >= limit:
            break
    if not count:
        raise TraceError(path, f"at least one line with block references ({form})")
    time, block = np.concatenate(times)[:limit], np.concatenate(blocks)[:limit]
    order = np.argsort(time, kind="stable")
    time, block = time[order], block[order]
    ids, place = np.unique(block, return_inverse=True)
    tokens = np.full(len(block), BLOCK_TOKENS, np.int64)
    prompt_tokens_by_block = np.array([max(1, -(-len(f"block {number}") // 4)) for number in ids], np.int32)
    return Trace(
        name=_stem(path),
        time=time - time[0],
        key=mix64_array(block.astype(np.uint64)),
        size=entry_bytes(tokens, False),
        group=np.full(len(block), -1, np.int64),
        input_tokens=prompt_tokens_by_block[place],
        output_tokens=tokens.astype(np.int32),
        prompts=BlockNames(ids),
        prompt_id=place.astype(np.int64),
        note="References to 512-token prefix blocks of a chat service (Mooncake, FAST'25): each reference is one request, all of "
        "one conversation turn at the same time. A block stands for an answer of 512 tokens; real arrivals and repeats.",
    )


_Arrivals = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _azure_arrivals(path: Path, limit: int | None) -> _Arrivals:
    """Return arrival (seconds), prompt tokens and completion tokens, in order of time."""
    table = Table(path, ["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
    times, prompt, output = [], [], []
    for at, context, generated in table:
        try:
            whole, _, fraction = at.partition(".")
            moment = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        except ValueError:
            raise table.error("TIMESTAMP: a time like 2023-11-16 18:15:46.6805900", at) from None
        times.append(moment)
        prompt.append(int(table.number(context, "ContextTokens", MOST_TOKENS)))
        output.append(max(1, int(table.number(generated, "GeneratedTokens", MOST_TOKENS))))
        if len(times) == limit:
            break
    if not times:
        raise TraceError(path, "at least one request after the header")
    order = np.argsort(np.array(times), kind="stable")
    time = np.array(times)[order]
    return time - time[0], np.array(prompt, np.int64)[order], np.array(output, np.int64)[order]


def _azure(path: Path, limit: int | None) -> Trace:
    time, prompt, output = _azure_arrivals(path, limit)
    return Trace(
        name=_stem(path),
        time=time,
        key=mix64_array(np.arange(len(time), dtype=np.uint64)),
        size=entry_bytes(output, False),
        group=np.full(len(time), -1, np.int64),
        input_tokens=prompt.astype(np.int32),
        output_tokens=output.astype(np.int32),
        note="Arrivals and token counts of a chat service (Azure, 2023). The prompts are not public: every request is a key of "
        "its own, so nothing can hit.",
    )


def _questions(arrivals: Path, texts: Path, limit: int | None, seed: int) -> Trace:
    """Real questions at real times; which question comes when is drawn."""
    time, _, output = _azure_arrivals(arrivals, limit)
    table = Table(texts, ["text", "category"])
    by_intent: dict[str, list[int]] = {}
    intent_of: dict[str, str] = {}
    for text, category in table:
        question = text.strip()
        if not question or not category:
            raise table.error("a question and its category", f"{text},{category}")
        if question not in intent_of:
            by_intent.setdefault(category, []).append(len(intent_of))
            intent_of[question] = category
    prompts = list(intent_of)
    if not prompts:
        raise TraceError(texts, "at least one question after the header")
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
    number_of = {intent: number for number, intent in enumerate(intents)}
    groups = np.array([number_of[intent] for intent in intent_of.values()], np.int64)
    return _with_text(
        arrivals,
        time,
        prompts,
        place,
        output[first][again],
        kind="semantic",
        group=groups[place],
        name=f"{_stem(texts)} on {_stem(arrivals)}",
        note="Semi-synthetic: real bank customers' questions (banking77) at real arrival times with real answer lengths (Azure, "
        "2023); which question comes when is drawn (Zipf over intents and over the questions of one). A group is an intent "
        "category: far coarser than 'the same answer would do', so a semantic hit within a group need not be a right one.",
    )


def _with_text(
    path: Path,
    times: npt.ArrayLike,
    prompts: list[str],
    place: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    *,
    kind: str,
    note: str,
    group: npt.NDArray[np.int64] | None = None,
    name: str = "",
) -> Trace:
    """Return a trace whose keys are the hashes of its prompts."""
    time = np.asarray(times, dtype=np.float64)
    if not len(time):
        raise TraceError(path, "at least one request after the header")
    order = np.argsort(time, kind="stable")
    time, place, tokens = time[order], place[order], tokens[order]
    keys = np.array([text_key(text) for text in prompts], np.uint64)
    return Trace(
        name=name or _stem(path),
        time=time - time[0],
        key=keys[place],
        size=entry_bytes(tokens, kind == "semantic"),
        group=np.full(len(time), -1, np.int64) if group is None else group[order],
        input_tokens=prompt_tokens(prompts)[place],
        output_tokens=tokens.astype(np.int32),
        prompts=prompts,
        prompt_id=place,
        kind=kind,
        note=note,
    )


def _arrivals_beside(path: Path) -> Path:
    for name in ("azure2023_conv.csv.gz", "azure2023_conv.csv"):
        if (path.parent / name).is_file():
            return path.parent / name
    raise TraceError(
        path,
        f"arrivals for its questions: an azure2023_conv.csv(.gz) in {path.parent}, or load the arrivals with banking77={path}",
    )


def _stem(path: Path) -> str:
    return path.name.split(".")[0]
