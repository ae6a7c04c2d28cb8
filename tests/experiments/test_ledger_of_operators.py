"""What operators did by the admin API is in the ledger, each once, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.design import Experiment
from experiments.experiment import experiment_status
from experiments.ledger import Ledger
from experiments.records import ADMIN, EventRecord, audit_record
from serving.audit import AuditEvent

FLUSH = AuditEvent(100.0, "0a1b2c3d", "flush", {"where": {"tag": "prices"}, "removed": 7})


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


def events(*identifiers: str) -> list[tuple[str, AuditEvent]]:
    return [(identifier, FLUSH) for identifier in identifiers]


def test_an_event_is_recorded_with_its_words_and_its_detail(ledger: Ledger) -> None:
    assert ledger.record_audit("demo", [("5-0", FLUSH)]) == 1
    (found,) = ledger.events(namespace="demo")
    assert (found.at, found.kind, found.message) == (100.0, ADMIN, "flush by 0a1b2c3d: where tag='prices', removed 7")
    assert found.details == {"audit": "5-0", "actor": "0a1b2c3d", "action": "flush", "detail": dict(FLUSH.detail)}


def test_a_flush_of_everything_is_said_to_be_one() -> None:
    event = AuditEvent(1.0, "a", "flush", {"where": {}, "removed": 2})
    assert audit_record("demo", "1-0", event).message == "flush by a: where everything, removed 2"
    assert audit_record("demo", "1-0", AuditEvent(1.0, "a", "read")).message == "read by a"


def test_what_is_recorded_already_is_not_recorded_again(ledger: Ledger) -> None:
    assert ledger.audited("demo") == ""
    assert ledger.record_audit("demo", events("9-0", "10-0", "10-1")) == 3
    assert ledger.audited("demo") == "10-1"
    ledger.record_event(EventRecord(101.0, "demo", "experiment_started", "other events do not move it"))
    assert ledger.record_audit("demo", events("9-0", "10-1", "10-2", "11-0")) == 2
    assert [item.details["audit"] for item in ledger.events() if item.kind == ADMIN] == ["9-0", "10-0", "10-1", "10-2", "11-0"]
    assert ledger.record_audit("demo", []) == 0


def test_namespaces_have_positions_of_their_own(ledger: Ledger) -> None:
    ledger.record_audit("demo", events("9-0"))
    assert ledger.audited("other") == ""
    assert ledger.record_audit("other", events("3-0")) == 1
    assert ledger.audited("demo") == "9-0"


def test_two_processes_that_carry_the_same_record_it_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger(url) as first, Ledger(url) as second:
        assert (first.audited("demo"), second.audited("demo")) == ("", "")
        assert (first.record_audit("demo", events("1-0", "2-0")), second.record_audit("demo", events("1-0", "2-0"))) == (2, 0)


def test_an_experiments_status_shows_what_was_done_meanwhile(ledger: Ledger) -> None:
    made = Experiment("first", "demo", started_at=90.0)
    ledger.add_experiment(made)
    ledger.record_audit(made.namespace, [("1-0", AuditEvent(95.0, "a", "flush", {"removed": 1}))])
    shown = experiment_status(ledger, made.name, now=100.0)["events"]
    assert [(item["kind"], item["message"]) for item in shown] == [(ADMIN, "flush by a: removed 1")]
    json.dumps(shown, allow_nan=False)
