"""The page draws itself in a browser, shows what was found and assumed, and lets no text from outside become markup."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envs.objective import Prices
from envs.price_book import default_book
from envs.simulator import SimConfig
from experiments.advise import advise
from experiments.advise_page import build_page
from experiments.trace_source import TraceSource
from serving.knobs import Knobs
from tests.experiments.pages import body, chart_names, drawn

SPEC = "made:sessions?n_requests=1500&n_keys=200&seed=5"


@pytest.fixture(scope="module")
def advice():
    return advise(TraceSource(SPEC), config=SimConfig(ghost_keys=0), current=Knobs(8192, 600.0))


def test_the_page_says_what_was_found_and_what_was_assumed(advice):
    page = body(build_page(advice, default_book(), command="cachepilot advise it"))
    for words in (
        "Change the setting", "not a real workload", "held out", "best without expiry", "unlimited cache", "Student",
        "prompt tokens halved to", "memory doubled to", "sized for", "GPT-4.1 mini", "list price", "cachepilot advise it",
    ):  # fmt: skip
        assert words in page, words


def test_a_price_of_ones_own_is_said_to_be_so(advice):
    own = replace(advice, prices=Prices(memory_gib_hour=7.0))
    page = body(build_page(own, default_book()))
    assert "set by hand" in page
    assert "set by hand" not in body(build_page(advice, default_book()))


def test_equal_advice_gives_equal_pages(advice):
    assert build_page(advice, default_book()) == build_page(advice, default_book())


def test_text_from_outside_cannot_become_markup(advice):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    facts = replace(advice.facts, name=evil, note=evil)
    page = build_page(replace(advice, facts=facts, reason=evil, warnings=[evil]), default_book(), command=evil)
    assert "alert(1)</script>" not in page
    assert "<img" not in body(page)
    assert page.count("<script>") == page.count("</script>") == 2


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 500)])
@pytest.mark.parametrize("compared", [True, False])
def test_the_page_draws_itself_without_errors_and_without_the_network(browser, tmp_path, advice, scheme, width, compared):
    if not compared:
        advice = replace(advice, current=None, verdict="use")
    html = build_page(advice, default_book())
    with drawn(browser, tmp_path / "advice.html", html, scheme, width) as page:
        assert chart_names(page) == {"heat", "curve", "terms"}
        marks = page.locator("#chart-heat .legendtext").all_text_contents()
        assert marks == (["recommended", "current"] if compared else ["recommended"])
        # The switch shows the other map.
        assert "USD per 1,000" in (page.locator("#chart-heat").text_content() or "")
        page.get_by_role("button", name="hit ratio").click()
        page.wait_for_selector("body[data-shown='hit ratio']")
        assert "USD per 1,000" not in (page.locator("#chart-heat").text_content() or "")
        assert page.evaluate("document.getElementById('chart-heat').data.slice(0, 2).map(map => map.visible)") == [False, True]
