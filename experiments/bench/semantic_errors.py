"""How often an answer by meaning is wrong: learned acceptance at a stated error bound, beside fixed thresholds.

banking77 as a stream: its held-out questions come in random order, each is looked up among those that were asked before and not
answered from the cache, and a cached answer is right if both questions have the same intent. That is a hard case: 77 intents of
one bank, many a hair's breadth apart, and the labels themselves contradict each other for a percent or more of the near
duplicates.

Every method has seen the same training questions before, as streams of the same length: a fixed threshold is the lowest whose
share of wrong answers kept the bound there; acceptance has learned there and goes on to learn, with an empty cache. ``cold``
acceptance has learned nothing before.
"""

from __future__ import annotations

import asyncio
import copy
import csv
import gzip
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from experiments.bench.result import BenchResult
from serving.embedding import DIMENSIONS, MAX_WAITING, Embedder
from serving.meaning.acceptance import Acceptance, Over
from serving.meaning.guards import Guards
from serving.settings import GuardSettings

ERROR_BOUNDS = (0.005, 0.01, 0.02, 0.05)
THRESHOLDS = tuple(round(0.70 + 0.005 * step, 3) for step in range(61))
_CANDIDATES = 4
_QUANTILE = 1.959964

Objection = Callable[[str, str], str]
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Questions:
    """Labelled questions.

    Attributes:
        texts: The questions.
        labels: Their intents as numbers, shape (N,): same number, same answer.
        vectors: Unit vectors, float32, shape (N, D); zero for a question that is not looked up by meaning.
    """

    texts: Sequence[str]
    labels: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.float32]

    def take(self, places: npt.NDArray[np.int64]) -> Questions:
        """Return some of them, in the order given."""
        return Questions([self.texts[place] for place in places], self.labels[places], self.vectors[places])


@dataclass(frozen=True)
class Tally:
    """What came of a stream.

    Attributes:
        lookups: Questions that were looked up.
        hits: Of them answered from the cache.
        wrong: Of those answered wrongly.
    """

    lookups: int = 0
    hits: int = 0
    wrong: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.lookups + other.lookups, self.hits + other.hits, self.wrong + other.wrong)


@dataclass
class Stream:
    """Questions in the order of their arrival, ready to be replayed under several methods.

    Args:
        questions: The questions.
        objection: The guards: names what keeps two texts apart, ``""``: nothing. None: no guards.
    """

    questions: Questions
    objection: Objection | None = None
    _similarities: npt.NDArray[np.float32] = field(init=False, repr=False)
    _objected: dict[tuple[int, int], bool] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._similarities = self.questions.vectors @ self.questions.vectors.T

    def guarded(self, objection: Objection | None) -> Stream:
        """Return the same stream under other guards."""
        other = copy.copy(self)
        other.objection, other._objected = objection, {}
        return other

    def replay(self, accepts: Callable[[int, float], bool], learn: Callable[[int, float, bool], None] | None = None) -> Tally:
        """Replay the stream with an empty cache.

        Args:
            accepts: Whether the cached question of this number, at this similarity, may answer.
            learn: Told, where it may not: its number, the similarity, whether it would have been right.
        """
        labels = self.questions.labels
        cached = np.empty(len(labels), np.int64)
        size = hits = wrong = 0
        for asked in range(len(labels)):
            nearest = self._nearest(asked, cached[:size])
            if nearest is not None:
                place, similarity = nearest
                right = bool(labels[place] == labels[asked])
                if accepts(place, similarity):
                    hits += 1
                    wrong += not right
                    continue
                if learn is not None:
                    learn(place, similarity, right)
            cached[size] = asked
            size += 1
        return Tally(len(labels), hits, wrong)

    def _nearest(self, asked: int, cached: npt.NDArray[np.int64]) -> tuple[int, float] | None:
        if not len(cached) or not self.questions.vectors[asked].any():
            return None
        similarities = self._similarities[asked, cached]
        best = int(np.argmax(similarities))
        if self.objection is None or not self._objects(asked, int(cached[best])):
            return int(cached[best]), float(similarities[best])
        some = min(_CANDIDATES, len(cached))
        nearest = np.argpartition(-similarities, some - 1)[:some]
        for candidate in nearest[np.argsort(-similarities[nearest], kind="stable")].tolist():
            if not self._objects(asked, int(cached[candidate])):
                return int(cached[candidate]), float(similarities[candidate])
        return None

    def _objects(self, asked: int, stored: int) -> bool:
        assert self.objection is not None
        known = self._objected.get((asked, stored))
        if known is None:
            known = bool(self.objection(self.questions.texts[asked], self.questions.texts[stored]))
            self._objected[asked, stored] = known
        return known


def read_questions(
    path: Path, split: Split, *, limit: int | None = None, seed: int = 0
) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Read banking77's questions and their intents.

    Args:
        path: The file, columns ``text``, ``category``, ``split``, packed by gzip.
        split: Which of its two parts.
        limit: Questions at most, drawn.
        seed: Draws them.

    Raises:
        ValueError: If the file is not banking77 with its splits.
    """
    numbers: dict[str, int] = {}
    texts, labels = [], []
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if not {"text", "category", "split"} <= row.keys():
                raise ValueError(f"{path}: expected the columns text, category and split, got {', '.join(map(str, row))}")
            number = numbers.setdefault(row["category"], len(numbers))
            if row["split"] == split:
                texts.append(row["text"])
                labels.append(number)
    if not texts:
        raise ValueError(f"{path}: expected questions of the split {split!r}, found none")
    places = np.random.default_rng(seed).permutation(len(texts))[:limit]
    return [texts[place] for place in places], np.array(labels, np.int64)[places]


def embed(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the unit vectors of texts by the gateway's own embedder, its rounding to int8 included, shape (N, 384)."""

    async def ask() -> list[bytes]:
        embedder = Embedder(deadline=math.inf)
        try:
            # alike in length, so that a batch is not padded to its longest
            order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
            found: list[bytes] = []
            for begin in range(0, len(order), MAX_WAITING):  # the embedder takes no more at a time
                found += await asyncio.gather(*(embedder.embed(texts[place]) for place in order[begin : begin + MAX_WAITING]))
            return [raw for _, raw in sorted(zip(order, found, strict=True))]
        finally:
            await embedder.close()

    rows = [np.frombuffer(raw, np.int8) if raw else np.zeros(DIMENSIONS, np.int8) for raw in asyncio.run(ask())]
    vectors = np.stack(rows).astype(np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


def replay_acceptance(stream: Stream, acceptance: Acceptance, random: np.random.Generator, *, life: int = 0) -> Tally:
    """Replay a stream under acceptance, which learns on the way.

    Args:
        stream: The stream.
        acceptance: What decides and learns.
        random: Of the draws.
        life: Tells the entries of this stream from those of others that it has seen.
    """

    def key(place: int) -> bytes:
        return life.to_bytes(16, "big") + place.to_bytes(16, "big")

    def learn(place: int, similarity: float, right: bool) -> None:
        acceptance.observe(key(place), similarity, right)
        if acceptance.fit_due():
            acceptance.fit()

    return stream.replay(lambda place, similarity: acceptance.accepts(key(place), similarity, draw=random.random()), learn)


def replay_threshold(stream: Stream, threshold: float) -> Tally:
    """Replay a stream under a fixed threshold."""
    return stream.replay(lambda _, similarity: similarity >= threshold)


def tuned_threshold(training: Sequence[Tally], bound: float, over: Over) -> float:
    """Return the lowest of :data:`THRESHOLDS` from which on every higher one kept the bound in training; inf: none did.

    Args:
        training: What came of each threshold, in their order.
        bound: Largest share of wrong answers.
        over: Of which whole.
    """
    kept = math.inf
    for threshold, tally in reversed(list(zip(THRESHOLDS, training, strict=True))):
        if tally.wrong > bound * (tally.lookups if over == "lookups" else tally.hits):
            break
        kept = threshold
    return kept


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share; (0, 1) without trials."""
    if trials <= 0:
        return 0.0, 1.0
    share, square = successes / trials, _QUANTILE**2
    middle = share + square / (2 * trials)
    reach = _QUANTILE * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    scale = 1 + square / trials
    # at the ends exactly, which rounding would miss
    low = 0.0 if successes <= 0 else (middle - reach) / scale
    return low, 1.0 if successes >= trials else (middle + reach) / scale


def run(
    path: Path,
    *,
    bounds: Sequence[float] = ERROR_BOUNDS,
    orders: int = 3,
    training: int = 2,
    limit: int | None = None,
    seed: int = 0,
    vectors: Callable[[Sequence[str]], npt.NDArray[np.float32]] = embed,
    guards: Sequence[tuple[str, Objection | None]] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run every method at every bound on the held-out questions in several orders.

    Args:
        path: banking77.csv.gz.
        bounds: Error bounds, 0..1.
        orders: Random orders of the held-out questions.
        training: Streams of training questions, each as long as the held-out one.
        limit: Held-out questions at most; None: all.
        seed: Of orders and draws.
        vectors: Embeds texts.
        guards: Guards by name; None: those of the gateway on, and off.
        say: Prints a line about what goes on.
    """
    asked, asked_labels = read_questions(path, "test", limit=limit, seed=seed)
    length = len(asked)
    known, known_labels = read_questions(path, "train", limit=training * length, seed=seed)
    say(f"semantic-errors: embedding {length + len(known):,} questions")
    rows_of = vectors([*asked, *known])
    held_out = Questions(asked, asked_labels, rows_of[:length])
    learned = Questions(known, known_labels, rows_of[length:])
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    parts = [
        Stream(learned.take(np.arange(start, min(start + length, len(learned.texts)))))
        for start in range(0, len(learned.texts), length)
    ]
    streams = [Stream(held_out.take(random.permutation(length))) for _ in range(orders)]
    for name, objection in _guards() if guards is None else guards:
        guarded = [part.guarded(objection) for part in parts], [stream.guarded(objection) for stream in streams]
        say(f"semantic-errors: guards {name}: fixed thresholds")
        rows += _fixed(*guarded, bounds, name)
        for over in get_args(Over):
            say(f"semantic-errors: guards {name}: acceptance over {over}")
            rows += _learned(*guarded, bounds, over, name, seed)
    return BenchResult(
        "semantic-errors",
        sorted(rows, key=lambda row: (row["bound"], row["guards"], row["over"], row["method"])),
        None,
        "cachepilot bench semantic-errors",
        f"banking77, {length:,} held-out questions in {orders} random orders (labels: 77 intents), after {training} training "
        "streams of that length. bound: largest share of wrong answers over all lookups, or over the answers served (stricter). "
        "kept: the measured share is not above it. Intervals: Wilson, 95 %, of one order's counts, since the orders share them.",
    )


def _guards() -> list[tuple[str, Objection | None]]:
    return [("off", None), ("on", Guards(GuardSettings()).objection)]


def _fixed(parts: Sequence[Stream], streams: Sequence[Stream], bounds: Sequence[float], guards: str) -> Iterator[dict[str, Any]]:
    training = [_sum(replay_threshold(part, threshold) for part in parts) for threshold in THRESHOLDS]
    for over in get_args(Over):
        for bound in bounds:
            threshold = tuned_threshold(training, bound, over)
            tally = _sum(replay_threshold(stream, threshold) for stream in streams)
            yield _row(bound, over, f"threshold {threshold:.3f}", guards, tally, len(streams))


def _learned(
    parts: Sequence[Stream], streams: Sequence[Stream], bounds: Sequence[float], over: Over, guards: str, seed: int
) -> Iterator[dict[str, Any]]:
    for bound in bounds:
        random = np.random.default_rng(seed)
        trained = Acceptance(bound, over=over)
        for life, part in enumerate(parts, 1):
            replay_acceptance(part, trained, random, life=life)
        for method, start in (("acceptance", trained), ("acceptance, cold", Acceptance(bound, over=over))):
            tally = _sum(replay_acceptance(stream, copy.deepcopy(start), random) for stream in streams)
            yield _row(bound, over, method, guards, tally, len(streams))


def _sum(tallies: Iterator[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total += tally
    return total


def _row(bound: float, over: Over, method: str, guards: str, tally: Tally, orders: int) -> dict[str, Any]:
    row: dict[str, Any] = {"bound": bound, "over": over, "guards": guards, "method": method}
    row["hit_ratio"] = tally.hits / tally.lookups
    for whole, count in (("lookups", tally.lookups), ("hits", tally.hits)):
        low, high = wilson(tally.wrong / orders, count / orders)
        row[f"wrong_of_{whole}"] = tally.wrong / count if count else 0.0
        row[f"{whole}_low"], row[f"{whole}_high"] = low, high
    row["kept"] = "yes" if row["wrong_of_lookups" if over == "lookups" else "wrong_of_hits"] <= bound else "no"
    return row
