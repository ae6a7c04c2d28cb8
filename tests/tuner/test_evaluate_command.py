"""`cachepilot evaluate` as a command: what it prints and writes, and what it says when it cannot."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import experiments.evaluate
import experiments.suites
from agents.artifact import ArtifactError
from experiments.units import InputError
from tests.experiments.evaluation_cases import small_cases
from tuner.errors import CommandError
from tuner.evaluate_command import _progress, evaluate

CONFIG = """
seeds: 2
recover_intervals: 5
roles: {learned: [moved]}
rows:
  - {label: mid-grid static, policy: mid-grid}
  - {label: smoothed curve, policy: curve}
  - {label: best static in hindsight, computed: best-static, group: bound}
  - {label: moved, policy: "curve+1+0+0"}
"""

app = typer.Typer()
app.command()(evaluate)


@app.callback()
def _several() -> None:
    """Makes `evaluate` a command among others, as it is in the product."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(experiments.suites, "held_out", lambda folder: small_cases())
    monkeypatch.setenv("CACHEPILOT_TRACES", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "rows.yaml"
    path.write_text(CONFIG)
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def refused(*arguments: object) -> str:
    with pytest.raises((InputError, ArtifactError)) as caught:
        run(*arguments)
    return str(caught.value)


def test_it_shows_tables_and_writes_a_page_and_results_that_show_the_same_again(config: Path, tmp_path: Path) -> None:
    page, kept, again = tmp_path / "page.html", tmp_path / "results.json.gz", tmp_path / "again.html"
    text = run("--config", config, "--suite", "tide-2", "-o", page, "--results", kept)
    for words in ("non-stationary: 1 cases", "moved", "targets, about moved", "not measured", str(page.name)):
        assert words in text, words
    assert "Suite: non-stationary" in page.read_text("utf-8")
    shown = run("--from", kept, "-o", again)
    first = text[: text.index("page:")]
    assert shown[: shown.index("page:")] == first
    assert "Suite: non-stationary" in again.read_text("utf-8")


def test_json_alone_is_on_standard_output(config: Path, tmp_path: Path) -> None:
    told = json.loads(run("moved", "--config", config, "--suite", "calm", "--length", "8", "--json"))
    assert told["learned"] == "moved"
    assert [suite["suite"] for suite in told["suites"]] == ["steady"]
    rows = {row["row"]: row for row in told["suites"][0]["rows"]}
    assert rows["moved"]["relative_to_reference"]["iqm"]["value"] > 0
    assert rows["moved"]["command"] == f"cachepilot evaluate moved=curve+1+0+0 --seed 0 --suite calm --config {config} --length 8"
    assert {target["state"] for target in told["targets"]} <= {"met", "missed", "not measured"}
    assert told["suites"][0]["cases"][0]["intervals"] == 8


def test_missing_traces_are_told_with_what_to_do(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give it as --traces, or set CACHEPILOT_TRACES" in refused("--config", config, "--traces", tmp_path / "none")
    monkeypatch.delenv("CACHEPILOT_TRACES")
    assert refused("--config", config).startswith("traces: expected the folder of the real traces")


def test_rows_that_cannot_be_are_told_before_the_traces_are_read(config: Path, tmp_path: Path) -> None:
    assert "did you mean curve" in refused("curv", "--config", config)
    (tmp_path / "damaged").mkdir()
    assert "damaged" in refused(f"mine={tmp_path / 'damaged'}", "--config", config)
    assert "no directory matches" in refused(f"mine={tmp_path}/none-*", "--config", config)


def test_what_cannot_be_written_or_shown_is_refused_before_the_work(config: Path, tmp_path: Path) -> None:
    assert "there is no directory" in refused("-o", tmp_path / "none" / "page.html")
    assert "it is a directory" in refused("--results", tmp_path)
    assert "nothing is run" in refused("--from", tmp_path / "results.json", "--seed", 3)
    assert "expected the JSON that cachepilot evaluate --results writes" in refused("--from", tmp_path / "none.json")
    assert "suite 'nope': expected all" in refused("--config", config, "--suite", "nope")


def test_a_case_that_is_not_among_those_that_are_run_is_told_before_the_work(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments.evaluate, "run_case", lambda *arguments: pytest.fail("work was begun"))
    told = refused("--config", config, "--output", tmp_path / "page.html", "--case", "tide-9")
    assert told == "case 'tide-9': expected one of calm, tide-2, tide-3"


def test_a_case_that_takes_long_is_not_silent(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_case, said = experiments.evaluate.run_case, threading.Event()
    begun = Console.print

    def listening(console: Console, *what: object, **how: Any) -> None:
        begun(console, *what, **how)
        if console.stderr and "evaluating for" in str(what):
            said.set()

    def slowly(*arguments: Any) -> Any:
        assert said.wait(30), "nothing was said while the case was under way"
        return run_case(*arguments)

    monkeypatch.setattr(Console, "print", listening)
    monkeypatch.setattr(experiments.evaluate, "run_case", slowly)
    monkeypatch.setattr("tuner.evaluate_command.FIRST_BEAT", 0.01)
    result = CliRunner().invoke(app, ["evaluate", "--config", str(config), "--suite", "calm", "--length", "8", "--json"])
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)
    assert re.search(r"evaluating for \d+ s: none of the cases is done yet", result.stderr)
    assert "evaluated calm: 1 of 1 cases" in result.stderr


def test_files_that_cannot_be_written_are_told_before_the_work(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tmp_path / "one.json"
    assert "expected two files" in refused("--config", config, "--output", both, "--results", both)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    assert "writing there is not permitted" in refused("--config", config, "--output", tmp_path / "page.html")


def test_a_narrow_window_shows_fewer_columns_than_a_pipe(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept.json"
    monkeypatch.setenv("COLUMNS", "80")
    piped = run("--results", kept, "mid-grid static", "smoothed curve")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    narrow = run("--from", kept)
    assert "IQM" in narrow
    assert "gap closed" in piped
    assert "gap closed" not in narrow


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_of_a_terminal_goes_on_within_a_case(terminal: bool) -> None:
    shown = io.StringIO()
    with _progress(Console(file=shown, force_terminal=terminal, width=150)) as (told, within):
        within("calm", 0.5, 4)
        told("calm", 1, 4)
        within("calm", 1.0, 4)  # late, from another process
        within("tide-2", 0.25, 4)
        within("tide-3", 0.42, 4)
    last = shown.getvalue().rpartition("evaluating")[2]
    if terminal:
        assert "1/4 cases" in last
        assert "tide-2 25%, tide-3 42%" in last
    else:
        assert shown.getvalue().strip() == "evaluated calm: 1 of 4 cases"


def test_a_page_that_cannot_be_made_or_written_loses_nothing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.json"
    arguments = ["evaluate", "--config", str(config), "--suite", "calm", "--length", "8", "--results", str(kept)]
    failed = CliRunner().invoke(app, [*arguments, "--output", "/dev/full"])
    assert isinstance(failed.exception, CommandError)
    assert str(failed.exception).startswith("/dev/full: cannot be written: No space left on device: free room there")
    assert "steady: 1 cases" in failed.stdout
    assert f"results: {kept}" in failed.stdout
    assert "page:" not in failed.stdout
    assert "steady: 1 cases" in run("--from", kept)

    kept.unlink()
    monkeypatch.setattr("experiments.evaluate_page.build_page", lambda *given, **named: 1 / 0)
    failed = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "page.html")])
    assert isinstance(failed.exception, ZeroDivisionError)
    assert "steady: 1 cases" in run("--from", kept)


def test_results_for_which_there_is_no_room_are_shown_and_the_older_ones_stay(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    failed = CliRunner().invoke(
        app, ["evaluate", "--config", str(config), "--suite", "calm", "--length", "8", "--results", str(kept)]
    )
    assert str(failed.exception) == (f"{kept}: cannot be written: No space left on device: free room there or name another file")
    assert "steady: 1 cases" in failed.stdout
    assert kept.read_text() == "old"


def test_an_unknown_case_of_results_is_told_before_anything_is_written(config: Path, tmp_path: Path) -> None:
    kept, again = tmp_path / "kept.json", tmp_path / "again.json"
    run("--config", config, "--suite", "calm", "--length", "8", "--results", kept)
    assert refused("--from", kept, "--results", again, "--case", "tide-9") == "case 'tide-9': expected one of calm"
    assert not again.exists()
