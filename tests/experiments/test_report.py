import json

import pytest

from envs.objective import Prices
from experiments.measure import Method
from experiments.report import build_report
from experiments.report_text import knobs_text
from serving.knobs import MIB, Knobs
from tests.experiments.pages import body, chart_names, drawn
from tests.experiments.samples import STATIC, curve, decision, experiment, finite, traffic

QUICK = Method(replicates=60)
BIG = Knobs(64 * MIB, float("inf"), 0.25)
LOG = traffic(1, memory=(3.0, 60.0))
DECISIONS = [
    decision(20.0, applied=BIG, ghost=curve(), refresh_output_tokens=50.0, evictions=3.0),
    decision(40.0, current=BIG, verdict="hold", ghost=curve()),
    decision(60.0, current=BIG, verdict="limit", applied=STATIC),
    *(decision(at, "control", verdict="observe", evictions=1.0) for at in (20.0, 40.0, 60.0)),
]


def report(log=LOG, decisions=DECISIONS, design=None, **how):
    return build_report(design or experiment(), decisions, log, method=QUICK, **how)


def test_the_summary_is_json_and_holds_what_scripts_need():
    summary = report().summary
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert finite(summary)
    arm = summary["arms"]["treatment"]
    assert {
        "requests",
        "keys",
        "effective_keys",
        "hit_ratio",
        "p50",
        "p99",
        "cost",
        "cost_terms",
        "knobs_first",
        "knobs_last",
    } <= set(arm)
    assert set(arm["cost"]) == {"value", "low", "high"}
    assert arm["cost_terms"]["total"] == pytest.approx(sum(v for k, v in arm["cost_terms"].items() if k != "total"))
    assert arm["knobs_first"]["cache_size"] == 16 * MIB
    assert summary["verdict"] == "treatment better"
    assert summary["difference"]["cost"]["high"] < 0
    assert "clustered by key" in summary["method"]["in_brief"]
    assert summary["paired_ghost"]["windows"] == 2


def test_the_page_says_what_was_measured_and_how():
    page = body(report(command="cachepilot experiment report sample").html)
    for words in (
        "treatment better",
        "Effective keys",
        "from memory",
        "P99 above",
        "delta method",
        "Looking repeatedly is not corrected for",
        "Chi-square",
        "a made-up workload",
        "cachepilot experiment report sample",
        "64 MiB, no expiry, warm 0.25",
        "hold: because",
        "Decisions (6)",
    ):
        assert words in page, words


def test_equal_inputs_give_equal_pages():
    assert report().html == report().html


def test_other_prices_can_be_tried_on_the_same_experiment():
    dear = report(prices=Prices(output_mtok=150.0, slo_p99=1.0)).summary["arms"]["control"]["cost_terms"]
    cheap = report().summary["arms"]["control"]["cost_terms"]
    assert dear["tokens"] > 50 * cheap["tokens"]
    assert dear["memory"] == cheap["memory"]


def test_the_page_says_where_prices_come_from_and_what_the_verdict_becomes_under_others():
    made = report()
    page = body(made.html)
    for words in (
        "stays the same with each price halved and doubled",
        "GPT-4.1 mini",
        "ElastiCache Serverless for Valkey",
        "somebody would pay",
        "set for this experiment; the price book has 2",
        "× 0.5 = 0.8",
    ):
        assert words in page, words
    moves = made.summary["price_sensitivity"]["rows"]
    assert [row["price"] for row in moves[:3]] == [None, "input_mtok", "input_mtok"]
    assert moves[0]["verdict"] == made.summary["verdict"]
    assert moves[0]["difference"] == made.summary["difference"]["cost"]
    base = made.summary["arms"]["control"]["cost"]["value"]
    assert moves[0]["saving"] == pytest.approx(-made.summary["difference"]["cost"]["value"] / base)


def test_a_verdict_that_rests_on_a_price_says_on_which():
    knobs = {"control": STATIC, "treatment": Knobs(1024 * MIB, 3600.0)}
    made = report(decisions=[], design=experiment(knobs=knobs, prices=Prices(memory_gib_hour=10.0, slo_p99=1.0)))
    assert made.summary["verdict"] == "treatment better"
    words = "with memory doubled to 20 it is 'no difference shown'"
    assert words in made.summary["price_sensitivity"]["in_brief"]
    assert any(words in caveat for caveat in made.summary["caveats"])
    dear = report(decisions=[], design=experiment(knobs=knobs, prices=Prices(memory_gib_hour=20.0, slo_p99=1.0)))
    assert dear.summary["verdict"] == "no difference shown"


def test_a_price_that_nobody_would_pay_is_a_caveat():
    caveats = report(prices=Prices(memory_gib_hour=50.0)).summary["caveats"]
    assert any("memory_gib_hour is 50 USD per GiB-hour, outside what somebody would pay" in caveat for caveat in caveats)


def test_text_from_outside_cannot_become_markup():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    decisions = [decision(20.0, verdict=evil), decision(40.0)]
    decisions[1] = type(decisions[1])(**{**decisions[1].__dict__, "reason": evil, "policy": evil})
    page = report(decisions=decisions, title=evil, note=evil, command=evil).html
    assert "alert(1)</script>" not in page
    assert "<img" not in body(page)
    assert page.count("<script>") == page.count("</script>") == 2


@pytest.mark.parametrize(
    ("log", "decisions", "changes", "words"),
    [
        (LOG[:0], [], {}, "No requests in the period"),
        (LOG[:0], [], {"knobs": {}, "started_at": 0.0, "ended_at": None}, "The knobs are not known"),
        (LOG[LOG["arm"] == "control"], DECISIONS, {}, "Arm treatment served no request"),
        (LOG, [], {}, "The ledger has no decisions of this experiment"),
        (LOG, [], {"knobs": {}}, "its knobs are unknown"),
        (LOG, DECISIONS, {"ended_at": None}, "still running"),
        (LOG[:1], DECISIONS[:1], {}, "not enough data"),
        (LOG, [decision(50.0, ghost=None, window=0.0)], {"prices": Prices(time_scale=1660.0)}, "stands for 1,660 s"),
    ],
)
def test_a_partial_experiment_is_reported_as_what_it_is(log, decisions, changes, words):
    made = report(log, decisions, experiment(**changes))
    assert words in body(made.html)
    assert finite(made.summary)


def test_refreshes_that_nobody_recorded_are_said_to_be_missing():
    warm = {"control": STATIC, "treatment": BIG}
    caveats = report(decisions=[], design=experiment(knobs=warm)).summary["caveats"]
    assert any("arm treatment's refreshes are not recorded" in caveat for caveat in caveats)
    assert not any("arm control's refreshes" in caveat for caveat in caveats)


@pytest.mark.parametrize(
    ("size", "ttl", "words"),
    [
        (16 << 10, 5.234, "16 KiB, 5.23 s"),
        (64 * MIB, 360.0, "64 MiB, 6 min"),
        (3 << 30, 7200.0, "3 GiB, 2 h"),
        (1, float("inf"), "0.0009766 KiB, no expiry"),
        (MIB, 172_800.0, "1 MiB, 2 d"),
    ],
)
def test_knobs_are_shown_in_readable_units(size, ttl, words):
    assert knobs_text(Knobs(size, ttl)) == f"{words}, warm 0.00"


def test_more_caveats_can_be_given():
    made = report(caveats=["the generator was <late>"])
    assert "the generator was &lt;late&gt;" in made.html
    assert made.summary["caveats"][-1] == "the generator was <late>"


def test_a_torn_log_is_mentioned():
    log = LOG.copy()
    log.attrs["torn_lines"] = 2
    assert any("2 last lines" in caveat for caveat in report(log).summary["caveats"])


@pytest.mark.parametrize(
    ("scheme", "made", "charts"),
    [
        ("light", lambda: report(), {"hit-ratio", "p99", "cost", "terms", "knobs"}),
        ("dark", lambda: report(windows=1, decisions=[]), {"hit-ratio", "p99", "cost", "terms", "knobs"}),
        ("light", lambda: report(LOG[:0], [], experiment(knobs={})), set()),
    ],
)
def test_the_page_draws_itself_without_errors_and_without_the_network(browser, tmp_path, scheme, made, charts):
    with drawn(browser, tmp_path / "report.html", made().html, scheme, 1280) as page:
        assert chart_names(page) == charts
        assert page.locator("#verdict .what").is_visible()
        assert page.locator("#verdict .what").inner_text().lower() in ("treatment better", "not enough data")
