"""What an evaluation measured, run by run, as a file that pages and tables are made from again without running anything."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agents.output_file import write_output
from envs.objective import COST_TERMS
from experiments.evaluation_rows import EvaluationSettings
from experiments.play import Run
from experiments.units import InputError

Floats = npt.NDArray[np.float64]
FORMAT: Literal[1] = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CaseRecord(_Record):
    """One case: what it is, and its requests by interval, the first interval left out."""

    name: str
    family: str
    suite: str
    period: float | None
    interval: float
    note: str = ""
    requests: list[float]


class TrainingRecord(_Record):
    """How one policy of a row was trained, by its card; see :class:`experiments.evaluation_rows.Training`."""

    directory: str
    command: str
    seed: str
    seconds: float | None


class RowRecord(_Record):
    """One row, and the command that makes it again."""

    label: str
    group: Literal["policy", "bound", "ablation"]
    source: str
    seeds: list[str]
    command: str
    training: list[TrainingRecord] = []


class RunRecord(_Record):
    """One row on one case with one seed, the first interval left out.

    Attributes:
        row: Label of the row.
        case: Name of the case.
        seed: Number of the seed, from 0; None for a row that depends on none.
        dollars: What each interval cost, US dollars.
        hits: Requests answered from the cache, in all.
        terms: US dollars by term, in all.
        p99: Mean over intervals of the 99th percentile of latency, seconds; None without requests.
        knobs: The knobs in force in each interval: bytes, seconds, share. Of the first seed alone, else empty.
        interval_hits: Requests answered from the cache in each interval; likewise.
    """

    row: str
    case: str
    seed: int | None
    dollars: list[float]
    hits: float
    terms: dict[str, float]
    p99: float | None
    knobs: list[tuple[float, float, float]] = []
    interval_hits: list[float] = []

    @field_validator("terms")
    @classmethod
    def _complete(cls, terms: dict[str, float]) -> dict[str, float]:
        if missing := [term for term in COST_TERMS if term not in terms]:
            raise ValueError(f"expected all terms of the cost; without: {', '.join(missing)}")
        return terms

    @classmethod
    def of(cls, row: str, case: str, seed: int | None, run: Run) -> RunRecord:
        """Sum a run up; the first seed's keeps its knobs."""
        seen = run.p99[np.isfinite(run.p99)]
        whole = not seed
        return cls(
            row=row,
            case=case,
            seed=seed,
            dollars=run.dollars.tolist(),
            hits=float(run.hits.sum()),
            terms={term: float(run.terms[term].sum()) for term in COST_TERMS},
            p99=float(seen.mean()) if len(seen) else None,
            knobs=[(size, ttl, share) for size, ttl, share in run.knobs.tolist()] if whole else [],
            interval_hits=run.hits.tolist() if whole else [],
        )

    @property
    def total(self) -> float:
        """What the run cost, US dollars."""
        return math.fsum(self.dollars)


class RecoveryRecord(_Record):
    """A row on a steady case that starts from the smallest size and the shortest TTL.

    Attributes:
        row: Label of the row.
        case: Name of the case.
        seed: Number of the seed, from 0.
        after: Decisions that it had to recover.
        dollars: What the intervals after them cost, US dollars.
        best_static: What the best static setting of the grid for these intervals cost in them, run from the start.
        curve: Cost of each interval over the best static setting's in it, the intervals before included.
    """

    row: str
    case: str
    seed: int
    after: int
    dollars: float
    best_static: float
    curve: list[float | None]

    @property
    def relative(self) -> float:
        """Cost over the best static setting's, on the same later intervals."""
        return self.dollars / self.best_static if self.best_static > 0 else math.nan


class Results(_Record):
    """Everything that was measured.

    Attributes:
        format: Of the file.
        command: What was typed.
        settings: What was evaluated on what.
        versions: Of the code.
        left_out: Rows that were left out, in words.
        cases: The cases.
        rows: The rows.
        runs: What every row came to.
        recoveries: From a bad start.
        decision_seconds: Median time of one decision by row, seconds; of trained policies.
    """

    format: Literal[1] = FORMAT
    command: str
    settings: EvaluationSettings
    versions: dict[str, str]
    left_out: list[str]
    cases: list[CaseRecord] = Field(min_length=1)
    rows: list[RowRecord]
    runs: list[RunRecord]
    recoveries: list[RecoveryRecord]
    decision_seconds: dict[str, float] = {}

    def costs(self, row: str, cases: Sequence[str]) -> Floats:
        """Return what a row cost, US dollars, shape (S, C); one line of it for a row that depends on no seed; NaN if not run."""
        found = {(run.seed or 0, run.case): run.total for run in self.runs if run.row == row}
        seeds = 1 + max((seed for seed, _ in found), default=0)
        return np.array([[found.get((seed, case), math.nan) for case in cases] for seed in range(seeds)])

    def run(self, row: str, case: str, seed: int = 0) -> RunRecord | None:
        """Return one run, None where there is none."""
        for run in self.runs:
            if run.row == row and run.case == case and (run.seed or 0) == seed:
                return run
        return None

    def save(self, path: Path) -> None:
        """Write the results as JSON, gzipped if the name ends in ``.gz``.

        Raises:
            agents.output_file.OutputError: If the file cannot be written; one that was there is left as it was.
        """
        text = orjson.dumps(self.model_dump(mode="python"), option=orjson.OPT_SERIALIZE_NUMPY)
        write_output(path, gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)


def load_results(path: Path) -> Results:
    """Read results that were saved.

    Raises:
        InputError: If the file cannot be read, or holds no results of this version; the text names what is wrong.
    """
    try:
        data = path.read_bytes()
        tree = orjson.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(f"results {path}: expected the JSON that cachepilot evaluate --results writes: {error}") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
        raise InputError(f"results {path}: expected format {FORMAT}, got {found!r}: evaluate again with this version")
    try:
        return Results.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"results {path}: {where}: {first['msg']} ({error.error_count()} in all)") from error
