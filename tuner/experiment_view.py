"""An experiment's state as lines for people; programs read the JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from serving.knobs import Knobs
from tuner.demo_view import knobs_text, shown


def moment(at: float | None) -> str:
    """Return a time (Unix seconds) as the local date and time; a dash for none."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def with_moments(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with ``started_at`` and ``ended_at`` as dates."""
    return {name: moment(value) if name in {"started_at", "ended_at"} else value for name, value in found.items()}


def status_rows(status: Mapping[str, Any]) -> dict[str, str]:
    """Return what is shown of an experiment's state, by its label.

    Args:
        status: What ``experiments.experiment.experiment_status`` returns.
    """
    ended = "" if status["ended_at"] is None else f" to {moment(status['ended_at'])}"
    verdicts = ", ".join(f"{name} {count}" for name, count in status["verdicts"].items())
    rows = {
        "experiment": status["name"],
        "namespace": status["namespace"],
        "state": f"{status['state']}, {moment(status['started_at'])}{ended} ({status['seconds']:,.0f} s)",
        "shares": ", ".join(f"{arm} {share:.0%}" for arm, share in status["shares"].items()),
        "note": status["note"],
        "decisions": f"{status['decisions']}" + (f": {verdicts}" if verdicts else ""),
    }
    for arm, latest in status["latest"].items():
        rows[f"arm {arm}"] = (
            f"{knobs_text(Knobs.from_dict(latest['knobs']))}; hits {shown(latest['hit_ratio'], '{:.1%}')}, "
            f"P99 {shown(latest['p99'], '{:.2f} s')}, cost {shown(latest['cost'], '${:.4f}')}\n"
            f"{latest['seconds_ago']:,.0f} s ago, by {latest['policy']}: {latest['reason']}; "
            f"{latest['replicas']} replicas on version {latest['version']}"
        )
    rows["events"] = "\n".join(f"{moment(event['at'])}  {event['message']}" for event in status["events"])
    return {name: text for name, text in rows.items() if text}
