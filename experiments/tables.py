"""The ledger's tables."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Float, Index, Integer, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION = 1


class Base(DeclarativeBase):
    """What all tables share."""


class SchemaRow(Base):
    """The version of the tables; one row."""

    __tablename__ = "schema_version"
    version: Mapped[int] = mapped_column(Integer, primary_key=True)


class ExperimentRow(Base):
    """An experiment and its design."""

    __tablename__ = "experiments"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    namespace: Mapped[str] = mapped_column(String(200), index=True)
    started_at: Mapped[float] = mapped_column(Float)
    design: Mapped[dict[str, Any]] = mapped_column(JSON)


class DecisionRow(Base):
    """One decision of one arm."""

    __tablename__ = "decisions"
    __table_args__ = (Index("decisions_by_namespace_and_time", "namespace", "at"),)
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    namespace: Mapped[str] = mapped_column(String(200))
    arm: Mapped[str] = mapped_column(String(64))
    policy: Mapped[str] = mapped_column(String(200))
    signals: Mapped[dict[str, Any]] = mapped_column(JSON)
    current: Mapped[dict[str, Any]] = mapped_column(JSON)
    proposal: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    verdict: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str] = mapped_column(String)
    applied: Mapped[dict[str, Any]] = mapped_column(JSON)
    version: Mapped[int] = mapped_column(Integer)
    replicas_expected: Mapped[int] = mapped_column(Integer)
    replicas_confirmed: Mapped[int] = mapped_column(Integer)
    cost: Mapped[dict[str, Any]] = mapped_column(JSON)


class EventRow(Base):
    """Something that happened."""

    __tablename__ = "events"
    __table_args__ = (Index("events_by_namespace_and_time", "namespace", "at"),)
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float)
    namespace: Mapped[str] = mapped_column(String(200))
    kind: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(String)
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
