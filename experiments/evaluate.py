"""Judge policies on held-out cases: run every row on every case with every seed, and keep what each interval cost.

What the figures say is worked out in :mod:`experiments.evaluation_summary`. How a training run compares with its baselines is
:mod:`experiments.standings`, whose names are here too.
"""

from __future__ import annotations

import math
import multiprocessing
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import numba
import numpy as np

from agents.policy import Policy, Proposal
from envs.observation import Observation
from envs.simulator.batch import use_threads
from experiments.evaluation_results import CaseRecord, RecoveryRecord, Results, RowRecord, RunRecord, TrainingRecord
from experiments.evaluation_rows import Bench, EvaluationSettings, Row, resolve_rows, row_command
from experiments.play import Run, play_all
from experiments.processes import deaths_told
from experiments.standings import TERMS, Outcome, Standing, compare, play
from experiments.suites import Case
from experiments.units import InputError
from serving.knobs import Knobs

__all__ = [
    "TERMS", "CaseSource", "EvaluationError", "Outcome", "Standing", "chosen_cases", "compare", "decision_seconds", "evaluate",
    "play", "run_case",
]  # fmt: skip

Within = Callable[[str, float], None]
"""Told of a case, and of the share of it that is done, 0 to 1."""

CaseSource = Callable[[], Sequence[Case]]
"""Makes the cases. Other processes make them again, so it has to be a function of a module, or a ``functools.partial`` of one."""

SUITES = ("steady", "non-stationary")

_LOOK_SECONDS = 0.25
"""Between two looks at what other processes have done."""

_DECISIONS = 200
"""Decisions that are timed."""


class EvaluationError(RuntimeError):
    """A case that could not be run; says which, and why."""


@dataclass(frozen=True)
class CaseOutcome:
    """What one case gave: its record, every row's runs on it, and the recoveries from a bad start."""

    case: CaseRecord
    runs: list[RunRecord]
    recoveries: list[RecoveryRecord]


def evaluate(
    settings: EvaluationSettings,
    cases: CaseSource,
    *,
    jobs: int = 1,
    command: str = "cachepilot evaluate",
    options: str = "",
    drawn: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    within: Callable[[str, float, int], None] | None = None,
) -> Results:
    """Run every row on every case with every seed.

    Args:
        settings: Rows, cases and seeds.
        cases: Makes the cases.
        jobs: Processes that the cases are shared out to; the results do not depend on it.
        command: What was typed.
        options: What else has to be typed to make a row again.
        drawn: A case that will be asked for by name and so has to be among those that are run.
        progress: Called with the case that is done, the number of those that are, and of all.
        within: Called while a case is run with its name, the share of it that is done, and the number of all cases; from a thread
            of its own where there are several processes.

    Raises:
        InputError: If a row, a suite or the case is unknown, or there is no case.
        agents.artifact.ArtifactError: If a trained policy does not load.
        EvaluationError: If a case cannot be run.
    """
    rows, left_out = resolve_rows(settings)
    known = {row.label: row for row in settings.rows}
    chosen = chosen_cases(cases(), settings.suites)
    if drawn is not None and drawn not in {case.name for case in chosen}:
        raise InputError(f"case {drawn!r}: expected one of {', '.join(case.name for case in chosen)}")
    outcomes: dict[str, CaseOutcome] = {}
    shared = None if within is None else lambda case, share: within(case, share, len(chosen))
    for outcome in _outcomes(settings, rows, cases, chosen, jobs, shared):
        outcomes[outcome.case.name] = outcome
        if progress is not None:
            progress(outcome.case.name, len(outcomes), len(chosen))
    ordered = [outcomes[case.name] for case in chosen]
    bench = Bench(chosen[0], settings)
    timed = {row.label: decision_seconds(row.make(bench, 0), chosen[0]) for row in rows if row.training and row.make is not None}
    return Results(
        command=command,
        settings=settings,
        versions=_versions(),
        left_out=left_out,
        cases=[outcome.case for outcome in ordered],
        rows=[
            RowRecord(
                label=row.label,
                group=row.group,
                source=row.source,
                seeds=list(row.seeds),
                command=row_command(known[row.label], settings, options),
                training=[TrainingRecord(**vars(item)) for item in row.training],
            )
            for row in rows
        ],
        runs=[run for outcome in ordered for run in outcome.runs],
        recoveries=[recovery for outcome in ordered for recovery in outcome.recoveries],
        decision_seconds=timed,
    )


def chosen_cases(cases: Sequence[Case], wanted: Iterable[str]) -> list[Case]:
    """Return the cases of some suites, or by name, in their own order.

    Args:
        cases: All cases.
        wanted: ``all``, suites, families or names.

    Raises:
        InputError: If one of them is none of that.
    """
    chosen = set()
    for name in wanted:
        found = [case.name for case in cases if name in ("all", case.suite, case.family, case.name)]
        if not found:
            raise InputError(
                f"suite {name!r}: expected all, {', '.join(sorted({case.suite for case in cases}))}, or a case: "
                + ", ".join(case.name for case in cases)
            )
        chosen.update(found)
    return [case for case in cases if case.name in chosen]


def run_case(case: Case, rows: Sequence[Row], settings: EvaluationSettings, within: Within | None = None) -> CaseOutcome:
    """Run every row on one case.

    Args:
        case: The case.
        rows: The rows.
        settings: The evaluation's.
        within: Called with the case's name and the share of it that is done.

    Raises:
        EvaluationError: If a row cannot be run on it.
    """
    try:
        return _run_case(Bench(case, settings), rows, settings, _Parts(case.name, within))
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise EvaluationError(f"case {case.name}: {type(error).__name__}: {error}") from error


class _Parts:
    """What a case is made of, each taken for as long as the others.

    Args:
        case: The case's name.
        within: Who is told.
    """

    def __init__(self, case: str, within: Within | None) -> None:
        self._case, self._within = case, within
        self._done, self._all = 0, 1

    def expect(self, parts: int) -> None:
        """Take it for so many parts."""
        self._all = max(parts, 1)

    def share(self, share: float) -> None:
        """So much of the part that is run is done."""
        if self._within is not None:
            self._within(self._case, min((self._done + share) / self._all, 1.0))

    def next(self) -> None:
        """The part that was run is done."""
        self._done += 1
        self.share(0.0)


def _run_case(bench: Bench, rows: Sequence[Row], settings: EvaluationSettings, parts: _Parts) -> CaseOutcome:
    case, scenario = bench.case, bench.case.scenario
    rows = [row for row in rows if row.applies(bench)]
    played: list[tuple[str, int | None, Run]] = []
    recoveries: list[RecoveryRecord] = []
    seeds = max((len(row.seeds) for row in rows), default=0)
    parts.expect(seeds * (2 if case.suite == "steady" else 1) + sum(row.compute is not None for row in rows))
    with _one_thread():
        for number in range(seeds):
            playing = [row for row in rows if row.make is not None and number < len(row.seeds)]
            policies = [row.make(bench, number) for row in playing if row.make is not None]
            runs = play_all(policies, scenario, length=settings.length, seed=settings.seed + number, progress=parts.share)
            parts.next()
            played += [(row.label, number, run) for row, run in zip(playing, runs, strict=True)]
            if case.suite == "steady":
                recoveries += _recover(bench, playing, policies, number, parts)
                parts.next()
        for row in rows:
            if row.compute is not None:
                played.append((row.label, None, _first(row.compute(bench), settings.length)))
                parts.next()
    requests = played[0][2].requests
    for label, _, run in played:
        if not np.array_equal(run.requests, requests):
            raise ValueError(f"row {label!r} saw other requests than row {played[0][0]!r}")
    record = CaseRecord(
        name=case.name,
        family=case.family,
        suite=case.suite,
        period=case.period,
        interval=scenario.interval,
        note=scenario.trace.note,
        requests=requests.tolist(),
    )
    return CaseOutcome(record, [RunRecord.of(label, case.name, number, run) for label, number, run in played], recoveries)


def _first(run: Run, length: int | None) -> Run:
    """Return the first intervals of a run."""
    return replace(
        run,
        dollars=run.dollars[:length],
        requests=run.requests[:length],
        hits=run.hits[:length],
        terms={term: values[:length] for term, values in run.terms.items()},
        p99=run.p99[:length],
        knobs=run.knobs[:length],
    )


def _recover(bench: Bench, rows: Sequence[Row], policies: Sequence[Policy], number: int, parts: _Parts) -> list[RecoveryRecord]:
    """Start the rows from the smallest size and the shortest TTL; what each later interval costs against the best static one."""
    settings, scenario = bench.settings, bench.case.scenario
    space, after = scenario.config.space, settings.recover_intervals
    bad = replace(scenario, initial=Knobs(space.min_size, space.min_ttl, 0.0))
    static = bench.replays.dollars[:, : settings.length]
    if static.shape[1] <= after:
        return []
    best = static[int(static[:, after:].sum(axis=1).argmin())]
    found = []
    played = play_all(policies, bad, length=settings.length, seed=settings.seed + number, progress=parts.share)
    for row, run in zip(rows, played, strict=True):
        curve = np.divide(run.dollars, best, out=np.full(len(best), math.nan), where=best > 0)
        found.append(
            RecoveryRecord(
                row=row.label,
                case=bench.case.name,
                seed=number,
                after=after,
                dollars=float(run.dollars[after:].sum()),
                best_static=float(best[after:].sum()),
                curve=[value if math.isfinite(value) else None for value in curve.tolist()],
            )
        )
    return found


def decision_seconds(policy: Policy, case: Case, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the median time of one decision on a case, seconds; the observation is there already.

    Args:
        policy: The policy.
        case: What it decides on.
        clock: Seconds.
    """
    timed = _Timed(policy, clock)
    with _one_thread():
        play_all([timed], case.scenario, length=_DECISIONS)
    return float(np.median(timed.seconds))


class _Timed:
    """A policy whose decisions are timed."""

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self.seconds: list[float] = []

    @property
    def name(self) -> str:
        return self._policy.name

    def reset(self) -> None:
        self._policy.reset()

    def decide(self, observation: Observation) -> Proposal:
        began = self._clock()
        proposal = self._policy.decide(observation)
        self.seconds.append(self._clock() - began)
        return proposal


# -- processes --------------------------------------------------------------------------------------------------------------


def _outcomes(
    settings: EvaluationSettings,
    rows: Sequence[Row],
    cases: CaseSource,
    chosen: Sequence[Case],
    jobs: int,
    within: Within | None,
) -> Iterator[CaseOutcome]:
    if jobs < 1:
        raise InputError(f"jobs: expected at least 1, got {jobs}")
    if jobs == 1 or len(chosen) == 1:
        for case in chosen:
            yield run_case(case, rows, settings, within)
        return
    # Spawned: a fork would take over threads of numba and torch that do not run in it.
    context = multiprocessing.get_context("spawn")
    # Without a lock: a process that ends while it has one would hold up the others.
    shares = context.RawArray("d", len(chosen))
    jobs = min(jobs, len(chosen))
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare, initargs=(settings, cases, shares))
    try:
        with (
            deaths_told("case", jobs, "--jobs", EvaluationError),
            _passed_on(shares, [case.name for case in chosen], within),
        ):
            for done in as_completed([pool.submit(_run_named, case.name, place) for place, case in enumerate(chosen)]):
                yield done.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _passed_on(shares: Sequence[float], names: Sequence[str], within: Within | None) -> Iterator[None]:
    """Tell what other processes write into ``shares``, from a thread."""
    if within is None:
        yield
        return
    over, told = threading.Event(), [0.0] * len(names)

    def follow() -> None:
        while not over.wait(_LOOK_SECONDS):
            for place, name in enumerate(names):
                if shares[place] != told[place]:
                    told[place] = shares[place]
                    within(name, told[place])

    following = threading.Thread(target=follow, name="evaluate-within", daemon=True)
    following.start()
    try:
        yield
    finally:
        over.set()
        following.join()


_prepared: tuple[EvaluationSettings, list[Row], dict[str, Case], MutableSequence[float]] | None = None


def _prepare(settings: EvaluationSettings, cases: CaseSource, shares: MutableSequence[float]) -> None:
    """Make rows and cases in a process of the pool: neither can be sent."""
    global _prepared
    rows, _ = resolve_rows(settings)
    _prepared = settings, rows, {case.name: case for case in cases()}, shares


def _run_named(name: str, place: int) -> CaseOutcome:
    if _prepared is None:
        raise RuntimeError("evaluate: expected _prepare to have run in this process")
    settings, rows, cases, shares = _prepared

    def within(case: str, share: float) -> None:
        shares[place] = share

    return run_case(cases[name], rows, settings, within)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Step the caches of a batch in this thread: a few short ones cost more to share out than to step."""
    before = numba.get_num_threads()
    use_threads(1)
    try:
        yield
    finally:
        use_threads(before)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("cachepilot", "numpy", "numba"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
