"""The page shows every row, met and missed targets as they are, draws itself, and lets no text from outside become markup."""

from __future__ import annotations

import pytest

from experiments.evaluate import evaluate
from experiments.evaluate_page import build_page
from experiments.evaluation_results import Results
from experiments.evaluation_rows import EvaluationSettings, Roles, RowSettings
from experiments.units import InputError
from tests.experiments.evaluation_cases import small_cases
from tests.experiments.pages import body, chart_names, drawn

ROWS = (
    RowSettings(label="mid-grid static", policy="mid-grid"),
    RowSettings(label="smoothed curve", policy="curve"),
    RowSettings(label="best static in hindsight", computed="best-static", group="bound"),
    RowSettings(label="without smoothing", policy="last-curve", group="ablation"),
    RowSettings(label="causal oracle", policy="curve+0+0+1", group="bound"),  # a stand-in: the page does not know
    RowSettings(label="moved", policy="curve+1+0+0"),
)
SETTINGS = EvaluationSettings(rows=ROWS, roles=Roles(learned=("moved",)), seeds=2, recover_intervals=5)


@pytest.fixture(scope="module")
def results():
    return evaluate(SETTINGS, small_cases, command="cachepilot evaluate it")


def changed(results, factor):
    """The same, with all costs of the learned row multiplied."""
    runs = [
        run.model_copy(update={"dollars": [factor * value for value in run.dollars]}) if run.row == "moved" else run
        for run in results.runs
    ]
    return results.model_copy(update={"runs": runs})


def test_it_shows_every_row_with_seeds_and_command(results):
    page = body(build_page(results))
    for row in results.rows:
        assert page.count(f"<th>{row.label}") >= 2, row.label
        assert f"<code>{row.command}</code>".replace("'", "&#x27;") in page
    for words in ("Suite: steady", "Suite: non-stationary", "Suite: all", "drawn anew", "cachepilot evaluate it", "tide-2"):
        assert words in page, words


def test_a_missed_target_is_shown_as_missed_and_a_met_one_as_met(results):
    dear, cheap = body(build_page(changed(results, 3.0))), body(build_page(changed(results, 0.01)))
    words = "cost over the smoothed curve&#x27;s, non-stationary, the interval below 1"
    for page, state in ((dear, "missed"), (cheap, "met")):
        line = next(line for line in page.split("<tr>") if f"<th>{words}</th>" in line)
        assert f">{state}</td>" in line
    assert 'verdict bad" id="verdict"' in dear


def test_cases_that_are_lost_are_listed(results):
    lost = body(build_page(changed(results, 3.0)))
    section = lost[lost.index("Where it does not win") : lost.index("Case by case")]
    assert all(f"<th>{case}</th><td>reference</td>" in section for case in ("calm", "tide-2", "tide-3"))
    assert "It is cheaper on every case." in body(build_page(changed(results, 0.01)))


def test_the_case_whose_knobs_are_drawn_can_be_chosen(results):
    assert "Knobs over time: tide-3" in body(build_page(results, case="tide-3"))
    with pytest.raises(InputError, match="case 'none': expected one of calm, tide-2, tide-3"):
        build_page(results, case="none")


def test_equal_results_give_equal_pages(results):
    assert build_page(results) == build_page(Results.model_validate(results.model_dump()))


def test_text_from_outside_cannot_become_markup(results):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    rows = [row.model_copy(update={"command": evil, "source": evil, "seeds": [evil]}) for row in results.rows]
    cases = [case.model_copy(update={"note": evil}) for case in results.cases]
    page = build_page(results.model_copy(update={"rows": rows, "cases": cases, "left_out": [evil]}), command=evil)
    assert "alert(1)</script>" not in page
    assert "<img" not in body(page)
    assert page.count("<script>") == page.count("</script>") == 2


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 500)])
def test_the_page_draws_itself_without_errors_and_without_the_network(browser, tmp_path, results, scheme, width):
    with drawn(browser, tmp_path / "evaluation.html", build_page(results), scheme, width) as page:
        assert chart_names(page) == {"heat", "terms", "knobs"}
        names = page.locator("#chart-knobs .legendtext").all_text_contents()
        assert names == ["smoothed curve", "moved", "causal oracle", "requests"]
