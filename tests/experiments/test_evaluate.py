"""Rows on cases: every row runs on every case with every seed, results do not depend on processes, and files give them back."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agents.baselines import MiddlePolicy
from agents.hindsight import grid_settings, static_dollars
from experiments.evaluate import EvaluationError, chosen_cases, decision_seconds, evaluate
from experiments.evaluation_results import Results, load_results
from experiments.evaluation_rows import (
    CONFIG,
    EvaluationSettings,
    Roles,
    RowSettings,
    chosen_rows,
    load_evaluation_settings,
    resolve_rows,
    row_command,
)
from experiments.evaluation_summary import learned_label, relative, summarise
from experiments.evaluation_targets import TARGETS, Target, judge
from experiments.play import play_all
from experiments.stats import Interval
from experiments.suites import Case
from experiments.units import InputError
from tests.experiments.evaluation_cases import INTERVALS, small_cases

ROWS = (
    RowSettings(label="mid-grid static", policy="mid-grid"),
    RowSettings(label="smoothed curve", policy="curve"),
    RowSettings(label="best static in hindsight", computed="best-static", group="bound"),
    RowSettings(label="minimum", computed="window-minimum", group="bound"),
    RowSettings(label="offline", computed="optuna"),
    RowSettings(label="causal oracle", computed="oracle", group="bound"),
    RowSettings(label="moved", policy="curve+1+0+0"),
    RowSettings(label="not there", artifacts="nowhere/of-this-name-*", group="ablation", optional=True),
)
SETTINGS = EvaluationSettings(rows=ROWS, roles=Roles(learned=("moved",)), seeds=2, optuna_trials=4, recover_intervals=6)


@pytest.fixture(scope="module")
def results() -> Results:
    return evaluate(SETTINGS, small_cases, command="the command")


def test_every_row_runs_on_every_case_with_every_seed(results: Results) -> None:
    assert [case.name for case in results.cases] == ["calm", "tide-2", "tide-3"]
    found = {(run.row, run.case, run.seed) for run in results.runs}
    assert len(found) == len(results.runs)
    for case in results.cases:
        for row in ("mid-grid static", "smoothed curve", "moved"):
            assert {(row, case.name, 0), (row, case.name, 1)} <= found
        for row in ("best static in hindsight", "minimum", "offline"):
            assert (row, case.name, None) in found
        assert len(case.requests) in (INTERVALS - 1, INTERVALS)
    assert results.left_out == ["row 'not there': no directory matches 'nowhere/of-this-name-*'"]


def test_what_it_keeps_of_a_run_is_what_the_policy_did(results: Results) -> None:
    case = small_cases()[1]
    alone = play_all([MiddlePolicy()], case.scenario, seed=1)[0]
    kept = results.run("mid-grid static", case.name, 1)
    assert kept is not None
    assert kept.dollars == alone.dollars.tolist()
    assert (kept.hits, kept.knobs) == (alone.hits.sum(), [])
    assert math.fsum(kept.terms.values()) == pytest.approx(kept.total)
    first = results.run("mid-grid static", case.name, 0)
    assert first is not None
    assert len(first.knobs) == len(first.dollars)


def test_bounds_are_bounds(results: Results) -> None:
    for case in small_cases():
        static = static_dollars(case.scenario, grid_settings(case.scenario.config.space))
        best, least = (results.costs(row, [case.name])[0, 0] for row in ("best static in hindsight", "minimum"))
        assert best <= static.sum(axis=1).min() * (1 + 1e-12)
        assert least == pytest.approx(static.min(axis=0).sum())
        assert least < best < results.costs("offline", [case.name])[0, 0] * (1 + 1e-9)


def test_the_oracle_is_not_built_on_what_it_is_judged_on(results: Results) -> None:
    assert results.run("causal oracle", "calm") is None
    assert results.run("causal oracle", "tide-2") is not None


def test_processes_do_not_change_the_results(results: Results) -> None:
    few = SETTINGS.model_copy(update={"rows": (ROWS[1], ROWS[2], ROWS[6]), "suites": ("calm", "tide-2")})
    again = evaluate(few, small_cases, jobs=2)
    assert [case.name for case in again.cases] == ["calm", "tide-2"]
    for run in again.runs:
        assert run == results.run(run.row, run.case, run.seed or 0)
    assert len(again.runs) == 2 * (2 * 2 + 1)
    assert again.recoveries == [item for item in results.recoveries if item.row in ("smoothed curve", "moved")]


def cases_that_kill() -> Sequence[Case]:
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return small_cases()


def test_a_process_that_was_killed_is_told_with_what_to_do() -> None:
    few = SETTINGS.model_copy(update={"rows": ROWS[:1], "suites": ("calm", "tide-2")})
    with pytest.raises(EvaluationError) as caught:
        evaluate(few, cases_that_kill, jobs=8)
    told = "a process ended before its case was done (out of memory?): try fewer jobs than 2 (--jobs)"
    assert str(caught.value) == told


@pytest.mark.parametrize("jobs", [1, 2])
def test_how_far_each_case_is_is_told_while_it_runs(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.evaluate._LOOK_SECONDS", 0.001)
    few = SETTINGS.model_copy(update={"rows": (ROWS[1], ROWS[2]), "suites": ("calm", "tide-2")})
    told: dict[str, list[float]] = {"calm": [], "tide-2": []}

    def within(case: str, share: float, total: int) -> None:
        assert total == 2
        told[case].append(share)

    evaluate(few, small_cases, jobs=jobs, within=within)
    for shares in told.values():
        assert shares == sorted(shares)
        assert all(0 < share <= 1 for share in shares)
        assert len(set(shares)) > 3
    if jobs == 1:  # other processes are looked at now and then
        assert [shares[-1] for shares in told.values()] == [1.0, 1.0]
        assert all(len(shares) > INTERVALS for shares in told.values())


def test_results_are_read_back_as_they_were_written(results: Results, tmp_path: Path) -> None:
    for name in ("results.json", "results.json.gz"):
        results.save(tmp_path / name)
        assert load_results(tmp_path / name) == results
    assert [summary.to_dict() for summary in summarise(load_results(tmp_path / "results.json"))] == [
        summary.to_dict() for summary in summarise(results)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected the JSON"),
        ("[]", "expected format 1, got 'list'"),
        ('{"format": 9}', "got 9"),
        ('{"format": 1}', "command"),
    ],
)
def test_what_is_no_results_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"bad\.json") as caught:
        load_results(path)
    assert words in str(caught.value)


def test_results_that_were_damaged_on_the_way_are_refused(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json.gz"
    results.save(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:40] + bytes(40) + whole[80:], whole[:15] + b"\xff" * 10 + whole[25:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"results\.json\.gz: expected the JSON"):
            load_results(path)


def test_results_without_a_case_or_a_term_of_the_cost_are_refused(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = results.runs[0]
    for changes, words in (
        ({"cases": [], "runs": [], "recoveries": []}, "cases: List should have at least 1 item"),
        ({"runs": [first.model_copy(update={"terms": {"tokens": 1.0}})]}, "expected all terms of the cost; without: "),
    ):
        results.model_copy(update=changes).save(path)
        with pytest.raises(InputError, match=words):
            load_results(path)


def test_a_row_is_compared_on_the_same_requests_and_the_same_ghost(results: Results) -> None:
    names = ["calm", "tide-2", "tide-3"]
    ours, theirs = results.costs("moved", names), results.costs("smoothed curve", names)
    assert relative(results, "moved", "smoothed curve", names) == pytest.approx(ours / theirs)
    static = relative(results, "moved", "best static in hindsight", names)
    assert static == pytest.approx(ours / results.costs("best static in hindsight", names))


def test_suites_are_summed_up_each_and_together(results: Results) -> None:
    summaries = {summary.name: summary for summary in summarise(results)}
    assert set(summaries) == {"steady", "non-stationary", "all"}
    curve, moved = summaries["all"].row("smoothed curve"), summaries["all"].row("moved")
    assert curve is not None
    assert moved is not None
    assert curve.reference is not None
    assert moved.reference is not None
    assert [curve.reference.iqm.value, curve.reference.iqm.low, curve.reference.iqm.high] == [1.0, 1.0, 1.0]
    assert curve.improvement is None
    table = relative(results, "moved", "smoothed curve", [case.name for case in results.cases])
    assert moved.reference.mean.value == pytest.approx(table.mean())
    assert moved.reference.worst[1] == pytest.approx(table.mean(axis=0).max())
    assert moved.reference.iqm.low <= moved.reference.iqm.value <= moved.reference.iqm.high
    assert moved.terms["tokens"] > 0
    assert moved.cost == pytest.approx(sum(moved.terms.values()))
    assert 0 < moved.hit_ratio < 1
    assert moved.gap is not None
    oracle = summaries["non-stationary"].row("causal oracle")
    assert oracle is not None
    assert oracle.gap is None or math.isnan(oracle.gap.value) or oracle.gap.value == pytest.approx(1.0)
    assert summaries["steady"].row("causal oracle") is None
    json.dumps([summary.to_dict() for summary in summaries.values()], allow_nan=False)


def test_recovery_is_measured_on_steady_cases_against_the_best_static_setting_of_the_later_intervals(results: Results) -> None:
    assert {item.case for item in results.recoveries} == {"calm"}
    scenario = small_cases()[0].scenario
    static = static_dollars(scenario, grid_settings(scenario.config.space))
    item = next(item for item in results.recoveries if item.row == "moved" and item.seed == 0)
    assert item.best_static == pytest.approx(static[:, 6:].sum(axis=1).min())
    assert item.relative > 0
    assert len(item.curve) == static.shape[1]
    # It starts from the smallest size: what it does first costs more than what the best setting does.
    assert item.curve[0] is not None


def test_targets_are_judged_by_the_values_as_they_are(results: Results) -> None:
    summaries = summarise(results)
    verdicts = {verdict.target.words: verdict for verdict in judge(results, summaries)}
    assert len(verdicts) == len(TARGETS)
    assert learned_label(results) == "moved"
    middle = verdicts["cost over the mid-grid static setting's, all cases"]
    row = next(summary for summary in summaries if summary.name == "all").row("moved")
    assert row is not None
    assert row.middle is not None
    assert middle.value == row.middle.iqm
    assert middle.state == ("met" if middle.value.value <= 0.75 else "missed")
    assert verdicts["training, seconds"].state == "not measured"


def test_a_target_is_not_met_by_rounding_nor_by_a_wide_interval() -> None:
    target = Target("it", 0.97, lambda *_: None, whole_interval_below=1.0)
    assert target.state(Interval(0.97, 0.9, 0.99)) == "met"
    assert target.state(Interval(0.9700001, 0.9, 0.99)) == "missed"
    assert target.state(Interval(0.96, 0.9, 1.0)) == "missed"
    assert target.state(Interval(0.96)) == "missed"
    assert target.state(Interval(math.nan)) == "not measured"
    assert Target("it", 0.5, lambda *_: None, at_least=True).state(Interval(0.4999)) == "missed"


def test_cases_are_chosen_by_suite_family_and_name() -> None:
    cases = small_cases()
    assert [case.name for case in chosen_cases(cases, ["steady"])] == ["calm"]
    assert [case.name for case in chosen_cases(cases, ["tide", "calm"])] == ["calm", "tide-2", "tide-3"]
    assert [case.name for case in chosen_cases(cases, ["tide-3"])] == ["tide-3"]
    with pytest.raises(InputError, match=r"suite 'nope': expected all, non-stationary, steady, or a case: calm, tide-2, tide-3"):
        chosen_cases(cases, ["nope"])


def test_rows_are_asked_for_by_label_by_name_and_by_source(tmp_path: Path) -> None:
    base = load_evaluation_settings(CONFIG)
    chosen = chosen_rows(base, ["hill climbing", "curve:smoothing=0.1", "mine=mid-grid", f"seeds={tmp_path}/run-*"])
    rows = {row.label: row for row in chosen.rows}
    assert {"smoothed curve", "mid-grid static", "best static in hindsight", "causal oracle"} <= set(rows)
    assert rows["curve:smoothing=0.1"].policy == "curve:smoothing=0.1"
    assert (rows["mine"].policy, rows["seeds"].artifacts) == ("mid-grid", f"{tmp_path}/run-*")
    assert chosen.roles.learned == ("hill climbing",)
    assert chosen_rows(base, []) is base
    with pytest.raises(InputError, match="given twice"):
        chosen_rows(base, ["mine=curve", "mine=mid-grid"])
    with pytest.raises(InputError, match="expected label=source"):
        chosen_rows(base, ["=curve"])


def test_rows_that_cannot_be_are_refused_before_anything_runs(tmp_path: Path) -> None:
    def settings(**row: str) -> EvaluationSettings:
        return EvaluationSettings(rows=(*ROWS[:2], RowSettings(label="mine", **row)))

    with pytest.raises(InputError, match=r"row 'mine': policy 'curv'.*did you mean curve"):
        resolve_rows(settings(policy="curv"))
    with pytest.raises(InputError, match=r"no directory matches .*train the policies there.*ppo:suites"):
        resolve_rows(settings(artifacts=f"{tmp_path}/none-*"))
    (tmp_path / "broken").mkdir()
    with pytest.raises(ValueError, match="broken"):
        resolve_rows(settings(artifacts=f"{tmp_path}/brok*"))


def test_each_row_has_the_command_that_makes_it() -> None:
    words = [row_command(row, SETTINGS, " --suite steady") for row in ROWS]
    assert words[1] == "cachepilot evaluate 'smoothed curve=curve' --seed 0 --suite steady"
    assert words[2] == "cachepilot evaluate 'best static in hindsight' --seed 0 --suite steady"
    assert words[7].startswith("cachepilot evaluate 'not there=nowhere/of-this-name-*'")


def test_the_shipped_configuration_names_rows_that_there_are() -> None:
    settings = load_evaluation_settings(CONFIG)
    kept = tuple(row for row in settings.rows if row.label != "shipped ppo")  # it is trained anew when the schema changes
    rows, _ = resolve_rows(settings.model_copy(update={"rows": kept}))
    labels = [row.label for row in rows]
    roles = settings.roles
    assert {roles.reference, roles.middle, roles.best_static, roles.oracle} <= set(labels)
    assert {row.group for row in settings.rows} == {"policy", "bound", "ablation"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows: []", "rows = []"),
        ("rows: [{label: a}]", "exactly one of policy, artifacts and computed"),
        ("rows: [{label: smoothed curve, policy: curve}, {label: smoothed curve, policy: hold}]", "is there 2 times"),
        ("rows: [{label: a, policy: curve}]", "roles.reference: 'smoothed curve'"),
        ("rows: [{label: smoothed curve, policy: curve}]\nseeds: 0", "seeds = 0"),
        ("- a", "expected a mapping"),
        ("a: [", "expected a readable YAML file"),
    ],
)
def test_bad_configurations_are_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"bad\.yaml") as caught:
        load_evaluation_settings(path)
    assert words in str(caught.value)


def test_a_decision_is_timed_by_the_clock_it_is_given() -> None:
    ticks = iter(np.arange(0.0, 1e6, 0.25))
    assert decision_seconds(MiddlePolicy(), small_cases()[0], clock=lambda: float(next(ticks))) == 0.25
