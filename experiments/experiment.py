"""Behind ``cachepilot experiment start | status | report``: an experiment in the ledger, its state, and its report as a file."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.output_file import write_output
from envs.objective import Prices
from experiments.access import read_access_log
from experiments.design import DesignError, Experiment
from experiments.ledger import Ledger
from experiments.measure import Method
from experiments.records import EventRecord, latest_by_arm
from experiments.report import Report, build_report
from experiments.settings import ReportSettings
from serving.knobs import Knobs, KnobSpace


@dataclass(frozen=True)
class WrittenReport:
    """A report on disk.

    Attributes:
        path: The page.
        report: The page's text and summary.
    """

    path: Path
    report: Report


def start_experiment(
    ledger: Ledger,
    name: str,
    *,
    namespace: str,
    now: float,
    control: str = "control",
    treatment: str = "treatment",
    shares: Mapping[str, float] | None = None,
    salt: str | None = None,
    knobs: Mapping[str, Knobs] | None = None,
    space: KnobSpace | None = None,
    prices: Prices | None = None,
    note: str = "",
) -> Experiment:
    """Record a new experiment that begins now.

    Args:
        ledger: Where.
        name: Unique in the ledger.
        namespace: The gateway's namespace.
        now: Seconds since the epoch.
        control: Name of the arm that is compared against.
        treatment: Name of the arm whose effect is asked for.
        shares: Share of the keys by arm; equal if not given.
        salt: The gateway's salt of the split; a random one if not given.
        knobs: Knobs of each arm at the start.
        space: The knob space.
        prices: What things cost.
        note: What a reader of the report has to know.

    Raises:
        DesignError: If the design does not fit, or another experiment is running in the namespace.
        LedgerError: If the name is taken or the ledger cannot be used.
    """
    design = Experiment(
        name=name,
        namespace=namespace,
        control=control,
        treatment=treatment,
        salt=secrets.token_hex(8) if salt is None else salt,
        shares=shares or {},
        started_at=now,
        prices=prices or Prices(),
        note=note,
        knobs=knobs or {},
        space=space or KnobSpace(),
    )
    running = [item.name for item in ledger.experiments() if item.namespace == namespace and item.ended_at is None]
    if running and name not in running:
        raise DesignError(
            f"experiment {name}: {running[0]!r} is still running in namespace {namespace!r}, and both would use the same "
            "arms: end it first, or use another namespace"
        )
    ledger.add_experiment(design)
    ledger.record_event(EventRecord(now, namespace, "experiment_started", f"experiment {name} started", {"experiment": name}))
    return design


def end_experiment(ledger: Ledger, name: str, *, now: float, reason: str = "") -> Experiment:
    """Record that an experiment ends now; one that has ended already stays as it is.

    Raises:
        LedgerError: If there is none of that name.
    """
    design = ledger.get_experiment(name)
    if design.ended_at is not None:
        return design
    ended = ledger.update_experiment(name, ended_at=now)
    message = f"experiment {name} ended" + (f": {reason}" if reason else "")
    ledger.record_event(EventRecord(now, design.namespace, "experiment_ended", message, {"experiment": name}))
    return ended


def experiment_status(ledger: Ledger, name: str, *, now: float) -> dict[str, Any]:
    """Return an experiment's state, JSON-ready: how long it runs, its decisions by verdict, the latest of each arm, its events.

    Raises:
        LedgerError: If there is none of that name.
    """
    design = ledger.get_experiment(name)
    end = design.ended_at
    decisions = ledger.decisions(namespace=design.namespace, since=design.started_at, until=end)
    latest = latest_by_arm([record for record in decisions if record.arm in design.arms])
    return {
        "name": design.name,
        "namespace": design.namespace,
        "state": "running" if end is None else "ended",
        "started_at": design.started_at,
        "ended_at": end,
        "seconds": (now if end is None else end) - design.started_at,
        "shares": dict(design.shares),
        "note": design.note,
        "decisions": len(decisions),
        "verdicts": ledger.count_decisions(namespace=design.namespace, since=design.started_at, until=end),
        "latest": {
            arm: {
                "at": record.at,
                "seconds_ago": now - record.at,
                "policy": record.policy,
                "verdict": record.verdict,
                "reason": record.reason,
                "knobs": record.applied.to_dict(),
                "version": record.version,
                "replicas": f"{record.replicas_confirmed} of {record.replicas_expected}",
                "hit_ratio": record.signals.get("hit_ratio"),
                "p99": record.signals.get("p99"),
                "cost": record.cost.get("total"),
            }
            for arm, record in latest.items()
        },
        "events": [
            {"at": item.at, "kind": item.kind, "message": item.message}
            for item in ledger.events(namespace=design.namespace, since=design.started_at, until=end)
        ],
    }


def report_experiment(
    ledger: Ledger,
    name: str,
    access_log: str | Path,
    output: str | Path,
    *,
    settings: ReportSettings | None = None,
    title: str = "",
    note: str = "",
    command: str = "",
    progress: Callable[[str], None] | None = None,
) -> WrittenReport:
    """Write an experiment's report, whether it has ended or not.

    Args:
        ledger: Where the experiment and its decisions are.
        name: The experiment.
        access_log: Folder of the gateway's access log.
        output: The page to write; its folder is made if missing. A reader never sees half a page.
        settings: How it computes.
        title: Heading; made from the name if empty.
        note: What a reader has to know; the experiment's own if empty.
        command: The command that makes it again; made from the arguments if empty.
        progress: Told in words what is done next.

    Raises:
        LedgerError: If there is no such experiment.
        AccessLogError: If the log is missing or broken.
        OSError: If the page cannot be written; one that was there is left as it was.
    """
    settings = settings or ReportSettings()
    tell = progress or (lambda text: None)
    design = ledger.get_experiment(name)
    tell(f"reading the access log {access_log}")
    until = float("inf") if design.ended_at is None else design.ended_at
    log = read_access_log(access_log, since=design.started_at, until=until)
    tell(f"comparing the arms: {len(log):,} requests, {settings.replicates:,} resamples of their keys")
    report = build_report(
        design,
        ledger.decisions(namespace=design.namespace, since=design.started_at),
        log,
        title=title,
        note=note,
        command=command or _command(ledger, name, access_log, output),
        method=Method(settings.confidence, settings.replicates, settings.seed),
        windows=settings.windows,
    )
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, report.html)
    return WrittenReport(path, report)


def _command(ledger: Ledger, name: str, access_log: str | Path, output: str | Path) -> str:
    words = ["cachepilot", "experiment", "report", name, "--ledger", ledger.url, "--access-log", access_log, "--output", output]
    return shlex.join(str(word) for word in words)
