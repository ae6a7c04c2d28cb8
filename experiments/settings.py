"""Settings of everything that makes a claim: the ledger, reports, replay."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LedgerSettings(_Settings):
    """Where decisions and experiments are recorded.

    Attributes:
        url: SQLAlchemy URL: ``sqlite:///path/to/file.db``, ``postgresql+psycopg://user:password@host/database``.
        timeout: Longest wait for another process that is writing, seconds.
    """

    url: str = "sqlite:///cachepilot.db"
    timeout: float = Field(default=10.0, gt=0, le=600)


class ReportSettings(_Settings):
    """How reports compute.

    Attributes:
        confidence: Level of every interval.
        replicates: Bootstrap replicates.
        seed: Seed of the bootstrap: equal inputs give equal reports.
        windows: Number of windows in the charts over time.
    """

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    replicates: int = Field(default=400, ge=50, le=10_000)
    seed: int = Field(default=0, ge=0)
    windows: int = Field(default=24, ge=1, le=500)


class ReplaySettings(_Settings):
    """How traces are replayed against a gateway.

    Attributes:
        max_inflight: Most requests under way at once; a request whose turn comes when the window is full is late.
        timeout: Longest wait for one answer, seconds.
        late_after: A request sent this much after its time counts as late, seconds.
    """

    max_inflight: int = Field(default=256, ge=1, le=100_000)
    timeout: float = Field(default=60.0, gt=0)
    late_after: float = Field(default=0.05, gt=0)


class ExperimentsSettings(_Settings):
    """The part of the settings tree that belongs to experiments.

    Attributes:
        ledger: The ledger.
        report: Reports.
        replay: The load generator.
    """

    ledger: LedgerSettings = LedgerSettings()
    report: ReportSettings = ReportSettings()
    replay: ReplaySettings = ReplaySettings()
