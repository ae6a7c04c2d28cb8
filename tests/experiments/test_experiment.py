import errno
import os
from dataclasses import replace

import orjson
import pytest

from agents.output_file import OutputError
from experiments.access import AccessLogError
from experiments.design import DesignError
from experiments.experiment import end_experiment, experiment_status, report_experiment, start_experiment
from experiments.ledger import Ledger, LedgerError
from experiments.settings import ReportSettings
from tests.experiments.samples import SPACE, START, STATIC, decision, traffic


@pytest.fixture
def ledger(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as opened:
        yield opened


@pytest.fixture
def access_log(tmp_path):
    folder = tmp_path / "access"
    folder.mkdir()
    table = traffic(1, memory=(3.0, 60.0)).astype({"arm": str, "outcome": str, "tier": str})
    for replica, part in enumerate((table[::2], table[1::2])):
        lines = [orjson.dumps(row) for row in part.to_dict("records")]
        (folder / f"access-{replica}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def started(ledger, name="first", **changes):
    values = {"namespace": "demo", "now": START, "knobs": {"control": STATIC, "treatment": STATIC}, "space": SPACE}
    return start_experiment(ledger, name, **{**values, **changes})


def test_an_experiment_goes_from_start_to_its_report_on_disk(ledger, access_log, tmp_path):
    design = started(ledger)
    assert ledger.get_experiment("first") == design
    assert len(design.salt) >= 8
    for at in (40.0, 80.0):
        ledger.record_decision(decision(at, verdict="keep"))
        ledger.record_decision(decision(at, "control", verdict="observe"))
    end_experiment(ledger, "first", now=START + 120.0, reason="time is up")
    written = report_experiment(
        ledger, "first", access_log, tmp_path / "out" / "page.html", settings=ReportSettings(replicates=60)
    )
    assert written.path.read_text("utf-8") == written.report.html
    assert list(written.path.parent.iterdir()) == [written.path]
    assert written.report.summary["verdict"] == "treatment better"
    assert sum(arm["requests"] for arm in written.report.summary["arms"].values()) == 4000
    assert f"--access-log {access_log}" in written.report.html


def test_a_report_for_which_there_is_no_room_leaves_the_older_page(ledger, access_log, tmp_path, monkeypatch):
    started(ledger)
    page = tmp_path / "page.html"
    page.write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"page\.html: cannot be written: No space left on device: free room there"):
        report_experiment(ledger, "first", access_log, page, settings=ReportSettings(replicates=60))
    assert page.read_text() == "old"


def test_the_status_counts_decisions_and_shows_the_latest(ledger):
    started(ledger)
    ledger.record_decision(decision(10.0, verdict="hold"))
    ledger.record_decision(decision(20.0, verdict="apply", p99=None))
    ledger.record_decision(decision(20.0, namespace="other"))
    status = experiment_status(ledger, "first", now=START + 30.0)
    assert status["state"] == "running"
    assert status["seconds"] == 30.0
    assert status["verdicts"] == {"hold": 1, "apply": 1}
    assert status["decisions"] == 2
    assert status["latest"]["treatment"]["seconds_ago"] == 10.0
    assert status["latest"]["treatment"]["replicas"] == "2 of 2"
    assert [event["kind"] for event in status["events"]] == ["experiment_started"]
    orjson.dumps(status)
    end_experiment(ledger, "first", now=START + 60.0)
    status = experiment_status(ledger, "first", now=START + 500.0)
    assert (status["state"], status["seconds"]) == ("ended", 60.0)
    assert [event["kind"] for event in status["events"]] == ["experiment_started", "experiment_ended"]


def test_an_end_is_final(ledger):
    started(ledger)
    ended = end_experiment(ledger, "first", now=START + 60.0)
    assert end_experiment(ledger, "first", now=START + 99.0) == ended


def test_two_experiments_cannot_run_on_the_same_arms(ledger):
    started(ledger)
    with pytest.raises(DesignError, match=r"'first' is still running in namespace 'demo'"):
        started(ledger, "second")
    started(ledger, "elsewhere", namespace="other")
    with pytest.raises(LedgerError, match="already is an experiment"):
        started(ledger)
    end_experiment(ledger, "first", now=START + 1.0)
    started(ledger, "second")


def test_what_does_not_exist_is_named(ledger, tmp_path):
    with pytest.raises(LedgerError, match="no experiment is called 'nothing'"):
        report_experiment(ledger, "nothing", tmp_path, tmp_path / "page.html")
    started(ledger)
    with pytest.raises(AccessLogError, match="is not a directory"):
        report_experiment(ledger, "first", tmp_path / "none", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_prices_of_a_recorded_experiment_can_be_changed_with_their_objective(ledger):
    design = started(ledger)
    changed = ledger.update_experiment("first", prices=replace(design.prices, slo_p99=0.25))
    assert changed.slo == ledger.get_experiment("first").slo == 0.25
