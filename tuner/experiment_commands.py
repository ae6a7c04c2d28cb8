"""`cachepilot experiment ...`: the experiment's functions, fed from the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.experiment import end_experiment, experiment_status, report_experiment
from experiments.experiment import start_experiment as begin
from experiments.ledger import Ledger
from experiments.records import ADMIN
from tuner.config import Settings
from tuner.errors import CommandError

LATEST_CHANGES = 20
"""Of operators' changes, how many are shown."""


def start_experiment(settings: Settings, name: str, *, control: str, treatment: str, note: str, now: float) -> dict[str, Any]:
    """Record that an experiment begins now; arms, split, knob space and prices are those of the settings.

    Raises:
        CommandError: If the gateway does not have the two arms, or keeps no access log to make a report of.
    """
    gateway = settings.gateway
    absent = sorted({control, treatment} - set(gateway.arms))
    if absent:
        raise CommandError(f"experiment {name}: the gateway has no arm {absent[0]!r}; gateway.arms are {sorted(gateway.arms)}")
    if gateway.access_log is None:
        raise CommandError(f"experiment {name}: gateway.access_log is not set; a report is made of the access log: set a folder")
    with _ledger(settings, create=True) as ledger:
        design = begin(
            ledger,
            name,
            namespace=gateway.namespace,
            now=now,
            control=control,
            treatment=treatment,
            shares=gateway.shares,
            salt=gateway.salt,
            knobs=gateway.initial_knobs,
            space=gateway.space.space(),
            prices=settings.prices,
            note=note,
        )
        return {"experiment": design.name, "namespace": design.namespace, "started_at": design.started_at, "state": "running"}


def status(settings: Settings, name: str | None, *, now: float) -> dict[str, Any]:
    """Return how one experiment stands; without a name the list of all, and what operators changed last by the admin API.

    Raises:
        LedgerError: If there is no ledger, or no such experiment in it.
    """
    with _ledger(settings) as ledger:
        if name is not None:
            return experiment_status(ledger, name, now=now)
        namespace = settings.gateway.namespace
        changes = [item for item in ledger.events(namespace=namespace) if item.kind == ADMIN]
        return {
            "experiments": [
                {
                    "experiment": item.name,
                    "namespace": item.namespace,
                    "state": "running" if item.ended_at is None else "ended",
                    "started_at": item.started_at,
                    "ended_at": item.ended_at,
                }
                for item in ledger.experiments()
            ],
            "changes": [{"at": item.at, "message": item.message} for item in changes[-LATEST_CHANGES:]],
            "earlier_changes": max(0, len(changes) - LATEST_CHANGES),
        }


def stop_experiment(settings: Settings, name: str, *, now: float) -> dict[str, Any]:
    """Record that an experiment ends now."""
    with _ledger(settings) as ledger:
        design = end_experiment(ledger, name, now=now, reason="ended by hand")
        return {"experiment": design.name, "state": "ended", "ended_at": design.ended_at}


def write_report(
    settings: Settings, name: str, output: Path, *, command: str, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Write the page; return its summary with ``report``, the page's path. ``progress`` is told what is done next."""
    if settings.gateway.access_log is None:
        raise CommandError(f"experiment {name}: gateway.access_log is not set: name the folder of the gateway's access log")
    with _ledger(settings) as ledger:
        written = report_experiment(
            ledger, name, settings.gateway.access_log, output, settings=settings.experiments.report, command=command,
            progress=progress,
        )  # fmt: skip
    return {**written.report.summary, "report": str(written.path.resolve())}


def _ledger(settings: Settings, *, create: bool = False) -> Ledger:
    return Ledger(settings.experiments.ledger.url, timeout=settings.experiments.ledger.timeout, create=create)
