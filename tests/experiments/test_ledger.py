import math
import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from envs.signals import ArmSignals
from experiments.design import Experiment
from experiments.ledger import Ledger, LedgerError
from experiments.records import DecisionRecord, EventRecord, ghost_from_dict, latest_by_arm, signals_to_dict
from serving.ghost import GhostCurve
from serving.knobs import Knobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/folder/ledger.db"


def decision(at=1.0, arm="treatment", **changes):
    values = {
        "namespace": "demo",
        "policy": "ppo",
        "signals": {"hit_ratio": 0.5},
        "current": Knobs(1 << 20, 60.0, 0.1),
        "proposal": Knobs(1 << 21, math.inf, 0.2),
        "verdict": "apply",
        "reason": "applied as proposed",
        "applied": Knobs(1 << 21, math.inf, 0.2),
        "version": 2,
        "replicas_expected": 2,
        "replicas_confirmed": 1,
        "cost": {"tokens": 0.25, "total": 0.5},
    }
    return DecisionRecord(at=at, arm=arm, **{**values, **changes})


def test_a_decision_is_read_back_as_written(url):
    with Ledger(url) as ledger:
        ledger.record_decision(decision())
        ledger.record_decision(decision(2.0, proposal=None, verdict="hold"))
    with Ledger(url) as ledger:
        assert ledger.decisions() == [decision(), decision(2.0, proposal=None, verdict="hold")]


def test_decisions_are_filtered_and_ordered_by_time(url):
    with Ledger(url) as ledger:
        for at in (3.0, 1.0, 2.0):
            ledger.record_decision(decision(at))
            ledger.record_decision(decision(at, arm="control", verdict="keep"))
        ledger.record_decision(decision(2.5, namespace="other"))
        assert [record.at for record in ledger.decisions(namespace="demo", arm="control")] == [1.0, 2.0, 3.0]
        assert [record.at for record in ledger.decisions(since=2.0, until=2.5, arm="treatment")] == [2.0, 2.5]
        assert [record.at for record in ledger.decisions(namespace="demo", arm="control", last=2)] == [2.0, 3.0]
        assert ledger.count_decisions(namespace="demo") == {"apply": 3, "keep": 3}
        assert ledger.count_decisions(namespace="demo", since=2.0, until=2.0) == {"apply": 1, "keep": 1}
        latest = latest_by_arm(ledger.decisions(namespace="demo"))
        assert {arm: record.at for arm, record in latest.items()} == {"control": 3.0, "treatment": 3.0}


def test_signals_keep_what_is_missing_apart_from_zero(url):
    curve = GhostCurve(
        np.array([10, 20]), np.array([1.0, 2.0, 3.0]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), np.zeros((2, 3)), 9.0
    )
    signals = ArmSignals(
        "treatment", 5.0, 2.0, requests=np.float64(7.0), p50=0.0, hit_ratio_by_tier={"memory": 0.25}, ghost=curve
    )
    with Ledger(url) as ledger:
        ledger.record_decision(decision(signals=signals_to_dict(signals)))
        recorded = ledger.decisions()[0].signals
    assert recorded["p99"] is None
    assert recorded["p50"] == 0.0
    assert recorded["requests"] == 7.0
    assert recorded["hit_ratio_by_tier"] == {"memory": 0.25}
    read = ghost_from_dict(recorded)
    np.testing.assert_array_equal(read.hits, curve.hits)
    assert read.requests == 9.0
    assert ghost_from_dict(signals_to_dict(ArmSignals("a", 0.0, 1.0))) is None
    assert ghost_from_dict({"ghost": {**recorded["ghost"], "hits": [[1.0]]}}) is None


def test_experiments_are_added_found_changed_and_unique(url):
    design = Experiment("first", "demo", started_at=1.0)
    with Ledger(url) as ledger:
        ledger.add_experiment(design)
        ledger.add_experiment(Experiment("second", "demo", started_at=2.0))
        assert ledger.get_experiment("first") == design
        assert [item.name for item in ledger.experiments()] == ["second", "first"]
        changed = ledger.update_experiment("first", ended_at=9.0, note="done")
        assert changed == ledger.get_experiment("first")
        assert changed.ended_at == 9.0
        with pytest.raises(LedgerError, match="already is an experiment 'first'"):
            ledger.add_experiment(design)
        with pytest.raises(LedgerError, match="no experiment is called 'third'; there are second, first"):
            ledger.get_experiment("third")
        with pytest.raises(LedgerError, match="cannot be changed"):
            ledger.update_experiment("first", name="other")


def test_events_are_kept_in_order(url):
    with Ledger(url) as ledger:
        ledger.record_event(EventRecord(2.0, "demo", "end", "ended", {"why": "time", "share": math.nan}))
        ledger.record_event(EventRecord(1.0, "demo", "start", "started"))
        ledger.record_event(EventRecord(1.5, "other", "start", "started"))
        assert [item.kind for item in ledger.events(namespace="demo")] == ["start", "end"]
        assert ledger.events(since=2.0)[0].details == {"why": "time", "share": None}


def test_several_processes_open_a_new_ledger_and_write_to_it_together(url):
    script = (
        "import sys\n"
        "from tests.experiments.test_ledger import decision\n"
        "from experiments.ledger import Ledger\n"
        "with Ledger(sys.argv[1], timeout=60) as ledger:\n"
        "    for number in range(25):\n"
        "        ledger.record_decision(decision(float(number), arm=sys.argv[2]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", script, url, arm], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for arm in ("control", "treatment")
    ]
    try:
        for writer in writers:
            _, errors = writer.communicate(timeout=90)
            assert writer.returncode == 0, errors
    finally:
        for writer in writers:
            writer.kill()
    with Ledger(url) as ledger:
        for arm in ("control", "treatment"):
            assert [record.at for record in ledger.decisions(arm=arm)] == [float(number) for number in range(25)]


def test_threads_share_one_ledger(url):
    with Ledger(url) as ledger, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ledger.record_decision(decision(float(number))), range(40)))
        assert len(ledger.decisions()) == 40


def test_a_reader_is_not_held_up_by_a_writer(url):
    with Ledger(url) as writer, Ledger(url) as reader:
        writer.record_decision(decision())
        with writer._write() as session:
            session.connection()
            assert len(reader.decisions()) == 1


def test_a_ledger_that_is_locked_for_too_long_says_so(url, tmp_path):
    with Ledger(url, timeout=0.05) as ledger:
        other = sqlite3.connect(tmp_path / "folder" / "ledger.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            with pytest.raises(LedgerError, match=r"writing for too long.*ledger\.timeout"):
                ledger.record_decision(decision())
        finally:
            other.close()
        ledger.record_decision(decision())
        assert len(ledger.decisions()) == 1


def test_a_newer_schema_is_refused(url, tmp_path):
    Ledger(url).close()
    with sqlite3.connect(tmp_path / "folder" / "ledger.db") as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(LedgerError, match="schema 99, this cachepilot knows 1: upgrade cachepilot"):
        Ledger(url)


def test_a_database_of_something_else_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE events (x)")
    with pytest.raises(LedgerError, match="not a ledger's"):
        Ledger(f"sqlite:///{tmp_path}/other.db")


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("this is not a database, but long enough to be looked at as one" * 20)
    with pytest.raises(LedgerError, match=r"text\.db.*not a SQLite database"):
        Ledger(f"sqlite:///{tmp_path}/text.db")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "not a database URL"),
        ("oracle9://x/y", "driver is not installed"),
        ("sqlite:////proc/nowhere/ledger.db", "writable place"),
    ],
)
def test_a_ledger_that_cannot_be_opened_names_the_url_and_the_fix(url, words):
    with pytest.raises(LedgerError, match=words) as caught:
        Ledger(url)
    assert url in str(caught.value)


def test_a_ledger_that_is_only_to_be_read_is_not_made(url, tmp_path):
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"folder/ledger\.db: there is none yet: `cachepilot exper.*ledger\.url"):
            Ledger(url, create=False)
    assert not list(tmp_path.iterdir())
    with Ledger(url) as ledger:
        ledger.record_decision(decision())
    with Ledger(url, create=False) as ledger:
        assert ledger.decisions() == [decision()]


def test_a_database_without_a_ledger_stays_without_one_where_it_is_only_to_be_read(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    with pytest.raises(LedgerError, match="there is none yet"):
        Ledger(f"sqlite:///{path}", create=False)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_a_password_is_not_shown():
    with pytest.raises(LedgerError) as caught:
        Ledger("oracle9://user:secret@host/y")
    assert "secret" not in str(caught.value)
