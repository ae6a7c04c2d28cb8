"""What `cachepilot experiment status` shows people: dates, knobs in words and rounded figures, each arm on lines of its own."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tuner.experiment_view import moment, status_rows, with_moments


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def status(**changed: Any) -> dict[str, Any]:
    latest = {
        "at": 1_800_000_050.0, "seconds_ago": 9.296810150146484, "policy": "ppo:suites", "verdict": "limit",
        "reason": "limited: step limit on cache_size", "knobs": {"cache_size": 3 << 20, "ttl": None, "warmup_ratio": 0.1},
        "version": 3, "replicas": "1 of 2", "hit_ratio": 0.5333333333333333, "p99": None, "cost": 2.2221837708228,
    }  # fmt: skip
    return {
        "name": "spring", "namespace": "shop", "state": "running", "started_at": 1_800_000_000.0, "ended_at": None,
        "seconds": 61.4, "shares": {"control": 0.5, "treatment": 0.5}, "note": "", "decisions": 3,
        "verdicts": {"limit": 2, "hold": 1}, "latest": {"treatment": latest},
        "events": [{"at": 1_800_000_000.0, "kind": "experiment_started", "message": "experiment spring started"}],
        **changed,
    }  # fmt: skip


def test_dates_knobs_and_figures_are_in_words() -> None:
    assert status_rows(status()) == {
        "experiment": "spring",
        "namespace": "shop",
        "state": "running, 2027-01-15 08:00:00 (61 s)",
        "shares": "control 50%, treatment 50%",
        "decisions": "3: limit 2, hold 1",
        "arm treatment": (
            "3 MiB · never · 10%; hits 53.3%, P99 -, cost $2.2222\n"
            "9 s ago, by ppo:suites: limited: step limit on cache_size; 1 of 2 replicas on version 3"
        ),
        "events": "2027-01-15 08:00:00  experiment spring started",
    }


def test_what_has_ended_says_when_and_one_without_decisions_says_so() -> None:
    rows = status_rows(status(state="ended", ended_at=1_800_000_060.0, decisions=0, verdicts={}, latest={}, note="why"))
    assert rows["state"] == "ended, 2027-01-15 08:00:00 to 2027-01-15 08:01:00 (61 s)"
    assert (rows["decisions"], rows["note"]) == ("0", "why")
    assert not [name for name in rows if name.startswith("arm")]


def test_times_in_a_list_are_dates_and_a_missing_one_is_a_dash() -> None:
    found = with_moments({"experiment": "spring", "started_at": 1_800_000_000.0, "ended_at": None})
    assert found == {"experiment": "spring", "started_at": moment(1_800_000_000.0), "ended_at": "-"}
