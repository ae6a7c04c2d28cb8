"""The ledger: the durable record of experiments, decisions and events.

SQLite in WAL mode by default (one writer at a time, readers never wait), PostgreSQL by URL. Several processes may use one ledger
at the same time: a tuner writes while a report reads.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session

from experiments.design import Experiment
from experiments.records import ADMIN, DecisionRecord, EventRecord, audit_record, clean
from experiments.tables import SCHEMA_VERSION, Base, DecisionRow, EventRow, ExperimentRow, SchemaRow
from serving.audit import AuditEvent
from serving.knobs import Knobs


class LedgerError(RuntimeError):
    """The ledger cannot be used; names its URL and what to do."""


class Ledger:
    """A ledger, open until :meth:`close` (or the end of its ``with``). Usable from several threads and processes.

    Args:
        url: SQLAlchemy URL. The folder of a SQLite file is made if it is missing.
        timeout: Longest wait for another process that is writing, seconds.
        create: Whether a new ledger is made where there is none.

    Raises:
        LedgerError: If it cannot be opened, is not a ledger, was written by a newer version, or is not there and not to be made.
    """

    def __init__(self, url: str = "sqlite:///cachepilot.db", *, timeout: float = 10.0, create: bool = True) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise LedgerError(f"ledger {url!r}: not a database URL. Write it as sqlite:///path/to/file.db") from error
        self.url = parsed.render_as_string(hide_password=True)
        self._engine = self._make_engine(parsed, timeout, create)
        try:
            self._open(timeout, create)
        except BaseException:
            self._engine.dispose()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    # -- experiments

    def add_experiment(self, experiment: Experiment) -> None:
        """Record a new experiment.

        Raises:
            LedgerError: If the name is taken.
        """
        try:
            with self._write() as session:
                session.add(
                    ExperimentRow(
                        name=experiment.name,
                        namespace=experiment.namespace,
                        started_at=experiment.started_at,
                        design=experiment.to_dict(),
                    )
                )
        except LedgerError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise LedgerError(
                    f"ledger {self.url}: there already is an experiment {experiment.name!r}: choose another name"
                ) from error
            raise

    def get_experiment(self, name: str) -> Experiment:
        """Return an experiment by its name.

        Raises:
            LedgerError: If there is none; lists the names that there are.
        """
        with self._read() as session:
            row = session.scalar(select(ExperimentRow).where(ExperimentRow.name == name))
            if row is None:
                names = list(session.scalars(select(ExperimentRow.name).order_by(ExperimentRow.started_at.desc()).limit(10)))
                known = f"there are {', '.join(names)}" if names else "it has none yet; `cachepilot experiment start` makes one"
                raise LedgerError(f"ledger {self.url}: no experiment is called {name!r}; {known}")
            return Experiment.from_dict(row.design)

    def experiments(self) -> list[Experiment]:
        """Return all experiments, the newest first."""
        with self._read() as session:
            rows = session.scalars(select(ExperimentRow).order_by(ExperimentRow.started_at.desc(), ExperimentRow.id.desc()))
            return [Experiment.from_dict(row.design) for row in rows]

    def update_experiment(self, name: str, /, **changes: Any) -> Experiment:
        """Change fields of an experiment in one step, for instance ``ended_at=now``.

        Returns:
            The experiment as it is now.

        Raises:
            LedgerError: If there is none of that name, or its name is to be changed.
            DesignError: If a change does not fit.
        """
        if "name" in changes:
            raise LedgerError(
                f"ledger {self.url}: the name of experiment {name!r} cannot be changed: it is how decisions refer to it"
            )
        self.get_experiment(name)
        with self._write() as session:
            row = session.scalars(select(ExperimentRow).where(ExperimentRow.name == name).with_for_update()).one()
            changed = Experiment.from_dict(row.design).changed(**changes)
            row.namespace, row.started_at, row.design = changed.namespace, changed.started_at, changed.to_dict()
        return changed

    # -- decisions and events

    def record_decision(self, record: DecisionRecord) -> None:
        """Append a decision."""
        row = DecisionRow(
            at=float(record.at),
            namespace=record.namespace,
            arm=record.arm,
            policy=record.policy,
            signals=clean(record.signals),
            current=record.current.to_dict(),
            proposal=None if record.proposal is None else record.proposal.to_dict(),
            verdict=record.verdict,
            reason=record.reason,
            applied=record.applied.to_dict(),
            version=int(record.version),
            replicas_expected=int(record.replicas_expected),
            replicas_confirmed=int(record.replicas_confirmed),
            cost=clean(record.cost),
        )
        with self._write() as session:
            session.add(row)

    def decisions(
        self,
        *,
        namespace: str | None = None,
        arm: str | None = None,
        since: float | None = None,
        until: float | None = None,
        last: int | None = None,
    ) -> list[DecisionRecord]:
        """Return decisions in order of time.

        Args:
            namespace: Only of this namespace.
            arm: Only of this arm.
            since: Not before, seconds since the epoch.
            until: Not after, seconds since the epoch.
            last: At most so many, the newest.
        """
        query = select(DecisionRow).order_by(DecisionRow.at.desc(), DecisionRow.id.desc())
        if namespace is not None:
            query = query.where(DecisionRow.namespace == namespace)
        if arm is not None:
            query = query.where(DecisionRow.arm == arm)
        if since is not None:
            query = query.where(DecisionRow.at >= since)
        if until is not None:
            query = query.where(DecisionRow.at <= until)
        if last is not None:
            query = query.limit(last)
        with self._read() as session:
            return [_decision(row) for row in reversed(list(session.scalars(query)))]

    def count_decisions(self, *, namespace: str, since: float = 0.0, until: float | None = None) -> dict[str, int]:
        """Return the number of decisions of a namespace by the guard's verdict."""
        query = select(DecisionRow.verdict, func.count()).where(DecisionRow.namespace == namespace, DecisionRow.at >= since)
        if until is not None:
            query = query.where(DecisionRow.at <= until)
        with self._read() as session:
            return {str(verdict): int(count) for verdict, count in session.execute(query.group_by(DecisionRow.verdict))}

    def record_event(self, record: EventRecord) -> None:
        """Append an event."""
        with self._write() as session:
            session.add(_event_row(record))

    def events(self, *, namespace: str | None = None, since: float = 0.0, until: float | None = None) -> list[EventRecord]:
        """Return events in order of time."""
        query = select(EventRow).where(EventRow.at >= since).order_by(EventRow.at, EventRow.id)
        if namespace is not None:
            query = query.where(EventRow.namespace == namespace)
        if until is not None:
            query = query.where(EventRow.at <= until)
        with self._read() as session:
            return [EventRecord(row.at, row.namespace, row.kind, row.message, row.details) for row in session.scalars(query)]

    # -- what operators did

    def record_audit(self, namespace: str, events: Sequence[tuple[str, AuditEvent]]) -> int:
        """Append what operators did by the admin API as events of the kind :data:`ADMIN`, each once.

        Args:
            namespace: The gateway's namespace.
            events: The oldest first, with their identifiers (:meth:`serving.audit.RedisAudit.read`).

        Returns:
            How many were new: not beyond :meth:`audited` before.
        """
        with self._write() as session:
            last = _position(_last_audited(session, namespace))
            fresh = [(identifier, item) for identifier, item in events if _position(identifier) > last]
            session.add_all(_event_row(audit_record(namespace, identifier, item)) for identifier, item in fresh)
        return len(fresh)

    def audited(self, namespace: str) -> str:
        """Return the identifier of the newest event that :meth:`record_audit` has recorded of a namespace; ``""``: none."""
        with self._read() as session:
            return _last_audited(session, namespace)

    # -- the database

    def _make_engine(self, url: URL, timeout: float, create: bool) -> Engine:
        sqlite = url.get_backend_name() == "sqlite"
        if sqlite and url.database and url.database != ":memory:" and not url.database.startswith("file:"):
            if not create and not Path(url.database).exists():
                raise self._absent()
            try:
                Path(url.database).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LedgerError(
                    f"ledger {self.url}: cannot make its folder: {error}. Set ledger.url to a writable place"
                ) from error
        try:
            engine = create_engine(url, connect_args={"timeout": timeout} if sqlite else {}, pool_pre_ping=not sqlite)
        except (NoSuchModuleError, ImportError) as error:
            raise LedgerError(
                f"ledger {self.url}: the driver is not installed ({error}): install it (for PostgreSQL: "
                "pip install 'psycopg[binary]' and postgresql+psycopg://... as the URL), or use sqlite:///path/to/file.db"
            ) from error
        if sqlite:
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _open(self, timeout: float, create: bool) -> None:
        """Make the tables of a new ledger (``create``), or check the version of an old one. One process at a time does so."""
        if self._engine.dialect.name == "sqlite":
            self._enter_wal(timeout)
        with self._write() as session:
            connection = session.connection()
            if self._engine.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(7239815)"))
            tables = set(inspect(connection).get_table_names())
            if SchemaRow.__tablename__ not in tables:
                clash = tables & set(Base.metadata.tables)
                if clash:
                    raise LedgerError(
                        f"ledger {self.url}: the database has tables {sorted(clash)} that are not a ledger's: "
                        "set ledger.url to a database of its own"
                    )
                if not create:
                    raise self._absent()
                Base.metadata.create_all(connection)
                session.add(SchemaRow(version=SCHEMA_VERSION))
                return
            version = session.scalar(select(func.max(SchemaRow.version)))
            if version != SCHEMA_VERSION:
                raise LedgerError(
                    f"ledger {self.url}: it has schema {version}, this cachepilot knows {SCHEMA_VERSION}: "
                    f"{'upgrade cachepilot' if (version or 0) > SCHEMA_VERSION else 'use the cachepilot that wrote it'}, "
                    "or set ledger.url to another database"
                )

    def _enter_wal(self, timeout: float) -> None:
        # SQLite does not wait for a lock when it changes the journal mode: processes that open a new ledger together must retry.
        deadline = time.monotonic() + timeout
        while True:
            try:
                connection = self._engine.raw_connection()
                try:
                    connection.cursor().execute("PRAGMA journal_mode=WAL")
                finally:
                    connection.close()
                return
            except (SQLAlchemyError, sqlite3.Error) as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise self._error(error) from error
                time.sleep(0.01)

    @contextmanager
    def _read(self) -> Iterator[Session]:
        try:
            with Session(self._engine) as session:
                yield session
        except SQLAlchemyError as error:
            raise self._error(error) from error

    @contextmanager
    def _write(self) -> Iterator[Session]:
        try:
            with Session(self._engine.execution_options(cachepilot_writes=True)) as session, session.begin():
                yield session
        except SQLAlchemyError as error:
            raise self._error(error) from error

    def _absent(self) -> LedgerError:
        return LedgerError(
            f"ledger {self.url}: there is none yet: `cachepilot experiment start` or `cachepilot tune` makes one; if yours is "
            "elsewhere, set experiments.ledger.url to it"
        )

    def _error(self, error: Exception) -> LedgerError:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        if "locked" in cause:
            fix = "another process has been writing for too long: end it, or raise ledger.timeout"
        elif "not a database" in cause or "malformed" in cause:
            fix = "the file is not a SQLite database: set ledger.url to another file, or restore this one"
        elif "unable to open" in cause or "readonly" in cause or "read-only" in cause:
            fix = "check that the file and its folder may be written, or set ledger.url to another place"
        else:
            fix = "check that the database is there and may be used, or set ledger.url"
        return LedgerError(f"ledger {self.url}: {cause}: {fix}")


def _event_row(record: EventRecord) -> EventRow:
    return EventRow(
        at=float(record.at),
        namespace=record.namespace,
        kind=record.kind,
        message=record.message,
        details=clean(record.details),
    )


def _last_audited(session: Session, namespace: str) -> str:
    query = select(EventRow.details).where(EventRow.namespace == namespace, EventRow.kind == ADMIN)
    details = session.scalar(query.order_by(EventRow.id.desc()).limit(1))
    return str(details.get("audit", "")) if details else ""


def _position(identifier: str) -> tuple[int, int]:
    """An identifier of Redis' streams, milliseconds and a number, in the order in which they grow."""
    milliseconds, _, number = identifier.partition("-")
    return int(milliseconds or -1), int(number or 0)


def _decision(row: DecisionRow) -> DecisionRecord:
    return DecisionRecord(
        at=row.at,
        namespace=row.namespace,
        arm=row.arm,
        policy=row.policy,
        signals=row.signals,
        current=Knobs.from_dict(row.current),
        proposal=None if row.proposal is None else Knobs.from_dict(row.proposal),
        verdict=row.verdict,
        reason=row.reason,
        applied=Knobs.from_dict(row.applied),
        version=row.version,
        replicas_expected=row.replicas_expected,
        replicas_confirmed=row.replicas_confirmed,
        cost=row.cost,
    )


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver's own transactions begin too late to protect a read before a write; SQLAlchemy begins them instead (below).
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A write takes its lock at once: a read lock that is raised later fails instead of waiting.
    writes = connection.get_execution_options().get("cachepilot_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
