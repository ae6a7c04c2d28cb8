"""The live display and the closing panel: drawn on a terminal, nothing cut at 80 columns."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from agents.policy import Proposal
from envs.objective import Cost
from envs.signals import ArmSignals
from envs.workloads.generators import sessions
from experiments.replay import ReplayedRequest
from serving.config_store import DesiredState
from serving.knobs import MIB, Knobs
from tuner.demo_plan import plan
from tuner.demo_view import LiveView, PlainView, shown, sparkline, summary_panel
from tuner.guard import Verdict
from tuner.loop import ArmStep, Interval

KNOBS = Knobs(23 * MIB // 2, 336.0, 0.25)
SUMMARY = {
    "arms": {
        arm: {
            "requests": 5128,
            "hit_ratio": {"value": 0.59, "low": 0.409, "high": 0.772},
            "p99": {"value": 1.83, "low": 1.64, "high": 1.92},
            "cost": {"value": 1.088, "low": 0.627, "high": 1.548},
            "knobs_last": KNOBS.to_dict(),
        }
        for arm in ("control", "treatment")
    },
    "verdict": "no difference shown",
    "reason": "the interval holds 0",
    "complete": True,
    "replay": {"planned": 100, "sent": 98},
}


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=50, color_system=None)


def turn(index: int) -> Interval:
    signals = ArmSignals("x", 0.0, 5.0, requests=300.0, hit_ratio=0.4 + 0.01 * index, p99=math.nan if index == 3 else 1.23)
    cost = Cost(0.3, 0.0, 0.1, 0.01, 0.0, 0.0, 0.0)
    arms = {
        "control": ArmStep("control", KNOBS, signals, cost),
        "treatment": ArmStep("treatment", KNOBS, signals, cost, Proposal(KNOBS, "why"), Verdict(KNOBS, "apply", "applied")),
    }
    return Interval(index, 0.0, DesiredState(7, dict.fromkeys(arms, KNOBS), 0.0), arms, 2, 2, "")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_live_display_shows_every_figure_whole(width: int) -> None:
    console = terminal(width)
    with LiveView(console) as view:
        view.stage("starting")
        view.planned(plan(sessions(1500, 100, seed=0), 30.0), "ppo:suites")
        for index in range(1, 30):
            view.interval(turn(index))
        view.answered(ReplayedRequest(0, 0.0, 0.0, 0.1, 200, "HIT", "memory", "control", ""), 12.0)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    last = drawn[drawn.rindex("interval 29") :]
    for text in ("control", "ppo:suites", "static LRU", "69.0%", "1.23 s", "$0.410", "11.5 MiB · 5.6 min · 25%", "1 of 1,500"):
        assert text in last, last
    assert "…" not in last


def test_the_closing_panel_shows_every_figure_whole_and_what_was_not_sent() -> None:
    console = terminal(80)
    console.print(summary_panel(SUMMARY))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        "59.0%",
        "40.9% to 77.2%",
        "1.64 s to 1.92 s",
        "$0.627 to $1.548",
        "11.5 MiB",
        "2 of 100 requests were not sent: the time was up",
        "--minutes gives it longer",
    ):
        assert text in drawn, drawn
    assert "…" not in drawn


def test_plain_lines_say_the_same() -> None:
    console = Console(file=io.StringIO(), width=80)
    with PlainView(console) as view:
        view.interval(turn(3))
    line = console.file.getvalue()  # type: ignore[attr-defined]
    assert line.count("\n") == 1
    assert "P99 -" in line


def test_a_missing_number_is_a_dash_and_a_gap() -> None:
    assert shown(math.nan, "{:.1%}") == "-"
    assert sparkline([0.0, math.nan, 1.0]) == "▁·█"
    assert sparkline([math.nan]) == ""
